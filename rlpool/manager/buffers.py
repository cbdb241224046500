"""The memory that the caller and the workers of a ``ParallelEnvManager`` share.

Every key of ``VecEnv.current`` lies there once, ``[n_lanes, ...]``. A worker sees the rows of its
own lanes, the caller sees all of them::

    observation/frame  [n_lanes, 4]   written by the workers
    reward, flags                     written by the workers; cleared when a lane is reset
    action/action  [n_lanes]          written by the caller
    asked                             bookkeeping per lane
    step, finished, ...               bookkeeping per worker
    asleep                            who has to be woken: every worker, then the caller

There are no locks: a worker touches its rows between a command and its end, the caller otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlpool.data.specs import FLAGS, REWARD_SPEC, TensorSpec
from rlpool.data.storage import Memory, NDArray, carve
from rlpool.envs.columns import fitted_rows
from rlpool.errors import SpecError

Actions = Mapping[str, NDArray]

ALL_LANES, SOME_LANES = 0, 1  # values of ``partial``
NONE_ENDED, SOME_ENDED, FAILED = 0, 1, 2  # values of ``outcome``

_PER_LANE = {
    "reward": REWARD_SPEC,
    "asked": TensorSpec((), np.dtype(bool)),  # whether the lane takes part in a partial step
}
_PER_WORKER = (
    "step",  # number of the last step issued
    "partial",  # whether it is for all lanes of the worker
    "finished",  # number of the last command carried out
    "outcome",  # of that command
    "writing",  # number of the last step that began to write observations
)


def buffer_specs(
    observation: Mapping[str, TensorSpec],
    action: Mapping[str, TensorSpec],
    n_lanes: int,
    n_workers: int,
) -> dict[str, TensorSpec]:
    """Specs of all buffers.

    Args:
        observation: Specs of one observation.
        action: Specs of one action, in the dtypes that the environments take.
        n_lanes: Number of lanes.
        n_workers: Number of workers.
    """
    of_lanes = {
        **_PER_LANE,
        **{f"observation/{key}": spec for key, spec in observation.items()},
        **{f"action/{key}": spec for key, spec in action.items()},
    }
    return {
        **{key: TensorSpec((n_lanes, *spec.shape), spec.dtype) for key, spec in of_lanes.items()},
        "flags": TensorSpec((len(FLAGS), n_lanes), np.dtype(bool)),
        **{name: TensorSpec((n_workers,), np.dtype(np.int64)) for name in _PER_WORKER},
        "asleep": TensorSpec((n_workers + 1,), np.dtype(np.int64)),
    }


class Buffers:
    """The buffers as one process sees them, empty until ``map``.

    Args:
        lanes: The lanes that this process sees, all by default.

    Attributes:
        observation: Key to array ``[lanes, ...]``: current observations.
        action: Key to array ``[lanes, ...]``.
        reward: float32 ``[lanes]``.
        flags: bool ``[4, lanes]``.
        asked: ``[lanes]``: whether a partial step is for them.
        step, partial, finished, outcome, writing: One int64 per worker, as memoryviews, which
            are read faster than arrays.
        asleep: One int64 per worker, and a last one for the caller: see ``Wake.share``.
    """

    reward: NDArray
    flags: NDArray
    asked: NDArray
    step: memoryview
    partial: memoryview
    finished: memoryview
    outcome: memoryview
    writing: memoryview
    asleep: memoryview

    def __init__(self, lanes: slice = slice(None)) -> None:
        self._lanes = lanes
        self.observation: dict[str, NDArray] = {}
        self.action: dict[str, NDArray] = {}

    def map(self, specs: Mapping[str, TensorSpec], memory: Memory) -> None:
        """Use the arrays in a memory."""
        arrays = {key: array[0] for key, array in carve(memory.root(), specs, 1).items()}
        for group in ("observation", "action"):
            prefix = f"{group}/"
            keys = [key for key in arrays if key.startswith(prefix)]
            found = {key.removeprefix(prefix): arrays[key][self._lanes] for key in keys}
            setattr(self, group, found)
        self.flags = arrays["flags"][:, self._lanes]
        for name in _PER_LANE:
            setattr(self, name, arrays[name][self._lanes])
        for name in (*_PER_WORKER, "asleep"):
            setattr(self, name, arrays[name].data)


def hand_over(actions: Actions, lanes: Sequence[int], *targets: Actions) -> None:
    """Copy the rows of some lanes.

    Args:
        actions: Action key to array ``[n_lanes, ...]``.
        lanes: The lanes.
        *targets: Where to, ``[n_lanes, ...]`` per key.

    Raises:
        SpecError: If keys, shapes or values do not fit.
    """
    try:
        for arrays in targets:
            for key, array in arrays.items():
                values = actions[key]
                if values.shape != array.shape:
                    raise ValueError(f"got shape {list(values.shape)}")
                if values.dtype != array.dtype:
                    array[lanes] = fitted_rows(f"the action {key!r}", values, lanes, array.dtype)
                elif len(lanes) == len(array):
                    np.copyto(array, values)
                else:
                    array[lanes] = values[lanes]
    except SpecError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        wanted = {key: list(array.shape) for key, array in targets[0].items()}
        raise SpecError(
            f"actions should be arrays of the shapes {wanted}: {error}",
            fix="pass one row per lane, also for lanes that do not step",
        ) from error
