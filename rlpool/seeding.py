"""Derivation of all random numbers from one root seed, by episode and step.

Nothing here depends on the clock or on the worker that runs an episode, so the same root gives the
same data for any number of workers::

    seeds=...      -> root_from     -> the root, 128 bits
    root, purpose  -> _seed_keys    -> a permutation of all seeds, some of them numbered by purpose
        EPISODE_SEEDS   number of the episode in the batcher's life     -> env.reset(seed=)
        LANE_SEEDS      lane and number of the restart                  -> env.reset(seed=)
        WORKERS         number of the worker                            -> create_env, agent.seed
        PROBES          0                                               -> the reset of a probe
        STREAMS         seed of an episode, for a further generator
    root, purpose  -> _derive       -> two words of 64 bits, hashed with a number into keys of noise
        EPISODES, LANES, and the task of a rollout: TASKS; EVALUATIONS: another root

**Seeds** are for environments, agents and users. They are below 2**31, because ``np.random.seed``,
``RandomState`` and simulators in C accept no more. Among so few numbers hashes collide: with 65,000
of them, two are equal in every other run. So a batcher numbers its episodes for as long as it
lives, and the root selects a permutation of all seeds that maps numbers to seeds. (With
``root + number``, the roots 42 and 43 would share all seeds but one.)

**Noise** is rlpool's own. Its keys are 64-bit hashes of the root and of the same episode number,
regardless of requests: they do not depend on seeds, and episodes with the same seed have
different noise.

References:
    Kensler, "Correlated multi-jittered sampling", Pixar technical memo 13-01, 2013, section 5: a
    permutation composed of cheap, invertible steps.
    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16:
    the hash, which is the finaliser of SplitMix64.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch

from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number

Words = np.ndarray[Any, np.dtype[Any]]

Seeding = Literal["episode", "request"]
"""Unit of seeding: each lane, or all lanes of a request; see ``VectorGymEnv``."""

SEEDINGS: tuple[Seeding, ...] = get_args(Seeding)

N_SEEDS = 2**31
"""Seeds are in ``[0, N_SEEDS)``."""

MOST_NAMED_SEEDS = 10**7
"""Limit per request, as each seed is checked and sent to every worker."""

NOISE_CHUNK = 128
"""Steps of noise computed at once: enough that lanes seldom need the next chunk."""

_LANE_NUMBERS = 2**12  # noise computed at once for a lane that restarts: 16 KiB
_MAX_LANES = 2**12  # lanes whose noise is cached: 64 MiB

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: a full-period increment
_MIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_STREAM_SALT = np.uint64(0xD1B54A32D192ED03)  # separates noise from the seeds
_START_SALT = np.uint64(0x8CB92BA72F3D8DD7)
_NOISE_BITS = 24  # precision of float32 in [0, 1)
_NOISE_SHIFT = np.uint64(64 - _NOISE_BITS)
_NOISE_UNIT = np.float32(2.0**-_NOISE_BITS)

_SEED_BITS = N_SEEDS.bit_length() - 1
_PERMUTATION_ROUNDS = 5  # with four, differences of neighbours are already uniform
_PERMUTATION_FACTORS = (0x85EBCA6B, 0xC2B2AE35)  # of MurmurHash3's finaliser: odd


class Purpose(IntEnum):
    """Purposes of derived numbers: the first word of a spawn key."""

    EPISODES = 0
    LANES = 1
    WORKERS = 2
    PROBES = 3
    STREAMS = 4
    TASKS = 5
    EPISODE_SEEDS = 6
    LANE_SEEDS = 7
    EVALUATIONS = 8


_Numbers = TypeVar("_Numbers", int, Words)


def root_from(seeds: int | Sequence[int] | None) -> int:
    """Hash the user's ``seeds`` into one root of 128 bits.

    Args:
        seeds: A non-negative int, a sequence of them, or ``None`` for fresh entropy.

    Raises:
        SpecError: For anything else.
    """
    if seeds is None:
        return secrets.randbits(128)
    # A list differs from an int, [7] from 7, since its length is part of the hash.
    is_list = isinstance(seeds, Sequence)
    each = seeds if isinstance(seeds, Sequence) else [seeds]
    words = [2, len(each)] if is_list else [1]
    words += [whole_number("a seed", seed, 0) for seed in each]
    return int.from_bytes(np.random.SeedSequence(words).generate_state(4).tobytes(), "little")


def evaluation_root(seed: int) -> int:
    """Return the root of an evaluation, which shares no stream with a batcher of the same seed.

    An evaluation on the episodes of training would say little about others.

    Args:
        seed: The user's seed, a non-negative int.
    """
    return int.from_bytes(_derive(root_from(seed), Purpose.EVALUATIONS).tobytes(), "little")


def permuted(numbers: _Numbers, keys: Sequence[int], n_bits: int = _SEED_BITS) -> _Numbers:
    """Permute the numbers below ``2**n_bits``.

    Every step is invertible: adding, multiplying by an odd number modulo a power of two, and
    xoring a number with its own upper half.

    Args:
        numbers: An int, or uint64 of any shape; larger ones are taken modulo ``2**n_bits``.
        keys: Select the permutation, one int below 2**32 per round.
        n_bits: From 2 to 31.
    """
    mask, half = (1 << n_bits) - 1, (n_bits + 1) // 2
    for key, factor in zip(keys, itertools.cycle(_PERMUTATION_FACTORS)):
        numbers = (numbers + key) & mask
        numbers = ((numbers ^ (numbers >> half)) * (factor & mask)) & mask
    result: _Numbers = numbers ^ (numbers >> half)
    return result


def episode_seeds(root: int, first: int, n_episodes: int) -> list[int]:
    """Return seeds of consecutive episodes below ``2**31``, distinct for 2**31 episodes of a root.

    Args:
        root: The root.
        first: Number of the first episode, that is, of episodes requested before.
        n_episodes: Number of episodes.
    """
    numbers = np.arange(n_episodes, dtype=np.uint64) + np.uint64(first % N_SEEDS)
    seeds: list[int] = permuted(numbers, _seed_keys(root, Purpose.EPISODE_SEEDS)).tolist()
    return seeds


def checked_seeds(seeds: Any, n_episodes: int | None) -> list[int]:
    """Convert the user's ``episode_seeds`` to ints.

    Args:
        seeds: A sequence or a 1-d array of ints.
        n_episodes: Required number of seeds; ``None`` for any number but 0.

    Raises:
        SpecError: For a wrong number of seeds, and for seeds that are not below ``N_SEEDS``.
    """
    is_list = isinstance(seeds, Sequence | np.ndarray | torch.Tensor)
    if not is_list or isinstance(seeds, str | bytes) or getattr(seeds, "ndim", 1) == 0:
        message = f"episode_seeds should be a list of ints, got {seeds!r:.60}"
        raise SpecError(message, fix="name one seed per episode")
    if len(seeds[MOST_NAMED_SEEDS : MOST_NAMED_SEEDS + 1]):  # a range may have more than len() says
        message = f"episode_seeds has more than {MOST_NAMED_SEEDS:,} seeds"
        raise SpecError(message, fix="name fewer in a request")
    if not len(seeds) or n_episodes not in (None, len(seeds)):
        message = f"episode_seeds has {len(seeds)} seeds for {n_episodes or 'some'} episodes"
        raise SpecError(message, fix="name one seed per episode")
    checked = [whole_number(f"episode_seeds[{i}]", seed, 0) for i, seed in enumerate(seeds)]
    if max(checked) >= N_SEEDS:
        message = f"episode_seeds[{checked.index(max(checked))}] is {max(checked)}, not below 2**31"
        raise SpecError(message, fix="choose smaller ones: simulators in C accept no more")
    return checked


def noise_keys(root: int, first: int, n_episodes: int) -> Words:
    """Return keys of the noise of consecutive episodes: uint64 ``[n_episodes]``.

    Args:
        root: The root.
        first: Number of the first episode, that is, of episodes requested before.
        n_episodes: Number of episodes.
    """
    return _hashes(root, Purpose.EPISODES, 0, n_episodes, first)


def task_draws(root: int, collection: int, n_rollouts: int, n_tasks: int) -> list[int]:
    """Return the task of each rollout of a collection, int in ``[0, n_tasks)``."""
    draws = _hashes(root, Purpose.TASKS, collection, n_rollouts) % np.uint64(n_tasks)
    return list(map(int, draws))


_lane_noise: dict[tuple[int, int], tuple[tuple[int, int, int], Words, Words]] = {}
"""Cache by lane and numbers per step: the block of restarts that a lane is in, with the keys of
their noise and its first steps."""


class LaneSeeds:
    """Seeds of lanes that restart on their own, counted from one ``reset``.

    A lane numbers its episodes consecutively, and after a reset continues past all numbers that it
    can have used before. Lane *k* begins at the reversed bits of *k*, read as a fraction of all
    numbers: it has half of the largest gap to itself, for any number of lanes before and after it.
    So the seeds of a lane depend neither on the number of workers nor on the number of lanes, and
    among L lanes (rounded up to a power of two) no two episodes share a seed before a lane has made
    ``2**31 / L`` restarts and resets.

    Args:
        root: The root.
        n_resets: Number of the ``reset``, 0-based.
        n_restarts: Maximum number of restarts of any lane before this ``reset``, in total.
    """

    def __init__(self, root: int, n_resets: int, n_restarts: int = 0) -> None:
        self._noise_key, self._noise_salt = _derive(root, Purpose.LANES, n_resets).tolist()
        self._seed_keys = _seed_keys(root, Purpose.LANE_SEEDS)
        self._first = n_resets + n_restarts

    def seed(self, lane: int, n_restarts: int) -> int:
        """Seed of a lane's ``n_restarts``-th episode since the reset, in ``[0, 2**31)``.

        Args:
            lane: Number of the lane across all workers.
            n_restarts: 0 for the first episode after the reset; negative numbers count backwards
                from there, into the gap that the previous lane reaches last.
        """
        begin = int(f"{lane:0{_SEED_BITS}b}"[::-1], 2)
        return permuted(begin + self._first + n_restarts, self._seed_keys)

    def noise(self, lane: int, n_restarts: int, n_noise: int) -> NoiseStart:
        """Return noise of that episode, ``n_noise`` numbers per step."""
        n_at_once = max(_LANE_NUMBERS // (NOISE_CHUNK * n_noise), 1)
        block, row = divmod(n_restarts, n_at_once)
        derived_from = self._noise_key, self._noise_salt, block
        kept = _lane_noise.get((lane, n_noise))
        if kept is None or kept[0] != derived_from:
            word = mix64_inplace_(np.array([self._noise_key ^ lane], np.uint64))
            first = mix64_inplace_(word ^ np.uint64(self._noise_salt))
            numbers = np.arange(n_at_once, dtype=np.uint64) + np.uint64(block * n_at_once)
            keys = mix64_inplace_(first + numbers)
            kept = derived_from, keys, noise_chunks(keys, 0, n_noise)
            if n_at_once > 1:  # otherwise it is used only once
                if len(_lane_noise) == _MAX_LANES:
                    _lane_noise.clear()
                _lane_noise[lane, n_noise] = kept
        _, keys, heads = kept
        return NoiseStart(keys[row], heads[row])


lane_seeds = functools.lru_cache(maxsize=64)(LaneSeeds)
"""``LaneSeeds``, shared by all windows since a reset."""


def seed_from(seed: int) -> int:
    """Return a user's seed for an environment: unchanged below 2**31, hashed above."""
    return seed if seed < N_SEEDS else worker_seed(root_from(seed), 0)


