"""Seeds and noise: derived from the root alone, never overlapping, uniform."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
import torch

from rlpool.agents.noise import NoiseStarts, NoiseStream
from rlpool.errors import SpecError
from rlpool.seeding import (
    LaneSeeds,
    episode_seeds,
    noise_keys,
    permuted,
    probe_seed,
    root_from,
    stream_seed,
    task_draws,
    worker_seed,
)

pytestmark = pytest.mark.promise("I2")


def start(stream: NoiseStream, lane: int, key: int, step: int = 0) -> None:
    """Start a lane's noise for the episode with this key."""
    starts = NoiseStarts(np.array([key], np.uint64), stream.tensor.shape[1])
    stream.start(lane, starts[0], step)


def keys_of(root: int, first: int, n_episodes: int) -> list[int]:
    keys: list[int] = noise_keys(root, first, n_episodes).tolist()
    return keys


def draws(key: int, n_noise: int, n_steps: int) -> torch.Tensor:
    """Return the noise of one episode, ``[n_steps, n_noise]``."""
    stream = NoiseStream(1, n_noise)
    start(stream, 0, key)
    rows = []
    for _ in range(n_steps):
        stream.draw()
        rows.append(stream.tensor[0].clone())
    return torch.stack(rows)


# Seeds


def test_seeds_and_noise_are_the_same_in_every_version() -> None:
    """Later versions reproduce results."""
    root = root_from(42)
    assert root == 104182431639425325838241734009776227195
    assert episode_seeds(root, 5, 3) == [1565781270, 498888824, 1577621407]
    assert LaneSeeds(root, 1, 2).seed(3, 4) == 1802924032
    assert (worker_seed(root, 1), probe_seed(root), stream_seed(7, 1)) == (
        1913822611,
        1183114760,
        1849512955,
    )
    assert LaneSeeds(root, 1).noise(3, 4, 1).key == 18214513927852360015
    assert LaneSeeds(root, 1).noise(3, 1000, 1).key == 15968557816498006313
    assert task_draws(root, 1, 4, 10) == [6, 6, 5, 4]
    assert (draws(keys_of(root, 1, 3)[2], 2, 131)[-1] * 2**24).tolist() == [687914, 14999337]


def test_roots_are_equal_only_for_equal_seeds() -> None:
    seeds = [0, 1, 42, 43, 2**32, 2**63, [0], [1], [0, 0], [0, 1], [1, 0], [42], [42, 43], []]
    assert len({root_from(seed) for seed in seeds}) == len(seeds)
    assert root_from([1, 2, 3]) == root_from((1, 2, 3))
    assert root_from(np.int64(7)) == root_from(7)
    assert len({root_from(None) for _ in range(20)}) == 20
    for wrong in (-1, 1.5, "1", [1, -1], [None]):
        with pytest.raises(SpecError, match="a seed should be an int of at least 0"):
            root_from(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_bits", [2, 7])
def test_every_permutation_hits_every_number_once(n_bits: int) -> None:
    generator = random.Random(n_bits)
    numbers = np.arange(2**n_bits, dtype=np.uint64)
    for _ in range(20):
        keys = [generator.getrandbits(32) for _ in range(5)]
        assert sorted(permuted(numbers, keys, n_bits).tolist()) == numbers.tolist()


def test_a_million_episodes_have_distinct_seeds_until_all_are_used() -> None:
    root = root_from(1)
    first = 2**31 - 600_000
    seeds = np.array(episode_seeds(root, first, 1_000_000), np.int64)
    assert seeds.min() >= 0
    assert seeds.max() < 2**31
    assert (np.diff(np.sort(seeds)) > 0).all()  # np.unique takes ten times as long
    assert episode_seeds(root, first + 10, 40) == seeds[10:50].tolist()
    assert episode_seeds(root, 7, 3) == seeds[600_007:600_010].tolist()


def test_restarting_lanes_never_share_a_seed_across_lanes_restarts_and_resets() -> None:
    root, n_lanes = root_from(0), 15
    seeds = []
    n_restarts = 0
    for n_resets, most in enumerate((40, 0, 7, 4_000)):
        lanes = LaneSeeds(root, n_resets, n_restarts)
        for lane in range(n_lanes):
            seeds += [lanes.seed(lane, k) for k in range(most + 1)]
        n_restarts += most
    first = LaneSeeds(root, 0)
    seeds += [first.seed(lane, -k) for lane in range(n_lanes) for k in range(1, 501)]
    assert len(set(seeds)) == len(seeds)
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in seeds)


