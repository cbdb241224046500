"""Requests: what the workers are told, which slots they get, what the user gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rlpool.batch.claims import Claims
from rlpool.batch.messages import Execute, Infos, Window
from rlpool.batch.shares import Shares
from rlpool.data.infos import Info, info_rows
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import RlpoolError, SpecError
from rlpool.memory.storage import Array
from rlpool.record.tape import Tape, WindowTapes
from rlpool.seeding import LaneSeeds, episode_seeds
from rlpool.slots.blocks import Block, Layout
from rlpool.slots.trajectories import Derivation, Glue, slots_of, trajectories_of
from rlpool.specs import join_key
from rlpool.workers.payload import Packed, Payload

Chunk = tuple[int, int, int, bool]
"""``(episode, slot, chunk, is_last)``: a complete slot."""


class Policy(NamedTuple):
    """What the agents were updated with.

    Attributes:
        version: Number of updates so far; 0 for what the agents began with.
        packed: The object; ``None`` with version 0, and once it is no longer needed.
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
        packed: Its infos as sent to all workers.
        block: Where it is written, once it runs.
        n_slots: Slots in use; 0 while it is queued and after its block was released.
        remaining: Workers that are not done with it.
        error: Why it cannot be completed.
        trajectories: Its result, once the caller has waited for it.
        strays: Workers whose unseeded environments are not where they would have been, had none
            failed.
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
    strays: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether all rows are there."""
        return self.block is not None and not self.remaining and self.error is None

    @property
    def running_block(self) -> Block:
        """The block of a request that was sent to the workers."""
        if self.block is None:
            raise LookupError("the request has not begun")
        return self.block

    def cancel(self) -> None:
        """Let the workers stop its episodes."""
        self.running_block.arrays.control["cancelled"][0] = 1

    def release(self) -> None:
        """Give its slots back, when no worker writes into them any more."""
        self.n_slots = 0
        if self.block is not None:
            self.block.release()
            self.block = None

    @property
    def payloads(self) -> list[Packed]:
        """All that was packed for workers to read."""
        return [each for each in (self.packed, self.policy.packed) if each is not None]

    def drop_payloads(self) -> None:
        """Free what was packed: no worker will read it again."""
        self.packed, self.policy = None, self.policy._replace(packed=None)

    def check(self, layout: Layout) -> None:
        """Refuse what workers with this layout cannot run.

        Raises:
            SpecError: If lanes are reset together and have different ``env_info``, or there are
                too few slots for them.
        """
        for key, array in self.infos[1].items() if layout.step.seeding != "episode" else ():
            if len({row.tobytes() for row in array}) > 1:
                raise SpecError(
                    f"env_info[{key!r}] has different rows, and one reset serves all lanes "
                    f"(seeding is {layout.step.seeding!r})",
                    fix="give all rows the same value, or use a vector environment whose lanes "
                    "can be reset one by one, such as SyncVectorEnv",
                )

    @abstractmethod
    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """Slots to run with, when ``n_free`` of ``n_slots`` are not in use; 0 to wait."""

    def takers(self, n_workers: int) -> range:
        """The workers that take part."""
        return range(n_workers)

    @abstractmethod
    def message(self, worker: int, payload: Payload | None) -> Execute | Window:
        """What to send to a worker, whether or not another had its number before."""

    def tapes_for(self, worker: int) -> dict[int, Tape]:
        """By lane, what its episode has done so far, for the successor of a worker."""
        return {}

    def can_be_repeated(self) -> bool:
        """Whether the successor of a worker that died can do its part."""
        return True

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

    @abstractmethod
    def seed_of(self, row: int) -> int | None:
        """The seed of the episode that a row is in, ``None`` if it is not known."""

    @abstractmethod
    def result(self) -> TemporalDictTensor:
        """The rows, once complete."""

    def empty_slots(self, chunks: Sequence[Chunk]) -> list[int]:
        """Copy complete chunks out of their slots; returns the slots."""
        raise LookupError("this request's slots are never emptied")

    def drop_chunks(self, episodes: Sequence[int]) -> None:  # noqa: B027  (windows have none)
        """Drop the chunks of episodes that begin again.

        Two runs of an environment that is not deterministic must not be mixed.
        """

    def _info(
        self, episodes: Sequence[int], seeds: Callable[[], Sequence[int]], workers: Sequence[int]
    ) -> dict[str, Derivation]:
        """The result's ``info``, computed when it is looked at.

        Args:
            episodes: The number of each row's episode.
            seeds: Returns their seeds.
            workers: The worker of each row, which matters only where nothing can be seeded.
        """
        info: dict[str, Derivation] = {
            "episode": lambda: torch.tensor(episodes),
            "seed": lambda: torch.tensor(seeds()),
        }
        step = self.running_block.layout.step
        if step.seeding == "stream":
            is_stray = np.isin(workers, list(self.strays))
            reproducible = ~is_stray & (not step.depends_on_timing)
            info["reproducible"] = partial(torch.from_numpy, reproducible)
        info["policy_version"] = partial(torch.full, (len(episodes),), self.policy.version)
        for prefix, arrays in zip(("agent_info", "env_info"), self.infos, strict=True):
            for key, array in arrays.items():
                info[join_key(prefix, key)] = partial(_rows_of, array, episodes)
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
        self._glue: Glue | None = None  # chunks that were copied out of their slots
        self._arrived = np.zeros(self.n_rows, bool)  # whether an episode's last chunk was
        self._owed: dict[int, list[int]] = {}  # worker: episodes of an earlier one to run again
        self._in_place = True

    def check(self, layout: Layout) -> None:
        """See ``Request.check``."""
        super().check(layout)
        n_lanes = layout.step.n_lanes * layout.n_workers
        if layout.step.seeding != "episode" and layout.n_slots < min(n_lanes, self.n_rows):
            raise SpecError(
                f"n_slots is {layout.n_slots}, and {n_lanes} lanes run at the same time: none of "
                f"them can wait for a slot (seeding is {layout.step.seeding!r})",
                fix=f"give n_slots={n_lanes} or more",
            )

    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """One slot per episode, and spare ones for episodes that are longer than a slot.

        Room for another request of the same size is kept free.
        """
        self._in_place = self.n_rows <= n_slots
        if not self._in_place:
            return n_slots if n_free == n_slots else 0
        if n_free < self.n_rows:
            return 0
        return self.n_rows + max(0, n_free - 2 * self.n_rows)

    def takers(self, n_workers: int) -> range:
        """All workers that get a slot."""
        return range(n_workers if self._in_place else min(n_workers, self.n_slots))

    def message(self, worker: int, payload: Payload | None) -> Execute:
        """The request, with this worker's share of the slots that belong to no episode."""
        first = self.n_rows if self._in_place else 0
        block = self.running_block
        return Execute(
            number=self.number,
            execution=self.execution,
            first=self.first,
            n_episodes=self.n_rows,
            block=block.number,
            in_place=self._in_place,
            slots=list(range(first + worker, self.n_slots, block.layout.n_workers)),
            again=self._owed.get(worker, []),
            payload=payload,
        )

    def give_back(self, worker: int) -> bool:
        """Find the episodes that a dead worker had claimed and not finished."""
        control = self.running_block.arrays.control
        if self._has_shares:
            return self._give_back_share(worker)
        claims = Claims(control, self.n_rows)
        claimed = {*claims.give_back(worker), *self._owed.get(worker, [])}
        self._note_writing(worker)
        is_there = self._arrived.copy()
        if self._in_place:
            is_there |= control["whole"][: self.n_rows] > 0
        self._owed[worker] = again = [row for row in sorted(claimed) if not is_there[row]]
        self.drop_chunks(again)
        return bool(again) or not claims.all_made

    def _give_back_share(self, worker: int) -> bool:
        """Let a successor run all that a dead worker had to run."""
        control = self.running_block.arrays.control
        share = self._shares.of(worker)
        self._note_writing(worker)
        control["n_finished"][worker] = 0
        self._arrived[share] = False
        self.drop_chunks(share)
        return bool(share)

    @property
    def _has_shares(self) -> bool:
        """Whether it is fixed which worker runs what, since its lanes are reset together."""
        return self.running_block.layout.step.seeding != "episode"

    @property
    def _shares(self) -> Shares:
        return Shares(self.running_block.layout, self.n_rows)

    def seed_of(self, row: int) -> int:
        """The seed of an episode."""
        if self._has_shares:
            row = self._shares.seeding_episode(row)
        return episode_seeds(self.root, self.first + row, 1)[0]

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

    def drop_chunks(self, episodes: Sequence[int]) -> None:
        """See ``Request.drop_chunks``."""
        if self._glue is not None:
            self._glue.drop(np.asarray(episodes, np.int64))

    def result(self) -> TemporalDictTensor:
        """Views of the block; copies if any chunk was copied out of it."""
        block = self.running_block
        if self._glue is None:
            part = slots_of(block.arrays, slice(self.n_rows))
        else:
            at_home = np.flatnonzero(~self._arrived & self._in_place)
            part = self._glue.join(block.arrays, at_home)
        seeds = partial(episode_seeds, self.root, self.first, self.n_rows)
        workers: list[int] = []
        if self._has_shares:
            shares, all_seeds = self._shares, seeds()
            workers = [shares.worker(row) for row in range(self.n_rows)]
            own = [all_seeds[shares.seeding_episode(row)] for row in range(self.n_rows)]
            seeds = partial(list, own)
        info = self._info(range(self.n_rows), seeds, workers)
        return trajectories_of(block.layout, part, info)


