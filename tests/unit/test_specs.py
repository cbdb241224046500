"""Specifications: spaces and values to named leaves and back, collisions of keys.

What becomes of observations of every space is in ``test_gym_env``, of values without a space in
``test_one_env``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool.data.specs import (
    TensorSpec,
    flattener,
    leaves_of,
    narrowed,
    nester,
    structure_of_space,
    structure_of_value,
)

NESTED = spaces.Dict(
    image=spaces.Box(0, 255, (4, 4, 3), np.uint8),
    pose=spaces.Tuple([spaces.Box(-1, 1, (3,), np.float64), spaces.Discrete(4)]),
    deep=spaces.Dict(inner=spaces.Dict(bits=spaces.MultiBinary(5))),
)
LEAVES = {
    "image": "uint8[4, 4, 3]",
    "pose/0": "float32[3]",
    "pose/1": "int64[]",
    "deep/inner/bits": "int8[5]",
}


def told(structure: Any) -> dict[str, str]:
    """Key to spec, as text."""
    return {key: str(leaf.spec) for key, leaf in leaves_of(structure, "frame").items()}


def of_space(space: Any) -> Any:
    return narrowed(structure_of_space(space, name="space"), keep_float64=False)


def of_value(value: Any) -> Any:
    return narrowed(structure_of_value(value, name="value"), keep_float64=False)


def test_spaces_of_the_old_gym_are_known_by_the_names_of_their_classes() -> None:
    Box = type("Box", (), {"shape": (3,), "dtype": np.dtype(np.float64)})  # noqa: N806
    Discrete = type("Discrete", (), {"n": 4})  # noqa: N806
    Old = type("Dict", (), {"spaces": {"x": Box(), 1: Discrete()}})  # noqa: N806
    assert told(of_space(Old())) == {"x": "float32[3]", "1": "int64[]"}


def test_values_are_taken_apart_and_put_together_in_the_order_of_the_leaves() -> None:
    structure, value = of_space(NESTED), NESTED.sample()
    assert told(structure) == LEAVES
    parts = flattener(structure, "observation")({key: value[key] for key in sorted(value)})
    inside = value["image"], *value["pose"], value["deep"]["inner"]["bits"]
    assert all(part is one for part, one in zip(parts, inside, strict=True))
    again = nester(structure)(parts)
    assert NESTED.contains(again)
    assert again["pose"][0] is value["pose"][0]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool"])
def test_a_spec_has_the_torch_dtype_and_the_bytes_of_a_row(dtype: str) -> None:
    spec = TensorSpec((2, 3), np.dtype(dtype))
    assert spec.torch_dtype == getattr(torch, dtype)
    assert spec.n_bytes == torch.zeros(2, 3, dtype=spec.torch_dtype).nbytes
