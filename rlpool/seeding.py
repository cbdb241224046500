"""From one root seed to every random number: root, execution, episode, step.

Nothing here depends on who runs an episode or on the clock, so that the same root gives the same
data for any number of workers.

**Seeds** are what environments, agents and users get to see. They are below 2**31, as
``np.random.seed``, ``RandomState`` and simulators in C take no more. So few numbers must not be
hashes: of 65,000 hashes two would be equal in every other run. The episodes of a batcher are
numbered for as long as it lives, and the numbers are permuted, by a permutation of all seeds that
follows from the root. With ``root + number`` the roots 42 and 43 would share all but one seed.

**Noise** is rlpool's own. Its keys have 64 bits, and are hashes of root, execution and episode: it
does not depend on seeds, and two episodes that share a seed share no noise.

References:
    Kensler, "Correlated multi-jittered sampling", Pixar technical memo 13-01, 2013, section 5: a
    permutation made of steps that can be undone, each of which is cheap.
    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16:
    the hash, which is the finaliser of SplitMix64.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from rlpool.errors import SpecError

Words = np.ndarray[Any, np.dtype[Any]]
Floats = np.ndarray[Any, np.dtype[Any]]

N_SEEDS = 2**31
"""Seeds are in ``[0, N_SEEDS)``."""

NOISE_CHUNK = 128
"""Steps of noise computed at once: so many that lanes seldom need the next chunk."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: a full-period increment
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_STREAM_SALT = np.uint64(0xD1B54A32D192ED03)  # keeps noise apart from the seeds themselves
_START_SALT = np.uint64(0x8CB92BA72F3D8DD7)
_WORD_MASK = 2**64 - 1
_NOISE_BITS = 24  # all that float32 can hold of a number in [0, 1)
_NOISE_SHIFT = np.uint64(64 - _NOISE_BITS)
_NOISE_UNIT = np.float32(2.0**-_NOISE_BITS)
# NumPy scalars made once: making them anew costs as much as the operations on a few lanes.
_ROUNDS = ((np.uint64(30), _MIX_A), (np.uint64(27), _MIX_B))
_LAST_SHIFT = np.uint64(31)

_SEED_BITS = N_SEEDS.bit_length() - 1
_PERMUTATION_ROUNDS = 5  # with four, differences of neighbours are already uniform
_PERMUTATION_FACTORS = (0x85EBCA6B, 0xC2B2AE35)  # of MurmurHash3's finaliser: odd

# First word of a spawn key: what the derived words are for.
_EPISODES, _LANES, _WORKERS, _PROBES, _STREAMS, _TASKS, _EPISODE_SEEDS, _LANE_SEEDS = range(8)

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
    each = list(seeds) if isinstance(seeds, Sequence) else [seeds]
    if not all(isinstance(seed, int | np.integer) and seed >= 0 for seed in each):
        raise SpecError(f"a seed should be an int of at least 0, got {seeds!r}")
    # A list is told apart from an int, [7] from 7: their lengths are part of the hash.
    words = [2, len(each)] if isinstance(seeds, Sequence) else [1]
    words += map(int, each)
    low, high = np.random.SeedSequence(words).generate_state(2, np.uint64).tolist()
    root: int = (high << 64) | low
    return root


def permuted(numbers: _Numbers, keys: Sequence[int], n_bits: int = _SEED_BITS) -> _Numbers:
    """Permute the numbers below ``2**n_bits``.

    Every step can be undone: adding and multiplying by an odd number modulo a power of two, and
    xoring a number with its own upper half.

    Args:
        numbers: An int, or uint64 of any shape; larger ones are taken modulo ``2**n_bits``.
        keys: Which permutation, one int below 2**32 per round.
        n_bits: From 2 to 31.
    """
    mask, half = (1 << n_bits) - 1, (n_bits + 1) // 2
    for key, factor in zip(keys, itertools.cycle(_PERMUTATION_FACTORS)):
        numbers = (numbers + key) & mask
        numbers = ((numbers ^ (numbers >> half)) * (factor & mask)) & mask
    result: _Numbers = numbers ^ (numbers >> half)
    return result


def episode_seeds(root: int, first: int, n_episodes: int) -> list[int]:
    """Seeds of consecutive episodes, each in ``[0, 2**31)``.

    No two of ``2**31`` episodes of one root have the same.

    Args:
        root: The root.
        first: Number of the first one: how many episodes were asked for before.
        n_episodes: How many.
    """
    numbers = np.arange(n_episodes, dtype=np.uint64) + np.uint64(first % N_SEEDS)
    seeds: list[int] = permuted(numbers, _seed_keys(root, _EPISODE_SEEDS)).tolist()
    return seeds


def noise_keys(root: int, execution: int, n_episodes: int) -> Words:
    """What the noise of the episodes of one ``execute`` derives from: uint64 ``[n_episodes]``."""
    key, salt = _derive(root, _EPISODES, execution)
    keys: Words = _mix(_mix(key + np.arange(n_episodes, dtype=np.uint64) * _GOLDEN) ^ salt)
    return keys


