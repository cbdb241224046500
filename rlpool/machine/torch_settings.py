"""Settings of torch that hold for a whole process and change results: the caller's in workers.

The default device is not among them: for what runs in workers it is the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def default_device() -> torch.device:
    """Where torch creates tensors in this process."""
    return torch.empty(0).device
