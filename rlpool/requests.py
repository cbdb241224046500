"""What the caller asked for, from the message to the workers to the user's trajectories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import RlpoolError, SpecError, compose
from rlpool.seeding import LaneSeeds, episode_seeds
from rlpool.slots import Block
from rlpool.specs import join_key
from rlpool.storage import Array, Memory
from rlpool.trajectories import Glue, copied_slots, slots_in_place, trajectories_of
from rlpool.workers.collector import Infos
from rlpool.workers.messages import Execute, Window
from rlpool.workers.parcel import Parcel

Packed = tuple[Parcel, Memory]


class Request(ABC):
    """One batch of rows.

    Args:
        number: Names it in messages.
        n_rows: Rows of the result.
        infos: Its infos, per row.
        policy_version: Updates of the agents that it runs with.
        update: The update to send before it, if there is a new one.

    Attributes:
        block: Where it is written, once it runs.
        n_slots: Slots that it takes.
        remaining: Workers that have not said that they are done.
        error: Why it cannot be completed.
        trajectories: Its result, once the caller has waited for it.
    """

    def __init__(
        self,
        number: int,
        n_rows: int,
        infos: Infos,
        policy_version: int,
        update: Packed | None,
    ) -> None:
        self.number = number
        self.n_rows = n_rows
        self.infos = infos
        self.policy_version = policy_version
        self.update = update
        self.block: Block | None = None
        self.n_slots = 0
        self.remaining: set[int] = set()
        self.error: RlpoolError | None = None
        self.trajectories: TemporalDictTensor | None = None

    @property
    def is_running(self) -> bool:
        """Whether workers may still write into its block."""
        return bool(self.remaining)

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

    @abstractmethod
    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """Slots to run with, when ``n_free`` of ``n_slots`` are not in use; 0 to wait."""

    @abstractmethod
    def message(self, worker: int, parcel: Parcel | None) -> Execute | Window:
        """What to send to a worker."""

    @abstractmethod
    def seed_of(self, row: int) -> int:
        """The seed of a row's episode."""

    @abstractmethod
    def result(self) -> TemporalDictTensor:
        """The rows, once complete."""

    def empty_slots(self, chunks: Sequence[tuple[int, int, int]]) -> list[int]:
        """Copy complete chunks out of their slots; returns the slots."""
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
        info["policy_version"] = torch.from_numpy(np.full(n_rows, self.policy_version))
        return info


class EpisodeRequest(Request):
    """Complete episodes, one per row.

    Args:
        execution: Number that the episodes' seeds derive from.
        root: Root of all seeds.
    """

    def __init__(
        self,
        number: int,
        n_rows: int,
        infos: Infos,
        policy_version: int,
        update: Packed | None,
        execution: int,
        root: int,
    ) -> None:
        super().__init__(number, n_rows, infos, policy_version, update)
        self._execution = execution
        self._root = root
        self._glue: Glue | None = None
        self._left_home = np.zeros(n_rows, bool)  # first chunks that were copied out already
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

    def message(self, worker: int, parcel: Parcel | None) -> Execute:
        """The request, with this worker's share of the slots that belong to no episode."""
        first = self.n_rows if self._in_place else 0
        n_workers = self.running_block.layout.n_workers
        return Execute(
            request=self.number,
            execution=self._execution,
            n_episodes=self.n_rows,
            block=self.running_block.number,
            in_place=self._in_place,
            slots=list(range(first + worker, self.n_slots, n_workers)),
            parcel=parcel,
        )

    def seed_of(self, row: int) -> int:
        """The seed of an episode."""
        return episode_seeds(self._root, self._execution, self.n_rows)[row]

    def empty_slots(self, chunks: Sequence[tuple[int, int, int]]) -> list[int]:
        """Copy complete chunks out of their slots, one copy per key and chunk number."""
        block = self.running_block
        if self._glue is None:
            self._glue = Glue(block.layout, self.n_rows)
        table = np.asarray(chunks, np.int64)
        for chunk in np.unique(table[:, 2]):
            rows = table[table[:, 2] == chunk]
            self._glue.add(rows[:, 0], int(chunk), copied_slots(block.arrays, rows[:, 1]))
        self._left_home[table[table[:, 2] == 0, 0]] = True
        slots: list[int] = table[:, 1].tolist()
        return slots

    def result(self) -> TemporalDictTensor:
        """Views on the block; copies if chunks had to be glued."""
        block = self.running_block
        if self._glue is None:
            part = slots_in_place(block.arrays, self.n_rows)
        else:
            at_home = np.flatnonzero(~self._left_home)
            if self._in_place and at_home.size:
                self._glue.add(at_home, 0, copied_slots(block.arrays, at_home))
            part = self._glue.join()
        info = self._info(
            episode=torch.from_numpy(np.arange(self.n_rows)),
            seed=torch.from_numpy(
                np.asarray(episode_seeds(self._root, self._execution, self.n_rows), np.int64)
            ),
        )
        return trajectories_of(block.layout, part, info)


