"""Contracts that users' test classes inherit: one test per clause."""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rlpool.data.infos import Info
from rlpool.generators import seeded_generators
from rlpool.testing.agent_checks import AGENT_CHECKS
from rlpool.testing.agent_subject import AgentSubject, as_in_a_worker
from rlpool.testing.env_checks import ENV_CHECKS
from rlpool.testing.env_subject import EnvSubject
from rlpool.testing.findings import ERROR, CannotCheck, Check, Failed, failure
from rlpool.testing.observation_rows import rows_of

SubjectT = TypeVar("SubjectT")


class EnvContract:
    """Inherit it, implement ``make_env``, and pytest or unittest runs the whole contract.

    ::

        class TestMyEnv(EnvContract):  # for unittest: (EnvContract, unittest.TestCase)
            def make_env(self):
                return MyEnv()

    There is one test per clause of ``check_env``; a failing one says what is wrong and what to do.
    A test whose question does not arise is skipped, and warnings are given as warnings. A clause
    that shall not hold is taken out by ``test_closes = None`` in the subclass.

    Attributes:
        seed: Root of all seeds.
        n_episodes: How many episodes to look at; less than 2 mean 2.
        n_steps: How many steps of an episode to look at.
        options: ``options`` of every reset.
        actions: Actions to take in turns, instead of samples of the action space.
    """

    seed: int = 0
    n_episodes: int = 3
    n_steps: int = 100
    options: Mapping[str, Any] | None = None
    actions: Sequence[Any] | None = None

    def make_env(self) -> Any:
        """Make a new environment, or a ``VecEnv`` of several; may take ``seed``."""
        raise NotImplementedError("define make_env(self) in the test class")

    def _check(self, name: str) -> None:
        __tracebackhide__ = True
        subject = EnvSubject(
            self.make_env,
            None,
            self.options,
            self.actions,
            self.seed,
            self.n_episodes,
            self.n_steps,
        )
        subject.sent_to_workers = type(self).make_env
        with seeded_generators(0):
            _judge(ENV_CHECKS, name, subject)

    def test_creation(self) -> None:
        """It can be made, again and again."""
        self._check("creation")

    def test_picklable(self) -> None:
        """What makes it can be sent to a worker."""
        self._check("picklable")

    def test_spaces(self) -> None:
        """Both spaces are there and have fixed shapes."""
        self._check("spaces")

    def test_reset_takes_arguments(self) -> None:
        """``reset`` takes ``seed`` and ``options``."""
        self._check("reset_takes_arguments")

    def test_runs(self) -> None:
        """Episodes run without an exception, and give what Gymnasium says."""
        self._check("runs")

    def test_observations_fit(self) -> None:
        """Every observation is in the space: keys, shape, dtype, bounds."""
        self._check("observations_fit")

    def test_rewards_are_numbers(self) -> None:
        """Every reward is one number."""
        self._check("rewards_are_numbers")

    def test_flags_are_bools(self) -> None:
        """``terminated`` and ``truncated`` are True or False."""
        self._check("flags_are_bools")

    def test_values_are_finite(self) -> None:
        """No NaN in observations and rewards, no infinite reward."""
        self._check("values_are_finite")

    def test_repeats(self) -> None:
        """The same seed and actions give the same bits, whatever ran in between."""
        self._check("repeats")

    def test_fresh_instance_repeats(self) -> None:
        """Another instance gives the same bits, as after a worker was replaced."""
        self._check("fresh_instance_repeats")

    def test_no_global_generators(self) -> None:
        """Nothing is drawn from generators that the whole process shares."""
        self._check("no_global_generators")

    def test_own_buffers(self) -> None:
        """What was handed out stays as it was."""
        self._check("own_buffers")

    def test_lanes_agree(self) -> None:
        """An episode is the same in every lane of a ``GymEnv``, and beside any others."""
        self._check("lanes_agree")

    def test_closes(self) -> None:
        """``close`` works, also a second time."""
        self._check("closes")

    def test_gymnasium_checker(self) -> None:
        """What Gymnasium's own checker has to say beyond the rest."""
        self._check("gymnasium_checker")


