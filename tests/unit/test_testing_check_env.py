"""``check_env`` names every check that an environment breaks, and passes those that are fine."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlpool import EnvSpecError, GymEnv, GymEnvInf, SpecError, VecEnv, VectorGymEnv
from rlpool.seeding import generator_states
from rlpool.specs import Leaf, TensorSpec
from rlpool.testing import CountingEnv, FaultyEnv, check_env
from rlpool.testing.check_env import ENV_CHECKS
from rlpool.testing.episodes import bits

from support.envs import AncestorCountingEnv, EchoEnv, SpacedLegacyEnv, SpaceEnv
from support.vector_envs import ArrayEnv

RESTARTS = AutoresetMode.NEXT_STEP

NAMES = {check.__name__ for check in ENV_CHECKS}
ONE = CountingEnv()
LOCK = threading.Lock()


class RandomEnv(CountingEnv):
    """As Gymnasium recommends: all randomness from ``self.np_random``."""

    def _observation(self) -> Any:
        return self.np_random.random(1, np.float32)


def create_nested() -> SpaceEnv:
    pose = spaces.Tuple((spaces.Box(-1, 1, (3,)), spaces.Discrete(4)))
    image = spaces.Box(0, 255, (2, 2), np.uint8)
    keys = spaces.MultiDiscrete([2, 3])
    return SpaceEnv(
        spaces.Dict(image=image, pose=pose, flags=spaces.MultiBinary(3)),
        spaces.Dict(move=spaces.Box(-1, 1, (2,)), keys=keys),
    )


def create_env(seed: int, n_envs: int = 3) -> GymEnv:
    return GymEnv([RandomEnv() for _ in range(n_envs)], seed)


class OfArrays(VecEnv):
    """Two lanes that are no environments of their own; an episode has three steps."""

    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        super().__init__(2)
        self.t = np.zeros(2, np.int64)
        self._declare_structure({"t": Leaf(TensorSpec((), np.dtype(np.int64)), is_scalar=True)})

    def _show(self, lanes: Any) -> Any:
        self.columns.write(lanes, [{"t": int(self.t[lane])} for lane in lanes])

    def _reset_lanes(self, lanes: Any, seeds: Any, options: Any) -> None:
        self.t[lanes] = 0
        self._show(lanes)

    def _step_lanes(self, lanes: Any, actions: Any) -> Any:
        self.t[lanes] += 1
        self._show(lanes)
        return [1.0] * len(lanes), (self.t[lanes] >= 3).tolist(), [False] * len(lanes)


@pytest.mark.parametrize(
    "env",
    [
        CountingEnv(length=1),
        create_nested,
        create_env,
        partial(create_env, n_envs=1),
        lambda seed: GymEnvInf([RandomEnv(length=2), RandomEnv(length=2)], seed),
        create_env(0),
        "CartPole-v1",
        "Pendulum-v1",
        gymnasium.wrappers.TimeLimit(RandomEnv(), 3),
        FaultyEnv,
    ],
)
def test_good_environments_pass_without_a_word(env: Any) -> None:
    report = check_env(env)
    assert report
    assert report.findings == ()
    assert set(report.not_checked) <= {"picklable"}
    assert {*report.passed, *report.not_checked} == NAMES


def test_lanes_of_any_other_kind_are_checked_as_far_as_possible() -> None:
    of_a_gym_env = {"reset_takes_arguments", "observations_fit", "gymnasium_checker"}
    for create_env in (
        lambda: OfArrays(),
        lambda: SyncVectorEnv([RandomEnv] * 3),
        lambda: AsyncVectorEnv([RandomEnv] * 2),
        lambda: ArrayEnv(3),
        lambda seed: VectorGymEnv(ArrayEnv(3), seed),
    ):
        report = check_env(create_env)
        assert report.findings == ()
        assert set(report.not_checked) == of_a_gym_env


def test_what_cannot_be_seeded_one_by_one_is_checked_for_what_it_promises() -> None:
    beside = {"reset_takes_arguments", "observations_fit", "gymnasium_checker", "lanes_agree"}
    for create_env, not_checked in (
        (lambda: gymnasium.make_vec("CartPole-v1", 3, "vector_entry_point"), set()),
        (lambda: ArrayEnv(3, RESTARTS, "all"), set()),
        (lambda: ArrayEnv(3, RESTARTS, "nothing"), {"repeats", "fresh_instance_repeats"}),
    ):
        report = check_env(create_env)
        assert report.findings == ()
        assert set(report.not_checked) == beside | not_checked


def test_environments_for_old_gym_pass() -> None:
    report = check_env(AncestorCountingEnv, actions=[0, 1])
    assert {f.check for f in report.warnings} <= {"spaces", "reset_takes_arguments"}
    assert check_env(SpacedLegacyEnv).ok
    assert "actions" in check_env(AncestorCountingEnv).not_checked["runs"]


def test_arguments_and_options_reach_the_environment() -> None:
    class NeedsOptions(CountingEnv):
        def __init__(self, goal: int) -> None:
            super().__init__()
            self.goal = goal

        def reset(self, **arguments: Any) -> Any:
            assert arguments["options"]["task"] == self.goal == 3
            return super().reset(**arguments)

    assert check_env(NeedsOptions, {"goal": 3}, options={"task": 3})
    assert check_env(NeedsOptions, {"goal": 3}, strict=False).failed == ("runs",)


# Bad ones


class Tampered(CountingEnv):
    """Counts, except for some methods and spaces."""

    def __init__(self, space: Any = None, action_space: Any = None, **methods: Any) -> None:
        super().__init__()
        self.observation_space = space or self.observation_space
        self.action_space = action_space or self.action_space
        for name, method in methods.items():
            setattr(self, name, partial(method, self))


def bad(**changes: Any) -> Callable[[], Tampered]:
    return partial(Tampered, **changes)


def observed(function: Callable[[int], Any], space: Any = None) -> Callable[[], Any]:
    """An environment whose observations are a function of the step."""
    return bad(space=space, _observation=lambda self: function(self.t))


def stepping(change: Callable[..., Any]) -> Callable[[], Any]:
    """An environment whose results of ``step`` a function changes."""
    return bad(step=lambda self, action: change(*CountingEnv.step(self, action)))


def of_global(draw: Callable[[], float], weight: float = 1.0) -> Callable[[], Any]:
    return observed(lambda t: np.array([weight * draw()], np.float32))


def raises(*arguments: Any, **named: Any) -> Any:
    raise KeyError("goal")


def unseeded_reset(env: Any, seed: Any = None, options: Any = None) -> Any:
    env._is_running, env.t = True, 0
    return env._observation(), {}


def draw_numpy() -> float:
    return np.random.random()  # noqa: NPY002  (what environments must not do)


def draw_torch() -> float:
    return float(torch.rand((), device="cpu"))


class Offset(RandomEnv):
    """Observes what its maker, or its constructor, drew."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.offset = np.random.default_rng(seed).random(1, np.float32)

    def _observation(self) -> Any:
        return self.offset


