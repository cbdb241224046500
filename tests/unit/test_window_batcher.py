"""Batcher: fixed windows of every running lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlpool import (
    AgentError,
    Batcher,
    DictTensor,
    EnvError,
    GymEnv,
    GymEnvInf,
    TemporalDictTensor,
    UsageError,
)

from support.agents import (
    FunctionAgent,
    StepCounter,
    zeros,
)
from support.envs import (
    FailingEnv,
    create_counting,
)


def make(
    n_timesteps: int = 3, n_envs: int = 3, agent: Any = StepCounter, **changes: Any
) -> Batcher:
    env_args = {"n_envs": n_envs, "restarts": changes.pop("restarts", False)}
    arguments: dict[str, Any] = {"create_env": create_counting, "env_args": env_args, "seeds": 0}
    if "create_env" in changes:
        arguments["env_args"] = {}
    return Batcher(n_timesteps, create_agent=agent, n_threads=0, **{**arguments, **changes})


def info_of(lengths: Sequence[int]) -> DictTensor:
    return DictTensor({"length": torch.tensor(lengths), "id": torch.arange(1, len(lengths) + 1)})


def windows(batcher: Batcher, n: int) -> list[TemporalDictTensor]:
    """Up to ``n`` windows, until the lanes have stopped."""
    found: list[TemporalDictTensor] = []
    while len(found) < n:
        batcher.execute()
        if (window := batcher.get()) is None:
            break
        found.append(window)
    return found


# Windows of lanes that end --------------------------------------------------------------------


def test_get_is_none_once_all_lanes_have_stopped() -> None:
    with make(3) as batcher:
        for lengths in ([2, 2, 2], [3, 3, 3]):
            batcher.reset(env_info=info_of(lengths))
            batcher.execute()
            batcher.execute()  # requested before it is known that there is none
            assert not batcher.all_stopped
            while (window := batcher.get(blocking=False)) is None:
                assert not batcher.all_stopped  # it is just not there yet
            assert window.lengths.tolist() == lengths
            assert batcher.get() is None
            for blocking in (True, False):
                batcher.execute()
                assert batcher.all_stopped
                with pytest.raises(UsageError, match=r"reset\(\)(.|\n)*GymEnvInf"):
                    batcher.get(blocking=blocking)


# Lanes that restart on their own --------------------------------------------------------------


# The order of calls ---------------------------------------------------------------------------


def test_calls_out_of_order_are_usage_errors() -> None:
    with make() as batcher:
        for call in (batcher.execute, batcher.get):
            with pytest.raises(UsageError):
                call()
        batcher.reset()
        with pytest.raises(UsageError, match="execute"):
            batcher.get()
        batcher.execute()
    batcher.close()
    for call in (
        batcher.reset,
        batcher.execute,
        batcher.get,
        lambda: batcher.update({}),
        lambda: batcher.all_stopped,
        lambda: batcher.n_lanes,
    ):
        with pytest.raises(UsageError, match="closed"):
            call()


# Errors ---------------------------------------------------------------------------------------


def raising_agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
    if (observation["frame"][:, 0] == 4).any():
        raise KeyError("goal")
    return DictTensor(), DictTensor({"action": zeros(observation)}), DictTensor()


@pytest.mark.promise("I3")
@pytest.mark.parametrize(
    ("kind", "error", "text", "lane"),
    [
        (GymEnv, EnvError, "KeyError: 'goal'", 1),
        (GymEnvInf, EnvError, "KeyError: 'goal'", 1),
        (None, AgentError, "the agent raised KeyError: 'goal'", 0),
    ],
)
def test_an_error_says_where_and_a_reset_repairs_it(
    kind: Any, error: Any, text: str, lane: int
) -> None:
    changes: dict[str, Any] = {"agent": lambda: FunctionAgent(raising_agent)}
    if kind is not None:
        envs = [FailingEnv(KeyError("goal"), "step", fails_at=2, step=4) for _ in range(3)]
        changes = {"create_env": lambda seed: kind(envs, seed)}
    with make(3, **changes) as batcher:
        batcher.reset(env_info=info_of([9, 9, 9]))
        windows(batcher, 1)
        batcher.execute()
        with pytest.raises(error, match=text) as caught:
            batcher.get()
        where = caught.value.where
        assert (where.worker, where.lane, where.step) == (0, lane, 4)
        assert where.env_info == {"length": 9, "id": lane + 1}
        with pytest.raises(UsageError, match="reset"):
            windows(batcher, 1)
        batcher.reset(env_info=info_of([3, 4, 2]))
        (window,) = windows(batcher, 1)
        assert window["frame"][:, 0].tolist() == [[0, 1], [0, 2], [0, 3]]
