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
    Agent,
    AgentError,
    Batcher,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    MonoThreadEpisodeBatcher,
    SpecError,
    TemporalDictTensor,
    UsageError,
    WorkerStartupError,
)
from rlpool.machine.limits import Bound

from support.agents import ConstantAgent, NoisyAgent, Recorder, StepCounter
from support.envs import (
    CountingEnv,
    EchoEnv,
    assert_same_tensors,
    counting_trajectories,
    create_counting,
)


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


# The order of calls


def test_get_before_execute_raises_usage_error() -> None:
    with make() as batcher:
        for blocking in (True, False):
            with pytest.raises(UsageError, match="execute"):
                batcher.get(blocking=blocking)


def test_get_once_more_than_execute_raises_usage_error() -> None:
    with make() as batcher:
        batcher.execute(2)
        batcher.get()
        with pytest.raises(UsageError, match="execute"):
            batcher.get()
        batcher.execute(1)
        assert batcher.get().lengths.tolist() == [3]


def test_reexecute_before_execute_raises_usage_error() -> None:
    with make() as batcher, pytest.raises(UsageError, match="execute"):
        batcher.reexecute()


@pytest.mark.parametrize(
    "call",
    [
        lambda batcher: batcher.execute(1),
        lambda batcher: batcher.reexecute(),
        lambda batcher: batcher.get(),
        lambda batcher: batcher.get(blocking=False),
        lambda batcher: batcher.update({}),
        lambda batcher: batcher.progress,
    ],
    ids=["execute", "reexecute", "get", "get without blocking", "update", "progress"],
)
def test_a_closed_batcher_says_that_it_is_closed(call: Any) -> None:
    batcher = make()
    batcher.execute(2)
    assert not batcher.closed
    batcher.close()
    assert batcher.closed
    with pytest.raises(UsageError, match="closed"):
        call(batcher)


def test_close_may_be_repeated_and_closes_environments_and_agent_once() -> None:
    envs, agent = [CountingEnv(), CountingEnv()], Recorder(ConstantAgent())
    batcher = make(create_env=lambda seed: GymEnv(envs, seed), create_agent=lambda: agent)
    batcher.execute(2)
    for _ in range(3):
        batcher.close()
    assert all(env.is_closed for env in envs)
    assert agent.n_closed == 1


def test_leaving_the_with_block_closes() -> None:
    agent = Recorder(ConstantAgent())
    with make(create_agent=lambda: agent) as batcher:
        assert agent.n_closed == 0
    assert batcher.closed
    assert agent.n_closed == 1


def test_an_exception_in_the_with_block_closes_and_goes_on() -> None:
    batcher = make()
    with pytest.raises(ZeroDivisionError), batcher:
        _ = 1 / 0
    assert batcher.closed


def test_dropping_a_batcher_closes_it() -> None:
    agent = Recorder(ConstantAgent())
    batcher = make(create_agent=lambda: agent)
    batcher.execute(2)
    del batcher
    gc.collect()
    assert agent.n_closed == 1


def test_errors_of_close_are_not_the_callers() -> None:
    class Env(CountingEnv):
        def close(self) -> None:
            raise OSError("window is gone")

    class Stubborn(StepCounter):
        def close(self) -> None:
            raise OSError("file is gone")

    make(create_env=lambda seed: GymEnv([Env()], seed), create_agent=Stubborn).close()


def test_requests_queue_and_come_back_in_order() -> None:
    requests = [[3, 1, 2], [5], [1] * 9, [4, 4], [2, 7, 1, 8, 2, 8]]
    with make() as batcher:
        for number, lengths in enumerate(requests):
            batcher.execute(len(lengths), env_info=info_of(lengths, 10 * number))
        for number, lengths in enumerate(requests):
            assert_same_tensors(batcher.get(), expected(lengths, 10 * number))


def test_many_requests_may_be_queued() -> None:
    with make() as batcher:
        for number in range(30):
            batcher.execute(2, env_info=info_of([1, 2], number))
        for number in range(30):
            assert_same_tensors(batcher.get(), expected([1, 2], number))


@pytest.mark.parametrize("blocking", [True, False])
def test_requests_queued_behind_episodes_longer_than_a_slot_come_back(blocking: bool) -> None:
    with make(n_timesteps=1, n_slots=3) as batcher:
        batcher.execute(2, env_info=info_of([1, 2]))
        batcher.execute(1, env_info=info_of([1], 5))
        for values in (expected([1, 2]), expected([1], 5)):
            for _ in range(1 if blocking else 100):
                result = batcher.get(blocking=blocking)
                if result is not None:
                    break
            assert_same_tensors(result, values)


