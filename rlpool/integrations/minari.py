"""Minari: episodes as its datasets, and its datasets as trajectories."""

from __future__ import annotations

from rlpool.machine.imports import imports_of

with imports_of("minari"):
    from rlpool.integrations.minari_reading import from_minari
    from rlpool.integrations.minari_writing import to_minari

__all__ = ["from_minari", "to_minari"]
