"""How checks of environments and agents are run and reported, and those that both share.

A check is a generator method of ``Checks``; the first finding that it yields is reported. Its name
is its name in reports, in ``skip``, and in the test of a contract class.
"""

from __future__ import annotations

import copy
import inspect
import logging
import unittest
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from rlpool.errors import RlpoolError, SpecError, WorkerError, WorkerStartupError, compose
from rlpool.memory.sharing import pickled
from rlpool.record.failures import described
from rlpool.seeding import root_from, seeded_generators, worker_seed

_LOG = logging.getLogger("rlpool")
ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        check: Name of the check that found it, such as ``"observations_fit"``.
        severity: ``"error"``: rlpool refuses it, or cannot keep a promise. ``"warning"``: it
            works, but probably not as intended.
        what: What is wrong and where.
        fix: What to do.

    Example:
        >>> report = check_env(lambda: FaultyEnv("nan_reward", at_step=1), strict=False)
        >>> print(report.errors[0])
        error: values_are_finite: step 1 of the episode with seed 722335507: the reward is nan
          fix:   find the division or logarithm that it comes from: one spoils a network
    """

    check: str
    severity: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: " + compose(self.what, fix=self.fix)


def error(what: str, fix: str) -> Finding:
    """A finding that is an error; whoever runs the check adds its name."""
    return Finding("", ERROR, what, fix)


def warning(what: str, fix: str) -> Finding:
    """A finding that is a warning."""
    return Finding("", WARNING, what, fix)


def failed(who: str, reason: BaseException, fix: str = "") -> Finding:
    """The finding that the user's code raised, or returned what rlpool refuses.

    Args:
        who: What was called, for exceptions that do not say.
        reason: The exception.
        fix: What to do, unless the exception says so.
    """
    what = f"{who} raised {described(reason)}"
    if isinstance(reason, RlpoolError):
        what, fix = reason.what, reason.own_fix or fix
    if isinstance(reason, WorkerError):
        what = f"{what} ({reason.where})"
    refused = "return what the spaces declare, or declare what is returned"
    other = refused if isinstance(reason, SpecError) else "fix what fails, then check again"
    return error(what, fix or other)


@dataclass(frozen=True)
class Report:
    """The outcome of ``check_env`` or ``check_agent``; true if there are no errors.

    Attributes:
        subject: What was checked.
        findings: What was found, errors first.
        passed: Names of the checks that found nothing.
        not_checked: Name of each check that could not be made, and why.

    Example:
        >>> report = check_env(lambda: FaultyEnv("nan_reward", at_step=1), strict=False)
        >>> report.ok, report.failed
        (False, ('values_are_finite',))
    """

    subject: str
    findings: tuple[Finding, ...]
    passed: tuple[str, ...] = ()
    not_checked: Mapping[str, str] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that are errors."""
        return tuple(f for f in self.findings if f.severity == ERROR)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that are warnings."""
        return tuple(f for f in self.findings if f.severity == WARNING)

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that found errors."""
        return tuple(dict.fromkeys(f.check for f in self.errors))

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        counts = ((len(self.errors), "error"), (len(self.warnings), "warning"))
        told = ", ".join(f"{n} {word}" + "s" * (n != 1) for n, word in counts)
        unchecked = (f"not checked: {name}: {why}" for name, why in self.not_checked.items())
        return "\n".join([f"{self.subject}: {told}", *map(str, self.findings), *unchecked])


Findings = Iterator[Finding]


class CannotCheck(Exception):
    """Raised by a check that does not apply, or that was not given what it needs."""


