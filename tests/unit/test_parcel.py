"""Parcels: any object in one piece of memory, tensors readable in place."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rlpool.memory.storage import Memory
from rlpool.workers.parcel import pack, unpack


@dataclass
class Config:
    """Something of the user's."""

    name: str
    values: list[int]


def there_and_back(value: Any, allocate: Callable[[int], Memory] = Memory.local) -> Any:
    parcel, memory = pack(value, allocate)
    return unpack(parcel, memory)


TENSORS = {
    "float32": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "float64": torch.arange(5, dtype=torch.float64),
    "float16": torch.arange(5, dtype=torch.float16),
    "bfloat16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "int64": torch.arange(4),
    "uint8": torch.arange(4, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "complex64": torch.tensor([1 + 2j, 3 - 1j]),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "0-d": torch.tensor(3.5),
    "0-d bfloat16": torch.tensor(3.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0),
    "empty rows": torch.zeros(0, 3, dtype=torch.int64),
    "empty bfloat16": torch.zeros(2, 0, dtype=torch.bfloat16),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "strided": torch.arange(20)[1::3],
    "expanded": torch.arange(3).expand(4, 3),
    "expanded bfloat16": torch.arange(3, dtype=torch.bfloat16).expand(4, 3),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("where", [Memory.local, Memory.shared], ids=["local", "shared"])
def test_every_tensor_arrives_as_it_was(name: str, where: Callable[[int], Memory]) -> None:
    tensor = TENSORS[name]
    parcel, memory = pack(tensor, where)
    memory.close_fd()
    again = unpack(parcel, memory)
    assert again.dtype == tensor.dtype
    assert again.shape == tensor.shape
    assert again.layout == tensor.layout
    assert torch.equal(again.to_dense(), tensor.to_dense())


def test_parameters_arrive_as_values_without_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    again = there_and_back({"w": parameter, "scaled": parameter * 2})
    assert torch.equal(again["w"], torch.ones(3))
    assert torch.equal(again["scaled"], torch.full((3,), 2.0))
    assert not again["w"].requires_grad
    assert not again["scaled"].requires_grad


def test_a_state_dict_can_be_loaded() -> None:
    torch.manual_seed(0)
    source, target = torch.nn.LSTM(3, 4, 2), torch.nn.LSTM(3, 4, 2)
    target.load_state_dict(there_and_back(source.state_dict()))
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other)


def test_nesting_and_types_are_kept() -> None:
    value = {
        "list": [torch.ones(2), (1, "x", None), {3, 4}],
        "ordered": OrderedDict(b=1, a=np.arange(3)),
        "config": Config("c", [1, 2]),
        5: b"bytes",
    }
    again = there_and_back(value)
    assert list(again) == ["list", "ordered", "config", 5]
    assert torch.equal(again["list"][0], torch.ones(2))
    assert again["list"][1:] == [(1, "x", None), {3, 4}]
    assert isinstance(again["ordered"], OrderedDict)
    assert list(again["ordered"]) == ["b", "a"]
    assert again["ordered"]["a"].tolist() == [0, 1, 2]
    assert again["config"] == Config("c", [1, 2])
    assert again[5] == b"bytes"


def test_functions_and_local_classes_are_taken() -> None:
    factor = 3

    class Local:
        value = factor

    again = there_and_back([lambda x: factor * x, Local])
    assert again[0](4) == 12
    assert again[1].value == 3


def test_one_tensor_in_two_places_stays_one_tensor() -> None:
    tensor = torch.ones(1000)
    parcel, memory = pack({"a": tensor, "b": [tensor]}, Memory.local)
    again = unpack(parcel, memory)
    assert again["a"] is again["b"][0]
    assert memory.n_bytes < 2 * 4000


def test_views_on_one_storage_arrive_with_their_own_values() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    again = there_and_back({"whole": whole, "row": whole[1], "column": whole[:, 2]})
    assert torch.equal(again["whole"], whole)
    assert torch.equal(again["row"], whole[1])
    assert torch.equal(again["column"], whole[:, 2])


def test_a_small_view_on_a_large_storage_travels_alone() -> None:
    _, memory = pack(torch.zeros(1_000_000)[:10], Memory.local)
    assert memory.n_bytes < 10_000


def test_tied_weights_of_a_module_arrive_tied_or_equal() -> None:
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    again = there_and_back({"first": first.state_dict(), "second": second.state_dict()})
    assert torch.equal(again["first"]["weight"], again["second"]["weight"])


def test_what_was_packed_is_a_copy() -> None:
    tensor, array = torch.ones(3), np.ones(3)
    parcel, memory = pack((tensor, array), Memory.local)
    tensor.zero_()
    array[:] = 0
    again = unpack(parcel, memory)
    assert again[0].tolist() == again[1].tolist() == [1.0, 1.0, 1.0]


def test_tensors_are_views_on_the_memory_and_keep_it_alive() -> None:
    parcel, memory = pack(torch.arange(1000), Memory.shared)
    root = memory.root()
    start = root.__array_interface__["data"][0]
    again = unpack(parcel, memory)
    assert start < again.data_ptr() < start + memory.n_bytes
    memory.close_fd()
    del memory, root
    assert again.sum() == 499500


def test_tensors_lie_aligned() -> None:
    value = [torch.zeros(n, dtype=torch.uint8) for n in (1, 3, 64, 65, 7)]
    parcel, memory = pack(value, Memory.local)
    root = memory.root().__array_interface__["data"][0]
    assert [(tensor.data_ptr() - root) % 64 for tensor in unpack(parcel, memory)] == [0] * 5


def test_every_reader_gets_its_own_objects() -> None:
    parcel, memory = pack({"a": torch.zeros(3), "b": [1]}, Memory.local)
    first, second = unpack(parcel, memory), unpack(parcel, memory)
    first["b"].append(2)
    assert second["b"] == [1]


def test_arrays_of_every_kind_arrive() -> None:
    arrays = [np.zeros(0), np.array(3), np.arange(6).reshape(2, 3).T, np.array(["a", "bc"])]
    for array, again in zip(arrays, there_and_back(arrays), strict=True):
        assert again.dtype == array.dtype
        assert again.tolist() == array.tolist()


def test_what_cannot_be_pickled_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="lock"):
        pack(threading.Lock(), Memory.local)


@pytest.mark.parametrize("value", [None, 0, "text", [], {}, ({}, {})])
def test_objects_without_tensors_are_fine(value: Any) -> None:
    assert there_and_back(value) == value
