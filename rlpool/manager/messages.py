"""What the caller tells workers that hold environments, and what they answer.

A step is not a message: the caller writes its number where the worker looks for it. Only rare
things travel through the pipe. Steps and resets of lanes are numbered commands, of which a worker
has one at a time: it writes into the buffers which one it has finished, and how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlpool.data.specs import Declaration, Structure, TensorSpec
from rlpool.envs.vec_env import Options
from rlpool.errors import EnvError
from rlpool.record.tape import Tape
from rlpool.workers.payload import Payload


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


# From the caller to a worker ----------------------------------------------------------------


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
    """

    declaration: Declaration
    action: Structure
    native_action: Mapping[str, TensorSpec]
    spaces: bytes
    tasks: tuple[int | None, int | None, list[Any] | None]


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
