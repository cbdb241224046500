"""The process's global random generators, while users' code is checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_STATES: dict[str, Callable[[], Any]] = {
    "random": random.getstate,
    "numpy.random": lambda: np.random.get_state(legacy=True),  # noqa: NPY002
    "torch": torch.get_rng_state,
}


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the global generators, and put them back as they were afterwards."""
    before = {name: state() for name, state in _STATES.items()}
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (the global generator is what is meant)
    torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())  # the CPU's alone
    try:
        yield
    finally:
        random.setstate(before["random"])
        np.random.set_state(before["numpy.random"])  # noqa: NPY002
        torch.set_rng_state(before["torch"])


class GeneratorWatch:
    """Notices which global generators are used after it was made."""

    def __init__(self) -> None:
        self._before = _fingerprints()

    def used(self) -> list[str]:
        """Names of the generators that have moved."""
        now = _fingerprints()
        return [name for name, state in self._before.items() if state != now[name]]


def _fingerprints() -> dict[str, bytes]:
    numpy_state: Any = _STATES["numpy.random"]()
    return {
        "random": repr(_STATES["random"]()).encode(),
        "numpy.random": numpy_state[1].tobytes() + repr(numpy_state[2:]).encode(),
        "torch": _STATES["torch"]().numpy().tobytes(),
    }
