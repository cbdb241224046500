"""What a ``Batcher`` remembers of running episodes: their actions, however windows cut them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlpool.memory.storage import Memory
from rlpool.record.lane_log import LaneLog
from rlpool.slots.blocks import Block, Layout, StepSpecs
from rlpool.specs import TensorSpec

T = 4
FLAG = TensorSpec((), np.dtype(bool))
NUMBER = TensorSpec((), np.dtype(np.int64))


def make_block(n_lanes: int, restarts: bool) -> Block:
    flags = dict.fromkeys(("terminated", "truncated", "done", "initial_state"), FLAG)
    step = StepSpecs(
        n_lanes,
        restarts,
        {"frame": TensorSpec((2,), np.dtype(np.float32)), **flags},
        {"action": NUMBER, "score": NUMBER},
        {"memory": NUMBER},
    )
    layout = Layout(step, n_lanes, T, 1, restarts)
    return Block(0, layout, Memory.local(layout.n_bytes))


class Lanes:
    """Lanes that act, some of which restart: what is logged is compared with plain lists.

    Args:
        n_lanes: Number of lanes.
        restarts: Whether they restart on their own.
    """

    def __init__(self, n_lanes: int, restarts: bool) -> None:
        self.log = LaneLog()
        self.restarts = restarts
        self.running = list(range(n_lanes))
        self.expected: dict[int, list[int]] = {lane: [] for lane in self.running}
        self.n_restarts = dict.fromkeys(self.running, 0)
        self._n_lanes = n_lanes
        self._next = 0

    def window(self, ends: dict[int, int], gone: tuple[int, ...] = ()) -> None:
        """Run a window.

        Args:
            ends: Lane to the step, within the window, with which its episode ends.
            gone: Lanes that do not go on afterwards.
        """
        block = make_block(self._n_lanes, self.restarts)
        rows: dict[str, Any] = block.arrays.rows
        control = block.arrays.control
        for row, lane in enumerate(self.running):
            control["length"][row] = T
            control["steps_before"][0, lane] = len(self.expected[lane])
            for step in range(T):
                self._next += 1
                rows["action"][row, step] = self._next
                self.expected[lane].append(self._next)
                if ends.get(lane) == step:
                    self.expected[lane] = []
                    self.n_restarts[lane] += 1
                    control["steps_before"][0, lane] = -step - 1
                    rows["_done"][row, step] = True
            after = {"frame": 10.0 * self._next + lane, "memory": self._next}
            for key, value in after.items():
                if self.restarts:
                    rows[f"_{key}"][row, T - 1] = value
                else:
                    block.arrays.finals[key][row] = value
        left = [lane for lane in self.running if lane not in gone]
        self.log.note(block, self.running, left)
        self.running = left

    def check(self) -> None:
        """Compare the log with the lists."""
        resumed = self.log.resumed(self.running, self._n_lanes)
        assert [past.lane for past in resumed] == self.running
        for past in resumed:
            expected = self.expected[past.lane]
            assert past.n_steps == len(expected)
            assert past.n_restarts == self.n_restarts[past.lane]
            if expected:
                assert past.actions.keys() == {"action"}
                assert past.actions["action"].tolist() == expected
                assert past.state["memory"] == expected[-1]
                assert past.observation["frame"].tolist() == [10.0 * expected[-1] + past.lane] * 2


def test_actions_of_episodes_that_go_on_for_many_windows() -> None:
    lanes = Lanes(3, restarts=False)
    for _ in range(5):
        lanes.window({})
        lanes.check()


def test_lanes_that_are_gone_do_not_shift_the_others() -> None:
    lanes = Lanes(4, restarts=False)
    lanes.window({}, gone=(1,))
    lanes.window({}, gone=(0,))
    lanes.window({})
    assert lanes.running == [2, 3]
    lanes.check()


@pytest.mark.parametrize("step", range(T))
def test_episodes_that_begin_anywhere_in_a_window(step: int) -> None:
    lanes = Lanes(2, restarts=True)
    lanes.window({0: step})
    lanes.check()
    lanes.window({})
    lanes.check()
    lanes.window({1: step})
    lanes.check()
    lanes.window({0: step, 1: 0})
    lanes.check()


def test_windows_that_no_running_episode_needs_are_dropped() -> None:
    lanes = Lanes(2, restarts=True)
    for _ in range(20):
        lanes.window({0: 1, 1: 3})
    assert len(lanes.log._windows) == 1
    lanes.check()


def test_what_an_agent_with_history_needs_is_not_kept() -> None:
    block = make_block(1, False)
    object.__setattr__(block.layout.step, "wants_history", True)
    log = LaneLog()
    log.note(block, [0], [0])
    assert not log.is_complete
