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

import numpy as np
import pytest
import torch

from rlpool.errors import SpecError, UsageError
from rlpool.machine.limits import machine_bytes
from rlpool.memory import transfer as descriptors
from rlpool.memory.storage import KINDS, Memory, allocate

SENT = ("shared", "memmap")


def descriptors_open() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    close_kept()
    before = descriptors_open()
    yield
    close_kept()
    assert descriptors_open() == before


def close_kept() -> None:
    """Close what waits for a receiver, as tests send without anybody to receive."""
    gc.collect()
    for kept in list(descriptors._kept):
        descriptors._kept.remove(kept)
        kept.close()


# Kinds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_bytes", [0, 1, 4096, 10_001])
def test_every_kind_is_zeroed_writable_and_of_the_size_asked_for(kind: str, n_bytes: int) -> None:
    memory = allocate(kind, n_bytes)
    assert memory.kind == kind
    assert memory.n_bytes == n_bytes
    assert memory.root().shape == (n_bytes,)
    assert not memory.root().any()
    memory.root()[:] = 7
    assert (memory.root() == 7).all()


def test_an_unknown_kind_is_refused_with_the_choices() -> None:
    with pytest.raises(SpecError, match=r"'disk'(.|\n)*\"local\", \"shared\", \"memmap\""):
        allocate("disk", 10)


@pytest.mark.parametrize("kind", ["local", "shared"])
def test_more_than_the_machine_has_is_refused(kind: str) -> None:
    with pytest.raises(SpecError, match="in all"):
        allocate(kind, machine_bytes() + 1)


@pytest.mark.parametrize("kind", ["local", "shared"])
def test_a_directory_without_a_file_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="directory"):
        allocate(kind, 10, directory=tmp_path)


def test_a_memmap_leaves_nothing_in_its_directory_and_takes_no_room_unwritten(
    tmp_path: Path,
) -> None:
    memory = allocate("memmap", 1 << 30, directory=tmp_path)
    assert os.stat(memory.fd).st_dev == os.stat(tmp_path).st_dev
    memory.root()[123_456_789] = 1
    assert os.fstat(memory.fd).st_blocks * 512 < 1 << 20
    assert list(tmp_path.iterdir()) == []


def test_a_memmap_where_files_cannot_be_unnamed_is_unlinked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    memory = allocate("memmap", 100, directory=tmp_path)
    memory.root()[:] = 3
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere.*ENOENT"):
        allocate("memmap", 10, directory=tmp_path / "nowhere")


