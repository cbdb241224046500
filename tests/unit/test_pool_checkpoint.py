"""Saving a pool and going on from there."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import Pool, SpecError

from support.transitions import add_numbers, trajectories_of_numbers

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three sub-pools": {"processes": 3},
    "priorities": {"priority_exponent": 0.6},
    "windows": {"window_size": 7, "clearing_freq": 5, "window_size_": 2},
    "shared": {"storage": "shared"},
    "memmap": {"storage": "memmap"},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def through_tensors(pool: Pool, other: Pool) -> None:
    file = io.BytesIO()
    torch.save(pool.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))


def through_file(pool: Pool, other: Pool, path: Path) -> None:
    pool.save(path)
    other.load(path)


def go_on(pool: Pool) -> list[torch.Tensor]:
    """Add, sample and set priorities; gives all that was seen."""
    seen: list[torch.Tensor] = []
    for start in (100, 120, 140):
        batch = pool.sample(8, n_step=2)
        if "index" in batch:
            pool.update_priorities(batch["index"], torch.rand(8, generator=_generator(start)))
        seen += batch.values()
        seen += pool.sample_sequences(4, 3).values()
        add_numbers(pool, start, start + 10)
        pool.extend(trajectories_of_numbers(start + 10, [3, 5]))
        seen += pool.transitions().values()
    return seen


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@kinds
@pytest.mark.parametrize("way", ["tensors", "file"])
@pytest.mark.parametrize("n_before", [0, 40])
def test_a_pool_goes_on_where_the_saved_one_was(
    kind: str, way: str, n_before: int, tmp_path: Path
) -> None:
    pool = Pool(pool_size=30, seed=1, **KINDS[kind])
    add_numbers(pool, 0, 33)
    pool.extend(trajectories_of_numbers(40, [4, 9]))
    pool.sample(5)
    other = Pool(pool_size=30, seed=2, **KINDS[kind])
    add_numbers(other, 500, 500 + n_before)
    if way == "file":
        through_file(pool, other, tmp_path / "pool")
    else:
        through_tensors(pool, other)
    for mine, its in zip(go_on(other), go_on(pool), strict=True):
        assert torch.equal(mine, its)


def test_an_empty_pool_can_be_saved(tmp_path: Path) -> None:
    pool, other = Pool(pool_size=5, seed=1), Pool(pool_size=5, seed=2)
    through_file(pool, other, tmp_path / "pool")
    assert len(other) == 0
    add_numbers(pool, 0, 5)
    add_numbers(other, 0, 5)
    assert torch.equal(pool.sample(5)["action"], other.sample(5)["action"])


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    pool = Pool(pool_size=8, seed=0)
    add_numbers(pool, 0, 11)
    pool.save(tmp_path / "pool")
    arrays = safetensors.load_file(tmp_path / "pool")
    actions = [arrays[key] for key in sorted(arrays) if key.startswith("columns/action/")]
    assert np.concatenate(actions).tolist() == list(range(3, 11))


def test_state_dict_copies_nothing() -> None:
    pool = Pool(pool_size=8)
    add_numbers(pool, 0, 5)
    frames = pool.state_dict()["columns/frame/0.0"]
    assert frames.data_ptr() == pool.state_dict()["columns/frame/0.0"].data_ptr()


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"pool_size": 31}, "pool_size"),
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
    add_numbers(there, 7, 9)
    pool.save(tmp_path / "pool")
    with pytest.raises(SpecError, match=named):
        there.load(tmp_path / "pool")
    assert sorted(there.transitions()["action"].tolist()) == [7, 8]


def test_a_pool_of_other_keys_is_refused_and_kept(tmp_path: Path) -> None:
    pool, there = Pool(pool_size=30), Pool(pool_size=30)
    add_numbers(pool, 0, 3)
    there(np.zeros(2), 1, np.ones(2), 0.0, False)
    pool.save(tmp_path / "pool")
    with pytest.raises(SpecError, match="'frame' of the saved pool"):
        there.load(tmp_path / "pool")
    assert there.transitions()["action"].tolist() == [1]


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "header"])
def test_a_damaged_file_is_refused_and_the_pool_kept(damage: str, tmp_path: Path) -> None:
    pool, there, path = Pool(pool_size=30), Pool(pool_size=30), tmp_path / "pool"
    add_numbers(pool, 0, 3)
    add_numbers(there, 7, 9)
    pool.save(path)
    whole = path.read_bytes()
    header = json.dumps({"__metadata__": {}}).encode()
    damaged = {
        "cut": whole[:-1],
        "text": b"not a pool at all, but longer than eight bytes",
        "empty": b"",
        "header": len(header).to_bytes(8, "little") + header,
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(SpecError, match="pool"):
        there.load(path)
    assert there.transitions()["action"].tolist() == [7, 8]


@pytest.mark.parametrize("name", ["nothing", ".", "pipe", "a\0b", None, 3])
def test_what_is_no_file_is_not_loaded(name: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    path = tmp_path / name if isinstance(name, str) else name
    with pytest.raises(SpecError, match=r"path is|cannot be read|is not a file"):
        Pool(pool_size=3).load(path)
    if name != "nothing":
        with pytest.raises(SpecError, match=r"path is|is not a file"):
            Pool(pool_size=3).save(path)


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nowhere"):
        Pool(pool_size=3).save(tmp_path / "nowhere" / "pool")


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


MEMORY = """
import os, resource, sys
import torch
from rlpool import Pool, TemporalDictTensor
N = 4000
PART = N // 20
def pool():
    return Pool(pool_size=N, seed=0)
def high_water():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def save():
    full = pool()
    for number in range(0, N, PART):  # in parts, whose memory is not what saving could use
        frames = torch.full((1, PART, 84, 84), number % 251, dtype=torch.uint8)
        full.extend(TemporalDictTensor({"frame": frames, "action": torch.zeros(1, PART)}))
    before = high_water()
    full.save(sys.argv[1])
    return (high_water() - before) / full.nbytes
def load():
    before = high_water()
    empty = pool()
    empty.load(sys.argv[1])
    assert empty.transitions(["action"])["action"].shape == (N,)
    assert empty.sample(5)["frame"].shape == (5, 84, 84)
    return (high_water() - before) / empty.nbytes
for measured in (save, load):  # each in a process of its own, where the high water is its own
    if os.fork() == 0:
        try:
            print(measured(), flush=True)
        finally:
            os._exit(0)
    os.wait()
"""


def test_saving_and_loading_need_hardly_more_memory_than_the_pool(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "pool")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    saving, loading = map(float, done.stdout.split())
    # Relative to the pool: nothing for saving, and for loading the pool itself and what is loaded
    # of the libraries, which is less than half of this small pool.
    assert saving < 0.2, done.stderr
    assert loading < 1.7
