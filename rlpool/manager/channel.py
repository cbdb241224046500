"""How the caller and the workers of a ``ParallelEnvManager`` talk: by buffers, and by messages.

A step is not a message: the caller writes its number where the worker looks for it. Only rare
things travel through the pipe. Steps and resets of lanes are numbered commands, of which a worker
has one at a time: it writes into the buffers which one it has finished, and how.

Every key of ``VecEnv.current`` lies in the buffers once, ``[n_lanes, ...]``. A worker sees the rows
of its own lanes, the caller sees all of them::

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
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rlpool.data.specs import FLAGS, REWARD_SPEC, Declaration, Structure, TensorSpec
from rlpool.data.storage import Memory, NDArray, carve
from rlpool.envs.columns import fitted_rows
from rlpool.envs.vec_env import Options
from rlpool.errors import EnvError, SpecError
from rlpool.record.tape import Tape
from rlpool.workers.payload import Payload

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
    """The buffers as one process sees them.

    Args:
        specs: Their specs, in order.
        memory: The memory that they are in.
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

    def __init__(
        self, specs: Mapping[str, TensorSpec], memory: Memory, lanes: slice = slice(None)
    ) -> None:
        arrays = {key: array[0] for key, array in carve(memory.root(), specs, 1).items()}
        self.observation, self.action = (
            {key.removeprefix(own): arrays[key][lanes] for key in arrays if key.startswith(own)}
            for own in ("observation/", "action/")
        )
        self.reward, self.asked = arrays["reward"][lanes], arrays["asked"][lanes]
        self.flags = arrays["flags"][:, lanes]
        self.step, self.partial, self.finished, self.outcome, self.writing = (
            arrays[name].data for name in _PER_WORKER
        )
        self.asleep = arrays["asleep"].data


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


# From the caller to a worker ----------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What a worker has to create, the first message to it.

    Attributes:
        functions: The functions that make its environments, pickled by cloudpickle.
        options: Keyword arguments of its ``GymEnv``.
        first_lane: Number of its first environment.
    """

    functions: bytes
    options: Mapping[str, Any]
    first_lane: int


@dataclass(frozen=True)
class MapArrays:
    """Use these arrays from now on; their memory follows.

    Attributes:
        specs: Their specs, with all lanes, in order.
    """

    specs: Mapping[str, TensorSpec]

    shares_memory: ClassVar[bool] = True


@dataclass(frozen=True)
class Begin:
    """Carry out commands from now on.

    Attributes:
        n_seen: Number of the last step that was carried out.
        payload: A ``Predecessor``, whose memory follows.
    """

    n_seen: int
    payload: Payload


@dataclass(frozen=True)
class Predecessor:
    """Where the environments of the process before were. Lanes count within the worker.

    Attributes:
        tapes: The episode of each lane, without a step that is not finished.
        not_compared: Lanes whose observation may be that of a remote's step without a reply.
        given_up: Lane to seed and step of an episode that is truncated where it would go on.
    """

    tapes: Mapping[int, Tape]
    not_compared: Sequence[int]
    given_up: Mapping[int, tuple[int, int]]


@dataclass(frozen=True)
class Reset:
    """Reset lanes. Lanes are numbered within the worker, here and below.

    Attributes:
        number: Number of the command.
        episodes: Lane, ascending, seed and options of each.
    """

    number: int
    episodes: Sequence[tuple[int, int, Options]]


@dataclass(frozen=True)
class Call:
    """A request to one environment, to be answered with a ``Reply``.

    Attributes:
        lane: The lane.
        command: What a ``Remote`` was asked for.
        data: Seed and options of a reset, or the name of an attribute.
    """

    lane: int
    command: str
    data: Any


# From a worker to the caller ----------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a worker knows of its environments.

    Attributes:
        declaration: What observations and infos consist of.
        action: How an action falls into keys.
        native_action: The actions' keys with the dtypes that the environments take.
        spaces: ``(observation_space, action_space)``, pickled by cloudpickle.
        tasks: ``(n_tasks, horizon_bamdp, all_tasks)``, see ``ParallelEnvManager``.
        state_keepers: See ``VecEnv.state_keepers``.
        description: See ``VecEnv.description``.
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
        number: Number of the command, 0 for a request of its remote.
        lane: The lane.
        call: ``"reset"`` or ``"step"``.
        error: What happened, its ``where`` without lane.
        is_lost: Whether the lane could not be restored, so that a restart would not help.
    """

    number: int
    lane: int
    call: str
    error: EnvError
    is_lost: bool = False


@dataclass(frozen=True)
class Reply:
    """The answer to a ``Call``.

    Attributes:
        lane: The lane.
        reply: The tuple that the remote receives, pickled by cloudpickle.
        error: What was raised, if anything; the lane can go on.
    """

    lane: int
    reply: bytes
    error: EnvError | None = None
