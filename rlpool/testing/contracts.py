"""``check_env`` and ``check_agent`` as test classes to inherit: one test per check."""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpool.data.infos import Info
from rlpool.testing.check_agent import AGENT_CHECKS
from rlpool.testing.check_env import ENV_CHECKS
from rlpool.testing.episodes import EnvSubject
from rlpool.testing.report import Check, Subject, run_checks
from rlpool.testing.rollouts import AgentSubject, observations_of


def _test_of(check: Check) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        __tracebackhide__ = True  # pytest shows the message, not how it came about
        report = run_checks(self._subject(), [check])
        for finding in report.warnings:
            warnings.warn(str(finding), UserWarning, stacklevel=3)
        if report.errors:
            raise AssertionError("\n".join(map(str, report.errors)))
        for reason in report.not_checked.values():
            raise unittest.SkipTest(reason)

    test.__name__ = f"test_{check.__name__}"
    test.__doc__ = check.__doc__
    return test


class EnvContract:
    """Inherit it, implement ``make_env``, and pytest or unittest runs the whole contract.

    ::

        class TestMyEnv(EnvContract):  # for unittest: (EnvContract, unittest.TestCase)
            def make_env(self):
                return MyEnv()

    There is one test per check of ``check_env``, such as ``test_repeats``; a failing one says what
    is wrong and what to do. A check that does not apply is skipped, and warnings are given as
    warnings. To leave out a check, write ``test_closes = None`` in the subclass.

    Attributes:
        seed: Root of all seeds.
        n_episodes: How many episodes to look at; less than 2 means 2.
        n_steps: How many steps of an episode to look at.
        options: ``options`` of every reset.
        actions: Actions to take in turn, instead of samples of the action space.

    Example:
        >>> class TestCounting(EnvContract):
        ...     def make_env(self):
        ...         return CountingEnv()
        >>> TestCounting().test_repeats()
    """

    seed: int = 0
    n_episodes: int = 3
    n_steps: int = 100
    options: Mapping[str, Any] | None = None
    actions: Sequence[Any] | None = None

    def make_env(self) -> Any:
        """Make a new environment, or a ``VecEnv`` of several; may take ``seed``."""
        raise NotImplementedError("define make_env(self) in the test class")

    def _subject(self) -> Subject:
        settings = {name: getattr(self, name) for name in EnvContract.__annotations__}
        subject = EnvSubject(self.make_env, **settings)
        subject.sent_to_workers = type(self).make_env
        return subject


class AgentContract:
    """Inherit it, implement ``make_agent`` and ``make_env``, and the whole contract is run.

    ::

        class TestMyAgent(AgentContract):  # for unittest: (AgentContract, unittest.TestCase)
            def make_agent(self):
                return MyAgent()

            def make_env(self):
                return MyEnv()

    There is one test per check of ``check_agent``, such as ``test_deterministic``; a failing one
    says what is wrong and what to do. A check that does not apply is skipped, and warnings are
    given as warnings. To leave out a check, write ``test_deterministic = None`` in the subclass.

    Attributes:
        seed: Root of all seeds.
        batch_sizes: Numbers of rows to call the agent with.
        n_steps: How many steps of an episode to look at, at least 2.
        agent_info: As for ``execute``, rows are used in turn.
        options: ``options`` of every reset.
        action_space: The action space, where ``make_env`` returns none.
        update_info: What ``update`` is tried with, instead of the agent's ``state_dict()``.

    Example:
        >>> class TestCoin(AgentContract):
        ...     def make_agent(self):
        ...         return create_agent()
        ...
        ...     def make_env(self):
        ...         return CountingEnv()
        >>> TestCoin().test_deterministic()
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
        """Make what gives observations: anything that ``check_agent`` takes."""
        raise NotImplementedError("define make_env(self) in the test class")

    def _subject(self) -> Subject:
        shown = observations_of(self.make_env(), None, self.options, self.action_space, self.seed)
        settings = (self.agent_info, self.update_info, self.seed, self.batch_sizes, self.n_steps)
        subject = AgentSubject(self.make_agent, None, shown, *settings)
        subject.sent_to_workers = type(self).make_agent
        return subject


for _contract, _checks in ((EnvContract, ENV_CHECKS), (AgentContract, AGENT_CHECKS)):
    for _check in _checks:
        setattr(_contract, f"test_{_check.__name__}", _test_of(_check))
