"""Requests: what the workers are told, which slots they get, what the user gets."""

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
    """What the agents were updated with.

    Attributes:
        version: Number of updates so far; 0 for what the agents began with.
        packed: The object; ``None`` if there was none.
    """

    version: int = 0
    packed: Packed | None = None


class Request(ABC):
    """One batch of rows.

    Args:
        n_rows: Rows of the result, as far as is known.
        infos: Its infos, per row.
        policy: What it runs with.

    Attributes:
        n_rows: As given.
        asked: What it asks for, of a window once it is sent: only then it is known which lanes run.
        given_seeds: Seeds of its episodes, if the user gave them.
        infos: As given.
        policy: As given.
        number: Names it in messages, once it is submitted.
        packed: Its infos as sent to all workers.
        block: Where it is written, once it runs.
        n_slots: Slots in use; 0 while it is queued and after its block was released.
        remaining: Workers that have not said that they are done with it.
        error: Why it cannot be completed.
        failures: Row to the failure of an episode that was given up.
        tells_failures: Whether its result says which rows failed.
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
        self.tells_failures = False
        # To the step that fails, -1 for the reset: also where it may have been that.
        self._truncated: dict[EpisodeKey, int] = {}
        self._owed: dict[int, list[int]] = {}  # worker: episodes of an earlier one to run again

    @property
    def is_complete(self) -> bool:
        """Whether all rows are there."""
        return self.block is not None and not self.remaining and self.error is None

    def n_finished(self, control: Control) -> int:
        """Rows that are finished, as far as shared memory and messages tell."""
        return control.n_finished(self.number)

    @property
    def running_block(self) -> Block:
        """The block of a request that was sent to the workers."""
        if self.block is None:
            raise LookupError("the request has not begun")
        return self.block

    def working(self) -> set[int]:
        """Workers whose part of it, which was sent, is not over."""
        over = self.running_block.arrays.control["over"].data
        return {worker for worker in self.remaining if over[worker] != SILENT}

    def release(self) -> None:
        """Give its slots back, when no worker writes into them any more."""
        self.n_slots = 0
        if self.block is not None:
            self.block.release()
            self.block = None

    @abstractmethod
    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """Slots to run with, when ``n_free`` of ``n_slots`` are not in use; 0 to wait."""

    def begin(self, layout: Layout) -> None:  # noqa: B027
        """Find out what it asks for, now that it is sent."""

    def part(self, worker: int, payload: Payload | None) -> Run:
        """What to send to a worker, whether or not another had its number before.

        Args:
            worker: The worker.
            payload: Infos and tapes.
        """
        block, again = self.running_block.number, self._owed.get(worker, [])
        return Run(self.number, self.asked, block, self.n_slots, again, self._truncated, payload)

    def tapes_for(self, worker: int) -> dict[int, Tape]:
        """By lane, what its episode has done so far, for the successor of a worker."""
        return {}

    def can_be_repeated(self) -> bool:
        """Whether the successor of a worker that died can do its part."""
        return True

    def truncate(self, failure: WorkerError) -> None:
        """Let an episode end at the step at which it has failed."""
        where = failure.where
        step = where.step or 0
        may_be_reset = not step and not n_rows(action_columns(failure.actions))
        self._truncated[where.row, where.seed] = -1 if may_be_reset else step
        self.failures[where.row or 0] = failure

    @abstractmethod
    def give_back(self, worker: int) -> bool:
        """Take back what a dead worker began and did not finish.

        Returns:
            Whether its successor has anything to do.
        """

    def _note_writing(self, worker: int) -> None:
        """Record how far a dead worker wrote into slots that it did not finish."""
        layout, control = self.running_block.layout, self.running_block.arrays.control
        steps, dirty = layout.steps_in_slot(control, worker), control["dirty"]
        for lane in np.flatnonzero(control["running"][worker] >= 0):
            slot = control["slot"][worker, lane]
            dirty[slot] = max(dirty[slot], min(steps[lane] + 1, layout.n_timesteps))
        control["running"][worker] = -1

    def lanes_in(self, worker: int) -> list[int]:
        """Lanes of a worker that are in an episode of this request."""
        running = self.running_block.arrays.control["running"][worker]
        lanes: list[int] = np.flatnonzero(running >= 0).tolist()
        return lanes

    def running_in(self, worker: int, lane: int, *, is_stepping: bool) -> dict[str, Any]:
        """What an error says of such a lane's episode, as far as shared memory shows.

        Args:
            worker: The worker.
            lane: The lane.
            is_stepping: Whether the action of a step is there that was not completed.

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
        """The actions of a row's episode that are not in its slot, as far as they are known."""

    @abstractmethod
    def _episode_in(self, worker: int, lane: int, row: int) -> tuple[int | None, int | None]:
        """Number and seed of the episode that a lane is in, ``None`` if it is not known."""

    @abstractmethod
    def result(self) -> TemporalDictTensor:
        """The rows, once complete."""

    def _info(
        self, episodes: Sequence[int], seeds: Callable[[], Sequence[int]]
    ) -> dict[str, Derivation]:
        """The result's ``info``, computed when it is looked at.

        Args:
            episodes: The number of each row's episode.
            seeds: Returns their seeds.
        """
        info: dict[str, Derivation] = {
            "episode": lambda: torch.tensor(episodes, device="cpu"),
            "seed": lambda: torch.tensor(seeds(), device="cpu"),
        }
        if self.tells_failures:
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
        self._glue: Glue | None = None  # chunks that were copied out of their slots
        self._arrived = np.zeros(asked.n_rows, bool)  # whether an episode's last chunk was
        self._in_place = True  # whether episode i is written into slot i

    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """One slot per episode, and spare ones for episodes that are longer than a slot.

        Room for another request of the same size is kept free.
        """
        n_rows = self.n_rows
        self._in_place = n_rows <= n_slots
        if not self._in_place:
            return n_slots if n_free == n_slots else 0
        return 0 if n_free < n_rows else n_rows + max(0, n_free - 2 * n_rows)

    def _actions_before(self, row: int) -> Actions:
        """Those of the chunks that the worker has sent."""
        keys = self.running_block.layout.step.action_keys
        return joined(self._glue.chunks_of(row, keys) if self._glue is not None else [])

    def _episode_in(self, worker: int, lane: int, row: int) -> tuple[int, int]:
        return self.asked.first + row, self.asked.seeds(self.running_block.layout)[row]

    def give_back(self, worker: int) -> bool:
        """Find the episodes that a dead worker had claimed and not finished."""
        control, layout = self.running_block.arrays.control, self.running_block.layout
        self._note_writing(worker)
        if layout.step.resets_together:
            share = self.asked.share_of(worker, layout)  # which the successor runs as a whole
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
        """Copy complete chunks out of their slots, one copy per key and chunk number."""
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
        """The result's ``info``, computed when it is looked at."""
        return self._info(range(self.n_rows), partial(self.asked.seeds, layout))

    def result(self) -> TemporalDictTensor:
        """All episodes: views of the block; copies if any chunk was copied out of it."""
        block = self.running_block
        if self._glue is None:
            lengths = block.arrays.control["length"][: self.n_rows]
            part: Callable[[], Slice] = partial(slots_of, block.arrays, slice(self.n_rows))
        else:
            at_home = np.flatnonzero(~self._arrived & self._in_place)
            self._glue.drop(at_home)  # chunks of a run that did not end
            joined_rows = self._glue.join(block.arrays, at_home)
            lengths, part = joined_rows.lengths, lambda: joined_rows
        return trajectories_of(block.layout, lengths, part, self.info(block.layout))


