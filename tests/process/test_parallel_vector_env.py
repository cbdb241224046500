"""ParallelVectorEnv: Gymnasium's interface over workers that may die, and what it refuses.

That its bits are those of a ``SyncVectorEnv`` is tested in ``property/test_vector_env_model.py``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from rlpool import (
    EnvError,
    ParallelEnvManager,
    ParallelVectorEnv,
    SpecError,
    UsageError,
    replay_crash,
)
from rlpool.errors import WorkerStartupError

from support.restarting import (
    BrittleEnv,
    FlaggedEnv,
    NarrowEnv,
    RestlessEnv,
    SpacelessEnv,
    TimedEnv,
    WordSpace,
    assert_same_bits,
)

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(60)]

N = 3
ACTION = np.array([0, 1, 0])

Make = Callable[..., ParallelVectorEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    """A function that makes vector environments of three in one worker, closed afterwards."""
    made = []

    def make(env_fn: Any = RestlessEnv, **named: Any) -> ParallelVectorEnv:
        env_fns = env_fn if isinstance(env_fn, list) else [env_fn] * N
        made.append(ParallelVectorEnv(env_fns, **{"envs_per_worker": N, **named}))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def make_cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


@pytest.fixture(scope="module")
def cartpoles() -> Iterator[ParallelVectorEnv]:
    envs = ParallelVectorEnv([make_cartpole] * N, envs_per_worker=N)
    yield envs
    envs.close()


def kill(envs: ParallelVectorEnv, worker: int = 0) -> None:
    pid = envs.manager.workers[worker].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


# Among Gymnasium's --------------------------------------------------------------------------


def test_gymnasiums_episode_statistics_are_those_over_a_sync_vector_env(make: Make) -> None:
    ours = RecordEpisodeStatistics(make(make_cartpole, envs_per_worker=2))
    sync = RecordEpisodeStatistics(SyncVectorEnv([make_cartpole] * N))
    ours.reset(seed=3)
    sync.reset(seed=3)
    for number, action in enumerate(np.random.default_rng(0).integers(0, 2, (120, N))):
        if number == 50:
            kill(ours.unwrapped)
        *_, one = ours.step(action)
        *_, other = sync.step(action)
        assert one.keys() == other.keys()
        for key in ("r", "l"):
            if "episode" in other:
                assert_same_bits(one["episode"][key], other["episode"][key])
    assert list(ours.return_queue) == list(sync.return_queue)
    assert len(ours.return_queue) > N


def test_it_says_what_gymnasiums_vector_environments_say_of_themselves(make: Make) -> None:
    before = {**RestlessEnv.metadata}
    envs = make(observation_mode="same")
    assert RestlessEnv.metadata == before
    sync = SyncVectorEnv([RestlessEnv] * N)
    for name in ("num_envs", "single_observation_space", "observation_space", "spec", "closed"):
        assert getattr(envs, name) == getattr(sync, name)
    assert (envs.metadata, envs.render_mode) == (sync.metadata, "ansi")
    assert isinstance(envs, gymnasium.vector.VectorEnv)
    envs.close()
    envs.close()
    assert envs.closed
    for call in (envs.reset, lambda: envs.step(ACTION), lambda: envs.call("render")):
        with pytest.raises(ClosedEnvironmentError, match="the environments are closed"):
            call()


def test_values_of_a_custom_space_are_batched_as_a_tuple(make: Make) -> None:
    envs = make(partial(RestlessEnv, "custom", "custom"))
    observation, _ = envs.reset(seed=0)
    assert isinstance(envs.single_observation_space, WordSpace)
    assert isinstance(envs.observation_space, spaces.Tuple)
    assert isinstance(observation, tuple)
    assert [word[:5] for word in observation] == ["word "] * N


def test_bounds_may_differ_where_the_observation_mode_says_so(make: Make) -> None:
    env_fns = [RestlessEnv, NarrowEnv]
    with pytest.raises(RuntimeError, match="environment 1") as caught:
        ParallelVectorEnv(env_fns)
    assert isinstance(caught.value, SpecError)
    sync = SyncVectorEnv(env_fns, observation_mode="different")
    assert make(env_fns, observation_mode="different").observation_space == sync.observation_space
    pair = spaces.Box(-9.0, 9.0, (N, 3), np.float64), spaces.Box(-9.0, 9.0, (3,), np.float64)
    own = make(observation_mode=pair)
    assert (own.observation_space, own.single_observation_space) == pair


def test_a_manager_hands_its_arguments_on_and_is_closed() -> None:
    manager = ParallelEnvManager([make_cartpole] * N, envs_per_worker=2, max_episode_steps=4)
    with pytest.raises(SpecError, match="'same_step'"):
        manager.as_vector_env("same_step")  # and it lives
    with manager.as_vector_env("SameStep", copy=False).manager as inner:
        assert (inner.n_lanes, len(inner.workers)) == (N, 2)
        assert manager.closed
    with pytest.raises(UsageError, match="closed"):
        manager.as_vector_env()


# Memory ---------------------------------------------------------------------------------------


def test_all_but_observations_are_copies_of_gymnasiums_dtypes_these_unless_copy_is_false(
    make: Make,
) -> None:
    for is_copy in (True, False):
        envs = make(copy=is_copy)
        first, _ = envs.reset(seed=0)
        before = first.copy()
        second, reward, terminated, truncated, _ = envs.step(ACTION)
        assert np.array_equal(first, before) == is_copy
        assert np.shares_memory(first, second) != is_copy
        assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float64, bool, bool)
        before = reward.copy()
        envs.step(ACTION)
        assert np.array_equal(reward, before)


# Deaths ---------------------------------------------------------------------------------------


@pytest.mark.promise("I3")
def test_infos_that_tell_the_time_do_not_hinder_a_successor(make: Make) -> None:
    envs = make(TimedEnv)
    envs.reset(seed=0)
    envs.step(ACTION)
    kill(envs)
    _, _, _, _, infos = envs.step(ACTION)
    assert infos["now"].shape == (N,)


@pytest.mark.promise("I3")
def test_a_successor_sets_the_attributes_that_were_set(make: Make) -> None:
    envs, sync = make(envs_per_worker=1), SyncVectorEnv([RestlessEnv] * N)
    for each in (envs, sync):
        each.set_attr("bonus", [1.0, 2.0, 3.0])
    kill(envs)  # before the first reset
    assert envs.get_attr("bonus") == (1.0, 2.0, 3.0)
    assert_same_bits(envs.reset(seed=0), sync.reset(seed=0))
    kill(envs, 1)
    assert_same_bits(envs.step(ACTION), sync.step(ACTION))
    kill(envs)
    for each in (envs, sync):
        each.set_attr("bonus", 1.0)
    assert_same_bits(envs.step(ACTION), sync.step(ACTION))
    kill(envs)
    with pytest.raises(EnvError, match="'bonus' was set") as caught:  # in this episode
        envs.step(ACTION)
    assert caught.value.where.lane == 0
    envs.reset(seed=0)
    assert envs.get_attr("bonus") == (1.0,) * N
    envs.step(ACTION)


def test_attributes_are_set_once_in_a_worker_that_lives(make: Make) -> None:
    envs = make()
    envs.set_attr("n_steps", 3)
    envs.call("count", 2)
    envs.reset(options={"keeps": True})
    assert envs.get_attr("n_steps") == (5,) * N


@pytest.mark.promise("I3")
def test_a_worker_is_not_recycled_while_one_of_its_episodes_could_not_be_repeated(
    make: Make,
) -> None:
    envs = make(max_episodes_per_worker=1)
    envs.reset(seed=0)
    envs.set_attr("bonus", 1.0)
    pid = envs.manager.workers[0].pid
    envs.reset(options={"reset_mask": np.array([True, True, False])})
    envs.step(ACTION)
    assert envs.manager.workers[0].pid == pid
    envs.reset()
    envs.step(ACTION)
    assert envs.manager.workers[0].pid != pid
    assert envs.get_attr("bonus") == (1.0,) * N


MAIN = """
import collections, enum
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError

