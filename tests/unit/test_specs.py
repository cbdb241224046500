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
    join_key,
    leaves_of,
    merged_structures,
    nester,
    refuse_collisions,
    row_specs,
    structure_of_space,
    structure_of_value,
    with_dtypes,
)

NESTED = spaces.Dict(
    image=spaces.Box(0, 255, (4, 4, 3), np.uint8),
    pose=spaces.Tuple([spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)]),
    deep=spaces.Dict(inner=spaces.Dict(bits=spaces.MultiBinary(5))),
)


def leaves(space: Any, keep_float64: bool = False, default: str = "frame") -> dict[str, str]:
    """Key to spec of a space, as text."""
    structure = structure_of_space(space, keep_float64=keep_float64, name="space")
    return {key: str(leaf.spec) for key, leaf in leaves_of(structure, default).items()}


def value_leaves(value: Any, keep_float64: bool = False) -> dict[str, str]:
    structure = structure_of_value(value, keep_float64=keep_float64, name="value")
    return {key: str(leaf.spec) for key, leaf in leaves_of(structure, "frame").items()}


@pytest.mark.parametrize(
    ("space", "spec"),
    [
        (spaces.Box(-1, 1, (3,), np.float32), "float32[3]"),
        (spaces.Box(-1, 1, (3,), np.float64), "float32[3]"),
        (spaces.Box(-1, 1, (3,), np.float16), "float16[3]"),
        (spaces.Box(-1, 1, (), np.float32), "float32[]"),
        (spaces.Box(0, 255, (84, 84, 4), np.uint8), "uint8[84, 84, 4]"),
        (spaces.Box(-9, 9, (2, 0), np.int32), "int32[2, 0]"),
        (spaces.Box(-9, 9, (2,), np.int64), "int64[2]"),
        (spaces.Discrete(4), "int64[]"),
        (spaces.Discrete(4, start=-7), "int64[]"),
        (spaces.MultiDiscrete([3, 4]), "int64[2]"),
        (spaces.MultiDiscrete([[3, 4], [1, 2]]), "int64[2, 2]"),
        (spaces.MultiBinary(5), "int8[5]"),
        (spaces.MultiBinary([2, 3]), "int8[2, 3]"),
    ],
)
def test_a_plain_space_is_one_leaf(space: Any, spec: str) -> None:
    assert leaves(space) == {"frame": spec}


def test_float64_can_be_kept() -> None:
    space = spaces.Dict(x=spaces.Box(-1, 1, (3,), np.float64), y=spaces.Box(-1, 1))
    assert leaves(space, keep_float64=True) == {"x": "float64[3]", "y": "float32[1]"}
    assert value_leaves(np.float64(1.0), keep_float64=True) == {"frame": "float64[]"}


def test_a_dict_keeps_its_keys_and_nested_ones_are_joined() -> None:
    assert leaves(NESTED) == {
        "image": "uint8[4, 4, 3]",
        "pose/0": "float32[3]",
        "pose/1": "int64[]",
        "deep/inner/bits": "int8[5]",
    }


def test_a_tuple_at_the_top_stands_under_the_default_key() -> None:
    space = spaces.Tuple([spaces.Discrete(2), spaces.Dict(a=spaces.Discrete(3))])
    assert leaves(space) == {"frame/0": "int64[]", "frame/1/a": "int64[]"}
    assert list(leaves(space, default="other")) == ["other/0", "other/1/a"]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Graph(spaces.Box(-1, 1), spaces.Discrete(3)),
        spaces.Sequence(spaces.Discrete(3)),
        spaces.OneOf([spaces.Discrete(3), spaces.Box(-1, 1)]),
        spaces.Dict(ok=spaces.Discrete(2), bad=spaces.Text(5)),
        spaces.Tuple([spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2))]),
    ],
    ids=lambda space: str(space)[:12],
)
def test_spaces_without_a_shape_are_refused_by_name(space: Any) -> None:
    with pytest.raises(SpecError, match=r"Text|Graph|Sequence|OneOf") as caught:
        leaves(space)
    assert "fix:" in str(caught.value)


