"""How checks of environments and agents are run and reported, and those that both share.

A check is a generator method of ``Checks``; the first finding that it yields is reported. Its name
is its name in reports, in ``skip``, and in the test of a contract class.
"""

from __future__ import annotations

import copy
import inspect
import unittest
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from rlpool.errors import RlpoolError, SpecError, WorkerStartupError, compose, described
from rlpool.machine.generators import seeded_generators
from rlpool.record.failures import what_and_fix
from rlpool.seeding import root_from, worker_seed
from rlpool.workers.sharing import pickled


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


Findings = Iterator[tuple[str, str, str]]
"""What a check yields: ``severity``, ``what`` and ``fix`` of each ``Finding``."""


def failed(who: str, reason: BaseException) -> tuple[str, str, str]:
    """The finding that the user's code raised, or returned what rlpool refuses.

    Args:
        who: What was called, for exceptions that do not say.
        reason: The exception.
    """
    what, fix = f"{who} raised {described(reason)}", ""
    if isinstance(reason, RlpoolError):
        what, fix = reason.what, reason.own_fix
    place = getattr(reason, "where", None)
    return "error", f"{what} ({place})" if place else what, fix or "fix it, then check again"


@dataclass(frozen=True)
class Report:
    """The outcome of ``check_env`` or ``check_agent``; true if there are no errors.

    Attributes:
        subject: What was checked.
        findings: What was found, errors first.
        not_checked: Name of each check that could not be made, and why.

    Example:
        >>> report = check_env(lambda: FaultyEnv("nan_reward", at_step=1), strict=False)
        >>> report.ok, [finding.check for finding in report.errors]
        (False, ['values_are_finite'])
    """

    subject: str
    findings: tuple[Finding, ...]
    not_checked: Mapping[str, str]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that are errors."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that are warnings."""
        return tuple(f for f in self.findings if f.severity == "warning")

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        counts = ((len(self.errors), "error"), (len(self.warnings), "warning"))
        told = ", ".join(f"{n} {word}" + "s" * (n != 1) for n, word in counts)
        unchecked = (f"not checked: {name}: {why}" for name, why in self.not_checked.items())
        return "\n".join([f"{self.subject}: {told}", *map(str, self.findings), *unchecked])


class CannotCheck(Exception):
    """Raised by a check that does not apply, or that was not given what it needs."""


class Checks:
    """What is checked, and all checks of it in their order.

    Args:
        source: A function that makes it, or an instance, of which copies are made.
        arguments: Arguments of the function.
        seed: Root of all seeds.
        is_instance: Whether ``source`` is an instance.

    Attributes:
        maker: The function, without the arguments of a ``partial``.
        name: What reports call it.
        made: What ``make`` has made, and ``close`` closes.
    """

    takes_seed = False  # whether the function is called with ``seed=``
    refusal: type[RlpoolError]  # raised for errors

    def __init__(self, source: Any, arguments: Any, seed: int, is_instance: bool) -> None:
        fits = not arguments if is_instance else isinstance(arguments, Mapping | None)
        if not fits or not (is_instance or callable(source)):
            what = f"got {source!r:.60} with the arguments (env_args, agent_args) {arguments!r:.60}"
            raise SpecError(what, fix="pass a function, with a dict of arguments, or what it makes")
        self.is_instance, self.maker = is_instance, getattr(source, "func", source)
        self.name: str = getattr(self.maker, "__qualname__", type(source).__name__)
        self.source = partial(copy.deepcopy, source) if is_instance else source
        self.arguments, self.root = dict(arguments or {}), root_from(seed)
        self.made: list[Any] = []

    @classmethod
    def names(cls) -> list[str]:
        """Names of all checks."""
        members = (item for kind in reversed(cls.__mro__) for item in vars(kind).items())
        checks = [name for name, member in members if inspect.isgeneratorfunction(member)]
        return [name for name in checks if not name.startswith("_")]

    def run(self, skip: Collection[str], *, strict: bool) -> Report:
        """Run all checks, whatever the first ones find.

        Raises:
            RlpoolError: If ``strict`` and there are errors.
            SpecError: If ``skip`` has a name that no check has.
        """
        names = self.names()
        if unknown := sorted(set(skip).difference(names)):
            what = f"skip names {unknown}, but no check has that name"
            raise SpecError(what, fix=f"skip is a list of names: {names}")
        found, failures = list[Finding](), list[Finding]()
        not_checked = dict.fromkeys(skip, "left out by skip")
        for name in [name for name in names if name not in skip]:
            try:
                check = closing(getattr(self, name)())
                with warnings.catch_warnings(), seeded_generators(0), check as findings:
                    warnings.simplefilter("ignore")
                    found += [Finding(name, *each) for each in islice(findings, 1)]
            except CannotCheck as reason:
                not_checked[name] = str(reason)
            except (Exception, SystemExit) as reason:
                failures.append(Finding(name, *failed(self.name, reason)))
            self.close()
        # All but the first have most likely the same reason.
        not_checked |= {each.check: each.what for each in failures[1:]}
        found = sorted(found + failures[:1], key=lambda each: each.severity != "error")
        report = Report(self.name, tuple(found), not_checked)
        if strict and not report.ok:
            raise self.refusal(str(report))
        for each in report.warnings:
            warnings.warn(f"{self.name}: {each}", UserWarning, stacklevel=4)
        return report

    def make(self, number: int = 0) -> Any:
        """Call the function as worker ``number`` would; what it returns is closed by ``close``."""
        seed = worker_seed(self.root, number)
        with seeded_generators(seed):
            own = {"seed": seed} if self.takes_seed else {}
            try:
                self.made.append(self.source(**{**own, **self.arguments}))
            except (Exception, SystemExit) as reason:
                what, fix = what_and_fix(self.name, reason)
                raise SpecError(what, fix=fix) from reason
        return self.made[-1]

    def close(self) -> None:
        """Close what was made."""
        while self.made:
            with suppress(Exception, SystemExit):
                self.made.pop().close()

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
    def differing(how: str, one: Mapping[str, Any], other: Mapping[str, Any], fix: str) -> Findings:
        """What is not bitwise the same in arrays or tensors by name, which came about as said."""
        for key in sorted(one.keys() | other.keys()):
            values = one.get(key), other.get(key)
            if bits(values[0]) != bits(values[1]):
                first, second = (" ".join(repr(value).split())[:60] for value in values)
                yield "error", f"{how}: {key!r} is {first} and {second}", fix

    @classmethod
    def contract(cls, check: Callable[..., Report]) -> Callable[[type], type]:
        """Decorate a class so that it has a test per check, and the arguments of ``check``.

        Args:
            check: ``check_env`` or ``check_agent``, which the class's method ``_checked`` calls.
        """
        settings = {**(inspect.unwrap(check).__kwdefaults__ or {}), "strict": False}
        del settings["skip"]

        def test_of(name: str) -> Callable[[Any], None]:
            def test(self: Any) -> None:
                __tracebackhide__ = True  # pytest shows the message, not how it came about
                given = {each: getattr(self, each) for each in settings}
                report = self._checked(skip={*cls.names()} - {name}, **given)
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
