"""What the caller asked for, from the message to the workers to the user's trajectories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpool.batch.claims import Claims
from rlpool.batch.commands import Execute, Infos, Window
from rlpool.data.infos import Info, info_rows
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import RlpoolError
from rlpool.record.tape import WindowTapes
from rlpool.seeding import LaneSeeds, episode_seeds
from rlpool.slots.blocks import Block
from rlpool.slots.trajectories import Glue, slots_of, trajectories_of
from rlpool.specs import join_key
from rlpool.workers.payload import Packed, Payload

Chunk = tuple[int, int, int, bool]
"""``(episode, slot, chunk, is_last)``: a complete slot."""


class Policy(NamedTuple):
    """What the agents were updated with.

    Attributes:
        version: Updates until then, this one included; 0 for what the agents began with.
        packed: The object; ``None`` with version 0, and once it is not needed any more.
    """

    version: int = 0
    packed: Packed | None = None


@dataclass(eq=False, kw_only=True)
class Request(ABC):
    """One batch of rows.

    Attributes:
        number: Names it in messages.
        n_rows: Rows of the result.
        infos: Its infos, per row.
        policy: What it runs with.
        root: Root of all seeds.
        packed: ``contents`` as they were sent to all workers.
        block: Where it is written, once it runs.
        n_slots: Slots that it takes.
        remaining: Workers that have not said that they are done.
        error: Why it cannot be completed.
        trajectories: Its result, once the caller has waited for it.
    """

    number: int
    n_rows: int
    infos: Infos
    policy: Policy
    root: int
    packed: Packed | None = None
    block: Block | None = None
    n_slots: int = 0
    remaining: set[int] = field(default_factory=set)
    error: RlpoolError | None = None
    trajectories: TemporalDictTensor | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether its episodes were stopped."""
        return self.block is not None and bool(self.block.arrays.control["cancelled"][0])

    @property
    def is_complete(self) -> bool:
        """Whether all rows are there."""
        return self.block is not None and not self.remaining and self.error is None

    @property
    def running_block(self) -> Block:
        """The block, which only exists once the request was sent to the workers."""
        if self.block is None:
            raise LookupError("the request has not begun")
        return self.block

    @property
    def payloads(self) -> list[Packed]:
        """What was packed for workers to read."""
        return [each for each in (self.packed, self.policy.packed) if each is not None]

    def drop_payloads(self) -> None:
        """Give up what was packed, as no worker will read it any more."""
        self.packed, self.policy = None, self.policy._replace(packed=None)

    @abstractmethod
    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """Slots to run with, when ``n_free`` of ``n_slots`` are not in use; 0 to wait."""

    @abstractmethod
    def message(self, worker: int, payload: Payload | None) -> Execute | Window:
        """What to send to a worker, be it the first of its number or another's successor."""

    def contents(self, worker: int, is_successor: bool) -> tuple[Any, ...]:
        """What the message's payload holds: ``(agent_info, env_info, tapes)``.

        Args:
            worker: The worker.
            is_successor: Whether it has not run any request, and one before it has.
        """
        return (*self.infos, {})

    def can_be_repeated(self) -> bool:
        """Whether the successor of a worker that died can do its part."""
        return True

    @abstractmethod
    def give_back(self, worker: int) -> bool:
        """Take back what a dead worker had begun and not finished, for its successor.

        To be called under the lock of the claims.

        Args:
            worker: The worker.

        Returns:
            Whether there is anything left for its successor to do.
        """

    def _note_writing(self, worker: int) -> None:
        """Remember how far a dead worker had written into slots that it did not finish."""
        layout, control = self.running_block.layout, self.running_block.arrays.control
        steps, dirty = layout.steps_in_slot(control, worker), control["dirty"]
        for lane in np.flatnonzero(control["running"][worker] >= 0):
            slot = control["slot"][worker, lane]
            dirty[slot] = max(dirty[slot], min(steps[lane] + 1, layout.n_timesteps))
        control["running"][worker] = -1

    @abstractmethod
    def seed_of(self, row: int) -> int:
        """The seed of a row's episode."""

    @abstractmethod
    def result(self) -> TemporalDictTensor:
        """The rows, once complete."""

    def empty_slots(self, worker: int, chunks: Sequence[Chunk]) -> list[int]:
        """Copy complete chunks of a worker out of their slots; returns the slots."""
        raise LookupError("this request's slots are never emptied")

    def _info(self, **columns: torch.Tensor) -> dict[str, torch.Tensor]:
        """The result's ``info``."""
        agent_info, env_info = self.infos
        info = {
            join_key(prefix, key): torch.from_numpy(array.copy())
            for prefix, arrays in (("agent_info", agent_info), ("env_info", env_info))
            for key, array in arrays.items()
        }
        info.update(columns)
        n_rows = next(iter(columns.values())).shape[0]
        info["policy_version"] = torch.from_numpy(np.full(n_rows, self.policy.version))
        return info


