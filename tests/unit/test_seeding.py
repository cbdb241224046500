"""Seeds and noise: derived from the root alone, never overlapping, uniform."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rlpool.seeding import (
    LaneSeeds,
    NoiseStarts,
    NoiseStream,
    episode_seeds,
    fold_seed,
    probe_seed,
    root_from,
    stream_seed,
    worker_seed,
)


def start(stream: NoiseStream, lane: int, seed: int, step: int = 0) -> None:
    """Let a lane draw the numbers of the episode with this seed."""
    stream.start(lane, NoiseStarts([seed], stream.tensor.shape[1])[0], step)


def draws(seed: int, n_noise: int, n_steps: int) -> torch.Tensor:
    """The noise of one episode, ``[n_steps, n_noise]``."""
    stream = NoiseStream(1, n_noise)
    start(stream, 0, seed)
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


def test_an_episodes_seed_does_not_depend_on_how_many_were_asked_for() -> None:
    root = root_from(5)
    assert episode_seeds(root, 3, 10) == episode_seeds(root, 3, 1000)[:10]


def test_seeds_fit_into_a_non_negative_int64() -> None:
    seeds = episode_seeds(root_from(1), 0, 2000)
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    lanes = LaneSeeds(root_from(1), 0)
    assert all(0 <= lanes.seed(lane, 5) < 2**63 for lane in range(200))


def test_no_two_episodes_share_a_seed_for_base_seeds_0_to_99() -> None:
    seeds: list[int] = []
    for base in range(100):
        root = root_from(base)
        for execution in range(20):
            seeds += episode_seeds(root, execution, 50)
        for n_resets in range(3):
            lanes = LaneSeeds(root, n_resets)
            seeds += [lanes.seed(lane, k) for lane in range(8) for k in range(8)]
        seeds += [worker_seed(root, worker) for worker in range(8)]
        seeds.append(probe_seed(root))
    assert len(set(seeds)) == len(seeds)


def test_lane_seeds_depend_on_reset_lane_and_restart_alone() -> None:
    root = root_from(3)
    assert LaneSeeds(root, 2).seed(4, 1) == LaneSeeds(root, 2).seed(4, 1)
    assert LaneSeeds(root, 2).seed(4, 1) != LaneSeeds(root, 2).seed(1, 4)


def test_seeds_shortened_to_32_bits_keep_apart() -> None:
    seeds = episode_seeds(root_from(0), 0, 2000)
    folded = [fold_seed(seed) for seed in seeds]
    assert all(0 <= seed < 2**32 for seed in folded)
    assert len(set(folded)) == len(folded)
    assert fold_seed(7) == 7


def test_deriving_seeds_touches_no_global_generator() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]  # noqa: NPY002
    root = root_from(None)
    episode_seeds(root, 0, 10)
    draws(worker_seed(root, 0), 3, 10)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # type: ignore[index]  # noqa: NPY002


# Noise


def test_noise_is_uniform_in_the_half_open_unit_interval() -> None:
    numbers = torch.cat([draws(seed, 4, 250) for seed in episode_seeds(root_from(7), 0, 100)])
    assert numbers.dtype == torch.float32
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    flat = numbers.flatten().double()  # 100,000 numbers: a standard error of 0.0009
    assert abs(float(flat.mean()) - 0.5) < 0.005
    assert abs(float(flat.var()) - 1 / 12) < 0.001
    counts = torch.histc(flat, 20, 0.0, 1.0)  # 5,000 each, give or take 69
    assert (counts - 5000).abs().max() < 400


def test_noise_has_no_correlation_between_columns_steps_and_episodes() -> None:
    numbers = torch.stack([draws(seed, 3, 100) for seed in episode_seeds(root_from(1), 0, 200)])
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
    seeds = [
        seed
        for base in range(100)
        for execution in range(2)
        for seed in episode_seeds(root_from(base), execution, 3)
    ]
    everything = torch.cat([draws(seed, 4, 20) for seed in seeds])  # 96 bits per row
    assert torch.unique(everything, dim=0).shape == everything.shape


def test_streams_of_one_number_per_step_do_not_overlap() -> None:
    seeds = [seed for base in range(50) for seed in episode_seeds(root_from(base), 0, 4)]
    everything = torch.cat([draws(seed, 1, 70)[:, 0].unfold(0, 4, 1) for seed in seeds])
    assert torch.unique(everything, dim=0).shape == everything.shape


@pytest.mark.parametrize("n_noise", [1, 3])
def test_noise_depends_on_seed_and_step_and_not_on_lane_or_neighbours(n_noise: int) -> None:
    lengths = random.Random(n_noise)
    seeds = iter(episode_seeds(root_from(2), 0, 1000))
    stream = NoiseStream(4, n_noise)
    expected: list[list[list[float]]] = [[], [], [], []]
    for _ in range(400):
        for lane in range(4):
            if not expected[lane]:
                seed = next(seeds)
                start(stream, lane, seed)
                expected[lane] = draws(seed, n_noise, lengths.randint(1, 100)).tolist()
        stream.draw()
        assert stream.tensor.tolist() == [rows.pop(0) for rows in expected]


def test_a_stream_can_start_at_any_step() -> None:
    seed = episode_seeds(root_from(2), 0, 1)[0]
    whole = draws(seed, 3, 1100).tolist()
    stream = NoiseStream(2, 3)
    for step in (0, 1, 31, 32, 33, 999):
        start(stream, 1, seed, step)
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
    seeds = episode_seeds(root_from(9), 1, 300)
    starts = NoiseStarts(seeds, 2)
    stream = NoiseStream(1, 2)
    for episode in (299, 0, 63, 64, 65, 128, 1):
        stream.start(0, starts[episode])
        stream.draw()
        assert stream.tensor[0].tolist() == draws(seeds[episode], 2, 1)[0].tolist()


@pytest.mark.parametrize("n_noise", [1, 2, 7])
def test_the_most_significant_and_the_least_significant_bits_are_random(n_noise: int) -> None:
    numbers = torch.cat([draws(seed, n_noise, 200) for seed in episode_seeds(root_from(0), 0, 20)])
    words = (numbers.double() * 2**24).to(torch.int64)
    assert (words.double() == numbers.double() * 2**24).all()
    for bit in range(24):
        share = float(((words >> bit) & 1).double().mean())
        assert abs(share - 0.5) < 0.04, bit


def test_the_streams_of_an_episode_share_no_seed() -> None:
    seeds = {stream_seed(seed, stream) for seed in range(100) for stream in range(5)}
    assert len(seeds | set(range(100))) == 600
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(2**62 + 1, 3) == stream_seed(2**62 + 1, 3)
