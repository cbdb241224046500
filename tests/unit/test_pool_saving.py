"""Saving a pool and going on from there: files and states, sound, old and damaged."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import resource
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import Pool, SpecError, TemporalDictTensor
from rlpool.pool import checkpoint

from support.transitions import WIDTH, add_numbers, trajectories_of_numbers
from support.variants import variants

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three sub-pools": {"processes": 3},
    "priorities": {"priority_exponent": 0.6},
    "windows": {"window_size": 7, "clearing_freq": 5, "window_size_": 2},
    "shared": {"storage": "shared"},
    "memmap": {"storage": "memmap"},
    "frames": {"frame_stack": {"frame": WIDTH}, "storage": "memmap"},
}


def go_on(pool: Pool) -> list[torch.Tensor]:
    """Add, sample and set priorities; gives all that was seen."""
    seen: list[torch.Tensor] = []
    for start in (100, 120, 140):
        batch = pool.sample(8, n_step=2)
        if "index" in batch:
            pool.update_priorities(
                batch["index"], torch.rand(8, generator=torch.Generator().manual_seed(start))
            )
        seen += batch.values()
        seen += pool.sample_sequences(4, 3).values()
        add_numbers(pool, start, start + 10)
        pool.extend(trajectories_of_numbers(start + 10, [3, 5]))
        seen += pool.transitions().values()
    return seen


def small_pool(kind: str, start: int, seed: int) -> Pool:
    pool = Pool(pool_size=30, seed=seed, **KINDS[kind])
    pool.extend(trajectories_of_numbers(start, [3, 17, 15]))
    add_numbers(pool, start + 35, start + 37)
    pool.sample(3)
    return pool


def bits(pool: Pool) -> dict[str, Any]:
    """All that a pool is, to be compared."""
    state = pool.state_dict()
    return {k: v if isinstance(v, str) else v.numpy().tobytes() for k, v in state.items()}


@pytest.mark.parametrize(
    ("kind", "way", "n_before"),
    variants(
        [
            *[(kind, "file", 40) for kind in KINDS],
            *[(next(iter(KINDS)), way, 0) for way in ("tensors", "file of version 0.1")],
        ],
        itertools.product(KINDS, ["tensors", "file", "file of version 0.1"], [0, 40]),
    ),
)
def test_a_pool_goes_on_where_the_saved_one_was(
    kind: str, way: str, n_before: int, tmp_path: Path
) -> None:
    pool, path = small_pool(kind, 0, 1), tmp_path / "pool"
    other = Pool(pool_size=30, seed=2, **KINDS[kind])
    add_numbers(other, 500, 500 + n_before)
    if way == "tensors":
        torch.save(pool.state_dict(), file := io.BytesIO())
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
    else:
        pool.save(path)
        if way != "file":
            path.write_bytes(as_version_0_1(path.read_bytes()))
        other.load(path)
    assert bits(other) == bits(pool)
    for mine, its in zip(go_on(other), go_on(pool), strict=True):
        assert torch.equal(mine, its)


def as_version_0_1(data: bytes) -> bytes:
    """The file that version 0.1 wrote: no checksums, rewards as they came, format 1."""
    length, header = header_bytes(data), header_of(data)
    state = json.loads(header["__metadata__"]["metadata"])
    state["window_size_"] = state["window_size_"] or 0  # where there was none
    arrays = {}
    del header["checksums"]
    for name, entry in header.items():
        if name != "__metadata__":
            first, after = (8 + length + offset for offset in entry["data_offsets"])
            arrays[name] = data[first:after]
            if name.startswith("columns/_reward/"):
                arrays[name] = np.frombuffer(arrays[name], np.float32).astype("<f8").tobytes()
                entry["dtype"] = "F64"
    state["schema"]["columns"]["_reward"][0] = "<f8"
    end = 0
    for name, array in arrays.items():
        header[name]["data_offsets"] = [end, end := end + len(array)]
    header["__metadata__"]["metadata"] = json.dumps({**state, "format": 1})
    return with_header(header, b"".join(arrays.values()))


def with_header(header: Any, rest: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + rest


@pytest.mark.parametrize("was_filled", [False, True])
def test_the_state_of_an_empty_pool_empties_a_pool(was_filled: bool, tmp_path: Path) -> None:
    pool, empty = small_pool("shared", 0, 1), Pool(pool_size=30, seed=2)
    if was_filled:
        empty = small_pool("plain", 7, 2)
        empty.clear()
    empty.save(tmp_path / "pool")
    pool.load(tmp_path / "pool")
    assert len(pool) == 0
    for each in (pool, empty):
        add_numbers(each, 0, 5)
    assert torch.equal(pool.sample(5)["action"], empty.sample(5)["action"])


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    pool = Pool(pool_size=8, seed=0)
    add_numbers(pool, 0, 11)
    pool.save(tmp_path / "pool")
    arrays = safetensors.load_file(tmp_path / "pool")
    actions = [arrays[key] for key in sorted(arrays) if key.startswith("columns/action/")]
    assert np.concatenate(actions).tolist() == list(range(3, 11))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"pool_size": 31}, "pool_size"),
        ({"pool_size": 30, "priority_exponent": None}, "has frame float64.2."),
        ({"pool_size": 30, "processes": 2}, "processes"),
        ({"pool_size": 30, "priority_exponent": 1.0}, "priority_exponent"),
        ({"pool_size": 30, "window_size": 7}, "window_size"),
        ({"pool_size": 30, "clearing_freq": 7, "window_size_": 2}, "clearing_freq"),
        ({"pool_size": 30, "random": False}, "random"),
        ({"pool_size": 30, "keys": ["frame", "_frame", "action", "_reward", "_done"]}, "keys"),
    ],
)
def test_a_pool_of_other_arguments_is_refused_and_kept(
    other: dict[str, Any], named: str, tmp_path: Path
) -> None:
    pool, there = Pool(pool_size=30), Pool(**other)
    add_numbers(pool, 0, 3)
    if "frame" in named:
        there(np.zeros(2), 7, np.ones(2), 0.0, False)
    else:
        add_numbers(there, 7, 8)
    pool.save(tmp_path / "pool")
    with pytest.raises(SpecError, match=named):
        there.load(tmp_path / "pool")
    assert there.transitions()["action"].tolist() == [7]


def test_a_pool_with_values_of_no_numbers_is_saved() -> None:
    file = io.BytesIO()
    pool, other = Pool(pool_size=30, seed=0), Pool(pool_size=30)
    for number in range(3):
        pool({"nothing": [], "place": number}, number, {"nothing": [], "place": 1}, 0.0, False)
    torch.save(pool.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    every = other.transitions()
    assert every["nothing"].shape == (3, 0)
    assert all(torch.equal(every[key], each) for key, each in pool.transitions().items())


@pytest.mark.parametrize("name", ["nothing", ".", "pipe", "a\0b", None, "no/where"])
def test_paths_that_are_no_files_are_refused(name: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    path = tmp_path / name if isinstance(name, str) else name
    with pytest.raises(SpecError, match="cannot be read"):
        Pool(pool_size=3).load(path)
    if name != "nothing":
        with pytest.raises(SpecError, match="could not be saved"):
            Pool(pool_size=3).save(path)


@pytest.mark.parametrize("state", [None, {}, {"metadata": 3}, {"metadata": "{}"}, "cut"])
def test_a_state_that_is_refused_decides_nothing(state: Any) -> None:
    if state == "cut":
        state = small_pool("plain", 0, 1).state_dict()
        del state["columns/frame/0.0"]
    pool = Pool(pool_size=30)
    with pytest.raises(SpecError, match=r"not the state of a pool|columns/frame"):
        pool.load_state_dict(state)
    pool.extend(TemporalDictTensor({"other": torch.ones(1, 2)}))
    assert list(pool.specs) == ["other"]


def test_a_full_disk_keeps_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    pool = Pool(pool_size=2000)
    add_numbers(pool, 0, 10)
    pool.save(path)
    before = path.read_bytes()
    add_numbers(pool, 10, 2000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(SpecError, match=re.escape(str(path))):
            pool.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_saving_needs_no_memory_and_loading_only_that_of_the_pool(tmp_path: Path) -> None:
    frames = torch.zeros(1, 1000, 84 * 84, dtype=torch.uint8)
    pool, other = Pool(pool_size=1000), Pool(pool_size=1000)
    pool.extend(TemporalDictTensor({"frame": frames, "_frame": frames}))
    tracemalloc.start()
    pool.save(tmp_path / "pool")
    _, saving = tracemalloc.get_traced_memory()
    other.load(tmp_path / "pool")
    _, loading = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert saving < 0.1 * pool.nbytes
    assert loading < 2.2 * pool.nbytes  # room for as many values after steps is asked for, not used


# Damage -----------------------------------------------------------------------------------------


def flip_a_bit(data: bytes, draw: random.Random) -> bytes:
    place = draw.choice([draw.randrange(len(data)), draw.randrange(8 + header_bytes(data))])
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


MUTATIONS = (flip_a_bit, cut)


def header_bytes(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def header_of(data: bytes) -> Any:
    return json.loads(data[8 : 8 + header_bytes(data)])


@pytest.mark.parametrize("kind", ["three sub-pools", "memmap"])
def test_a_damaged_file_is_refused_and_the_pool_kept(kind: str, tmp_path: Path) -> None:
    pool, there, path = small_pool(kind, 0, 1), small_pool(kind, 100, 2), tmp_path / "pool"
    pool.save(path)
    data, before = path.read_bytes(), bits(there)
    draw = random.Random(kind)
    for number in range(80):
        path.write_bytes(damaged := MUTATIONS[number % len(MUTATIONS)](data, draw))
        if damaged != data:
            with pytest.raises(SpecError):
                there.load(path)
            assert bits(there) == before
    path.write_bytes(data)
    there.load(path)
    assert bits(there) == bits(pool)


@pytest.mark.parametrize("kind", ["three sub-pools", "priorities", "memmap"])
@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), MemoryError(), None])
def test_a_read_that_fails_in_the_middle_leaves_the_pool_as_it_was(
    kind: str, is_empty: bool, failure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pool"
    small_pool(kind, 0, 1).save(path)
    there = small_pool(kind, 100, 2)
    if is_empty:
        there.clear()
    before = bits(there)
    crc32, n_reads = checkpoint.zlib.crc32, 0

    def fail_later(data: Any, value: int = 0) -> int:
        nonlocal n_reads
        n_reads += 1
        if n_reads == 7:
            if failure is not None:
                raise failure
            with open(path, "r+b") as same:
                same.truncate(same.seek(0, 2) // 2)
        return crc32(data, value)

    monkeypatch.setattr(checkpoint.zlib, "crc32", fail_later)
    with pytest.raises(SpecError):
        there.load(path)
    assert n_reads >= 7
    assert bits(there) == before
    add_numbers(there, 0, 9)
    assert there.sample(5)["frame"].shape == (5, 64)


def test_readers_of_a_shared_pool_see_what_was_loaded(tmp_path: Path) -> None:
    pool, other = small_pool("shared", 0, 1), small_pool("shared", 100, 2)
    columns = other.state_dict()["columns/frame/0.0"].data_ptr()
    pool.save(tmp_path / "pool")
    other.load(tmp_path / "pool")
    assert other.state_dict()["columns/frame/0.0"].data_ptr() == columns
    assert torch.equal(other.transitions()["frame"], pool.transitions()["frame"])


KEYS = ["", "/", "checksums", "metadata", "__metadata__", "is_last", "is_last/0.0", "0.0", "a/b/c"]
KEYS += ["ключ", "\x00", '"', "\\", "finals/x", "columns/frame/0.0", "_", "\ud800", "x" * 5000]


def test_every_key_that_a_pool_takes_is_saved_and_loaded(tmp_path: Path) -> None:
    steps = {key: torch.full((1, 3, 4), float(n)) for n, key in enumerate(KEYS)}
    steps |= {f"_{key}": tensor + 1 for key, tensor in steps.items() if f"_{key}" not in steps}
    pool, other = Pool(pool_size=5, seed=0), Pool(pool_size=5, seed=1)
    pool.extend(TemporalDictTensor(steps))
    pool.save(tmp_path / "pool")
    other.load(tmp_path / "pool")
    assert bits(other) == bits(pool)
    assert torch.equal(other.transitions()["ключ"], pool.transitions()["ключ"])
