"""The global generators of Python, NumPy and torch: what they are in the middle of."""

from __future__ import annotations

import copy
import random
from typing import Any, NamedTuple

import numpy as np
import torch

_NUMPY: Any = np.random  # its stubs lack some of what it has


class Generators(NamedTuple):
    """The states of all, copies, and the bit generator of NumPy, which goes on drawing."""

    python: Any
    numpy: dict[str, Any]
    torch: torch.Tensor
    bit_generator: Any

    def with_own_bit_generator(self) -> Generators:
        """The same states, to go on from beside these."""
        return self._replace(bit_generator=copy.deepcopy(self.bit_generator))


def current_generators() -> Generators:
    """What all generators draw from now."""
    numpy, bit_generator = _NUMPY.get_state(legacy=False), _NUMPY.get_bit_generator()
    return Generators(random.getstate(), numpy, torch.default_generator.get_state(), bit_generator)


def use_generators(generators: Generators) -> None:
    """Let all go on where they were when ``current_generators`` returned this.

    NumPy's bit generator must not have been drawn from since: it is exchanged, which costs nothing.
    To write its state takes longer than a step of a small environment.
    """
    random.setstate(generators.python)
    _NUMPY.set_bit_generator(generators.bit_generator)
    if generators.numpy["has_gauss"]:  # a normal number kept for the next call, now dropped
        _NUMPY.set_state(generators.numpy)
    torch.default_generator.set_state(generators.torch)
