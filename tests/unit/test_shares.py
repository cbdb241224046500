"""Lanes that are reset together or not at all: the data of a loop written by hand, in order."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from process.watching import assert_all_equal, assert_equal

from rlpool import (
    DictTensor,
    EnvSpecError,
    EpisodeBatcher,
    SpecError,
    TemporalDictTensor,
    VectorGymEnv,
)
from rlpool.envs.vec_env import LaneError
from rlpool.seeding import stream_seed

from support.agents import BinaryAgent, binary_action
from support.fragile import FragileEnv, RecurrentAgent
from support.vector_envs import ArrayEnv, Noted, windows

N_LANES = 3
RESTARTING = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)


def create_arrays(
    seed: int, mode: str = "NextStep", seeds: str = "all", n_lanes: int = N_LANES, **arguments: Any
) -> VectorGymEnv:
    return VectorGymEnv(ArrayEnv(n_lanes, AutoresetMode(mode), seeds), seed, **arguments)


def create_poles(seed: int) -> Any:
    return CartPoleVectorEnv(N_LANES, max_episode_steps=20)


def by_hand(env: Any, seed: int, shares: list[list[int]], limit: int = 99) -> dict[int, Any]:
    """Run the episodes of each lane, one after another; returns frames, rewards, flags of each."""
    is_late = env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    frames, _ = env.reset(seed=seed)
    lanes, n_resets = range(env.num_envs), 1
    todo, found = [deque(share) for share in shares], {}
    current: dict[int, Any] = {}
    actions, at_start, resting = np.zeros(env.num_envs, np.int64), set(lanes), set()
    while True:
        for lane in at_start:
            if todo[lane]:
                current[lane] = [np.float32(frames[lane])], [], []
        if not current and not any(todo):
            return found
        if not current and not resting:
            frames, _ = env.reset(seed=stream_seed(seed, n_resets))
            n_resets, at_start = n_resets + 1, set(lanes)
            continue
        if current:
            taken = {lane: binary_action(seen[0][-1]) for lane, seen in current.items()}
            actions = np.array([taken.get(lane, taken[min(taken)]) for lane in lanes])
        frames, rewards, terminated, truncated, infos = env.step(actions)
        ended = terminated | truncated
        finals = frames if is_late or not ended.any() else infos["final_obs"]
        for lane, seen in list(current.items()):
            seen[0].append(np.float32(finals[lane] if ended[lane] else frames[lane]))
            seen[1].append(np.float32(rewards[lane]))
            is_cut = len(seen[1]) == limit
            if ended[lane] or is_cut:
                seen[2].extend([terminated[lane], truncated[lane] or is_cut])
                found[todo[lane].popleft()] = current.pop(lane)
        now = set(np.flatnonzero(ended).tolist())
        at_start, resting = (resting, now) if is_late else (now, set())


def assert_is(result: TemporalDictTensor | None, expected: dict[int, Any]) -> None:
    assert result is not None
    assert len(result.lengths) == len(expected)
    for row, (frames, rewards, flags) in expected.items():
        n = len(rewards)
        assert int(result.lengths[row]) == n
        assert result["frame"][row, :n].numpy().tobytes() == np.stack(frames[:-1]).tobytes()
        assert result["_frame"][row, :n].numpy().tobytes() == np.stack(frames[1:]).tobytes()
        assert result["_reward"][row, :n].numpy().tobytes() == np.stack(rewards).tobytes()
        last = [bool(result[f"_{key}"][row, n - 1]) for key in ("terminated", "truncated")]
        assert last == [bool(flag) for flag in flags]
        assert not result["_done"][row, : n - 1].any()


def shares_of(n_episodes: int, worker: int = 0, n_workers: int = 1) -> list[list[int]]:
    """Episode i runs in row i % n_lanes, and rows go around the workers."""
    rows = range(n_episodes)
    mine = [row for row in rows if row // N_LANES % n_workers == worker]
    return [[row for row in mine if row % N_LANES == lane] for lane in range(N_LANES)]


def collect(
    requests: list[int], n_slots: int = 40, create_env: Any = create_arrays, **env_args: Any
) -> list[Any]:
    with EpisodeBatcher(
        8, n_slots, BinaryAgent, {}, create_env, env_args, n_threads=0, seeds=5
    ) as batcher:
        for n_episodes in requests:
            batcher.execute(n_episodes)
        return [batcher.get() for _ in requests]


@pytest.mark.parametrize("n_slots", [40, 3])
@pytest.mark.parametrize(
    ("create", "arguments", "make"),
    [
        (create_poles, {}, partial(create_poles, 0)),
        *[(create_arrays, {"mode": m.value}, partial(ArrayEnv, 3, m, "all")) for m in RESTARTING],
    ],
)
def test_episodes_are_those_of_a_loop_over_the_vector_environment(
    create: Any, arguments: Any, make: Any, n_slots: int
) -> None:
    results = collect([14, 1, 2], n_slots, create, **arguments)
    for result in results:
        seed, shares = int(result.info["seed"][0]), shares_of(len(result.lengths))
        assert result.info["seed"].unique().tolist() == [seed]
        assert "reproducible" not in result.info
        assert_is(result, by_hand(make(), seed, shares))


def test_a_request_has_the_same_bits_whatever_came_before() -> None:
    for mode in RESTARTING:
        after_one, after_many = (
            collect([9, 7], mode=mode.value),
            collect([1] * 9 + [7], mode=mode.value),
        )
        assert_equal(after_one[-1], after_many[-1])


def test_nothing_seeded_continues_where_it_was() -> None:
    first, second = collect([5, 4], seeds="nothing"), collect([5, 4], seeds="nothing")
    assert_all_equal(first, second)
    assert all(result.info["reproducible"].all() for result in first)
    assert not torch.equal(first[0]["frame"][0, 0], first[1]["frame"][0, 0])


def test_a_warning_tells_once_that_nothing_can_be_seeded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collect([5, 4], seeds="all")
    assert not caplog.records
    collect([5, 4], seeds="nothing")
    (record,) = caplog.records
    assert "cannot be seeded" in record.getMessage()
    assert "info['reproducible']" in record.getMessage()


def test_one_reset_serves_a_request_and_its_seed_is_told() -> None:
    noted = Noted(ArrayEnv(3, AutoresetMode.NEXT_STEP, "all"))
    with EpisodeBatcher(
        8, 40, BinaryAgent, {}, lambda: VectorGymEnv(noted, 0, seeding="request"), n_threads=0
    ) as batcher:
        noted.resets.clear()
        batcher.execute(14, env_info={"length": 4})
        result = batcher.get()
    assert result is not None
    assert noted.resets == [(int(result.info["seed"][0]), {"length": 4})]
    assert result.lengths[:3].tolist() == [4] * 3


@pytest.mark.parametrize(
    ("n_slots", "env_info", "words", "fix"),
    [
        (40, {"length": [2, 2, 3]}, r"env_info\['length'\] has different rows", "SyncVectorEnv"),
        (2, None, "n_slots is 2", "n_slots=3"),
    ],
)
def test_what_lanes_that_are_reset_together_cannot_run_is_refused_by_execute(
    n_slots: int, env_info: Any, words: str, fix: str
) -> None:
    with EpisodeBatcher(8, n_slots, BinaryAgent, {}, create_arrays, n_threads=0) as batcher:
        batcher.execute(2)
        with pytest.raises(SpecError, match=words) as caught:
            batcher.execute(3, env_info=env_info)
        assert fix in caught.value.fix
        assert batcher.get() is not None


@pytest.mark.parametrize("limit", [1, 4])
@pytest.mark.parametrize("mode", RESTARTING)
def test_lanes_that_a_time_limit_stopped_go_on_with_the_next_episode(mode: Any, limit: int) -> None:
    result = collect([14], mode=mode.value, max_episode_steps=limit)[0]
    assert int(result.lengths.max()) == limit
    seed = int(result.info["seed"][0])
    assert_is(result, by_hand(ArrayEnv(3, mode, "all"), seed, shares_of(14), limit))


def test_lanes_that_never_end_by_themselves_are_reset_together() -> None:
    noted = Noted(gymnasium.make_vec("CartPole-v1", 3, "vector_entry_point"))
    create = lambda: VectorGymEnv(noted, 0, seeding="request", max_episode_steps=5)  # noqa: E731
    with EpisodeBatcher(8, 40, BinaryAgent, {}, create, n_threads=0, seeds=1) as batcher:
        noted.resets.clear()
        batcher.execute(9)
        result = batcher.get()
    assert result is not None
    assert result.lengths.tolist() == [5] * 9
    assert len({seed for seed, _ in noted.resets}) == 3


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, None])
def test_lanes_that_never_restart_are_refused(mode: Any) -> None:
    def create(seed: int) -> Any:
        return VectorGymEnv(ArrayEnv(3, mode, "all"), seed, seeding="request")

    with EpisodeBatcher(8, 40, BinaryAgent, {}, create, n_threads=0) as batcher:
        batcher.execute(3)
        with pytest.raises(EnvSpecError, match="do not restart by themselves") as caught:
            batcher.get()
        assert "AutoresetMode.NEXT_STEP" in caught.value.fix


def test_single_environments_that_cannot_be_seeded_are_a_stream() -> None:
    def create(seed: int) -> Any:
        return VectorGymEnv(SyncVectorEnv([FragileEnv] * 3), seed, seeding="stream")

    result = collect([14], create_env=create)[0]
    expected = by_hand(SyncVectorEnv([FragileEnv] * 3), int(result.info["seed"][0]), shares_of(14))
    for row in range(3):  # later ones restart without a seed
        assert int(result.lengths[row]) == len(expected[row][1])
    assert result.info["reproducible"].all()


# Windows and reset()/step() -----------------------------------------------------------------


def array_windows(n_timesteps: int, n_windows: int, **env_args: Any) -> list[Any]:
    found = windows(create_arrays, [n_windows], n_timesteps, create_agent=BinaryAgent, **env_args)
    return [window for window in found if window is not None]


def steps_of(parts: list[Any], lane: int, n_steps: int) -> list[Any]:
    """Frames, next frames, rewards and done of a lane's first steps, through all windows."""
    rows = [(part, part.info["episode"].tolist().index(lane)) for part in parts]
    keys = ("frame", "_frame", "_reward", "_done")
    found = [torch.cat([p[key][r, : p.lengths[r]] for p, r in rows]) for key in keys]
    return [values[:n_steps].numpy().tobytes() for values in found]


