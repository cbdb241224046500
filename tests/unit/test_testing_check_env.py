"""``check_env`` names every clause that an environment breaks, and passes those that are fine."""

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

from rlpool import EnvSpecError, GymEnv, GymEnvInf, SpecError
from rlpool.testing import CountingEnv, FaultyEnv, Report, check_env
from rlpool.testing.env_checks import ENV_CHECKS

from support.envs import AncestorCountingEnv, EchoEnv, SpacedAncestorEnv

CLAUSES = [check.name for check in ENV_CHECKS]

# Good ones


class RandomEnv(CountingEnv):
    """As Gymnasium recommends: all randomness from ``self.np_random``."""

    def _observation(self) -> Any:
        return self.np_random.random(1, np.float32)


class NestedEnv(RandomEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (2, 2), np.uint8),
                "pose": spaces.Tuple((spaces.Box(-1, 1, (3,)), spaces.Discrete(4))),
                "flags": spaces.MultiBinary(3),
            }
        )
        self.action_space = spaces.Dict(
            {"move": spaces.Box(-1, 1, (2,)), "keys": spaces.MultiDiscrete([2, 3])}
        )

    def _observation(self) -> Any:
        return {
            "image": self.np_random.integers(0, 256, (2, 2), np.uint8),
            "pose": (np.zeros(3, np.float32), int(self.np_random.integers(4))),
            "flags": np.zeros(3, np.int8),
        }


def create_env(seed: int, n_envs: int = 3) -> GymEnv:
    return GymEnv([RandomEnv() for _ in range(n_envs)], seed)


def create_restarting(seed: int) -> GymEnvInf:
    return GymEnvInf([RandomEnv(length=2), RandomEnv(length=2)], seed)


@pytest.mark.parametrize(
    "env",
    [
        CountingEnv,
        CountingEnv(length=1),
        RandomEnv,
        NestedEnv,
        create_env,
        partial(create_env, n_envs=1),
        create_restarting,
        create_env(0),
        lambda: gymnasium.make("CartPole-v1"),
        "CartPole-v1",
        "Pendulum-v1",
        gymnasium.make("Acrobot-v1"),
        gymnasium.wrappers.TimeLimit(RandomEnv(), 3),
        FaultyEnv,
    ],
)
def test_good_environments_pass_without_a_word(env: Any) -> None:
    report = check_env(env)
    assert report
    assert report.findings == ()
    not_asked = {"picklable"} if not report.not_checked else set(report.not_checked)
    assert not_asked <= {"picklable"}
    assert {*report.passed, *report.not_checked} == set(CLAUSES)


def test_environments_for_old_gym_pass() -> None:
    report = check_env(AncestorCountingEnv, actions=[0, 1])
    assert report.ok
    assert {f.check for f in report.warnings} <= {"spaces", "reset_takes_arguments"}
    assert check_env(SpacedAncestorEnv).ok


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
    """Counts, but for one method."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        super().__init__()
        for name, method in methods.items():
            setattr(self, name, partial(method, self))


def bad(**methods: Callable[..., Any]) -> Callable[[], Tampered]:
    return partial(Tampered, **methods)


def with_spaces(observation_space: Any = None, action_space: Any = None) -> Callable[[], Any]:
    def make() -> Any:
        env = CountingEnv()
        if observation_space is not None:
            env.observation_space = observation_space
        if action_space is not None:
            env.action_space = action_space
        return env

    return make


def observed(function: Callable[[int], Any], space: Any = None) -> Callable[[], Any]:
    """An environment whose observations a function of the step gives."""

    def make() -> Any:
        env = Tampered(_observation=lambda self: function(self.t))
        if space is not None:
            env.observation_space = space
        return env

    return make


def stepping(change: Callable[..., Any]) -> Callable[[], Any]:
    """An environment whose results of ``step`` a function changes."""

    def step(self: Any, action: Any) -> Any:
        return change(*CountingEnv.step(self, action))

    return bad(step=step)


class Forgetful(CountingEnv):
    """Goes on from where the last episode ended."""

    total = 0

    def _observation(self) -> Any:
        self.total += 1
        return np.array([self.total], np.float32)


class Unseeded(RandomEnv):
    """Draws an offset when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = np.random.default_rng().random(1, np.float32)

    def _observation(self) -> Any:
        return self.offset


class SeededByItsMaker(RandomEnv):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.offset = np.array([seed % 1000], np.float32)

    def _observation(self) -> Any:
        return self.offset


