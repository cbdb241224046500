"""The process's global generators: ``random``, NumPy's legacy one, torch's for the CPU.

They are what users' code may draw from. Where it runs in the caller's process, it gets states of
its own: what the caller draws must not depend on what rlpool runs, nor the other way round.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_NUMPY: Any = np.random  # its stubs lack some of what it has


Generators = tuple[Any, dict[str, Any], torch.Tensor, Any]
"""The states of Python's, NumPy's and torch's, copies; and the bit generator of NumPy, which goes
on drawing."""


def current_generators() -> Generators:
    """What all generators draw from now."""
    numpy, bit_generator = _NUMPY.get_state(legacy=False), _NUMPY.get_bit_generator()
    return random.getstate(), numpy, torch.default_generator.get_state(), bit_generator


def use_generators(generators: Generators) -> None:
    """Let all go on where they were when ``current_generators`` returned this.

    NumPy's bit generator must not have been drawn from since: it is exchanged, which costs nothing.
    To write its state takes longer than a step of a small environment.
    """
    python, numpy, torchs, bit_generator = generators
    random.setstate(python)
    _NUMPY.set_bit_generator(bit_generator)
    if numpy["has_gauss"]:  # a normal number kept for the next call, now dropped
        _NUMPY.set_state(numpy)
    torch.default_generator.set_state(torchs)


def seed_generators(seed: int) -> None:
    """Seed the generators.

    Args:
        seed: A non-negative int; NumPy's generator gets its lowest 32 bits.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  (users' code may draw from it)
    torch.default_generator.manual_seed(seed)  # the caller's devices are left alone


class OwnGenerators:
    """Global generators that are separate from the caller's.

    Args:
        seed: Seeds them at their first use; without one they start as copies of the caller's.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._own: Generators | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A section with these generators, which always ends with the caller's restored."""
        callers = current_generators()
        own = self._own or (*callers[:3], copy.deepcopy(callers[3]))
        try:
            use_generators(own)
            if self._own is None and self._seed is not None:
                seed_generators(self._seed)
            yield
        finally:
            self._own = current_generators()
            use_generators(callers)
