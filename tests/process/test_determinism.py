"""The same seeds give the same bits, and row i is episode i, whoever ran it.

What holds within one process is in ``tests/property/test_against_loops.py``.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import assert_all_equal

from rlpool import Batcher, DictTensor, EpisodeBatcher

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


# The same for any number of workers -----------------------------------------------------------


@pytest.mark.parametrize(
    ("n_threads", "start_method", "kind"),
    variants(
        [(3, "auto", DawdlingEnv)],
        itertools.product((1, 2, 4), ("auto", "spawn"), (FragileEnv, DawdlingEnv)),
    ),
)
def test_any_number_of_workers_gives_the_same_bits(
    n_threads: int, start_method: str, kind: Any, tmp_path: Path
) -> None:
    options = {"kind": kind, "start_method": start_method, "noted_in": str(tmp_path)}
    assert_all_equal(collect(n_threads, **options), serial())
    n_resets = sum(len(path.read_text().split()) for path in tmp_path.iterdir())
    assert n_resets == 23 + 23 + 40 + 1 + 3 * n_threads  # every episode once, and trials of lanes


# Seeds ----------------------------------------------------------------------------------------


def seeds_and_noise(seeds: Any, n_threads: int = 0) -> tuple[list[int], torch.Tensor]:
    """Of 72 episodes and 16 windows of 10 steps."""
    options: dict[str, Any] = {"create_agent": RecurrentAgent, "create_env": create_fragile}
    options |= {"n_timesteps": 10, "env_args": {"n_lanes": 8}, "seeds": seeds}
    found, noise = [], []
    with EpisodeBatcher(n_slots=24, n_threads=n_threads, **options) as batcher:
        for _ in range(3):
            batcher.execute(24, env_info=DictTensor({"length": torch.full((24,), 10)}))
            found.append(batcher.get())
    with Batcher(n_threads=0, **options) as windows:
        for _ in range(2):
            windows.reset(env_info=DictTensor({"length": torch.full((8,), 10)}))
            windows.execute()
            found.append(windows.get())
    noise = [result["noise"].reshape(-1, 10) for result in found]
    return [seed for each in found for seed in each.info["seed"].tolist()], torch.cat(noise)


def test_no_two_base_seeds_share_an_episode_or_its_noise() -> None:
    # Fewer seeds than would have one twice by chance: 1,408 * 1,408 / 2 / 2**31 is 0.0005.
    lists: list[Any] = [[1, 2], [2, 1], [1, 3], [1], [1, 2, 0], None, None]
    given = [*range(9), *lists]
    found = [seeds_and_noise(seeds) for seeds in given]
    seeds = [seed for row, _ in found for seed in row]
    assert len(set(seeds)) == len(seeds) == 16 * 88
    assert all(0 <= seed < 2**31 for seed in seeds)
    numbers = torch.cat([noise for _, noise in found])
    assert 0.0 <= numbers.min() <= numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.01
    # Two numbers of 24 bits may be equal by chance; two in a row, of 12,672 pairs, hardly are.
    words = (numbers.double() * 2**24).long()
    pairs = Counter((words[:, :-1] * 2**24 + words[:, 1:]).flatten().tolist())
    assert max(pairs.values()) == 1
    assert seeds_and_noise([1, 2], n_threads=2)[0] == found[given.index([1, 2])][0]
