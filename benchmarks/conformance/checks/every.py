"""All checks, in the order of the page."""

from __future__ import annotations

from benchmarks.conformance.checks import REGISTER, Check, faults, limits, seeds, selection, values

MODULES = (values, selection, seeds, faults, limits)
GROUPS = {module.__name__.rpartition(".")[2]: module.__doc__ or "" for module in MODULES}
CHECKS: dict[str, Check] = {
    name: check for group in GROUPS for name, check in REGISTER.items() if check.group == group
}
