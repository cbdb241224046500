"""Visible seeds are below 2**31, and episodes of one manager never share a seed."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from rlpool import DictTensor, ParallelEnvManager

from support.scripted import ScriptedEnv

pytestmark = pytest.mark.promise("I2")


def check_all_differ(seeds: list[int], n: int) -> None:
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) == len(seeds) == n


def seed_of(frame: Any) -> int:
    """Return the episode's seed according to an observation."""
    return int(frame) // 1024


def seeds_of_remote(remote: Any, n: int) -> list[int]:
    seeds = []
    for _ in range(n):
        remote.send(("reset", None))
        seeds.append(seed_of(remote.recv()[1]))
    return seeds


def test_environments_reset_by_hand_never_share_a_seed() -> None:
    """Restarting lanes, resets and remotes of one manager without a ``seed``."""
    seeds: list[int] = []
    action = DictTensor({"action": torch.zeros(3, dtype=torch.int64)})
    with ParallelEnvManager([partial(ScriptedEnv, "number")] * 3, auto_reset=True) as manager:
        for n_steps in (25, 0, 25):  # episodes have one to six steps
            observation, _ = manager.reset()
            seeds += map(seed_of, observation["frame"])
            for _ in range(n_steps):
                _, (observation, _) = manager.step(action)
                starts = observation["initial_state"].bool()
                seeds += map(seed_of, observation["frame"][starts])
        for remote in manager.remotes:
            seeds += seeds_of_remote(remote, 20)
        check_all_differ(seeds, len(seeds))
        runs = []
        for remote in manager.remotes[:2]:  # each continues from a given seed
            for given in (5, 2**62):
                remote.send(("seed", {"seed": given}))
                assert remote.recv() == ("done", None)
                runs.append(seeds_of_remote(remote, 10))
                check_all_differ(runs[-1], 10)
        assert runs[:2] == runs[2:]
        assert runs[0][0] == 5
