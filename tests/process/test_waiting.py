"""Waiting for results: with a timeout, for several batchers, by descriptors; no data is lost."""

from __future__ import annotations

import os
import selectors
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpool import (
    Batcher,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    SpecError,
    UsageError,
)
from rlpool.testing import CountingEnv

from support.agents import ConstantAgent

pytestmark = [pytest.mark.usefixtures("short_patience"), pytest.mark.timeout(120)]


class WaitingEnv(CountingEnv):
    """Environment that waits in its first step until a file exists."""

    def __init__(self, gate: Path) -> None:
        super().__init__(length=4)
        self.gate = gate

    def step(self, action: Any) -> Any:
        while not self.gate.exists():
            os.sched_yield()
        return super().step(action)


def create_waiting(seed: int, gate: Path) -> GymEnv:
    return GymEnv([WaitingEnv(gate)], seed)


def create_endless(seed: int, gate: Path) -> GymEnvInf:
    return GymEnvInf([WaitingEnv(gate)], seed)


def open_batcher(kind: Any, gate: Path, n_workers: int = 1) -> Any:
    create = create_endless if issubclass(kind, Batcher) else create_waiting
    arguments = 6, 8, ConstantAgent, {}, create, {"gate": gate}, n_workers, 3
    # The probing step that discovers the keys waits as well: let it pass.
    gate.touch()
    batcher = kind(*arguments)
    gate.unlink()
    if isinstance(batcher, Batcher):
        batcher.reset()
    return batcher


def request(batcher: Any) -> None:
    batcher.execute(*() if isinstance(batcher, Batcher) else (2,))


@pytest.mark.parametrize("kind", [EpisodeBatcher, Batcher])
def test_a_get_that_times_out_or_is_refused_loses_nothing(kind: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with open_batcher(kind, gate) as batcher:
        request(batcher)
        request(batcher)
        for timeout in (0, 0.05):
            with pytest.raises(TimeoutError):
                batcher.get(timeout=timeout)
        for timeout in (-1, "soon", float("nan")):
            with pytest.raises(SpecError, match="timeout"):
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


@pytest.mark.parametrize("n_workers", [0, 1])
def test_batchers_work_with_selectors(n_workers: int, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        open_batcher(EpisodeBatcher, gate, n_workers) as one,
        open_batcher(EpisodeBatcher, gate, n_workers) as other,
        selectors.DefaultSelector() as selector,
    ):
        waiting, n_ready = {one, other}, 0
        for batcher in (one, other):
            request(batcher)
            selector.register(batcher, selectors.EVENT_READ)
        gate.touch()
        while waiting:
            n_ready += len(selector.select(1.0))
            for batcher in list(waiting):
                if (result := batcher.get(blocking=False)) is not None:
                    assert len(result) == 2
                    waiting.remove(batcher)
                    selector.unregister(batcher)
        assert n_ready
    with pytest.raises(UsageError, match="closed"):
        one.fileno()


def test_a_window_reports_progress(tmp_path: Path) -> None:
    seen = []
    with open_batcher(Batcher, tmp_path / "gate") as batcher:
        request(batcher)
        assert batcher.progress == (0, 1)
        (tmp_path / "gate").touch()
        batcher.get(progress=lambda *call: seen.append(call))
        assert batcher.progress == (0, 0)
    assert seen[-1] == (1, 1)
    assert seen == sorted(seen)
