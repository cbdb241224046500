"""Lanes, the plans that distribute episodes to them, and the queue of plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from rlpool.data.storage import NDArray
from rlpool.envs.vec_env import Options
from rlpool.errors import WorkerError
from rlpool.observe.control import MAX_REQUESTS, WorkerRecord
from rlpool.record.tape import Tape
from rlpool.seeding import NoiseStart
from rlpool.slots.blocks import Arrays, Layout, flat, successor_key


class State(Enum):
    """State of a lane."""

    IDLE = auto()  # runs no episode
    PARKED = auto()  # its episode has no slot, and its rows of the batch stay unchanged
    LIVE = auto()  # steps with the batch and writes to its slot
    STEPPING = auto()  # live, with an unfinished step


@dataclass(slots=True, eq=False)
class Lane:
    """A lane of a rollout, and its episode unless it is idle.

    Attributes:
        number: Its number.
        plan: The plan of the episode.
        state: The lane's state.
        row: The episode's row of the request.
        seed: Seed of its reset.
        options: Its row of ``env_info``.
        noise: Its noise, ``None`` if the agent needs none.
        slot: The slot that the lane writes to.
        fails_at: The step that is known to fail: the episode is truncated there instead. -1 for
            the reset, ``None`` if no failure is known.
        episode: Its number among all episodes of the batcher; for windows, the number of its lane
            among all lanes.
        n_restarts: Number of automatic restarts of the lane before it.
        chunk: Number of the chunk within the episode.
        steps_before: Steps of the episode before row 0 of the slot; negative if the episode
            started later in the slot.
        tape: Records the slots that the episode has left; ``None`` if it has left none.
    """

    number: int
    plan: Plan = field(init=False)
    state: State = State.IDLE
    row: int = -1
    seed: int = 0
    options: Options = None
    noise: NoiseStart | None = None
    slot: int = -1
    fails_at: int | None = None
    episode: int = 0
    n_restarts: int = 0
    chunk: int = 0
    steps_before: int = 0
    tape: Tape | None = None

    @property
    def start(self) -> int:
        """The first row of the slot that belongs to the episode."""
        return max(0, -self.steps_before)

    @property
    def tape_so_far(self) -> Tape:
        """The tape; a new one is made if there is none."""
        self.tape = self.tape or Tape(self.seed, self.options)
        return self.tape

    @property
    def steps(self) -> int:
        """Steps of the episode so far."""
        return self.steps_before + self.plan.steps_in_slot(self)


_OF_SLOTS = ("length", "starts", "dirty")

Pair = tuple[NDArray, NDArray]
"""A target in the block and its source, flattened so that one index selects a row."""

Output = tuple[str, NDArray, NDArray | None, NDArray | None]
"""A key of the agent's output and its target; for rows with a shape, also a buffer that it is
copied to first, and the buffer's flattened rows."""