@dataclass(eq=False, kw_only=True)
class WindowRequest(Request):
    """The next steps of every running lane, one lane per row.

    Attributes:
        lanes: The running lanes, numbered across workers.
        n_lanes: Lanes of one worker.
        n_resets: Number of the ``reset`` whose episodes run.
        n_windows: Windows requested before that reset.
        is_first: Whether it is the first window after that reset.
        tapes: What the running episodes have done so far, ``None`` if it is not recorded.
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
            seeds=self._seeds,
            is_first=self.is_first,
            payload=payload,
        )

    @property
    def _seeds(self) -> LaneSeeds:
        """The seeds of all lanes; before the reset a lane can have restarted once per step."""
        layout = self.running_block.layout
        n_restarts = self.n_windows * layout.n_timesteps if layout.restarts else 0
        return LaneSeeds(self.root, self.n_resets, n_restarts)

    def _rows_of(self, worker: int) -> list[tuple[int, int]]:
        """Rows and lanes of a worker."""
        first, stop = worker * self.n_lanes, (worker + 1) * self.n_lanes
        return [(row, lane) for row, lane in enumerate(self.lanes) if first <= lane < stop]

    def tapes_for(self, worker: int) -> dict[int, Tape]:
        """See ``Request.tapes_for``."""
        if self.tapes is None or self.is_first:
            return {}
        lanes = [lane for _, lane in self._rows_of(worker)]
        return {lane % self.n_lanes: self.tapes.tapes[lane] for lane in lanes}

    def can_be_repeated(self) -> bool:
        """Whether it is known what all lanes have done."""
        return self.is_first or (self.tapes is not None and self.tapes.is_complete)

    def give_back(self, worker: int) -> bool:
        """Begin the whole window again."""
        self._note_writing(worker)
        return bool(self._rows_of(worker))

    def seed_of(self, row: int) -> int | None:
        """See ``Request.seed_of``; only the worker knows how often a lane has restarted."""
        if self.running_block.layout.step.seeding != "episode":
            return self._seeds.seed(row - row % self.n_lanes, 0)
        return None if self.running_block.layout.restarts else self._seeds.seed(row, 0)

    def result(self) -> TemporalDictTensor:
        """Views of the block."""
        block = self.running_block
        running = block.arrays.control["running"].reshape(-1)
        self.lanes_left = np.flatnonzero(running >= 0).tolist()
        if self.tapes is not None:
            self.tapes.record(block.layout, block.arrays, self.lanes, self.lanes_left)
        part = slots_of(block.arrays, slice(self.n_rows))
        lane_seeds, lanes = self._seeds, self.lanes
        workers = [lane // self.n_lanes for lane in lanes]
        seeded = lanes
        if block.layout.step.seeding != "episode":
            seeded = [worker * self.n_lanes for worker in workers]
        info = self._info(lanes, lambda: [lane_seeds.seed(lane, 0) for lane in seeded], workers)
        return trajectories_of(block.layout, part, info)


def _rows_of(array: Array, rows: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(array[np.asarray(rows)])


def as_infos(agent_info: Info, env_info: Info, n_rows: int) -> Infos:
    """Infos as arrays, copied, so that the caller may change its tensors afterwards.

    Raises:
        SpecError: See ``info_rows``.
    """
    rows = info_rows("agent_info", agent_info, n_rows), info_rows("env_info", env_info, n_rows)
    agent_arrays, env_arrays = ({k: t.numpy() for k, t in part.items()} for part in rows)
    return agent_arrays, env_arrays
