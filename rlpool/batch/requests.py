"""Requests: their messages to workers, their slots, their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpool.batch.messages import EpisodeKey, Episodes, Run, Window
from rlpool.batch.plans import SILENT, Claims
from rlpool.data.infos import WINDOW_KEYS, Infos, options_of
from rlpool.data.specs import join_key
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import RlpoolError, Where, WorkerError
from rlpool.loop.plan import Chunk
from rlpool.observe.control import Control
from rlpool.record.tape import (
    Actions,
    Tape,
    WindowTapes,
    action_columns,
    actions_of,
    joined,
    n_rows,
    slot_actions,
)
from rlpool.seeding import lane_seeds
from rlpool.slots.blocks import Block, Layout, successor_key
from rlpool.slots.trajectories import Derivation, Glue, Slice, slots_of, trajectories_of
from rlpool.workers.payload import Packed, Payload


class Policy(NamedTuple):
    """The policy of a request.

    Attributes:
        version: Number of updates so far; 0 for the agents' initial parameters.
        packed: The object passed to ``update``; ``None`` if there was none.
    """

    version: int = 0
    packed: Packed | None = None


class Request(ABC):
    """One batch of rows.

    Args:
        n_rows: Rows of the result, as far as known.
        infos: Its infos, per row.
        policy: The policy that it runs with.

    Attributes:
        n_rows: As given.
        asked: The episodes or the window; a window is set when it is sent, because only then are
            the running lanes known.
        given_seeds: Seeds of its episodes, if given by the user.
        infos: As given.
        policy: As given.
        number: Its number in messages, once it is submitted.
        packed: Its infos as sent to all workers.
        block: The block that it is written to, once it runs.
        n_slots: Slots in use; 0 while it is queued and after its block was released.
        remaining: Workers that have not reported the end of their part.
        error: Why it cannot be completed.
        failures: Row to the failure of a truncated episode.
        reports_failures: Whether its result reports the rows that failed.
    """

    asked: Episodes | Window
    given_seeds: list[int] | None = None

    def __init__(self, n_rows: int, infos: Infos, policy: Policy) -> None:
        self.n_rows = n_rows
        self.infos, self.policy = infos, policy
        self.number = self.n_slots = 0
        self.packed: Packed | None = None
        self.block: Block | None = None
        self.remaining: set[int] = set()
        self.error: RlpoolError | None = None
        self.failures: dict[int, WorkerError] = {}
        self.reports_failures = False
        # Episode to the step that fails; -1 if that is the reset, or may be.
        self._truncated: dict[EpisodeKey, int] = {}
        self._owed: dict[int, list[int]] = {}  # worker: its predecessor's episodes to run again

    @property
    def is_complete(self) -> bool:
        """Whether all rows have arrived."""
        return self.block is not None and not self.remaining and self.error is None

    def n_finished(self, control: Control) -> int:
        """Return the number of finished rows, according to shared memory and messages."""
        return control.n_finished(self.number)

    @property
    def running_block(self) -> Block:
        """The block of a request that was sent to the workers."""
        if self.block is None:
            raise LookupError("the request has not begun")
        return self.block

    def working(self) -> set[int]:
        """Return the workers that were sent their part of it and have not finished it."""
        over = self.running_block.arrays.control["over"].data
        return {worker for worker in self.remaining if over[worker] != SILENT}

    def release(self) -> None:
        """Return its slots once no worker writes to them."""
        self.n_slots = 0
        if self.block is not None:
            self.block.release()
            self.block = None

    @abstractmethod
    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """Return the number of slots to use if ``n_free`` of ``n_slots`` are free; 0 to wait."""

    def begin(self, layout: Layout) -> None:  # noqa: B027
        """Determine the contents of the request when it is sent."""

    def part(self, worker: int, payload: Payload | None) -> Run:
        """Make the message for a worker, whether or not it is a successor.

        Args:
            worker: The worker.
            payload: Infos and tapes.
        """
        block, again = self.running_block.number, self._owed.get(worker, [])
        return Run(self.number, self.asked, block, self.n_slots, again, self._truncated, payload)

    def tapes_for(self, worker: int) -> dict[int, Tape]:
        """Return tapes of running episodes by lane, for the successor of a worker."""
        return {}

    def can_be_repeated(self) -> bool:
        """Whether the successor of a dead worker can run its part."""
        return True

    def truncate(self, failure: WorkerError) -> None:
        """Truncate an episode at the step that failed."""
        where = failure.where
        step = where.step or 0
        may_be_reset = not step and not n_rows(action_columns(failure.actions))
        self._truncated[where.row, where.seed] = -1 if may_be_reset else step
        self.failures[where.row or 0] = failure

    @abstractmethod
    def give_back(self, worker: int) -> bool:
        """Take back the unfinished work of a dead worker.

        Returns:
            Whether its successor has anything to do.
        """

    def _note_writing(self, worker: int) -> None:
        """Record how far a dead worker wrote into unfinished slots."""
        layout, control = self.running_block.layout, self.running_block.arrays.control
        steps, dirty = layout.steps_in_slot(control, worker), control["dirty"]
        for lane in np.flatnonzero(control["running"][worker] >= 0):
            slot = control["slot"][worker, lane]
            dirty[slot] = max(dirty[slot], min(steps[lane] + 1, layout.n_timesteps))
        control["running"][worker] = -1

    def lanes_in(self, worker: int) -> list[int]:
        """Return a worker's lanes that are in an episode of this request."""
        running = self.running_block.arrays.control["running"][worker]
        lanes: list[int] = np.flatnonzero(running >= 0).tolist()
        return lanes

    def running_in(self, worker: int, lane: int, *, is_stepping: bool) -> dict[str, Any]:
        """Describe the episode of such a lane for an error, as far as shared memory shows it.

        Args:
            worker: The worker.
            lane: The lane.
            is_stepping: Whether the lane holds the action of an uncompleted step.

        Returns:
            ``where``, ``options`` and ``actions``.
        """
        arrays, layout = self.running_block.arrays, self.running_block.layout
        row, slot, n_before = (
            int(arrays.control[key][worker, lane]) for key in ("running", "slot", "steps_before")
        )
        stop = int(layout.steps_in_slot(arrays.control, worker)[lane])
        step, options = n_before + stop, options_of(self.infos[1], row)
        episode, seed = self._episode_in(worker, lane, row)
        where = Where(worker, lane, row, episode, step, seed, options)
        if layout.step.resets_together:
            return {"where": where}
        stop += is_stepping and step > 0  # else it may be the reset
        before = self._actions_before(row) if n_before > 0 else {}
        here = slot_actions(layout, arrays, slot, max(0, -n_before), stop)
        is_known = n_rows(before) == max(0, n_before)
        actions = actions_of(before, here) if is_known else None
        return {"where": where, "options": options, "actions": actions}

    @abstractmethod
    def _actions_before(self, row: int) -> Actions:
        """Return the known actions of a row's episode that are no longer in its slot."""

    @abstractmethod
    def _episode_in(self, worker: int, lane: int, row: int) -> tuple[int | None, int | None]:
        """Return number and seed of a lane's current episode, ``None`` where unknown."""

    @abstractmethod
    def result(self) -> TemporalDictTensor:
        """Return the rows of the complete request."""

    def _info(
        self, episodes: Sequence[int], seeds: Callable[[], Sequence[int]]
    ) -> dict[str, Derivation]:
        """The result's ``info``, computed on first access.

        Args:
            episodes: The number of each row's episode.
            seeds: Returns their seeds.
        """
        info: dict[str, Derivation] = {
            "episode": lambda: torch.tensor(episodes, device="cpu"),
            "seed": lambda: torch.tensor(seeds(), device="cpu"),
        }
        if self.reports_failures:
            failures = self.failures
            info["failed"] = lambda: torch.tensor([n in failures for n in episodes], device="cpu")
        version, shape = self.policy.version, (len(episodes),)
        info["policy_version"] = partial(torch.full, shape, version, device="cpu")
        for prefix, arrays in zip(("agent_info", "env_info"), self.infos, strict=True):
            for key, array in arrays.items():
                info[join_key(prefix, key)] = partial(_rows_of, array, episodes)
        return info


