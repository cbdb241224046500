"""EpisodeBatcher in this process: the order of calls, arguments, who owns results."""

from __future__ import annotations

import gc
import logging
from typing import Any

import numpy as np
import pytest
import torch

import rlpool.machine.limits
from rlpool import (
    Batcher,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    MonoThreadEpisodeBatcher,
    RlpoolError,
    SpecError,
    UsageError,
    WorkerStartupError,
)
from rlpool.machine.limits import Bound

from support.agents import ConstantAgent, NoisyAgent, Recorder, StepCounter
from support.envs import (
    CountingEnv,
    assert_same_tensors,
    counting_trajectories,
    create_counting,
)
from support.needy import create_needy


def make(**changes: Any) -> EpisodeBatcher:
    arguments: dict[str, Any] = {
        "n_timesteps": 4,
        "n_slots": 8,
        "create_agent": StepCounter,
        "create_env": create_counting,
        "n_threads": 0,
        "seeds": 0,
    }
    return EpisodeBatcher(**{**arguments, **changes})


def info_of(lengths: list[int], first: int = 0) -> DictTensor:
    ids = torch.arange(first, first + len(lengths))
    return DictTensor({"length": torch.tensor(lengths), "id": ids})


def expected(lengths: list[int], first: int = 0) -> dict[str, torch.Tensor]:
    return counting_trajectories(lengths, range(first, first + len(lengths)))


def raising(*_: Any, **__: Any) -> Any:
    raise OSError("no display")


# The order of calls ---------------------------------------------------------------------------


def test_calls_out_of_order_are_usage_errors() -> None:
    with make() as batcher:
        for call in (batcher.get, lambda: batcher.get(blocking=False), batcher.reexecute):
            with pytest.raises(UsageError, match="execute"):
                call()
        batcher.execute(2)
        batcher.get()
        with pytest.raises(UsageError, match="execute"):
            batcher.get()
        batcher.execute(1)
        assert batcher.get().lengths.tolist() == [3]


def test_a_closed_batcher_says_that_it_is_closed() -> None:
    batcher = make()
    batcher.execute(2)
    assert not batcher.closed
    batcher.close()
    assert batcher.closed
    for call in (
        lambda: batcher.execute(1),
        batcher.reexecute,
        batcher.get,
        lambda: batcher.get(blocking=False),
        lambda: batcher.update({}),
        lambda: batcher.progress,
    ):
        with pytest.raises(UsageError, match="closed"):
            call()


def close_twice(batcher: EpisodeBatcher) -> None:
    batcher.close()
    batcher.close()


def leave(batcher: EpisodeBatcher) -> None:
    with pytest.raises(ZeroDivisionError), batcher:
        _ = 1 / 0


