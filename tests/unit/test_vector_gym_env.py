"""VectorGymEnv: the bits of a GymEnv, by one call per step; errors, and what can be seeded."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics, RescaleAction
from process.watching import assert_equal, worker_pids
from torch.utils._pytree import tree_map

from rlpool import (
    DictTensor,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    VectorGymEnv,
    WorkerStartupError,
)
from rlpool.envs.vec_env import LaneError

from support.agents import ConstantAgent, FunctionAgent
from support.envs import CountingEnv, EchoEnv, SpaceEnv
from support.fragile import FragileEnv, RecurrentAgent
from support.vector_envs import MODES, ArrayEnv, Noted, OwnVectorEnv

ALL = [0, 1, 2]
BOUNDS = np.float32(-1), np.float32(1)
ZEROS = {"action": np.zeros(3, np.int64)}


def lanes_of(env: Any, **arguments: Any) -> VectorGymEnv:
    """Three lanes, reset with the seeds 0, 1, 2."""
    vec = VectorGymEnv(env, 0, **arguments)
    vec.reset_lanes(ALL, ALL, [None] * 3)
    return vec


def counting(*lengths: int, kind: Any = CountingEnv) -> OwnVectorEnv:
    return OwnVectorEnv([partial(kind, length) for length in lengths], "Disabled")


def bits(value: Any) -> Any:
    array = np.asarray(value)
    return array.dtype.str, array.shape, array.tobytes()


# The bits of a GymEnv -----------------------------------------------------------------------


SPACES = [
    spaces.Box(-1, 1, (2, 3), np.float64),
    spaces.Box(0, 255, (4, 4), np.uint8),
    spaces.Discrete(3, start=5, dtype=np.int8),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(3),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1,)))),
    spaces.Dict(
        b=spaces.Dict(c=spaces.Discrete(4), a=spaces.Box(-1, 1, ())), a=spaces.MultiBinary(2)
    ),
]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_space_is_batched_as_in_a_gym_env(space: Any, keeps: bool) -> None:
    def played(vec: Any, single: Any) -> tuple[Any, Any]:
        vec.reset_lanes(ALL, [4, 5, 6], [None] * 3)
        rng, seen, start = np.random.default_rng(0), [], getattr(space, "start", 0)
        for lanes in (ALL, [0, 2], [2]):
            actions = {
                key: (rng.integers(0, 2, (3, *leaf.spec.shape)) + start).astype(leaf.spec.dtype)
                for key, leaf in vec.action_leaves.items()
            }
            vec.step_lanes(lanes, actions)
            seen.append({k: np.array(vec.current[k][lanes]) for k in vec.columns.leaves})
        given = [
            [env.actions[t] for t in range(n)] for env, n in zip(single, (2, 1, 3), strict=True)
        ]
        return seen, given

    def make() -> SpaceEnv:
        return SpaceEnv(copy.deepcopy(space), copy.deepcopy(space), length=9)

    envs = [make() for _ in ALL]
    own = OwnVectorEnv([make] * 3, "Disabled")
    vec = VectorGymEnv(own, seeding="episode", keep_float64=keeps)
    seen, given = played(vec, own.inner.envs)
    expected, expected_given = played(GymEnv(envs, keep_float64=keeps), envs)
    for mine, theirs in zip(seen, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, values in theirs.items():
            assert (mine[key].dtype, mine[key].tobytes()) == (values.dtype, values.tobytes())
    assert tree_map(bits, given) == tree_map(bits, expected_given)


def test_a_batch_step_is_one_step_and_a_reset_one_call_for_each_kind_of_options() -> None:
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


@pytest.mark.parametrize("mode", MODES)
def test_lanes_without_an_episode_are_never_seen_and_stop_nobody(mode: AutoresetMode) -> None:
    vec = lanes_of(ArrayEnv(3, mode), seeding="episode")
    vec.reset_lanes([1], [9], [{"length": 30}])
    alone = GymEnv([FragileEnv() for _ in ALL])
    alone.reset_lanes([1], [9], [{"length": 30}])
    for step in range(30):
        actions = {"action": np.array([10**9, step, -1])}  # others' rows may hold anything
        others = {key: np.array(array[[0, 2]]) for key, array in vec.current.items()}
        for env in (vec, alone):
            assert env.step_lanes([1], actions) == ([1] if step == 29 else [])
        for key in ("frame", "reward", "done"):
            assert vec.current[key][1].tobytes() == alone.current[key][1].tobytes()
            assert np.array_equal(vec.current[key][[0, 2]], others[key])


def test_reset_and_step_with_tensors_work_as_for_a_gym_env() -> None:
    vec = VectorGymEnv(counting(2, 3, 3), 0, auto_reset=True)
    vec.reset({"id": [4, 5, 6]})
    for expected in ([1, 1, 1], [0, 2, 2], [1, 0, 0]):
        _, (observation, running) = vec.step(
            DictTensor({"action": torch.zeros(3, dtype=torch.int64)})
        )
        assert observation["frame"].tolist() == [[t, 4 + n] for n, t in enumerate(expected)]
        assert running.tolist() == ALL


def test_wrapped_vector_environments_work() -> None:
    def create(seed: int) -> Any:
        env: Any = OwnVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * 2, "Disabled")
        return RecordEpisodeStatistics(RescaleAction(env, *BOUNDS))

    def single(seed: int) -> GymEnv:
        envs = [gymnasium.make("Pendulum-v1") for _ in range(2)]
        return GymEnv([gymnasium.wrappers.RescaleAction(env, *BOUNDS) for env in envs], seed)

    def act(state: Any, observation: DictTensor, *_: Any) -> Any:
        return (
            DictTensor(),
            DictTensor({"action": observation["noise"].float() - 0.5}),
            DictTensor(),
        )

    def episodes(create_env: Any) -> Any:
        agent = lambda: FunctionAgent(act, n_noise=1)  # noqa: E731
        with EpisodeBatcher(200, 3, agent, {}, create_env, n_threads=0, seeds=2) as batcher:
            batcher.execute(3)
            return batcher.get()

    assert_equal(episodes(create), episodes(single))


class PoppingEnv(ArrayEnv):
    """Takes its settings out of the options, and returns a column of rewards."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.got = copy.deepcopy(options)
        options["length"] = options.pop("length").pop()
        return super().reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        shown, rewards, *others = super().step(actions)
        return shown, rewards[:, None], *others


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
def test_a_vector_environment_may_change_its_options(mode: AutoresetMode) -> None:
    inner = PoppingEnv(2, mode)
    seeding: Any = "episode" if mode is AutoresetMode.DISABLED else "request"
    env, given = VectorGymEnv(inner, 0, seeding=seeding), {"length": [9, 1]}
    for _ in range(2):
        env.reset_all_next()
        env.reset_lanes([0, 1], [3, 3], [given, given])
        assert (inner.got["length"], given) == ([9, 1], {"length": [9, 1]})
        env.step_lanes([0, 1], {"action": np.zeros(2, np.int64)})


# Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ((0, np.zeros((3, 4))), "'frame' should have shape .3., got .4."),
        ((0, np.zeros((2, 3))), "'frame' should have one row for each of 3 lanes"),
        ((0, np.full((3, 3), "a")), "'frame' should have dtype float32"),
        ((1, np.zeros((3, 2))), "'reward' should have shape .3., got .3, 2."),
        ((1, np.full(3, 1e300)), "should fit float32, got 1e.300"),
        ((1, np.full(3, None)), "'reward' should be a number"),
        ((2, np.full(3, np.nan)), "'terminated' should be True or False"),
        ((3, np.full(3, 2)), "'truncated' should be True or False"),
        ((3, False), "'truncated' should have shape .3."),
    ],
)
def test_results_that_do_not_fit_are_refused(wrong: Any, words: str) -> None:
    def create(seed: int) -> Any:
        return VectorGymEnv(ArrayEnv(3, wrong=wrong), seed, seeding="episode", max_episode_steps=5)

    with EpisodeBatcher(5, 3, ConstantAgent, {}, create, n_threads=0) as batcher:
        batcher.execute(3)
        with pytest.raises(EnvSpecError, match=words) as caught:
            batcher.get()
    assert caught.value.where.step == 0


def test_an_error_of_a_vector_environment_names_the_first_lane_that_was_to_step() -> None:
    vec = lanes_of(ArrayEnv(3))
    vec.vector_env.step = lambda actions: 1 / 0
    with pytest.raises(LaneError) as caught:
        vec.step_lanes([1, 2], ZEROS)
    assert (caught.value.lane, type(caught.value.__cause__)) == (1, ZeroDivisionError)


