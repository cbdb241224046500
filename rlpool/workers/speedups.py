"""Makes some functions of Gymnasium cheaper in worker processes, with the same results.

- ``Discrete.contains``, which many environments call in every step: for an int64, as agents choose,
  it spends a quarter of a CartPole step on finding out that an integer is an integer. And
  ``MultiDiscrete.contains``, which vector environments call.
- ``gymnasium.utils.seeding.np_random``, in which a seeded reset spends most of its time hashing the
  seed into the state of a generator. A worker knows the seeds of the next episodes beforehand
  and hashes many at once.

They are replaced in worker processes only, never in the caller. Before ``np_random`` is replaced,
its generators are compared with Gymnasium's own for some seeds.

Reference:
    The hash is NumPy's ``SeedSequence``: O'Neill, "Developing a seed_seq alternative", 2015,
    https://www.pcg-random.org/posts/; NumPy Enhancement Proposal 19.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete
from gymnasium.utils import seeding
from numpy.random.bit_generator import ISpawnableSeedSequence, SeedSequence

_INT64 = np.dtype(np.int64)
_TEST_SEEDS = (0, 1, 2**32 - 1, 2**32, 3320729392990590247, 2**63 - 1)

_KEPT = 4
"""Announcements that are remembered: several requests may run at the same time."""

_POOL_WORDS = 4
_STATE_WORDS = 4  # 64-bit words from which PCG64 starts
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)

Words = np.ndarray[Any, Any]


def install_fast_checks() -> None:
    """Replace ``Discrete.contains`` and ``MultiDiscrete.contains``."""
    one: Any = Discrete.contains
    many: Any = MultiDiscrete.contains

    @functools.wraps(one)
    def contains(self: Any, x: Any) -> bool:
        if type(x) is np.int64 and self.dtype is _INT64:
            start = self.start
            return bool(start <= x < start + self.n)
        return bool(one(self, x))

    @functools.wraps(many)
    def contains_all(self: Any, x: Any) -> bool:
        if (
            type(x) is np.ndarray
            and x.dtype is _INT64
            and self.dtype is _INT64
            and x.shape == self.nvec.shape
        ):
            # Numbers below the start wrap around, past all others.
            places = (x - self.start).view(np.uint64)
            n_valid = np.count_nonzero(places < self.nvec.view(np.uint64))
            return bool(n_valid == x.size)
        return bool(many(self, x))

    Discrete.contains = contains  # type: ignore[method-assign]
    MultiDiscrete.contains = contains_all  # type: ignore[method-assign]


class FastSeeding:
    """A replacement for ``np_random`` that knows the hashes of announced seeds."""

    def __init__(self) -> None:
        self._original = seeding.np_random
        self._announced: deque[dict[int, Words]] = deque(maxlen=_KEPT)

    def install(self) -> bool:
        """Replace Gymnasium's function; returns whether it could be."""
        self.announce(_TEST_SEEDS)
        agrees = all(
            _state_of(self.np_random(seed)) == _state_of(self._original(seed))
            for seed in _TEST_SEEDS
        )
        if agrees:
            seeding.np_random = self.np_random
        return agrees

    def announce(self, seeds: Sequence[int]) -> None:
        """Hash seeds that will be used: all at once, since few cost as much as a hundred."""
        words = hashed(np.asarray(seeds, np.uint64))
        self._announced.append(dict(zip(seeds, words, strict=True)))

    def np_random(self, seed: int | None = None) -> tuple[np.random.Generator, int]:
        """A generator for a seed, and the seed, as ``gymnasium.utils.seeding.np_random``."""
        for words_of in self._announced if seed is not None else ():
            if seed in words_of:
                hashed_seed: Any = HashedSeed(seed, words_of[seed])
                return np.random.Generator(np.random.PCG64(hashed_seed)), seed
        return self._original(seed)


def _state_of(made: tuple[np.random.Generator, int]) -> Any:
    return made[0].bit_generator.state, made[1]


class HashedSeed(ISpawnableSeedSequence):
    """A ``SeedSequence`` of which the words that a ``PCG64`` asks for are known.

    Args:
        seed: The seed.
        words: Its first hashed words, uint64 ``[4]``.
    """

    def __init__(self, seed: int, words: Words) -> None:
        self.entropy = seed
        self._words = words
        self._full: SeedSequence | None = None

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Words:
        """The hash, computed here if other words than the known ones are asked for."""
        if n_words == _STATE_WORDS and dtype == np.uint64:
            return self._words
        words: Words = self._sequence().generate_state(n_words, dtype)
        return words

    def spawn(self, n_children: int) -> list[SeedSequence]:
        """Children as of NumPy's own sequence."""
        return self._sequence().spawn(n_children)

    def _sequence(self) -> SeedSequence:
        self._full = self._full or SeedSequence(self.entropy)
        return self._full


def hashed(seeds: Words) -> Words:
    """``SeedSequence(seed).generate_state(4, np.uint64)`` of many seeds below 2**64.

    Args:
        seeds: uint64 ``[n]``.

    Returns:
        uint64 ``[n, 4]``.
    """
    mix_in = _Hash(0x43B0D7E5, 0x931E8875)
    zero = np.zeros(len(seeds), np.uint32)
    entropy = [seeds.astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32), zero, zero]
    pool = [mix_in(word) for word in entropy]
    for source in range(_POOL_WORDS):
        for target in range(_POOL_WORDS):
            if source != target:
                mixed = _MIX_LEFT * pool[target] - _MIX_RIGHT * mix_in(pool[source])
                pool[target] = _folded(mixed)
    mix_out = _Hash(0x8B51F9DD, 0x58F38DED)
    state = np.stack([mix_out(pool[n % _POOL_WORDS]) for n in range(2 * _STATE_WORDS)], 1)
    words: Words = state.astype("<u4").view("<u8").astype(np.uint64)
    return words


class _Hash:
    """NumPy's ``hashmix``, whose constant changes with each call."""

    def __init__(self, constant: int, multiplier: int) -> None:
        self._constant, self._multiplier = constant, multiplier

    def __call__(self, value: Words) -> Words:
        value = value ^ np.uint32(self._constant)
        self._constant = self._constant * self._multiplier & 0xFFFFFFFF
        return _folded(value * np.uint32(self._constant))


def _folded(value: Words) -> Words:
    folded: Words = value ^ (value >> np.uint32(16))
    return folded
