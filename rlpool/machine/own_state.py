"""Process-wide state that results depend on: global random generators and torch settings.

The generators are ``random``, NumPy's legacy one and torch's for the CPU, which users' code may
use. In the caller's process, users' code gets states of its own: the caller's random numbers must
not depend on rlpool's work, nor the other way round.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

_NUMPY: Any = np.random  # its stubs are incomplete


Generators = tuple[Any, dict[str, Any], torch.Tensor, Any]
"""Copies of the states of Python's, NumPy's and torch's generators, and NumPy's bit generator,
which continues."""


def current_generators() -> Generators:
    """Return the current states of all generators."""
    numpy, bit_generator = _NUMPY.get_state(legacy=False), _NUMPY.get_bit_generator()
    return random.getstate(), numpy, torch.default_generator.get_state(), bit_generator


def use_generators(generators: Generators) -> None:
    """Continue all generators from the states that ``current_generators`` returned.

    NumPy's bit generator must not have been used since: it is exchanged, which costs nothing.
    Writing its state takes longer than a step of a small environment.
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
    torch.default_generator.manual_seed(seed)  # not the caller's devices


Settings = Mapping[str, Any]
"""Values of torch's settings by name: the caller's apply in workers, too.

The default device is excluded: in workers it is the CPU.
"""

_NAMES = (
    "default_dtype",
    "deterministic_debug_mode",  # as use_deterministic_algorithms takes a second to import
    "float32_matmul_precision",
)
"""Torch has ``get_`` and ``set_`` functions of these names."""


def torch_settings() -> Settings:
    """Return the settings of this process."""
    return {name: getattr(torch, f"get_{name}")() for name in _NAMES}


def use_settings(settings: Settings) -> None:
    """Apply settings to this process."""
    for name, value in settings.items():
        if getattr(torch, f"get_{name}")() != value:
            getattr(torch, f"set_{name}")(value)


def default_device() -> torch.device:
    """Return the device on which torch creates tensors in this process."""
    return torch.empty(0).device


class OwnState:
    """Generators and settings as in a worker process, separate from the caller's.

    The settings are the caller's at the time of creation, except for one thread and the CPU as
    the default device.

    Args:
        seed: Seeds the generators at their first use; without it they start as copies of the
            caller's.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed, self._settings = seed, torch_settings()
        self._generators: Generators | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A section with this state, which always ends with the caller's restored."""
        callers, settings, n_threads = (
            current_generators(),
            torch_settings(),
            torch.get_num_threads(),
        )
        own = self._generators or (*callers[:3], copy.deepcopy(callers[3]))
        is_on_cpu = default_device().type == "cpu"
        try:
            use_generators(own)
            if self._generators is None and self._seed is not None:
                seed_generators(self._seed)
            use_settings(self._settings)
            if n_threads != 1:  # the bits of a result can depend on it
                torch.set_num_threads(1)
            with nullcontext() if is_on_cpu else torch.device("cpu"):
                yield
        finally:
            self._generators, self._settings = current_generators(), torch_settings()
            use_generators(callers)
            torch.set_num_threads(n_threads)
            use_settings(settings)
