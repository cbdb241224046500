"""All checks, in the order of the page."""

from __future__ import annotations

from benchmarks.conformance.checks import REGISTER, Check, faults, limits, seeds, selection, values

GROUPS = {
    "values": values,
    "selection": selection,
    "seeds": seeds,
    "faults": faults,
    "limits": limits,
}
CHECKS: dict[str, Check] = {
    name: check for group in GROUPS for name, check in REGISTER.items() if check.group == group
}
