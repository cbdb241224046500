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
    ConstantAgent,
    FunctionAgent,
    HistoryAgent,
    InfoEcho,
    InitialStateCounter,
    NoisyAgent,
    StepCounter,
    zeros,
)
from support.envs import (
    FIRST_STATE,
    CountingEnv,
    EchoEnv,
    FailingEnv,
    counting_trajectories,
    create_counting,
)

FLAGS = ("terminated", "truncated", "done", "initial_state")


def make(
    n_timesteps: int = 3, n_envs: int = 3, agent: Any = StepCounter, **changes: Any
) -> Batcher:
    restarts = changes.pop("restarts", False)
    env_args = {"n_envs": n_envs, "restarts": restarts}
    arguments: dict[str, Any] = {"create_env": create_counting, "env_args": env_args, "seeds": 0}
    arguments.update(changes)
    return Batcher(n_timesteps, create_agent=agent, n_threads=0, **arguments)


def info_of(lengths: Sequence[int]) -> DictTensor:
    return DictTensor({"length": torch.tensor(lengths), "id": torch.arange(1, len(lengths) + 1)})


def windows(batcher: Batcher, n: int) -> list[TemporalDictTensor]:
    """Up to ``n`` windows, until the lanes have stopped."""
    found = []
    for _ in range(n):
        batcher.execute()
        window = batcher.get()
        if window is None:
            break
        found.append(window)
    return found


def lane_steps(found: Sequence[TemporalDictTensor], key: str, n_lanes: int) -> list[list[Any]]:
    """A key's values of every lane, all windows joined."""
    joined: list[list[Any]] = [[] for _ in range(n_lanes)]
    for window in found:
        for row, lane in enumerate(window.info["episode"].tolist()):
            length = int(window.lengths[row])
            joined[lane] += window[key][row, :length].tolist()
    return joined


# Windows of lanes that end


def test_windows_have_the_next_steps_of_the_running_lanes() -> None:
    with make(3) as batcher:
        batcher.reset(env_info=info_of([2, 7, 3]))
        first, second, third = windows(batcher, 10)
    assert [w.lengths.tolist() for w in (first, second, third)] == [[2, 3, 3], [3], [1]]
    assert first["frame"][:, 0].tolist() == [[0, 1], [0, 2], [0, 3]]
    assert second["frame"].tolist() == [[[3, 2], [4, 2], [5, 2]]]
    assert second["_frame"].tolist() == [[[4, 2], [5, 2], [6, 2]]]
    assert third["frame"].tolist() == [[[6, 2]]]
    assert third["_done"].tolist() == [[True]]
    assert [w.info["episode"].tolist() for w in (first, second, third)] == [[0, 1, 2], [1], [1]]


@pytest.mark.parametrize("agent", [StepCounter, InitialStateCounter])
@pytest.mark.parametrize("n_timesteps", [1, 2, 3, 5, 20])
def test_joined_windows_are_the_episodes(n_timesteps: int, agent: Any) -> None:
    lengths = [4, 1, 10, 5, 5]
    with make(n_timesteps, 5, agent) as batcher:
        batcher.reset(env_info=info_of(lengths))
        found = windows(batcher, 100)
        assert batcher.all_stopped
    whole = counting_trajectories(lengths, range(1, 6))
    for key, expected in whole.items():
        rows = [row[:length] for row, length in zip(expected.tolist(), lengths, strict=True)]
        assert lane_steps(found, key, 5) == rows, key
    for window in found:
        assert set(window.keys()) == set(whole)
        assert window.lengths.min() >= 1
        assert window.lengths.max() <= n_timesteps
        lanes = window.info["episode"].tolist()
        assert lanes == sorted(lanes)
        padding = window.mask() == 0
        for key in window:
            assert window[key].dtype == whole[key].dtype
            assert not window[key][padding].any(), key


def test_get_is_none_once_all_lanes_have_stopped() -> None:
    with make(3) as batcher:
        batcher.reset(env_info=info_of([3, 3, 3]))
        batcher.execute()
        assert not batcher.all_stopped
        assert batcher.get().lengths.tolist() == [3, 3, 3]
        assert batcher.all_stopped
        for blocking in (True, False):
            assert batcher.get(blocking=blocking) is None
        batcher.execute()
        assert batcher.get() is None
        assert batcher.all_stopped


