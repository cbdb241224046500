"""Files of pools that are damaged: told, or loaded as if they were not, and nothing is lost."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlpool.memory.storage
from rlpool import Pool, SpecError, TemporalDictTensor
from rlpool.pool import checkpoint

from support.transitions import add_numbers, trajectories_of_numbers

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sub-pools with priorities": {"processes": 3, "priority_exponent": 0.6},
    "shared": {"storage": "shared"},
    "memmap": {"storage": "memmap"},
}
N_MUTATIONS = 1000  # of each kind

Mutation = Callable[[bytes, random.Random], bytes]


def small_pool(kind: str, start: int, seed: int) -> Pool:
    pool = Pool(pool_size=12, seed=seed, **KINDS[kind])
    pool.extend(trajectories_of_numbers(start, [3, 7, 5]))
    add_numbers(pool, start + 15, start + 17)
    pool.sample(3)
    return pool


def bits(pool: Pool) -> dict[str, Any]:
    """All that a pool is, to be compared."""
    state = pool.state_dict()
    return {k: v if isinstance(v, str) else v.numpy().tobytes() for k, v in state.items()}


# Mutations --------------------------------------------------------------------------------------


def flip_bits(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def flip_bits_of_the_header(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    changed[draw.randrange(8 + struct.unpack("<Q", data[:8])[0])] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def insert(data: bytes, draw: random.Random) -> bytes:
    at = draw.choice([0, 8, len(data), draw.randrange(len(data))])
    return data[:at] + draw.randbytes(draw.choice([1, 8, 100])) + data[at:]


def repeat_or_remove(data: bytes, draw: random.Random) -> bytes:
    start, n = draw.randrange(len(data)), draw.choice([1, 8, 512])
    return data[:start] + data[start : start + n] * draw.choice([0, 2]) + data[start + n :]


def overwrite(data: bytes, draw: random.Random) -> bytes:
    start, n = draw.randrange(len(data)), draw.choice([8, 64, 4096])
    return (
        data[:start] + draw.choice([bytes(n), b"\xff" * n])[: len(data) - start] + data[start + n :]
    )


def change_length(data: bytes, draw: random.Random) -> bytes:
    lengths = [0, 1, 2**63, 2**64 - 1, 2**40, len(data), len(data) - 8, draw.randrange(len(data))]
    return struct.pack("<Q", draw.choice(lengths)) + data[8:]


def edit_header(data: bytes, draw: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    one, other = draw.sample(names, 2)
    edits = [
        lambda: header[one].update(data_offsets=header[other]["data_offsets"]),
        lambda: header[one].update(data_offsets=[-8, header[one]["data_offsets"][1]]),
        lambda: header[one].update(data_offsets=header[one]["data_offsets"][::-1]),
        lambda: header[one].update(data_offsets=[2**62, 2**63]),
        lambda: header[one].update(data_offsets=[0.0, None]),
        lambda: header[one].update(dtype=draw.choice(["F64", "I8", "BF16", "", None, 3, []])),
        lambda: header[one].update(shape=draw.choice([[], [2**40], [-1], [1.5], "12", None, [[]]])),
        lambda: header.update({one: header[other], other: header[one]}),
        lambda: header.update({one: draw.choice([None, [], {}, 3, "x"])}),
        lambda: header.pop(one),
        lambda: header.pop("__metadata__"),
        lambda: header.update(__metadata__=draw.choice([{}, None, [], {"metadata": 3}])),
        lambda: header.update({"columns/": header[one]}),
        lambda: header["__metadata__"].update(metadata=edit_text(header, draw)),
    ]
    draw.choice(edits)()
    return with_header(header, data[8 + length :])


def edit_text(header: Any, draw: random.Random) -> str:
    state = json.loads(header["__metadata__"]["metadata"])
    key = draw.choice(list(state))
    junk = [
        None,
        -1,
        2**80,
        1e400,
        "x",
        [],
        {},
        [[0, 1]],
        [[5, 2**70]],
        [True],
        {"0": 10**9},
        False,
    ]
    state[key] = draw.choice([*junk, state[draw.choice(list(state))]])
    return draw.choice([json.dumps(state), json.dumps(state)[:-1], "", "[" * 10**5, "null"])


def nest(data: bytes, draw: random.Random) -> bytes:
    return struct.pack("<Q", 10**5) + b"[" * 10**5 + data


def with_header(header: Any, rest: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + rest


MUTATIONS: tuple[Mutation, ...] = (
    *(flip_bits, flip_bits, flip_bits_of_the_header, cut, insert, repeat_or_remove, overwrite),
    *(change_length, edit_header, edit_header, nest),
)


@pytest.fixture
def no_large_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where more than some megabytes are asked for."""
    allocate = rlpool.memory.storage.allocate

    def watched(storage: str, n_bytes: int, **options: Any) -> Any:
        assert n_bytes < 2**22
        return allocate(storage, n_bytes, **options)

    monkeypatch.setattr(checkpoint, "allocate", watched)