class SharesItsState(CountingEnv):
    running: list[Any] = []  # noqa: RUF012

    def reset(self, **arguments: Any) -> Any:
        self.running[:] = [self]
        return super().reset(**arguments)

    def _observation(self) -> Any:
        return np.array([self.t if self.running[0] is self else 99], np.float32)


class NoSeed(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(0, 9, (1,))
    action_space = spaces.Discrete(2)

    def reset(self) -> Any:  # type: ignore[override]
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, True, False, {}


ERRORS: list[tuple[str, Any]] = [
    ("creation", raises),
    ("creation", lambda: 7),
    ("creation", lambda: ONE),
    ("creation", 7),
    ("picklable", partial(lambda lock: CountingEnv(), LOCK)),
    ("spaces", bad(action_space=spaces.Sequence(spaces.Discrete(2)))),
    ("spaces", observed(lambda t: {"reward": t}, spaces.Dict({"reward": spaces.Discrete(99)}))),
    ("reset_takes_arguments", NoSeed),
    ("runs", bad(reset=raises)),
    ("runs", bad(step=raises)),
    ("runs", bad(reset=lambda self, seed=None, options=None: np.zeros(1, np.float32))),
    ("runs", stepping(lambda *five: five[:4])),
    ("runs", partial(FaultyEnv, "sys_exit", at_step=5)),
    ("runs", partial(FaultyEnv, "unprintable", at="reset", in_episode=1)),
    ("observations_fit", partial(FaultyEnv, "wrong_shape", at_step=9)),
    ("observations_fit", partial(FaultyEnv, "wrong_dtype", at="reset")),
    ("observations_fit", observed(lambda t: np.array([t], np.int8))),
    ("observations_fit", observed(lambda t: np.array([t - 1], np.float32))),
    ("observations_fit", observed(lambda t: None)),
    ("observations_fit", observed(lambda t: {"a": 1}, spaces.Dict({"b": spaces.Discrete(3)}))),
    ("observations_fit", observed(lambda t: {"a": 3}, spaces.Dict({"a": spaces.Discrete(3)}))),
    ("observations_fit", observed(lambda t: (1,), spaces.Tuple([spaces.Discrete(3)] * 2))),
    ("rewards_are_numbers", partial(FaultyEnv, "wrong_reward", at_step=4)),
    ("rewards_are_numbers", stepping(lambda o, r, *rest: (o, [[1], [1, 2]], *rest))),
    ("flags_are_bools", partial(FaultyEnv, "wrong_flag", at_step=4)),
    ("flags_are_bools", stepping(lambda o, r, end, cut, i: (o, r, int(end), cut, i))),
    ("flags_are_bools", stepping(lambda o, r, end, cut, i: (o, r, end, None, i))),
    ("values_are_finite", partial(FaultyEnv, "nan_reward", at_step=3)),
    ("values_are_finite", partial(FaultyEnv, "nan_observation", at="reset")),
    ("seeding", lambda: VectorGymEnv(ArrayEnv(2, seeds="nothing"), seeding="episode")),
    (
        "seeding",
        lambda: VectorGymEnv(ArrayEnv(2, RESTARTS, seeds="nothing"), seeding="request"),
    ),
    ("repeats", EchoEnv),
    ("repeats", of_global(random.random)),
    ("repeats", of_global(draw_numpy)),
    ("repeats", of_global(draw_torch)),
    ("repeats", partial(FaultyEnv, "wrong_reward", at="step", at_step=1, in_episode=3)),
    ("fresh_instance_repeats", Offset),
    ("fresh_instance_repeats", lambda seed: GymEnv([Offset(seed)], seed)),
    ("lanes_agree", SharesItsState),
    ("lanes_agree", lambda seed: GymEnv([CountingEnv(length=n) for n in (5, 6)], seed)),
    ("lanes_agree", lambda: SyncVectorEnv([partial(CountingEnv, length=n) for n in (5, 6)])),
    ("closes", bad(close=raises)),
]

WARNINGS: list[tuple[str, Any]] = [
    ("spaces", bad(space=spaces.Box(np.ones(1, np.float32), np.ones(1, np.float32)))),
    ("reset_takes_arguments", NoSeed),
    ("runs", stepping(lambda *five: (*five[:4], None))),
    ("runs", bad(reset=lambda self, **given: (CountingEnv.reset(self, **given)[0], None))),
    ("values_are_finite", stepping(lambda o, r, *rest: (o, float("inf"), *rest))),
    *(("no_global_generators", of_global(f, 0.0)) for f in (random.random, draw_numpy, draw_torch)),
    ("own_buffers", partial(FaultyEnv, "buffer_reuse", at="reset")),
    ("own_buffers", partial(FaultyEnv, "buffer_reuse", at_step=3, in_episode=2)),
    ("gymnasium_checker", bad(reset=unseeded_reset)),
]


@pytest.mark.parametrize(("name", "env"), ERRORS)
def test_what_is_wrong_is_an_error_of_its_check_alone(name: str, env: Any) -> None:
    report = check_env(env, strict=False)
    assert name in report.failed, str(report)
    # What differs between the episodes of one instance differs between lanes as well.
    assert set(report.failed) - {"lanes_agree", "repeats"} <= {name}
    assert all(finding.what and finding.fix for finding in report.errors)


@pytest.mark.parametrize(("name", "env"), WARNINGS)
def test_what_is_doubtful_is_a_warning(name: str, env: Any) -> None:
    report = check_env(env, strict=False)
    assert name in {finding.check for finding in report.warnings}, str(report)


def test_an_observation_outside_its_space_is_described_as_it_was_returned() -> None:
    def reset(self: Any, *, seed: Any = None, options: Any = None) -> Any:
        return np.full(1, 2.0), {}  # float64, where the space says float32

    findings = check_env(bad(reset=reset), strict=False).findings
    assert any("is float64[1] from 2.0 to 2.0, which is not in" in each.what for each in findings)


def test_every_check_is_broken_by_one_of_the_above() -> None:
    assert {name for name, _ in ERRORS + WARNINGS} == NAMES


def test_all_problems_are_told_at_once() -> None:
    def step(self: Any, action: Any) -> Any:
        return np.full(3, 7.0, np.float32), [1, 2], 0, None, {}

    with pytest.raises(EnvSpecError) as caught:
        check_env(bad(step=step, close=raises))
    text = str(caught.value)
    for name in ("observations_fit", "rewards_are_numbers", "flags_are_bools", "closes"):
        assert f"error: {name}" in text
    assert "episode 0, step 0: 'observation' should have shape [1], got [3]" in text
    assert "terminated is 0, of type int" in text
    assert "truncated is None" in text


def test_the_callers_generators_are_left_alone() -> None:
    before = bits(generator_states())
    for draw in (random.random, draw_numpy, draw_torch):
        check_env(of_global(draw), strict=False)
    assert bits(generator_states()) == before


def test_an_instance_is_left_alone_and_checked_as_far_as_it_can_be_copied() -> None:
    env = CountingEnv()
    env.reset()
    env.step(0)
    assert check_env(env).not_checked.keys() == {"picklable"}
    assert env.t == 1
    env.lock = LOCK  # type: ignore[attr-defined]
    report = check_env(env)
    assert {"fresh_instance_repeats", "lanes_agree", "closes"} <= set(report.not_checked)
    assert "repeats" in report.passed
    assert not env.is_closed


def test_what_is_made_is_closed() -> None:
    made: list[CountingEnv] = []

    def make() -> CountingEnv:
        made.append(CountingEnv())
        return made[-1]

    check_env(make)
    assert len(made) > 5
    assert all(env.is_closed for env in made)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"skip": ["repeat"]}, "repeat"),
        ({"skip": "repeats"}, "skip"),
        ({"n_steps": 0}, "n_steps"),
        ({"n_episodes": 0}, "n_episodes"),
        ({"actions": []}, "actions"),
        ({"env_args": 5}, "env_args"),
        ({"env": CountingEnv(), "env_args": {"length": 3}}, "env_args"),
        ({"seed": -1}, "seed"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        check_env(**{"env": CountingEnv, **arguments})


def test_checks_can_be_skipped_and_the_report_reads_well(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, "rlpool"):
        report = check_env(partial(FaultyEnv, "buffer_reuse", at="reset"), skip=["closes"])
    assert report.not_checked["closes"] == "left out by skip"
    assert str(report).splitlines()[0] == "FaultyEnv: 0 errors, 1 warning"
    assert "warning: own_buffers: episode 0, reset: " in str(report)
    assert "  fix:   return a copy" in str(report)
    assert "own_buffers" in caplog.text
    assert capfd.readouterr() == ("", "")
