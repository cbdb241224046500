"""Whether a block fits into memory, before it is allocated, and what to change if it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rlpool.machine.cgroups import ROOT
from rlpool.machine.limits import Advice, check_size, human, size_warning
from rlpool.slots.blocks import Layout


def checked(layout: Layout, lowerable: Sequence[str], *, private: bool = False) -> Layout:
    """Return a layout whose blocks fit into memory; warn if they do not fit into what is free.

    Args:
        layout: The layout.
        lowerable: Which of ``n_slots`` and ``n_timesteps`` the user can change.
        private: Whether blocks are memory of this process only.

    Raises:
        SpecError: If a block is larger than the machine, naming bytes per key and what would fit.
    """
    check_size(*_question(layout, lowerable), private=private)
    return layout


def block_warning(
    layout: Layout, lowerable: Sequence[str], root: Path = ROOT
) -> tuple[str, str] | None:
    """What to say about a block that is larger than what is free, and what to do.

    Args:
        layout: The layout.
        lowerable: Which of ``n_slots`` and ``n_timesteps`` the user can change.
        root: Where ``/proc`` and ``/sys`` lie.

    Returns:
        ``None`` if the block fits into what is free.

    Raises:
        SpecError: As ``checked``.
    """
    return size_warning(*_question(layout, lowerable), root=root)


def _question(layout: Layout, lowerable: Sequence[str]) -> tuple[dict[str, int], Advice, str]:
    sizes = layout.bytes_of_key()
    sizes["rlpool's bookkeeping"] = layout.n_bytes - sum(sizes.values())
    what = f"a block of {layout.n_slots} slots of {layout.n_timesteps} steps"
    return sizes, lambda n_free: _advice(layout, lowerable, n_free), what


def _advice(layout: Layout, lowerable: Sequence[str], n_free: int) -> str:
    """Which arguments to lower, with values that fit into so many bytes."""
    n_slots, n_timesteps = layout.n_slots, layout.n_timesteps
    n_lanes = layout.step.n_lanes * layout.n_workers  # a slot for each of them, at the least

    def fits(n_slots: int, n_timesteps: int) -> bool:
        return replace(layout, n_slots=n_slots, n_timesteps=n_timesteps).n_bytes <= n_free

    found = []
    if "n_slots" in lowerable:
        fewer = _largest(n_lanes, n_slots, lambda value: fits(value, n_timesteps))
        found += [f"n_slots={fewer}"] if fewer else []
    if "n_timesteps" in lowerable:
        shorter = _largest(1, n_timesteps, lambda value: fits(n_slots, value))
        found += [f"n_timesteps={shorter}"] if shorter else []
    if not found and len(lowerable) > 1:
        shorter = _largest(1, n_timesteps, lambda value: fits(n_lanes, value))
        found += [f"n_slots={n_lanes} with n_timesteps={shorter}"] if shorter else []
    lower = f"lower {' or '.join(lowerable)}" if lowerable else "use fewer environments"
    if found:
        return f"{lower} ({' or '.join(found)} would fit)"
    step = human(sum(spec.n_bytes for spec in layout.rows.values()))
    return f"{lower}, or use smaller observations: a step of one of {n_lanes} lanes takes {step}"


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, to two digits; 0 if none does."""
    if least > most or not fits(least):
        return 0
    low, high = least, most + 1  # low fits, high does not or is not wanted
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    unit = 10 ** max(0, len(str(low)) - 2)
    return int(max(least, low // unit * unit))
