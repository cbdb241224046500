"""A plan that lanes of a rollout run, and the views through which they write into its block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlpool.loop.plan import Episode, Plan
from rlpool.memory.storage import Array
from rlpool.observe.control import MAX_REQUESTS, WorkerRecord
from rlpool.record.tape import Tape
from rlpool.slots.writer import SlotWriter

Parked = list[tuple[Array, Array]] | None
"""Arrays of the batch, each with the row of a lane that is parked."""


@dataclass(slots=True)
class Lane:
    """A lane that runs an episode.

    Attributes:
        episode: Its episode.
        active: The plan that the episode belongs to.
        slot: The slot it writes to.
        chunk: Number of the chunk within the episode.
        steps_before: Steps of the episode before row 0 of the slot; negative if the episode
            started later in the slot.
        parked: Its rows of the batch while it waits for a slot, empty as long as nobody else can
            overwrite them there; ``None`` while it steps.
        tape: Records the slots that the episode has left; ``None`` if it has left none.
    """

    episode: Episode
    active: ActivePlan
    slot: int
    chunk: int = 0
    steps_before: int = 0
    parked: Parked = None
    tape: Tape | None = None

    @property
    def start(self) -> int:
        """The first row of the slot that belongs to the episode."""
        return max(0, -self.steps_before)

    @property
    def tape_so_far(self) -> Tape:
        """The tape; a new one is made if there is none."""
        self.tape = self.tape or Tape(self.episode.seed, self.episode.options)
        return self.tape


class ActivePlan:
    """A plan, its block, and the rows of the block that lanes write to.

    All lanes write in every step. Those that run nothing of this plan write to the spare slot after
    the last, to different rows if there are enough.

    Args:
        plan: The plan.
        writer: Writes into its block.
        n_lanes: Number of lanes.
        record: Is told what they do.

    Attributes:
        plan: The plan.
        writer: Writes into its block.
        rows: int64 ``[n_lanes]``: ``slot * n_timesteps + step`` of each lane, in shared memory:
            they tell how far a worker got that died.
        strides: int64 ``[n_lanes]``: 1 for lanes that write into a slot, 0 for the others.
        n_lanes: Number of lanes that do.
        restarts: Whether lanes restart inside a slot.
    """

    def __init__(self, plan: Plan, writer: SlotWriter, n_lanes: int, record: WorkerRecord) -> None:
        self.plan = plan
        self.writer = writer
        control, worker = plan.arrays.control, plan.worker
        self.restarts = plan.layout.restarts
        self._n_timesteps = plan.layout.n_timesteps
        self._spare_rows = writer.spare_rows
        self._slots: Array = control["slot"][worker]
        self.rows: Array = control["row"][worker]
        self.rows[:] = self._spare_rows
        self.strides = np.zeros(n_lanes, np.int64)
        self.n_lanes = 0
        # As memoryviews: single numbers are read and written faster that way.
        self._running = control["running"][worker].data
        self._steps_before = control["steps_before"][worker].data
        self._slot, self._row, self._stride = self._slots.data, self.rows.data, self.strides.data
        self._spare_row = self._spare_rows.data
        self._record, self._entry = record, record.entry_of(plan.number)

    def enter_slots(self, lanes: Sequence[int], table: Mapping[int, Lane]) -> None:
        """Let lanes write into the slots of what they run, from the first row."""
        for lane in lanes:
            running = table[lane]
            self._slot[lane] = slot = running.slot
            self._row[lane] = slot * self._n_timesteps
            self._stride[lane] = 1
            self._running[lane] = running.episode.number
            self._steps_before[lane] = running.steps_before
        self.n_lanes += len(lanes)
        self._note_begins(lanes, table)

    def restart_in_slots(self, lanes: Sequence[int], table: Mapping[int, Lane]) -> None:
        """Let lanes go on writing into their slots, with their next episodes."""
        self._record.lanes_end(lanes, MAX_REQUESTS)
        for lane in lanes:
            running = table[lane]
            running.episode = self.plan.restarted(lane, running.episode)
            running.tape = None
            running.steps_before = running.slot * self._n_timesteps - self._row[lane]
            self._steps_before[lane] = running.steps_before
        self._note_begins(lanes, table)

    def _note_begins(self, lanes: Sequence[int], table: Mapping[int, Lane]) -> None:
        """Record that lanes begin episodes, or go on with them."""
        numbers: list[int] = []
        n_steps: list[int] = []
        for lane in lanes:
            running, episode = table[lane], table[lane].episode
            # All episodes of a lane that restarts are those of one row, so they are counted.
            numbers.append(episode.n_restarts if self.restarts else episode.number)
            n_steps.append(max(0, running.steps_before))
        self._record.lanes_begin(lanes, self.plan.number, numbers, n_steps)

    def leave_slots(self, lanes: Sequence[int], table: Mapping[int, Lane], is_last: bool) -> None:
        """Complete the slots of lanes, which leave them and end their episodes, or wait.

        Args:
            lanes: The lanes.
            table: What they run.
            is_last: Whether their episodes end there.

        """
        slots: list[int] = []
        lengths: list[int] = []
        starts: list[bool] = []
        for lane in lanes:
            running = table[lane]
            slots.append(running.slot)
            lengths.append(self._row[lane] - running.slot * self._n_timesteps)
            starts.append(running.steps_before == 0)
        self.writer.complete(slots, lanes, lengths, starts)
        for lane in lanes:
            self._row[lane] = self._spare_row[lane]
            self._stride[lane] = 0
        self.n_lanes -= len(lanes)
        if is_last:
            for lane in lanes:
                self._running[lane] = -1
            self._record.lanes_end(lanes, self._entry)
            return
        for lane, length in zip(lanes, lengths, strict=True):
            table[lane].steps_before += length
        self._record.lanes_pause(lanes, [table[lane].steps_before for lane in lanes])

    def abandon(self, lane: int, running: Lane) -> None:
        """Let a lane leave its slot, if it is in one, whose contents are lost."""
        if running.parked is None:
            self.writer.abandon(running.slot, self.steps_in_slot(lane, running))
            self._row[lane] = self._spare_row[lane]
            self._stride[lane] = 0
            self.n_lanes -= 1
        self._running[lane] = -1
        self._record.lane_gives_up(lane)

    def rows_of(self, lanes: Sequence[int]) -> Array:
        """Row numbers of all lanes; those not in ``lanes`` get a row of the spare slot."""
        rows: Array = self._spare_rows.copy()
        rows[lanes] = self.rows[lanes]
        return rows

    def steps_in_slot(self, lane: int, running: Lane) -> int:
        """Rows of its slot that a lane has filled."""
        steps: int = self._row[lane] - running.slot * self._n_timesteps
        return steps

    def full_lanes(self, table: Mapping[int, Lane]) -> list[int]:
        """The lanes that have filled their slots, ascending."""
        full: list[int] = []
        for lane, running in table.items():
            if running.active is self and running.parked is None:
                n_steps = self._row[lane] - running.slot * self._n_timesteps
                if n_steps == self._n_timesteps:
                    full.append(lane)
        return sorted(full)

    @property
    def steps_until_full(self) -> int:
        """Steps until the first slot is full, at most ``n_timesteps``."""
        steps = (self.rows - self._slots * self._n_timesteps) * self.strides
        return self._n_timesteps - int(np.maximum.reduce(steps, initial=0))
