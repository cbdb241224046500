"""A plan that lanes of a rollout run, and the views through which they write into its block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from operator import attrgetter

import numpy as np

from rlpool.data.storage import NDArray
from rlpool.loop.plan import Episode, Plan
from rlpool.observe.control import MAX_REQUESTS, WorkerRecord
from rlpool.record.tape import Tape
from rlpool.slots.writer import SlotWriter


class State(Enum):
    """What a lane does that runs an episode; one that runs none is idle."""

    PARKED = auto()  # it has no slot, and its rows of the batch stay as they are
    LIVE = auto()  # it steps with the batch, into its slot
    STEPPING = auto()  # live, with a step that is not finished


@dataclass(slots=True, eq=False)
class Lane:
    """A lane that runs an episode.

    Attributes:
        number: Its number.
        episode: Its episode.
        active: The plan that the episode belongs to.
        slot: The slot it writes to.
        chunk: Number of the chunk within the episode.
        steps_before: Steps of the episode before row 0 of the slot; negative if the episode
            started later in the slot.
        state: What it does.
        tape: Records the slots that the episode has left; ``None`` if it has left none.
    """

    number: int
    episode: Episode
    active: ActivePlan
    slot: int
    chunk: int = 0
    steps_before: int = 0
    state: State = State.PARKED
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

    @property
    def steps(self) -> int:
        """Steps of the episode so far."""
        return self.steps_before + self.active.steps_in_slot(self)


class ActivePlan:
    """A plan, its block, and the rows of the block that lanes write to.

    All lanes write in every step. Those that run nothing of this plan write to the spare slot after
    the last, to different rows if there are enough.

    Args:
        plan: The plan.
        writer: Writes into its block.
        n_lanes: Number of lanes.
        record: Where it is noted what they do.

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
        self._slots: NDArray = control["slot"][worker]
        self.rows: NDArray = control["row"][worker]
        self.rows[:] = self._spare_rows
        self.strides = np.zeros(n_lanes, np.int64)
        self.n_lanes = 0
        # As memoryviews: single numbers are read and written faster that way.
        self._running = control["running"][worker].data
        self._steps_before = control["steps_before"][worker].data
        self._slot, self._row, self._stride = self._slots.data, self.rows.data, self.strides.data
        self._spare_row = self._spare_rows.data
        self._record, self._entry = record, record.entry_of(plan.number)

    def enter_slots(self, lanes: Sequence[Lane]) -> None:
        """Let lanes write into their slots, from the first row."""
        begun: list[tuple[int, int, int]] = []
        for lane in lanes:
            number, slot, n_before = lane.number, lane.slot, lane.steps_before
            lane.state = State.LIVE
            self._slot[number] = slot
            self._row[number] = slot * self._n_timesteps
            self._stride[number] = 1
            self._running[number] = lane.episode.number
            self._steps_before[number] = n_before
            # All episodes of a lane that restarts are those of one row, so they are counted.
            shown = lane.episode.n_restarts if self.restarts else lane.episode.number
            begun.append((number, shown, max(0, n_before)))
        self.n_lanes += len(lanes)
        self._record.lanes_begin(self.plan.number, begun)

    def restart_in_slots(self, lanes: Sequence[Lane]) -> None:
        """Let lanes go on writing into their slots, with their next episodes."""
        self._record.lanes_end([lane.number for lane in lanes], MAX_REQUESTS)
        begun: list[tuple[int, int, int]] = []
        for lane in lanes:
            number = lane.number
            lane.episode = self.plan.restarted(number, lane.episode)
            lane.tape = None
            lane.steps_before = lane.slot * self._n_timesteps - self._row[number]
            self._steps_before[number] = lane.steps_before
            begun.append((number, lane.episode.n_restarts, 0))
        self._record.lanes_begin(self.plan.number, begun)

    def leave_slots(self, lanes: Sequence[Lane], is_last: bool) -> None:
        """Complete the slots of lanes, which leave them and end their episodes, or wait.

        Args:
            lanes: The lanes.
            is_last: Whether their episodes end there.

        """
        numbers: list[int] = []
        slots: list[int] = []
        lengths: list[int] = []
        starts: list[bool] = []
        for lane in lanes:
            numbers.append(lane.number)
            slots.append(lane.slot)
            lengths.append(self._row[lane.number] - lane.slot * self._n_timesteps)
            starts.append(lane.steps_before == 0)
        self.writer.complete(slots, numbers, lengths, starts)
        for number in numbers:
            self._row[number] = self._spare_row[number]
            self._stride[number] = 0
        self.n_lanes -= len(lanes)
        if is_last:
            for number in numbers:
                self._running[number] = -1
            self._record.lanes_end(numbers, self._entry)
            return
        for lane, length in zip(lanes, lengths, strict=True):
            lane.state = State.PARKED
            lane.chunk += 1
            lane.steps_before += length
            self._record.lane_pauses(lane.number, lane.steps_before)

    def abandon(self, lane: Lane) -> None:
        """Let a lane leave its slot, if it is in one, whose contents are lost."""
        number = lane.number
        if lane.state is not State.PARKED:
            self.writer.abandon(lane.slot, self.steps_in_slot(lane))
            self._row[number] = self._spare_row[number]
            self._stride[number] = 0
            self.n_lanes -= 1
        self._running[number] = -1
        self._record.lane_gives_up(number)

    def rows_of(self, lanes: Sequence[int]) -> NDArray:
        """Row numbers of all lanes; those not in ``lanes`` get a row of the spare slot."""
        rows: NDArray = self._spare_rows.copy()
        rows[lanes] = self.rows[lanes]
        return rows

    def steps_in_slot(self, lane: Lane) -> int:
        """Rows of its slot that a lane has filled."""
        steps: int = self._row[lane.number] - lane.slot * self._n_timesteps
        return steps

    def full_lanes(self, running: Iterable[Lane]) -> list[Lane]:
        """Those of the lanes that run this plan and have filled their slots, ascending."""
        full: list[Lane] = []
        for lane in running:
            if lane.active is self and lane.state is not State.PARKED:
                n_steps = self._row[lane.number] - lane.slot * self._n_timesteps
                if n_steps == self._n_timesteps:
                    full.append(lane)
        return sorted(full, key=by_number)

    @property
    def steps_until_full(self) -> int:
        """Steps until the first slot is full, at most ``n_timesteps``."""
        steps = (self.rows - self._slots * self._n_timesteps) * self.strides
        return self._n_timesteps - int(np.maximum.reduce(steps, initial=0))


by_number = attrgetter("number")
