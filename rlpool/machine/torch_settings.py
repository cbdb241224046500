"""Settings of torch that hold for a whole process and change results: the caller's in workers.

The default device is not among them: for what runs in workers it is the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

Settings = Mapping[str, Any]
"""Values of settings by their names."""

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


class OwnSettings:
    """Settings as in a worker process, in the caller's: one thread, the CPU, the caller's else."""

    def __init__(self) -> None:
        self._own = torch_settings()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A section with these settings, which always ends with the caller's restored."""
        callers, n_threads = torch_settings(), torch.get_num_threads()
        is_on_cpu = default_device().type == "cpu"
        try:
            use_settings(self._own)
            if n_threads != 1:  # the bits of a result can depend on it
                torch.set_num_threads(1)
            with nullcontext() if is_on_cpu else torch.device("cpu"):
                yield
        finally:
            self._own = torch_settings()
            torch.set_num_threads(n_threads)
            use_settings(callers)


def default_device() -> torch.device:
    """Where torch creates tensors in this process."""
    return torch.empty(0).device
