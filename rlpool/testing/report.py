"""Checks, what they check, and the report of what they found.

A check is a generator function that takes a ``Subject`` and yields findings. Its name is its name
in reports and in ``skip``. Exceptions of the user's code become ``Failed``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rlpool.envs.vec_env import LaneError
from rlpool.errors import SpecError, compose
from rlpool.memory.sharing import parcel_of
from rlpool.record.failures import described
from rlpool.seeding import root_from, seeded_generators, worker_seed

_LOG = logging.getLogger("rlpool")
_FIX = "fix what fails, then check again"

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
        error: values_are_finite: episode 0, step 1: the reward is NaN, or contains NaN
          fix:   find the division or logarithm that it comes from: one NaN spoils a network
    """

    check: str
    severity: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: " + compose(self.what, fix=self.fix)


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
        names: dict[str, list[str]] = {}
        for name, why in self.not_checked.items():
            names.setdefault(why, []).append(name)
        unchecked = (f"not checked: {', '.join(checks)}: {why}" for why, checks in names.items())
        return "\n".join([f"{self.subject}: {told}", *map(str, self.findings), *unchecked])


class CannotCheck(Exception):
    """Raised by a check that does not apply, or that was not given what it needs."""


class Failed(CannotCheck):
    """The user's code failed before the check could ask its question.

    Usually another check reports that failure. If none does, it counts as an error.

    Args:
        what: What failed.
        fix: What to do.
    """

    def __init__(self, what: str, fix: str = _FIX) -> None:
        super().__init__(what)
        self.finding = error(what, fix)


@contextmanager
def user_code(who: str | Callable[[], str], fix: str = _FIX) -> Iterator[None]:
    """Turn whatever ``who`` raises, except ``KeyboardInterrupt``, into ``Failed``."""
    try:
        yield
    except (KeyboardInterrupt, CannotCheck):
        raise
    except BaseException as reason:
        cause = (reason.__cause__ if isinstance(reason, LaneError) else None) or reason
        who = who() if callable(who) else who
        raise Failed(f"{who} raised {described(cause)}", fix) from cause


def error(what: str, fix: str) -> Finding:
    """A finding that is an error; whoever runs the check adds its name."""
    return Finding("", ERROR, what, fix)


def warning(what: str, fix: str) -> Finding:
    """A finding that is a warning."""
    return Finding("", WARNING, what, fix)


class Subject:
    """What is checked: an instance, or a function that makes one.

    Args:
        source: The instance or the function.
        arguments: Arguments of the function.
        seed: Root of all seeds.
        is_instance: Whether ``source`` is an instance, which is copied before it is used.
        takes_seed: Whether the function is called with ``seed=``.

    Attributes:
        kind: ``"env"`` or ``"agent"``.
        name: What reports call it.
        sent_to_workers: What has to be pickled.
        findings: What the checks found so far.
    """

    kind: ClassVar[str]

    def __init__(
        self, source: Any, arguments: Any, seed: int, is_instance: bool, takes_seed: bool = False
    ) -> None:
        if arguments is not None and not isinstance(arguments, Mapping):
            raise SpecError(f"{self.kind}_args should be a dict, got {type(arguments).__name__}")
        if is_instance and arguments:
            raise SpecError(
                f"{self.kind}_args was given with an instance, which takes none",
                fix="pass the function or the class instead of the instance",
            )
        self.source, self.arguments = source, dict(arguments or {})
        self.is_instance, self.takes_seed = is_instance, takes_seed
        self.name = _name_of(source, is_instance)
        self.sent_to_workers: Any = (source, self.arguments)
        self.findings: list[Finding] = []
        self.root = root_from(seed)

    @functools.cached_property
    def why_no_copy(self) -> str:
        """Why the instance cannot be copied, empty if it can."""
        try:
            copy.deepcopy(self.source if self.is_instance else None)
        except Exception as reason:
            return described(reason)
        return ""

    def make(self, number: int) -> Any:
        """Call the function as worker ``number`` would, or copy the instance."""
        if self.is_instance:
            return self.source if self.why_no_copy else copy.deepcopy(self.source)
        seed = worker_seed(self.root, number)
        own = {"seed": seed} if self.takes_seed else {}
        fix = f"call it in this process to debug; arguments go into {self.kind}_args={{...}}"
        with warnings.catch_warnings(), seeded_generators(seed), user_code(self.name, fix):
            warnings.simplefilter("ignore")
            return self.source(**{**own, **self.arguments})

    @functools.cached_property
    def two(self) -> tuple[Any, Any]:
        """Two new instances; raises ``Failed`` if they cannot be made."""
        raise NotImplementedError

    def conditions(self) -> AbstractContextManager[Any]:
        """A section for a check: with global generators of its own."""
        return seeded_generators(0)


def _name_of(source: Any, is_instance: bool) -> str:
    if is_instance:
        return type(getattr(source, "unwrapped", source)).__name__
    function = getattr(source, "func", source)
    name: str = getattr(function, "__qualname__", type(function).__name__)
    return name if inspect.isclass(function) else f"{name}()"


Check = Callable[[Any], Iterator[Finding]]


def creation(subject: Subject) -> Iterator[Finding]:
    """It can be created repeatedly, and is a new object each time."""
    try:
        first, second = subject.two
    except Failed as failure:
        yield failure.finding
        return
    if first is second and not subject.is_instance:
        fix = "make a new one in every call: every worker and every lane needs its own"
        yield error(f"{subject.name} returned the same object twice", fix)


def refuse_instance(subject: Subject) -> None:
    """Raise ``CannotCheck`` for a question that only a function can answer."""
    if subject.is_instance:
        raise CannotCheck("an instance was given: pass the function that makes it")


def picklable(subject: Subject) -> Iterator[Finding]:
    """The function that makes it can be sent to a worker."""
    refuse_instance(subject)
    try:
        parcel_of(subject.sent_to_workers).load()
    except Exception as reason:
        what = f"{subject.name} or its arguments cannot be pickled: {described(reason)}"
        yield error(what, "create what it needs inside the function, instead of capturing it")


def run_checks(subject: Subject, checks: Sequence[Check], skip: Collection[str] = ()) -> Report:
    """Run all checks, whatever the first ones find.

    Args:
        subject: What is checked.
        checks: The checks.
        skip: Names of checks to leave out.

    Raises:
        SpecError: If ``skip`` has a name that no check has.
    """
    named = {check.__name__: check for check in checks}
    if unknown := sorted(set(skip) - set(named)):
        fix = f"skip is a list of names: {list(named)}"
        raise SpecError(f"skip names {unknown}, but no check has that name", fix=fix)
    found = subject.findings
    passed: list[str] = []
    not_checked = dict.fromkeys(skip, "left out by skip")
    failures: list[Finding] = []
    for name in [name for name in named if name not in skip]:
        n_before = len(found)
        try:
            with subject.conditions(), user_code("the check"):
                found.extend(replace(finding, check=name) for finding in named[name](subject))
        except CannotCheck as reason:
            not_checked[name] = str(reason)
            if isinstance(reason, Failed):
                failures.append(replace(reason.finding, check=name))
        else:
            passed += [name] if len(found) == n_before else []
    if not any(finding.severity == ERROR for finding in found):
        found.extend(failures[:1])
    found.sort(key=lambda finding: finding.severity != ERROR)
    report = Report(subject.name, tuple(found), tuple(passed), not_checked)
    for each in report.warnings:
        _LOG.warning("%s: %s", report.subject, each)
    return report