def test_the_refusal_says_where_in_a_nested_space() -> None:
    space = spaces.Dict(a=spaces.Tuple([spaces.Discrete(2), spaces.Text(5)]))
    with pytest.raises(SpecError, match=r"space\['a'\]\[1\] is a Text space"):
        leaves(space)


def test_unknown_spaces_are_refused() -> None:
    class Mystery(gymnasium.Space[Any]):
        pass

    with pytest.raises(SpecError, match="Mystery"):
        leaves(Mystery())


def test_spaces_of_the_old_gym_are_known_by_the_names_of_their_classes() -> None:
    Box = type("Box", (), {"shape": (3,), "dtype": np.dtype(np.float64)})  # noqa: N806
    Discrete = type("Discrete", (), {"n": 4})  # noqa: N806
    Old = type("Dict", (), {"spaces": {"x": Box(), "y": Discrete()}})  # noqa: N806
    assert leaves(Old()) == {"x": "float32[3]", "y": "int64[]"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, {"frame": "float32[]"}),
        (3, {"frame": "int64[]"}),
        (True, {"frame": "bool[]"}),
        (np.float64(1.0), {"frame": "float32[]"}),
        (np.int32(1), {"frame": "int32[]"}),
        ([1.0, 2.0], {"frame": "float32[2]"}),
        ([[1, 2], [3, 4]], {"frame": "int64[2, 2]"}),
        (np.zeros((2, 2), np.uint8), {"frame": "uint8[2, 2]"}),
        (torch.zeros(3), {"frame": "float32[3]"}),
        ((1, 2.0), {"frame/0": "int64[]", "frame/1": "float32[]"}),
        ({"a": {"b": 1}, "c": (1, [2])}, {"a/b": "int64[]", "c/0": "int64[]", "c/1": "int64[1]"}),
    ],
)
def test_values_without_a_space_are_described_by_themselves(value: Any, expected: Any) -> None:
    assert value_leaves(value) == expected


@pytest.mark.parametrize("value", ["text", None, object(), {"a": "text"}, np.array(["a"])])
def test_values_that_are_no_numbers_are_refused(value: Any) -> None:
    with pytest.raises(SpecError, match="not numbers"):
        value_leaves(value)


def test_values_are_taken_apart_and_put_together_in_the_order_of_the_leaves() -> None:
    structure = structure_of_space(NESTED, keep_float64=False, name="space")
    value = NESTED.sample()
    parts = flattener(structure, "observation")(value)
    assert list(leaves(NESTED)) == ["image", "pose/0", "pose/1", "deep/inner/bits"]
    assert parts[0] is value["image"]
    assert parts[1] is value["pose"][0]
    assert parts[2] == value["pose"][1]
    assert parts[3] is value["deep"]["inner"]["bits"]
    again = nester(structure)(parts)
    assert NESTED.contains(again)
    assert again["pose"][0] is value["pose"][0]


def test_the_order_of_the_keys_of_a_value_does_not_matter() -> None:
    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Discrete(3))
    flatten = flattener(structure_of_space(space, keep_float64=False, name="s"), "observation")
    assert flatten({"b": 2, "a": 1}) == flatten({"a": 1, "b": 2}) == [1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1}, r"observation should have the keys \['a', 'b'\], got \['a'\]"),
        ({"a": 1, "b": (1, 2), "c": 3}, "should have the keys"),
        (5, r"observation should have the keys \['a', 'b'\], got int"),
        ({"a": 1, "b": (1,)}, r"observation\['b'\] should be a tuple of 2 parts, got 1"),
        ({"a": 1, "b": 7}, r"observation\['b'\] should be a tuple of 2 parts, got .*int"),
    ],
)
def test_values_that_do_not_fit_their_structure_are_refused(value: Any, text: str) -> None:
    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.Discrete(2)] * 2))
    flatten = flattener(structure_of_space(space, keep_float64=False, name="s"), "observation")
    with pytest.raises(SpecError, match=text):
        flatten(value)