@pytest.mark.parametrize("mode", RESTARTING)
@pytest.mark.parametrize(("n_timesteps", "limit"), [(1, 99), (2, 99), (5, 99), (30, 99), (5, 4)])
def test_lanes_of_windows_restart_as_in_a_loop(mode: Any, n_timesteps: int, limit: int) -> None:
    parts = array_windows(
        n_timesteps, 60 // n_timesteps, mode=mode.value, auto_reset=True, max_episode_steps=limit
    )
    for part in parts:
        assert int(part.lengths.max()) == n_timesteps
        assert not part["action"][part.mask() == 0].any()
        assert not part["_frame"][part.mask() == 0].any()
    seed = int(parts[0].info["seed"][0])
    shares = [list(range(lane, 90, 3)) for lane in range(3)]
    expected = by_hand(ArrayEnv(3, mode, "all"), seed, shares, limit)
    for lane, share in enumerate(shares):
        frames = [f for row in share for f in expected[row][0][:-1]]
        after = [f for row in share for f in expected[row][0][1:]]
        rewards = [r for row in share for r in expected[row][1]]
        done = [
            t == len(expected[row][1]) - 1 for row in share for t in range(len(expected[row][1]))
        ]
        n_steps = sum(int(p.lengths[lane]) for p in parts)
        theirs = [np.stack(values[:n_steps]) for values in (frames, after, rewards, done)]
        assert steps_of(parts, lane, n_steps) == [values.tobytes() for values in theirs]
        assert n_steps >= 30