class WindowRequest(Request):
    """The next steps of every running lane, one lane per row.

    Args:
        lanes: The running lanes, numbered across workers.
        n_lanes: Lanes of one worker.
        n_resets: Number of the ``reset`` whose episodes run.
        is_first: Whether it is the first window after that reset.
        root: Root of all seeds.

    Attributes:
        lanes_left: Lanes that go on after this window, set by ``result``.
    """

    def __init__(
        self,
        number: int,
        lanes: Sequence[int],
        infos: Infos,
        policy_version: int,
        update: Packed | None,
        n_lanes: int,
        n_resets: int,
        is_first: bool,
        root: int,
    ) -> None:
        super().__init__(number, len(lanes), infos, policy_version, update)
        self.is_first = is_first
        self.lanes_left: list[int] = []
        self._lanes = list(lanes)
        self._n_lanes = n_lanes
        self._n_resets = n_resets
        self._seeds = LaneSeeds(root, n_resets)

    def slots_wanted(self, n_free: int, n_slots: int) -> int:
        """One slot per lane."""
        return self.n_rows if n_free >= self.n_rows else 0

    def message(self, worker: int, parcel: Parcel | None) -> Window:
        """The window, with the slots of this worker's running lanes."""
        slots = {
            lane % self._n_lanes: row
            for row, lane in enumerate(self._lanes)
            if lane // self._n_lanes == worker
        }
        return Window(
            request=self.number,
            block=self.running_block.number,
            slots=slots,
            n_resets=self._n_resets,
            is_first=self.is_first,
            parcel=parcel,
        )

    def seed_of(self, row: int) -> int:
        """The seed of a lane's first episode since the reset."""
        return self._seeds.seed(row, 0)

    def result(self) -> TemporalDictTensor:
        """Views on the block."""
        block = self.running_block
        running = block.arrays.control["running"].reshape(-1)
        self.lanes_left = np.flatnonzero(running >= 0).tolist()
        part = slots_in_place(block.arrays, self.n_rows)
        rows = torch.from_numpy(np.asarray(self._lanes, np.int64))
        info = {key: values[rows] for key, values in self._whole_info().items()}
        return trajectories_of(block.layout, part, info)

    def _whole_info(self) -> dict[str, torch.Tensor]:
        n_lanes = self.running_block.layout.n_workers * self._n_lanes
        return self._info(
            episode=torch.from_numpy(np.arange(n_lanes)),
            seed=torch.from_numpy(
                np.asarray([self._seeds.seed(lane, 0) for lane in range(n_lanes)], np.int64)
            ),
        )


def as_infos(agent_info: DictTensor | None, env_info: DictTensor | None) -> Infos:
    """Infos as arrays, copied, so that the caller may change its tensors afterwards.

    Raises:
        SpecError: For a dtype that NumPy lacks.
    """
    return _arrays("agent_info", agent_info), _arrays("env_info", env_info)


def _arrays(name: str, info: DictTensor | None) -> dict[str, Array]:
    arrays = {}
    for key, tensor in ({} if info is None else info).items():
        try:
            arrays[key] = tensor.detach().cpu().numpy().copy()
        except TypeError:
            raise SpecError(
                compose(
                    f"{key!r} in {name} has dtype {tensor.dtype}, which NumPy lacks",
                    fix="convert it, for instance to float32",
                )
            ) from None
    return arrays