def test_keys_that_two_places_of_a_space_claim_are_refused() -> None:
    space = spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict(b=spaces.Discrete(3))})
    with pytest.raises(SpecError, match="a/b"):
        leaves(space)


def test_keys_of_a_space_that_are_no_text_become_text() -> None:
    class Old:
        def __init__(self) -> None:
            self.spaces = {0: spaces.Discrete(2), 1: spaces.Discrete(3)}

    Old.__name__ = "Dict"
    assert list(leaves(Old())) == ["0", "1"]


def test_discrete_leaves_are_scalars_and_boxes_are_not() -> None:
    structure = structure_of_space(
        spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, ())]), keep_float64=False, name="s"
    )
    scalar, box = leaves_of(structure, "x").values()
    assert (scalar.is_scalar, box.is_scalar) == (True, False)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool", "int8"])
def test_a_spec_has_the_torch_dtype_and_the_bytes_of_a_row(dtype: str) -> None:
    spec = TensorSpec((2, 3), np.dtype(dtype))
    assert spec.torch_dtype == getattr(torch, dtype)
    assert spec.n_bytes == torch.zeros(2, 3, dtype=spec.torch_dtype).nbytes
    assert TensorSpec((), np.dtype(dtype)).n_bytes == np.dtype(dtype).itemsize


def test_specs_are_printed_as_dtype_and_shape() -> None:
    assert str(TensorSpec((2, 3), np.dtype(np.uint8))) == "uint8[2, 3]"


def test_row_specs_leave_out_the_batch() -> None:
    specs = row_specs({"a": np.zeros((5, 2), np.uint8), "b": np.zeros(5)})
    assert specs == {
        "a": TensorSpec((2,), np.dtype(np.uint8)),
        "b": TensorSpec((), np.dtype(float)),
    }


def test_keys_below_a_prefix_are_joined_with_a_slash() -> None:
    assert join_key("agent_info", "id") == "agent_info/id"
    assert join_key("", "id") == "id"


def test_colliding_keys_are_refused_naming_key_and_both_sides() -> None:
    refuse_collisions({"one": ["a", "b"], "two": ["c"], "three": []})
    with pytest.raises(SpecError, match="key 'b' is given by one and by two"):
        refuse_collisions({"one": ["a", "b"], "two": ["c", "b"]})
    with pytest.raises(SpecError, match="key 'a'"):
        refuse_collisions({"one": ["a", "a"]})


def described(value: Any) -> Any:
    return structure_of_value(value, keep_float64=True, name="value")


def test_merged_structures_hold_both_values() -> None:
    first = described({"a": 1, "b": (np.zeros(2, np.float32), np.uint8(3))})
    second = described({"a": 0.5, "b": (np.zeros(2), np.int8(3))})
    merged = leaves_of(merged_structures(first, second, "value"), "value")
    assert {key: str(leaf.spec) for key, leaf in merged.items()} == {
        "a": "float64[]",
        "b/0": "float64[2]",
        "b/1": "int16[]",
    }


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, ("value['a']", "[2]", "[3]")),
        ({"a": 1}, {"b": 1}, ("value", "'a'", "'b'")),
        ((1, (2, 3)), (1, (2,)), ("value[1]",)),
        ((1, 2), {"a": 1}, ("value",)),
        (1, (1,), ("value",)),
    ],
)
def test_structures_that_cannot_be_merged_are_refused(
    first: Any, second: Any, words: tuple[str, ...]
) -> None:
    with pytest.raises(SpecError) as caught:
        merged_structures(described(first), described(second), "value")
    assert all(word in str(caught.value) for word in words), caught.value


def test_dtypes_can_be_replaced_by_key() -> None:
    structure = described({"a": 1, "b": (np.zeros(2), 1)})
    replaced = with_dtypes(structure, {"x/b/0": np.dtype(np.float32)}, "x")
    assert {key: str(leaf.spec) for key, leaf in leaves_of(replaced, "").items()} == {
        "a": "int64[]",
        "b/0": "float32[2]",
        "b/1": "int64[]",
    }