class Checks:
    """What is checked, and all checks of it in their order.

    Args:
        source: A function that makes it, or an instance, of which copies are made.
        arguments: Arguments of the function.
        seed: Root of all seeds.
        is_instance: Whether ``source`` is an instance.
    """

    takes_seed = False  # whether the function is called with ``seed=``

    def __init__(self, source: Any, arguments: Any, seed: int, is_instance: bool) -> None:
        if not isinstance(arguments, Mapping | None) or (is_instance and arguments):
            what = "env_args and agent_args should be a dict, and come with a function"
            raise SpecError(what, fix="pass the function or the class, and a dict of its arguments")
        self.name, self.is_instance = _name_of(source), is_instance
        self.source = partial(copy.deepcopy, source) if is_instance else source
        self.arguments, self.root = dict(arguments or {}), root_from(seed)

    @classmethod
    def names(cls) -> list[str]:
        """Names of all checks."""
        members = (item for kind in reversed(cls.__mro__) for item in vars(kind).items())
        checks = [name for name, member in members if inspect.isgeneratorfunction(member)]
        return [name for name in checks if not name.startswith("_")]

    def run(self, skip: Collection[str] = ()) -> Report:
        """Run all checks, whatever the first ones find.

        Raises:
            SpecError: If ``skip`` has a name that no check has.
        """
        names = self.names()
        if unknown := sorted(set(skip).difference(names)):
            what = f"skip names {unknown}, but no check has that name"
            raise SpecError(what, fix=f"skip is a list of names: {names}")
        found: list[Finding] = []
        not_checked, has_raised = dict.fromkeys(skip, "left out by skip"), False
        for name in [name for name in names if name not in skip]:
            try:
                with warnings.catch_warnings(), seeded_generators(0):
                    warnings.simplefilter("ignore")
                    with closing(getattr(self, name)()) as findings:
                        found += [replace(each, check=name) for each in islice(findings, 1)]
            except CannotCheck as reason:
                not_checked[name] = str(reason)
            except (Exception, SystemExit) as reason:
                failure = replace(failed(self.name, reason), check=name)
                if has_raised:  # most likely for the same reason as the first that did
                    not_checked[name] = failure.what
                else:
                    found.append(failure)
                has_raised = True
        found.sort(key=lambda each: each.severity != ERROR)
        loud = {*not_checked, *(each.check for each in found)}
        passed = tuple(name for name in names if name not in loud)
        report = Report(self.name, tuple(found), passed, not_checked)
        for each in report.warnings:
            _LOG.warning("%s: %s", report.subject, each)
        return report

    def make(self, number: int = 0) -> Any:
        """Call the function as worker ``number`` would."""
        seed = worker_seed(self.root, number)
        with seeded_generators(seed):
            own = {"seed": seed} if self.takes_seed else {}
            return self.source(**{**own, **self.arguments})

    @contextmanager
    def made(self, number: int = 0) -> Iterator[Any]:
        """What ``make`` returns, closed afterwards."""
        made = self.make(number)
        try:
            yield made
        finally:
            with suppress(Exception, SystemExit):
                made.close()

    def creation(self) -> Findings:
        """It can be created repeatedly, and is a new object each time."""
        with self.made(0) as first, self.made(1) as second:
            if first is second:
                fix = "make a new one in every call: every worker and every lane needs its own"
                yield error(f"{self.name} returned the same object twice", fix)

    def picklable(self) -> Findings:
        """The function that makes it can be sent to a worker."""
        if self.is_instance:
            raise CannotCheck("an instance was given: pass the function that makes it")
        # The method of a contract's test reaches no worker, but what it captures would.
        is_test = hasattr(getattr(self.source, "__self__", None), "_checked")
        source: Any = getattr(self.source, "__func__", None) if is_test else self.source
        parts = {self.name: source, "its arguments": self.arguments}
        try:
            pickled(parts, parts, fix="create what it needs inside the function")
        except WorkerStartupError as refusal:
            yield failed(self.name, refusal)

    @staticmethod
    def differing(
        how: str, one: Mapping[str, Any], other: Mapping[str, Any], fix: str, severity: Any = error
    ) -> Findings:
        """What is not bitwise the same in arrays or tensors by name, which came about as said."""
        for key in sorted(one.keys() | other.keys()):
            values = one.get(key), other.get(key)
            if bits(values[0]) != bits(values[1]):
                first, second = (" ".join(repr(value).split())[:60] for value in values)
                yield severity(f"{how}: {key!r} is {first} and {second}", fix)

    @classmethod
    def contract(cls, check: Callable[..., Report]) -> Callable[[type], type]:
        """Decorate a class so that it has a test per check, and the arguments of ``check``.

        Args:
            check: ``check_env`` or ``check_agent``, which the class's method ``_checked`` calls.
        """
        settings = {**(check.__kwdefaults__ or {}), "strict": False}
        del settings["skip"]

        def test_of(name: str) -> Callable[[Any], None]:
            def test(self: Any) -> None:
                __tracebackhide__ = True  # pytest shows the message, not how it came about
                given = {each: getattr(self, each) for each in settings}
                report = self._checked(skip={*cls.names()} - {name}, **given)
                for each in report.warnings:
                    warnings.warn(str(each), UserWarning, stacklevel=2)
                if report.errors:
                    raise AssertionError("\n".join(map(str, report.errors)))
                if name in report.not_checked:
                    raise unittest.SkipTest(report.not_checked[name])

            test.__name__, test.__doc__ = f"test_{name}", getattr(cls, name).__doc__
            return test

        def completed(kind: type) -> type:
            tests = {f"test_{name}": test_of(name) for name in cls.names()}
            for name, value in {**settings, **tests}.items():
                setattr(kind, name, value)
            return kind

        return completed


def bits(value: Any) -> Any:
    """What is equal for arrays and tensors with the same dtype, shape and bits."""
    array = np.asarray(value)
    return array.dtype.str, array.shape, array.tobytes()


def _name_of(source: Any) -> str:
    """What reports call it."""
    function = getattr(source, "func", source)
    name: str | None = getattr(function, "__qualname__", None)
    if name is None:
        return type(getattr(source, "unwrapped", source)).__name__
    return name if inspect.isclass(function) else f"{name}()"