def test_not_ready_and_all_stopped_are_told_apart() -> None:
    with make(3) as batcher:
        assert not batcher.all_stopped
        batcher.reset(env_info=info_of([2, 2, 2]))
        assert not batcher.all_stopped
        batcher.execute()
        assert not batcher.all_stopped
        while (window := batcher.get(blocking=False)) is None:
            assert not batcher.all_stopped
        assert window.lengths.tolist() == [2, 2, 2]
        assert batcher.all_stopped


def test_reset_after_the_end_starts_anew() -> None:
    with make(3) as batcher:
        for lengths in ([1, 2, 3], [5, 1, 1], [3, 3, 3]):
            batcher.reset(env_info=info_of(lengths))
            assert not batcher.all_stopped
            found = windows(batcher, 10)
            joined = lane_steps(found, "frame", 3)
            assert [len(row) for row in joined] == lengths


def test_reset_in_the_middle_starts_anew() -> None:
    with make(3) as batcher:
        batcher.reset(env_info=info_of([9, 9, 9]))
        batcher.execute()
        batcher.get()
        batcher.reset(env_info=info_of([4, 5, 6]))
        (window,) = windows(batcher, 1)
        assert window["frame"][:, :, 0].tolist() == [[0, 1, 2]] * 3
        assert window["initial_state"][:, 0].all()
        assert window["steps"][:, 0].tolist() == [FIRST_STATE] * 3
        assert window.info["env_info/length"].tolist() == [4, 5, 6]


def test_reset_gives_up_what_is_pending() -> None:
    with make(3) as batcher:
        batcher.reset(env_info=info_of([9, 9, 9]))
        batcher.execute()
        batcher.execute()
        batcher.reset(env_info=info_of([1, 2, 4]))
        with pytest.raises(UsageError):
            batcher.get()
        found = windows(batcher, 10)
        assert [w.lengths.tolist() for w in found] == [[1, 2, 3], [1]]


def test_several_windows_may_be_requested_before_get() -> None:
    def run(n_ahead: int) -> list[Any]:
        with make(2, agent=NoisyAgent) as batcher:
            batcher.reset(env_info=info_of([3, 9, 5]))
            found = []
            while not batcher.all_stopped:
                for _ in range(n_ahead):
                    batcher.execute()
                for _ in range(n_ahead):
                    window = batcher.get()
                    if window is not None:
                        found.append({key: window[key].tolist() for key in window})
        return found

    assert len(run(1)) == 5
    assert run(1) == run(2) == run(3)


def test_a_window_requested_ahead_of_the_end_is_none() -> None:
    with make(5) as batcher:
        batcher.reset(env_info=info_of([2, 3, 4]))
        batcher.execute()
        batcher.execute()
        assert batcher.get().lengths.tolist() == [2, 3, 4]
        assert batcher.get() is None
        batcher.reset(env_info=info_of([2, 3, 4]))
        batcher.execute()
        assert batcher.get().lengths.tolist() == [2, 3, 4]


def test_a_kept_window_never_changes() -> None:
    with make(2, 2) as batcher:
        batcher.reset(env_info=info_of([20, 20]))
        found = windows(batcher, 10)
        batcher.reset(env_info=info_of([20, 20]))
        windows(batcher, 10)
    assert lane_steps(found, "frame", 2) == [
        [[t, lane + 1] for t in range(20)] for lane in range(2)
    ]


def test_windows_have_no_zeros_missing_where_longer_ones_were() -> None:
    with make(6, 2) as batcher:
        for lengths in ([6, 6], [2, 5], [1, 3], [6, 1]):
            batcher.reset(env_info=info_of(lengths))
            (window,) = windows(batcher, 5)
            expected = counting_trajectories(lengths, [1, 2])
            for key in window:
                assert window[key].tolist() == expected[key].tolist(), key
            del window


def test_there_is_no_need_for_infos() -> None:
    with make(5, 2) as batcher:
        for infos in ((), (None, None), (DictTensor({}), DictTensor({}))):
            batcher.reset(*infos)
            (window,) = windows(batcher, 5)
            assert window.lengths.tolist() == [3, 3]
            assert set(window.info.keys()) == {"episode", "seed", "policy_version"}