@pytest.mark.promise("I5")
@pytest.mark.parametrize("end", [close_twice, leave, lambda batcher: None])
@pytest.mark.parametrize("close", [CountingEnv.close, raising], ids=["closes", "raises"])
def test_however_a_batcher_ends_environments_and_agent_are_closed_once(
    end: Any, close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_closed = 0

    def counted_close(env: Any) -> None:
        nonlocal n_closed
        n_closed += 1
        close(env)

    monkeypatch.setattr(CountingEnv, "close", counted_close)
    agent = Recorder(ConstantAgent())
    batcher = make(create_agent=lambda: agent, env_args={"n_envs": 1})
    batcher.execute(2)
    end(batcher)
    del batcher
    gc.collect()
    assert n_closed == 1
    assert agent.n_closed == 1


def test_progress_counts_finished_and_requested_episodes() -> None:
    with make() as batcher:
        assert batcher.progress == (0, 0)
        batcher.execute(5)
        for _ in range(100):
            finished, wanted = batcher.progress
            assert wanted == 5
            assert 0 <= finished <= 5
        assert finished == 5
        batcher.get()
        assert batcher.progress == (0, 0)


def test_seek_is_refused_while_something_is_pending_and_for_what_is_no_number() -> None:
    batcher = make()
    for number in (-1, 1.5, "3", 2**62 + 1):
        with pytest.raises(SpecError, match="number"):
            batcher.seek(number)
    batcher.execute(2)
    with pytest.raises(UsageError, match="pending"):
        batcher.seek(0)
    batcher.get()
    batcher.seek(2**62)
    batcher.execute(2)
    assert len(batcher.get()) == 2
    batcher.close()
    with pytest.raises(UsageError):
        batcher.seek(0)


# Who owns results -----------------------------------------------------------------------------


@pytest.mark.promise("I7")
def test_one_tensor_that_is_kept_never_changes() -> None:
    with make() as batcher:
        batcher.execute(3, env_info=info_of([3, 1, 2]))
        frame = batcher.get()["frame"][1:]
        for number in range(12):
            batcher.execute(3, env_info=info_of([7, number + 1, 7], 3 * number))
            batcher.get().info["seed"].fill_(number)  # its infos belong to the caller, too
        batcher.execute(1)
        assert batcher.get().info["seed"].item() != number
    del batcher
    gc.collect()
    assert torch.equal(frame, expected([3, 1, 2])["frame"][1:])


# Arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        *({"n_timesteps": value} for value in (0, -1, 1.5, True, None)),
        *({"n_slots": value} for value in (0, -2, "8")),
        *({"n_workers": value} for value in (-1, 0.5, None)),
        *({"timeout": value} for value in (0, -1.0)),
        *({"seeds": value} for value in (-1, [1, -2], "abc", [1.5], 3.5)),
        {"seeds": [1, 2], "n_workers": 3},
        {"seeds": [], "n_workers": 1},
        *({"create_env": value} for value in (None, 5)),
        *({"create_agent": value} for value in (None, 7)),
        *({"env_args": value} for value in (3, "ab", [1], {1: 2})),
        {"agent_args": [StepCounter]},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [EpisodeBatcher, Batcher])
def test_wrong_arguments_are_refused_by_name(kind: Any, changes: dict[str, Any]) -> None:
    arguments = {"n_timesteps": 4, "n_slots": 8, "n_workers": 0, "seeds": 0}
    arguments |= {"create_agent": StepCounter, "create_env": create_counting}
    with pytest.raises(SpecError, match=next(iter(changes))):
        kind(**{**arguments, **changes})
    gc.collect()  # there is nothing to close


def seed_of(**arguments: Any) -> int:
    with make(**arguments) as batcher:
        batcher.execute(1)
        return int(batcher.get().info["seed"])


@pytest.mark.promise("I2")
def test_seeds_may_be_an_int_a_list_or_none(caplog: pytest.LogCaptureFixture) -> None:
    assert seed_of(seeds=np.int64(5)) == seed_of(seeds=5) != seed_of(seeds=2**64)
    assert seed_of(seeds=np.arange(1, 2)) == seed_of(seeds=[1]) == seed_of(seeds=(1,))
    assert seed_of(seeds=[1, 2, 3]) != seed_of(seeds=[1])
    with caplog.at_level(logging.INFO, logger="rlpool"):
        assert seed_of(seeds=None) != seed_of(seeds=None)
    assert "seed" in caplog.text  # what was drawn, to use it again


@pytest.mark.parametrize("n_episodes", [0, -1, 1.5, True, None, "3", 10**12])
def test_execute_wants_a_number_of_episodes(n_episodes: Any) -> None:
    with make() as batcher, pytest.raises(SpecError, match=r"n_episodes|there are 2\*\*31 seeds"):
        batcher.execute(n_episodes)


STATE = {"root": 5, "next_episode": 3, "policy_version": 1}


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {**STATE, "last": None},
        {key: STATE[key] for key in ("root", "next_episode")},
        *({**STATE, key: wrong} for key in STATE for wrong in ("3", -1, 1.5)),
        {**STATE, "next_episode": 2**63},
        {**STATE, "root": 2**200},
    ],
    ids=str,
)
def test_what_is_not_a_state_is_refused(state: Any) -> None:
    with make() as batcher:
        before = batcher.state_dict()
        with pytest.raises(SpecError):
            batcher.load_state_dict(state)
        assert batcher.state_dict() == before
        with pytest.raises(SpecError, match="blocking should be True or False"):
            batcher.get(blocking="no")  # type: ignore[call-overload]