def test_a_memmap_larger_than_any_file_is_refused() -> None:
    with pytest.raises(SpecError, match="EFBIG"):
        allocate("memmap", 1 << 62)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_an_error_before_anything_is_written(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = allocate("memmap", 8192)

    def is_full(fd: int, start: int, n_bytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with pytest.raises(SpecError, match=errno.errorcode[number]):
        memory.reserve(0, 8192)
    assert not memory.root().any()


def test_a_reservation_that_no_disk_can_hold_is_refused() -> None:
    memory = allocate("memmap", 1 << 43)
    with pytest.raises(SpecError, match=r"8 TiB of a memmap.*(ENOSPC|EFBIG)"):
        memory.reserve(0, 1 << 43)


def test_reserved_bytes_have_room_on_the_disk_and_keep_their_values() -> None:
    memory = allocate("memmap", 1 << 20)
    memory.root()[:10] = 5
    memory.reserve(0, 1 << 20)
    assert os.fstat(memory.fd).st_blocks * 512 >= 1 << 20
    assert memory.root().sum() == 50


@pytest.mark.parametrize("kind", KINDS)
def test_closed_memory_raises_and_its_arrays_stay(kind: str) -> None:
    memory = allocate(kind, 100)
    array, tensor = memory.root(), torch.from_numpy(memory.root())
    memory.close()
    memory.close()
    array[5] = 3
    assert tensor[5] == 3
    with pytest.raises(UsageError, match="closed"):
        memory.root()
    with pytest.raises(UsageError, match=r"closed|local"):
        pickle.dumps(memory)
    if kind == "memmap":
        with pytest.raises(UsageError, match="closed"):
            memory.reserve(0, 10)


# Sending --------------------------------------------------------------------------------------


def test_local_memory_cannot_be_sent_and_says_what_can() -> None:
    with pytest.raises(UsageError, match='storage="shared"'):
        pickle.dumps(allocate("local", 10))


@pytest.mark.parametrize("kind", SENT)
def test_a_pickle_in_the_same_process_gives_the_same_memory(kind: str) -> None:
    memory = allocate(kind, 100)
    before = descriptors_open()
    sent = pickle.dumps(memory)
    assert len(sent) < 300
    for _ in range(3):
        assert pickle.loads(sent) is memory
    assert pickle.loads(pickle.dumps(memory)) is memory
    assert descriptors_open() == before


def test_dropping_a_received_copy_frees_nothing() -> None:
    memory = allocate("shared", 100)
    copy = pickle.loads(pickle.dumps(memory))
    del copy
    gc.collect()
    memory.root()[3] = 1
    assert pickle.loads(pickle.dumps(memory)).root()[3] == 1


def _in_a_child(work: object, *arguments: object) -> None:
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def _write_from(sent: bytes, place: int) -> None:
    memory = pickle.loads(sent)
    memory.root()[place] += 1


@pytest.mark.parametrize("kind", SENT)
def test_one_pickle_can_be_received_any_number_of_times(kind: str) -> None:
    memory = allocate(kind, 100)
    descriptors_of_one = len(descriptors_open())
    sent = pickle.dumps(memory)
    for _ in range(3):
        _in_a_child(_forget_and_write, memory, sent, 5)
    assert memory.root()[5] == 3
    assert len(descriptors_open()) == descriptors_of_one


def _forget_and_write(memory: Memory, sent: bytes, place: int) -> None:
    # Without this the forked child would know the memory already.
    memory.close()
    _write_from(sent, place)


def test_ten_thousand_pickles_cost_no_descriptor() -> None:
    memory = allocate("shared", 100)
    before = descriptors_open()
    for _ in range(10_000):
        pickle.dumps(memory)
    assert descriptors_open() == before


def test_what_is_on_its_way_is_kept_until_it_arrives() -> None:
    memory = allocate("shared", 100)
    memory.root()[:] = np.arange(100)
    sent = pickle.dumps(memory)
    before = descriptors_open()
    del memory
    gc.collect()
    assert descriptors_open() == before
    received = pickle.loads(sent)
    assert received.root().tolist() == list(range(100))
    descriptors.let_go_of_received()
    assert len(descriptors_open()) == len(before)
    assert not descriptors._kept


def test_what_never_arrives_is_kept_within_bounds() -> None:
    for _ in range(3 * descriptors.MAX_KEPT):
        pickle.dumps(allocate("shared", 100))
    assert len(descriptors._kept) <= descriptors.MAX_KEPT + 1


def test_closing_keeps_nothing_on_its_way() -> None:
    before = descriptors_open()
    memory = allocate("shared", 100)
    sent = pickle.dumps(memory)
    memory.close()
    assert descriptors_open() == before
    with pytest.raises(UsageError, match="is gone"):
        pickle.loads(sent)


@pytest.mark.parametrize("opened", ["nothing", "a file", "a pipe", "other memory"])
def test_a_descriptor_with_another_meaning_is_not_taken_for_the_memory(
    opened: str, tmp_path: Path
) -> None:
    memory = allocate("memmap", 100)
    sent, fd = pickle.dumps(memory), memory.fd
    memory.close()
    if opened == "a file":
        (tmp_path / "file").write_bytes(bytes(10_000))
        other = os.open(tmp_path / "file", os.O_RDWR)
    elif opened == "a pipe":
        other, writing = os.pipe()
        os.close(writing)
    elif opened == "other memory":
        another = allocate("memmap", 100)
        other = os.dup(another.fd)
    if opened != "nothing" and not os.path.exists(f"/proc/self/fd/{fd}"):
        os.dup2(other, fd)
        os.close(other)
        other = fd
    with pytest.raises(UsageError, match="is gone"):
        pickle.loads(sent)
    if opened != "nothing":
        os.close(other)