class SharesItsBuffer(CountingEnv):
    buffer = np.zeros(1, np.float32)

    def _observation(self) -> Any:
        self.buffer[0] = 1000 * (self.np_random_seed or 0) % 997 + self.t
        return self.buffer


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


def of_global(draw: Callable[[], float]) -> Callable[[], Any]:
    return observed(lambda t: np.array([draw()], np.float32))


def draw_numpy() -> float:
    return np.random.random()  # noqa: NPY002  (what environments shall not do)


def generator_states() -> Any:
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    return (
        random.getstate(),
        numpy_state[1].tolist(),
        numpy_state[2],
        torch.get_rng_state().tolist(),
    )


def raises(*arguments: Any, **named: Any) -> Any:
    raise KeyError("goal")


def lanes_of_two_kinds(seed: int) -> GymEnv:
    return GymEnv([CountingEnv(length=5), CountingEnv(length=6)], seed)


LOCK = threading.Lock()
ONE = CountingEnv()


def captures_a_lock(lock: Any = LOCK) -> CountingEnv:
    return CountingEnv()


ERRORS: list[tuple[str, Any]] = [
    ("creation", raises),
    ("creation", lambda: 7),
    ("creation", lambda: ONE),
    ("creation", lambda needed: CountingEnv()),
    ("creation", 7),
    ("picklable", partial(captures_a_lock, LOCK)),
    ("spaces", with_spaces(spaces.Text(5))),
    ("spaces", with_spaces(action_space=spaces.Sequence(spaces.Discrete(2)))),
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
    ("observations_fit", observed(lambda t: np.array([float(t)]))),
    ("observations_fit", observed(lambda t: np.array([t - 1], np.float32))),
    ("observations_fit", observed(lambda t: None)),
    ("observations_fit", observed(lambda t: {"a": 1}, spaces.Dict({"b": spaces.Discrete(3)}))),
    ("observations_fit", observed(lambda t: {"a": 3}, spaces.Dict({"a": spaces.Discrete(3)}))),
    ("observations_fit", observed(lambda t: (1,), spaces.Tuple([spaces.Discrete(3)] * 2))),
    ("rewards_are_numbers", partial(FaultyEnv, "wrong_reward", at_step=4)),
    ("rewards_are_numbers", stepping(lambda o, r, *rest: (o, None, *rest))),
    ("rewards_are_numbers", stepping(lambda o, r, *rest: (o, [[1], [1, 2]], *rest))),
    ("flags_are_bools", partial(FaultyEnv, "wrong_flag", at_step=4)),
    ("flags_are_bools", stepping(lambda o, r, end, cut, i: (o, r, int(end), cut, i))),
    ("flags_are_bools", stepping(lambda o, r, end, cut, i: (o, r, end, None, i))),
    ("values_are_finite", partial(FaultyEnv, "nan_observation", at_step=3)),
    ("values_are_finite", partial(FaultyEnv, "nan_reward", at_step=3)),
    ("values_are_finite", partial(FaultyEnv, "nan_observation", at="reset")),
    ("repeats", Forgetful),
    ("repeats", EchoEnv),
    ("repeats", of_global(random.random)),
    ("repeats", of_global(draw_numpy)),
    ("repeats", of_global(lambda: float(torch.rand(())))),
    ("repeats", partial(FaultyEnv, "nan_reward", in_episode=0)),
    ("fresh_instance_repeats", Unseeded),
    ("fresh_instance_repeats", lambda seed: GymEnv([SeededByItsMaker(seed)], seed)),
    ("lanes_agree", SharesItsBuffer),
    ("lanes_agree", SharesItsState),
    ("lanes_agree", lanes_of_two_kinds),
    ("closes", bad(close=raises)),
]

WARNINGS: list[tuple[str, Any]] = [
    ("spaces", with_spaces(spaces.Box(np.ones(1, np.float32), np.ones(1, np.float32)))),
    ("reset_takes_arguments", NoSeed),
    ("runs", stepping(lambda *five: (*five[:4], None))),
    ("values_are_finite", stepping(lambda o, r, *rest: (o, float("inf"), *rest))),
    ("no_global_generators", of_global(lambda: 0.0 * random.random())),
    ("no_global_generators", of_global(lambda: 0.0 * draw_numpy())),
    ("no_global_generators", of_global(lambda: 0.0 * float(torch.rand(())))),
    ("own_buffers", partial(FaultyEnv, "buffer_reuse", at="reset")),
    ("own_buffers", partial(FaultyEnv, "buffer_reuse", at_step=3, in_episode=2)),
    ("gymnasium_checker", bad(reset=lambda self, seed=None, options=None: self_reset(self))),
]