class SlotWriter:
    """The views through which one rollout writes into one block.

    Rows are numbered through all slots: ``slot * n_timesteps + step``.

    Args:
        layout: The block's layout.
        arrays: The block.
        current: Key to array ``[n_lanes, ...]``: the environments' buffers and the noise.
        state: Key to array ``[n_lanes, ...]``: the agent's state.

    Attributes:
        before: Values before the step: ``target[rows] = source`` writes one row per lane.
        states: The agent's states before the step, some made by its call.
        outputs: The agent's outputs.
        after: Values after the step, if the layout stores them.
        finals: Values stored at the end of a slot: ``target[slot] = source[lane]``.
        rows: ``[n_slots + 1, T, ...]``: all rows of the block.
        length, starts, dirty: One int64 per slot, see ``Layout.control``.
        spare_rows: int64 ``[n_lanes]``: rows of the spare slot, for lanes without another slot.
    """

    def __init__(
        self,
        layout: Layout,
        arrays: Arrays,
        current: Mapping[str, NDArray],
        state: Mapping[str, NDArray],
    ) -> None:
        n_lanes = layout.step.n_lanes
        sources = {**current, **state}
        targets = {key: flat(array, 2) for key, array in arrays.rows.items()}
        self.rows = list(arrays.rows.values())
        self.states: list[Pair] = [(targets[key], flat(array, 1)) for key, array in state.items()]
        self.before: list[Pair] = [
            (targets[key], flat(array, 1)) for key, array in current.items() if key in targets
        ]
        self.after: list[Pair] = [
            (targets[successor_key(key)], flat(array, 1))
            for key, array in sources.items()
            if successor_key(key) in targets
        ]
        self.outputs: list[Output] = []
        for key, spec in layout.step.output.items():
            buffer = np.zeros((n_lanes, *spec.shape), spec.dtype) if spec.shape else None
            as_rows = None if buffer is None else flat(buffer, 1)
            self.outputs.append((key, targets[key], buffer, as_rows))
        self.finals = [(array, sources[key]) for key, array in arrays.finals.items()]
        # As memoryviews, whose single numbers are faster to read and write.
        numbers: tuple[Any, ...] = tuple(arrays.control[k].data for k in _OF_SLOTS)
        self.length, self.starts, self.dirty = numbers
        self._n_timesteps = layout.n_timesteps
        spare = layout.n_slots * layout.n_timesteps
        self.spare_rows: NDArray = spare + np.arange(n_lanes) % layout.n_timesteps

    def abandon(self, slot: int, length: int) -> None:
        """Record how far an unfinished slot was written."""
        self.dirty[slot] = max(self.dirty[slot], min(length + 1, self._n_timesteps))


Chunk = tuple[int, int, int, bool]
"""Row of the episode, slot, number of the chunk, and whether the episode ends with it."""


