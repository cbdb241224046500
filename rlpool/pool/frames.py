"""Where a pool keeps the frames of stacked values, each of them once.

A stack shares all its frames but the newest with the stack before. So a row of a store holds the
places of its frames, int32 ``[n_frames]``, and the frames lie in memory of their own. How many rows
name a frame is counted; where none does any longer, another frame may lie.
"""

from __future__ import annotations

import numpy as np

from rlpool.memory.storage import Array
from rlpool.pool.schema import Stack
from rlpool.pool.stacks import NewFrames
from rlpool.specs import TensorSpec

_COPIED_BYTES = 2**20  # at a time, twice: so much stays in the cache


class FrameStore:
    """The frames of one key.

    Args:
        spec: Of a whole value.
        stack: How its frames lie in it.
        values: Memory for the frames ``[n, before, after]``; zeros.
        is_reader: Whether it is another process's.

    Attributes:
        values: As given. The first ``n_used`` are or were in use.
        tails: Where the frames of the last values of trajectories lie, int32
            ``[B, n_frames]``, by the sub-pool that they were added to: the next ones may go on
            there. -1 where that is not known.
    """

    def __init__(
        self, spec: TensorSpec, stack: Stack, values: Array, *, is_reader: bool = False
    ) -> None:
        self.values, self.n_used = values, 0
        self.tails: dict[int | None, Array] = {}
        self._shape, self._stack = spec.shape, stack
        n = 0 if is_reader else len(values)
        self._n_references = np.zeros(n, np.int32)
        # Places that nothing refers to any longer, a stack of the first _n_free.
        self._free = np.empty(n, np.int32)
        self._n_free = 0

    @staticmethod
    def most(stack: Stack, pool_size: int) -> int:
        """Frames that there are at most: no transition shares one, before or after its step."""
        return 2 * stack.n_frames * pool_size

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame."""
        return self.values[:1].nbytes

    @property
    def n_bytes(self) -> int:
        """Bytes in use."""
        return self.n_used * self.frame_bytes

    def take(self, places: Array) -> Array:
        """Whole values ``[n, ...]`` from places ``[n, n_frames]``.

        They are copies, views of memory in which the axis of the frames comes first.
        """
        n, n_frames = places.shape
        axis = self._stack.axis
        before, after = self._shape[:axis], self._shape[axis + 1 :]
        frames = self.values.take(places.reshape(-1), 0, None, "wrap")
        frames = frames.reshape(n, n_frames, *before, self._shape[axis] // n_frames, *after)
        values: Array = np.moveaxis(frames, 1, 1 + axis).reshape(n, *self._shape)
        return values

    # Adding ----------------------------------------------------------------------------------

    def find(self, new: NewFrames, numbers: Array) -> Array:
        """Find those of new frames that are here, and refer to them; returns the others' numbers.

        Args:
            new: The frames.
            numbers: Some of their numbers.
        """
        n_known = len(self._n_references)
        hints = new.hints[numbers]
        hinted = numbers[(hints >= 0) & (new.places[numbers] < 0)]
        hinted = hinted[new.hints[hinted] < n_known]
        hinted = hinted[self._n_references[new.hints[hinted]] > 0]
        if hinted.size:
            here = self.values[new.hints[hinted]].reshape(len(hinted), -1)
            there = new.values(hinted).reshape(len(hinted), -1)
            is_same = (here.view(np.uint8) == there.view(np.uint8)).all(axis=1)
            new.places[hinted[is_same]] = new.hints[hinted[is_same]]
        places = new.places[numbers]
        self.refer(places[places >= 0])
        return numbers[places < 0]

    def n_more(self, n: int) -> int:
        """How many places will have been used after so many frames were put down."""
        return self.n_used + max(0, n - self._n_free)

    def put(self, new: NewFrames, numbers: Array) -> None:
        """Copy new frames here, and refer to them."""
        n_again = min(len(numbers), self._n_free)
        self._n_free -= n_again
        again = self._free[self._n_free : self._n_free + n_again]
        start, self.n_used = self.n_used, self.n_used + len(numbers) - n_again
        places = np.concatenate([again, np.arange(start, self.n_used, dtype=np.int32)])
        n_at_once = max(1, _COPIED_BYTES // self.frame_bytes)
        for begin in range(0, len(numbers), n_at_once):
            some = slice(begin, begin + n_at_once)
            self.values[places[some]] = new.values(numbers[some])
        new.places[numbers] = places
        self.refer(places)

    def refer(self, places: Array) -> None:
        """Count that something refers to these places, as often as they are named."""
        np.add.at(self._n_references, places.reshape(-1), 1)

    def release(self, places: Array) -> None:
        """Count that something refers to these places no longer."""
        places = places.reshape(-1)
        if not places.size:
            return
        np.subtract.at(self._n_references, places, 1)
        unused = np.unique(places[self._n_references[places] == 0])
        self._free[self._n_free : self._n_free + unused.size] = unused
        self._n_free += unused.size

    def clear(self) -> None:
        """Forget all frames."""
        self._n_references[: self.n_used] = 0
        self.n_used = self._n_free = 0
        self.tails = {}

    def recount(self, places: list[Array]) -> None:
        """Count anew, from all places that rows refer to."""
        self._n_references[: self.n_used] = 0
        for some in places:
            self.refer(some)
        unused = np.flatnonzero(self._n_references[: self.n_used] == 0)
        self._free[: unused.size] = unused
        self._n_free = unused.size
