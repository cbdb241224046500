"""Memory: its kinds, arrays allocated in it, and its transfer to other processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpool.data.storage import Memory, allocate
from rlpool.errors import SpecError, UsageError
from rlpool.machine.platform import memory_bounds

from support import named_memory
from support.machines import limit_disk


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    gc.collect()
    before = open_descriptors()
    yield
    gc.collect()
    assert open_descriptors() == before


# Arrays in a block --------------------------------------------------------------------------------


# Kinds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("disk", 10, None), "storage"),
        (("local", min(memory_bounds(), key=lambda bound: bound.total).total + 1, None), "total"),
        (("shared", 10, "/tmp"), "directory"),
        (("memmap", 10, "/nowhere"), "/nowhere"),
        (("memmap", 1 << 62, None), "EFBIG"),
    ],
)
def test_unavailable_memory_is_refused_with_the_reason(arguments: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        allocate(*arguments[:2], directory=arguments[2])


@pytest.mark.linux
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
    memory.close_fd()  # else the forked child would have the memory already
    pickle.loads(sent).root()[5] += 1


@pytest.mark.promise("I5")
@pytest.mark.parametrize("kind", ["shared", "memmap"])
def test_a_pickle_can_be_received_repeatedly_and_uses_no_descriptor(kind: str) -> None:
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


def test_memory_dropped_by_its_sender_is_refused() -> None:
    sent = pickle.dumps(allocate("shared", 100))
    with pytest.raises(UsageError, match="keep"):
        pickle.loads(sent)


@pytest.mark.promise("I7")
def test_another_file_with_the_same_descriptor_is_not_mistaken_for_the_memory() -> None:
    memory, another = (allocate("memmap", 100) for _ in range(2))
    sent, fd = pickle.dumps(memory), memory.fd
    memory.close_fd()
    with pytest.raises(UsageError, match="no longer exists"):
        pickle.loads(sent)
    os.dup2(another.fd, fd)
    with pytest.raises(UsageError, match="no longer exists"):
        pickle.loads(sent)
    os.close(fd)
