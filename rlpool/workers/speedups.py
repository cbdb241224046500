"""Makes Gymnasium's checks of actions cheaper in worker processes, with the same results.

Many environments call ``Discrete.contains`` in every step: for an int64, as agents choose, it
spends a quarter of a CartPole step on finding out that an integer is an integer. Vector
environments call ``MultiDiscrete.contains``. Both are replaced in worker processes only, never in
the caller.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete

_INT64 = np.dtype(np.int64)


def install_fast_checks() -> None:
    """Replace ``Discrete.contains`` and ``MultiDiscrete.contains``."""
    one: Any = Discrete.contains
    many: Any = MultiDiscrete.contains

    @functools.wraps(one)
    def contains(self: Any, x: Any) -> bool:
        if type(x) is np.int64 and self.dtype is _INT64:
            start = self.start
            return bool(start <= x < start + self.n)
        return bool(one(self, x))

    @functools.wraps(many)
    def contains_all(self: Any, x: Any) -> bool:
        if (
            type(x) is np.ndarray
            and x.dtype is _INT64
            and self.dtype is _INT64
            and x.shape == self.nvec.shape
        ):
            # Numbers below the start wrap around, past all others.
            places = (x - self.start).view(np.uint64)
            n_valid = np.count_nonzero(places < self.nvec.view(np.uint64))
            return bool(n_valid == x.size)
        return bool(many(self, x))

    Discrete.contains = contains  # type: ignore[method-assign]
    MultiDiscrete.contains = contains_all  # type: ignore[method-assign]
