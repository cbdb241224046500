"""The memory that the caller of environments in processes shares with all of them.

Every key of ``VecEnv.current`` lies there once, ``[n_lanes, ...]``. A worker sees the rows of its
own lanes, the caller sees all of them::

    frame   [n_lanes, 4]      written by the workers
    ahead/frame               first observations of episodes that were begun ahead of time
    reward, flags             written by the workers; cleared by the caller when a lane is reset
    action  [n_lanes]         written by the caller
    elapsed, seed, ahead      bookkeeping per lane
    step, finished, ...       bookkeeping per worker

Nobody locks: a worker touches its rows between a command and its end, the caller otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlpool.memory.storage import Array, Memory, carve, carved_bytes
from rlpool.specs import FLAGS, REWARD_SPEC, Leaf, TensorSpec

OBSERVATION, AHEAD, ACTION = "observation/", "ahead/", "action/"  # prefixes

ALL_LANES, SOME_LANES = 0, 1  # values of ``partial``
NONE_ENDED, SOME_ENDED, FAILED = 0, 1, 2  # values of ``outcome``

_INT64 = TensorSpec((), np.dtype(np.int64))
_PER_LANE = {
    "reward": REWARD_SPEC,
    "elapsed": _INT64,  # steps of the episode
    "seed": _INT64,  # of the last reset
    "ahead": _INT64,  # number of the episode that is begun already, -1 if none is
    "asked": TensorSpec((), np.dtype(bool)),  # whether the lane takes part in a partial step
}
_PER_WORKER = {
    "step": _INT64,  # number of the step that was asked for last
    "partial": _INT64,  # whether it is for all lanes of the worker
    "finished": _INT64,  # number of the command that was carried out last
    "outcome": _INT64,  # of that command
    "writing": _INT64,  # number of the last step whose observations were written, if only in part
}


@dataclass(frozen=True)
class BufferLayout:
    """How the buffers is divided.

    Attributes:
        n_lanes: Lanes of all workers.
        n_workers: How many workers there are.
        observation: The observations' keys, empty if they are not known yet.
        action: The actions' keys with the dtypes that the environments take; empty if there is no
            action space.
    """

    n_lanes: int
    n_workers: int
    observation: Mapping[str, Leaf]
    action: Mapping[str, TensorSpec]

    def bytes_of_key(self) -> dict[str, int]:
        """Bytes per key."""
        return {
            **carved_bytes(self._lane_specs(), self.n_lanes),
            **carved_bytes(_PER_WORKER, self.n_workers),
            **carved_bytes(self._flag_specs(), len(FLAGS)),
        }

    def carve(self, root: Array) -> dict[str, Array]:
        """The named arrays of the buffers."""
        arrays: dict[str, Array] = {}
        start = 0
        for specs, n_rows in (
            (self._lane_specs(), self.n_lanes),
            (_PER_WORKER, self.n_workers),
            (self._flag_specs(), len(FLAGS)),
        ):
            size = sum(carved_bytes(specs, n_rows).values())
            arrays.update(carve(root[start : start + size], specs, n_rows))
            start += size
        return arrays

    def _lane_specs(self) -> dict[str, TensorSpec]:
        specs = {**_PER_LANE, **observation_specs(self.observation)}
        for key, spec in self.action.items():
            specs[ACTION + key] = spec
        return specs

    def _flag_specs(self) -> dict[str, TensorSpec]:
        return {"flags": TensorSpec((self.n_lanes,), np.dtype(bool))}


class Buffers:
    """The buffers as one process sees them.

    Args:
        layout: How they are divided.
        memory: The memory.
        lanes: The lanes that this process sees, all by default.

    Attributes:
        observation: Key to array ``[lanes, ...]``: current observations.
        ahead: The same keys: first observations of episodes begun ahead.
        action: Key to array ``[lanes, ...]``.
        reward: float32 ``[lanes]``.
        flags: bool ``[4, lanes]``.
        elapsed, seed, is_ahead, asked: ``[lanes]``.
        step, partial, finished, outcome, writing: One int64 per worker, as memoryviews, which
            are read faster than arrays.
    """

    def __init__(self, layout: BufferLayout, memory: Memory, lanes: slice = slice(None)) -> None:
        self._memory = memory
        arrays = layout.carve(memory.root())
        self.observation = {k: arrays[OBSERVATION + k][lanes] for k in layout.observation}
        self.ahead = {k: arrays[AHEAD + OBSERVATION + k][lanes] for k in layout.observation}
        self.action = {k: arrays[ACTION + k][lanes] for k in layout.action}
        self.reward = arrays["reward"][lanes]
        self.flags = arrays["flags"][:, lanes]
        self.elapsed = arrays["elapsed"][lanes]
        self.seed = arrays["seed"][lanes]
        self.is_ahead = arrays["ahead"][lanes]
        self.asked = arrays["asked"][lanes]
        self.step = arrays["step"].data
        self.partial = arrays["partial"].data
        self.finished = arrays["finished"].data
        self.outcome = arrays["outcome"].data
        self.writing = arrays["writing"].data

    def map_observations(
        self,
        leaves: Mapping[str, Leaf],
        n_lanes: int,
        memory: Memory,
        lanes: slice = slice(None),
    ) -> None:
        """Keep observations in memory of their own, for those that are known only later.

        Args:
            leaves: Their keys.
            n_lanes: Lanes of all workers.
            memory: The memory.
            lanes: The lanes that this process sees, all by default.
        """
        specs = observation_specs(leaves)
        arrays = {k: a[lanes] for k, a in carve(memory.root(), specs, n_lanes).items()}
        self.observation = {key: arrays[OBSERVATION + key] for key in leaves}
        self.ahead = {key: arrays[AHEAD + OBSERVATION + key] for key in leaves}


def observation_specs(leaves: Mapping[str, Leaf]) -> dict[str, TensorSpec]:
    """What the buffers keeps of observations with these keys."""
    specs = {}
    for key, leaf in leaves.items():
        specs[OBSERVATION + key] = specs[AHEAD + OBSERVATION + key] = leaf.spec
    return specs


def carve_actions(
    specs: Mapping[str, TensorSpec], n_lanes: int, memory: Memory, lanes: slice = slice(None)
) -> dict[str, Array]:
    """Arrays of actions in memory of their own, for environments without an action space."""
    return {key: array[lanes] for key, array in carve(memory.root(), specs, n_lanes).items()}
