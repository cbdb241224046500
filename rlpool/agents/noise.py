"""The noise of agents: one stream per lane, determined by the episode that runs in it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlpool.seeding import NOISE_CHUNK, NoiseStart, Words, noise_chunks


class NoiseStarts:
    """The noise of many episodes, computed for a block of episodes when the first of them begins.

    Only the most recently used blocks are kept; others are computed again when needed.

    Args:
        keys: Keys of the noise: uint64, one per episode.
        n_noise: Numbers per step.
    """

    _MAX_EPISODES = 32  # per block: enough to make the cost per episode negligible
    _BLOCK_NUMBERS = 2**14  # per block: also enough, even if few episodes reach it
    _KEPT_NUMBERS = 2**20  # in all blocks: 4 MiB

    def __init__(self, keys: Words, n_noise: int) -> None:
        numbers = NOISE_CHUNK * n_noise  # per episode
        n = min(max(self._BLOCK_NUMBERS // numbers, 1), self._MAX_EPISODES)
        self._keys, self._n_episodes = keys, n

        @functools.lru_cache(max(self._KEPT_NUMBERS // (n * numbers), 1))
        def heads(block: int) -> Words:
            return noise_chunks(keys[block * n : (block + 1) * n], 0, n_noise)

        self._heads = heads

    def __getitem__(self, episode: int) -> NoiseStart:
        block, row = divmod(episode, self._n_episodes)
        return NoiseStart(self._keys[episode], self._heads(block)[row])


class NoiseStream:
    """The noise of a batch of lanes, one row of ``n_noise`` numbers per lane and step.

    Counter-based: the numbers of step t depend only on the episode's key and on t. They are
    computed in chunks of steps; a step only copies its row.

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
        self._keys = np.zeros(n_lanes, np.uint64)
        self._steps = np.zeros(n_lanes, np.int64)  # first step of each lane's chunk
        self._chunk_rows = np.arange(n_lanes) * NOISE_CHUNK
        self._next_rows = self._chunk_rows.copy()
        self._n_left = NOISE_CHUNK  # lower bound on the steps until a lane needs a chunk

    def start(self, lane: int, noise: NoiseStart, step: int = 0) -> None:
        """Let a lane draw the numbers of an episode from ``step`` on."""
        if step and noise.key == self._keys[lane]:
            n_used = self._next_rows[lane] - self._chunk_rows[lane]
            if step == self._steps[lane] + n_used:
                return  # the episode was interrupted, and nothing has been drawn since
        self._keys[lane] = noise.key
        self._next_rows[lane] = self._chunk_rows[lane]
        self._steps[lane] = step
        if step:
            self._fill(np.array([lane]))
        else:
            self._chunks[lane] = noise.head

    def draw(self, lanes: Sequence[int] | None = None) -> None:
        """Write the next step's numbers of every lane into ``tensor``.

        Args:
            lanes: The lanes that take this step, by default all; the others draw theirs later.
        """
        if not self._n_left:
            self._next_chunks()
        self._rows.take(self._next_rows, 0, self._numbers, "clip")
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
        n_noise = self._numbers.shape[1]
        self._chunks[lanes] = noise_chunks(self._keys[lanes], self._steps[lanes], n_noise)
