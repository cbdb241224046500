"""What a check found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rlpool.errors import SpecError, compose
from rlpool.record.failures import described

_LOG = logging.getLogger("rlpool")

ERROR = "error"
WARNING = "warning"

SubjectT = TypeVar("SubjectT")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        check: Name of the check that found it, such as ``"observations_fit"``.
        severity: ``"error"``: rlpool refuses it, or loses a promise. ``"warning"``: it works, but
            likely not as meant.
        what: What is wrong and where.
        fix: What to do.
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
        """Findings that are not."""
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
        n_errors, n_warnings = len(self.errors), len(self.warnings)
        lines = [f"{self.subject}: {_count(n_errors, 'error')}, {_count(n_warnings, 'warning')}"]
        lines += [str(finding) for finding in self.findings]
        for why in dict.fromkeys(self.not_checked.values()):
            names = [name for name, reason in self.not_checked.items() if reason == why]
            lines.append(f"not checked: {', '.join(names)}: {why}")
        return "\n".join(lines)


class CannotCheck(Exception):
    """Raised by a check that does not apply, or for which something was not given."""


class Failed(CannotCheck):
    """Raised by a check that the user's code does not let come to its question.

    Another check complains about that, as a rule; if none does, it counts as an error.
    """


@dataclass(frozen=True)
class Check(Generic[SubjectT]):
    """One clause of a contract.

    Attributes:
        name: What reports call it.
        find: Gives the findings; raises ``CannotCheck`` where it cannot say.
        is_broad: Whether it would repeat what others find; it is made only if they find nothing.
    """

    name: str
    find: Callable[[SubjectT], Iterator[Finding]]
    is_broad: bool = False


def error(check: str, what: str, fix: str) -> Finding:
    """A finding that is an error."""
    return Finding(check, ERROR, what, fix)


def warning(check: str, what: str, fix: str) -> Finding:
    """A finding that is a warning."""
    return Finding(check, WARNING, what, fix)


def failure(check: str, reason: Failed) -> Finding:
    """What a check that failed counts as where nobody else complains."""
    return error(check, f"cannot be checked: {reason}", "mend what fails, then check again")


def from_spec_error(check: str, refusal: SpecError, fix: str, more: str = "") -> Finding:
    """What rlpool refuses, as a finding.

    Args:
        check: Name of the check.
        refusal: The error.
        fix: What to do, where the error does not say.
        more: Added to what is wrong.
    """
    what, _, own_fix = str(refusal).partition("\n  fix:   ")
    return error(check, what + more, own_fix or fix)


def run_checks(
    subject: SubjectT, name: str, checks: Sequence[Check[SubjectT]], skip: Collection[str]
) -> Report:
    """Make all checks, whatever the first ones find.

    Args:
        subject: What is checked.
        name: What the report calls it.
        checks: The checks.
        skip: Names of checks to leave out.

    Raises:
        SpecError: If ``skip`` has a name that no check has.
    """
    refuse_unknown(skip, [check.name for check in checks])
    findings: list[Finding] = []
    passed: list[str] = []
    not_checked: dict[str, str] = {}
    failures: list[Finding] = []
    for check in checks:
        if check.name in skip:
            not_checked[check.name] = "left out by skip"
            continue
        if check.is_broad and findings:
            not_checked[check.name] = "it would repeat the findings above"
            continue
        before = len(findings)
        try:
            findings.extend(check.find(subject))
        except CannotCheck as reason:
            not_checked[check.name] = str(reason)
            if isinstance(reason, Failed):
                failures.append(failure(check.name, reason))
        except Exception as reason:  # from the user's code, where nobody expected it
            not_checked[check.name] = described(reason)
            failures.append(failure(check.name, Failed(described(reason))))
        else:
            if len(findings) == before:
                passed.append(check.name)
    if not any(finding.severity == ERROR for finding in findings):
        findings.extend(failures[:1])
    findings.sort(key=lambda finding: finding.severity != ERROR)
    report = Report(name, tuple(findings), tuple(passed), not_checked)
    for found in report.warnings:
        _LOG.warning("%s: %s", name, found)
    return report


def refuse_no_mapping(**arguments: object) -> None:
    """Refuse arguments that are neither a dict nor ``None``."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Mapping):
            raise SpecError(f"{name} is a {type(value).__name__}", fix=f"{name} should be a dict")


def refuse_arguments_of_instance(is_instance: bool, **arguments: object) -> None:
    """Refuse arguments for making what was made already."""
    for name, value in arguments.items():
        if is_instance and value:
            raise SpecError(
                f"{name} was given, and an instance, which needs none",
                fix="give the function or the class instead of the instance",
            )


def refuse_unknown(skip: Iterable[str], names: Sequence[str]) -> None:
    """Refuse names of checks that there are not."""
    if isinstance(skip, str):
        raise SpecError(f"skip is the string {skip!r}", fix=f"write skip=[{skip!r}]")
    unknown = sorted(set(skip) - set(names))
    if unknown:
        raise SpecError(f"skip names {unknown}, which no check is called", fix=f"there are {names}")


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