# What can be seeded -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "seeding"),
    [
        (lambda: counting(3, 3), "episode"),
        (lambda: Noted(counting(3, 3)), "episode"),
        (lambda: ArrayEnv(2), "episode"),
        (lambda: ArrayEnv(1), "episode"),
        (lambda: ArrayEnv(2, AutoresetMode.NEXT_STEP, "all"), "request"),
        (lambda: ArrayEnv(2, None, "all"), "request"),
        (lambda: gymnasium.make_vec("CartPole-v1", num_envs=2), "request"),
    ],
)
def test_what_can_be_seeded_is_found_out(
    make: Any, seeding: str, caplog: pytest.LogCaptureFixture
) -> None:
    vec = VectorGymEnv(make(), 0)
    assert vec.seeding == seeding
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (seeding == "request")
    assert all("the same number of workers and lanes" in text for text in said)
    vec.close()


@pytest.mark.parametrize("seeds", ["nothing", "starts"])
def test_what_cannot_be_seeded_is_warned_of(seeds: str, caplog: pytest.LogCaptureFixture) -> None:
    assert VectorGymEnv(ArrayEnv(2, AutoresetMode.NEXT_STEP, seeds), 0).seeding == "request"
    (record,) = caplog.records
    assert "cannot be seeded" in record.getMessage()


def test_finding_it_out_leaves_no_trace() -> None:
    def episodes(**arguments: Any) -> Any:
        create = lambda seed: VectorGymEnv(ArrayEnv(3), seed, **arguments)  # noqa: E731
        with EpisodeBatcher(16, 24, RecurrentAgent, {}, create, n_threads=0, seeds=5) as batcher:
            batcher.execute(20)
            return batcher.get()

    assert_equal(episodes(), episodes(seeding="episode"))


def test_environments_in_processes_of_gymnasium_are_refused_and_closed() -> None:
    make = partial(AsyncVectorEnv, [CountingEnv] * 2)
    with pytest.raises(WorkerStartupError, match="AsyncVectorEnv") as caught:
        EpisodeBatcher(9, 9, ConstantAgent, {}, make, n_threads=0)
    assert "give its environments to GymEnv" in str(caught.value)
    assert not worker_pids()


def test_a_vector_environment_that_needs_options_has_to_say_how_it_is_seeded() -> None:
    class Demanding(ArrayEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            assert "length" in options
            return super().reset(seed=seed, options=options)

    with EpisodeBatcher(
        9, 9, ConstantAgent, {}, lambda: VectorGymEnv(Demanding(2), seeding="episode"), n_threads=0
    ) as batcher:
        batcher.execute(2, env_info={"length": [2, 3]})
        result = batcher.get()
        assert result is not None
        assert result.lengths.tolist() == [2, 3]
    with (
        pytest.raises(WorkerStartupError, match="cannot be reset") as caught,
        EpisodeBatcher(9, 9, ConstantAgent, {}, lambda: Demanding(2), n_threads=0),
    ):
        pass
    assert "seeding=" in str(caught.value)
