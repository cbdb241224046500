"""What travels between the caller and its nodes: parts of requests, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rlpool.batch.messages import Infos
from rlpool.errors import RlpoolError, WorkerError
from rlpool.memory.storage import Array
from rlpool.record.tape import Tape
from rlpool.slots.blocks import Layout, StepSpecs, flat
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
class EpisodeShard:
    """Consecutive episodes of a request.

    Attributes:
        number: Names it; no two shards of a caller share one.
        root: Root of all seeds.
        first: Episodes requested before the first of these, from which their seeds and noise
            derive.
        given_seeds: Their seeds, if the user gave them.
        start: Number of the first within its ``execute``.
        n_rows: How many.
        infos: Their rows of ``agent_info`` and ``env_info``.
        policy: What they run with.
    """

    number: int
    root: int
    first: int
    given_seeds: list[int] | None
    start: int
    n_rows: int
    infos: Infos
    policy: PolicyAt


@dataclass(frozen=True, kw_only=True)
class WindowShard:
    """The next window of one part of all lanes; lanes are numbered from its first on.

    Attributes:
        number: Names it; no two shards of a caller share one, and later ones have larger ones.
        root: Root of all seeds.
        part: Number of the part.
        parts: All parts that the node has, this one included.
        first_lane: Number of the part's first lane among all.
        lanes: The lanes that run.
        n_resets: Number of the ``reset`` whose episodes run.
        n_windows: Windows requested before that reset.
        is_first: Whether it is the first window after that reset.
        infos: Rows of ``agent_info`` and ``env_info`` of all lanes of the part.
        policy: What they run with.
        tapes: By lane, what the running episodes have done so far; ``None`` to go on with those
            that the last window has left running.
    """

    number: int
    root: int
    part: int
    parts: frozenset[int]
    first_lane: int
    lanes: list[int]
    n_resets: int
    n_windows: int
    is_first: bool
    infos: Infos
    policy: PolicyAt
    tapes: Mapping[int, Tape] | None = None


Shard = EpisodeShard | WindowShard

Published = tuple[Payload, Array]
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
    rows: dict[str, Array]
    finals: dict[str, Array]
    lengths: Array
    starts: Array
    is_reproducible: bool = True
    lanes_left: dict[int, int] = field(default_factory=dict)
    failures: dict[int, WorkerError] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a shard.

    Attributes:
        rows: What it was asked for, ``None`` if it failed.
        error: Why it failed.
        is_fatal: Whether the node can run nothing any more.
    """

    rows: Rows | None = None
    error: RlpoolError | None = None
    is_fatal: bool = False


def without_padding(
    layout: Layout, part: Slice, is_reproducible: bool, lanes_left: dict[int, int]
) -> Rows:
    """The rows of a part; no copy where all of them have the same length."""
    lengths = part.lengths
    n_rows, longest = len(lengths), int(lengths.max(initial=0))
    is_filled = None if (lengths == longest).all() else _filled(lengths, longest)
    rows = {}
    for key, spec in layout.rows.items():
        array = part.rows[key]
        if is_filled is None:
            flattened = np.ascontiguousarray(array).reshape(n_rows * longest, *spec.shape)
        else:
            flattened = array[is_filled]
        rows[key] = flattened
    finals = {key: np.ascontiguousarray(array) for key, array in part.finals.items()}
    return Rows(layout.step, rows, finals, lengths, part.starts, is_reproducible, lanes_left)


def with_padding(rows: Rows) -> Slice:
    """The part again, zero from each row's length on; copies."""
    lengths = rows.lengths
    longest = int(lengths.max(initial=0))
    is_filled = _filled(lengths, longest)
    padded = {}
    for key, array in rows.rows.items():
        padded[key] = np.zeros((len(lengths), longest, *array.shape[1:]), array.dtype)
        padded[key][is_filled] = array
    finals = {key: array.copy() for key, array in rows.finals.items()}
    return Slice(padded, finals, np.array(lengths), np.array(rows.starts))


def copy_into(block: Any, first_slot: int, rows: Rows) -> None:
    """Copy rows into consecutive slots of a block, none longer than a slot.

    Args:
        block: A ``Block``.
        first_slot: The slot of the first row.
        rows: The rows.
    """
    layout, arrays = block.layout, block.arrays
    lengths, n_rows = rows.lengths, len(rows.lengths)
    slots = slice(first_slot, first_slot + n_rows)
    longest = int(lengths.max(initial=0))
    same = bool((lengths == longest).all())
    if not same:
        numbers = np.arange(first_slot, first_slot + n_rows) * layout.n_timesteps
        offsets = numbers - (np.cumsum(lengths) - lengths)
        index = np.repeat(offsets, lengths) + np.arange(int(lengths.sum()))
    for key, array in rows.rows.items():
        target = arrays.rows[key]
        if same:
            target[slots, :longest] = array.reshape(n_rows, longest, *array.shape[1:])
        else:
            flat(target, 2)[index] = flat(array, 1)
    for key, array in rows.finals.items():
        arrays.finals[key][slots] = array
    control = arrays.control
    # What an earlier use left behind.
    for slot in first_slot + np.flatnonzero(control["dirty"][slots] > lengths):
        stale = slice(int(lengths[slot - first_slot]), int(control["dirty"][slot]))
        for target in arrays.rows.values():
            target[slot, stale] = 0
    for name, array in (("dirty", lengths), ("length", lengths), ("starts", rows.starts)):
        control[name][slots] = array


def _filled(lengths: Array, longest: int) -> Array:
    """Where rows have steps: bool ``[B, longest]``."""
    return np.arange(longest) < lengths[:, None]