@dataclass(eq=False, kw_only=True)
class EpisodeRequest(Request):
    """Complete episodes, one per row.

    Attributes:
        execution: Number of the ``execute``, from which the episodes' noise derives.
        first: How many episodes were asked for before, from which their seeds derive.
    """

    execution: int
    first: int

    def __post_init__(self) -> None:
        self._glue: Glue | None = None
        self._left_home = np.zeros(self.n_rows, bool)  # first chunks that were copied out already
        self._arrived = np.zeros(self.n_rows, bool)  # last chunks that were copied out already
        self._lent: dict[int, set[int]] = {}  # worker: homes of episodes that it got as slots
        self._owed: dict[int, list[int]] = {}  # worker: episodes of one before it to run again
        self._in_place = True

    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """One slot per episode, and for episodes that are longer than a slot what is to spare.

        Kept free is room for a next request of the same size.
        """
        self._in_place = self.n_rows <= n_slots
        if not self._in_place:
            return n_slots if n_free == n_slots else 0
        if n_free < self.n_rows:
            return 0
        return self.n_rows + max(0, n_free - 2 * self.n_rows)

    def message(self, worker: int, payload: Payload | None) -> Execute:
        """The request, with this worker's share of the slots that belong to no episode."""
        first = self.n_rows if self._in_place else 0
        n_workers = self.running_block.layout.n_workers
        again = self._owed.get(worker, [])
        lent = self._lent.get(worker, set()).difference(again)
        return Execute(
            number=self.number,
            execution=self.execution,
            first=self.first,
            n_episodes=self.n_rows,
            block=self.running_block.number,
            in_place=self._in_place,
            slots=[*range(first + worker, self.n_slots, n_workers), *sorted(lent)],
            again=again,
            payload=payload,
        )

    def give_back(self, worker: int) -> bool:
        """Find the episodes that a dead worker had claimed and not finished."""
        control = self.running_block.arrays.control
        claims = Claims(control, self.n_rows)
        claimed = {*claims.give_back(worker), *self._owed.get(worker, [])}
        self._note_writing(worker)
        whole = control["whole"]
        again = [
            number
            for number in sorted(claimed)
            if not (self._arrived[number] or (self._in_place and whole[number]))
        ]
        self._owed[worker] = again
        # Chunks of episodes that begin again are dropped: two runs of an environment that is not
        # deterministic must not be mixed.
        self._left_home[again] = False
        if self._glue is not None:
            self._glue.drop(np.asarray(again, np.int64))
        owns_slots = self._in_place or worker < self.n_slots
        return bool(again) or (owns_slots and not claims.all_made)

    def seed_of(self, row: int) -> int:
        """The seed of an episode."""
        return episode_seeds(self.root, self.first + row, 1)[0]

    def empty_slots(self, worker: int, chunks: Sequence[Chunk]) -> list[int]:
        """Copy complete chunks out of their slots, one copy per key and chunk number."""
        block = self.running_block
        if self._glue is None:
            self._glue = Glue(block.layout, self.n_rows)
        table = np.asarray(chunks, np.int64)
        for chunk in np.unique(table[:, 2]):
            rows = table[table[:, 2] == chunk]
            self._glue.add(rows[:, 0], int(chunk), slots_of(block.arrays, rows[:, 1]))
        self._left_home[table[table[:, 2] == 0, 0]] = True
        self._arrived[table[table[:, 3] == 1, 0]] = True
        slots: list[int] = table[:, 1].tolist()
        if self._in_place:
            homes = [slot for slot in slots if slot < self.n_rows]
            self._lent.setdefault(worker, set()).update(homes)
        return slots

    def result(self) -> TemporalDictTensor:
        """Views on the block; copies if chunks had to be glued."""
        block = self.running_block
        if self._glue is None:
            part = slots_of(block.arrays, slice(self.n_rows))
        else:
            at_home = np.flatnonzero(~self._left_home)
            if self._in_place and at_home.size:
                self._glue.add(at_home, 0, slots_of(block.arrays, at_home))
            part = self._glue.join()
        info = self._info(
            episode=torch.from_numpy(np.arange(self.n_rows)),
            seed=torch.from_numpy(
                np.asarray(episode_seeds(self.root, self.first, self.n_rows), np.int64)
            ),
        )
        return trajectories_of(block.layout, part, info)


