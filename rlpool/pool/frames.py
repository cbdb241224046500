"""Where a pool keeps the frames of stacked values, each of them once.

A stack shares all its frames but the newest with the stack before. So a row of a store holds the
places of its frames, int32 ``[n_frames]``, and the frames lie in memory of their own. How many rows
name a frame is counted; where none does any longer, another frame may lie.
"""

from __future__ import annotations

import numpy as np

from rlpool.data.specs import TensorSpec
from rlpool.data.storage import NDArray
from rlpool.pool.schema import Stack
from rlpool.pool.stacks import NewFrames

_COPIED_BYTES = 2**20  # at a time, twice: so much stays in the cache


class Places:
    """Hands out places of an array. Those that were given back come first.

    Args:
        capacity: Number of places.

    Attributes:
        n_used: So many from the first on are or were in use.
    """

    def __init__(self, capacity: int) -> None:
        self.n_used = 0
        self._free = np.empty(capacity, np.int32)  # a stack of the first _n_free
        self._n_free = 0

    def n_used_with(self, n: int) -> int:
        """How many will be or have been in use after taking so many."""
        return self.n_used + max(0, n - self._n_free)

    def take(self, n: int) -> NDArray:
        """Free places, int32 ``[n]``."""
        n_again = min(n, self._n_free)
        self._n_free -= n_again
        again = self._free[self._n_free : self._n_free + n_again]
        start, self.n_used = self.n_used, self.n_used + n - n_again
        return np.concatenate([again, np.arange(start, self.n_used, dtype=np.int32)])

    def give_back(self, places: NDArray) -> None:
        """Let places be taken again."""
        self._free[self._n_free : self._n_free + places.size] = places
        self._n_free += places.size

    def recount(self, is_free: NDArray) -> None:
        """Free the places that are said to be: bool ``[n_used]``, and no others."""
        self._n_free = 0
        self.give_back(np.flatnonzero(is_free))


class FrameStore:
    """The frames of one key.

    Args:
        spec: Of a whole value.
        stack: How its frames lie in it.
        values: Memory for the frames ``[n, before, after]``; zeros.

    Attributes:
        values: As given.
        places: Which of them are in use.
    """

    def __init__(self, spec: TensorSpec, stack: Stack, values: NDArray) -> None:
        self.values, self.places = values, Places(len(values))
        self._shape, self._stack = spec.shape, stack
        self._n_references = np.zeros(len(values), np.int32)

    def take(self, places: NDArray) -> NDArray:
        """Whole values ``[n, ...]`` from places ``[n, n_frames]``.

        They are copies, views of memory in which the axis of the frames comes first.
        """
        n, n_frames = places.shape
        axis = self._stack.axis
        before, after = self._shape[:axis], self._shape[axis + 1 :]
        frames = self.values.take(places.reshape(-1), 0, None, "wrap")
        frames = frames.reshape(n, n_frames, *before, self._shape[axis] // n_frames, *after)
        values: NDArray = np.moveaxis(frames, 1, 1 + axis).reshape(n, *self._shape)
        return values

    # Adding ----------------------------------------------------------------------------------

    def find(self, new: NewFrames, numbers: NDArray) -> NDArray:
        """Find those of new frames that are here, and refer to them; returns the others' numbers.

        Args:
            new: The frames.
            numbers: Some of their numbers.
        """
        hinted = numbers[(new.hints[numbers] >= 0) & (new.places[numbers] < 0)]
        hinted = hinted[self._n_references[new.hints[hinted]] > 0]
        if hinted.size:
            here = self.values[new.hints[hinted]].reshape(len(hinted), -1)
            there = new.values(hinted).reshape(len(hinted), -1)
            is_same = (here.view(np.uint8) == there.view(np.uint8)).all(axis=1)
            new.places[hinted[is_same]] = new.hints[hinted[is_same]]
        places = new.places[numbers]
        self.refer(places[places >= 0])
        return numbers[places < 0]

    def put(self, new: NewFrames, numbers: NDArray) -> None:
        """Copy new frames here, and refer to them."""
        places = self.places.take(len(numbers))
        n_at_once = max(1, _COPIED_BYTES // self.values[:1].nbytes)
        for begin in range(0, len(numbers), n_at_once):
            some = slice(begin, begin + n_at_once)
            self.values[places[some]] = new.values(numbers[some])
        new.places[numbers] = places
        self.refer(places)

    def refer(self, places: NDArray) -> None:
        """Count that something refers to these places, as often as they are named."""
        np.add.at(self._n_references, places.reshape(-1), 1)

    def release(self, places: NDArray) -> None:
        """Count that something refers to these places no longer."""
        places = places.reshape(-1)
        if not places.size:
            return
        np.subtract.at(self._n_references, places, 1)
        self.places.give_back(np.unique(places[self._n_references[places] == 0]))

    def recount(self, named: list[NDArray]) -> None:
        """Count anew what refers to the frames: all places that rows refer to."""
        references = self._n_references[: self.places.n_used]
        references[:] = 0
        for places in named:
            self.refer(places)
        self.places.recount(references == 0)
