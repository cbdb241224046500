"""What a whole process has and results depend on: global generators and settings of torch.

The generators are ``random``, NumPy's legacy one and torch's for the CPU: what users' code may draw
from. Where that runs in the caller's process, it gets states of its own: what the caller draws must
not depend on what rlpool runs, nor the other way round.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
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


Settings = Mapping[str, Any]
"""Values of torch's settings by their names: the caller's hold in workers, too.

The default device is not among them: for what runs in workers it is the CPU.
"""

_NAMES = (
    "default_dtype",
    "deterministic_debug_mode",  # of use_deterministic_algorithms, which takes a second to import
    "float32_matmul_precision",
)
"""Torch has ``get_`` and ``set_`` functions of these names."""


def torch_settings() -> Settings:
    """Those of this process."""
    return {name: getattr(torch, f"get_{name}")() for name in _NAMES}


def use_settings(settings: Settings) -> None:
    """Let settings hold in this process."""
    for name, value in settings.items():
        if getattr(torch, f"get_{name}")() != value:
            getattr(torch, f"set_{name}")(value)


def default_device() -> torch.device:
    """Where torch creates tensors in this process."""
    return torch.empty(0).device


class OwnState:
    """Generators and settings as in a worker process, in the caller's: separate from the caller's.

    The settings are the caller's when this is made, but for one thread and the CPU as the default
    device.

    Args:
        seed: Seeds the generators at their first use; without one they start as copies of the
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
