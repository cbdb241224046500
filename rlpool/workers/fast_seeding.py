"""Makes ``env.reset(seed=...)`` cheaper in a worker process, with the same generators as ever.

A seeded reset spends most of its time in ``gymnasium.utils.seeding.np_random``: hashing the seed
into the state of a generator, number by number. A worker knows the seeds of a request beforehand
and hashes them all at once. ``np_random`` is replaced in worker processes only, never in the
caller's, and only if it gives bitwise what Gymnasium's own function gives.

The hash is NumPy's ``SeedSequence``, vectorised.

Reference:
    O'Neill, "Developing a seed_seq alternative", 2015, https://www.pcg-random.org/posts/;
    NumPy Enhancement Proposal 19.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.utils import seeding
from numpy.random.bit_generator import ISpawnableSeedSequence, SeedSequence

_POOL_WORDS = 4
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)
_MASK = 0xFFFFFFFF
_STATE_WORDS = 4  # 64-bit words from which PCG64 starts

_TEST_SEEDS = (0, 1, 2**32 - 1, 2**32, 3320729392990590247, 2**63 - 1)

Words = np.ndarray[Any, Any]


class HashedSeed(ISpawnableSeedSequence):
    """A seed whose hash is known, as far as a ``PCG64`` asks for it.

    Args:
        seed: The seed.
        words: Its first hashed words, uint64 ``[4]``.
    """

    def __init__(self, seed: int, words: Words) -> None:
        self.entropy = seed
        self._words = words
        self._full: SeedSequence | None = None

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Words:
        """The hash, computed here if it is another one than was prepared."""
        if n_words == _STATE_WORDS and dtype == np.uint64:
            return self._words
        words: Words = self._sequence().generate_state(n_words, dtype)
        return words

    def spawn(self, n_children: int) -> list[SeedSequence]:
        """Children as of NumPy's own sequence."""
        return self._sequence().spawn(n_children)

    def _sequence(self) -> SeedSequence:
        if self._full is None:
            self._full = SeedSequence(self.entropy)
        return self._full


class FastSeeding:
    """A replacement for ``np_random`` that knows the hashes of announced seeds."""

    def __init__(self) -> None:
        self._original = seeding.np_random
        self._rows: dict[int, int] = {}
        self._words: Words = np.empty((0, _STATE_WORDS), np.uint64)

    def announce(self, seeds: Sequence[int]) -> None:
        """Hash seeds that will be used; forgets those announced before."""
        self._words = hashed(np.asarray(seeds, np.uint64))
        self._rows = dict(zip(seeds, range(len(seeds)), strict=True))

    def np_random(self, seed: int | None = None) -> tuple[np.random.Generator, int]:
        """A generator for a seed, and the seed, as ``gymnasium.utils.seeding.np_random``."""
        row = self._rows.get(seed) if seed is not None else None
        if row is None or seed is None:
            return self._original(seed)
        hashed_seed: Any = HashedSeed(seed, self._words[row])
        return np.random.Generator(np.random.PCG64(hashed_seed)), seed

    def install(self) -> bool:
        """Replace Gymnasium's function if this one gives the same; returns whether it does."""
        self.announce(_TEST_SEEDS)
        for seed in _TEST_SEEDS:
            expected, value = self._original(seed)
            mine, my_value = self.np_random(seed)
            if (
                type(expected.bit_generator) is not np.random.PCG64
                or mine.bit_generator.state != expected.bit_generator.state
                or my_value != value
            ):
                return False
        seeding.np_random = self.np_random
        return True


def hashed(seeds: Words) -> Words:
    """``SeedSequence(seed).generate_state(4, np.uint64)`` of many seeds below 2**64.

    Args:
        seeds: uint64 ``[n]``.

    Returns:
        uint64 ``[n, 4]``.
    """
    constant = _INIT_A

    def hashmix(value: Words) -> Words:
        nonlocal constant
        value = value ^ np.uint32(constant)
        constant = (constant * _MULT_A) & _MASK
        value = value * np.uint32(constant)
        mixed: Words = value ^ (value >> _SHIFT)
        return mixed

    zero = np.zeros(len(seeds), np.uint32)
    entropy = [seeds.astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32), zero, zero]
    pool = [hashmix(word) for word in entropy]
    for source in range(_POOL_WORDS):
        for target in range(_POOL_WORDS):
            if source != target:
                mixed = _MIX_LEFT * pool[target] - _MIX_RIGHT * hashmix(pool[source])
                pool[target] = mixed ^ (mixed >> _SHIFT)
    state = np.empty((len(seeds), 2 * _STATE_WORDS), "<u4")
    constant = _INIT_B
    for number in range(2 * _STATE_WORDS):
        value = pool[number % _POOL_WORDS] ^ np.uint32(constant)
        constant = (constant * _MULT_B) & _MASK
        value = value * np.uint32(constant)
        state[:, number] = value ^ (value >> _SHIFT)
    words: Words = state.view("<u8").astype(np.uint64)
    return words
