"""What running episodes of a ``Batcher`` have done so far, so that another worker can go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlpool.envs.vec_env import FLAGS
from rlpool.loop.plan import Resumed
from rlpool.memory.storage import Array
from rlpool.slots.blocks import Arrays, Block, Layout, successor_key


@dataclass(frozen=True)
class _Window:
    """The actions of one window.

    Attributes:
        row_of: Lane to row.
        actions: Key to ``[rows, T, ...]``.
    """

    row_of: dict[int, int]
    actions: dict[str, Array]


class LaneLog:
    """The actions of every running episode, and where they led to, since one ``reset``.

    A worker that dies takes its environments with it. Its successor gets to the same point by
    repeating the actions. They are copied a window at a time, whatever the number of lanes, and
    kept as long as the oldest running episode needs them.

    Attributes:
        is_complete: Whether all that is needed is known. An agent that asks for all previous
            steps would have to see them again, and they are not kept.
    """

    def __init__(self) -> None:
        self.is_complete = True
        self._windows: deque[_Window] = deque()  # the oldest first
        self._n_steps: dict[int, int] = {}  # of each running lane's episode
        self._n_restarts: dict[int, int] = {}
        self._state: dict[str, Array] = {}  # [rows of the last window, ...]
        self._observation: dict[str, Array] = {}

    def note(self, block: Block, lanes: Sequence[int], lanes_left: Sequence[int]) -> None:
        """Take down what a window has brought.

        Args:
            block: The window.
            lanes: Which lane each row is, numbered across workers.
            lanes_left: Lanes that go on; they have filled their slots.
        """
        layout, arrays, n_rows = block.layout, block.arrays, len(lanes)
        if layout.step.wants_history:
            self.is_complete = False
            return
        row_of = {lane: row for row, lane in enumerate(lanes)}
        keys = [key for key in layout.step.output if key == "action" or key.startswith("action/")]
        actions = {key: arrays.rows[key][:n_rows].copy() for key in keys}
        self._windows.append(_Window(row_of, actions))
        last = _last_values(layout, arrays, n_rows)
        self._state = {key: last[key] for key in layout.step.state}
        self._observation = {
            key: last[key] for key in layout.step.observation if key in last and key not in FLAGS
        }
        steps_before = arrays.control["steps_before"].reshape(-1).tolist()
        self._n_steps = {lane: steps_before[lane] + layout.n_timesteps for lane in lanes_left}
        if layout.restarts:
            ends = arrays.rows[successor_key("done")][:n_rows].sum(1).tolist()
            for lane in lanes_left:
                self._n_restarts[lane] = self._n_restarts.get(lane, 0) + ends[row_of[lane]]
        n_needed = -(-max(self._n_steps.values(), default=0) // layout.n_timesteps)
        while len(self._windows) > n_needed:
            self._windows.popleft()

    def resumed(self, lanes: Sequence[int], n_lanes: int) -> list[Resumed]:
        """How far lanes of one worker were.

        Args:
            lanes: The lanes, numbered across workers.
            n_lanes: Lanes of a worker.
        """
        return [self._resumed(lane, lane % n_lanes) for lane in lanes]

    def _resumed(self, lane: int, lane_of_worker: int) -> Resumed:
        n_steps, n_restarts = self._n_steps[lane], self._n_restarts.get(lane, 0)
        if not n_steps:  # its episode begins with the next window
            return Resumed(lane_of_worker, n_restarts, 0, {}, {}, {})
        parts: list[dict[str, Array]] = []
        n_missing = n_steps
        for window in reversed(self._windows):
            if n_missing <= 0:
                break
            row = window.row_of[lane]
            part = {key: array[row][-n_missing:] for key, array in window.actions.items()}
            n_missing -= len(next(iter(part.values())))
            parts.insert(0, part)
        row = self._windows[-1].row_of[lane]
        return Resumed(
            lane_of_worker,
            n_restarts,
            n_steps,
            {key: np.concatenate([part[key] for part in parts]) for key in parts[0]},
            {key: array[row] for key, array in self._state.items()},
            {key: array[row] for key, array in self._observation.items()},
        )


def _last_values(layout: Layout, arrays: Arrays, n_rows: int) -> dict[str, Array]:
    """Copies of what the last steps of a window led to, ``[n_rows, ...]`` per key."""
    if not layout.restarts:
        return {key: array[:n_rows].copy() for key, array in arrays.finals.items()}
    last = layout.n_timesteps - 1
    return {
        key: arrays.rows[successor_key(key)][:n_rows, last].copy() for key in layout.step.succeeded
    }