def test_get_without_blocking_gives_none_until_everything_is_there() -> None:
    with make() as batcher:
        batcher.execute(20, env_info=info_of([5] * 20))
        for _ in range(100):
            result = batcher.get(blocking=False)
            if result is not None:
                break
        assert_same_tensors(result, expected([5] * 20))
        with pytest.raises(UsageError):
            batcher.get(blocking=False)


def test_reexecute_repeats_the_arguments_with_new_episodes() -> None:
    with make(create_agent=NoisyAgent) as batcher:
        batcher.execute(3, env_info=info_of([3, 1, 2]))
        first = batcher.get()
        batcher.reexecute()
        batcher.reexecute()
        second, third = batcher.get(), batcher.get()
    for result in (first, second, third):
        assert result.lengths.tolist() == [3, 1, 2]
        assert result.info["env_info/id"].tolist() == [0, 1, 2]
    seeds = [result.info["seed"].tolist() for result in (first, second, third)]
    assert len({seed for row in seeds for seed in row}) == 9
    assert len({str(r["noise"].tolist()) for r in (first, second, third)}) == 3


def test_reexecute_repeats_the_last_execute() -> None:
    with make() as batcher:
        batcher.execute(3, env_info=info_of([3, 1, 2]))
        batcher.execute(1, env_info=info_of([7], 4))
        batcher.reexecute()
        batcher.get()
        batcher.get()
        assert_same_tensors(batcher.get(), expected([7], 4))


def test_infos_may_be_changed_after_execute() -> None:
    info = info_of([3, 1, 2])
    with make() as batcher:
        batcher.execute(3, env_info=info)
        info["length"].fill_(9)
        result = batcher.get()
        assert_same_tensors(result, expected([3, 1, 2]))
        assert result.info["env_info/length"].tolist() == [3, 1, 2]
        batcher.reexecute()
        assert batcher.get().lengths.tolist() == [3, 1, 2]


def test_info_of_a_result_belongs_to_the_caller() -> None:
    with make() as batcher:
        batcher.execute(3, env_info=info_of([3, 1, 2]))
        batcher.execute(3, env_info=info_of([3, 1, 2]))
        batcher.get().info["env_info/length"].fill_(9)
        assert batcher.get().info["env_info/length"].tolist() == [3, 1, 2]


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


# Ownership of results


def test_results_that_are_kept_never_change() -> None:
    kept: list[tuple[Any, dict[str, torch.Tensor]]] = []
    with make() as batcher:
        for number in range(12):
            lengths = [number % 5 + 1, 7, 1 + number]
            batcher.execute(3, env_info=info_of(lengths, 3 * number))
            result = batcher.get()
            if number % 2:
                kept.append((result, expected(lengths, 3 * number)))
    gc.collect()
    assert len(kept) == 6
    for result, values in kept:
        assert_same_tensors(result, values)


def test_one_kept_tensor_is_enough_to_keep_its_values() -> None:
    with make() as batcher:
        batcher.execute(3, env_info=info_of([3, 1, 2]))
        frame = batcher.get()["frame"][1:]
        batcher.execute(3, env_info=info_of([4, 4, 4], 50))
        batcher.get()
        batcher.execute(3, env_info=info_of([4, 4, 4], 70))
        batcher.get()
    assert torch.equal(frame, expected([3, 1, 2])["frame"][1:])


def test_memory_of_dropped_results_is_used_again() -> None:
    with make(n_slots=4) as batcher:
        addresses = set()
        for _ in range(50):
            batcher.execute(4)
            addresses.add(batcher.get()["frame"].data_ptr())
    assert len(addresses) <= 3


def test_results_outlive_the_batcher() -> None:
    batcher = make()
    batcher.execute(3, env_info=info_of([3, 1, 2]))
    result = batcher.get()
    batcher.close()
    del batcher
    gc.collect()
    assert_same_tensors(result, expected([3, 1, 2]))


# Arguments


