"""Environments that fail at random, and the resources that stress tests measure.

The data of an episode depends only on its seed, its ``env_info`` and the policy. The failures of
an environment do not: they are drawn from the system's entropy in each process, so that a rerun
episode does not fail again.
"""

from __future__ import annotations

import gc
import os
import random
import re
import resource
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from rlpool import DictTensor, GymEnv, GymEnvInf

from support import named_memory
from support.fragile import FragileEnv
from support.staying import stays

KINDS = ("raise", "sys_exit", "os_exit", "memory_error", "oom_kill")
"""How environments strike."""

HOG_BYTES = 128 * 2**20
"""What a memory hog takes."""

_PEACE_S = 1.0
"""No environment strikes sooner: a batcher checks what its workers hold when they are ready."""


class RoughEnv(FragileEnv):
    """Environment that fails at random times.

    Args:
        notes: Directory in which each process leaves a line per failure; none by default.
        mean_s: Mean seconds between two failures of an environment, 0 for never.
        sleep_s: Duration of a step.
    """

    def __init__(self, notes: str | None = None, mean_s: float = 0.0, sleep_s: float = 0.0) -> None:
        super().__init__()
        self._notes, self._mean_s, self._sleep_s = notes, mean_s, sleep_s
        self._chance = random.SystemRandom()
        self._next_s = self._draw()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._sleep_s)
        self._maybe_strike()
        return super().step(action)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._maybe_strike()
        return super().reset(seed=seed, options=options)

    def _draw(self) -> float:
        wait_s = self._chance.expovariate(1 / self._mean_s) if self._mean_s else float("inf")
        return time.monotonic() + _PEACE_S + wait_s

    def _maybe_strike(self) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = self._draw()
            kind = self._chance.choice(KINDS)
            assert self._notes is not None
            _note(self._notes, kind)
            _strike(kind)


def _note(directory: str, what: str) -> None:
    """Leave a line that outlives this process."""
    with open(Path(directory) / str(os.getpid()), "a") as file:
        file.write(f"{what}\n")


def noted(directory: str) -> Counter[str]:
    """Count how often environments were created and failed."""
    return Counter(word for path in Path(directory).iterdir() for word in path.read_text().split())


def _strike(kind: str) -> None:
    """Fail in the given way."""
    if kind in ("raise", "sys_exit"):
        raise {"raise": ValueError, "sys_exit": SystemExit}[kind]("struck")
    if kind == "os_exit":
        os._exit(9)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if kind == "memory_error":
        limit = psutil.Process().memory_info().vms + HOG_BYTES // 2
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        np.ones(HOG_BYTES, np.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    if kind == "oom_kill":
        os.kill(os.getpid(), signal.SIGKILL)


def create_rough(
    seed: int, n_lanes: int = 2, restarts: bool = False, notes: str | None = None, **env_args: Any
) -> GymEnv:
    """Create lanes of ``RoughEnv``."""
    if notes is not None:
        _note(notes, "created")
    envs = [RoughEnv(notes, **env_args) for _ in range(n_lanes)]
    return (GymEnvInf if restarts else GymEnv)(envs, seed)


def parameters(number: int) -> torch.Tensor:
    """Return a policy."""
    return torch.full((10_000,), number % 7 / 7)


def infos(n_rows: int, number: int) -> dict[str, DictTensor]:
    """Return infos derived from a number: one episode in ten is long."""
    generator = torch.Generator().manual_seed(number)
    length = torch.randint(1, 15, (n_rows,), generator=generator)
    length[torch.rand(n_rows, generator=generator) < 0.1] = 60
    gain = 1 + torch.rand(n_rows, generator=generator)
    return {"env_info": DictTensor({"length": length}), "agent_info": DictTensor({"gain": gain})}


# Resources --------------------------------------------------------------------------------------


def workers() -> list[psutil.Process]:
    """Return the children of this process, except those that live as long as it does."""
    return [p for p in psutil.Process().children(recursive=True) if not stays(p)]


def held() -> Counter[str]:
    """Return the resources that this process holds, after garbage collection."""
    gc.collect()
    return Counter(
        {
            "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # one belongs to the listing
            "threads": psutil.Process().num_threads(),
            "processes": len(workers()),
            **Counter(re.findall(r"memfd:rlpool\S*", Path("/proc/self/maps").read_text())),
            **dict.fromkeys(named_memory.names(), 1),
        }
    )