def worker_seed(root: int, worker: int) -> int:
    """Seed for ``create_env``, ``agent.seed`` and a worker's global generators, below 2**31.

    Only these numbers depend on the worker: they seed generators outside of rlpool's control, where
    equal seeds would make all workers draw the same numbers.
    """
    return permuted(worker, _seed_keys(root, Purpose.WORKERS))


def probe_seed(root: int) -> int:
    """Seed of the reset that determines the keys of observations; its data is dropped."""
    return permuted(0, _seed_keys(root, Purpose.PROBES))


def stream_seed(seed: int, stream: int) -> int:
    """Seed of a further generator of an episode, in ``[0, 2**31)``.

    With the episode's own seed, it would draw the same numbers as the environment. Distinct seeds
    give distinct ones.

    Args:
        seed: The episode's seed.
        stream: Number of the generator.
    """
    return permuted(seed, _seed_keys(stream, Purpose.STREAMS))


class NoiseStart(NamedTuple):
    """The noise of one episode, with its first steps computed.

    Attributes:
        key: Key from which all of it derives.
        head: float32 ``[NOISE_CHUNK, n_noise]``.
    """

    key: np.uint64
    head: Words


def noise_chunks(keys: Words, steps: Any, n_noise: int) -> Words:
    """Compute noise float32 ``[E, NOISE_CHUNK, n_noise]`` of E episodes, each from a given step."""
    keys = keys.reshape(-1, 1)
    first = np.asarray(steps, np.uint64).reshape(-1, 1) * np.uint64(n_noise)
    words = first + np.arange(NOISE_CHUNK * n_noise, dtype=np.uint64)  # the counters
    words *= _GOLDEN
    words = words + mix64_inplace_(keys ^ _START_SALT)
    # The stream separates episodes whose counters are close.
    words ^= mix64_inplace_(keys ^ _STREAM_SALT)
    mix64_inplace_(words)
    words >>= _NOISE_SHIFT
    numbers: Words = words.astype(np.float32)
    numbers *= _NOISE_UNIT
    return numbers.reshape(-1, NOISE_CHUNK, n_noise)


