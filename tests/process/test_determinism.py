"""The same seeds give the same bits, and row i is episode i, whoever ran it.

For workers that take the same time see ``tests/property/test_against_loops.py``, for the seeds that
batchers share with nobody ``tests/unit/test_seeding.py``.
"""

from __future__ import annotations

import os
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import assert_all_equal

from rlpool import DictTensor, EpisodeBatcher

from support.fragile import FragileEnv, RecurrentAgent, create_fragile
from support.variants import variants

pytestmark = [pytest.mark.timeout(200), pytest.mark.promise("I2")]


class DawdlingEnv(FragileEnv):
    """Takes a time that no two processes agree about."""

    def step(self, action: Any) -> Any:
        time.sleep(0.004 * random.Random(f"{os.getpid()} {time.monotonic()}").random())
        return super().step(action)


def collect(n_threads: int, n_lanes: int = 3, kind: Any = FragileEnv, **options: Any) -> list[Any]:
    """Requests, some repeated, queued, larger than slots and with a new policy between them."""
    agent_info = DictTensor({"gain": torch.linspace(0.5, 2.0, 23)})
    env_info = DictTensor({"length": 1 + torch.arange(23) % 13})
    arguments = {"n_lanes": n_lanes, "kind": kind, "noted_in": options.pop("noted_in", None)}
    with EpisodeBatcher(
        4, 30, RecurrentAgent, {}, create_fragile, arguments, n_threads, 5, **options
    ) as batcher:
        batcher.execute(23, agent_info, env_info)
        batcher.reexecute()
        results = [batcher.get() for _ in range(2)]
        batcher.update(0.5)
        for n_episodes in (40, 1):
            batcher.execute(n_episodes)
            results.append(batcher.get())
    return results


serial = cache(lambda: collect(0))


@pytest.mark.parametrize(
    ("n_threads", "start_method", "kind"),
    variants([(3, "auto", DawdlingEnv)], [(4, "spawn", DawdlingEnv), (2, "auto", FragileEnv)]),
)
def test_any_number_of_workers_gives_the_same_bits(
    n_threads: int, start_method: str, kind: Any, tmp_path: Path
) -> None:
    options = {"kind": kind, "start_method": start_method, "noted_in": str(tmp_path)}
    assert_all_equal(collect(n_threads, **options), serial())
    n_resets = sum(len(path.read_text().split()) for path in tmp_path.iterdir())
    assert n_resets == 23 + 23 + 40 + 1 + 3 * n_threads  # every episode once, and trials of lanes