def task_draws(root: int, collection: int, n_rollouts: int, n_tasks: int) -> list[int]:
    """Which of ``n_tasks`` tasks each rollout of a collection gets, int in ``[0, n_tasks)``."""
    key, salt = _derive(root, _TASKS, collection)
    mixed = _mix(_mix(key + np.arange(n_rollouts, dtype=np.uint64) * _GOLDEN) ^ salt)
    draws: list[int] = (mixed % np.uint64(n_tasks)).tolist()
    return draws


class LaneSeeds:
    """Seeds of lanes that restart on their own, since one ``reset``.

    A lane numbers its episodes one by one, resets included, and goes on behind all numbers that it
    can have used before a reset. Lane *k* begins at the bits of *k* in reverse, read as a fraction
    of all numbers: wherever the others began, and however many there will be, half of the largest
    gap is its own. So the seeds of a lane depend neither on the number of workers nor on that of
    lanes, and of L lanes (rounded up to a power of two) no two episodes share a seed before one has
    made ``2**31 / L`` restarts and resets.

    Args:
        root: The root.
        n_resets: Number of the ``reset``, 0-based.
        n_restarts: The most restarts that any lane can have made before this ``reset``, in all.
    """

    def __init__(self, root: int, n_resets: int, n_restarts: int = 0) -> None:
        self._noise_key, self._noise_salt = _derive(root, _LANES, n_resets).tolist()
        self._seed_keys = _seed_keys(root, _LANE_SEEDS)
        self._first = n_resets + n_restarts

    def seed(self, lane: int, n_restarts: int) -> int:
        """Seed of a lane's ``n_restarts``-th episode since the reset, in ``[0, 2**31)``.

        Args:
            lane: Number of the lane across all workers.
            n_restarts: 0 for the episode that the reset began; negative numbers go backwards from
                where the lane began, into the gap that the lane before it reaches last.
        """
        begin = int(f"{lane:0{_SEED_BITS}b}"[::-1], 2)
        return permuted(begin + self._first + n_restarts, self._seed_keys)

    def noise_key(self, lane: int, n_restarts: int) -> int:
        """What the noise of that episode derives from, in ``[0, 2**64)``."""
        mixed = _mix_int(_mix_int(self._noise_key ^ lane) ^ self._noise_salt)
        return _mix_int(mixed + n_restarts)


def seed_from(seed: int) -> int:
    """A seed that a user gives to an environment: itself below 2**31, a hash of it above."""
    return seed if seed < N_SEEDS else worker_seed(root_from(seed), 0)


def worker_seed(root: int, worker: int) -> int:
    """Seed for ``create_env``, ``agent.seed`` and a worker's global generators, below 2**31.

    The only numbers that depend on the worker: they serve what draws outside the library's
    control, where equal seeds would make all workers draw the same. No two workers have the same.
    """
    return permuted(worker, _seed_keys(root, _WORKERS))


def probe_seed(root: int) -> int:
    """Seed of the reset that tells a worker which keys there are; its data are dropped."""
    return permuted(0, _seed_keys(root, _PROBES))


def stream_seed(seed: int, stream: int) -> int:
    """Seed of a further generator of an episode, in ``[0, 2**31)``.

    With the episode's own seed, it would draw the same numbers as the environment does. Different
    seeds have different ones.

    Args:
        seed: The episode's seed.
        stream: Number of the generator.
    """
    return permuted(seed, _seed_keys(stream, _STREAMS))


class NoiseStart:
    """The noise of one episode, of which the first steps are computed already.

    Attributes:
        start: Where its counter starts.
        stream: What the counter is xored with. It keeps streams apart whose counters come close.
        head: float32 ``[NOISE_CHUNK, n_noise]``.
    """

    __slots__ = ("head", "start", "stream")

    def __init__(self, start: np.uint64, stream: np.uint64, head: Floats) -> None:
        self.start = start
        self.stream = stream
        self.head = head


class NoiseStarts:
    """The noise of many episodes, computed for a block of episodes when the first one begins.

    Only the blocks that were computed last are kept: lanes that are far apart, and episodes that
    are run again, find theirs computed again.

    Args:
        keys: What it derives from: uint64, one per episode.
        n_noise: Numbers per step.
    """

    _MAX_EPISODES = 32  # per block: enough that the cost per episode no longer matters
    _BLOCK_NUMBERS = 2**14  # large enough, too, however few episodes that are
    _KEPT_NUMBERS = 2**20  # of all blocks: 4 MiB

    def __init__(self, keys: Words, n_noise: int) -> None:
        self._starts, self._streams = _mix(keys ^ _START_SALT), _mix(keys ^ _STREAM_SALT)
        self._n_noise = n_noise
        n_episodes = self._BLOCK_NUMBERS // (NOISE_CHUNK * n_noise)
        self._n_episodes = min(max(n_episodes, 1), self._MAX_EPISODES)
        n_kept = self._KEPT_NUMBERS // (self._n_episodes * NOISE_CHUNK * n_noise)
        self._max_blocks = max(n_kept, 1)
        self._heads: dict[int, Floats] = {}  # by number of the block, the newest last

    def __getitem__(self, episode: int) -> NoiseStart:
        number, row = divmod(episode, self._n_episodes)
        heads = self._heads.get(number)
        if heads is None:
            rows = slice(number * self._n_episodes, (number + 1) * self._n_episodes)
            heads = _chunks(self._starts[rows], self._streams[rows], 0, self._n_noise)
            if len(self._heads) == self._max_blocks:
                del self._heads[next(iter(self._heads))]
            self._heads[number] = heads
        return NoiseStart(self._starts[episode], self._streams[episode], heads[row])


