"""What runs on a node: an ordinary batcher, which is asked for ranges of episodes."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlpool.batch.batcher import EpisodeBatcher
from rlpool.data.infos import Infos
from rlpool.data.storage import Memory, NDArray
from rlpool.errors import AgentError, EnvError, RlpoolError, SpecError, WorkerError
from rlpool.slots.blocks import StepSpecs
from rlpool.slots.trajectories import slice_of
from rlpool.workers.payload import Payload, unpack

Published = tuple[Payload, NDArray]
"""A packed object and its bytes, see ``workers.payload``."""


@dataclass(frozen=True)
class Range:
    """Consecutive episodes of a request.

    Attributes:
        root: Root of all seeds.
        first: Number of the first episode in the batcher's life.
        row: Row of the first episode in the request.
        n_episodes: How many.
        infos: Rows of ``agent_info`` and ``env_info``.
        seeds: What the environments are reset with, ``None`` to derive it.
        version: Version of the policy.
        policy: Holds Ray's reference to a ``Published``; empty before the first update. Ray would
            fetch the object for every range if it were an argument of the call.
    """

    root: int
    first: int
    row: int
    n_episodes: int
    infos: Infos
    seeds: Sequence[int] | None
    version: int
    policy: Sequence[Any]


@dataclass(frozen=True)
class Rows:
    """The rows of a range, without their padding.

    Attributes:
        step: What a step consists of.
        steps: Key to ``[sum(lengths), ...]``, row after row.
        finals: Key to ``[B, ...]``: the value after the last step.
        lengths: int64 ``[B]``.
        starts: int64 ``[B]``, see ``Slice``.
        info: Key to ``[B, ...]``.
    """

    step: StepSpecs
    steps: dict[str, NDArray]
    finals: dict[str, NDArray]
    lengths: NDArray
    starts: NDArray
    info: dict[str, NDArray]


class NodeActor:
    """An ``EpisodeBatcher`` in a process that Ray starts, and starts again if it dies.

    Errors are returned: what Ray raises from a call is about the node.

    Args:
        setup: The keyword arguments of the batcher, pickled.
        path: The caller's ``sys.path``, so that modules are found as they are on one machine.
    """

    def __init__(self, setup: bytes, path: Sequence[str]) -> None:
        known = {*sys.path}
        sys.path += [part for part in path if part not in known and os.path.exists(part)]
        self._setup = setup
        self._batcher: EpisodeBatcher | None = None
        self._version = 0  # of the policy that the agents have; -1 if that is not known

    def start(self) -> int | RlpoolError:
        """Start the workers; returns the number of lanes, or why there are none."""
        try:
            batcher = self._ready_batcher()
            _refuse_lanes_without_seeds(batcher)
        except RlpoolError as error:
            return _placed(error)
        return batcher.n_lanes

    def run(self, part: Range) -> Rows | RlpoolError:
        """Run episodes with the policy that the range names."""
        try:
            return self._rows(part)
        except RlpoolError as error:
            if not isinstance(error, EnvError | AgentError | SpecError):
                self.close()  # the workers are of no further use
            return _placed(error, part.row)

    def close(self) -> None:
        """End the workers."""
        batcher, self._batcher = self._batcher, None
        self._version = 0
        if batcher is not None:
            batcher.close()

    def _ready_batcher(self) -> EpisodeBatcher:
        if self._batcher is None:
            self._batcher = EpisodeBatcher(**pickle.loads(self._setup))
        return self._batcher

    def _rows(self, part: Range) -> Rows:
        import ray

        if self._version and not part.policy:
            self.close()  # only new agents have the parameters that they began with
        batcher = self._ready_batcher()
        if part.policy and part.version != self._version:
            self._version = -1
            batcher.update(_read(*ray.get(part.policy[0])))
            self._version = part.version
        batcher._root = part.root
        batcher.seek(part.first)
        batcher.execute(part.n_episodes, *part.infos, episode_seeds=part.seeds)
        trajectories = batcher.get()
        step = _refuse_lanes_without_seeds(batcher)
        rows = slice_of(trajectories)
        is_step = steps_in(rows.lengths)
        return Rows(
            step,
            {key: array[is_step] for key, array in rows.rows.items()},
            {key: np.ascontiguousarray(array) for key, array in rows.finals.items()},
            rows.lengths,
            rows.starts,
            {key: tensor.numpy() for key, tensor in trajectories.info.items()},
        )


def steps_in(lengths: NDArray) -> NDArray:
    """Where rows have steps: bool ``[B, longest]``."""
    is_step: NDArray = np.arange(lengths.max(initial=0)) < lengths[:, None]
    return is_step


def _read(payload: Payload, data: NDArray) -> Any:
    memory = Memory.local(data.nbytes)
    memory.root()[:] = data
    return unpack(payload, memory)


def _refuse_lanes_without_seeds(batcher: EpisodeBatcher) -> Any:
    """Refuse environments whose episodes depend on the range that they are in.

    Returns:
        What a step consists of; ``None`` if that is not known before the first request.

    Raises:
        SpecError: If the lanes of a worker cannot be seeded one by one.
    """
    step = batcher._not_closed().step
    if step is not None and step.resets_together:
        raise SpecError(
            "the environments of create_env cannot be seeded one by one",
            fix="give single environments to GymEnv, or use EpisodeBatcher on each machine",
        )
    return step


def _placed(error: RlpoolError, first_row: int = 0) -> RlpoolError:
    """The same error; its place names the node and the row of the whole request."""
    if not isinstance(error, WorkerError):
        return error
    import ray

    address_of: Any = ray.util.get_node_ip_address  # without annotations
    where = error.where._replace(node=address_of())
    if getattr(where, "row", None) is not None:
        where = where._replace(row=where.row + first_row)
    return error.reworded(where=where)