def test_info_has_the_rows_of_the_lanes_that_run() -> None:
    with make(2) as batcher:
        batcher.reset(DictTensor({"w": torch.rand(3, 2)}), info_of([1, 5, 3]))
        found = windows(batcher, 10)
    assert [w.info["env_info/id"].tolist() for w in found] == [[1, 2, 3], [2, 3], [2]]
    assert [tuple(w.info["agent_info/w"].shape) for w in found] == [(3, 2), (2, 2), (1, 2)]


def test_the_policy_version_is_that_of_the_window() -> None:
    class Updated(StepCounter):
        def update(self, info: Any) -> None:
            pass

    with make(2, agent=Updated) as batcher:
        batcher.reset(env_info=info_of([9, 9, 9]))
        versions = []
        for number in range(3):
            if number:
                batcher.update(number)
            batcher.execute()
            versions.append(batcher.get().info["policy_version"].tolist())
    assert versions == [[0] * 3, [1] * 3, [2] * 3]


def test_agent_info_follows_its_lane() -> None:
    with make(2, agent=InfoEcho, restarts=True) as batcher:
        batcher.reset(DictTensor({"id": torch.tensor([7, 8, 9])}), info_of([1, 5, 3]))
        found = windows(batcher, 5)
    expected = [[7] * 10, [8] * 10, [9] * 10]
    assert lane_steps(found, "info_id", 3) == expected
    assert lane_steps(found, "first_id", 3) == expected


def test_history_goes_on_over_windows() -> None:
    with make(2, agent=HistoryAgent) as batcher:
        batcher.reset(env_info=info_of([5, 3, 7]))
        found = windows(batcher, 10)
    assert lane_steps(found, "seen", 3) == [list(range(5)), list(range(3)), list(range(7))]
    assert lane_steps(found, "frames", 3)[2] == [0, 0, 1, 3, 6, 10, 15]


# Lanes that restart on their own


def expected_lane(length: int, number: int, n_steps: int) -> dict[str, list[Any]]:
    """All keys of a lane of ``StepCounter`` and ``CountingEnv`` that restarts for ever."""
    whole = counting_trajectories([length], [number])
    return {key: (tensor[0].tolist() * n_steps)[:n_steps] for key, tensor in whole.items()}