# Starting -------------------------------------------------------------------------------------


class Unseedable(StepCounter):
    """An agent that cannot be seeded."""

    def seed(self, seed: int) -> None:
        raise OSError("no display")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"create_env": raising}, "create_env raised OSError: no display"),
        ({"create_agent": raising}, "create_agent raised OSError: no display"),
        ({"create_agent": Unseedable}, "no display"),
        ({"create_agent": lambda: None}, "create_agent returned NoneType, not an Agent"),
        ({"create_agent": lambda: StepCounter}, "create_agent returned the class StepCounter"),
    ],
)
def test_a_factory_that_fails_is_a_startup_error(changes: dict[str, Any], text: str) -> None:
    envs = [CountingEnv()]
    with pytest.raises(RlpoolError, match=text) as caught:
        make(**{"create_env": lambda seed: GymEnv(envs, seed), **changes})
    assert envs[0].is_closed or "create_env" in changes
    if "raised" in text:
        assert isinstance(caught.value, WorkerStartupError)
        assert caught.value.where.worker == 0
        assert 'raise OSError("no display")' in caught.value.traceback_text
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.promise("I8")
def test_blocks_larger_than_the_machine_are_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SpecError, match=r"frame .*iB(.|\n)*lower n_slots or n_timesteps"):
        make(n_timesteps=10**9, n_slots=10**6)
    with make(n_timesteps=10**9, n_slots=10**6, create_env=create_needy) as needy:
        for _ in range(2):
            needy.execute(2, env_info=info_of([1, 1]))
            with pytest.raises(SpecError, match="lower n_slots or n_timesteps"):
                needy.get()
    # Those that are larger than what is free now are not refused:
    bounds = [Bound("this machine has", 2**40, 2**17)]
    monkeypatch.setattr(rlpool.machine.limits, "memory_bounds", lambda *_: bounds)
    with caplog.at_level(logging.WARNING, logger="rlpool"):
        make(n_slots=20_000).close()
    (text,) = caplog.messages
    assert text.startswith("a block of 20000 slots of 4 steps may take up to ")


@pytest.mark.promise("I6")
def test_nothing_is_printed_and_only_the_agent_runs_in_one_thread(
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen = []

    class Counting(StepCounter):
        def __call__(self, *arguments: Any) -> Any:
            seen.append(torch.get_num_threads())
            return super().__call__(*arguments)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with make(create_agent=Counting) as batcher:
            batcher.execute(3)
            batcher.get()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
    assert capfd.readouterr() == ("", "")


# MonoThreadEpisodeBatcher ---------------------------------------------------------------------


def create_unseeded(n_envs: int = 2) -> GymEnv:
    return GymEnv([CountingEnv() for _ in range(n_envs)], 3)


@pytest.mark.promise("I2")
def test_the_mono_thread_batcher_gives_what_the_others_give() -> None:
    lengths = [1 + n % 4 for n in range(200)] + [300]
    results: list[Any] = []
    for batcher in (
        MonoThreadEpisodeBatcher(NoisyAgent, None, create_unseeded, None, 5),
        make(create_agent=NoisyAgent, seeds=5, n_slots=300),
    ):
        with batcher:
            assert isinstance(batcher, EpisodeBatcher)
            batcher.execute(201, env_info=info_of(lengths))
            results.append(batcher.get())
            batcher.reexecute()
            assert batcher.get().lengths.tolist() == lengths
    assert_same_tensors(results[0], dict(results[1].items()))


def test_the_mono_thread_batcher_runs_an_episode_per_environment_by_default() -> None:
    with MonoThreadEpisodeBatcher(StepCounter, None, create_counting, {"n_envs": 3}) as batcher:
        batcher.execute()
        assert batcher.get().lengths.tolist() == [3, 3, 3]
        batcher.execute(env_info=info_of([2, 1, 3], first=5))
        assert_same_tensors(batcher.get(), expected([2, 1, 3], first=5))
        batcher.execute(2)
        assert batcher.get().n_elems() == 2