class EpisodeRequest(Request):
    """Complete episodes, one per row.

    Args:
        asked: The episodes.
        infos: As for ``Request``.
        policy: As for ``Request``.
    """

    def __init__(self, asked: Episodes, infos: Infos, policy: Policy) -> None:
        super().__init__(asked.n_rows, infos, policy)
        self.asked: Episodes = asked
        self.given_seeds = asked.given_seeds
        self._glue: Glue | None = None  # chunks copied out of their slots
        self._arrived = np.zeros(asked.n_rows, bool)  # whether an episode's last chunk was copied
        self._in_place = True  # whether episode i is written into slot i

    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """Return one slot per episode, and spare ones for episodes longer than a slot.

        Room for another request of the same size is kept free.
        """
        n_rows = self.n_rows
        self._in_place = n_rows <= n_slots
        if not self._in_place:
            return n_slots if n_free == n_slots else 0
        return 0 if n_free < n_rows else n_rows + max(0, n_free - 2 * n_rows)

    def _actions_before(self, row: int) -> Actions:
        """Return the actions in the chunks that the worker has sent."""
        keys = self.running_block.layout.step.action_keys
        return joined(self._glue.chunks_of(row, keys) if self._glue is not None else [])

    def _episode_in(self, worker: int, lane: int, row: int) -> tuple[int, int]:
        return self.asked.first + row, self.asked.seeds(self.running_block.layout)[row]

    def give_back(self, worker: int) -> bool:
        """Find the episodes that a dead worker claimed and did not finish."""
        control, layout = self.running_block.arrays.control, self.running_block.layout
        self._note_writing(worker)
        if layout.step.resets_together:
            share = self.asked.share_of(worker, layout)  # the successor runs all of it
            self._arrived[share] = False
            return bool(share)
        claims = Claims(control, self.n_rows, self.asked.first)
        claimed = {*claims.give_back(worker), *self._owed.get(worker, [])}
        present = self._arrived.copy()
        if self._in_place:
            present |= control["complete"][: self.n_rows] > 0
        self._owed[worker] = again = [row for row in sorted(claimed) if not present[row]]
        return bool(again) or not claims.all_made

    def empty_slots(self, chunks: Sequence[Chunk]) -> list[int]:
        """Copy complete chunks out of their slots, with one copy per key and chunk number."""
        block = self.running_block
        if self._glue is None:
            self._glue = Glue(block.layout, self.n_rows)
        episodes, slots, numbers, is_last = np.asarray(chunks, np.int64).T
        for number in np.unique(numbers):
            these = numbers == number
            self._glue.add(episodes[these], int(number), slots_of(block.arrays, slots[these]))
        self._arrived[episodes[is_last > 0]] = True
        emptied: list[int] = slots.tolist()
        return emptied

    def info(self, layout: Layout) -> dict[str, Derivation]:
        """The result's ``info``, computed on first access."""
        return self._info(range(self.n_rows), partial(self.asked.seeds, layout))

    def result(self) -> TemporalDictTensor:
        """Return all episodes: views of the block, or copies if a chunk was copied out of it."""
        block = self.running_block
        if self._glue is None:
            lengths = block.arrays.control["length"][: self.n_rows]
            part: Callable[[], Slice] = partial(slots_of, block.arrays, slice(self.n_rows))
        else:
            at_home = np.flatnonzero(~self._arrived & self._in_place)
            self._glue.drop(at_home)  # chunks of unfinished runs
            joined_rows = self._glue.join(block.arrays, at_home)
            lengths, part = joined_rows.lengths, lambda: joined_rows
        return trajectories_of(block.layout, lengths, part, self.info(block.layout))


