"""Specifications: spaces and values to named leaves and back, collisions of keys."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool.errors import SpecError
from rlpool.specs import (
    TensorSpec,
    flattener,
    leaves_of,
    merged_structures,
    nester,
    refuse_collisions,
    structure_of_space,
    structure_of_value,
    with_dtypes,
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


def told(structure: Any, default: str = "frame") -> dict[str, str]:
    """Key to spec, as text."""
    return {key: str(leaf.spec) for key, leaf in leaves_of(structure, default).items()}


def of_space(space: Any, keep_float64: bool = False) -> Any:
    return structure_of_space(space, keep_float64=keep_float64, name="space")


def of_value(value: Any, keep_float64: bool = True) -> Any:
    return structure_of_value(value, keep_float64=keep_float64, name="value")


def test_spaces_fall_into_named_leaves_whose_dtypes_are_kept_but_for_float64() -> None:
    assert told(of_space(NESTED)) == LEAVES
    assert told(of_space(NESTED, keep_float64=True))["pose/0"] == "float64[3]"
    pair = spaces.Tuple([spaces.Discrete(2), spaces.Dict(a=spaces.MultiDiscrete([[3, 4]]))])
    assert told(of_space(pair)) == {"frame/0": "int64[]", "frame/1/a": "int64[1, 2]"}
    assert told(of_space(spaces.Box(-9, 9, (2, 0), np.float16))) == {"frame": "float16[2, 0]"}


class Mystery(gymnasium.Space[Any]):
    pass


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (spaces.Graph(spaces.Box(-1, 1), spaces.Discrete(3)), "Graph"),
        (spaces.Sequence(spaces.Discrete(3)), "Sequence"),
        (spaces.OneOf([spaces.Discrete(3), spaces.Box(-1, 1)]), "OneOf"),
        (Mystery(), "Mystery"),
    ],
)
def test_spaces_without_a_shape_are_refused_with_kind_and_place(space: Any, kind: str) -> None:
    outer = spaces.Dict(a=spaces.Tuple([spaces.Discrete(2), space]))
    with pytest.raises(SpecError, match=rf"space\['a'\]\[1\] is a {kind} space(.|\n)*fix:"):
        of_space(outer)


def test_spaces_of_the_old_gym_are_known_by_the_names_of_their_classes() -> None:
    Box = type("Box", (), {"shape": (3,), "dtype": np.dtype(np.float64)})  # noqa: N806
    Discrete = type("Discrete", (), {"n": 4})  # noqa: N806
    Old = type("Dict", (), {"spaces": {"x": Box(), 1: Discrete()}})  # noqa: N806
    assert told(of_space(Old())) == {"x": "float32[3]", "1": "int64[]"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, {"frame": "float32[]"}),
        (3, {"frame": "int64[]"}),
        (np.float64(1.0), {"frame": "float32[]"}),
        ([[1, 2], [3, 4]], {"frame": "int64[2, 2]"}),
        (torch.zeros(3, requires_grad=True), {"frame": "float32[3]"}),
        ({"a": {"b": True}, "c": (1, [2])}, {"a/b": "bool[]", "c/0": "int64[]", "c/1": "int64[1]"}),
    ],
)
def test_values_without_a_space_are_described_by_themselves(value: Any, expected: Any) -> None:
    assert told(of_value(value, keep_float64=False)) == expected


@pytest.mark.parametrize("value", ["text", None, {"a": np.array(["a"])}])
def test_values_that_are_not_numbers_are_refused(value: Any) -> None:
    with pytest.raises(SpecError, match="not numbers"):
        of_value(value)


def test_values_are_taken_apart_and_put_together_in_the_order_of_the_leaves() -> None:
    structure, value = of_space(NESTED), NESTED.sample()
    other_order = {key: value[key] for key in sorted(value)}
    parts = flattener(structure, "observation")(other_order)
    assert list(told(structure)) == list(LEAVES)
    inside = value["image"], *value["pose"], value["deep"]["inner"]["bits"]
    assert all(part is one for part, one in zip(parts, inside, strict=True))
    again = nester(structure)(parts)
    assert NESTED.contains(again)
    assert again["pose"][0] is value["pose"][0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1}, r"observation should have the keys \['a', 'b'\], got \['a'\]"),
        ({"a": 1, "b": (1, 2), "c": 3}, "should have the keys"),
        (5, r"observation should have the keys \['a', 'b'\], got int"),
        ({"a": 1, "b": (1,)}, r"observation\['b'\] should be a tuple of 2 parts, got 1"),
        ({"a": 1, "b": 7}, r"observation\['b'\] should be a tuple of 2 parts, got int"),
    ],
)
def test_values_that_do_not_fit_their_structure_are_refused(value: Any, text: str) -> None:
    flatten = flattener(of_value({"a": 1, "b": (1, 2)}), "observation")
    with pytest.raises(SpecError, match=text):
        flatten(value)


def test_colliding_keys_are_refused_naming_key_and_both_sides() -> None:
    with pytest.raises(SpecError, match="a/b"):
        leaves_of(of_value({"a/b": 1, "a": {"b": 2}}), "")
    refuse_collisions({"one": ["a", "b"], "two": ["c"], "three": []})
    with pytest.raises(SpecError, match="key 'b' is given by one and by two"):
        refuse_collisions({"one": ["a", "b"], "two": ["c", "b"]})


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool"])
def test_a_spec_has_the_torch_dtype_and_the_bytes_of_a_row(dtype: str) -> None:
    spec = TensorSpec((2, 3), np.dtype(dtype))
    assert spec.torch_dtype == getattr(torch, dtype)
    assert spec.n_bytes == torch.zeros(2, 3, dtype=spec.torch_dtype).nbytes


def test_merged_structures_hold_both_values() -> None:
    first = of_value({"a": 1, "b": (np.zeros(2, np.float32), np.uint8(3))})
    second = of_value({"b": (np.zeros(2), np.int8(3)), "a": 0.5})
    merged = merged_structures(first, second, "value")
    assert told(merged) == {"a": "float64[]", "b/0": "float64[2]", "b/1": "int16[]"}
    replaced = with_dtypes(merged, {"x/b/0": np.dtype(np.float32)}, "x")
    assert told(replaced) == {"a": "float64[]", "b/0": "float32[2]", "b/1": "int16[]"}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, ("value/a", "[2]", "[3]")),
        ({"a": 1}, {"b": 1}, ("value/a", "value/b")),
        ((1, (2, 3)), (1, (2,)), ("value/1/1",)),
        (1, (1,), ("value/0",)),
    ],
)
def test_structures_that_cannot_be_merged_are_refused(first: Any, second: Any, words: Any) -> None:
    with pytest.raises(SpecError) as caught:
        merged_structures(of_value(first), of_value(second), "value")
    assert all(word in str(caught.value) for word in words), caught.value
