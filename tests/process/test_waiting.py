"""Waiting for results: with a limit, for several batchers, by descriptors; nothing gets lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import (
    Batcher,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    SpecError,
    TemporalDictTensor,
    UsageError,
)
from rlpool.testing import CountingEnv

from support.agents import ConstantAgent

pytestmark = [pytest.mark.usefixtures("short_patience"), pytest.mark.timeout(120)]

KINDS = [EpisodeBatcher, Batcher]


class WaitingEnv(CountingEnv):
    """Waits in its first step until a file is there."""

    def __init__(self, gate: str) -> None:
        super().__init__(length=4)
        self.gate = Path(gate)

    def step(self, action: Any) -> Any:
        while not self.gate.exists():
            os.sched_yield()
        return super().step(action)


def create_waiting(seed: int, gate: str) -> GymEnv:
    return GymEnv([WaitingEnv(gate)], seed)


def create_endless(seed: int, gate: str) -> GymEnvInf:
    return GymEnvInf([WaitingEnv(gate)], seed)


def open_batcher(kind: Any, gate: Path, n_workers: int = 1) -> Any:
    create = create_endless if issubclass(kind, Batcher) else create_waiting
    arguments = 6, 8, ConstantAgent, {}, create, {"gate": str(gate)}, n_workers, 3
    # The trial step that tells the keys waits as well: let that pass.
    gate.touch()
    batcher = kind(*arguments)
    gate.unlink()
    if isinstance(batcher, Batcher):
        batcher.reset()
    return batcher


def request(batcher: Any) -> None:
    batcher.execute(*() if isinstance(batcher, Batcher) else (2,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_get_that_takes_too_long_loses_nothing(kind: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with open_batcher(kind, gate) as batcher:
        request(batcher)
        request(batcher)
        for timeout in (0, 0.05):
            with pytest.raises(TimeoutError, match="the result is not there after"):
                batcher.get(timeout=timeout)
        gate.touch()
        results = [batcher.get(timeout=60) for _ in range(2)]
        assert batcher.n_pending == 0
    with open_batcher(kind, gate) as batcher:
        gate.touch()
        request(batcher)
        request(batcher)
        for result in results:
            assert torch.equal(result["frame"], batcher.get()["frame"])


def test_a_timeout_that_is_none_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    with open_batcher(Batcher, tmp_path / "gate") as batcher:
        request(batcher)
        (tmp_path / "gate").touch()
        for timeout in (-1, "soon", float("nan")):
            with pytest.raises(SpecError, match="timeout should be a number"):
                batcher.get(timeout=timeout)
        assert len(batcher.get(timeout=60)) == 1


@pytest.mark.parametrize("n_workers", [0, 1])
def test_selectors_wait_for_a_batcher(n_workers: int, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with open_batcher(EpisodeBatcher, gate, n_workers) as batcher, selectors.DefaultSelector() as s:
        gate.touch()
        request(batcher)
        s.register(batcher, selectors.EVENT_READ)
        while (result := batcher.get(blocking=False)) is None:
            s.select(1.0)
        assert len(result) == 2
        batcher.close()
        s.unregister(batcher)
    with pytest.raises(UsageError, match="closed"):
        batcher.fileno()


async def result_of(batcher: Any) -> TemporalDictTensor:
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(batcher.fileno(), arrived.set)
    try:
        while (result := batcher.get(blocking=False)) is None:
            arrived.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(arrived.wait(), timeout=1.0)
        return result
    finally:
        loop.remove_reader(batcher.fileno())


def test_asyncio_awaits_two_batchers(tmp_path: Path) -> None:
    async def both() -> None:
        request(one)
        request(other)
        gate.touch()
        for result in await asyncio.gather(result_of(one), result_of(other)):
            assert len(result) == 2

    gate = tmp_path / "gate"
    with open_batcher(EpisodeBatcher, gate) as one, open_batcher(EpisodeBatcher, gate) as other:
        asyncio.run(both())


def test_a_window_has_progress_and_its_batcher_says_what_it_is(tmp_path: Path) -> None:
    seen = []
    with open_batcher(Batcher, tmp_path / "gate") as batcher:
        request(batcher)
        assert repr(batcher) == "Batcher(n_workers=1, n_lanes=1, n_pending=1, open)"
        assert batcher.progress == (0, 1)
        (tmp_path / "gate").touch()
        batcher.get(progress=lambda *call: seen.append(call))
        assert batcher.progress == (0, 0)
    assert seen[-1] == (1, 1)
    assert np.all(np.diff([done for done, _ in seen]) >= 0)
    assert repr(batcher) == "Batcher(closed)"
