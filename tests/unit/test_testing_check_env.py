"""``check_env`` names every check that an environment fails, and accepts good ones."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlpool import EnvSpecError, GymEnv, VectorGymEnv
from rlpool.machine.own_state import current_generators
from rlpool.testing import CountingEnv, check_env

from support.envs import EchoEnv, SpacedLegacyEnv, SpaceEnv
from support.keeping import KEEPING
from support.vector_envs import ArrayEnv

RESTARTS = AutoresetMode.NEXT_STEP


def failed_checks(error: Exception) -> set[str]:
    """Return the names of the checks that an error reports."""
    return set(re.findall(r"^(\w+): ", str(error).partition("\n")[2], re.MULTILINE))


class RandomEnv(CountingEnv):
    """Environment as Gymnasium recommends: all randomness is from ``self.np_random``."""

    def _observation(self) -> Any:
        return self.np_random.random(1, np.float32)


def create_nested() -> SpaceEnv:
    pose = spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(4)))
    action = spaces.Dict(move=spaces.Box(-1, 1, (2,)), keys=spaces.MultiDiscrete([2, 3]))
    return SpaceEnv(spaces.Dict(pose=pose, flags=spaces.MultiBinary(3)), action)


def create_env(seed: int) -> GymEnv:
    return GymEnv([RandomEnv() for _ in range(3)], seed)


@pytest.mark.parametrize(
    "env",
    [
        CountingEnv(length=1),
        create_nested,
        create_env,
        create_env(0),
        SpacedLegacyEnv,
        lambda seed: VectorGymEnv(ArrayEnv(3), seed),
        lambda: ArrayEnv(3, RESTARTS, "all"),
    ],
)
def test_good_environments_pass_silently(env: Any) -> None:
    check_env(env)


def test_arguments_and_options_reach_the_environment() -> None:
    def create(goal: int) -> CountingEnv:
        def reset(self: CountingEnv, *, seed: int, options: Any) -> Any:
            assert options["task"] == goal == 3
            return CountingEnv.reset(self, seed=seed, options=options)

        return Tampered(reset=reset)

    check_env(create, {"goal": 3}, options={"task": 3})
    with pytest.raises(EnvSpecError, match=r"runs: env\.reset raised"):
        check_env(create, {"goal": 3})


# Bad ones


class Tampered(CountingEnv):
    """``CountingEnv`` with some methods and spaces replaced."""

    def __init__(self, space: Any = None, action_space: Any = None, **methods: Any) -> None:
        super().__init__()
        self.observation_space = space or self.observation_space
        self.action_space = action_space or self.action_space
        for name, method in methods.items():
            setattr(self, name, partial(method, self))


def bad(**changes: Any) -> Callable[[], Tampered]:
    return partial(Tampered, **changes)


def observed(function: Callable[[int], Any], space: Any = None) -> Callable[[], Any]:
    """Return an environment whose observations are a function of the step."""
    return bad(space=space, _observation=lambda self: function(self.t))


def stepping(change: Callable[..., Any]) -> Callable[[], Any]:
    """Return an environment whose step results are changed by a function."""
    return bad(step=lambda self, action: change(*CountingEnv.step(self, action)))


def of_global(draw: Callable[[], float]) -> Callable[[], Any]:
    return observed(lambda t: np.array([draw()], np.float32))


def raises(*arguments: Any, **named: Any) -> Any:
    raise KeyError("goal")


def draw_numpy() -> float:
    return np.random.random()  # noqa: NPY002  (what environments must not do)


class Offset(RandomEnv):
    """Environment that observes a number drawn by its factory or constructor."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.offset = np.random.default_rng(seed).random(1, np.float32)

    def _observation(self) -> Any:
        return self.offset


ERRORS: list[tuple[str, Any]] = [
    ("runs", raises),
    ("runs", lambda: 7),
    ("runs", bad(step=raises)),
    ("runs", stepping(lambda *five: five[:4])),
    ("runs", stepping(lambda o, *rest: (np.zeros(2, np.float32), *rest))),
    ("runs", stepping(lambda o, r, *rest: (o, np.zeros(2), *rest))),
    ("observations_fit", observed(lambda t: t + 3, spaces.Discrete(12))),
    ("values_are_finite", stepping(lambda o, r, *rest: (o, float("nan"), *rest))),
    ("repeats", lambda: VectorGymEnv(ArrayEnv(2, RESTARTS, seeds="nothing"), seeding="request")),
    ("repeats", EchoEnv),
    ("repeats", of_global(draw_numpy)),
    *(("repeats", make) for make in KEEPING.values()),
    ("fresh_instance_repeats", Offset),
]

WARNINGS: list[tuple[str, Any]] = [
    ("runs", stepping(lambda *five: (*five[:4], None))),
    ("observations_fit", observed(lambda t: np.array([t - 1], np.float32))),
    ("observations_fit", observed(lambda t: np.array([2.0]))),  # float64
    ("values_are_finite", stepping(lambda o, r, *rest: (o, float("inf"), *rest))),
    ("starts_vary", CountingEnv),
]


@pytest.mark.parametrize(("name", "env"), ERRORS)
def test_each_defect_is_an_error_of_its_check_alone(name: str, env: Any) -> None:
    with pytest.raises(EnvSpecError) as caught:
        check_env(env)
    failed = failed_checks(caught.value)
    assert name in failed, str(caught.value)
    # Differences between episodes of one instance also occur between instances.
    assert failed - {"fresh_instance_repeats", "repeats", "starts_vary"} <= {name}


@pytest.mark.parametrize(("name", "env"), WARNINGS)
def test_doubtful_behaviour_is_a_warning(name: str, env: Any) -> None:
    with pytest.warns(UserWarning, match=f"{name}: .*\n  fix: "):
        check_env(env)


def test_all_problems_are_reported_together_with_their_places() -> None:
    wrong = stepping(lambda o, r, *rest: (o - 7, float("nan"), *rest))
    with pytest.raises(EnvSpecError, match="step 0 of the episode with seed") as caught:
        check_env(wrong)
    assert failed_checks(caught.value) >= {"values_are_finite", "observations_fit"}


def test_the_callers_generators_are_unchanged() -> None:
    before = str(current_generators()[:3])
    for draw in (random.random, draw_numpy):
        with pytest.raises(EnvSpecError):
            check_env(of_global(draw))
    assert str(current_generators()[:3]) == before


def test_an_instance_is_copied_and_unchanged() -> None:
    env = CountingEnv()
    env.reset()
    env.step(0)
    check_env(env)
    assert env.t == 1


def test_created_environments_are_closed_even_if_closing_raises() -> None:
    made, closed = list[Any](), list[Any]()

    def close(self: Any) -> None:
        closed.append(self)
        raise KeyError("window")

    def create() -> CountingEnv:
        made.append(Tampered(close=close))
        return made[-1]

    check_env(create)
    assert len(closed) == len(made) > 3


def test_counting_env_counts() -> None:
    env = CountingEnv(length=2)
    observation, info = env.reset(seed=5)
    assert (info, observation.dtype) == ({"id": 0}, np.float32)
    assert env.step(0)[:4] == (1.0, 1.0, False, False)
    assert env.step(0)[:4] == (2.0, 2.0, True, False)
    assert observation.tolist() == [0.0], "handed out, and therefore not changed"
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    env.reset(options={"length": 1, "id": 7, "truncate": True, "other": 1})
    assert env.step(0)[1:4] == (7001.0, False, True)
    env.reset()  # options hold for one episode
    assert env.step(0)[1:4] == (1.0, False, False)
