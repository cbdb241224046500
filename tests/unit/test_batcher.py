"""Both batchers in this process: order of calls, ownership of results, starts, ends, errors."""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

from rlpool import (
    AgentError,
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    MonoThreadEpisodeBatcher,
    UsageError,
    Where,
    WorkerStartupError,
)

from support.agents import ConstantAgent, FunctionAgent, StepCounter, zeros
from support.envs import (
    CountingEnv,
    assert_same_tensors,
    counting_trajectories,
    create_counting,
)
from support.scripted import ScriptedAgent


def make(**changes: Any) -> EpisodeBatcher:
    arguments: dict[str, Any] = {
        "n_timesteps": 4,
        "n_slots": 8,
        "create_agent": StepCounter,
        "create_env": create_counting,
        "n_workers": 0,
        "seeds": 0,
    }
    return EpisodeBatcher(**{**arguments, **changes})


def windows(**changes: Any) -> Batcher:
    factories: dict[str, Any] = {"create_agent": StepCounter, "create_env": create_counting}
    given = {"n_timesteps": 3, "n_workers": 0, "seeds": 0}
    return Batcher(**{**given, **factories, **changes})


def window(batcher: Batcher, env_info: Any = None) -> Any:
    batcher.execute(env_info=env_info)
    return batcher.get()


def info_of(lengths: list[int], first: int = 0) -> DictTensor:
    ids = torch.arange(first, first + len(lengths))
    return DictTensor({"length": torch.tensor(lengths), "id": ids})


def expected(lengths: list[int], first: int = 0) -> dict[str, torch.Tensor]:
    return counting_trajectories(lengths, range(first, first + len(lengths)))


def raising(*_: Any, **__: Any) -> Any:
    raise OSError("no display")


# Closing --------------------------------------------------------------------------------------


def close_twice(batcher: EpisodeBatcher) -> None:
    batcher.close()
    batcher.close()


def leave(batcher: EpisodeBatcher) -> None:
    with pytest.raises(ZeroDivisionError), batcher:
        _ = 1 / 0