@dataclass(eq=False, kw_only=True)
class RunningLanes:
    """State shared by all windows since one ``reset``. Each window begins where the last ended.

    Attributes:
        root: Root of all seeds.
        n_resets: Number of the ``reset``.
        n_windows: Windows requested before that reset.
        running: The running lanes, numbered across workers, ascending.
        positions: int64 ``[2, lanes of all workers]``: episode and step number of the next step of
            each lane.
        tapes: Tapes of the running episodes, ``None`` if they are not recorded.
        has_begun: Whether a window was sent.
        is_busy: Whether a window was sent and its result not returned.
    """

    root: int
    n_resets: int
    n_windows: int
    running: list[int]
    positions: NDArray
    tapes: WindowTapes | None
    has_begun: bool = False
    is_busy: bool = False


class WindowRequest(Request):
    """The next steps of every running lane, one lane per row.

    Args:
        shared: State shared with the windows before and after it.
        infos: As for ``Request``.
        policy: As for ``Request``.
    """

    def __init__(self, shared: RunningLanes, infos: Infos, policy: Policy) -> None:
        super().__init__(len(shared.running), infos, policy)
        self.asked: Window
        self._shared = shared

    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """Return one slot per lane, once the previous window is complete."""
        self.n_rows = len(self._shared.running)
        return 0 if self._shared.is_busy or n_free < self.n_rows else self.n_rows

    def begin(self, layout: Layout) -> None:
        """Determine the running lanes."""
        shared = self._shared
        # Before the reset a lane can have restarted once per step.
        n_restarts = shared.n_windows * layout.n_timesteps if layout.restarts else 0
        seeds = lane_seeds(shared.root, shared.n_resets, n_restarts)
        self.asked = Window(shared.running, layout.step.n_lanes, seeds, not shared.has_begun)
        shared.has_begun = shared.is_busy = True
        if shared.tapes is not None:
            self._truncated.update(dict.fromkeys(shared.tapes.failing, -1))

    def _tape_of(self, lane: int) -> Tape | None:
        tapes = self._shared.tapes
        return None if tapes is None else tapes.tapes.get(lane)

    def _actions_before(self, row: int) -> Actions:
        """Return the actions on the lane's tape."""
        tape = self._tape_of(row)
        return {} if tape is None else tape.actions

    def _episode_in(self, worker: int, lane: int, row: int) -> tuple[None, int | None]:
        """Return the episode's seed; the tape and the slot hold the lane's number of restarts."""
        block, n_restarts, seeds = self.running_block, 0, self.asked.seeds
        if block.layout.step.resets_together:
            return None, seeds.seed(row - lane, 0)
        if block.layout.restarts:
            if not self.can_be_repeated():
                return None, None
            tape = self._tape_of(row)
            control = block.arrays.control
            n_steps_in_slot = block.layout.steps_in_slot(control, worker)[lane]
            done = block.arrays.rows[successor_key("done")][control["slot"][worker, lane]]
            n_restarts = int(done[:n_steps_in_slot].sum())
            n_restarts += tape.n_restarts if tape is not None else 0
        return None, seeds.seed(row, n_restarts)

    def n_finished(self, control: Control) -> int:
        """Return the number of rows of workers that have finished the window."""
        if self.block is None:
            return 0
        done = set(range(self.block.layout.n_workers)) - self.working()
        return sum(len(self.asked.rows_of(worker)) for worker in done)

    def tapes_for(self, worker: int) -> dict[int, Tape]:
        """Return tapes of running episodes by lane, as ``Request.tapes_for``."""
        window, tapes = self.asked, self._shared.tapes
        if tapes is None or window.is_first:
            return {}
        before = worker * window.n_lanes
        return {lane: tapes.tapes[before + lane] for lane in window.rows_of(worker)}

    def can_be_repeated(self) -> bool:
        """Whether the history of all lanes is known."""
        tapes = self._shared.tapes
        return self.asked.is_first or (tapes is not None and tapes.is_complete)

    def give_back(self, worker: int) -> bool:
        """Schedule the whole window again."""
        self._note_writing(worker)
        return bool(self.asked.rows_of(worker))

    def result(self) -> TemporalDictTensor:
        """Return the rows; the next window continues where they end."""
        block, shared, tapes = self.running_block, self._shared, self._shared.tapes
        lanes, n_lanes, seeds = self.asked.lanes, self.asked.n_lanes, self.asked.seeds
        running = block.arrays.control["running"].reshape(-1)
        shared.running, shared.is_busy = (running >= 0).nonzero()[0].tolist(), False
        if tapes is not None:
            env_info = self.infos[1]
            tapes.record(
                block.layout,
                block.arrays,
                lanes,
                shared.running,
                lambda lane: options_of(env_info, lane) if env_info else None,
            )
            begin_next = {
                (lane, seeds.seed(lane, tape.n_restarts))
                for lane, tape in tapes.tapes.items()
                if not tape.n_steps
            }
            tapes.failing = begin_next.intersection(self._truncated)
        # Values computed later must not hold the block.
        n_together = n_lanes if block.layout.step.resets_together else 1
        info = self._info(lanes, lambda: [seeds.seed(n - n % n_together, 0) for n in lanes])
        rows = slots_of(block.arrays, slice(self.n_rows))
        numbers = np.array(lanes)
        values = np.full(self.n_rows, shared.root >> 65), numbers, *self._move_on(numbers, rows)
        info |= {k: partial(torch.from_numpy, v) for k, v in zip(WINDOW_KEYS, values, strict=True)}
        return trajectories_of(block.layout, rows.lengths, lambda: rows, info)

    def _move_on(self, lanes: NDArray, rows: Slice) -> NDArray:
        """Move the lanes to the end of the window; returns their positions before it."""
        positions = self._shared.positions
        before = positions[:, lanes]
        n_ended, step = np.zeros_like(lanes), before[1] + rows.lengths
        done = rows.rows.get(successor_key("done"))  # where lanes restart
        if done is not None and done.size:
            n_ended = done.sum(axis=1)
            n_behind = done[:, ::-1].argmax(axis=1) + rows.lengths - done.shape[1]
            step = np.where(n_ended, n_behind, step)
        positions[:, lanes] = before[0] + n_ended, step
        return before


def _rows_of(array: NDArray, rows: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(array[np.asarray(rows)])