@dataclass(eq=False, kw_only=True)
class WindowRequest(Request):
    """The next steps of every running lane, one lane per row.

    Attributes:
        lanes: The running lanes, numbered across workers.
        n_lanes: Lanes of one worker.
        n_resets: Number of the ``reset`` whose episodes run.
        n_windows: How many windows were asked for before it.
        is_first: Whether it is the first window after that reset.
        tapes: What the running episodes have done so far, ``None`` if nobody remembers it.
        lanes_left: Lanes that go on after this window, set by ``result``.
    """

    lanes: list[int]
    n_lanes: int
    n_resets: int
    n_windows: int
    is_first: bool
    tapes: WindowTapes | None = None
    lanes_left: list[int] = field(default_factory=list)

    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """One slot per lane."""
        return self.n_rows if n_free >= self.n_rows else 0

    def message(self, worker: int, payload: Payload | None) -> Window:
        """The window, with the slots of this worker's running lanes."""
        slots = {lane % self.n_lanes: row for row, lane in self._rows_of(worker)}
        return Window(
            number=self.number,
            block=self.running_block.number,
            slots=slots,
            n_resets=self.n_resets,
            n_restarts=self._n_restarts,
            is_first=self.is_first,
            payload=payload,
        )

    @property
    def _n_restarts(self) -> int:
        """The most restarts that a lane can have made before the reset: one per step."""
        layout = self.running_block.layout
        return self.n_windows * layout.n_timesteps if layout.restarts else 0

    @property
    def _seeds(self) -> LaneSeeds:
        return LaneSeeds(self.root, self.n_resets, self._n_restarts)

    def _rows_of(self, worker: int) -> list[tuple[int, int]]:
        """Rows and lanes of a worker."""
        first, stop = worker * self.n_lanes, (worker + 1) * self.n_lanes
        return [(row, lane) for row, lane in enumerate(self.lanes) if first <= lane < stop]

    def contents(self, worker: int, is_successor: bool) -> tuple[Any, ...]:
        """Infos, and for the successor of another worker how far its lanes were."""
        if self.tapes is None or self.is_first or not is_successor:
            return super().contents(worker, is_successor)
        lanes = [lane for _, lane in self._rows_of(worker)]
        tapes = self.tapes.tapes
        return (*self.infos, {lane % self.n_lanes: tapes[lane] for lane in lanes})

    def can_be_repeated(self) -> bool:
        """Whether it is known how far all lanes were."""
        return self.is_first or (self.tapes is not None and self.tapes.is_complete)

    def give_back(self, worker: int) -> bool:
        """Begin the whole window again."""
        self._note_writing(worker)
        return bool(self._rows_of(worker))

    def seed_of(self, row: int) -> int:
        """The seed of a lane's first episode since the reset."""
        return self._seeds.seed(row, 0)

    def result(self) -> TemporalDictTensor:
        """Views on the block."""
        block = self.running_block
        running = block.arrays.control["running"].reshape(-1)
        self.lanes_left = np.flatnonzero(running >= 0).tolist()
        if self.tapes is not None:
            self.tapes.record(block.layout, block.arrays, self.lanes, self.lanes_left)
        part = slots_of(block.arrays, slice(self.n_rows))
        rows = torch.from_numpy(np.asarray(self.lanes, np.int64))
        info = {key: values[rows] for key, values in self._whole_info().items()}
        return trajectories_of(block.layout, part, info)

    def _whole_info(self) -> dict[str, torch.Tensor]:
        n_lanes, seeds = self.running_block.layout.n_workers * self.n_lanes, self._seeds
        return self._info(
            episode=torch.from_numpy(np.arange(n_lanes)),
            seed=torch.from_numpy(
                np.asarray([seeds.seed(lane, 0) for lane in range(n_lanes)], np.int64)
            ),
        )


def as_infos(agent_info: Info, env_info: Info, n_rows: int) -> Infos:
    """Infos as arrays, copied, so that the caller may change its tensors afterwards.

    Raises:
        SpecError: See ``info_rows``.
    """
    rows = info_rows("agent_info", agent_info, n_rows), info_rows("env_info", env_info, n_rows)
    agent_arrays, env_arrays = ({k: t.numpy() for k, t in part.items()} for part in rows)
    return agent_arrays, env_arrays
