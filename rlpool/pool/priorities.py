"""Sampling in proportion to priorities, vectorised.

A tree of sums with 16 children per node, whose top is as wide as can be searched at a glance: for a
million priorities that are three levels, each of which costs a few array operations for a whole
batch, where a binary tree has twenty. Sums are computed anew from their children, never corrected,
so rounding errors do not pile up. Running sums are torch's: four times as fast as NumPy's.

Reference:
    Schaul et al., "Prioritized Experience Replay", ICLR 2016, section 3.3 for the proportional
    variant and appendix B.2.1 for its sum tree and its stratified draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlpool.errors import SpecError
from rlpool.memory.storage import Array

_FANOUT = 16
_TOP_SIZE = 2**14  # nodes of the top level, which is searched as a whole
_MAX_REDRAWS = 16
_MAX_POWER = 1e290  # of a priority: a great many of them can be added up


class PriorityTree:
    """Priorities of rows, all zero at first.

    Args:
        capacity: Number of rows.

    Attributes:
        leaves: float64 ``[capacity]``. Change them through ``set`` and ``fill``.
    """

    def __init__(self, capacity: int) -> None:
        sizes = [_padded(capacity)]
        while sizes[-1] > _TOP_SIZE:
            sizes.append(_padded(sizes[-1] // _FANOUT))
        self._levels = [np.zeros(size) for size in sizes]
        self._blocks = [level.reshape(-1, _FANOUT) for level in self._levels]
        self.leaves = self._levels[0][:capacity]

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._levels[-1].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the tree."""
        return sum(level.nbytes for level in self._levels)

    def set(self, rows: Array, priorities: Array) -> None:
        """Change the priorities of some rows; of a row that is named twice the last one counts."""
        self._levels[0][rows] = priorities
        nodes = rows
        for level, blocks in zip(self._levels[1:], self._blocks, strict=False):
            nodes = nodes // _FANOUT
            level[nodes] = blocks[nodes].sum(axis=1)

    def fill(self, rows: slice, priorities: float | Array) -> None:
        """Change the priorities of rows that follow each other."""
        self._levels[0][rows] = priorities
        start, stop = rows.start, rows.stop
        for level, blocks in zip(self._levels[1:], self._blocks, strict=False):
            start, stop = start // _FANOUT, -(-stop // _FANOUT)
            level[start:stop] = blocks[start:stop].sum(axis=1)

    def draw(self, n: int, generator: np.random.Generator) -> Array:
        """Rows drawn in proportion to their priorities, one from each of n equal shares.

        Args:
            n: How many.
            generator: Source of randomness.

        Returns:
            int64 ``[n]``, ascending. ``total`` must not be zero.
        """
        top = torch.from_numpy(self._levels[-1]).cumsum(0).numpy()
        shares = (np.arange(n) + generator.random(n)) * (top[-1] / n)
        rows = self._find(top, shares)
        for _ in range(_MAX_REDRAWS):
            # Rounding may end beside a share's row, on one that has no priority.
            missed = np.flatnonzero(self._levels[0].take(rows) <= 0)
            if not missed.size:
                return rows
            rows[missed] = self._find(top, generator.random(missed.size) * top[-1])
        rows[missed] = int(self._levels[0].argmax())
        return rows

    def _find(self, top: Array, shares: Array) -> Array:
        level = self._levels[-1]
        nodes = np.minimum(np.searchsorted(top, shares, side="right"), len(top) - 1)
        rest = shares - (top[nodes] - level[nodes])
        places = np.arange(len(nodes))
        for blocks in self._blocks[-2::-1]:
            children = blocks.take(nodes, axis=0)
            sums = torch.from_numpy(children).cumsum(1).numpy()
            # Not torch.searchsorted, which wakes up other threads for this.
            child = (sums > rest[:, None]).argmax(axis=1)
            child[sums[:, -1] <= rest] = _FANOUT - 1
            rest = rest - (sums[places, child] - children[places, child])
            nodes = nodes * _FANOUT + child
        return nodes


def _padded(size: int) -> int:
    return -(-size // _FANOUT) * _FANOUT


def checked_powers(priorities: Array, alpha: float) -> Array:
    """Priorities to a power; refuses those that are too large to be added up."""
    with np.errstate(over="ignore"):
        powers: Array = priorities**alpha
    if not (powers <= _MAX_POWER).all():
        raise SpecError(
            f"priorities as large as {priorities.max()} cannot be added up",
            fix="clip them, or look for a loss that diverges",
        )
    return powers


def checked_indexes(value: Any) -> Array:
    """Indexes of transitions, int64 ``[n]``; refuses everything else."""
    try:
        array = value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(None)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise SpecError(
            f"index should be int64 [n] as sample() gave it, got {array.dtype}{list(array.shape)}"
        )
    return array.astype(np.int64)


def checked_priorities(value: Any) -> Array:
    """Priorities, float64 ``[n]``, finite and not negative; refuses everything else."""
    try:
        if isinstance(value, torch.Tensor) and value.is_complex():
            raise TypeError("complex")
        if isinstance(value, torch.Tensor):
            value = value.detach().to("cpu", torch.float64)
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(np.nan)
    if array.ndim != 1 or not (np.isfinite(array) & (array >= 0)).all():
        raise SpecError(
            "priorities should be finite numbers [n], none of them negative",
            fix="pass absolute errors, and look for NaN in the loss",
        )
    return array
