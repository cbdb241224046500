"""Vectorised sampling of rows in proportion to their priorities.

A tree of sums with 16 children per node, whose top level is searched as a whole. A million
priorities need three levels (a binary tree twenty), each with a few array operations per batch.
Sums are always computed from their children, so rounding errors do not accumulate.

Reference:
    Schaul et al., "Prioritized Experience Replay", ICLR 2016, section 3.3 for the proportional
    variant and appendix B.2.1 for its sum tree and its stratified draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlpool.data.storage import NDArray
from rlpool.errors import SpecError
from rlpool.pool.ingest import as_array

_FANOUT = 16
_TOP_SIZE = 2**14  # nodes of the top level
_MOST_POWER = 1e290  # of a priority, so that the sum of many does not overflow


class PriorityTree:
    """Priorities of rows, all zero at first.

    Args:
        capacity: Number of rows.

    Attributes:
        leaves: float64 ``[capacity]``. Change them through ``set``.
    """

    def __init__(self, capacity: int) -> None:
        sizes = [-(-capacity // _FANOUT)]  # blocks of each level
        while sizes[-1] * _FANOUT > _TOP_SIZE:
            sizes.append(-(-sizes[-1] // _FANOUT))
        self._levels = [np.zeros(size * _FANOUT) for size in sizes]
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

    def set(self, rows: slice | NDArray, priorities: float | NDArray) -> None:
        """Change priorities; if a row occurs twice, the last priority counts."""
        self._levels[0][rows] = priorities
        for level, blocks in zip(self._levels[1:], self._blocks, strict=False):
            if isinstance(rows, slice):
                rows = slice(rows.start // _FANOUT, -(-rows.stop // _FANOUT))
            else:
                rows = rows // _FANOUT
            level[rows] = blocks[rows].sum(axis=1)

    def draw(self, n: int, generator: np.random.Generator) -> NDArray:
        """Draw rows in proportion to their priorities, one from each of n equal shares.

        Args:
            n: Number of rows.
            generator: Source of randomness.

        Returns:
            int64 ``[n]``, ascending. ``total`` must not be zero.
        """
        # torch's cumulative sum is four times as fast as NumPy's.
        top = torch.from_numpy(self._levels[-1]).cumsum(0).numpy()
        rest = (np.arange(n) + generator.random(n)) * (top[-1] / n)
        nodes = np.minimum(np.searchsorted(top, rest, side="right"), len(top) - 1)
        rest -= top[nodes] - self._levels[-1][nodes]
        places = np.arange(n)
        for blocks in self._blocks[-2::-1]:
            children = blocks.take(nodes, axis=0)
            sums = torch.from_numpy(children).cumsum(1).numpy()
            child = (sums > rest[:, None]).argmax(axis=1)
            child[sums[:, -1] <= rest] = _FANOUT - 1
            rest -= sums[places, child] - children[places, child]
            nodes = nodes * _FANOUT + child
        missed = np.flatnonzero(self._levels[0].take(nodes) <= 0)
        if missed.size:  # rounding led to a row without a priority
            possible = np.flatnonzero(self.leaves)
            shares = self.leaves[possible] / self.leaves[possible].sum()
            nodes[missed] = generator.choice(possible, missed.size, p=shares)
        rows: NDArray = nodes
        return rows


def checked_priorities(index: Any, priorities: Any, alpha: float) -> tuple[NDArray, NDArray]:
    """Return indices int64 ``[n]``, and priorities float64 ``[n]`` to the power alpha.

    Raises:
        SpecError: For other shapes, and for values that are not finite or negative.
    """
    given = as_array(index)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        shape = f"{given.dtype}{list(given.shape)}"
        raise SpecError(f"index should be int64 [n] as returned by sample(), got {shape}")
    values = as_array(priorities)
    is_right = values.dtype.kind in "biuf" and values.shape == given.shape
    if is_right:
        with np.errstate(over="ignore", invalid="ignore"):
            powers = values.astype(np.float64) ** alpha
        is_right = (np.isfinite(values) & (values >= 0) & (powers <= _MOST_POWER)).all()
    if not is_right:
        raise SpecError(
            f"priorities should be finite numbers [{given.size}], not negative or huge, "
            f"got {values}",
            fix="pass absolute errors, and look for NaN or divergence in the loss",
        )
    return given.astype(np.int64), powers
