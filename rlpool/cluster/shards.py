"""What travels between the caller and its nodes: parts of requests, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rlpool.batch.requests import EpisodeRequest, WindowRequest
from rlpool.data.storage import NDArray
from rlpool.errors import RlpoolError, WorkerError
from rlpool.slots.blocks import Block, StepSpecs
from rlpool.slots.trajectories import Slice
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.payload import Payload

# From the caller to a node ------------------------------------------------------------------


@dataclass(frozen=True)
class NodeSetup:
    """What every node starts with.

    Attributes:
        functions: ``(create_env, env_args, create_agent, agent_args, agent_rows)``, pickled.
        n_workers: Workers of a node.
        root: Root of all seeds.
        n_timesteps: Steps per slot.
        n_slots: Slots of a node, at least one for each of ``least_rows``; ``None`` for windows,
            which take one per lane.
        policy: What happens to workers that fail.
        timeout_s: Seconds without progress after which a worker counts as hanging.
    """

    functions: bytes
    n_workers: int
    root: int
    n_timesteps: int
    n_slots: int | None
    policy: FailurePolicy
    timeout_s: float | None

    def least_rows(self, n_lanes: int) -> int:
        """Episodes that keep all lanes of a node busy, half of them if it has several workers.

        With two shards at once, these are all its lanes.

        Args:
            n_lanes: Lanes of each worker.
        """
        return n_lanes * max(1, self.n_workers // 2)


class PolicyAt(NamedTuple):
    """Where the parameters are that a shard runs with.

    Attributes:
        version: Number of updates so far; 0 for what the agents began with.
        reference: What ``Transport.publish`` returned; ``None`` with version 0.
    """

    version: int
    reference: Any = None


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Some rows of a request, as a request of their own.

    Attributes:
        request: Consecutive episodes; or the next window of one part of all lanes, which are
            numbered from its first on. Its number names the shard: no two shards of a caller share
            one, and later ones have larger ones. What it runs with is said here. The tapes of a
            window are what the running episodes have done so far; without any it goes on with those
            that the last window has left running.
        policy: What it runs with.
        first: Number of its first episode, or of the part's first lane, in the whole request.
        part: Of a window: number of the part.
        parts: Of a window: all parts that the node has, this one included.
    """

    request: EpisodeRequest | WindowRequest
    policy: PolicyAt
    first: int
    part: int | None = None
    parts: frozenset[int] = frozenset()


Published = tuple[Payload, NDArray]
"""A packed object and its bytes, see ``workers.payload``."""


# From a node to the caller ------------------------------------------------------------------


@dataclass(frozen=True)
class NodeReport:
    """What a node knows about itself, once its workers are ready.

    Attributes:
        name: What errors call it.
        n_lanes: Environments of each worker.
        step: What a step consists of; ``None`` if that needs infos to be found out.
        fingerprint: What the bits of results may depend on, see ``fingerprint``.
    """

    name: str
    n_lanes: int
    step: StepSpecs | None
    fingerprint: Mapping[str, str]


@dataclass(frozen=True)
class Look:
    """What a node is doing.

    Attributes:
        n_finished: By number of the shard, how many of its episodes are finished.
        n_restarts: Workers that were replaced because they failed.
        failures: Why, of those since the last look.
    """

    n_finished: Mapping[int, int]
    n_restarts: int
    failures: Sequence[WorkerError] = ()


@dataclass(frozen=True)
class Rows:
    """Rows of a result without padding, one contiguous array per key.

    Attributes:
        step: What a step consists of.
        rows: Key to ``[sum(lengths), ...]``, row after row.
        finals: Key to ``[B, ...]``: the value after the last step.
        lengths: int64 ``[B]``.
        starts: int64 ``[B]``, 1 where a row's first step starts an episode.
        is_reproducible: See ``Request``, as far as this node knows.
        lanes_left: Of a window: the lanes that go on, to their ``steps_before``, see ``Layout``.
        failures: Number of an episode, or lane, in the request to why it was given up.
    """

    step: StepSpecs
    rows: dict[str, NDArray]
    finals: dict[str, NDArray]
    lengths: NDArray
    starts: NDArray
    is_reproducible: bool = True
    lanes_left: dict[int, int] = field(default_factory=dict)
    failures: Mapping[int, WorkerError] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a shard.

    Attributes:
        rows: What it was asked for, ``None`` if it failed.
        error: Why it failed.
        is_fatal: Whether the node can run nothing any more.
        is_lost: Whether it was run, and what the node returned is lost.
    """

    rows: Rows | None = None
    error: RlpoolError | None = None
    is_fatal: bool = False
    is_lost: bool = False


def rows_of(request: EpisodeRequest | WindowRequest, failures: Mapping[int, WorkerError]) -> Rows:
    """What is sent of a request that is complete; no copy where all rows have the same length.

    Args:
        request: The request, which still has its block.
        failures: By number in the whole request, episodes or lanes that were given up.
    """
    block, part = request.running_block, request.part()
    control = block.arrays.control
    running, steps_before = (control[name].reshape(-1) for name in ("running", "steps_before"))
    is_step = _steps_in(part.lengths)
    shapes = {key: spec.shape for key, spec in block.layout.rows.items()}
    arrays = part.rows.items()
    return Rows(
        block.layout.step,
        {k: a.reshape(-1, *shapes[k]) if is_step.all() else a[is_step] for k, a in arrays},
        {key: np.ascontiguousarray(array) for key, array in part.finals.items()},
        part.lengths,
        part.starts,
        request.is_reproducible,
        {int(lane): int(steps_before[lane]) for lane in np.flatnonzero(running >= 0)},
        failures,
    )


def with_padding(rows: Rows) -> Slice:
    """The part again, zero from each row's length on; copies."""
    size = len(rows.lengths), int(rows.lengths.max(initial=0))
    padded = {k: np.zeros((*size, *a.shape[1:]), a.dtype) for k, a in rows.rows.items()}
    _fill(padded, rows)
    finals = {key: array.copy() for key, array in rows.finals.items()}
    return Slice(padded, finals, np.array(rows.lengths), np.array(rows.starts))


def copy_into(block: Block, first_slot: int, rows: Rows) -> None:
    """Copy rows into consecutive slots of a block, none longer than a slot."""
    arrays, control, lengths = block.arrays, block.arrays.control, rows.lengths
    slots = slice(first_slot, first_slot + len(lengths))
    _fill({key: array[slots] for key, array in arrays.rows.items()}, rows)
    for key, array in rows.finals.items():
        arrays.finals[key][slots] = array
    # What an earlier use left behind.
    for slot in first_slot + np.flatnonzero(control["dirty"][slots] > lengths):
        stale = slice(int(lengths[slot - first_slot]), int(control["dirty"][slot]))
        for target in arrays.rows.values():
            target[slot, stale] = 0
    for name, values in (("dirty", lengths), ("length", lengths), ("starts", rows.starts)):
        control[name][slots] = values
    control["whole"][slots] = 1


def _fill(targets: Mapping[str, NDArray], rows: Rows) -> None:
    """Copy the steps of rows to the beginnings of ``[B, T, ...]``."""
    is_step = _steps_in(rows.lengths)
    for key, array in rows.rows.items():
        target = targets[key][:, : is_step.shape[1]]
        if is_step.all():
            target[:] = array.reshape(target.shape)
        else:
            target[is_step] = array


def _steps_in(lengths: NDArray) -> NDArray:
    """Where rows have steps: bool ``[B, longest]``."""
    is_step: NDArray = np.arange(lengths.max(initial=0)) < lengths[:, None]
    return is_step
