"""The kinds of memory that users choose from, and how memory gets to other processes."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpool.errors import SpecError, UsageError
from rlpool.machine.limits import machine_bytes
from rlpool.memory import transfer
from rlpool.memory.storage import Memory, allocate

SENT = ("shared", "memmap")


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    drop_kept()
    before = open_descriptors()
    yield
    drop_kept()
    assert open_descriptors() == before


def drop_kept() -> None:
    """Close what waits for a receiver: tests send without anybody to receive."""
    gc.collect()
    while transfer._kept:
        transfer._kept.pop().close()


# Kinds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("disk", 10, None), r"'disk'(.|\n)*\"local\", \"shared\", \"memmap\""),
        (("local", machine_bytes() + 1, None), "in all"),
        (("shared", machine_bytes() + 1, None), "in all"),
        (("shared", 10, "/tmp"), "directory"),
        (("memmap", 10, "/nowhere"), r"nowhere.*ENOENT"),
        (("memmap", 1 << 62, None), "EFBIG"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(arguments: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        allocate(*arguments[:2], directory=arguments[2])


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_a_memmap_is_sparse_and_leaves_nothing_in_its_directory(
    has_unnamed_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_unnamed_files:
        monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    memory = allocate("memmap", 1 << 30, directory=tmp_path)
    assert os.stat(memory.fd).st_dev == os.stat(tmp_path).st_dev
    memory.root()[123_456_789] = 1
    assert os.fstat(memory.fd).st_blocks * 512 < 1 << 20
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_full(fd: int, start: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    memory = allocate("memmap", 1 << 20)
    memory.root()[:10] = 5
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", is_full)
        with pytest.raises(SpecError, match="ENOSPC"):
            memory.reserve(0, 1 << 20)
    memory.reserve(0, 1 << 20)
    assert os.fstat(memory.fd).st_blocks * 512 >= 1 << 20
    assert memory.root().sum() == 50


# Sending --------------------------------------------------------------------------------------


def _write(memory: Memory, sent: bytes) -> None:
    memory.close()  # else the forked child would know the memory already
    pickle.loads(sent).root()[5] += 1


def write_in_a_child(memory: Memory, sent: bytes) -> None:
    process = multiprocessing.get_context("fork").Process(target=_write, args=(memory, sent))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.promise("I5")
@pytest.mark.parametrize("kind", SENT)
def test_one_pickle_is_received_any_number_of_times_and_costs_no_descriptor(kind: str) -> None:
    memory = allocate(kind, 100)
    before = open_descriptors()
    sent = pickle.dumps(memory)
    for _ in range(1000):
        assert len(pickle.dumps(memory)) < 300
    assert pickle.loads(sent) is memory  # in the same process
    assert pickle.loads(sent) is memory
    gc.collect()  # dropping what was received frees nothing
    for _ in range(2):
        write_in_a_child(memory, sent)
    assert memory.root()[5] == 2
    assert open_descriptors() == before


def test_what_is_on_its_way_is_kept_until_it_arrives_within_bounds() -> None:
    memory = allocate("shared", 100)
    memory.root()[:] = 7
    sent = pickle.dumps(memory)
    before = open_descriptors()
    del memory
    gc.collect()
    assert open_descriptors() == before
    received = pickle.loads(sent)
    assert (received.root() == 7).all()
    transfer.let_go_of_received()
    assert not transfer._kept
    for _ in range(3 * transfer.MAX_KEPT):
        pickle.dumps(allocate("shared", 100))
    assert len(transfer._kept) <= transfer.MAX_KEPT + 1


@pytest.mark.promise("I7")
@pytest.mark.parametrize("opened", ["nothing", "a pipe", "other memory"])
def test_a_descriptor_with_another_meaning_is_not_taken_for_the_memory(opened: str) -> None:
    before = open_descriptors()
    memory = allocate("memmap", 100)
    sent, fd = pickle.dumps(memory), memory.fd
    assert fd is not None
    memory.close()
    assert open_descriptors() == before
    another = allocate("memmap", 100)
    source = {"a pipe": os.pipe, "other memory": lambda: (os.dup(another.fd),)}
    ends = source.get(opened, tuple)()
    if ends and str(fd) not in open_descriptors():
        os.dup2(ends[0], fd)
        ends = (*ends, fd)
    with pytest.raises(UsageError, match="is gone"):
        pickle.loads(sent)
    for end in ends:
        os.close(end)