# Noise


def test_noise_is_uniform_and_uncorrelated() -> None:
    numbers = torch.stack([draws(key, 4, 250) for key in keys_of(root_from(7), 0, 100)]).double()
    assert 0.0 <= numbers.min() <= numbers.max() < 1.0
    # 100,000 numbers: a standard error of 0.0009
    assert abs(float(numbers.mean()) - 0.5) < 0.005
    counts = torch.histc(numbers.flatten(), 20, 0.0, 1.0)  # 5,000 each, give or take 69
    assert (counts - 5000).abs().max() < 400
    centred = numbers - 0.5  # [episode, step, column]
    pairs = [
        (centred[:, :, 0], centred[:, :, 1]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[1:], centred[:-1]),
    ]
    for one, other in pairs:
        assert abs(float((one * other).mean()) * 12) < 0.03


def test_noise_depends_on_key_and_step_and_not_on_lane_or_neighbours() -> None:
    n_noise = 3
    lengths = random.Random(n_noise)
    keys = iter(keys_of(root_from(2), 0, 1000))
    stream = NoiseStream(4, n_noise)
    storage = stream.tensor.data_ptr()
    running = [(0, [[0.0]], 1)] * 4  # key, numbers, steps drawn
    for _ in range(400):
        for lane, (key, rows, step) in enumerate(running):
            if step == len(rows):
                key = next(keys)
                rows = draws(key, n_noise, lengths.randint(1, 300)).tolist()
            elif lengths.random() < 0.95:
                continue
            if step >= len(rows) or lengths.random() < 0.5:
                step = lengths.randrange(len(rows))  # a stream can start at any step
            start(stream, lane, key, step)  # or continue where it was
            running[lane] = key, rows, step
        stream.draw()
        assert stream.tensor.tolist() == [rows[step] for _, rows, step in running]
        running = [(key, rows, step + 1) for key, rows, step in running]
    assert stream.tensor.data_ptr() == storage


def test_noise_does_not_depend_on_earlier_draws() -> None:
    """Episodes are begun in any order, by lanes far apart, and again after a worker's death."""
    n_noise, order = 5, random.Random(0)
    keys = noise_keys(root_from(2), 3, 2_000)
    starts = NoiseStarts(keys, n_noise)
    for _ in range(200):
        episode = order.choice([order.randrange(2_000), order.randrange(100)])
        alone = NoiseStarts(keys[episode : episode + 1], n_noise)[0]
        found = starts[episode]
        assert found.key == alone.key
        assert (found.head == alone.head).all()


@pytest.mark.parametrize("n_noise", [1, 300])
def test_noise_of_restarting_lanes_depends_on_the_key(n_noise: int) -> None:
    lanes = LaneSeeds(root_from(2), 1)
    for n_restarts in (0, 31, 32, 33, 5, 1000):
        key, head = lanes.noise(2, n_restarts, n_noise)
        assert head.tolist() == draws(int(key), n_noise, len(head)).tolist()


def test_noise_of_many_episodes_takes_little_memory() -> None:
    keys = noise_keys(root_from(4), 0, 60_000)
    starts = NoiseStarts(keys, 4)
    tracemalloc.start()
    for episode in range(0, len(keys), 37):
        starts[episode]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 8 * 2**20  # 512 bytes * 4 per episode would be 120 MB
