"""From one root seed to every random number: root, execution, episode, step.

Nothing here depends on a worker, a lane or the clock, so that the same root gives the same data
for any number of workers. Seeds are hashed, never added up: with ``seed + k`` the base seeds 42
and 43 would share all but one of their streams.

The mixing function is the finaliser of SplitMix64.

Reference:
    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Words = np.ndarray[Any, np.dtype[np.uint64]]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: a full-period increment
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_SEED_MASK = np.uint64(2**63 - 1)  # seeds fit into a non-negative int64
_STREAM_SALT = np.uint64(0xD1B54A32D192ED03)  # keeps noise apart from the seeds themselves
_START_SALT = np.uint64(0x8CB92BA72F3D8DD7)
_WORD_MASK = 2**64 - 1
_NOISE_BITS = 24  # all that float32 can hold of a number in [0, 1)
_NOISE_SHIFT = np.uint64(64 - _NOISE_BITS)
_NOISE_UNIT = np.float32(2.0**-_NOISE_BITS)
# NumPy scalars made once: making them anew costs as much as the operations on a few lanes.
_ROUNDS = ((np.uint64(30), _MIX_A), (np.uint64(27), _MIX_B))
_LAST_SHIFT = np.uint64(31)

# First word of a spawn key: what the derived words are for.
_EPISODES, _LANES, _WORKERS, _PROBES = range(4)


def root_from(seeds: int | Sequence[int] | None) -> int:
    """Hash the user's ``seeds`` into one root of 128 bits.

    Args:
        seeds: A non-negative int, a sequence of them, or ``None`` for fresh entropy.
    """
    if seeds is None:
        return secrets.randbits(128)
    # A list is told apart from an int, [7] from 7: their lengths are part of the hash.
    words = [1, int(seeds)] if isinstance(seeds, int) else [2, len(seeds), *map(int, seeds)]
    low, high = np.random.SeedSequence(words).generate_state(2, np.uint64).tolist()
    return (high << 64) | low


def episode_seeds(root: int, execution: int, n_episodes: int) -> list[int]:
    """Seeds of the episodes of one ``execute``, each in ``[0, 2**63)``."""
    key, salt = _derive(root, _EPISODES, execution)
    mixed = _mix(_mix(key + np.arange(n_episodes, dtype=np.uint64) * _GOLDEN) ^ salt)
    seeds: list[int] = (mixed & _SEED_MASK).tolist()
    return seeds


class LaneSeeds:
    """Seeds of lanes that restart on their own: one stream per lane since one ``reset``.

    Args:
        root: The root.
        n_resets: Number of the ``reset``, 0-based.
    """

    def __init__(self, root: int, n_resets: int) -> None:
        self._key, self._salt = _derive(root, _LANES, n_resets).tolist()

    def seed(self, lane: int, n_restarts: int) -> int:
        """Seed of a lane's ``n_restarts``-th episode since the reset, in ``[0, 2**63)``."""
        return _mix_int(_mix_int(_mix_int(self._key ^ lane) ^ self._salt) + n_restarts) >> 1


def worker_seed(root: int, worker: int) -> int:
    """Seed for ``create_env``, ``agent.seed`` and a worker's global generators.

    The only numbers that depend on the worker: they serve what draws outside the library's
    control, where equal seeds would make all workers draw the same.
    """
    return int(_derive(root, _WORKERS, worker)[0] & _SEED_MASK)


def probe_seed(root: int) -> int:
    """Seed of the reset that tells a worker which keys there are; its data are dropped."""
    return int(_derive(root, _PROBES)[0] & _SEED_MASK)


def fold_seed(seed: int) -> int:
    """Shorten a seed to 32 bits, for ``env.seed(...)`` of old environments."""
    return (seed ^ (seed >> 32)) & 0xFFFFFFFF


NoiseKey = tuple[int, int]
"""Where an episode's noise starts: its counter, and what the counter is xored with.

The second word keeps streams apart whose counters happen to come close.
"""


def noise_keys(seeds: Sequence[int]) -> list[NoiseKey]:
    """The noise keys of many episodes."""
    words = np.asarray(seeds, np.uint64)
    starts, streams = _mix(words ^ _START_SALT).tolist(), _mix(words ^ _STREAM_SALT).tolist()
    return list(zip(starts, streams, strict=True))


class NoiseStream:
    """The noise of a batch of lanes, one row of ``n_noise`` numbers per lane and step.

    Counter-based: the numbers of step t depend on the episode's seed and on t alone.

    Args:
        n_lanes: Number of lanes B.
        n_noise: Numbers per lane and step.

    Attributes:
        tensor: float32 ``[B, n_noise]``, uniform in [0, 1), rewritten by every ``draw``.
    """

    def __init__(self, n_lanes: int, n_noise: int) -> None:
        self.tensor = torch.zeros(n_lanes, n_noise)
        self._numbers = self.tensor.numpy()
        self._counters = np.zeros((n_lanes, n_noise), np.uint64)
        self._streams = np.zeros((n_lanes, 1), np.uint64)
        self._words = np.zeros_like(self._counters)
        self._scratch = np.zeros_like(self._counters)
        self._columns = np.arange(n_noise, dtype=np.uint64) * _GOLDEN
        self._stride = np.asarray([n_noise], np.uint64) * _GOLDEN

    def start(self, lane: int, key: NoiseKey, step: int = 0) -> None:
        """Let a lane draw the numbers of an episode from ``step`` on."""
        start, stream = key
        np.add(self._columns, np.uint64(start), out=self._counters[lane])
        if step:
            self._counters[lane] += np.asarray([step], np.uint64) * self._stride
        self._streams[lane] = stream

    def draw(self) -> None:
        """Write the next step's numbers of every lane into ``tensor``."""
        words = self._words
        np.bitwise_xor(self._counters, self._streams, out=words)
        # The last round of the mix only changes bits below those that are kept.
        _mix_rounds(words, self._scratch)
        np.right_shift(words, _NOISE_SHIFT, out=words)
        np.multiply(words, _NOISE_UNIT, out=self._numbers, casting="unsafe")
        np.add(self._counters, self._stride, out=self._counters)


def _derive(root: int, *path: int) -> Words:
    """Two words for a path below the root."""
    return np.random.SeedSequence(root, spawn_key=path).generate_state(2, np.uint64)


def _mix_int(word: int) -> int:
    """The mix of one word, without the overhead of arrays."""
    word &= _WORD_MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD_MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD_MASK
    return word ^ (word >> 31)


def _mix(words: Words) -> Words:
    mixed = np.array(words)
    _mix_rounds(mixed, np.empty_like(mixed))
    return mixed ^ (mixed >> _LAST_SHIFT)


def _mix_rounds(words: Words, scratch: Words) -> None:
    """All of the mix, in place, but for its last xor-shift."""
    for shift, factor in _ROUNDS:
        np.right_shift(words, shift, out=scratch)
        np.bitwise_xor(words, scratch, out=words)
        np.multiply(words, factor, out=words)