class Plan(ABC):
    """Decides which episodes a rollout runs, and lets lanes write them into its block.

    All lanes write in every step. Lanes that do not run this plan write to the spare slot after the
    last, to different rows if there are enough.

    Attributes:
        number: Number of the request.
        worker: Number of the worker.
        layout: Layout of the block.
        arrays: The block.
        agent_info: ``[n, ...]`` per key, one row per episode.
        tapes: Lane to the tape of an episode that another worker began.
        lacks_slots: Whether an idle lane has an episode but no slot for it.
        cancelled: One element, nonzero once the request was cancelled.
        has_failing: Whether any of its episodes has a step that is known to fail.
        numbers_episodes: Whether ``Lane.episode`` counts the episodes of the batcher.
        is_dealt: Whether it has refused a lane an episode because there are no more.
        complete: Of each slot, 1 once it holds all of the episode of that row; ``None`` if all
            slots are taken with ``take_slot_of``.
        writer: Writes into the block, once the plan is bound.
        rows: int64 ``[n_lanes]``: ``slot * n_timesteps + step`` of each lane, in shared memory,
            where they show how far a dead worker got.
        strides: int64 ``[n_lanes]``: 1 for lanes that write into a slot, 0 for the others.
        n_writing: Number of lanes that write into a slot.
        restarts: Whether lanes restart inside a slot.
    """

    number = worker = 0
    layout: Layout
    arrays: Arrays
    agent_info: Mapping[str, NDArray] = {}
    tapes: Mapping[int, Tape] = {}
    lacks_slots = False
    cancelled: Sequence[int] = (0,)
    has_failing = False
    numbers_episodes = False
    is_dealt = False
    complete: Any = None

    # Decisions -----------------------------------------------------------------------------------

    @property
    def resets_all_lanes(self) -> bool:
        """Whether it begins with one reset of all lanes; it then runs alone."""
        return False

    @abstractmethod
    def next_episode(self, lane: Lane) -> bool:
        """Begin an idle lane's next episode; False if there is none (for now)."""

    @abstractmethod
    def next_slot(self, lane: Lane) -> bool:
        """Give a lane a slot for the next chunk of its episode; False if there is none (yet)."""

    def take_slot_of(self, lane: Lane, *, is_last: bool) -> None:  # noqa: B027
        """Take a complete slot; its lane's episode has ended if ``is_last``."""

    def flush(self) -> None:  # noqa: B027
        """Report the slots completed since the last call."""

    def wait(self) -> bool:
        """Wait for slots when no lane can step; False if there is nothing to wait for."""
        return False

    def has_news(self) -> bool:
        """Whether slots may have become available since the last refusal."""
        return False

    def is_over(self) -> bool:
        """Whether no lane will get an episode or a slot any more, given that none runs it now."""
        return True

    def is_left_over(self) -> bool:
        """Whether the rest is left to the successor of this worker."""
        return False

    # Of windows:

    def resume(self, lane: Lane, n_restarts: int) -> None:
        """Assign the episode on a lane's tape to the lane."""
        raise NotImplementedError

    def restart(self, lane: Lane) -> None:
        """Assign the next episode to a lane, in the same slot of a window."""
        raise NotImplementedError

    # Of plans that run at the same time as others:

    def take_back(self, lane: Lane, slot: int | None) -> None:
        """Begin a lane's episode again, which was in a slot, if any."""
        raise NotImplementedError

    # Writing -------------------------------------------------------------------------------------

    def bind(self, writer: SlotWriter, n_lanes: int, record: WorkerRecord) -> None:
        """Bind the plan to the block; no lane writes to it yet.

        Args:
            writer: Writes into the block.
            n_lanes: Number of lanes.
            record: The record of the lanes' activity.
        """
        self.writer, self.restarts = writer, self.layout.restarts
        control, worker = self.arrays.control, self.worker
        self._n_timesteps = self.layout.n_timesteps
        self._spare_rows = writer.spare_rows
        self._current_slots: NDArray = control["slot"][worker]
        self.rows: NDArray = control["row"][worker]
        self.rows[:] = self._spare_rows
        self.strides = np.zeros(n_lanes, np.int64)
        self.n_writing = 0
        # As memoryviews, whose single numbers are faster to read and write.
        self._running = control["running"][worker].data
        self._steps_before = control["steps_before"][worker].data
        self._slot, self._row = self._current_slots.data, self.rows.data
        self._stride = self.strides.data
        self._spare_row = self._spare_rows.data
        self._record, self._entry = record, self.number % MAX_REQUESTS

    def begin(
        self,
        lane: Lane,
        row: int,
        seed: int,
        options: Options,
        noise: NoiseStart | None,
        slot: int,
        fails_at: int | None = None,
        episode: int = 0,
        n_restarts: int = 0,
    ) -> None:
        """Assign a new episode to a lane; the arguments are attributes of ``Lane``.

        With a negative slot, the lane does not write yet.
        """
        lane.plan, lane.row, lane.seed, lane.options, lane.noise = self, row, seed, options, noise
        lane.slot, lane.fails_at = slot, fails_at
        lane.episode, lane.n_restarts = episode, n_restarts
        lane.chunk, lane.steps_before, lane.tape = 0, 0, None
        if slot >= 0:
            self.enter(lane)

    def enter(self, lane: Lane) -> None:
        """Let a lane write into its slot, from the first row."""
        record, number, slot, n_before = self._record, lane.number, lane.slot, lane.steps_before
        lane.state = State.LIVE
        self._slot[number] = slot
        self._row[number] = slot * self._n_timesteps
        self._stride[number] = 1
        self._running[number] = lane.row
        self._steps_before[number] = n_before
        self.n_writing += 1
        record.request[number] = self.number
        record.first_step[number] = record.steps[0] - max(0, n_before)
        record.pause[number] = 0
        # All episodes of a lane that restarts have the same row, so they are counted instead.
        record.episode[number] = 1 + (lane.n_restarts if self.restarts else lane.row)

    def restart_in_slots(self, lanes: Sequence[Lane]) -> None:
        """Continue lanes in their slots with their next episodes."""
        record = self._record
        for lane in lanes:
            row = self._row[lane.number]
            self.restart(lane)
            self._row[lane.number] = row
            lane.steps_before = lane.slot * self._n_timesteps - row
            self._steps_before[lane.number] = lane.steps_before
        self.n_writing -= len(lanes)
        record.n_episodes[0] += len(lanes)

    def leave(self, lane: Lane, *, is_last: bool) -> None:
        """Complete the slot that a lane leaves, zeroing the rest of an earlier use.

        Args:
            lane: The lane.
            is_last: Whether its episode ends there; otherwise the lane waits for its next slot.
        """
        record, writer, number, slot = self._record, self.writer, lane.number, lane.slot
        length = self._row[number] - slot * self._n_timesteps
        for target, source in writer.finals:
            target[slot] = source[number]
        dirty = writer.dirty[slot]
        if dirty > length:
            for array in writer.rows:
                array[slot, length:dirty] = 0
        writer.dirty[slot] = length
        writer.starts[slot] = lane.steps_before == 0
        writer.length[slot] = length
        self._row[number] = self._spare_row[number]
        self._stride[number] = 0
        self.n_writing -= 1
        if is_last:
            lane.state = State.IDLE
            self._running[number] = -1
            record.episode[number] = 0
            record.finished[self._entry] += 1
            record.n_episodes[0] += 1
        else:
            lane.state = State.PARKED
            lane.steps_before += length
            record.pause[number] = lane.steps_before + 1
        record.done[0] += 1
        if self.complete is not None and is_last and lane.chunk == 0 and slot == lane.row:
            self.complete[slot] = 1  # the last write about it
        else:
            self.take_slot_of(lane, is_last=is_last)
            lane.chunk += 1

    def abandon(self, lane: Lane) -> None:
        """Drop a lane's episode, and the contents of its slot if it is in one."""
        number = lane.number
        if lane.state is not State.PARKED:
            self.writer.abandon(lane.slot, self.steps_in_slot(lane))
            self._row[number] = self._spare_row[number]
            self._stride[number] = 0
            self.n_writing -= 1
        self._running[number] = -1
        self._record.episode[number] = 0
        lane.state = State.IDLE

    def rows_of(self, lanes: Sequence[int]) -> NDArray:
        """Return row numbers of all lanes; lanes not in ``lanes`` get a row of the spare slot."""
        rows: NDArray = self._spare_rows.copy()
        rows[lanes] = self.rows[lanes]
        return rows

    def steps_in_slot(self, lane: Lane) -> int:
        """Return the number of rows of its slot that a lane has filled."""
        steps: int = self._row[lane.number] - lane.slot * self._n_timesteps
        return steps

    def full_lanes(self, lanes: Iterable[Lane]) -> list[Lane]:
        """Return the lanes that run this plan and have filled their slots."""
        return [
            lane
            for lane in lanes
            if lane.state in _IN_A_SLOT
            and lane.plan is self
            and self.steps_in_slot(lane) == self._n_timesteps
        ]

    @property
    def steps_until_full(self) -> int:
        """Steps until the first slot is full, at most ``n_timesteps``."""
        steps = (self.rows - self._current_slots * self._n_timesteps) * self.strides
        return self._n_timesteps - int(np.maximum.reduce(steps, initial=0))


class PlanQueue(Protocol):
    """The source of a rollout's plans."""

    def has_next(self) -> bool:
        """Whether ``next_plan`` may have one, at little cost."""

    def next_plan(self) -> Plan | None:
        """Return another plan for lanes left idle by the plans so far, or ``None``."""

    def done(self, plan: Plan) -> None:
        """Handle the end of a plan, done or cancelled: no lane runs it."""

    def failed(self, plan: Plan, error: WorkerError) -> None:
        """Handle a failed plan; raise to stop all others as well."""


_IN_A_SLOT = State.LIVE, State.STEPPING

by_number = attrgetter("number")