@pytest.mark.promise("I5")
@pytest.mark.parametrize(
    ("end", "close"),
    [(close_twice, raising), (leave, CountingEnv.close), (lambda batcher: None, raising)],
)
def test_environments_and_agent_are_closed_once_however_a_batcher_ends(
    end: Any, close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(CountingEnv, "close", lambda env: (closed.append(env), close(env)))
    agent = ConstantAgent()
    agent.close, agent.seed = Mock(), Mock()
    batcher = make(create_agent=lambda: agent, env_args={"n_envs": 1})
    batcher.execute(2)
    end(batcher)
    del batcher
    gc.collect()
    assert (len(closed), agent.close.call_count, agent.seed.call_count) == (1, 1, 1)


@pytest.mark.parametrize("kind", [make, windows])
def test_a_closed_batcher_reports_that_it_is_closed(kind: Any) -> None:
    batcher = kind()
    assert not batcher.closed
    batcher.close()
    assert batcher.closed
    calls = [batcher.execute, batcher.get, lambda: batcher.update({}), lambda: batcher.n_lanes]
    if kind is make:
        calls[0] = lambda: batcher.execute(1)
        calls += [batcher.reexecute, lambda: batcher.seek(0), lambda: batcher.progress]
    else:
        calls += [batcher.reset, lambda: batcher.all_stopped]
    for call in calls:
        with pytest.raises(UsageError, match="closed"):
            call()


@pytest.mark.promise("I7")
def test_a_kept_tensor_never_changes() -> None:
    with make() as batcher:
        batcher.execute(3, env_info=info_of([3, 1, 2]))
        frame = batcher.get()["frame"][1:]
        for number in range(12):
            batcher.execute(3, env_info=info_of([7, number + 1, 7], 3 * number))
            batcher.get()
    del batcher
    gc.collect()
    assert torch.equal(frame, expected([3, 1, 2])["frame"][1:])


def test_windows_are_refused_once_all_lanes_have_stopped() -> None:
    with windows() as batcher:
        batcher.reset(env_info=info_of([2, 2]))
        assert [window(batcher) is None for _ in range(2)] == [False, True]
        batcher.execute()
        with pytest.raises(UsageError, match="GymEnvInf"):
            batcher.get()


def test_episode_seeds_may_be_any_sequence_and_are_reproducible() -> None:
    with make() as batcher:
        for named in (range(9), (8, 0, 8, 2**31 - 1), np.arange(9), torch.arange(3)):
            batcher.execute(len(named), episode_seeds=named)
            batcher.reexecute()
            for _ in range(2):
                assert batcher.get().info["seed"].tolist() == [int(seed) for seed in named]


# Starts ---------------------------------------------------------------------------------------


@pytest.mark.promise("I2")
def test_a_random_root_seed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def seed_of() -> int:
        with make(seeds=None) as batcher:
            batcher.execute(1)
            return int(batcher.get().info["seed"])

    with caplog.at_level(logging.INFO, logger="rlpool"):
        assert seed_of() != seed_of()
    assert "seed" in caplog.text  # the drawn seed, for reuse


class Unseedable(StepCounter):
    """Agent that cannot be seeded."""

    def seed(self, seed: int) -> None:
        raise OSError("no display")


@pytest.mark.parametrize(
    ("name", "factory"),
    [("create_env", raising), ("create_agent", raising), ("create_agent", Unseedable)],
)
def test_a_failing_factory_raises_a_startup_error(name: str, factory: Any) -> None:
    envs = [CountingEnv()]
    with pytest.raises(WorkerStartupError, match="no display") as caught:
        make(**{"create_env": lambda seed: GymEnv(envs, seed), name: factory})
    assert envs[0].is_closed or name == "create_env"
    assert caught.value.where.worker == 0
    assert 'raise OSError("no display")' in caught.value.traceback_text
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.promise("I6")
def test_nothing_is_printed_and_only_the_agent_is_limited_to_one_thread(
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen = []

    def agent(state: Any, observation: DictTensor, *_: Any) -> Any:
        seen.append(torch.get_num_threads())
        return DictTensor(), DictTensor({"action": zeros(observation)}), DictTensor()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with make(create_agent=lambda: FunctionAgent(agent)) as batcher:
            batcher.execute(3)
            batcher.get()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
    assert capfd.readouterr() == ("", "")


@pytest.mark.promise("I2")
def test_the_mono_thread_batcher_gives_the_same_results() -> None:
    lengths = [1 + n % 4 for n in range(20)] + [140]
    results: list[Any] = []
    noisy = partial(ScriptedAgent, Discrete(9), n_noise=2)
    for batcher in (
        MonoThreadEpisodeBatcher(noisy, None, create_counting, {"seed": 3}, 5),
        make(create_agent=noisy, seeds=5, n_slots=140),
    ):
        with batcher:
            batcher.execute(21, env_info=info_of(lengths))
            results.append(batcher.get())
            batcher.reexecute()
            assert batcher.get().lengths.tolist() == lengths
    assert_same_tensors(results[0], dict(results[1].items()))
    with MonoThreadEpisodeBatcher(StepCounter, None, create_counting, {"n_envs": 3}) as batcher:
        batcher.execute()
        assert batcher.get().n_elems() == 3  # one per environment


# Errors ---------------------------------------------------------------------------------------


def raise_goal() -> None:
    raise KeyError("goal")


@pytest.mark.parametrize("call", ["reset", "step"])
def test_an_environments_error_reports_where_and_the_next_request_runs(call: str) -> None:
    infos = info_of([6, 2, 3, 9, 5, 5])
    script = {(3, 4 if call == "step" else -1): raise_goal}
    envs = [CountingEnv(script=script) for _ in range(2)]
    with make(create_env=lambda seed: GymEnv(envs, seed)) as batcher:
        batcher.execute(6, env_info=infos)
        with pytest.raises(EnvError) as caught:
            batcher.get()
        script.clear()
        batcher.execute(6, env_info=infos)
        assert_same_tensors(batcher.get(), expected([6, 2, 3, 9, 5, 5]))
        batcher.seek(0)
        batcher.execute(6, env_info=infos)
        seed = batcher.get().info["seed"][3].item()
    step = 4 if call == "step" else 0
    assert caught.value.where == Where(0, 1, 3, 3, step, seed, {"length": 9, "id": 3})
    assert isinstance(caught.value.__cause__, KeyError)
    assert "raise KeyError" in caught.value.traceback_text


@pytest.mark.promise("I3")
def test_windows_continue_from_a_reset_after_an_error() -> None:
    envs = [CountingEnv(script={(2, 4): raise_goal}) for _ in range(2)]
    with windows(create_env=lambda seed: GymEnvInf(envs, seed)) as batcher:
        batcher.reset(env_info=info_of([9, 9], first=1))
        window(batcher)
        with pytest.raises(EnvError, match="KeyError: 'goal'") as caught:
            window(batcher)
        where = caught.value.where
        assert (where.worker, where.lane, where.step) == (0, 1, 4)
        assert where.env_info == {"length": 9, "id": 2}
        with pytest.raises(UsageError, match="reset"):
            window(batcher)
        batcher.reset(env_info=info_of([3, 4]))
        assert window(batcher)["frame"][:, 0].tolist() == [[0, 0], [0, 1]]


@pytest.mark.promise("I3")
def test_a_failing_agent_fails_the_oldest_request_and_names_all_its_rows() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if agent_info is not None and (agent_info["bad"] * observation["frame"][:, 0] == 2).any():
            raise RuntimeError("bad info")
        return DictTensor(), DictTensor({"action": zeros(observation)}), DictTensor()

    create = {"create_agent": lambda: FunctionAgent(agent), "env_args": {"n_envs": 8}}
    with make(n_timesteps=16, n_slots=64, **create) as batcher:
        for bad in ([0, 1, 0], [0, 0]):
            batcher.execute(len(bad), {"bad": bad}, {"length": [5] * len(bad)})
        with pytest.raises(AgentError, match="rows 0, 1, 2") as caught:
            batcher.get()
        assert caught.value.where.step == 2
        assert batcher.get().lengths.tolist() == [5, 5]