@functools.lru_cache(maxsize=64)
def _seed_keys(root: int, purpose: int) -> tuple[int, ...]:
    """Return keys of a permutation; cached, since every request of a batcher needs the same."""
    sequence = np.random.SeedSequence(root, spawn_key=(purpose,))
    return tuple(sequence.generate_state(_PERMUTATION_ROUNDS).tolist())


@functools.lru_cache(maxsize=64)
def _derive(root: int, *path: int) -> Words:
    """Derive two words for a path below the root; cached, since windows need the same."""
    words: Words = np.random.SeedSequence(root, spawn_key=path).generate_state(2, np.uint64)
    words.flags.writeable = False
    return words


def _hashes(root: int, purpose: int, number: int, n: int, start: int = 0) -> Words:
    """Hash ``n`` uint64 words, from the ``start``-th on, for request ``number`` of a purpose."""
    key, salt = _derive(root, purpose, number)
    return mix64_inplace_(
        mix64_inplace_(key + np.arange(start, start + n, dtype=np.uint64) * _GOLDEN) ^ salt
    )


def mix64_inplace_(words: Words) -> Words:
    """Apply the finaliser of SplitMix64 to uint64 of any shape, in place; returns the words."""
    shifted = words >> np.uint64(30)
    for factor, shift in zip(_MIX_FACTORS, (27, 31), strict=True):
        words ^= shifted
        words *= np.uint64(factor)
        np.right_shift(words, np.uint64(shift), out=shifted)
    words ^= shifted
    return words
