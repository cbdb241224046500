"""Seeds and noise: derived from the root alone, never overlapping, uniform."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import numpy as np
import pytest
import torch

from rlpool.seeding import (
    LaneSeeds,
    NoiseStarts,
    NoiseStream,
    episode_seeds,
    noise_keys,
    permuted,
    probe_seed,
    root_from,
    stream_seed,
    worker_seed,
)


def start(stream: NoiseStream, lane: int, key: int, step: int = 0) -> None:
    """Let a lane draw the numbers of the episode with this key."""
    starts = NoiseStarts(np.array([key], np.uint64), stream.tensor.shape[1])
    stream.start(lane, starts[0], step)


def keys_of(root: int, execution: int, n_episodes: int) -> list[int]:
    """The keys of the noise of an execution's episodes."""
    keys: list[int] = noise_keys(root, execution, n_episodes).tolist()
    return keys


def draws(key: int, n_noise: int, n_steps: int) -> torch.Tensor:
    """The noise of one episode, ``[n_steps, n_noise]``."""
    stream = NoiseStream(1, n_noise)
    start(stream, 0, key)
    rows = []
    for _ in range(n_steps):
        stream.draw()
        rows.append(stream.tensor[0].clone())
    return torch.stack(rows)


# Seeds


def test_the_same_seeds_give_the_same_root() -> None:
    assert root_from(42) == root_from(42)
    assert root_from([1, 2, 3]) == root_from((1, 2, 3))


def test_different_seeds_give_different_roots() -> None:
    seeds = [0, 1, 42, 43, 2**32, 2**63, [0], [1], [0, 0], [0, 1], [1, 0], [42], [42, 43], []]
    assert len({root_from(seed) for seed in seeds}) == len(seeds)


def test_no_seeds_give_fresh_roots() -> None:
    assert len({root_from(None) for _ in range(20)}) == 20


def test_roots_have_128_bits() -> None:
    roots = [root_from(seed) for seed in range(100)]
    assert all(0 <= root < 2**128 for root in roots)
    assert max(roots) > 2**120


@pytest.mark.parametrize("n_bits", [2, 3, 7, 12, 17])
def test_every_permutation_hits_every_number_once(n_bits: int) -> None:
    generator = random.Random(n_bits)
    numbers = np.arange(2**n_bits, dtype=np.uint64)
    for _ in range(20):
        keys = [generator.getrandbits(32) for _ in range(5)]
        assert sorted(permuted(numbers, keys, n_bits).tolist()) == numbers.tolist()


@pytest.mark.parametrize("first", [0, 2**31 - 3_000_000])
def test_five_million_episodes_of_a_batcher_have_different_seeds(first: int) -> None:
    seeds = np.array(episode_seeds(root_from(1), first, 5_000_000), np.int64)
    assert seeds.min() >= 0
    assert seeds.max() < 2**31
    assert (np.diff(np.sort(seeds)) > 0).all()  # np.unique takes ten times as long


def test_one_seed_is_found_as_all_are() -> None:
    root = root_from(5)
    seeds = episode_seeds(root, 1000, 50)
    assert [episode_seeds(root, 1000 + i, 1)[0] for i in range(50)] == seeds
    assert episode_seeds(root, 1010, 40) == seeds[10:]


def test_after_all_seeds_were_given_they_come_again() -> None:
    root = root_from(5)
    assert episode_seeds(root, 2**31 + 7, 3) == episode_seeds(root, 7, 3)
    assert episode_seeds(root, 2**31 - 2, 4)[2:] == episode_seeds(root, 0, 2)


def test_seeds_of_neighbouring_roots_have_nothing_in_common() -> None:
    n = 200_000
    seeds = [np.array(episode_seeds(root_from(base), 0, n)) for base in (42, 43, 44)]
    for one, other in itertools.combinations(seeds, 2):
        # n * n / 2**31 = 18.6 by chance, with a standard deviation of 4.3.
        assert len(np.intersect1d(one, other)) < 50
        for bit in range(31):
            differs = float((((one ^ other) >> bit) & 1).mean())
            assert abs(differs - 0.5) < 0.006, bit  # a standard deviation is 0.0011
    # Neither is one the other, shifted.
    steps = [set(np.diff(each)[:50_000].tolist()) for each in seeds]
    assert len(steps[0] & steps[1]) < 50