@dataclass(eq=False, kw_only=True)
class RunningLanes:
    """What all windows since one ``reset`` share. Each begins where the one before it has ended.

    Attributes:
        root: Root of all seeds.
        n_resets: Number of the ``reset``.
        n_windows: Windows requested before that reset.
        running: The lanes that run, numbered across workers, ascending.
        positions: int64 ``[2, lanes of all workers]``: the episode and its number of the step that
            each lane takes next.
        tapes: What the running episodes have done so far, ``None`` if it is not recorded.
        has_begun: Whether a window was sent.
        is_busy: Whether one was sent and its result not taken.
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
        shared: What it shares with the windows before and after it.
        infos: As for ``Request``.
        policy: As for ``Request``.
    """

    def __init__(self, shared: RunningLanes, infos: Infos, policy: Policy) -> None:
        super().__init__(len(shared.running), infos, policy)
        self.asked: Window
        self._shared = shared

    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """One slot per lane, once the window before it is there."""
        self.n_rows = len(self._shared.running)
        return 0 if self._shared.is_busy or n_free < self.n_rows else self.n_rows

    def begin(self, layout: Layout) -> None:
        """Find out which lanes run."""
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
        """Those on the lane's tape."""
        tape = self._tape_of(row)
        return {} if tape is None else tape.actions

    def _episode_in(self, worker: int, lane: int, row: int) -> tuple[None, int | None]:
        """How often the lane has restarted is on its tape and in its slot."""
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
        """Rows of workers that are done with the window."""
        if self.block is None:
            return 0
        done = set(range(self.block.layout.n_workers)) - self.working()
        return sum(len(self.asked.rows_of(worker)) for worker in done)

    def tapes_for(self, worker: int) -> dict[int, Tape]:
        """See ``Request.tapes_for``."""
        window, tapes = self.asked, self._shared.tapes
        if tapes is None or window.is_first:
            return {}
        before = worker * window.n_lanes
        return {lane: tapes.tapes[before + lane] for lane in window.rows_of(worker)}

    def can_be_repeated(self) -> bool:
        """Whether it is known what all lanes have done."""
        tapes = self._shared.tapes
        return self.asked.is_first or (tapes is not None and tapes.is_complete)

    def give_back(self, worker: int) -> bool:
        """Begin the whole window again."""
        self._note_writing(worker)
        return bool(self.asked.rows_of(worker))

    def result(self) -> TemporalDictTensor:
        """The rows; the next window goes on where they end."""
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
        # What is asked later must not hold the block.
        n_together = n_lanes if block.layout.step.resets_together else 1
        info = self._info(lanes, lambda: [seeds.seed(n - n % n_together, 0) for n in lanes])
        rows = slots_of(block.arrays, slice(self.n_rows))
        numbers = np.array(lanes)
        values = np.full(self.n_rows, shared.root >> 65), numbers, *self._move_on(numbers, rows)
        info |= {k: partial(torch.from_numpy, v) for k, v in zip(WINDOW_KEYS, values, strict=True)}
        return trajectories_of(block.layout, rows.lengths, lambda: rows, info)

    def _move_on(self, lanes: NDArray, rows: Slice) -> NDArray:
        """Move its lanes to the end of the window; returns their positions before."""
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
