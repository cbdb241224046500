"""Which environment runs which rollout, and which row of the policy's batch it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from rlpool.agents.noise import NoiseStarts
from rlpool.envs.lanes import LaneError, Options
from rlpool.envs.vec_env import VecEnv
from rlpool.loop.plan import Chunk, Episode, Plan
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.memory.storage import Array, Memory
from rlpool.record.tape import joined
from rlpool.seeding import Words
from rlpool.slots.blocks import Layout
from rlpool.specs import DEFAULT_OBSERVATION_KEY, TensorSpec, is_action


class RolloutColumns(NamedTuple):
    """A complete rollout of L steps, as arrays that share no memory.

    Attributes:
        observations: ``[L, ...]``, or a dict of such arrays; numbers are ``[L, 1]``.
        actions: Likewise.
        rewards: float32 ``[L, 1]``.
        terminals: bool ``[L, 1]``, True at most at the end, and only for a termination.
        next_observations: Like the observations, one step later.
    """

    observations: Any
    actions: Any
    rewards: Array
    terminals: Array
    next_observations: Any


Deliver = Callable[[RolloutColumns, Any], None]
"""Takes a complete rollout and its task, ``None`` if it was given none."""

TASK_OPTION = "task"
"""Key of the task among the options of a reset."""


class RowsEnv(VecEnv):
    """A batch of ``n_rows`` rows, each of which shows the lane last assigned to it.

    The last bits of what an agent computes depend on the number of rows in its batch and on the
    position of a row. Here neither depends on the number of environments, so that one environment
    gives the same bits as many side by side.

    The first ``reset_lanes``, by which the loop learns keys and shapes, resets no environment,
    unless observations are undeclared and only a reset can show them.

    Args:
        lanes: The environments. They are not closed with this object.
        n_rows: Rows of the batch, at least one per lane.
    """

    def __init__(self, lanes: VecEnv, n_rows: int) -> None:
        super().__init__(n_rows)
        self.lanes = lanes
        self._lane_of = np.zeros(n_rows, np.int64)
        self._row_of: dict[int, int] = {}
        self.min_ready, self._action_leaves = lanes.min_ready, lanes.action_leaves

    def assign(self, row: int, lane: int) -> None:
        """Let a row show another lane, which is reset next."""
        self._lane_of[row] = lane
        self._row_of[lane] = row

    def declare_actions(self, specs: Mapping[str, TensorSpec]) -> None:
        """See ``VecEnv.declare_actions``."""
        self.lanes.declare_actions(specs)
        super().declare_actions(specs)

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        if not self._row_of:
            if self.lanes.columns is None:
                self._call_lanes(self.lanes.reset_lanes, [0], seeds[:1], options[:1])
            if self.lanes.declaration is not None:
                self.declare(self.lanes.declaration)
            return
        by_lane = sorted(range(len(lanes)), key=lambda i: self._lane_of[lanes[i]])
        self._call_lanes(
            self.lanes.reset_lanes,
            [int(self._lane_of[lanes[i]]) for i in by_lane],
            [seeds[i] for i in by_lane],
            [options[i] for i in by_lane],
        )
        self._show()

    def step_lanes(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> list[int]:
        """See ``VecEnv.step_lanes``; its lanes are the rows here."""
        self._call_lanes(self.lanes.step_lanes, *self._for_lanes(lanes, actions))
        self._show()
        return [row for row in lanes if self.current["done"][row]]

    def step_some(
        self,
        min_ready: int = 1,
        lanes: Sequence[int] = (),
        actions: Mapping[str, Array] | None = None,
    ) -> list[int]:
        """See ``VecEnv.step_some``; its lanes are the rows here."""
        given = self._for_lanes(lanes, actions or {})
        ready = self._call_lanes(self.lanes.step_some, min_ready, *given)
        self._show()
        return sorted(self._row_of[lane] for lane in ready)

    def _for_lanes(
        self, rows: Sequence[int], actions: Mapping[str, Array]
    ) -> tuple[list[int], dict[str, Array]]:
        """The lanes of some rows, ascending, and the rows' actions in lane order."""
        lanes = self._lane_of[list(rows)]
        given = {}
        for key, values in actions.items():
            given[key] = np.zeros((self.lanes.n_lanes, *values.shape[1:]), values.dtype)
            given[key][lanes] = values[list(rows)]
        return sorted(lanes.tolist()), given

    def _call_lanes(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call the environments; errors name the row instead of the lane."""
        try:
            return method(*arguments)
        except LaneError as error:
            error.lane = self._row_of.get(error.lane, 0)
            raise

    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> Any:
        raise NotImplementedError  # step_lanes does all of it

    def _show(self) -> None:
        """Copy into every row what its lane shows; idle rows keep copying their last lane."""
        for key, array in self.current.items():
            array[:] = self.lanes.current[key][self._lane_of]


@dataclass
class RolloutPlan(Plan):
    """Deals rollouts out to lanes: rollout *i* runs on lane ``i % n_lanes``.

    In the batch it has row ``i % n_rows``, whatever the number of lanes. If that row is still in
    use, the rollout waits; this happens only if the number of lanes does not divide the number of
    rows and one lane is several rollouts ahead of another.

    Args:
        layout: One slot per row. Longer rollouts are copied out slot by slot.
        rows: The rows.
        episodes: The rollouts, with their rows as slots.
        noise_keys: One per rollout.
        deliver: Takes complete rollouts, and their tasks, in the order of their numbers.
    """

    layout: Layout
    rows: RowsEnv
    episodes: Sequence[Episode]
    noise_keys: Words
    deliver: Deliver

    def __post_init__(self) -> None:
        self.arrays = self.layout.arrays(Memory.local(self.layout.n_bytes).root())
        step = self.layout.step
        self._noise = NoiseStarts(self.noise_keys, step.n_noise) if step.n_noise else None
        self._n_lanes = n_lanes = self.rows.lanes.n_lanes
        self._next = {lane: lane for lane in range(n_lanes)}  # idle lane to its next rollout
        self._chunks: dict[int, list[dict[str, Array]]] = {}
        self._complete: dict[int, RolloutColumns] = {}
        self._n_delivered = 0
        self._observed = list(self.rows.columns.observed) if self.rows.columns is not None else []
        self._acted = [key for key in step.output if is_action(key)]

    def next_episodes(self, lanes: Sequence[int]) -> dict[int, Episode]:
        """The rollouts that start in these rows, of those whose lanes are idle."""
        n_rollouts = len(self.episodes)
        coming = {self.episodes[n].slot: n for n in self._next.values() if n < n_rollouts}
        episodes: dict[int, Episode] = {}
        for row in coming.keys() & set(lanes):
            number = coming[row]
            del self._next[number % self._n_lanes]
            self.rows.assign(row, number % self._n_lanes)
            noise = None if self._noise is None else self._noise[number]
            episodes[row] = replace(self.episodes[number], noise=noise)
        return episodes

    def next_slots(self, lanes: Sequence[int]) -> dict[int, int]:
        """The rows' slots again, as their contents were copied out."""
        return {lane: lane for lane in lanes}

    def take_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Copy slots out; the last one of a rollout completes it."""
        for episode, slot, _, is_last in chunks:
            self._take_chunk(episode, slot, is_last)

    def _take_chunk(self, episode: int, slot: int, is_last: bool) -> None:
        length = int(self.arrays.control["length"][slot])
        chunks = self._chunks.setdefault(episode, [])
        kept = (*self._observed, *self._acted, "reward")
        chunks.append({key: self.arrays.rows[key][slot, :length].copy() for key in kept})
        if not is_last:
            return
        self._next[episode % self._n_lanes] = episode + self._n_lanes
        self._complete[episode] = self._joined(self._chunks.pop(episode), slot)
        while self._n_delivered in self._complete:
            self._n_delivered += 1
            self._deliver(self._n_delivered - 1)

    def deliver_rest(self) -> None:
        """Deliver what is complete although an earlier rollout failed."""
        for number in sorted(self._complete):
            self._deliver(number)

    def _deliver(self, number: int) -> None:
        task = (self.episodes[number].options or {}).get(TASK_OPTION)
        with InterruptsHeld():  # stored and counted, or neither
            # Forgotten first: a rollout that is refused is not offered twice.
            self.deliver(self._complete.pop(number), task)

    def _joined(self, chunks: Sequence[dict[str, Array]], slot: int) -> RolloutColumns:
        finals = self.arrays.finals
        before = joined(chunks)
        after = {
            key: np.concatenate([before[key][1:], finals[key][slot][None]])
            for key in (*self._observed, "reward")
        }
        terminals = np.zeros((len(before["reward"]), 1), bool)
        terminals[-1] = finals["terminated"][slot]
        return RolloutColumns(
            _nested(before, self._observed, DEFAULT_OBSERVATION_KEY),
            _nested(before, self._acted, "action"),
            after["reward"][:, None],
            terminals,
            _nested(after, self._observed, DEFAULT_OBSERVATION_KEY),
        )


def _nested(arrays: Mapping[str, Array], keys: Sequence[str], default_key: str) -> Any:
    """Arrays by key, or just the array of the default key; numbers ``[L]`` become ``[L, 1]``."""
    columns = {
        key.removeprefix(f"{default_key}/"): array[:, None] if array.ndim == 1 else array
        for key, array in ((key, arrays[key]) for key in keys)
    }
    return columns[default_key] if list(columns) == [default_key] else columns