def test_seeds_are_spread_evenly_and_so_are_their_differences() -> None:
    seeds = np.array(episode_seeds(root_from(7), 0, 102_400), np.int64)
    for values in (seeds, np.diff(seeds) % 2**31, np.diff(seeds, 2) % 2**31):
        for part in (values >> 21, values & 1023):
            counts = np.bincount(part, minlength=1024)  # 100 each, give or take 10
            assert len(counts) == 1024
            # Chi-squared with 1023 degrees of freedom: a standard deviation is 45.
            assert ((counts - 100.0) ** 2 / 100).sum() < 1023 + 6 * 45


def test_lanes_that_restart_share_no_seed_between_lanes_restarts_and_resets() -> None:
    root, n_lanes = root_from(0), 15
    seeds = []
    n_restarts = 0
    for n_resets, most in enumerate((40, 0, 7, 500)):
        lanes = LaneSeeds(root, n_resets, n_restarts)
        for lane in range(n_lanes):
            seeds += [lanes.seed(lane, k) for k in range(most + 1)]
        n_restarts += most
    first = LaneSeeds(root, 0)
    seeds += [first.seed(lane, -k) for lane in range(n_lanes) for k in range(1, 501)]
    assert len(set(seeds)) == len(seeds) == n_lanes * (41 + 1 + 8 + 501 + 500)
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in seeds)


def test_a_hundred_thousand_episodes_of_restarting_lanes_share_no_seed() -> None:
    lanes = LaneSeeds(root_from(3), 0)
    seeds = {lanes.seed(lane, k) for lane in range(32) for k in range(4_000)}
    assert len(seeds) == 32 * 4_000  # of as many hashes four would be equal to others


def test_seeds_of_a_lane_do_not_depend_on_how_many_lanes_there_are() -> None:
    """As each lane begins in the middle of the largest gap that the others before it left."""
    lanes = LaneSeeds(root_from(3), 0)
    # Lane 1 begins at half of all numbers, lane 2 at a quarter, lane 3 at three quarters.
    for lane, begin in ((1, 2**30), (2, 2**29), (3, 3 * 2**29), (4, 2**28)):
        assert lanes.seed(lane, 0) == lanes.seed(0, begin)


def test_no_two_workers_share_a_seed() -> None:
    root = root_from(0)
    seeds = {worker_seed(root, worker) for worker in range(70_000)}
    assert len(seeds) == 70_000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert all(0 <= probe_seed(root_from(base)) < 2**31 for base in range(200))


def test_deriving_seeds_touches_no_global_generator() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]  # noqa: NPY002
    root = root_from(None)
    episode_seeds(root, 0, 10)
    draws(keys_of(root, 0, 1)[0], 3, 10)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # type: ignore[index]  # noqa: NPY002


# Noise


def test_noise_is_uniform_in_the_half_open_unit_interval() -> None:
    numbers = torch.cat([draws(key, 4, 250) for key in keys_of(root_from(7), 0, 100)])
    assert numbers.dtype == torch.float32
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    flat = numbers.flatten().double()  # 100,000 numbers: a standard error of 0.0009
    assert abs(float(flat.mean()) - 0.5) < 0.005
    assert abs(float(flat.var()) - 1 / 12) < 0.001
    counts = torch.histc(flat, 20, 0.0, 1.0)  # 5,000 each, give or take 69
    assert (counts - 5000).abs().max() < 400


def test_noise_has_no_correlation_between_columns_steps_and_episodes() -> None:
    numbers = torch.stack([draws(key, 3, 100) for key in keys_of(root_from(1), 0, 200)])
    centred = (numbers - 0.5).double()
    pairs = [
        (centred[:, :, 0], centred[:, :, 1]),
        (centred[:, :, 1], centred[:, :, 2]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[1:], centred[:-1]),
    ]
    for one, other in pairs:
        assert abs(float((one * other).mean()) * 12) < 0.03


def test_no_two_steps_of_any_episode_share_their_noise() -> None:
    keys = [
        key
        for base in range(100)
        for execution in range(2)
        for key in keys_of(root_from(base), execution, 3)
    ]
    everything = torch.cat([draws(key, 4, 20) for key in keys])  # 96 bits per row
    assert torch.unique(everything, dim=0).shape == everything.shape


def test_streams_of_one_number_per_step_do_not_overlap() -> None:
    keys = [key for base in range(50) for key in keys_of(root_from(base), 0, 4)]
    everything = torch.cat([draws(key, 1, 70)[:, 0].unfold(0, 4, 1) for key in keys])
    assert torch.unique(everything, dim=0).shape == everything.shape


