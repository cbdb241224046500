"""What the bits of results may depend on, apart from seeds: processors and versions.

Torch, oneDNN, MKL and NumPy choose their code by what the processor can do, and another choice may
round differently. Environment variables hold that choice down to what all machines can do.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

PINS = "ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, MKL_CBWR and NPY_DISABLE_CPU_FEATURES"
"""The environment variables by which processors can be made to agree."""

_SIMULATORS = ("mujoco", "ale-py", "box2d", "pymunk", "pybullet", "envpool", "dm-control", "jax")
"""Distributions that compute what environments return, as far as they are known here."""

_INSTRUCTIONS = ("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd")
"""Processor flags by which libraries choose their code."""


def fingerprint() -> dict[str, str]:
    """What this process's results may depend on, by name."""
    flags = _processor_flags()
    found = {
        "torch's CPU capability": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": os.environ.get("ONEDNN_MAX_CPU_ISA") or flags,
        "MKL": os.environ.get("MKL_CBWR") or flags,
        "NumPy's instructions": os.environ.get("NPY_DISABLE_CPU_FEATURES") or _numpy_features(),
        "architecture": platform.machine(),
    }
    return {**found, **versions()}


def versions() -> dict[str, str]:
    """What is installed here, by name."""
    rlpool = sys.modules[__name__.partition(".")[0]]  # which may have been sent, not installed
    found = {"Python": platform.python_version(), "rlpool": rlpool.__version__}
    for name in ("torch", "numpy", "gymnasium", *_SIMULATORS):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Where two of them, or what else JSON can say, differ; with both sides."""
    found: list[str] = []
    for key in sorted(one.keys() | other.keys()):
        first, second = one.get(key), other.get(key)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            found += differences(first, second, f"{prefix}{key}.")
        elif json.dumps(first) != json.dumps(second):  # not a number equals itself here
            found.append(f"{prefix}{key}: {first!r:.80} and {second!r:.80}")
    return found


def _processor_flags() -> str:
    """The vendor, and the instructions that libraries look for."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value
    flags = {*fields.get("flags", "").split(), *fields.get("Features", "").split()}
    vendor = fields.get("vendor_id", "").strip()
    return " ".join(filter(None, [vendor, *(flag for flag in _INSTRUCTIONS if flag in flags)]))


def _numpy_features() -> str:
    """The optional instructions that NumPy uses here."""
    config: dict[str, Any] = np.show_config(mode="dicts")  # type: ignore[assignment]
    return " ".join(config.get("SIMD Extensions", {}).get("found", []))
