"""Generators with the names that they had in the former gym.

Environments of that time draw with ``self.np_random.rand()``, ``randn``, ``randint``: methods of
NumPy's ``RandomState``, later of gym's ``RandomNumberGenerator``. The generators of Gymnasium are
NumPy's ``Generator``, which lacks them.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class FormerGenerator(np.random.Generator):
    """A ``numpy.random.Generator`` that has the former names as well; they draw the same numbers.

    Args:
        bit_generator: Where the bits come from.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.bit_generator,)

    def random_sample(self, size: Any = None) -> Any:
        """Uniform in [0, 1)."""
        return self.random(size)

    ranf = sample = random_sample

    def rand(self, *size: int) -> Any:
        """Uniform in [0, 1), of the shape ``size``; a float without one."""
        return self.random(size or None)

    def randn(self, *size: int) -> Any:
        """Normal, of the shape ``size``; a float without one."""
        return self.standard_normal(size or None)

    def randint(self, low: Any, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
        """Integers from ``low`` to below ``high``, or from 0 to below ``low``."""
        return self.integers(low, high, size=size, dtype=dtype)

    def random_integers(self, low: Any, high: Any = None, size: Any = None) -> Any:
        """Integers from ``low`` to ``high``, or from 1 to ``low``, both included."""
        low, high = (1, low) if high is None else (low, high)
        return self.integers(low, high, size=size, endpoint=True)

    def seed(self, seed: Any = None) -> None:
        """Begin anew with a seed."""
        self.bit_generator.state = type(self.bit_generator)(seed).state

    def get_state(self) -> Any:
        """What ``set_state`` takes to draw the same numbers again."""
        return self.bit_generator.state

    def set_state(self, state: Any) -> None:
        """Go back to where ``get_state`` was called."""
        self.bit_generator.state = state


def give_former_names(env: Any) -> None:
    """Let the generators of an environment, and of what it wraps, have the former names.

    They go on with the same bits.
    """
    layer = env
    while layer is not None:
        attributes = getattr(layer, "__dict__", {})
        for name, value in attributes.items():
            if type(value) is np.random.Generator:
                attributes[name] = FormerGenerator(value.bit_generator)
        layer = attributes.get("env")
