"""Values that are to be added, and the single frames of stacks that follow each other.

The value of a step is that of the step before without its oldest frame, and with a newer one. Where
that is so, bit by bit, only the newest frame is new. Elsewhere a run of frames begins, with all
frames of a value; those at its front that are equal, as after a reset, count as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rlpool.data.storage import NDArray
from rlpool.pool.schema import Stack

_COMPARED_BYTES = 2**21  # at a time: so much stays in the cache

_WORDS = tuple(map(np.dtype, (np.uint64, np.uint32, np.uint16, np.uint8)))


class Source(NamedTuple):
    """Values of a key, one per transition: some rows of an array."""

    array: NDArray
    rows: NDArray

    def part(self, places: slice | NDArray) -> Source:
        """Some of the values, no copy."""
        return Source(self.array, self.rows[places])

    def values(self, out: NDArray | None = None) -> NDArray:
        """The values ``[n, ...]``, copied to an array or a new one."""
        # Clipped because that is faster than "raise", which makes a copy of the target.
        values: NDArray = self.array.take(self.rows, 0, out, "clip")
        return values


def widest_words(array: NDArray) -> NDArray:
    """An array whose last axis lies in one piece, as the widest words that this axis is made of.

    Bits are to be compared, as NaN is not equal to itself; the widest words take the least time.
    """
    n_bytes = array.shape[-1] * array.itemsize
    return array.view(next(word for word in _WORDS if n_bytes % word.itemsize == 0))


class NewFrames:
    """The frames of values that are to be added, numbered in their order.

    Args:
        values: Arrays of values, as words ``[rows, before, n_frames, after]``: those before steps
            and those after them.
        origins: Of each frame: in which of these arrays, in which row, and which frame of it, int64
            ``[3, n]``.
        dtype: Dtype of the values.

    Attributes:
        hints: Place of a frame where each may lie already, int64 ``[n]``; -1 for none.
        places: Where it lies, int32 ``[n]``; -1 until it does.
    """

    def __init__(
        self, values: list[NDArray], origins: NDArray, dtype: np.dtype[np.generic]
    ) -> None:
        self._values, self._origins, self._dtype = values, origins, dtype
        self.hints = np.full(origins.shape[1], -1)
        self.places = np.full(origins.shape[1], -1, np.int32)

    def values(self, numbers: NDArray) -> NDArray:
        """Frames by number, copies ``[len(numbers), before, after]``."""
        origins, rows, frames = self._origins[:, numbers]
        values = self._values[0]
        if not origins.any():
            taken = values[rows, :, frames]
        else:
            taken = np.empty((len(numbers), values.shape[1], values.shape[3]), values.dtype)
            for origin, array in enumerate(self._values):
                is_here = origins == origin
                taken[is_here] = array[rows[is_here], :, frames[is_here]]
        return taken.view(self._dtype)


class Incoming(NamedTuple):
    """Transitions to be added, in order.

    Attributes:
        columns: Key to values, for every column of the schema; for stacks numbers of frames.
        is_last: bool ``[n]``: whether the next one does not continue the episode.
        finals: Paired key to values after the step, right wherever ``is_last`` holds.
        frames: Key of a stack to its frames.
        ends: For each row of the trajectories the number of its last transition, int64 ``[B]``;
            -1 for rows without any.
        is_told: Whether it is known where episodes end.
    """

    columns: Mapping[str, Source]
    is_last: NDArray
    finals: Mapping[str, Source]
    frames: Mapping[str, NewFrames]
    ends: NDArray
    is_told: bool = True

    def part(self, places: slice | NDArray) -> Incoming:
        """Some of the transitions, no copy: a range, or pieces that each end with a last one."""
        columns, finals = (
            {key: source.part(places) for key, source in sources.items()}
            for sources in (self.columns, self.finals)
        )
        return self._replace(columns=columns, is_last=self.is_last[places], finals=finals)

    def frames_named(self, key: str) -> NDArray:
        """Numbers of the frames of a stack that these transitions need, ascending."""
        is_needed = np.zeros(len(self.frames[key].places), bool)
        is_needed[self.columns[key].values()] = True
        if key in self.finals:
            is_needed[self.finals[key].part(self.is_last).values()] = True
        return np.flatnonzero(is_needed)

    def tails(self) -> dict[str, NDArray]:
        """Key of a stack to where the frames after each row of the trajectories lie.

        int32 ``[B, n_frames]``, -1 for rows without steps.
        """
        tails = {}
        for key in self.frames.keys() & self.finals.keys():
            places = self.frames[key].places[self.finals[key].part(self.ends).values()]
            places[self.ends < 0] = -1
            tails[key] = places
        return tails


class Unstacked(NamedTuple):
    """Values as numbers of frames.

    Attributes:
        before: Frames of the values before steps, int64 ``[n, n_frames]``.
        after: Frames of those after them, likewise; ``None`` if there are none.
        is_shifted: Whether a step's value after it is that before it, shifted by one frame, bool
            ``[n]``; without values after steps all true.
        frames: The frames.
    """

    before: NDArray
    after: NDArray | None
    is_shifted: NDArray
    frames: NewFrames


def unstacked(
    before: Source,
    after: Source | None,
    is_last: NDArray,
    stack: Stack,
    tails: tuple[NDArray, NDArray] | None = None,
) -> Unstacked:
    """Find the frames of values.

    Args:
        before: The values ``[n, ...]``. Those of a piece, which ends with a last one, lie one after
            the other.
        after: Values after steps, right wherever ``is_last`` holds.
        is_last: Whether the next step does not continue the episode, bool ``[n]``.
        stack: How frames lie in a value.
        tails: Some steps that begin a piece, and where the frames of their values may lie already,
            int64 ``[m]`` and ``[m, n_frames]``.
    """
    n, n_frames = len(is_last), stack.n_frames
    values, dtype = [_words(before.array, stack)], before.array.dtype
    # All values in order: each before a step, and after it one that no further step starts from.
    lasts = np.zeros(0, np.int64) if after is None else np.flatnonzero(is_last)
    place = np.arange(n)
    origins = np.zeros((2, n + lasts.size), np.int64)  # array and row
    if after is not None:
        values.append(_words(after.array, stack))
        place = place + np.cumsum(is_last) - is_last
        origins[0, place[lasts] + 1] = 1
        origins[1, place[lasts] + 1] = after.rows[lasts]
    origins[1, place] = before.rows
    follows = np.zeros(n + lasts.size + 1, bool)  # the value before it, shifted by a frame
    inner = np.flatnonzero(~is_last[:-1])
    follows[place[inner] + 1] = _are_shifted(values[0], before.rows[inner])
    for some in _parts(lasts, values[0]):
        old = values[0][before.rows[some]]
        new = values[1][after.rows[some]]  # type: ignore[union-attr]
        follows[place[some] + 1] = ~_differs(old, new).any(axis=1)
    is_shifted = follows[place + 1] if after is not None else np.ones(n, bool)

    n_new = np.ones(n + lasts.size, np.int64)  # frames of each value that are new
    begins = np.flatnonzero(~follows[:-1])
    n_new[begins] = _n_distinct(values, origins[:, begins])
    newest = np.cumsum(n_new) - 1
    oldest = (newest - n_new + 1)[begins].repeat(np.diff(np.append(begins, len(n_new))))
    numbers = np.maximum(newest[:, None] + np.arange(1 - n_frames, 1), oldest[:, None])
    owner = np.arange(len(n_new)).repeat(n_new)  # the value that a frame belongs to
    frame = n_frames - 1 - newest[owner] + np.arange(owner.size)
    frames = NewFrames(values, np.concatenate([origins[:, owner], frame[None]]), dtype)
    if tails is not None:
        first = numbers[place[tails[0]]]
        frames.hints[first] = tails[1]
    return Unstacked(
        numbers[place], None if after is None else numbers[place + 1], is_shifted, frames
    )


def _words(array: NDArray, stack: Stack) -> NDArray:
    """Values ``[n, before, n_frames, after]`` as the widest words that frames are made of."""
    # Axes that were moved, as channels of images are, have no words; all others stay in place.
    array = np.ascontiguousarray(array)
    return widest_words(array.reshape(len(array), *stack.parts(array.shape[1:])))


def _parts(numbers: NDArray, values: NDArray) -> list[NDArray]:
    """Numbers of values in parts of a few megabytes."""
    n_at_once = max(1, _COMPARED_BYTES // max(1, values[:1].nbytes))
    return [numbers[start : start + n_at_once] for start in range(0, len(numbers), n_at_once)]


def _are_shifted(values: NDArray, rows: NDArray) -> NDArray:
    """Whether the values after some rows are those of the rows, shifted by one frame."""
    _, before, n_frames, after = values.shape
    flat = values.reshape(len(values), -1)
    are_shifted = np.empty(len(rows), bool)
    ends = np.flatnonzero(np.diff(rows) != 1) + 1
    for run in np.split(np.arange(len(rows)), ends):
        for some in _parts(run, values):
            first = int(rows[some[0]])
            old, new = flat[first : first + len(some)], flat[first + 1 : first + 1 + len(some)]
            # Everything in one go, of which the newest frame does not count.
            differs = np.empty((len(some), before, n_frames, after), bool)
            np.not_equal(
                new[:, :-after], old[:, after:], out=differs.reshape(len(some), -1)[:, :-after]
            )
            differs[:, :, -1] = False
            are_shifted[some] = ~differs.any(axis=(1, 2, 3))
    return are_shifted


def _differs(old: NDArray, new: NDArray) -> NDArray:
    """Which frames of new values are not the next ones of old ones, ``[n, n_frames - 1]``."""
    pairs = ((new[:, :, frame], old[:, :, frame + 1]) for frame in range(new.shape[2] - 1))
    return np.stack([(one != other).any(axis=(1, 2)) for one, other in pairs], axis=1)


def _n_distinct(values: list[NDArray], origins: NDArray) -> NDArray:
    """How many frames values have, if those at the front that are equal count as one."""
    counts = np.empty(origins.shape[1], np.int64)
    for origin, array in enumerate(values):
        for some in _parts(np.flatnonzero(origins[0] == origin), array):
            whole = array[origins[1, some]]
            differs = np.ones((len(some), array.shape[2]), bool)
            differs[:, :-1] = _differs(whole, whole)
            counts[some] = array.shape[2] - differs.argmax(axis=1)
    return counts