@pytest.mark.usefixtures("no_large_allocation")
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_or_loads_what_was_saved(kind: str, tmp_path: Path) -> None:
    pool, there, path = small_pool(kind, 0, 1), small_pool(kind, 100, 2), tmp_path / "pool"
    pool.save(path)
    data, saved, before = path.read_bytes(), bits(pool), bits(there)
    draw = random.Random(KINDS[kind].__repr__())
    n_loaded = 0
    for number in range(N_MUTATIONS):
        mutation = MUTATIONS[number % len(MUTATIONS)]
        path.write_bytes(mutation(data, draw))
        try:
            there.load(path)
        except SpecError:
            assert bits(there) == before
            continue
        n_loaded += 1
        assert bits(there) == saved, mutation
        there.load_state_dict(small_pool(kind, 100, 2).state_dict())
    assert n_loaded < N_MUTATIONS / 50
    path.write_bytes(data)
    there.load(path)
    assert bits(there) == saved


def test_no_flipped_bit_of_a_file_goes_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    small_pool("plain", 0, 1).save(path)
    data, there = path.read_bytes(), Pool(pool_size=12, seed=1)
    for place in range(0, 8 * len(data), 61):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(SpecError):
            there.load(path)
    assert len(there) == 0
    assert not there.specs


# Files of version 0.1 ---------------------------------------------------------------------------


def as_version_0_1(data: bytes) -> bytes:
    """The file that version 0.1 wrote: no checksums, rewards as they came, format 1."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    state = json.loads(header["__metadata__"]["metadata"])
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_checksums_of_version_0_1_loads(kind: str, tmp_path: Path) -> None:
    pool, path = small_pool(kind, 0, 1), tmp_path / "pool"
    pool.save(path)
    path.write_bytes(as_version_0_1(path.read_bytes()))
    for there in (small_pool(kind, 100, 2), Pool(pool_size=12, **KINDS[kind])):
        there.load(path)
        assert bits(there) == bits(pool)
        assert there.get_pool()[3].dtype == np.float32


def test_a_damaged_file_without_checksums_is_refused_or_leaves_a_pool_that_works(
    tmp_path: Path,
) -> None:
    kind, path = "sub-pools with priorities", tmp_path / "pool"
    small_pool(kind, 0, 1).save(path)
    data, draw = as_version_0_1(path.read_bytes()), random.Random(0)
    there = small_pool(kind, 100, 2)
    for number in range(N_MUTATIONS):
        before = bits(there)
        path.write_bytes(MUTATIONS[number % len(MUTATIONS)](data, draw))
        try:
            there.load(path)
        except SpecError:
            assert bits(there) == before
            continue
        there.sample(4, n_step=3)
        there.sample_sequences(4, 3)
        add_numbers(there, 200, 203)
        assert len(there.transitions()["frame"]) == len(there)


# Nothing is lost --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
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
    read, n_reads = checkpoint._read_into, 0

    def fail_later(file: Any, target: memoryview) -> int:
        nonlocal n_reads
        n_reads += 1
        if n_reads == 7:
            if failure is not None:
                raise failure
            with open(path, "r+b") as same:
                same.truncate(same.seek(0, 2) // 2)
        return read(file, target)

    monkeypatch.setattr(checkpoint, "_read_into", fail_later)
    with pytest.raises(SpecError):
        there.load(path)
    assert n_reads >= 7
    assert bits(there) == before
    add_numbers(there, 0, 9)
    assert there.sample(5)["frame"].shape == (5, 64)


def test_a_pool_can_be_given_its_own_state() -> None:
    pool = small_pool("sub-pools with priorities", 0, 1)
    before = bits(pool)
    pool.load_state_dict(pool.state_dict())
    assert bits(pool) == before


def test_readers_of_a_shared_pool_see_what_was_loaded(tmp_path: Path) -> None:
    pool, other = small_pool("shared", 0, 1), small_pool("shared", 100, 2)
    columns = other.state_dict()["columns/frame/0.0"].data_ptr()
    pool.save(tmp_path / "pool")
    other.load(tmp_path / "pool")
    assert other.state_dict()["columns/frame/0.0"].data_ptr() == columns
    assert torch.equal(other.transitions()["frame"], pool.transitions()["frame"])


# Keys -------------------------------------------------------------------------------------------

KEYS = ["", "/", "checksums", "metadata", "__metadata__", "is_last", "is_last/0.0", "0.0", "a/b/c"]
KEYS += [
    "ключ",
    "\x00",
    "\n",
    '"',
    "\\",
    "finals/x",
    "columns/frame/0.0",
    "_",
    "\ud800",
    "x" * 5000,
]


def test_every_key_that_a_pool_takes_is_saved_and_loaded(tmp_path: Path) -> None:
    steps = {key: torch.full((1, 3, 4), float(n)) for n, key in enumerate(KEYS)}
    steps |= {f"_{key}": tensor + 1 for key, tensor in steps.items() if f"_{key}" not in steps}
    pool, other = Pool(pool_size=5, seed=0), Pool(pool_size=5, seed=1)
    pool.extend(TemporalDictTensor(steps))
    pool.save(tmp_path / "pool")
    other.load(tmp_path / "pool")
    assert bits(other) == bits(pool)
    assert torch.equal(other.transitions()["ключ"], pool.transitions()["ключ"])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bfloat16])
def test_a_dtype_that_cannot_be_saved_is_refused_when_it_comes_in(dtype: torch.dtype) -> None:
    pool = Pool(pool_size=5)
    with pytest.raises(SpecError, match=r"'signal' has dtype torch\.\w+, which a pool cannot hold"):
        pool.extend(TemporalDictTensor({"signal": torch.zeros(1, 2, dtype=dtype)}))
    assert not pool.specs