class AgentContract:
    """Inherit it, implement ``make_agent`` and ``make_env``, and the whole contract is run.

    ::

        class TestMyAgent(AgentContract):  # for unittest: (AgentContract, unittest.TestCase)
            def make_agent(self):
                return MyAgent()

            def make_env(self):
                return MyEnv()

    There is one test per clause of ``check_agent``; a failing one says what is wrong and what to
    do. A test whose question does not arise is skipped, and warnings are given as warnings. A
    clause that shall not hold is taken out by ``test_deterministic = None`` in the subclass.

    Attributes:
        seed: Root of all seeds.
        batch_sizes: Numbers of rows to call the agent with.
        n_steps: How many steps of an episode to look at, at least 2.
        agent_info: As for ``execute``, rows are used in turns.
        options: ``options`` of every reset.
        action_space: The action space, where ``make_env`` returns none.
        update_info: What ``update`` is tried with, instead of the agent's ``state_dict()``.
    """

    seed: int = 0
    batch_sizes: Sequence[int] = (1, 2, 5)
    n_steps: int = 4
    agent_info: Info = None
    options: Mapping[str, Any] | None = None
    action_space: Any = None
    update_info: Any = None

    def make_agent(self) -> Any:
        """Make a new agent."""
        raise NotImplementedError("define make_agent(self) in the test class")

    def make_env(self) -> Any:
        """Make what gives observations: all that ``check_agent`` takes."""
        raise NotImplementedError("define make_env(self) in the test class")

    def _check(self, name: str) -> None:
        __tracebackhide__ = True
        rows = rows_of(self.make_env(), None, self.options, self.action_space, self.seed)
        subject = AgentSubject(
            self.make_agent,
            None,
            rows,
            self.agent_info,
            self.update_info,
            self.seed,
            self.batch_sizes,
            self.n_steps,
        )
        subject.sent_to_workers = type(self).make_agent
        with as_in_a_worker():
            _judge(AGENT_CHECKS, name, subject)

    def test_creation(self) -> None:
        """It can be made, again and again."""
        self._check("creation")

    def test_picklable(self) -> None:
        """What makes it can be sent to a worker."""
        self._check("picklable")

    def test_returns(self) -> None:
        """It returns three values with a row per lane, in every call of the same kind."""
        self._check("returns")

    def test_same_for_any_number_of_rows(self) -> None:
        """Keys, shapes and dtypes do not depend on the number of rows."""
        self._check("same_for_any_number_of_rows")

    def test_action_fits(self) -> None:
        """Actions are of the action space's kind, and in it."""
        self._check("action_fits")

    def test_initial_state_agrees(self) -> None:
        """``initial_state`` gives the state that a call with ``None`` would start from."""
        self._check("initial_state_agrees")

    def test_rows_are_independent(self) -> None:
        """A row's results depend on that row alone."""
        self._check("rows_are_independent")

    def test_deterministic(self) -> None:
        """The same arguments give the same bits, whatever was called in between."""
        self._check("deterministic")

    def test_inputs_unchanged(self) -> None:
        """What it is called with stays as it was, but for the state, which is a copy."""
        self._check("inputs_unchanged")

    def test_returns_its_state(self) -> None:
        """The first value is the state that the call started from."""
        self._check("returns_its_state")

    def test_update_takes_state_dict(self) -> None:
        """``update`` takes what the learner's copy gives, and keeps none of its memory."""
        self._check("update_takes_state_dict")

    def test_same_in_every_worker(self) -> None:
        """Each worker makes the same agent."""
        self._check("same_in_every_worker")

    def test_seeds_and_closes(self) -> None:
        """``seed`` and ``close`` work."""
        self._check("seeds_and_closes")


def _judge(checks: Sequence[Check[SubjectT]], name: str, subject: SubjectT) -> None:
    """Make one check: fail, skip, warn or pass."""
    __tracebackhide__ = True  # pytest shows the message, not how it came about
    check = next(check for check in checks if check.name == name)
    try:
        findings = list(check.find(subject))
    except Failed as reason:
        findings = [failure(name, reason)]
    except CannotCheck as reason:
        raise unittest.SkipTest(str(reason)) from None
    errors = [str(finding) for finding in findings if finding.severity == ERROR]
    for finding in findings:
        if finding.severity != ERROR:
            warnings.warn(str(finding), UserWarning, stacklevel=4)
    if errors:
        raise AssertionError("\n".join(errors))
