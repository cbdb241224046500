"""Functions of several tensors refuse mismatched shapes and do not broadcast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import rlpool
from rlpool import DictTensor, SpecError, TemporalDictTensor

B, T, N = 3, 4, 5
"""Rows, steps, features: all different, so that every wrong shape is detected."""

ROW, ROWS, STEPS = torch.arange(B), torch.rand(B, N), torch.rand(B, T)
IS_END = torch.zeros(B, T, dtype=torch.bool)


class Case(NamedTuple):
    """Call of a function.

    Attributes:
        call: Calls it.
        fitting: Arguments of the right shapes.
        also: Argument to a predicate that accepts further shapes.
    """

    call: Callable[..., Any]
    fitting: dict[str, Tensor]
    also: Mapping[str, Callable[[Any], bool]] = MappingProxyType({})


def starts_with(*sizes: int) -> Callable[[Any], bool]:
    return lambda shape: shape[: len(sizes)] == sizes


def never(shape: Any) -> bool:
    return False


def is_one_column(shape: Any) -> bool:
    return bool(shape == (B, 1))


def is_one_number(shape: Any) -> bool:
    return bool(shape.numel() == 1)


def broadcasts_to_rows(shape: Any) -> bool:
    return shape in [(), (1,), (N,), (1, N), (B, 1)]


def like_reward(function: Any, *names: str, **given: Any) -> Case:
    values = {name: IS_END if name in ("done", "terminated") else STEPS for name in names}
    tensors = {"discount": STEPS, "lengths": ROW, **values}
    return Case(partial(function, **given), tensors, {"discount": is_one_number})


def trajectories(x: Tensor, y: Tensor, lengths: Tensor, task: Tensor) -> TemporalDictTensor:
    return TemporalDictTensor({"x": x, "y": y}, lengths, {"task": task})


NORMAL = {"mean": ROWS, "log_std": ROWS, "noise": ROWS}
IN_TIME = {"x": starts_with(B, T), "y": starts_with(B, T), "task": starts_with(B)}

CASES = {
    "sample_categorical": Case(
        rlpool.sample_categorical,
        {"logits": ROWS, "noise": torch.rand(B)},
        {"logits": is_one_column, "noise": is_one_column},
    ),
    "categorical_log_probability": Case(
        rlpool.categorical_log_probability,
        {"logits": ROWS, "action": ROW * 0},
        {"logits": is_one_column},
    ),
    "sample_normal": Case(rlpool.sample_normal, NORMAL, {"log_std": broadcasts_to_rows}),
    "sample_tanh_normal": Case(rlpool.sample_tanh_normal, NORMAL, {"log_std": broadcasts_to_rows}),
    "normal_log_probability": Case(
        rlpool.normal_log_probability,
        {"mean": ROWS, "log_std": ROWS, "action": ROWS},
        {"log_std": broadcasts_to_rows},
    ),
    "discounted_returns": like_reward(
        rlpool.discounted_returns, "reward", "done", "next_value", "terminated"
    ),
    "n_step_returns": like_reward(
        rlpool.n_step_returns, "reward", "next_value", "terminated", "done", n_step=2
    ),
    "gae": like_reward(
        rlpool.gae, "reward", "value", "next_value", "terminated", "done", lambda_=0.9
    ),
    "vtrace": like_reward(
        rlpool.vtrace, "log_ratio", "reward", "value", "next_value", "terminated", "done"
    ),
    "masked_tensor": Case(
        rlpool.masked_tensor, {"tensor0": ROWS, "tensor1": ROWS, "mask": ROW > 0}
    ),
    "masked_dicttensor": Case(
        lambda one, other, mask: rlpool.masked_dicttensor(
            DictTensor({"x": one}), DictTensor({"x": other}), mask
        ),
        {"one": ROWS, "other": ROWS, "mask": ROW > 0},
    ),
    "DictTensor.__init__": Case(
        lambda x, y: DictTensor({"x": x, "y": y}),
        {"x": ROWS, "y": STEPS},
        {"x": starts_with(B), "y": starts_with(B)},
    ),
    "DictTensor.set": Case(
        lambda tensor: DictTensor({"x": ROWS}).set("y", tensor),
        {"tensor": STEPS},
        {"tensor": starts_with(B)},
    ),
    "DictTensor.copy_": Case(
        lambda x, source_indexes, destination_indexes: DictTensor({"x": ROWS.clone()}).copy_(
            DictTensor({"x": x}), source_indexes, destination_indexes
        ),
        {"x": ROWS, "source_indexes": ROW, "destination_indexes": ROW},
        {"x": lambda shape: len(shape) == 2 and shape[0] >= B and shape[1] == N},
    ),
    "TemporalDictTensor.__init__": Case(
        trajectories, {"x": torch.rand(B, T, N), "y": STEPS, "lengths": ROW, "task": ROW}, IN_TIME
    ),
    "TemporalDictTensor.from_packed": Case(
        lambda x, lengths, task: TemporalDictTensor.from_packed({"x": x}, lengths, {"task": task}),
        {"x": torch.rand(3, N), "lengths": ROW, "task": ROW},
        {"x": starts_with(3), "task": starts_with(B)},
    ),
}


def changed(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the same values in different shapes."""
    yield "with one dimension more", tensor.unsqueeze(-1)
    yield "with a leading dimension", tensor.unsqueeze(0)
    yield "expanded to a leading dimension", tensor.expand(2, *tensor.shape)
    if tensor.ndim:
        yield "one row", tensor[:1]
        yield "squeezed", tensor[0]
        yield "the rows twice", torch.cat([tensor, tensor])
        yield "one column", tensor[..., :1]
    if tensor.ndim > 1:
        yield "squeezed columns", tensor[..., 0]
        yield "transposed", tensor.transpose(0, 1)
    if tensor.ndim > 2:
        yield "transposed columns", tensor.transpose(-2, -1)


@pytest.mark.parametrize("name", CASES)
def test_matching_shapes_are_accepted_and_others_refused(name: str) -> None:
    call, fitting, also = CASES[name]
    call(**fitting)
    taken = []
    for argument, tensor in fitting.items():
        for how, value in changed(tensor):
            given = {**fitting, argument: value}
            if value.shape == tensor.shape or also.get(argument, never)(value.shape):
                call(**given)
                continue
            with contextlib.suppress(SpecError, IndexError):  # of a nonexistent row
                call(**given)
                taken.append(f"{argument} {how}: {list(value.shape)}")
    assert not taken


def test_fully_squeezed_rows_are_refused() -> None:
    for name in ("sample_normal", "sample_tanh_normal", "normal_log_probability"):
        call, fitting, _ = CASES[name]
        with pytest.raises(SpecError):
            call(**{argument: tensor[:, 0] for argument, tensor in fitting.items()})
