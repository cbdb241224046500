"""What was asked of environments since their last resets, so that it can be asked of others.

The caller writes down the seed and the options of each lane's last reset and the actions since.
Steps of a batch cost one copy of all actions, into a block of rows that is divided among the lanes
when it is full.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlpool.envs.vec_env import Options
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.memory.storage import Array

_BLOCK_BYTES = 2**18
_MOST_ROWS, _LEAST_ROWS = 1024, 16
"""A block has as many rows as fit into so many bytes, within these bounds."""

Actions = dict[str, Array]


@dataclass(frozen=True)
class RemoteStep:
    """A step that a remote asked for, with the action as the environment takes it."""

    action: Any


@dataclass(frozen=True)
class Reached:
    """How a lane got to where it is.

    Attributes:
        seed: Of its last reset.
        options: Likewise.
        steps: What followed: actions ``[k, ...]`` per key, or single steps of a remote.
        why_lost: Why it cannot be repeated, empty if it can.
    """

    seed: int
    options: Options
    steps: list[Actions | RemoteStep] = field(default_factory=list)
    why_lost: str = ""

    @property
    def n_steps(self) -> int:
        """Steps since the reset."""
        return sum(
            1 if isinstance(part, RemoteStep) else len(next(iter(part.values())))
            for part in self.steps
        )


class EpisodeLog:
    """The last reset of every lane, and the actions since.

    It grows with the longest episode that is running, by the bytes of one action per step.

    Args:
        n_lanes: Number of lanes.
    """

    def __init__(self, n_lanes: int) -> None:
        self._n_lanes = n_lanes
        self._lanes: dict[int, Reached] = {}
        self._pairs: list[tuple[Array, Array]] = []  # where actions are handed over; their block
        self._block: Actions = {}
        self._asked = np.empty((0, n_lanes), bool)  # which lanes a row of the block is for
        self._start = [0] * n_lanes  # first row of the block that belongs to a lane's episode
        self._row = 0
        self._n_rows = 0

    def bind(self, actions: Mapping[str, Array]) -> None:
        """Tell where the actions of every step are, ``[n_lanes, ...]`` per key."""
        row_bytes = sum(array.nbytes for array in actions.values())
        self._n_rows = max(_LEAST_ROWS, min(_MOST_ROWS, _BLOCK_BYTES // max(1, row_bytes)))
        self._block = {
            key: np.empty((self._n_rows, *array.shape), array.dtype)
            for key, array in actions.items()
        }
        self._pairs = [(array, self._block[key]) for key, array in actions.items()]
        self._asked = np.empty((self._n_rows, self._n_lanes), bool)

    def next_row(self) -> int:
        """Where the next step is written down."""
        if self._row == self._n_rows:
            with InterruptsHeld():
                self._divide()
        return self._row

    def note_step(self, lanes: Sequence[int], row: int) -> None:
        """Write down a step of lanes with the actions that are there now.

        Args:
            lanes: The lanes.
            row: What ``next_row`` said. Writing the same step there again changes nothing.
        """
        for source, block in self._pairs:
            block[row] = source
        asked = self._asked[row]
        if len(lanes) == self._n_lanes:
            asked[:] = True
        else:
            asked[:] = False
            asked[lanes] = True
        self._row = row + 1

    def note_reset(self, lane: int, seed: int, options: Options) -> None:
        """Write down a reset, which makes all before it superfluous."""
        # The caller may change its options afterwards.
        self._lanes[lane] = Reached(int(seed), copy.deepcopy(options) if options else None)
        self._start[lane] = self._row

    def note_remote_step(self, lane: int, action: Any) -> None:
        """Write down a step that a remote asked for."""
        reached = self._lanes.get(lane)
        if reached is not None:
            self._take_rows(lane)
            reached.steps.append(RemoteStep(copy.deepcopy(action)))

    def forget(self, lane: int) -> None:
        """Forget a lane, which needs a reset anyway."""
        self._lanes.pop(lane, None)

    def lose(self, lane: int, why: str) -> None:
        """Take note that what a lane did cannot be repeated."""
        if lane in self._lanes:
            self._lanes[lane] = Reached(0, None, why_lost=why)

    def reached(self, lane: int) -> Reached | None:
        """How a lane got to where it is, ``None`` if it was not reset."""
        if lane in self._lanes:
            self._take_rows(lane)
        return self._lanes.get(lane)

    def _divide(self) -> None:
        """Give the lanes their rows, and begin the block anew."""
        for lane in range(self._n_lanes):
            self._take_rows(lane)
        self._start = [0] * self._n_lanes
        self._row = 0

    def _take_rows(self, lane: int) -> None:
        """Move a lane's rows of the block to what it did."""
        rows = slice(self._start[lane], self._row)
        self._start[lane] = self._row
        reached = self._lanes.get(lane)
        asked = self._asked[rows, lane]
        if reached is not None and not reached.why_lost and asked.any():
            reached.steps.append({key: b[rows, lane][asked] for key, b in self._block.items()})


def without_last(reached: Reached) -> tuple[Reached, Actions]:
    """Take the last step, one of a batch, off what a lane did; returns its actions as well."""
    if reached.why_lost:
        return reached, {}
    *before, last = reached.steps
    if isinstance(last, RemoteStep):
        raise TypeError("the last step was one of a remote")
    if len(next(iter(last.values()))) > 1:
        before.append({key: values[:-1] for key, values in last.items()})
    shortened = Reached(reached.seed, reached.options, before, reached.why_lost)
    return shortened, {key: values[-1] for key, values in last.items()}
