"""Environments in processes give what environments in this process give, without messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rlpool import (
    Agent,
    Batcher,
    DictTensor,
    EpisodeBatcher,
    ParallelEnvManager,
    SpecError,
    TemporalDictTensor,
    UsageError,
    sample_categorical,
)

from support.agents import GruAgent, HistoryAgent, StepCounter
from support.envs import (
    AncestorCountingEnv,
    CountingEnv,
    EchoEnv,
    assert_same_tensors,
    counting_trajectories,
)
from support.parallel import (
    LimitedEnv,
    SleepyEnv,
    TaskEnv,
    create_manager,
    create_serial,
    make_cartpole,
    make_nested,
    no_actions,
    open_manager,
)

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(240)]

OpenManager = Callable[..., ParallelEnvManager]

create_gru = partial(GruAgent, 4, 2)


@pytest.fixture
def manager_of() -> Iterator[OpenManager]:
    """A function that opens managers, which are closed afterwards."""
    managers: list[ParallelEnvManager] = []

    def open_one(make_env: Callable[[], Any], n_lanes: int = 2, **options: Any) -> Any:
        managers.append(open_manager(make_env, n_lanes, **options))
        return managers[-1]

    yield open_one
    for manager in managers:
        manager.close()


# Starting a process takes seconds: most tests share theirs.


def _shared(make_env: Callable[[], Any], n_lanes: int, **options: Any) -> Any:
    @pytest.fixture(scope="module")
    def shared() -> Iterator[ParallelEnvManager]:
        with open_manager(make_env, n_lanes, **options) as manager:
            yield manager

    return shared


sleepy = _shared(SleepyEnv, 3)
in_pairs = _shared(SleepyEnv, 3, envs_per_worker=2)
tasked = _shared(TaskEnv, 2)
echoing = _shared(EchoEnv, 2)


def collected(
    create_env: Callable[..., Any],
    env_args: dict[str, Any],
    create_agent: Callable[..., Agent] = create_gru,
    n_threads: int = 0,
    n_timesteps: int = 7,
    n_slots: int = 6,
    infos: tuple[DictTensor | None, DictTensor | None] = (None, None),
) -> list[TemporalDictTensor]:
    """Two requests of a batcher."""
    n_episodes = next((info.n_elems() for info in infos if info is not None), 22)
    results = []
    with EpisodeBatcher(
        n_timesteps,
        n_slots,
        create_agent,
        {},
        create_env,
        env_args,
        n_threads=n_threads,
        seeds=3,
    ) as batcher:
        for _ in range(2):
            batcher.execute(n_episodes, *infos)
            result = batcher.get()
            assert result is not None
            results.append(result)
    return results


def assert_same(got: list[TemporalDictTensor], expected: list[TemporalDictTensor]) -> None:
    """Keys, dtypes, bits, lengths and infos agree."""
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.lengths.tolist() == theirs.lengths.tolist()
        assert set(mine.keys()) == set(theirs.keys())
        for key in theirs:
            assert mine[key].dtype == theirs[key].dtype, key
            assert torch.equal(mine[key], theirs[key]), key
        for key in theirs.info:
            assert torch.equal(mine.info[key], theirs.info[key]), key


# The rollout loop runs over it ----------------------------------------------------------------


def test_batcher_serial_twin_and_manager_give_the_same_bits() -> None:
    lanes = {"make_env": make_cartpole, "n_lanes": 4}
    serial = collected(create_serial, lanes)
    assert serial[0].lengths.max() > 14  # chunks are glued
    assert_same(collected(create_serial, lanes, n_threads=2), serial)
    for options in (
        {"envs_per_worker": 2},
        {"envs_per_worker": 3},  # workers of 3 and 1
        {"envs_per_worker": 2, "min_ready": 1},
    ):
        assert_same(collected(create_manager, {**lanes, **options}), serial)


def test_infos_follow_their_episodes_and_no_environment_is_reset_in_vain() -> None:
    n = 13
    env_info = DictTensor({"id": torch.arange(n) * 3, "length": torch.arange(n) % 4 + 1})
    agent_info = DictTensor({"anything": torch.arange(n)})
    lanes = {"make_env": EchoEnv, "n_lanes": 3}
    arguments: dict[str, Any] = {
        "create_agent": StepCounter,
        "n_slots": n,
        "infos": (agent_info, env_info),
    }
    serial = collected(create_serial, lanes, **arguments)
    assert serial[0]["id"][:, 0].tolist() == (torch.arange(n) * 3).tolist()
    got = collected(create_manager, {**lanes, "envs_per_worker": 2}, **arguments)
    # Among the keys: the seed of each reset, and how many resets there were.
    assert_same(got, serial)


def test_most_episodes_begin_without_a_message(manager_of: OpenManager) -> None:
    manager = manager_of(CountingEnv, 4, envs_per_worker=2)
    orders: list[Any] = []
    workers, send = manager._workers, manager._workers.send
    workers.send = lambda worker, message: (orders.append(message), send(worker, message))  # type: ignore[method-assign, assignment, func-returns-value]
    with EpisodeBatcher(
        8, 40, StepCounter, {}, lambda seed: manager, {}, n_threads=0, seeds=1
    ) as batcher:
        batcher.execute(40)
        assert batcher.get() is not None
    kinds = [type(order).__name__ for order in orders]
    # Each worker is told what will come, and asked for the first episode of its lanes; before
    # that for the probe.
    assert sorted(kinds) == ["Announce"] * 2 + ["Reset"] * 4


def test_an_episode_begun_ahead_is_used_only_if_it_is_the_one_asked_for(
    echoing: ParallelEnvManager,
) -> None:
    lanes, options = [0, 1], [{"id": number, "length": 1} for number in range(6)]
    info = {"id": np.arange(6), "length": np.ones(6, np.int64)}

    def end_episodes() -> list[int]:
        """End an episode in each lane; returns how often each was reset by then."""
        n_resets = []
        assert echoing.step_lanes(lanes, no_actions(echoing)) == lanes
        assert echoing.current["step"].tolist() == [1, 1]  # still that of the last step
        for remote in echoing.remotes:
            remote.send(("get_attr", {"attr": "n_resets"}))
            n_resets.append(remote.recv()[1])
        return n_resets

    echoing.announce_episodes(range(100, 106), info)
    echoing.reset_lanes(lanes, [100, 101], options[:2])
    before = end_episodes()
    # The seed is that of episode 2, the options are others; what lane 1 asks for is as announced.
    echoing.reset_lanes(lanes, [102, 103], [{"id": 9, "length": 1}, options[3]])
    assert echoing.current["id"].tolist() == [9, 3]
    assert echoing.current["seed"].tolist() == [102, 103]
    assert echoing.current["n_resets"].tolist() == [before[0] + 1, before[1]]
    assert echoing.current["initial_state"].tolist() == [True, True]
    end_episodes()
    echoing.reset_lanes([1], [7], [{"length": 1}])  # not announced at all
    assert echoing.current["id"][1] == 0
    assert echoing.current["seed"][1] == 7
    echoing.announce_episodes([], {})


@pytest.mark.parametrize("min_ready", [None, 1])
def test_windows_of_lanes_that_restart_are_those_of_gym_env_inf(min_ready: int | None) -> None:
    def windows(create_env: Callable[..., Any], **options: Any) -> list[TemporalDictTensor]:
        env_args = {"make_env": make_cartpole, "n_lanes": 3, "restarts": True, **options}
        got = []
        with Batcher(
            11, None, create_gru, {}, create_env, env_args, n_threads=0, seeds=4
        ) as batcher:
            batcher.reset()
            for _ in range(4):
                batcher.execute()
                window = batcher.get()
                assert window is not None
                got.append(window)
        return got

    serial = windows(create_serial)
    assert any(bool(window["_done"][:, :-1].any()) for window in serial)
    assert_same(windows(create_manager, envs_per_worker=2, min_ready=min_ready), serial)


class NestedAgent(Agent):
    """Draws nested actions from its noise."""

    n_noise = 5

    def __call__(
        self, state: Any, observation: DictTensor, agent_info: Any = None, history: Any = None
    ) -> Any:
        noise = observation["noise"]
        output = {
            "action/drive": noise[:, :2].double() * 2 - 1,
            "action/gear/0": sample_categorical(torch.zeros(len(noise), 3), noise[:, 2])[0],
            "action/gear/1": (noise[:, 3:] * torch.tensor([2, 4])).long(),
        }
        return DictTensor({}), DictTensor(output), DictTensor({})


@pytest.mark.parametrize("keep_float64", [False, True])
def test_nested_spaces_go_both_ways(keep_float64: bool) -> None:
    lanes = {"make_env": make_nested, "n_lanes": 3, "keep_float64": keep_float64}
    serial = collected(create_serial, lanes, NestedAgent)
    got = collected(create_manager, {**lanes, "envs_per_worker": 2}, NestedAgent)
    assert_same(got, serial)
    assert {"image", "pose/0", "pose/1", "bits", "last_action/drive"} <= set(got[0].keys())


def test_actions_reach_environments_in_full_precision(manager_of: OpenManager) -> None:
    manager = manager_of(make_nested, 2)
    manager.reset()
    actions = no_actions(manager)
    third = np.array([[1 / 3, 0.1], [0.7, 0.9]])
    actions = {**actions, "action/drive": third}
    actions["action/gear/0"][:] = 2
    manager.step_lanes([0, 1], actions)
    for lane, remote in enumerate(manager.remotes):
        remote.send(("get_attr", {"attr": "actions"}))
        _, (action,) = remote.recv()
        assert action["drive"].tolist() == third[lane].tolist()
        assert action["drive"].dtype == np.float64
        assert action["gear"][0] == 2


def test_environments_without_spaces_work() -> None:
    lanes = {"make_env": AncestorCountingEnv, "n_lanes": 2}
    serial = collected(create_serial, lanes, StepCounter)
    assert_same(collected(create_manager, lanes, StepCounter), serial)


def test_agents_with_a_history_work_whatever_is_waited_for() -> None:
    lanes = {"make_env": CountingEnv, "n_lanes": 2}
    serial = collected(create_serial, lanes, HistoryAgent)
    assert_same(collected(create_manager, {**lanes, "min_ready": 1}, HistoryAgent), serial)


def test_what_is_stored_can_be_written_down(manager_of: OpenManager) -> None:
    lengths, ids = [3, 1, 5, 2], [4, 5, 6, 7]
    info = DictTensor({"length": torch.tensor(lengths), "id": torch.tensor(ids)})
    got = collected(
        create_manager,
        {"make_env": CountingEnv, "n_lanes": 2},
        StepCounter,
        infos=(None, info),
    )
    assert_same_tensors(got[0], counting_trajectories(lengths, ids))


# By hand --------------------------------------------------------------------------------------


def test_reset_and_step_are_those_of_gym_env(in_pairs: ParallelEnvManager) -> None:
    serial = create_serial(1, CountingEnv, 3)
    info = DictTensor({"length": torch.tensor([1, 3, 2]), "id": torch.arange(3)})
    steps = [(in_pairs.reset(info), serial.reset(info))]
    for n_running in (3, 2, 1):
        output = DictTensor({"action": torch.arange(n_running)})
        steps += list(zip(in_pairs.step(output), serial.step(output), strict=True))
    for (got, running), (expected, expected_running) in steps:
        assert running.tolist() == expected_running.tolist()
        assert_same_tensors(got, dict(expected.items()))


def test_step_lanes_steps_only_those_lanes(in_pairs: ParallelEnvManager) -> None:
    manager = in_pairs
    manager.reset_lanes(range(3), [0] * 3, [{"id": lane, "length": 3} for lane in range(3)])
    actions = no_actions(manager)
    assert manager.step_lanes([1, 2], actions) == []
    assert manager.step_lanes(range(3), actions) == []
    assert manager.step_lanes([1], actions) == [1]
    assert manager.current["frame"].tolist() == [[1, 0], [3, 1], [2, 2]]
    assert manager.current["reward"].tolist() == [1, 103, 202]
    assert manager.current["done"].tolist() == [False, True, False]
    assert manager.step_lanes([0, 2], actions) == [2]  # that of lane 1 is not told again


def test_the_workers_time_limit_truncates(manager_of: OpenManager) -> None:
    manager = manager_of(LimitedEnv, 1, max_episode_steps=2)
    manager.reset()
    assert manager.step_lanes([0], no_actions(manager)) == []
    assert manager.step_lanes([0], no_actions(manager)) == [0]
    assert manager.current["truncated"].all()
    assert not manager.current["terminated"].any()
    remote = manager.remotes[0]
    remote.send(("reset", None))
    remote.recv()
    for is_last in (False, True):
        remote.send(("step", 0))
        _, (_, _, done, info) = remote.recv()
        assert (done, info) == (is_last, {"TimeLimit.truncated": True} if is_last else {})


def test_all_environments_step_at_the_same_time(sleepy: ParallelEnvManager) -> None:
    manager = sleepy
    manager.reset_lanes(range(3), [0] * 3, [{"sleep_ms": 300}] * 3)
    start = time.monotonic()
    manager.step_lanes(range(3), no_actions(manager))
    assert time.monotonic() - start < 0.9
    start = time.monotonic()
    for remote in manager.remotes:
        remote.send(("step", 0))
    for remote in manager.remotes:
        assert remote.recv()[0] == "transition"
    assert time.monotonic() - start < 0.9


def test_waiting_costs_no_processor_time(sleepy: ParallelEnvManager) -> None:
    manager = sleepy
    manager.reset_lanes(range(3), [0] * 3, [{"sleep_ms": 500}] * 3)
    workers = [psutil.Process(worker.pid) for worker in manager.workers]
    processes = [psutil.Process(), *workers]

    def cpu_s() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    start, before = time.monotonic(), cpu_s()
    manager.step_lanes(range(3), no_actions(manager))  # the caller waits
    time.sleep(0.5)  # the workers wait
    passed_s = time.monotonic() - start
    for after, spent in zip(cpu_s(), before, strict=True):
        assert (after - spent) / passed_s < 0.1


def test_a_step_is_no_message(
    in_pairs: ParallelEnvManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = in_pairs
    manager.reset()

    def refuse(*_: Any) -> None:
        raise AssertionError("a message")

    monkeypatch.setattr(manager._workers.processes, "send", refuse)
    monkeypatch.setattr(manager._workers, "take", refuse)
    for _ in range(3):
        manager.step_lanes(range(3), no_actions(manager))
    assert manager.current["done"].all()


@pytest.mark.parametrize("lanes", [[1, 0], [0, 0], [3], [-1], []], ids=str)
def test_lanes_that_are_none_are_refused(in_pairs: ParallelEnvManager, lanes: list[int]) -> None:
    manager = in_pairs
    manager.reset()
    with pytest.raises(SpecError, match="lanes"):
        manager.step_lanes(lanes, no_actions(manager))
    with pytest.raises(SpecError, match="lanes"):
        manager.reset_lanes(lanes, [0] * len(lanes), [None] * len(lanes))
    with pytest.raises(SpecError, match="'action'"):
        manager.step_lanes([0], {"action": np.zeros((3, 2), np.int64)})
    with pytest.raises(SpecError, match="'action'"):
        manager.step_lanes([0], {"else": np.zeros(3, np.int64)})
    assert manager.step_lanes([0], no_actions(manager)) == []


# First come, first served ---------------------------------------------------------------------


def test_step_some_does_not_wait_for_slow_lanes(sleepy: ParallelEnvManager) -> None:
    manager = sleepy
    slow = {"sleep_ms": 700, "length": 9}
    manager.reset_lanes(range(3), [0] * 3, [{"length": 9}, slow, {"length": 9}])
    actions = no_actions(manager)
    start = time.monotonic()
    assert sorted(manager.step_some(2, [0, 1, 2], actions)) == [0, 2]
    for _ in range(3):
        assert manager.step_some(2, [0, 2], actions) == [0, 2]
    assert time.monotonic() - start < 0.6
    with pytest.raises(UsageError, match="lane 1 is stepping already"):
        manager.step_some(1, [1], actions)
    with pytest.raises(UsageError, match="lane 1 is stepping already"):
        manager.step_lanes([0, 1], actions)
    with pytest.raises(UsageError, match="lane 1 is stepping already"):
        manager.remotes[1].send(("step", 0))
    assert manager.step_some(0) == []
    assert manager.step_some(5) == [1]  # all that are stepping, though fewer than asked for
    assert manager.step_some(5) == []
    assert manager.current["frame"].tolist() == [[4, 0], [1, 0], [4, 0]]


def test_a_reset_gives_up_the_step_of_a_lane(in_pairs: ParallelEnvManager) -> None:
    manager = in_pairs
    options = [{"sleep_ms": 50, "id": lane} for lane in range(3)]
    manager.reset_lanes(range(3), [0] * 3, options)
    assert manager.step_some(0, [0, 1, 2], no_actions(manager)) == []
    manager.reset_lanes([1], [0], [{"id": 5}])
    assert manager.step_some(2) == [0, 2]
    assert manager.current["frame"].tolist() == [[1, 0], [0, 5], [1, 2]]


def test_the_loop_goes_on_without_slow_lanes_and_results_stay_in_order() -> None:
    # In each round another lane is slow.
    sleep_ms = torch.tensor([[100, 0, 0], [0, 100, 0], [0, 0, 100]]).flatten()
    info = DictTensor({"id": torch.arange(9), "length": torch.full((9,), 4), "sleep_ms": sleep_ms})

    def timed(min_ready: int | None) -> float:
        env_args = {"make_env": SleepyEnv, "n_lanes": 3, "min_ready": min_ready}
        with EpisodeBatcher(
            4, 9, StepCounter, {}, create_manager, env_args, n_threads=0, seeds=1
        ) as batcher:
            start = time.monotonic()
            batcher.execute(9, env_info=info)
            result = batcher.get()
            assert result is not None
            assert_same_tensors(result, counting_trajectories([4] * 9, list(range(9))))
            return time.monotonic() - start

    in_step_s, some_s = timed(None), timed(1)
    assert in_step_s > 1.2  # 3 slow episodes of 4 steps
    assert some_s < 1.2  # each lane makes its slow episode while the others go on


# Remotes --------------------------------------------------------------------------------------


def test_remotes_speak_the_whole_protocol(tasked: ParallelEnvManager) -> None:
    manager = tasked
    assert (manager.num_envs, len(manager.workers), len(manager.remotes)) == (2, 2, 2)
    assert (manager.n_tasks, manager.horizon_bamdp) == (7, 3)
    assert manager.observation_space == TaskEnv.observation_space
    assert manager.action_space == TaskEnv.action_space
    for task, remote in enumerate(manager.remotes):
        remote.send(("reset", {"task": task}))
    for task, remote in enumerate(manager.remotes):
        kind, observation = remote.recv()
        assert (kind, observation.tolist()) == ("obs", [0, task])
    remote = manager.remotes[1]
    for step, request in enumerate(
        (np.array([0.5, -0.5]), {"action": np.array([0.5, -0.5])}, torch.tensor([0.5, -0.5])), 1
    ):
        remote.send(("step", request))
        kind, (observation, reward, done, info) = remote.recv()
        assert (kind, observation.tolist(), reward) == ("transition", [step, 1], float(step))
        assert (done, info) == (step == 3, {"t": step})
        assert done is (step == 3)
    remote.send(("get_attr", {"attr": "last_action"}))
    assert remote.recv()[1].tolist() == [0.5, -0.5]
    remote.send(("get_attr", {"attr": "pid"}))
    assert remote.recv() == ("attr", manager.workers[1].pid)
    remote.send(("reset", None))
    assert remote.recv()[1].tolist() == [0, -1]
    assert manager.current["frame"].tolist() == [[0, 0], [0, -1]]


def test_a_task_reaches_environments_either_way(
    tasked: ParallelEnvManager, echoing: ParallelEnvManager
) -> None:
    manager = tasked
    manager.reset_lanes([0, 1], [5, 6], [{"task": 4, "other": 1}, {"task": 2}])
    assert manager.current["frame"].tolist() == [[0, 4], [0, 2]]
    manager.remotes[0].send(("get_attr", {"attr": "given_options"}))
    assert manager.remotes[0].recv() == ("attr", {"other": 1})
    manager.reset(DictTensor({"task": torch.tensor([3, 8])}))
    assert manager.current["frame"].tolist() == [[0, 3], [0, 8]]
    others = echoing
    others.remotes[0].send(("reset", {"task": 9, "options": {"id": 2}}))
    assert others.remotes[0].recv()[1]["id"] == 2
    others.remotes[0].send(("get_attr", {"attr": "resets"}))
    assert others.remotes[0].recv()[1][-1][1] == {"id": 2, "task": 9}


def test_remotes_draw_seeds_that_differ_and_can_be_given(manager_of: OpenManager) -> None:
    def seeds(manager: ParallelEnvManager) -> list[int]:
        drawn = []
        for remote in manager.remotes:
            for _ in range(3):
                remote.send(("reset", None))
                drawn.append(int(remote.recv()[1]["seed"]))
        return drawn

    first, second = manager_of(EchoEnv, 2, envs_per_worker=2), manager_of(EchoEnv, 2)
    drawn = seeds(first)
    assert len(set(drawn)) == 6
    assert seeds(second) == drawn
    for manager in (first, second):
        for remote in manager.remotes:
            remote.send(("seed", {"seed": 11}))
            assert remote.recv() == ("done", None)
    drawn = seeds(first)
    assert drawn[0] == drawn[3] == 11
    assert len(set(drawn)) == 3
    assert seeds(second) == drawn
    first.remotes[0].send(("reset", {"seed": 12}))
    assert first.remotes[0].recv()[1]["seed"] == 12


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (("fly", None), "a request is one of reset, step"),
        ("reset", "a request is"),
        (("reset", 3), "'task'"),
        (("reset", {"goal": 3}), "'task'"),
        (("get_attr", "t"), "'attr'"),
        (("get_attr", {"attr": 3}), "should be a str"),
        (("seed", {"seed": -1}), "a seed should be"),
        (("seed", None), "'seed'"),
        (("reset", {"task": lambda: 0}), "cannot be pickled"),
    ],
)
def test_requests_that_are_none_are_refused(
    tasked: ParallelEnvManager, request_: Any, text: str
) -> None:
    remote = tasked.remotes[0]
    with pytest.raises(SpecError, match=text):
        remote.send(request_)
    remote.send(("reset", None))
    assert remote.recv()[0] == "obs"


def test_one_request_has_one_reply(sleepy: ParallelEnvManager) -> None:
    manager = sleepy
    remote = manager.remotes[0]
    with pytest.raises(UsageError, match="nothing to receive"):
        remote.recv()
    assert not remote.poll()
    remote.send(("reset", {"options": {"sleep_ms": 200}}))
    with pytest.raises(UsageError, match="without an answer"):
        remote.send(("step", 0))
    with pytest.raises(UsageError, match="without an answer"):
        manager.reset()
    assert remote.recv()[0] == "obs"
    remote.send(("step", 0))
    assert not remote.poll()
    with pytest.raises(UsageError, match="without an answer"):
        manager.step_lanes([0, 1, 2], no_actions(manager))
    while not remote.poll(1.0):
        pass
    assert remote.recv()[0] == "transition"


def test_large_requests_and_replies_do_not_block_each_other(in_pairs: ParallelEnvManager) -> None:
    manager = in_pairs
    large = np.zeros(2**19)
    for _ in range(2):
        for remote in manager.remotes:
            remote.send(("reset", {"options": {"large": large}}))
        for remote in manager.remotes:
            assert remote.recv()[0] == "obs"


def test_a_closed_remote_is_refused_and_the_others_go_on(manager_of: OpenManager) -> None:
    manager = manager_of(CountingEnv, 3, envs_per_worker=2)
    manager.reset()
    manager.remotes[2].send(("close", None))  # the last of its worker, which ends
    manager.workers[1].join(5)
    assert [worker.is_alive() for worker in manager.workers] == [True, False]
    with pytest.raises(UsageError, match="environment 2 was closed"):
        manager.remotes[2].send(("reset", None))
    with pytest.raises(UsageError, match="environment 2 was closed"):
        manager.step_lanes([0, 1, 2], no_actions(manager))
    assert manager.step_lanes([0, 1], no_actions(manager)) == []
    manager.remotes[0].send(("close", None))
    assert not manager.closed
    manager.remotes[1].send(("close", None))
    assert manager.closed
    assert not any(worker.is_alive() for worker in manager.workers)


class SlowLargeReply(CountingEnv):
    """Says more in a reply than a pipe holds."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"large": np.zeros(2**24, np.uint8)}


def test_polling_a_remote_waits_until_a_large_reply_is_there_as_a_whole(
    manager_of: OpenManager,
) -> None:
    remote = manager_of(SlowLargeReply, 1).remotes[0]
    remote.send(("reset", None))
    remote.recv()
    for _ in range(3):
        remote.send(("step", 0))
        assert remote.poll(30.0)
        assert remote.recv()[0] == "transition"
    assert not remote.poll(0.0)
