"""What the caller tells workers that hold environments, and what they say of it.

A step is no message: it is asked for in the buffers, and both sides wake each other. Everything
that is rare travels through the pipe. Steps and resets of lanes are numbered commands, of which a
worker has one at a time: it notes in the buffers which one it has finished, and how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlpool.envs.vec_env import Options
from rlpool.errors import EnvError
from rlpool.manager.buffers import BufferLayout
from rlpool.memory.storage import Array
from rlpool.record.tape import Actions, Tape
from rlpool.specs import Structure, TensorSpec
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
class MapBuffers:
    """Use these buffers from now on; their memory follows.

    Attributes:
        layout: How they are divided.
        n_seen: Number of the last step that the worker, or its predecessor, was asked for.
        is_successor: Whether ``Restore`` follows, before anything else is to be done.
    """

    layout: BufferLayout
    n_seen: int = 0
    is_successor: bool = False

    shares_memory: ClassVar[bool] = True


@dataclass(frozen=True)
class MapObservations:
    """Observations are of this structure; keep them in these arrays, whose memory follows."""

    structure: Structure
    n_lanes: int

    shares_memory: ClassVar[bool] = True


@dataclass(frozen=True)
class MapActions:
    """Take actions from these arrays, whose memory follows."""

    specs: Mapping[str, TensorSpec]
    n_lanes: int

    shares_memory: ClassVar[bool] = True


@dataclass(frozen=True)
class Announce:
    """Episodes that will come, in the order of each lane.

    Attributes:
        stride: Episode *i* runs in lane ``i % stride`` of all lanes.
        numbers: int64: the episodes of this worker's lanes, ascending.
        seeds: int64: their seeds.
        env_info: Their rows.
    """

    stride: int
    numbers: Array
    seeds: Array
    env_info: Mapping[str, Array]


@dataclass(frozen=True)
class Reset:
    """Reset lanes. Lanes are numbered within the worker, here and below.

    Attributes:
        number: Number of the command.
        lanes: Ascending.
        seeds: One per lane.
        options: One per lane.
    """

    number: int
    lanes: Sequence[int]
    seeds: Sequence[int]
    options: Sequence[Options]


@dataclass(frozen=True)
class Restore:
    """Bring the environments to where those of the predecessor were.

    Attributes:
        payload: A ``Predecessor``, whose memory follows.
    """

    payload: Payload


@dataclass(frozen=True)
class Predecessor:
    """What a successor has to know. Lanes are numbered within the worker.

    Attributes:
        tapes: Per lane how it got to where it was, before a step that was not finished.
        unfinished: Number of that step, 0 if there is none.
        actions: Its actions ``[1, ...]`` per lane that takes part.
        closed: Lanes that were closed.
    """

    tapes: Mapping[int, Tape]
    unfinished: int
    actions: Mapping[int, Actions]
    closed: Sequence[int]


@dataclass(frozen=True)
class Call:
    """A request of a remote, to be answered with a ``Reply``, except ``close``."""

    lane: int
    command: str
    data: Any


# From a worker to the caller ----------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a worker knows of its environments.

    Attributes:
        n_lanes: Number of them.
        observation: How an observation falls into keys, ``None`` if no space says it and no reset
            without options could show it.
        is_declared: Whether a space says it.
        action: How an action falls into keys, ``None`` without an action space.
        native_action: The actions' keys with the dtypes that the environments take, or ``None``.
        spaces: ``(observation_space, action_space)``, pickled by cloudpickle.
        n_tasks: The environments' attribute of that name, ``None`` if they have none.
        horizon_bamdp: Likewise.
        all_tasks: The tasks that they know, ``None`` if they have none.
    """

    n_lanes: int
    observation: Structure | None
    is_declared: bool
    action: Structure | None
    native_action: Mapping[str, TensorSpec] | None
    spaces: bytes
    n_tasks: int | None
    horizon_bamdp: int | None
    all_tasks: list[Any] | None


@dataclass(frozen=True)
class LaneFailed:
    """An environment failed.

    Attributes:
        number: Number of the command.
        lane: The lane.
        call: ``"reset"`` or ``"step"``.
        error: What happened, its ``where`` without lane.
        is_lost: Whether the lane could not be brought to where it was, so that it is of no use to
            try again.
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
        is_done: Whether the environment did what it was asked for.
        error: How the environment failed, if it did.
    """

    lane: int
    reply: bytes
    is_done: bool
    error: EnvError | None = None