@pytest.mark.parametrize("n_noise", [1, 3])
def test_noise_depends_on_key_and_step_and_not_on_lane_or_neighbours(n_noise: int) -> None:
    lengths = random.Random(n_noise)
    keys = iter(keys_of(root_from(2), 0, 1000))
    stream = NoiseStream(4, n_noise)
    expected: list[list[list[float]]] = [[], [], [], []]
    for _ in range(400):
        for lane in range(4):
            if not expected[lane]:
                key = next(keys)
                start(stream, lane, key)
                expected[lane] = draws(key, n_noise, lengths.randint(1, 100)).tolist()
        stream.draw()
        assert stream.tensor.tolist() == [rows.pop(0) for rows in expected]


def test_a_stream_can_start_at_any_step() -> None:
    key = keys_of(root_from(2), 0, 1)[0]
    whole = draws(key, 3, 1100).tolist()
    stream = NoiseStream(2, 3)
    for step in (0, 1, 31, 32, 33, 999):
        start(stream, 1, key, step)
        for ahead in range(70):
            stream.draw()
            assert stream.tensor[1].tolist() == whole[step + ahead]


def test_a_draw_rewrites_the_same_tensor() -> None:
    stream = NoiseStream(2, 3)
    before = stream.tensor.data_ptr()
    start(stream, 0, 1)
    start(stream, 1, 2)
    for _ in range(100):
        stream.draw()
    assert stream.tensor.data_ptr() == before


def test_the_noise_of_an_episode_does_not_depend_on_how_many_there_are() -> None:
    keys = noise_keys(root_from(9), 1, 300)
    starts = NoiseStarts(keys, 2)
    stream = NoiseStream(1, 2)
    for episode in (299, 0, 63, 64, 65, 128, 1):
        stream.start(0, starts[episode])
        stream.draw()
        assert stream.tensor[0].tolist() == draws(int(keys[episode]), 2, 1)[0].tolist()


@pytest.mark.parametrize("n_noise", [1, 2, 7])
def test_the_most_significant_and_the_least_significant_bits_are_random(n_noise: int) -> None:
    numbers = torch.cat([draws(key, n_noise, 200) for key in keys_of(root_from(0), 0, 20)])
    words = (numbers.double() * 2**24).to(torch.int64)
    assert (words.double() == numbers.double() * 2**24).all()
    for bit in range(24):
        share = float(((words >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 0.04, bit


def test_noise_does_not_depend_on_seeds() -> None:
    """Its keys are long, and stay different when seeds come again."""
    root = root_from(1)
    keys = keys_of(root, 0, 200_000) + keys_of(root, 1, 200_000)
    lanes = LaneSeeds(root, 0)
    keys += [lanes.noise_key(lane, k) for lane in range(16) for k in range(500)]
    assert len(set(keys)) == len(keys)
    assert 2**63 < max(keys) < 2**64
    again = 2**31  # restarts after which a lane has the same seed again
    assert lanes.seed(3, 5) == lanes.seed(3, 5 + again)
    assert lanes.noise_key(3, 5) != lanes.noise_key(3, 5 + again)


def test_noise_of_many_episodes_takes_little_memory() -> None:
    keys = noise_keys(root_from(4), 0, 200_000)
    starts = NoiseStarts(keys, 4)
    tracemalloc.start()
    try:
        for episode in range(0, len(keys), 37):
            starts[episode]
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 8 * 2**20  # 512 bytes * 4 per episode would be 400 MB
    assert most < 16 * 2**20


@pytest.mark.parametrize("n_noise", [1, 5, 300])
def test_noise_is_the_same_whatever_was_asked_for_before(n_noise: int) -> None:
    """Episodes are begun in any order, by lanes far apart, and again after a worker's death."""
    order = random.Random(n_noise)
    n_episodes = 20_000 if n_noise == 1 else 2_000
    keys = noise_keys(root_from(2), 3, n_episodes)
    starts = NoiseStarts(keys, n_noise)
    for _ in range(300):
        episode = order.choice([order.randrange(n_episodes), order.randrange(100)])
        alone = NoiseStarts(keys[episode : episode + 1], n_noise)[0]
        found = starts[episode]
        assert (found.start, found.stream) == (alone.start, alone.stream)
        assert (found.head == alone.head).all()


def test_the_streams_of_an_episode_share_no_seed() -> None:
    seeds = {stream_seed(seed, stream) for seed in range(100) for stream in range(5)}
    assert len(seeds | set(range(100))) == 600
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert stream_seed(2**30 + 1, 3) == stream_seed(2**30 + 1, 3)


def test_episodes_share_the_seeds_of_their_streams_as_little_as_their_own() -> None:
    assert len({stream_seed(seed, 1) for seed in range(100_000)}) == 100_000
