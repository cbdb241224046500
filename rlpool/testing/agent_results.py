"""Compares what an agent returned."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlpool.specs import TensorSpec, row_specs
from rlpool.testing.agent_subject import Result, Rows
from rlpool.testing.episodes import bits


def specs_of(rows: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Shape and dtype of a row under each key."""
    return row_specs({key: tensor.numpy() for key, tensor in rows.items()})


def told(specs: Mapping[str, TensorSpec]) -> str:
    """Shapes and dtypes in words."""
    return "{" + ", ".join(f"{key}: {spec}" for key, spec in sorted(specs.items())) + "}"


def difference(first: Result, second: Result, row: int | None = None) -> str:
    """Which key of two results differs, empty if none does; of one row, or of all."""
    for name, part in first.parts().items():
        other: Rows = second.parts()[name]
        what = difference_of(specs_of(part), specs_of(other))
        if what:
            return f"{name}: {what}"
        for key, tensor in part.items():
            one, two = (tensor, other[key]) if row is None else (tensor[row], other[key][row])
            if bits(one) != bits(two):
                largest = (one.double() - two.double()).abs().max() if one.numel() else 0
                return f"{key!r} of {name} differs, by up to {float(largest):.3g}"
    return ""


def difference_of(one: Mapping[str, TensorSpec], other: Mapping[str, TensorSpec]) -> str:
    """Both in words if they differ, else empty."""
    return "" if dict(one) == dict(other) else f"{told(one)} and {told(other)}"
