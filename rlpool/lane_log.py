"""What running episodes of a ``Batcher`` have done so far, so that another worker can go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlpool.envs.vec_env import FLAGS
from rlpool.plan import Resumed
from rlpool.slots import Block, successor_key
from rlpool.storage import Array


@dataclass
class _Lane:
    n_restarts: int = 0
    n_steps: int = 0
    actions: list[dict[str, Array]] = field(default_factory=list)
    state: dict[str, Array] = field(default_factory=dict)
    observation: dict[str, Array] = field(default_factory=dict)


class LaneLog:
    """The actions of every running episode, and where they led to, since one ``reset``.

    A worker that dies takes its environments with it. Its successor gets to the same point by
    repeating the actions, which takes memory that grows with the episodes: one copy of their
    actions.

    Attributes:
        is_complete: Whether all that is needed is known. An agent that asks for all previous
            steps would have to see them again, and they are not kept.
    """

    def __init__(self) -> None:
        self.is_complete = True
        self._lanes: dict[int, _Lane] = {}

    def note(self, block: Block, lanes: Sequence[int], lanes_left: Sequence[int]) -> None:
        """Take down what a window has brought.

        Args:
            block: The window.
            lanes: Which lane each row is, numbered across workers.
            lanes_left: Lanes that go on.
        """
        layout, arrays = block.layout, block.arrays
        if layout.step.wants_history:
            self.is_complete = False
            return
        left = set(lanes_left)
        steps_before = arrays.control["steps_before"].reshape(-1)
        lengths = arrays.control["length"]
        for row, lane in enumerate(lanes):
            if lane in left:
                done = self._lanes.setdefault(lane, _Lane())
                self._extend(done, block, row, int(lengths[row]), int(steps_before[lane]))
            else:
                self._lanes.pop(lane, None)

    @staticmethod
    def _extend(done: _Lane, block: Block, row: int, length: int, steps_before: int) -> None:
        step, rows = block.layout.step, block.arrays.rows
        actions = [key for key in step.output if key == "action" or key.startswith("action/")]
        if steps_before < 0 or not done.n_steps:
            done.actions = []
        first = max(0, -steps_before)  # in this window the lane's episode began, or it went on
        done.actions.append({key: rows[key][row, first:length].copy() for key in actions})
        done.n_steps = steps_before + length
        after = block.arrays.finals
        last: tuple[int, ...] = (row,)
        if block.layout.restarts:
            after = {key: rows[successor_key(key)] for key in step.succeeded}
            last = (row, length - 1)
            done.n_restarts += int(after["done"][row, :length].sum())
        done.state = {key: np.array(after[key][last]) for key in step.state}
        done.observation = {
            key: np.array(after[key][last])
            for key in step.observation
            if key in after and key not in FLAGS and done.n_steps
        }

    def resumed(self, lanes: Sequence[int], n_lanes: int) -> list[Resumed]:
        """How far lanes of one worker were.

        Args:
            lanes: The lanes, numbered across workers.
            n_lanes: Lanes of a worker.
        """
        resumed = []
        for lane in lanes:
            done = self._lanes[lane]
            actions = {
                key: np.concatenate([part[key] for part in done.actions]) for key in done.actions[0]
            }
            resumed.append(
                Resumed(
                    lane % n_lanes,
                    done.n_restarts,
                    done.n_steps,
                    actions,
                    done.state,
                    done.observation,
                )
            )
        return resumed
