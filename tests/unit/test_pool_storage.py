"""Storage of a pool: memory, full disks, and interrupted additions."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlpool import (
    Pool,
    SpecError,
    TemporalDictTensor,
)
from rlpool.machine import interrupts

from support.envs import assert_same_tensors
from support.machines import limit_disk
from support.striking import Strike


def trajectories(n: int, value: int = 0, size: int = 100) -> TemporalDictTensor:
    frame = (torch.arange(n) % 256).to(torch.uint8)[None, :, None].repeat(1, 1, size)
    steps = {"frame": frame, "_frame": frame + 1, "number": torch.arange(n)[None] + 1000 * value}
    return TemporalDictTensor(steps)


# A full disk ---------------------------------------------------------------------------------


def test_a_full_disk_never_loses_stored_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All writes are to reserved space; a write to unreserved space would kill the process."""
    n_left = n_reserved = 0
    given: set[tuple[int, int]] = set()

    def is_full(start: int, n_bytes: int) -> bool:
        nonlocal n_left, n_reserved
        if (start, n_bytes) in given:
            return False
        n_left -= 1
        given.update([(start, n_bytes)] if n_left >= 0 else [])
        n_reserved += n_bytes if n_left >= 0 else 0
        return n_left < 0

    limit_disk(monkeypatch, is_full)
    pool = Pool(None, 3, 30_000, storage="memmap", directory=tmp_path, seed=0)
    with pytest.raises(SpecError, match=r"disk.*\n.*free some space"):
        pool.extend(trajectories(10))
    assert not pool.specs  # nothing was committed: others may come first
    n_left = 100
    pool.extend(trajectories(100, 1), 0)
    before, n_bytes = pool.transitions(), pool.nbytes
    apart = trajectories(9000, 2)
    apart["_frame"].add_(1)  # no next frame, so each needs its own space
    n_refused = 0
    while len(pool) == 100:
        n_left = 1
        try:
            pool.extend(apart, 0)
        except SpecError:
            n_refused += 1
            assert_same_tensors(pool.transitions(), before)
            assert pool.sample(50)["number"].min() >= 1000
            assert pool.sample_sequences(50, 1)["number"][:, 0].min() >= 1000
            assert pool.nbytes == n_bytes
    assert (
        n_refused == 6
    )  # is_last, is_terminal, follower, final_row, frame, number, and then what follows the frames
    assert len(pool) == 9100
    assert n_reserved > 9000 * (100 + 8 + 100)  # frame, number, and the frame that follows


def test_rows_are_reused_after_clear_for_other_transitions(tmp_path: Path) -> None:
    options = {"pool_size": 40, "processes": 2, "priority_exponent": 1.0, "seed": 0}
    pool = Pool(**options, storage="memmap", directory=tmp_path)
    sizes = set()
    for value in range(5):  # more than the rows of a sub-pool
        for index in (0, 1):
            number = torch.full((1, 15), 10 * value + index)
            pool.extend(TemporalDictTensor({"number": number}), index)
        stale = pool.sample(8)["index"]
        sizes.add(pool.nbytes)
        if value < 4:
            pool.clear()
            assert pool.nbytes < min(sizes)
    assert len(sizes) == 1
    pool.update_priorities(stale - 60, torch.full((8,), 9.0))  # gone: from before clear()
    assert pool.sample(30)["weight"].eq(1.0).all()


# Memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["local", "memmap"])
def test_memory_is_allocated_as_it_is_filled(storage: str, tmp_path: Path) -> None:
    process = psutil.Process()
    options: dict[str, Any] = {"directory": tmp_path} if storage == "memmap" else {}
    size, per_batch, n_batches = 84 * 84, 500, 30
    raw = n_batches * per_batch * size  # 100 MB
    batch = trajectories(per_batch, size=size)
    _ = batch.flatten()
    before = process.memory_info().rss
    pool = Pool(pool_size=n_batches * per_batch, storage=storage, seed=0, **options)
    pool.extend(batch)
    assert process.memory_info().rss - before < 0.2 * raw
    for _ in range(n_batches + 2):
        pool.extend(batch)
    taken = process.memory_info().rss - before
    assert len(pool) * size == raw
    assert 0.9 * raw < taken < 1.2 * raw  # including copies cached by the interpreter
    assert raw < pool.nbytes < 1.05 * raw


# Interruptions ----------------------------------------------------------------------------------


def numbered(start: int, lengths: list[int]) -> TemporalDictTensor:
    number = torch.arange(start, start + sum(lengths))
    frame = (number[:, None] + torch.arange(4))[..., None]  # each is the previous one, shifted
    steps = {"number": number, "frame": frame, "_frame": frame + 1}
    return TemporalDictTensor.from_packed(steps, torch.tensor(lengths))


def is_whole(batch: Any) -> bool:
    frame = (batch["number"][:, None] + torch.arange(4))[..., None]
    return torch.equal(batch["frame"], frame) and torch.equal(batch["_frame"], frame + 1)


def test_an_interrupted_addition_leaves_complete_transitions_and_a_working_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE_S", 60.0)
    pool = Pool(pool_size=8, priority_exponent=1.0, seed=0, frame_stack=4)
    number, n_points, strike = 0, 0, Strike(0)
    while strike.has_struck or not n_points:
        pool.extend(numbered(number, [1] * 20))  # each with its own next value
        strike = Strike(7 * n_points, files=["/pool/"], signal_number=signal.SIGINT)
        with suppress(KeyboardInterrupt), strike:
            pool.extend(numbered(number + 20, [2, 3]))
        number += 25
        n_points += 1
        assert len(pool) == 8
        kept, batch = pool.transitions(), pool.sample(8)
        assert is_whole(kept)
        assert is_whole(batch)
        assert set(batch["number"].tolist()) == set(kept["number"].tolist())
    assert n_points > 20
