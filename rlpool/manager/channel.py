"""Buffers and messages between the caller and the workers of a ``ParallelEnvManager``.

The caller writes each lane's task into a shared buffer, and the worker clears it when the task is
done. Only data that does not fit into the buffers is sent as a message: options, requests of
remotes, and their replies.

Every key of ``VecEnv.current`` is stored in the buffers once, ``[n_lanes, ...]``. A worker sees the
rows of its own lanes, the caller sees all of them::

    observation/frame  [n_lanes, 4]   written by the workers
    reward, flags                     written by the workers; cleared when a lane is reset
    action/action, seed [n_lanes]     written by the caller
    todo, failed       [n_lanes]      the task of each lane, and whether it failed
    writing            [n_workers]    whether a worker has begun to write observations
    asleep                            which processes sleep: every worker, then the caller

A worker accesses the rows of lanes that have a task, the caller all others. So there are no locks,
except on processors that reorder stores: there ``todo`` is read and written under a kernel lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlpool.data.specs import FLAGS, REWARD_SPEC, Declaration, Structure, TensorSpec
from rlpool.data.storage import Memory, NDArray, carve
from rlpool.envs.columns import fitted_rows
from rlpool.errors import EnvError, SpecError, WorkerError
from rlpool.machine.platform import HAS_ORDERED_STORES, FileLock
from rlpool.record.tape import Tape

Actions = Mapping[str, NDArray]

IDLE, STEP, TRUNCATE, RESET, RESET_WITH_OPTIONS, ANSWER = range(6)
"""Tasks of a lane. The options of a reset and the request to answer are sent as a ``Call``. An
episode is truncated in place of a step that is known to fail."""

CALL_OF = ("", "step", "step", "reset", "reset")
"""Name of each task in errors."""

_PER_LANE = {
    "reward": REWARD_SPEC,
    "todo": TensorSpec((), np.dtype(np.uint8)),
    "failed": TensorSpec((), np.dtype(np.uint8)),
    "seed": TensorSpec((), np.dtype(np.int64)),
}


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
        "writing": TensorSpec((n_workers,), np.dtype(np.int64)),
        "asleep": TensorSpec((n_workers + 1,), np.dtype(np.int64)),
    }


class Buffers:
    """The buffers as one process sees them.

    Args:
        specs: Their specs, in order.
        memory: The memory that contains them.
        lock_fd: Descriptor of a file that all processes can lock.
        lanes: The lanes that this process sees, all by default.

    Attributes:
        observation: Key to array ``[lanes, ...]``: current observations.
        action: Key to array ``[lanes, ...]``.
        reward: float32 ``[lanes]``.
        flags: bool ``[4, lanes]``.
        todo: uint8 ``[lanes]``: the task of each lane.
        look: Returns ``todo`` as bytes; all writes before ``post`` are visible then.
        post: Sets the tasks of lanes, after their data was written.
        failed: uint8 ``[lanes]``: 1 if a lane's task failed, until the caller has read the error.
        seed: int64 ``[lanes]``: seeds of resets.
        writing: One int64 per worker; like ``asleep`` a memoryview, which is read faster.
        asleep: One int64 per worker, and a last one for the caller: see ``Wake.share``.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        memory: Memory,
        lock_fd: int,
        lanes: slice = slice(None),
    ) -> None:
        arrays = {key: array[0] for key, array in carve(memory.root(), specs, 1).items()}
        self.observation, self.action = (
            {key.removeprefix(own): arrays[key][lanes] for key in arrays if key.startswith(own)}
            for own in ("observation/", "action/")
        )
        self.reward, self.todo, self.failed, self.seed = (arrays[key][lanes] for key in _PER_LANE)
        self.flags = arrays["flags"][:, lanes]
        self.writing, self.asleep = arrays["writing"].data, arrays["asleep"].data
        self.look, self.post = self.todo.data.tobytes, self.todo.__setitem__
        if not HAS_ORDERED_STORES:
            lock = FileLock(lock_fd)
            self.look, self.post = lock.around(self.look), lock.around(self.post)


def hand_over(actions: Actions, lanes: Sequence[int], *targets: Actions) -> None:
    """Copy the rows of some lanes.

    Args:
        actions: Action key to array ``[n_lanes, ...]``.
        lanes: The lanes.
        *targets: Arrays to copy to, ``[n_lanes, ...]`` per key.

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
                    array[...] = values
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


# From the caller to a worker; lanes are numbered within the worker --------------------------


@dataclass(frozen=True)
class Setup:
    """The environments that a worker has to create; its first message.

    Attributes:
        functions: The functions that make its environments, pickled by cloudpickle.
        options: Keyword arguments of its ``GymEnv``.
        first_lane: Number of its first environment.
    """

    functions: bytes
    options: Mapping[str, Any]
    first_lane: int


@dataclass(frozen=True)
class Begin:
    """Begin to carry out the tasks in the buffers, whose memory follows.

    Attributes:
        specs: The buffers' specs, with all lanes, in order.
        tapes: Episodes that lanes began in an earlier process, to be repeated first.
    """

    specs: Mapping[str, TensorSpec]
    tapes: Mapping[int, Tape]

    shares_memory: ClassVar[bool] = True


@dataclass(frozen=True)
class Call:
    """A lane's task, where the buffers have no room for it.

    Attributes:
        lane: The lane.
        command: ``"reset"``, ``"step"`` or ``"get_attr"``.
        data: The options of a reset, with its seed if it is a request, or an attribute's name.
    """

    lane: int
    command: str
    data: Any


# From a worker to the caller ----------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """A worker's report on its environments.

    Attributes:
        declaration: Contents of observations and infos.
        action: How an action is divided into keys.
        native_action: The actions' keys, with the dtypes that the environments take.
        spaces: ``(observation_space, action_space)``, pickled by cloudpickle.
        tasks: ``(n_tasks, horizon_bamdp, all_tasks)``, see ``ParallelEnvManager``.
        state_keepers: As in ``VecEnv.state_keepers``.
        description: As in ``VecEnv.description``.
    """

    declaration: Declaration
    action: Structure
    native_action: Mapping[str, TensorSpec]
    spaces: bytes
    tasks: tuple[int | None, int | None, list[Any] | None]
    state_keepers: Mapping[str, str]
    description: Mapping[str, Any]


@dataclass(frozen=True)
class LaneFailed:
    """An environment failed in a reset or a step.

    Attributes:
        lane: The lane.
        together: All lanes with the same task; they need a reset.
        call: ``"reset"`` or ``"step"``.
        error: The failure, with the lane missing in ``where``.
        is_lost: Whether the lane could not be restored, so that a restart would not help.
    """

    lane: int
    together: Sequence[int]
    call: str
    error: EnvError
    is_lost: bool = False


@dataclass(frozen=True)
class Reply:
    """The answer to a request of a remote.

    Attributes:
        lane: The lane.
        reply: The tuple that the remote receives, pickled by cloudpickle.
        error: The exception, if one was raised.
    """

    lane: int
    reply: bytes
    error: WorkerError | None = None
