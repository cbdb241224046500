"""Any object in a single block of memory, with tensors readable in place."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from rlpool.data.storage import Memory
from rlpool.workers.payload import pack, unpack


def there_and_back(value: Any) -> Any:
    return unpack(*pack(value, Memory.local))


BFLOAT16 = torch.arange(6, dtype=torch.bfloat16)
TENSORS = [
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.tensor(3.5),
    BFLOAT16[1],
    BFLOAT16.new_zeros(2, 0),
    torch.arange(6).reshape(2, 3).t(),
    BFLOAT16.expand(4, 6),
    torch.eye(3).to_sparse(),
]


@pytest.mark.parametrize("tensor", TENSORS)
def test_every_tensor_arrives_unchanged(tensor: torch.Tensor) -> None:
    again = there_and_back(tensor)
    assert again.dtype == tensor.dtype
    assert again.shape == tensor.shape
    assert again.layout == tensor.layout
    assert torch.equal(again.to_dense(), tensor.to_dense())


def test_parameters_arrive_as_values_without_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    again = there_and_back({"w": parameter, "scaled": parameter * 2})
    assert (again["w"].tolist(), again["scaled"].tolist()) == ([1.0] * 3, [2.0] * 3)
    assert not any(tensor.requires_grad for tensor in again.values())


def test_nesting_types_functions_and_arrays_are_preserved() -> None:
    arrays = [np.zeros(0), np.array(3), np.arange(6).reshape(2, 3).T, np.array(["a", "bc"])]
    value = {"ordered": OrderedDict(b=1, a={2}), "add": lambda x: x + len(arrays), 5: (b"x", None)}
    again, others = there_and_back((value, arrays))
    assert list(again) == list(value)
    assert (again["ordered"], again[5], again["add"](1)) == (value["ordered"], value[5], 5)
    assert type(again["ordered"]) is OrderedDict
    for array, other in zip(arrays, others, strict=True):
        assert (other.dtype, other.tolist()) == (array.dtype, array.tolist())
    with pytest.raises(TypeError, match="lock"):
        pack(threading.Lock(), Memory.local)


@pytest.mark.promise("I7")
def test_tensors_are_aligned_views_that_keep_the_memory_alive() -> None:
    tensor = torch.arange(1001, dtype=torch.uint8)
    payload, memory = pack({"a": tensor, "b": [tensor], "c": torch.arange(9)}, Memory.shared)
    assert memory.n_bytes < 2 * 1001
    first, second = unpack(payload, memory), unpack(payload, memory)
    start, n_bytes = memory.root().__array_interface__["data"][0], memory.n_bytes
    memory.close_fd()
    del memory
    assert first["a"] is first["b"][0]
    for name in ("a", "c"):
        assert start < first[name].data_ptr() < start + n_bytes
        assert (first[name].data_ptr() - start) % 64 == 0
    assert first["a"].equal(tensor)
    first["b"].append(2)  # every reader has its own objects
    assert len(second["b"]) == 1
