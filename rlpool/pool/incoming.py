"""Transitions that are to be added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rlpool.memory.storage import Array
from rlpool.pool.stacks import NewFrames, Source


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
    is_last: Array
    finals: Mapping[str, Source]
    frames: Mapping[str, NewFrames]
    ends: Array
    is_told: bool = True

    def part(self, places: slice | Array) -> Incoming:
        """Some of the transitions, no copy: a range, or pieces that each end with a last one."""
        columns, finals = (
            {key: source.part(places) for key, source in sources.items()}
            for sources in (self.columns, self.finals)
        )
        return self._replace(columns=columns, is_last=self.is_last[places], finals=finals)

    def frames_named(self, key: str) -> Array:
        """Numbers of the frames of a stack that these transitions need, ascending."""
        is_needed = np.zeros(len(self.frames[key].places), bool)
        is_needed[self.columns[key].values()] = True
        if key in self.finals:
            is_needed[self.finals[key].part(self.is_last).values()] = True
        return np.flatnonzero(is_needed)

    def tails(self) -> dict[str, Array]:
        """Key of a stack to where the frames after each row of the trajectories lie.

        int32 ``[B, n_frames]``, -1 for rows without steps.
        """
        tails = {}
        for key in self.frames.keys() & self.finals.keys():
            places = self.frames[key].places[self.finals[key].part(self.ends).values()]
            places[self.ends < 0] = -1
            tails[key] = places
        return tails