@pytest.mark.parametrize(
    "changes",
    [
        {"n_timesteps": 0},
        {"n_timesteps": -1},
        {"n_timesteps": 1.5},
        {"n_timesteps": True},
        {"n_timesteps": None},
        {"n_slots": 0},
        {"n_slots": -2},
        {"n_slots": "8"},
        {"n_threads": -1},
        {"n_threads": 0.5},
        {"n_threads": None},
        {"timeout": 0},
        {"timeout": -1.0},
        {"seeds": -1},
        {"seeds": [1, -2]},
        {"seeds": "abc"},
        {"seeds": [1.5]},
        {"seeds": 3.5},
        {"seeds": [1, 2], "n_threads": 3},
        {"seeds": [1, 2, 3], "n_threads": 2},
        {"seeds": [], "n_threads": 1},
        {"create_env": None},
        {"create_env": 5},
        {"create_agent": None},
        {"create_agent": StepCounter()},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_name(changes: dict[str, Any]) -> None:
    if isinstance(changes.get("create_agent"), Agent):
        changes = {"create_agent": 7}
    with pytest.raises(SpecError, match=next(iter(changes))):
        make(**changes)


@pytest.mark.parametrize("seeds", [0, 5, 2**64, [1], [1, 2, 3], (4, 5), None])
def test_seeds_may_be_an_int_a_list_or_none(seeds: Any) -> None:
    with make(seeds=seeds) as batcher:
        batcher.execute(1)
        assert batcher.get().lengths.tolist() == [3]


@pytest.mark.parametrize("seeds", [np.int64(5), np.arange(1, 2)])
def test_seeds_of_numpy_are_those_of_python(seeds: Any) -> None:
    def seed_of(seeds: Any) -> int:
        with make(seeds=seeds) as batcher:
            batcher.execute(1)
            return int(batcher.get().info["seed"])

    plain = int(seeds) if np.ndim(seeds) == 0 else [1]
    assert seed_of(seeds) == seed_of(plain)


def test_a_drawn_seed_is_logged_and_can_be_used_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rlpool"):
        make(seeds=None).close()
    assert "seed" in caplog.text


@pytest.mark.parametrize("n_episodes", [0, -1, 1.5, True, None, "3"])
def test_execute_wants_a_number_of_episodes(n_episodes: Any) -> None:
    with make() as batcher:
        with pytest.raises(SpecError, match="n_episodes"):
            batcher.execute(n_episodes)
        with pytest.raises(UsageError):
            batcher.get()


@pytest.mark.parametrize("name", ["agent_info", "env_info"])
@pytest.mark.parametrize(
    "info",
    [
        DictTensor({"id": torch.arange(2)}),
        DictTensor({"id": torch.arange(4)}),
        DictTensor({"id": torch.arange(0)}),
        torch.arange(3),
        DictTensor({"id": torch.zeros(3, dtype=torch.bfloat16)}),
    ],
    ids=["few", "many", "no rows", "tensor", "bfloat16"],
)
def test_infos_of_another_size_or_kind_are_refused(name: str, info: Any) -> None:
    with make() as batcher:
        with pytest.raises(SpecError, match=name):
            batcher.execute(3, **{name: info})
        with pytest.raises(UsageError):
            batcher.get()
        batcher.execute(3)
        assert batcher.get().lengths.tolist() == [3, 3, 3]


@pytest.mark.parametrize("info", [None, DictTensor({}), DictTensor()])
def test_infos_may_be_empty(info: Any) -> None:
    with make() as batcher:
        batcher.execute(2, agent_info=info, env_info=info)
        result = batcher.get()
    assert set(result.info.keys()) == {"episode", "seed", "policy_version"}


def test_infos_may_have_any_shape_and_dtype() -> None:
    info = DictTensor(
        {
            "flag": torch.tensor([True, False]),
            "goal": torch.rand(2, 3, dtype=torch.float64),
            "image": torch.randint(255, (2, 4, 4), dtype=torch.uint8),
            "wide": torch.arange(6).reshape(3, 2).t(),
            "learned": torch.rand(2, requires_grad=True),
        }
    )
    envs = [EchoEnv(), EchoEnv()]
    with make(create_env=lambda seed: GymEnv(envs, seed), create_agent=ConstantAgent) as batcher:
        batcher.execute(2, env_info=info)
        result = batcher.get()
    for row, env in enumerate(envs):
        assert env.resets[-1][1] == {key: value[row].tolist() for key, value in info.items()}
    for key in info:
        assert torch.equal(result.info[f"env_info/{key}"], info[key])
        assert not result.info[f"env_info/{key}"].requires_grad


def test_env_args_and_agent_args_are_handed_over() -> None:
    got: dict[str, Any] = {}

    def create_agent(**arguments: Any) -> Agent:
        got["agent"] = arguments
        return StepCounter()

    def create_env(seed: int, **arguments: Any) -> GymEnv:
        got["env"], got["seed"] = arguments, seed
        return create_counting(seed)

    make(
        create_agent=create_agent,
        agent_args={"a": 1},
        create_env=create_env,
        env_args={"b": [2]},
    ).close()
    assert (got["agent"], got["env"]) == ({"a": 1}, {"b": [2]})
    assert isinstance(got["seed"], int)


def create_unseeded(n_envs: int = 2) -> GymEnv:
    return GymEnv([CountingEnv() for _ in range(n_envs)], 3)


def of_episodes(create_env: Any, **changes: Any) -> Any:
    return EpisodeBatcher(4, 8, StepCounter, None, create_env, seeds=0, **changes)


def of_windows(create_env: Any, **changes: Any) -> Any:
    return Batcher(4, None, StepCounter, None, create_env, seeds=0, **changes)


def in_one_thread(create_env: Any, **changes: Any) -> Any:
    return MonoThreadEpisodeBatcher(StepCounter, None, create_env, seeds=0, **changes)


@pytest.mark.parametrize(
    ("make_batcher", "arguments"),
    [
        (of_episodes, {"n_threads": 0}),
        (of_windows, {"n_threads": 0}),
        (in_one_thread, {}),
        (of_episodes, {"n_threads": 1}),
        (of_windows, {"n_threads": 1}),
    ],
)
def test_a_create_env_that_takes_no_seed_is_called_without(
    make_batcher: Any, arguments: Any
) -> None:
    with make_batcher(create_unseeded, env_args={"n_envs": 2}, **arguments) as batcher:
        info = {"env_info": info_of([2, 1], first=5)}
        if isinstance(batcher, Batcher):
            batcher.reset(**info)
            batcher.execute()
        else:
            batcher.execute(2, **info)
        assert_same_tensors(batcher.get(), expected([2, 1], first=5))


def test_one_thread_runs_an_episode_in_every_environment_unless_told_otherwise() -> None:
    with in_one_thread(create_counting, env_args={"n_envs": 3}) as batcher:
        batcher.execute()
        assert batcher.get().lengths.tolist() == [3, 3, 3]
        batcher.execute(env_info=info_of([2, 1, 3], first=5))
        assert_same_tensors(batcher.get(), expected([2, 1, 3], first=5))
        batcher.execute(2)
        assert batcher.get().n_elems() == 2


def test_a_seed_in_env_args_takes_the_place_of_the_worker_s() -> None:
    got = []

    def create_env(seed: Any) -> GymEnv:
        got.append(seed)
        return create_counting(0)

    make(create_env=create_env, env_args={"seed": 12}).close()
    assert got == [12]


def test_arguments_may_be_given_by_position_as_in_rlstructures() -> None:
    with EpisodeBatcher(
        4, 8, ConstantAgent, {"action": 3}, create_counting, {"n_envs": 3}, 0, [1]
    ) as b:
        b.execute(2)
        assert b.get()["action"].tolist() == [[3, 3, 3]] * 2


# Starting


def test_an_error_of_create_env_is_a_startup_error() -> None:
    def create_env(seed: int) -> GymEnv:
        raise OSError("no display")

    with pytest.raises(WorkerStartupError, match="create_env raised OSError: no display") as caught:
        make(create_env=create_env)
    assert caught.value.where.worker == 0
    assert 'raise OSError("no display")' in caught.value.traceback_text
    assert isinstance(caught.value.__cause__, OSError)


def test_an_error_of_create_agent_is_a_startup_error() -> None:
    def create_agent() -> Agent:
        raise OSError("no weights")

    with pytest.raises(WorkerStartupError, match="create_agent raised OSError: no weights"):
        make(create_agent=create_agent)


def test_an_error_of_agent_seed_is_reported() -> None:
    class Unseedable(StepCounter):
        def seed(self, seed: int) -> None:
            raise OSError("no seed")

    with pytest.raises((WorkerStartupError, AgentError), match="no seed"):
        make(create_agent=Unseedable)


@pytest.mark.parametrize("value", [None, CountingEnv(), [CountingEnv()], StepCounter()])
def test_create_env_must_return_a_vec_env(value: Any) -> None:
    with pytest.raises(WorkerStartupError, match=r"create_env returned \w+, not a VecEnv"):
        make(create_env=lambda seed: value)


@pytest.mark.parametrize("value", [None, torch.nn.Linear(1, 1), StepCounter])
def test_create_agent_must_return_an_agent(value: Any) -> None:
    with pytest.raises(WorkerStartupError, match=r"create_agent returned \w+, not an Agent"):
        make(create_agent=lambda: value)


def test_environments_are_closed_when_the_agent_cannot_be_created() -> None:
    envs = [CountingEnv()]
    with pytest.raises(WorkerStartupError):
        make(create_env=lambda seed: GymEnv(envs, seed), create_agent=lambda: None)
    assert envs[0].is_closed


def test_blocks_larger_than_the_machine_are_refused_with_advice() -> None:
    with pytest.raises(SpecError) as caught:
        make(n_timesteps=10**9, n_slots=10**6)
    lines = str(caught.value).splitlines()
    assert "frame" in lines[0]
    assert "iB" in lines[0]
    assert lines[-1].startswith("  fix:   lower n_slots or n_timesteps, by a factor of ")


def test_blocks_larger_than_free_memory_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bounds = [Bound("this machine has", 2**40, 2**17, 2**40)]
    monkeypatch.setattr(rlpool.machine.limits, "memory_bounds", lambda **_: bounds)
    with caplog.at_level(logging.WARNING, logger="rlpool"):
        make(n_slots=20_000).close()
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("a block of 20000 slots of 4 steps may take up to ")
    assert "frame 788 KiB" in text
    assert "only 128 KiB of the 1 TiB that this machine has are free" in text
    assert "lower n_slots or n_timesteps, by a factor of " in text


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with make() as batcher:
        batcher.execute(3)
        batcher.get()
    assert capfd.readouterr() == ("", "")


def test_the_callers_thread_count_is_left_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with make() as batcher:
            batcher.execute(3)
            batcher.get()
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_agent_runs_in_one_thread() -> None:
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
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


# MonoThreadEpisodeBatcher


def test_the_mono_thread_batcher_gives_episodes() -> None:
    with MonoThreadEpisodeBatcher(StepCounter, {}, create_counting, {"n_envs": 3}, seeds=0) as b:
        assert isinstance(b, EpisodeBatcher)
        lengths = [3, 300, 1, 20]
        b.execute(4, env_info=info_of(lengths))
        result = b.get()
        assert isinstance(result, TemporalDictTensor)
        assert_same_tensors(result, expected(lengths))
        b.reexecute()
        assert_same_tensors(b.get(), expected(lengths))


def test_the_mono_thread_batcher_takes_many_episodes() -> None:
    lengths = [1 + n % 4 for n in range(200)]
    with MonoThreadEpisodeBatcher(StepCounter, {}, create_counting, {}) as batcher:
        batcher.execute(200, env_info=info_of(lengths))
        assert_same_tensors(batcher.get(), expected(lengths))


def test_the_mono_thread_batcher_gives_what_the_others_give() -> None:
    with MonoThreadEpisodeBatcher(NoisyAgent, None, create_counting, None, 5) as batcher:
        batcher.execute(4)
        mono = batcher.get()
    with make(create_agent=NoisyAgent, seeds=5) as batcher:
        batcher.execute(4)
        other = batcher.get()
    for key in mono:
        assert torch.equal(mono[key], other[key])


@pytest.mark.parametrize("kind", [EpisodeBatcher, Batcher])
def test_a_refused_construction_leaves_nothing_to_close(kind: Any) -> None:
    with pytest.raises(SpecError):
        kind(0, 4, create_agent=StepCounter, create_env=create_counting, n_threads=0)
    gc.collect()


def test_environments_are_reset_once_before_the_first_request() -> None:
    env = CountingResets()
    with make(create_env=lambda seed: GymEnv([env], seed)) as batcher:
        assert (env.n_resets, env.n_steps) == (1, 0)
        batcher.execute(2)
        batcher.get()
    assert env.n_resets == 3


class CountingResets(CountingEnv):
    """Counts its resets and steps."""

    n_resets = n_steps = 0

    def reset(self, **arguments: Any) -> Any:
        self.n_resets += 1
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        self.n_steps += 1
        return super().step(action)
