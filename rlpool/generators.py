"""The process's global random generators: ``random``, NumPy's legacy one, torch's for the CPU.

Users' code draws from them. Where it runs in the caller's process, it gets generators of its own:
what the caller draws must not depend on what rlpool runs, nor the other way round.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rlpool.machine.interrupts import InterruptsHeld

States = tuple[Any, Any, torch.Tensor]


def generator_states() -> States:
    """The states of ``random``, ``numpy.random`` and torch, copies."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def set_generator_states(states: States) -> None:
    """Put the generators into states that ``generator_states`` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


def seed_generators(seed: int) -> None:
    """Seed the generators.

    Args:
        seed: A non-negative int; NumPy's generator gets its lowest 32 bits.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  (for those who draw from it)
    torch.default_generator.manual_seed(seed)  # the caller's devices are none of our business


class OwnGenerators:
    """States of the generators that somebody has for its own, beside the caller's.

    They begin with what the generators are when they are used for the first time.
    """

    def __init__(self) -> None:
        self._states: States | None = None
        self._callers: States | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A section with these states; the caller's are back afterwards, whatever happens."""
        try:
            try:
                with InterruptsHeld():
                    self._callers = generator_states()
                    if self._states is not None:
                        set_generator_states(self._states)
                yield
            finally:
                with InterruptsHeld():
                    self._give_back()
        finally:
            self._give_back()  # if an interrupt came just before they were held

    def _give_back(self) -> None:
        if self._callers is not None:
            self._states = generator_states()
            set_generator_states(self._callers)
            self._callers = None


@contextmanager
def seeded_generators(seed: int | None) -> Iterator[None]:
    """A section with generators that are seeded with ``seed``, or not if that is ``None``."""
    with OwnGenerators().in_use():
        if seed is not None:
            seed_generators(seed)
        yield