def self_reset(env: CountingEnv) -> Any:
    """A reset that does not call Gymnasium's."""
    env._is_running, env.t = True, 0
    return env._observation(), {}


def test_a_function_without_a_seed_may_return_several_environments() -> None:
    assert check_env(lambda: GymEnv([CountingEnv()]), strict=False).failed == ()


@pytest.mark.parametrize(("clause", "env"), ERRORS)
def test_a_broken_clause_is_named(clause: str, env: Any) -> None:
    report = check_env(env, strict=False)
    assert clause in report.failed, str(report)
    assert not report
    for finding in report.errors:
        assert finding.what
        assert finding.fix
    with pytest.raises(EnvSpecError, match=clause):
        check_env(env)


@pytest.mark.parametrize(("clause", "env"), WARNINGS)
def test_a_doubtful_thing_is_named_and_passes(clause: str, env: Any) -> None:
    report = check_env(env, strict=False)
    assert clause in {finding.check for finding in report.warnings}, str(report)


def test_every_clause_is_broken_by_one_of_the_above() -> None:
    assert {clause for clause, _ in ERRORS + WARNINGS} == set(CLAUSES)


@pytest.mark.parametrize(
    ("clause", "env"), [(c, e) for c, e in ERRORS if c not in ("creation", "repeats", "spaces")]
)
def test_one_mistake_is_one_finding(clause: str, env: Any) -> None:
    failed = check_env(env, strict=False).failed
    # Whatever is the same for all episodes of an instance differs between lanes as well.
    assert set(failed) - {"lanes_agree", "repeats"} <= {clause}


def test_all_problems_are_told_at_once() -> None:
    def step(self: Any, action: Any) -> Any:
        return np.zeros(3, np.float32), [1, 2], 0, None, {}

    def close(self: Any) -> None:
        raise OSError("busy")

    with pytest.raises(EnvSpecError) as caught:
        check_env(bad(step=step, close=close))
    for name in ("observations_fit", "rewards_are_numbers", "flags_are_bools", "closes"):
        assert f"error: {name}" in str(caught.value)
    assert "terminated" in str(caught.value)
    assert "truncated" in str(caught.value)


def test_a_dependence_on_global_generators_is_called_so() -> None:
    report = check_env(of_global(random.random), strict=False)
    assert "global random generators" in report.errors[0].what
    assert "np_random" in report.errors[0].fix
    assert {f.check for f in report.warnings} == {"no_global_generators"}


def test_the_callers_generators_are_left_alone() -> None:
    np.random.random()  # noqa: NPY002  (not a state that a check could have left)
    before = generator_states()
    check_env(of_global(random.random), strict=False)
    check_env(of_global(draw_numpy), strict=False)
    check_env(of_global(lambda: float(torch.rand(()))), strict=False)
    assert generator_states() == before


def test_an_instance_is_left_alone() -> None:
    env = CountingEnv()
    env.reset()
    env.step(0)
    report = check_env(env)
    assert (env.t, env.is_closed) == (1, False)
    assert report.not_checked == {
        "picklable": "an instance was given: pass the function that makes it"
    }


def test_an_instance_that_cannot_be_copied_is_checked_as_far_as_possible() -> None:
    env = CountingEnv()
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


def test_checks_can_be_left_out() -> None:
    report = check_env(Forgetful, skip=["repeats", "fresh_instance_repeats", "lanes_agree"])
    assert report.ok
    assert report.not_checked["repeats"] == "left out by skip"


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
        ({"options": [1]}, "options"),
        ({"seed": -1}, "seed"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        check_env(**{"env": CountingEnv, **arguments})


def test_a_missing_action_space_asks_for_actions() -> None:
    report = check_env(AncestorCountingEnv, strict=False)
    assert "actions" in report.not_checked["runs"]


def test_the_report_reads_well(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rlpool"):
        report = check_env(partial(FaultyEnv, "buffer_reuse", at="reset"), strict=False)
    assert isinstance(report, Report)
    assert str(report).splitlines()[0] == "FaultyEnv: 0 errors, 1 warning"
    assert "warning: own_buffers: " in str(report)
    assert "  fix:   return a copy" in str(report)
    assert "own_buffers" in caplog.text


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    check_env(Forgetful, strict=False)
    assert capfd.readouterr() == ("", "")