@pytest.mark.parametrize("n_timesteps", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("agent", [StepCounter, InitialStateCounter])
def test_lanes_restart_inside_and_between_windows(n_timesteps: int, agent: Any) -> None:
    lengths = [3, 1, 4]
    with make(n_timesteps, agent=agent, restarts=True) as batcher:
        batcher.reset(env_info=info_of(lengths))
        found = windows(batcher, 5)
        assert not batcher.all_stopped
    for window in found:
        assert window.lengths.tolist() == [n_timesteps] * 3
        assert window.full()
        assert window.info["episode"].tolist() == [0, 1, 2]
    n_steps = 5 * n_timesteps
    lanes = [expected_lane(length, lane + 1, n_steps) for lane, length in enumerate(lengths)]
    assert set(found[0].keys()) == set(lanes[0])
    for key in lanes[0]:
        assert lane_steps(found, key, 3) == [lane[key] for lane in lanes], key
        assert found[0][key].dtype == counting_trajectories([1], [1])[key].dtype


def test_at_a_boundary_the_value_after_the_step_is_the_terminal_one() -> None:
    with make(5, 1, restarts=True) as batcher:
        batcher.reset(env_info=info_of([2]))
        (window,) = windows(batcher, 1)
    assert window["frame"][0, :, 0].tolist() == [0, 1, 0, 1, 0]
    assert window["_frame"][0, :, 0].tolist() == [1, 2, 1, 2, 1]
    assert window["_done"][0].tolist() == [False, True, False, True, False]
    assert window["initial_state"][0].tolist() == [True, False, True, False, True]
    assert window["reward"][0].tolist() == [0, 101, 0, 101, 0]
    assert window["_reward"][0].tolist() == [101, 102, 101, 102, 101]
    assert window["last_action"][0].tolist() == [0, 1, 0, 1, 0]
    assert window["_last_action"][0].tolist() == [1, 2, 1, 2, 1]
    assert window["_steps"][0].tolist() == [11, 12, 11, 12, 11]
    assert not window["done"].any()
    assert not window["_initial_state"].any()


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_how_an_episode_ended_is_kept_at_the_boundary(ends: int) -> None:
    info = info_of([2, 3])
    info.set("ends", torch.full((2,), ends))
    with make(6, 2, restarts=True) as batcher:
        batcher.reset(env_info=info)
        (window,) = windows(batcher, 1)
    done = [[False, True] * 3, [False, False, True] * 2]
    assert window["_done"].tolist() == done
    assert window["_terminated"].tolist() == (done if ends != 1 else [[False] * 6] * 2)
    assert window["_truncated"].tolist() == (done if ends != 0 else [[False] * 6] * 2)


def test_env_info_is_kept_at_automatic_resets_with_new_seeds() -> None:
    envs = [EchoEnv(), EchoEnv()]
    with make(4, 2, ConstantAgent, create_env=lambda seed: GymEnvInf(envs, seed), env_args={}) as b:
        for env in envs:
            env.resets.clear()
        b.reset(env_info=info_of([2, 3]))
        found = windows(b, 3)
    for lane, env in enumerate(envs):
        options = [options for _, options in env.resets]
        assert options == [{"length": lane + 2, "id": lane + 1}] * len(options)
        assert len(options) == (7 if lane == 0 else 5)
        first = [
            seed
            for seed, start in zip(
                lane_steps(found, "seed", 2)[lane],
                lane_steps(found, "initial_state", 2)[lane],
                strict=True,
            )
            if start
        ]
        assert first == [seed for seed, _ in env.resets][: len(first)]
        assert found[0].info["seed"][lane] == first[0]
    seeds = [seed for env in envs for seed, _ in env.resets]
    assert len(set(seeds)) == len(seeds)


def test_windows_repeat_with_the_same_seed_and_differ_after_a_reset() -> None:
    def run(seeds: int) -> list[Any]:
        with make(4, 2, NoisyAgent, restarts=True, seeds=seeds) as batcher:
            found = []
            for _ in range(2):
                batcher.reset(env_info=info_of([2, 3]))
                found += [window["noise"].tolist() for window in windows(batcher, 3)]
        return found

    first = run(1)
    assert run(1) == first
    rows = [
        str(step) for seeds in (1, 2) for window in run(seeds) for row in window for step in row
    ]
    assert len(set(rows)) == len(rows) == 2 * 6 * 2 * 4


def test_noise_does_not_depend_on_the_length_of_the_windows() -> None:
    def run(n_timesteps: int) -> list[list[Any]]:
        with make(n_timesteps, 2, NoisyAgent, restarts=True) as batcher:
            batcher.reset(env_info=info_of([5, 50]))
            return lane_steps(windows(batcher, 120 // n_timesteps), "noise", 2)

    assert run(1) == run(4) == run(40) == run(120)


@pytest.mark.parametrize("kind", [GymEnv, GymEnvInf])
def test_one_lane_is_enough(kind: Any) -> None:
    with make(2, create_env=lambda seed: kind([CountingEnv()], seed), env_args={}) as batcher:
        batcher.reset()
        found = windows(batcher, 2)
    assert [w["frame"][0, :, 0].tolist() for w in found] == (
        [[0, 1], [2]] if kind is GymEnv else [[0, 1], [2, 0]]
    )


# The order of calls


def test_execute_before_reset_raises_usage_error() -> None:
    with make() as batcher, pytest.raises(UsageError, match="reset"):
        batcher.execute()


def test_get_before_reset_or_execute_raises_usage_error() -> None:
    with make() as batcher:
        with pytest.raises(UsageError):
            batcher.get()
        batcher.reset()
        with pytest.raises(UsageError):
            batcher.get()


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.reset(),
        lambda b: b.execute(),
        lambda b: b.get(),
        lambda b: b.update({}),
        lambda b: b.all_stopped,
        lambda b: b.n_lanes,
    ],
    ids=["reset", "execute", "get", "update", "all_stopped", "n_lanes"],
)
def test_a_closed_batcher_says_that_it_is_closed(call: Any) -> None:
    batcher = make()
    batcher.reset()
    batcher.execute()
    batcher.close()
    batcher.close()
    with pytest.raises(UsageError, match="closed"):
        call(batcher)


def test_the_number_of_lanes_is_known() -> None:
    with make(n_envs=5) as batcher:
        assert batcher.n_lanes == 5


@pytest.mark.parametrize("name", ["agent_info", "env_info"])
def test_infos_of_another_size_are_refused(name: str) -> None:
    with make(n_envs=3) as batcher:
        with pytest.raises(SpecError, match=f"{name} has 2 rows, 3 were expected"):
            batcher.reset(**{name: DictTensor({"id": torch.arange(2)})})
        with pytest.raises(SpecError, match=name):
            batcher.reset(**{name: torch.arange(3)})


def test_infos_may_be_changed_after_reset() -> None:
    info = info_of([2, 3])
    with make(2, 2, restarts=True) as batcher:
        batcher.reset(env_info=info)
        info["length"].fill_(9)
        found = windows(batcher, 4)
    assert lane_steps(found, "_done", 2) == [
        [False, True] * 4,
        [False, False, True] * 2 + [False] * 2,
    ]
    assert found[0].info["env_info/length"].tolist() == [2, 3]


@pytest.mark.parametrize("n_timesteps", [0, -1, 2.5])
def test_windows_have_a_length(n_timesteps: Any) -> None:
    with pytest.raises(SpecError, match="n_timesteps"):
        make(n_timesteps)


# Errors


def failing(restarts: bool, call: str = "step") -> Any:
    kind = GymEnvInf if restarts else GymEnv

    def create_env(seed: int) -> GymEnv:
        envs = [FailingEnv(KeyError("goal"), call, fails_at=2, step=4) for _ in range(3)]
        return kind(envs, seed)

    return create_env


@pytest.mark.parametrize("restarts", [False, True])
def test_an_error_says_where_and_a_reset_repairs_it(restarts: bool) -> None:
    with make(3, create_env=failing(restarts), env_args={}) as batcher:
        batcher.reset(env_info=info_of([9, 9, 9]))
        batcher.execute()
        batcher.get()
        batcher.execute()
        with pytest.raises(EnvError, match="KeyError: 'goal'") as caught:
            batcher.get()
        where = caught.value.where
        assert (where.worker, where.lane, where.step) == (0, 1, 4)
        assert where.env_info == {"length": 9, "id": 2}
        batcher.reset(env_info=info_of([3, 4, 2]))
        (window, *_) = windows(batcher, 2)
        assert window["frame"][:, 0].tolist() == [[0, 1], [0, 2], [0, 3]]
        assert window["steps"][:, 0].tolist() == [FIRST_STATE] * 3


def test_the_step_of_an_error_counts_from_the_last_restart() -> None:
    class Env(CountingEnv):
        n_steps = 0

        def step(self, action: Any) -> Any:
            self.n_steps += 1
            if self.n_steps == 9:
                raise KeyError("goal")
            return super().step(action)

    def create_env(seed: int) -> GymEnv:
        return GymEnvInf([Env(length=3)], seed)

    with make(4, create_env=create_env, env_args={}) as batcher:
        batcher.reset()
        windows(batcher, 2)
        batcher.execute()
        with pytest.raises(EnvError) as caught:
            batcher.get()
        assert caught.value.where.step == 2


def test_after_an_error_windows_are_refused_until_reset() -> None:
    def go_on(batcher: Batcher) -> Any:
        batcher.execute()
        return batcher.get()

    with make(3, create_env=failing(False), env_args={}) as batcher:
        batcher.reset(env_info=info_of([9, 9, 9]))
        windows(batcher, 1)
        batcher.execute()
        with pytest.raises(EnvError):
            batcher.get()
        with pytest.raises(UsageError, match="reset"):
            go_on(batcher)
        batcher.reset(env_info=info_of([1, 1, 1]))
        assert go_on(batcher).lengths.tolist() == [1, 1, 1]


def test_an_error_of_the_agent_is_an_agent_error() -> None:
    def agent(state: Any, observation: DictTensor, agent_info: Any, history: Any) -> Any:
        if (observation["frame"][:, 0] == 4).any():
            raise KeyError("goal")
        return DictTensor(), DictTensor({"action": zeros(observation)}), DictTensor()

    with make(3, agent=lambda: FunctionAgent(agent)) as batcher:
        batcher.reset(env_info=info_of([9, 9, 9]))
        windows(batcher, 1)
        batcher.execute()
        with pytest.raises(AgentError, match="the agent raised KeyError: 'goal'") as caught:
            batcher.get()
        assert caught.value.where.step == 4


def test_an_error_at_a_reset_is_reported() -> None:
    with make(3, create_env=failing(False, "reset"), env_args={}) as batcher:
        batcher.reset(env_info=info_of([1, 1, 1]))
        batcher.execute()
        with pytest.raises(EnvError, match=r"env\.reset raised KeyError"):
            batcher.get()
