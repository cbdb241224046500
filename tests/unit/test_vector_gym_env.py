"""VectorGymEnv: results identical to a GymEnv with one call per step; errors, and seeding."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from process.watching import assert_equal, worker_pids

from rlpool import EpisodeBatcher, GymEnv, VectorGymEnv, WorkerStartupError
from rlpool.envs.vec_env import LaneError

from support.agents import ConstantAgent
from support.envs import CountingEnv, EchoEnv, SpaceEnv, small_discrete
from support.fragile import RecurrentAgent
from support.scripted import as_plain
from support.vector_envs import ArrayEnv, Noted, OwnVectorEnv

ALL = [0, 1, 2]
ZEROS = {"action": np.zeros(3, np.int64)}
NEXT_STEP = AutoresetMode.NEXT_STEP


def lanes_of(env: Any, **arguments: Any) -> VectorGymEnv:
    """Return three lanes, reset with the seeds 0, 1, 2."""
    vec = VectorGymEnv(env, 0, **arguments)
    vec.reset_lanes(ALL, ALL, [None] * 3)
    return vec


def counting(*lengths: int, kind: Any = CountingEnv) -> OwnVectorEnv:
    return OwnVectorEnv([partial(kind, length) for length in lengths], "Disabled")


EVERY = spaces.Dict(
    deep=spaces.Dict(a=spaces.Box(-1, 1, ()), c=spaces.MultiBinary(3)),
    image=spaces.Box(0, 255, (4, 4), np.uint8),
    pair=spaces.Tuple((small_discrete(3, start=5), spaces.MultiDiscrete([2, 3]))),
    wide=spaces.Box(-1, 1, (2, 3), np.float64),
)


@pytest.mark.parametrize("space", [EVERY, EVERY["pair"], EVERY["pair"][0]], ids=repr)
@pytest.mark.parametrize("keeps", [False, True])
def test_every_space_is_batched_as_in_a_gym_env(space: Any, keeps: bool) -> None:
    envs = [SpaceEnv(copy.deepcopy(space), copy.deepcopy(space), length=9) for _ in range(6)]
    own = OwnVectorEnv([lambda env=env: env for env in envs[:3]], "Disabled")
    vec = VectorGymEnv(own, seeding="episode", keep_float64=keeps)
    single = GymEnv(envs[3:], keep_float64=keeps)
    for env in (vec, single):
        env.reset_lanes(ALL, [4, 5, 6], [None] * 3)
    for lanes in (ALL, [0, 2], [2]):
        seen = {key: single.current[key].copy() for key in single.columns.observed}
        prefix = "action/" if isinstance(space, spaces.Dict) else "action"
        actions = {prefix + key.removeprefix("frame"): array for key, array in seen.items()}
        for env in (vec, single):
            env.step_lanes(lanes, actions)
        assert vec.current.keys() == single.current.keys()
        for key in single.current:
            assert as_plain(vec.current[key][lanes]) == as_plain(single.current[key][lanes]), key
    for n_steps, one, other in zip((2, 1, 3), envs, envs[3:], strict=False):
        assert as_plain(tuple(one.actions[:n_steps])) == as_plain(tuple(other.actions))


def test_a_batch_step_is_one_call_and_a_reset_one_call_per_distinct_options() -> None:
    noted = Noted(counting(3, 3, 3, kind=EchoEnv))
    vec = VectorGymEnv(noted, 0, seeding="episode")
    options = [{"id": 4, "length": 2}, {"id": 5}, {"id": 4, "length": 2}]
    vec.reset_lanes(ALL, [7, 8, 9], options)
    assert vec.current["seed"].tolist() == [7, 8, 9]
    assert vec.current["id"].tolist() == [4, 5, 4]
    assert len(noted.resets) == 2
    assert vec.step_lanes(ALL, ZEROS) == []
    assert vec.step_lanes(ALL, ZEROS) == [0, 2]
    assert (vec.current["terminated"].tolist(), noted.n_steps) == ([True, False, True], 2)
    vec.reset_lanes([0, 2], [10, 11], [None, None])
    assert vec.current["seed"].tolist() == [10, 8, 11]
    assert vec.current["step"].tolist() == [0, 2, 0]
    assert len(noted.resets) == 3


def test_idle_lanes_get_the_first_running_lanes_action_and_are_reset_after_their_end() -> None:
    vec = lanes_of(ArrayEnv(3), seeding="episode")  # which refuses other actions and steps
    given = {"length": 30}
    vec.reset_lanes([1], [9], [given])
    assert given == {"length": 30}  # the environment has popped it from a copy
    for step in range(30):
        actions = {
            "action": np.array([10**9, step, -1])
        }  # the rows of other lanes may hold anything
        assert vec.step_lanes([1], actions) == [1] * (step == 29)
    assert vec.current["frame"][1, 2] == sum(range(30))


# Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "wrong", "named"),
    [
        (0, np.zeros((3, 4)), "'frame'"),
        (0, np.zeros((2, 3)), "each of 3 lanes"),
        (0, np.full((3, 3), "a"), "'frame'"),
        (1, np.zeros((3, 2)), "'reward'"),
        (1, np.full(3, 1e300), "'reward'"),
        (1, np.full(3, None), "'reward'"),
        (2, np.full(3, np.nan), "'terminated'"),
        (3, False, "'truncated'"),
    ],
)
def test_invalid_step_results_are_refused(position: int, wrong: Any, named: str) -> None:
    env = lanes_of(ArrayEnv(3, wrong=(position, wrong)), seeding="episode", max_episode_steps=5)
    with pytest.raises(LaneError) as caught:
        env.step_lanes(ALL, ZEROS)
    assert re.search(named, str(caught.value.__cause__))


def test_a_vector_environments_error_names_the_first_stepping_lane() -> None:
    vec = lanes_of(ArrayEnv(3))
    vec.vector_env.step = lambda actions: 1 / 0
    with pytest.raises(LaneError) as caught:
        vec.step_lanes([1, 2], ZEROS)
    assert (caught.value.lane, type(caught.value.__cause__)) == (1, ZeroDivisionError)


def test_gymnasiums_async_vector_environments_are_refused_and_closed() -> None:
    make = partial(AsyncVectorEnv, [CountingEnv] * 2)
    with pytest.raises(WorkerStartupError, match="AsyncVectorEnv"):
        EpisodeBatcher(9, 9, ConstantAgent, {}, make, n_threads=0)
    assert not worker_pids()


# Seeding ----------------------------------------------------------------------------------------

SAME = "the same number of workers and lanes"


@pytest.mark.parametrize(
    ("make", "seeding", "warned_of"),
    [
        (lambda: counting(3, 3), "episode", ""),
        (lambda: Noted(counting(3, 3)), "episode", ""),
        (lambda: ArrayEnv(1), "episode", ""),
        (lambda: ArrayEnv(2, seeds="unmasked"), "request", ""),
        (lambda: ArrayEnv(2, NEXT_STEP, "all"), "request", SAME),
        (lambda: ArrayEnv(2, None, "all"), "request", SAME),
        (lambda: gymnasium.make_vec("CartPole-v1", num_envs=2), "request", SAME),
        (lambda: ArrayEnv(2, NEXT_STEP, "nothing"), "request", "cannot be seeded"),
        (lambda: ArrayEnv(2, NEXT_STEP, "starts"), "request", "cannot be seeded"),
    ],
)
def test_seedability_is_detected(
    make: Any, seeding: str, warned_of: str, caplog: pytest.LogCaptureFixture
) -> None:
    vec = VectorGymEnv(make(), 0)
    assert vec.seeding == seeding
    assert [warned_of in text for text in caplog.messages] == [True] * bool(warned_of)
    vec.close()


def test_detecting_seedability_leaves_no_trace() -> None:
    def episodes(**arguments: Any) -> Any:
        create = lambda seed: VectorGymEnv(ArrayEnv(3), seed, **arguments)  # noqa: E731
        with EpisodeBatcher(16, 24, RecurrentAgent, {}, create, n_threads=0, seeds=5) as batcher:
            batcher.execute(20)
            return batcher.get()

    assert_equal(episodes(), episodes(seeding="episode"))


def test_a_vector_environment_that_needs_options_must_declare_its_seeding() -> None:
    class Demanding(ArrayEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            assert "length" in options
            return super().reset(seed=seed, options=options)

    lanes = VectorGymEnv(Demanding(2), seeding="episode")
    lanes.reset_lanes([0, 1], [0, 0], [{"length": 2}, {"length": 3}])
    with pytest.raises(WorkerStartupError, match="seeding="):
        EpisodeBatcher(9, 9, ConstantAgent, {}, lambda: Demanding(2), n_threads=0)
