"""Memory: its kinds, arrays carved out of it, and how it gets to other processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpool.data.specs import TensorSpec
from rlpool.data.storage import PAGE_BYTES, Memory, allocate, carve, carved_bytes
from rlpool.errors import SpecError, UsageError
from rlpool.machine.limits import memory_bounds

from support import named_memory
from support.machines import limit_disk

SPECS = {
    "flag": TensorSpec((), np.dtype(bool)),
    "frame": TensorSpec((84, 84), np.dtype(np.uint8)),
    "nothing": TensorSpec((0,), np.dtype(np.float32)),
    "pose": TensorSpec((3,), np.dtype(np.float64)),
}


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    gc.collect()
    before = open_descriptors()
    yield
    gc.collect()
    assert open_descriptors() == before


def address(array: np.ndarray) -> int:  # type: ignore[type-arg]
    return int(array.__array_interface__["data"][0])


# Arrays in a block --------------------------------------------------------------------------------


def test_carved_arrays_have_the_shapes_of_their_specs_and_share_no_page() -> None:
    n_bytes = carved_bytes(SPECS, 7)
    root = Memory.local(sum(n_bytes.values())).root()
    arrays = carve(root, SPECS, 7)
    pages: list[int] = []
    for key, spec in SPECS.items():
        assert (arrays[key].shape, arrays[key].dtype) == ((7, *spec.shape), spec.dtype)
        first = address(arrays[key]) - address(root)
        assert first % PAGE_BYTES == 0
        pages += range(first // PAGE_BYTES, -(-(first + arrays[key].nbytes) // PAGE_BYTES))
    assert len(pages) == len(set(pages))
    assert all(size % PAGE_BYTES == 0 and size > 0 for size in n_bytes.values())
    arrays["pose"][:] = 1.0
    assert root.any()
    assert not arrays["frame"].any()


def test_a_root_is_gone_when_its_last_user_is_gone() -> None:
    root = Memory.local(sum(carved_bytes(SPECS, 2).values())).root()
    reference = weakref.ref(root)
    tensor = torch.from_numpy(carve(root, SPECS, 2)["frame"])[1, 3:5]
    del root
    gc.collect()
    assert reference() is not None
    del tensor
    gc.collect()
    assert reference() is None


# Kinds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("disk", 10, None), "storage"),
        (("local", min(memory_bounds(), key=lambda bound: bound.total).total + 1, None), "in all"),
        (("shared", 10, "/tmp"), "directory"),
        (("memmap", 10, "/nowhere"), "/nowhere"),
        (("memmap", 1 << 62, None), "EFBIG"),
    ],
)
def test_memory_that_is_not_available_is_refused_with_the_reason(arguments: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        allocate(*arguments[:2], directory=arguments[2])


def test_attached_memory_is_the_same_memory_unless_it_is_private() -> None:
    before, in_shm = open_descriptors(), named_memory.names()
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
    assert (open_descriptors(), named_memory.names()) == (before, in_shm)
    for without_descriptor in (memory, Memory.local(10)):
        with pytest.raises(SpecError, match="descriptor"):
            _ = without_descriptor.fd


def test_a_memmap_is_sparse_leaves_no_file_and_can_be_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = allocate("memmap", 1 << 20, directory=tmp_path)
    assert os.stat(memory.fd).st_dev == os.stat(tmp_path).st_dev
    memory.root()[:10] = 5
    assert os.fstat(memory.fd).st_blocks * 512 < 1 << 17
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        limit_disk(patch, lambda start, n_bytes: True)
        with pytest.raises(SpecError, match="ENOSPC"):
            memory.reserve(0, 1 << 20)
    memory.reserve(0, 1 << 20)
    assert os.fstat(memory.fd).st_blocks * 512 >= 1 << 20
    assert memory.root().sum() == 50


# Sending ------------------------------------------------------------------------------------------


def _write(memory: Memory, sent: bytes) -> None:
    memory.close_fd()  # else the forked child would know the memory already
    pickle.loads(sent).root()[5] += 1


@pytest.mark.promise("I5")
@pytest.mark.parametrize("kind", ["shared", "memmap"])
def test_one_pickle_is_received_any_number_of_times_and_costs_no_descriptor(kind: str) -> None:
    memory = allocate(kind, 100)
    before = open_descriptors()
    sent = pickle.dumps(memory)
    for _ in range(10):
        assert len(pickle.dumps(memory)) < 300
    for _ in range(2):
        assert pickle.loads(sent) is memory  # in the same process
    for _ in range(2):
        process = multiprocessing.get_context("fork").Process(target=_write, args=(memory, sent))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        process.close()
    assert memory.root()[5] == 2
    assert open_descriptors() == before


def test_memory_that_its_sender_dropped_is_refused() -> None:
    sent = pickle.dumps(allocate("shared", 100))
    with pytest.raises(UsageError, match="keep"):
        pickle.loads(sent)


@pytest.mark.promise("I7")
def test_another_file_with_the_same_descriptor_is_not_taken_for_the_memory() -> None:
    memory, another = (allocate("memmap", 100) for _ in range(2))
    sent, fd = pickle.dumps(memory), memory.fd
    memory.close_fd()
    with pytest.raises(UsageError, match="gone"):
        pickle.loads(sent)
    os.dup2(another.fd, fd)
    with pytest.raises(UsageError, match="gone"):
        pickle.loads(sent)
    os.close(fd)
