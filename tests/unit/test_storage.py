"""Memory: zeroed, aligned, anonymous, limited."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from rlpool.errors import SpecError
from rlpool.memory.storage import PAGE_BYTES, Memory, batch_array, carve, carved_bytes
from rlpool.specs import TensorSpec

SPECS = {
    "flag": TensorSpec((), np.dtype(bool)),
    "frame": TensorSpec((84, 84), np.dtype(np.uint8)),
    "nothing": TensorSpec((0,), np.dtype(np.float32)),
    "pose": TensorSpec((3,), np.dtype(np.float64)),
}


def address(array: np.ndarray) -> int:  # type: ignore[type-arg]
    return int(array.__array_interface__["data"][0])


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_carved_arrays_share_no_page() -> None:
    n_bytes = carved_bytes(SPECS, 7)
    root = Memory.shared(sum(n_bytes.values())).root()
    start = address(root)
    pages: list[set[int]] = []
    for array in carve(root, SPECS, 7).values():
        first = address(array) - start
        if array.nbytes:
            assert first % PAGE_BYTES == 0
            pages.append(
                set(range(first // PAGE_BYTES, (first + array.nbytes - 1) // PAGE_BYTES + 1))
            )
    assert sum(map(len, pages)) == len(set().union(*pages))
    assert all(size % PAGE_BYTES == 0 and size > 0 for size in n_bytes.values())


def test_carved_arrays_are_views_of_the_shapes_and_dtypes_of_their_specs() -> None:
    root = Memory.local(sum(carved_bytes(SPECS, 7).values())).root()
    arrays = carve(root, SPECS, 7)
    assert list(arrays) == list(SPECS)
    for key, spec in SPECS.items():
        assert arrays[key].shape == (7, *spec.shape)
        assert arrays[key].dtype == spec.dtype
    arrays["pose"][:] = 1.0
    assert root.any()
    assert not arrays["flag"].any()
    assert not arrays["frame"].any()


def test_attached_memory_is_the_same_memory_unless_it_is_private() -> None:
    before, in_shm = descriptors(), set(os.listdir("/dev/shm"))
    memory = Memory.shared(100)
    other = Memory.attach(os.dup(memory.fd), 100)
    private = Memory.attach(os.dup(memory.fd), 100, private=True)
    memory.root()[5] = 9
    other.root()[6] = 8
    assert private.root()[5:7].tolist() == other.root()[5:7].tolist() == [9, 8]
    private.root()[:] = 2
    assert memory.root()[4:7].tolist() == [0, 9, 8]
    memory.close_fd()
    memory.close_fd()
    assert descriptors() == before  # mappings keep none
    assert set(os.listdir("/dev/shm")) == in_shm
    root = memory.root()
    del memory
    gc.collect()
    assert torch.from_numpy(root)[6] == 8


def test_a_root_is_gone_when_its_last_user_is_gone() -> None:
    memory = Memory.local(sum(carved_bytes(SPECS, 2).values()))
    root = memory.root()
    reference = weakref.ref(root)
    tensor = torch.from_numpy(carve(root, SPECS, 2)["frame"])[1, 3:5]
    del root
    gc.collect()
    assert reference() is not None
    del tensor
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("memory", [Memory.local(10), Memory.shared(10)], ids=["local", "closed"])
def test_memory_without_a_descriptor_says_so(memory: Memory) -> None:
    memory.close_fd()
    with pytest.raises(SpecError, match="descriptor"):
        _ = memory.fd


def test_untouched_shared_memory_costs_nothing() -> None:
    before = _resident_bytes()
    memory = Memory.shared(1 << 30)
    memory.close_fd()
    assert memory.root()[:: 1 << 28].sum() == 0
    assert _resident_bytes() - before < 50 << 20


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("n_lanes", [1, 3, 17])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_batch_arrays_are_zero_and_aligned_as_tensors_are(spec: TensorSpec, n_lanes: int) -> None:
    array = batch_array(spec, n_lanes)
    assert array.shape == (n_lanes, *spec.shape)
    assert array.dtype == spec.dtype
    assert not array.any()
    assert address(array) % 64 == 0 or not array.size
