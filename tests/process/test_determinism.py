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

from rlpool import Batcher, DictTensor, EpisodeBatcher, TemporalDictTensor

from support.faults import create_agent, create_env
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
    arguments = {"n_lanes": n_lanes, "kind": kind}
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
    n_threads: int, start_method: str, kind: Any
) -> None:
    assert_all_equal(collect(n_threads, kind=kind, start_method=start_method), serial())


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


# Row i is episode i, exactly once -------------------------------------------------------------


def assert_rows(result: TemporalDictTensor, env_info: DictTensor) -> None:
    """Compare every value with what it must be."""
    lengths = env_info["length"]
    n, longest = len(lengths), int(lengths.max())
    assert result.info["episode"].tolist() == list(range(n))
    assert torch.equal(result.info["env_info/id"], env_info["id"])
    assert torch.equal(result.lengths, lengths)
    step = torch.arange(longest).expand(n, longest)
    inside, last = step < lengths[:, None], step == lengths[:, None] - 1
    identity = env_info["id"][:, None].expand(n, longest)
    expected = {
        "frame": torch.stack([identity, step], -1) * inside[..., None],
        "_frame": torch.stack([identity, step + 1], -1) * inside[..., None],
        "reward": step * inside,
        "_reward": (step + 1) * inside,
        **dict.fromkeys(("done", "_truncated", "_initial_state"), torch.zeros(n, longest)),
        **dict.fromkeys(("_done", "_terminated"), last),
        "initial_state": (step == 0) & inside,
        **dict.fromkeys(("action", "_last_action"), inside),
        "last_action": (step > 0) & inside,
    }
    for key, values in expected.items():
        assert torch.equal(result[key].double(), values.double()), key


@pytest.mark.promise("I1")
@pytest.mark.parametrize(
    ("n_threads", "n_lanes", "n_slots"), variants([(2, 3, 7)], [(1, 1, 2), (2, 3, 7), (3, 2, 6)])
)
def test_row_i_is_episode_i_exactly_once(
    n_threads: int, n_lanes: int, n_slots: int, tmp_path: Path
) -> None:
    rng, ids = random.Random(n_threads), itertools.count(1)
    asked: list[DictTensor] = []
    env_args = {"n_lanes": n_lanes, "ran_in": str(tmp_path)}
    with EpisodeBatcher(
        4, n_slots, create_agent, {}, create_env, env_args, n_threads=n_threads, seeds=1
    ) as batcher:
        for number in range(30):
            for _ in range(rng.randint(1, 3)):
                lengths = [rng.choice([1, 2, 3, 4, 5, 9, 30]) for _ in range(rng.randint(1, 20))]
                columns = {"length": lengths, "id": [next(ids) for _ in lengths]}
                columns["sleep_ms"] = [int(number > 26)] * len(lengths)
                info = DictTensor({key: torch.tensor(values) for key, values in columns.items()})
                batcher.execute(len(lengths), env_info=info)
                asked.append(info)
                if rng.random() < 0.7:
                    assert_rows(batcher.get(), asked.pop(0))
        while asked:
            assert_rows(batcher.get(), asked.pop(0))
    begun = Counter(line for path in tmp_path.iterdir() for line in path.read_text().split())
    assert set(begun.values()) == {1}
