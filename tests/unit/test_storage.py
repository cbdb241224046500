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


def test_carved_arrays_have_the_shapes_and_dtypes_of_their_specs() -> None:
    root = Memory.local(sum(carved_bytes(SPECS, 7).values())).root()
    arrays = carve(root, SPECS, 7)
    assert list(arrays) == list(SPECS)
    for key, spec in SPECS.items():
        assert arrays[key].shape == (7, *spec.shape)
        assert arrays[key].dtype == spec.dtype


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


def test_carved_arrays_are_no_copies() -> None:
    root = Memory.local(sum(carved_bytes(SPECS, 2).values())).root()
    arrays = carve(root, SPECS, 2)
    arrays["pose"][:] = 1.0
    assert root.any()
    for key in ("flag", "frame"):
        assert not arrays[key].any()


@pytest.mark.parametrize("make", [Memory.local, Memory.shared])
def test_new_memory_is_zero_and_writable(make: object) -> None:
    memory = make(10_000)  # type: ignore[operator]
    root = memory.root()
    assert root.dtype == np.uint8
    assert root.shape == (10_000,)
    assert memory.n_bytes == 10_000
    assert not root.any()
    root[-1] = 7
    assert memory.root()[-1] == 7


def test_memory_lives_as_long_as_an_array_made_from_it() -> None:
    memory = Memory.shared(5000)
    memory.close_fd()
    array = memory.root()[10:20]
    array[:] = 3
    tensor = torch.from_numpy(array)
    del memory, array
    gc.collect()
    assert tensor.tolist() == [3] * 10


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


def test_attached_memory_is_the_same_memory() -> None:
    memory = Memory.shared(100)
    other = Memory.attach(os.dup(memory.fd), 100)
    memory.root()[5] = 9
    assert other.root()[5] == 9
    other.root()[6] = 8
    assert memory.root()[6] == 8
    memory.close_fd()


def test_writes_to_a_private_attachment_stay_there() -> None:
    memory = Memory.shared(100)
    memory.root()[:] = 1
    private = Memory.attach(os.dup(memory.fd), 100, private=True)
    assert private.root()[0] == 1
    private.root()[:] = 2
    assert (memory.root() == 1).all()
    memory.close_fd()


def test_shared_memory_has_no_name_and_keeps_no_descriptor() -> None:
    before, in_shm = descriptors(), set(os.listdir("/dev/shm"))
    memory = Memory.shared(100)
    attached = Memory.attach(os.dup(memory.fd), 100)
    memory.close_fd()
    memory.close_fd()
    assert descriptors() == before
    assert set(os.listdir("/dev/shm")) == in_shm
    assert memory.root().shape == attached.root().shape


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