class NoiseStream:
    """The noise of a batch of lanes, one row of ``n_noise`` numbers per lane and step.

    Counter-based: the numbers of step t depend on the episode's key and on t alone. They are
    computed in chunks of steps, so that a step only has to copy its row.

    Args:
        n_lanes: Number of lanes B.
        n_noise: Numbers per lane and step.

    Attributes:
        tensor: float32 ``[B, n_noise]``, uniform in [0, 1), rewritten by every ``draw``.
    """

    def __init__(self, n_lanes: int, n_noise: int) -> None:
        self.tensor = torch.zeros(n_lanes, n_noise, dtype=torch.float32, device="cpu")
        self._numbers = self.tensor.numpy()
        self._chunks = np.zeros((n_lanes, NOISE_CHUNK, n_noise), np.float32)
        self._rows = self._chunks.reshape(-1, n_noise)
        self._starts = np.zeros(n_lanes, np.uint64)
        self._streams = np.zeros(n_lanes, np.uint64)
        self._steps = np.zeros(n_lanes, np.int64)  # step at which each lane's chunk begins
        self._chunk_rows = np.arange(n_lanes) * NOISE_CHUNK
        self._next_rows = self._chunk_rows.copy()
        self._n_left = NOISE_CHUNK  # lower bound of the steps before a lane needs a chunk

    def start(self, lane: int, noise: NoiseStart, step: int = 0) -> None:
        """Let a lane draw the numbers of an episode from ``step`` on."""
        self._starts[lane], self._streams[lane] = noise.start, noise.stream
        self._next_rows[lane] = self._chunk_rows[lane]
        self._steps[lane] = step
        if step:
            self._fill(np.array([lane]))
        else:
            self._chunks[lane] = noise.head

    def draw(self, lanes: Sequence[int] | None = None) -> None:
        """Write the next step's numbers of every lane into ``tensor``.

        Args:
            lanes: Those that take this step, all by default; the others get theirs again later.
        """
        if not self._n_left:
            self._next_chunks()
        np.take(self._rows, self._next_rows, 0, self._numbers, "clip")
        if lanes is None:
            np.add(self._next_rows, 1, out=self._next_rows)
        else:
            self._next_rows[lanes] += 1
        self._n_left -= 1

    def _next_chunks(self) -> None:
        n_used = self._next_rows - self._chunk_rows
        lanes = np.flatnonzero(n_used >= NOISE_CHUNK)
        if lanes.size:
            self._steps[lanes] += NOISE_CHUNK
            self._next_rows[lanes] = self._chunk_rows[lanes]
            n_used[lanes] = 0
            self._fill(lanes)
        self._n_left = NOISE_CHUNK - int(n_used.max())

    def _fill(self, lanes: np.ndarray[Any, Any]) -> None:
        self._chunks[lanes] = _chunks(
            self._starts[lanes], self._streams[lanes], self._steps[lanes], self._numbers.shape[1]
        )


def _chunks(starts: Words, streams: Words, steps: Any, n_noise: int) -> Floats:
    """Noise ``[E, NOISE_CHUNK, n_noise]`` of E episodes, from a step of each on."""
    first = np.asarray(steps, np.uint64).reshape(-1, 1) * np.uint64(n_noise)
    counters = first + np.arange(NOISE_CHUNK * n_noise, dtype=np.uint64)
    words = (starts.reshape(-1, 1) + counters * _GOLDEN) ^ streams.reshape(-1, 1)
    numbers = (_mix(words) >> _NOISE_SHIFT).astype(np.float32) * _NOISE_UNIT
    chunks: Floats = numbers.reshape(-1, NOISE_CHUNK, n_noise)
    return chunks


@functools.lru_cache(maxsize=64)
def _seed_keys(root: int, purpose: int) -> tuple[int, ...]:
    """The keys of a permutation; a batcher asks for the same ones in every request."""
    sequence = np.random.SeedSequence(root, spawn_key=(purpose,))
    return tuple(sequence.generate_state(_PERMUTATION_ROUNDS).tolist())


def _derive(root: int, *path: int) -> Words:
    """Two words for a path below the root."""
    words: Words = np.random.SeedSequence(root, spawn_key=path).generate_state(2, np.uint64)
    return words


def _mix_int(word: int) -> int:
    """The mix of one word, without the overhead of arrays."""
    word &= _WORD_MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD_MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD_MASK
    return word ^ (word >> 31)


def _mix(words: Words) -> Words:
    for shift, factor in _ROUNDS:
        words = (words ^ (words >> shift)) * factor
    mixed: Words = words ^ (words >> _LAST_SHIFT)
    return mixed