Mode = enum.Enum("Mode", ["EASY", "HARD"])
Told = collections.namedtuple("Told", ["mode"])

class ModalEnv(gymnasium.Env):
    observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
    mode = Mode.EASY

    def reset(self, *, seed=None, options=None):
        mode = (options or {}).get("mode", self.mode)
        return np.full(1, 1.0 + (mode is Mode.HARD), np.float32), {"told": Told(mode)}
"""


def test_classes_of_a_script_are_the_same_in_options_attributes_and_infos(
    as_main: Callable[[str], None], make: Make
) -> None:
    as_main(MAIN)
    main: Any = sys.modules["__main__"]
    envs = make(main.ModalEnv)
    for options, value in ((None, 1.0), ({"mode": main.Mode.HARD}, 2.0)):
        observation, infos = envs.reset(seed=0, options=options)
        assert observation.ravel().tolist() == [value] * N
        assert isinstance(infos["told"][0], main.Told)
    assert infos["told"][0].mode is main.Mode.HARD
    envs.set_attr("mode", main.Mode.HARD)
    assert envs.reset(seed=0)[0].ravel().tolist() == [2.0] * N
    assert envs.get_attr("mode") == (main.Mode.HARD,) * N


# Single environments --------------------------------------------------------------------------


def test_methods_are_called_and_attributes_read_in_all_environments(make: Make) -> None:
    envs = make()
    envs.reset(seed=0)
    envs.step(ACTION)
    assert envs.call("add", 2, name="total") == (("total", 3),) * N
    assert envs.call("bonus") == (0.0,) * N
    assert envs.render() == ("after 1 steps",) * N
    assert [each.bit_generator.state for each in envs.np_random] == [
        each.bit_generator.state for each in envs.get_attr("np_random")
    ]


def test_a_call_that_fails_names_the_environment_and_the_next_step_works(make: Make) -> None:
    envs = make()
    envs.reset(seed=0)
    with pytest.raises(EnvError, match=r"env\.missing raised AttributeError.*missing") as caught:
        envs.get_attr("missing")
    assert caught.value.where.lane == 0
    assert isinstance(caught.value, AttributeError)
    with pytest.raises(SpecError, match="cannot be pickled"):
        envs.set_attr("bonus", [0.0, 0.0, (each for each in ())])
    envs.step(ACTION)


# What fails, and what is refused --------------------------------------------------------------


def test_an_environment_that_raises_can_be_reset(make: Make) -> None:
    envs = make(BrittleEnv)
    envs.reset(seed=0)
    with pytest.raises(EnvError, match="door") as caught:
        envs.step([0, 2, 0])
    assert caught.value.where.lane == 1
    with pytest.raises(UsageError, match="reset"):
        envs.step(ACTION)
    with pytest.raises(EnvError, match="goal"):
        envs.reset(options={"breaks": True})
    envs.reset()
    envs.step(ACTION)


@pytest.mark.promise("I9")
def test_a_failure_after_automatic_restarts_is_repeated_in_this_process(make: Make) -> None:
    same_step = AutoresetMode.SAME_STEP

    def create_env(seed: Any) -> ParallelEnvManager:
        return make(BrittleEnv, autoreset_mode=same_step).manager

    envs = make(BrittleEnv, autoreset_mode=same_step)
    for seed in (3, None):
        envs.reset(seed=seed)
        for _ in range(30):  # some six episodes
            envs.step(ACTION)
        with pytest.raises(EnvError, match="door") as caught:
            envs.step([0, 0, 2])
        with pytest.raises(KeyError, match="door") as repeated:
            replay_crash(caught.value.capsule, create_env)
        frame = repeated.traceback[-1].locals
        assert frame["self"].n_steps == 30


def test_an_ended_environment_is_not_stepped_where_restarts_are_disabled(make: Make) -> None:
    envs = make(make_cartpole, autoreset_mode=AutoresetMode.DISABLED, max_episode_steps=1)
    envs.reset(seed=0)
    envs.step(ACTION)
    mask = np.array([True, False, True])
    envs.reset(options={"reset_mask": mask})
    with pytest.raises(UsageError, match=r"\[1\] have ended.*DISABLED"):
        envs.step(ACTION)
    envs.reset(options={"reset_mask": ~mask})
    envs.step(ACTION)


def test_actions_may_be_lists_and_tensors(cartpoles: ParallelVectorEnv) -> None:
    shown = []
    for actions in (ACTION, ACTION.tolist(), torch.from_numpy(ACTION), ACTION.astype(np.int32)):
        cartpoles.reset(seed=0)
        shown.append(cartpoles.step(actions)[0])
    for other in shown[1:]:
        assert_same_bits(other, shown[0])


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_flags_are_converted_as_gymnasium_does(mode: AutoresetMode, make: Make) -> None:
    flags = [(1, 0), (np.array(True), 0.0), (np.False_, np.float32(1))]
    env_fns = [partial(FlaggedEnv, each) for each in flags]
    envs, sync = make(env_fns, autoreset_mode=mode), SyncVectorEnv(env_fns, autoreset_mode=mode)
    assert_same_bits(envs.reset(seed=0), sync.reset(seed=0))
    assert_same_bits(envs.step(ACTION), sync.step(ACTION))


def test_flags_that_are_neither_true_nor_false_are_refused(make: Make) -> None:
    envs = make(partial(FlaggedEnv, (False, False)))
    for flags in ((None, False), ("1", False), (False, 0.5), (False, [])):
        envs.set_attr("flags", [flags] * N)
        envs.reset(seed=0)
        with pytest.raises(EnvError, match=r"'t\w+' should be True or False, got"):
            envs.step(ACTION)


def test_infos_that_cannot_be_pickled_are_named(make: Make) -> None:
    envs = make(partial(FlaggedEnv, (False, False), has_lock=True))
    with pytest.raises(EnvError, match=r"infos cannot be pickled: infos\[0\]\['file'\]\['lock'\]"):
        envs.reset(seed=0)


BAD_SEEDS: list[Any] = [[1, 2], "seven", [1, 2.5, 3], -1, 2**63, [1, -1, None]]
BAD_MASKS: list[Any] = [
    np.array([1, 0, 1]),
    [True, False, True],
    np.ones(2, bool),
    np.zeros(3, bool),
]
BAD_ACTIONS: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "one row per environment", 0),
    (TypeError, "one row per environment", None),
    (ValueError, r"shapes \{'action': \[3\]\}", [0, 1]),
    (ValueError, r"shapes \{'action': \[3\]\}", [0, 1, 0, 1]),
    (ValueError, "should fit int64, got 0.5", [0.5, 1.0, 0.0]),
]


def test_resets_and_actions_that_do_not_fit_are_refused_and_change_nothing(
    cartpoles: ParallelVectorEnv,
) -> None:
    envs = cartpoles
    first, _ = envs.reset(seed=0)
    for seed in BAD_SEEDS:
        with pytest.raises(SpecError, match="seed should be an int or 3 of them"):
            envs.reset(seed=seed)
    for mask in BAD_MASKS:
        with pytest.raises(SpecError, match=r"bool \[3\] with at least one True") as caught:
            envs.reset(options={"reset_mask": mask})
        assert isinstance(caught.value, TypeError)
    for kind, message, actions in BAD_ACTIONS:
        with pytest.raises(SpecError, match=message) as caught:
            envs.step(actions)
        assert isinstance(caught.value, kind)
    with pytest.raises(SpecError, match="2 values of 'gravity' for 3"):
        envs.set_attr("gravity", [1.0, 2.0])
    sync = SyncVectorEnv([make_cartpole] * N)
    assert_same_bits(first, sync.reset(seed=0)[0])
    assert_same_bits(envs.step(ACTION), sync.step(ACTION))


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("autoreset_mode should be .NextStep., ", {"autoreset_mode": "Never"}),
        ("observation_mode is 'equal'", {"observation_mode": "equal"}),
        ("observation_mode is ", {"observation_mode": (spaces.Discrete(2), 2)}),
        ("envs_per_worker", {"envs_per_worker": 0}),
        ("max_episode_steps", {"max_episode_steps": 0}),
        ("keep_float64", {"keep_float64": True}),
    ],
)
def test_arguments_that_do_not_fit_are_refused(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=message):
        ParallelVectorEnv([make_cartpole], **arguments)


def test_environments_with_other_spaces_are_told_by_their_spaces() -> None:
    env_fns = [lambda: gymnasium.make("FrozenLake-v1"), make_cartpole]
    observation = r"^observation_space of environment 1 is Box\(.*float32\), .* is Discrete\(16\)\n"
    with pytest.raises(WorkerStartupError, match=observation):
        ParallelVectorEnv(env_fns, envs_per_worker=2)
    with pytest.raises(SpecError, match=observation):
        ParallelVectorEnv(env_fns)
    env_fns[0] = lambda: gymnasium.make("Pendulum-v1")
    with pytest.raises(SpecError, match=r"^action_space of environment 1 is Discrete\(2\), .* Box"):
        ParallelVectorEnv(env_fns)
    with pytest.raises(SpecError, match=r"env_fns\[1\] is 5, not a function"):
        ParallelVectorEnv([env_fns[0], 5])  # type: ignore[list-item]


def test_environments_without_spaces_and_other_objects_are_refused() -> None:
    with pytest.raises(WorkerStartupError, match="no observation_space"):
        ParallelVectorEnv([SpacelessEnv])
    with pytest.raises(WorkerStartupError, match="returned dict, not an environment"):
        ParallelVectorEnv([dict])
    with pytest.raises(SpecError, match="env_fns"):
        ParallelVectorEnv([])
