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
    SpecError,
    TemporalDictTensor,
    UsageError,
)

from support.agents import (
    FunctionAgent,
    InfoEcho,
    StepCounter,
    zeros,
)
from support.envs import (
    CountingEnv,
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


def test_agent_info_may_change_between_windows_without_a_reset() -> None:
    """The state of an episode stays, but for one that begins with the window."""

    def ids(window: Any) -> list[Any]:
        told = window.info["agent_info/id"].tolist() if "agent_info/id" in window.info else None
        return [window["info_id"].tolist(), window["first_id"][:, 0].tolist(), told]

    with make(2, agent=InfoEcho, restarts=True) as batcher:
        batcher.reset({"id": [1, 2, 3]}, info_of([9, 2, 3]))
        batcher.execute()
        given = torch.tensor([4, 5, 6])
        batcher.execute({"id": given})
        given.fill_(0)  # it was copied
        batcher.execute()
        batcher.execute(agent_info={})
        found = [batcher.get() for _ in range(4)]
        with pytest.raises(SpecError, match="'id' in agent_info has 2 rows, 3 were expected"):
            batcher.execute({"id": [1, 2]})
        batcher.execute({"id": 7, "other": 0.5})
        found.append(batcher.get())
    assert [ids(window) for window in found] == [
        [[[1, 1], [2, 2], [3, 3]], [1, 2, 3], [1, 2, 3]],
        [[[4, 4], [5, 5], [6, 6]], [1, 5, 3], [4, 5, 6]],
        [[[4, 4], [5, 5], [6, 6]], [1, 5, 6], [4, 5, 6]],
        [[[-1, -1]] * 3, [1, -1, -1], None],
        [[[7, 7]] * 3, [1, 7, -1], [7, 7, 7]],
    ]
    assert found[4].info["agent_info/other"].tolist() == [0.5] * 3


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


@pytest.mark.promise("I3")
def test_the_step_of_an_error_counts_from_the_last_restart() -> None:
    class Env(CountingEnv):
        n_steps = 0

        def step(self, action: Any) -> Any:
            self.n_steps += 1
            if self.n_steps == 9:
                raise KeyError("goal")
            return super().step(action)

    with make(4, create_env=lambda seed: GymEnvInf([Env(length=3)], seed)) as batcher:
        batcher.reset()
        with pytest.raises(EnvError) as caught:
            windows(batcher, 3)
        assert caught.value.where.step == 2


def test_an_error_at_a_reset_is_reported() -> None:
    envs = [FailingEnv(KeyError("goal"), "reset", fails_at=2)]
    with make(3, create_env=lambda seed: GymEnv(envs, seed)) as batcher:
        batcher.reset(env_info=DictTensor({"id": torch.tensor([2])}))
        with pytest.raises(EnvError, match=r"env\.reset raised KeyError"):
            windows(batcher, 1)