@pytest.mark.parametrize("mode", RESTARTING)
def test_lanes_of_windows_without_restarts_stop_at_their_end(mode: Any) -> None:
    parts = array_windows(2, 20, mode=mode.value)
    seed = int(parts[0].info["seed"][0])
    expected = by_hand(ArrayEnv(3, mode, "all"), seed, shares_of(3))
    for lane in range(3):
        mine = [part for part in parts if lane in part.info["episode"]]
        frames, rewards, _ = expected[lane]
        assert sum(int(p.lengths[p.info["episode"].tolist().index(lane)]) for p in mine) == len(
            rewards
        )
        assert steps_of(mine, lane, 99)[0] == np.stack(frames[:-1]).tobytes()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("mode", RESTARTING)
def test_reset_and_step_with_tensors(mode: Any, restarts: bool) -> None:
    vec = create_arrays(3, mode.value, auto_reset=restarts)
    for _ in range(2):
        (observation, running), steps = vec.reset(), torch.zeros(3, dtype=torch.int64)
        assert running.tolist() == [0, 1, 2]
        for _ in range(30):
            assert observation["frame"][:, 0].tolist() == steps[running].tolist()
            action = torch.zeros(len(running), dtype=torch.int64)
            (after, stepped), (observation, running) = vec.step(DictTensor({"action": action}))
            steps[stepped] += 1
            assert after["frame"][:, 0].tolist() == steps[stepped].tolist()
            steps[stepped[after["done"]]] = 0
            if not len(running):
                break
        assert restarts == bool(len(running))


def test_a_lane_cannot_be_reset_alone() -> None:
    vec = create_arrays(3)
    vec.begin_anew()
    vec.reset_lanes([0, 2], [7, 7], [None, None])
    vec.step_lanes([0, 2], {"action": np.zeros(3, np.int64)})
    with pytest.raises(LaneError) as caught:
        vec.reset_lanes([2], [8], [None])
    assert "cannot reset single lanes" in str(caught.value.__cause__)


def test_agents_with_state_and_noise_do_not_see_the_steps_between_episodes() -> None:
    def run(**env_args: Any) -> Any:
        with EpisodeBatcher(
            8, 40, RecurrentAgent, {}, create_arrays, env_args, n_threads=0, seeds=5
        ) as batcher:
            batcher.execute(14, {"gain": torch.linspace(0.5, 2.0, 14)})
            return batcher.get()

    result = run()
    assert_equal(result, run())
    assert result.info["agent_info/gain"].tolist() == torch.linspace(0.5, 2.0, 14).tolist()
    gain = result.info["agent_info/gain"].unsqueeze(1)
    assert (result["hidden"][:, 0] == gain).all()
    assert (result["hidden"][:, 1] != gain).any(-1).all()
