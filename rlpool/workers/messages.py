"""What travels between the caller and its workers.

Messages are small records over one pipe per worker; data never travels, only the descriptors of
memory that holds it. A message with memory is followed by its descriptor on the same pipe.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from rlpool.errors import RlpoolError, WorkerError
from rlpool.memory.storage import Memory
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.workers.parcel import Parcel
from rlpool.workers.shipment import Shipment


@dataclass(frozen=True)
class Setup:
    """What a worker needs to begin.

    Attributes:
        functions: ``(create_env, env_args, create_agent, agent_args)``, or that pickled by
            cloudpickle for another process, where it arrives as bytes.
        worker: The worker's number.
        n_workers: How many there are.
        root: Root of all seeds.
        in_process: Whether it runs in the caller's process, where Ctrl-C may reach it.
        quits_on_env_error: Whether it ends, to be replaced, when an environment raises.
        max_episodes: Episodes after which it ends, to be replaced; ``None`` for any number.
        max_rss_bytes: Memory of its own at which it does; ``None`` for any size.
    """

    functions: Shipment | bytes | tuple[Any, Any, Any, Any]
    worker: int
    n_workers: int
    root: int
    in_process: bool = False
    quits_on_env_error: bool = False
    max_episodes: int | None = None
    max_rss_bytes: int | None = None


# From the caller to a worker ----------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """Find out the keys with these infos: the parcel holds ``(agent_info, env_info)``."""

    parcel: Parcel | None


@dataclass(frozen=True)
class MapBlock:
    """Map a new block; its memory follows. Unmap those that are gone."""

    block: int
    layout: Layout
    unmap: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Execute:
    """Run a share of a request's episodes.

    Attributes:
        request: Number of the request.
        execution: Number of the ``execute``, from which the episodes' noise derives.
        first: How many episodes were asked for before, from which their seeds derive.
        n_episodes: Episodes of the whole request.
        block: Number of the block.
        in_place: Whether episode *i* is written into slot *i*.
        slots: Slots that this worker may use for everything else.
        again: Episodes that a worker of this number had claimed and not finished when it died.
        parcel: ``(agent_info, env_info)`` as dicts of arrays, its memory follows.
    """

    request: int
    execution: int
    first: int
    n_episodes: int
    block: int
    in_place: bool
    slots: list[int]
    again: list[int]
    parcel: Parcel | None


@dataclass(frozen=True)
class Window:
    """Run the next window of lanes.

    Attributes:
        request: Number of the request.
        block: Number of the block.
        slots: Lane of this worker to slot, for the lanes that run.
        n_resets: Number of the ``reset`` whose episodes run.
        n_restarts: The most restarts that a lane can have made before it.
        is_first: Whether all lanes start anew; then the parcel holds the infos of all lanes of
            all workers.
        parcel: ``(agent_info, env_info, resumed)``, its memory follows; ``resumed`` holds one
            ``Resumed`` for each running lane if a worker before this one had begun them.
    """

    request: int
    block: int
    slots: dict[int, int]
    n_resets: int
    n_restarts: int
    is_first: bool
    parcel: Parcel | None


@dataclass(frozen=True)
class Credit:
    """Slots of a request that were emptied and may be used again; none just wakes the worker."""

    request: int
    slots: list[int]


@dataclass(frozen=True)
class Update:
    """Call ``agent.update`` with the object in the parcel, whose memory follows."""

    parcel: Parcel


@dataclass(frozen=True)
class Close:
    """Close the environments and the agent, and end."""


# From a worker to the caller ----------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The worker has its environments and its agent.

    Attributes:
        n_lanes: Number of its environments.
        specs: What a step consists of, or ``None`` if that could not be found out.
        error: Why not: a ``WorkerError`` if the user's code failed, which may go better with
            infos, any other error if it never can.
    """

    n_lanes: int
    specs: StepSpecs | None
    error: RlpoolError | None = None


@dataclass(frozen=True)
class ChunksDone:
    """Slots that are complete and wait to be emptied: (episode, slot, chunk, is_last)."""

    request: int
    chunks: list[tuple[int, int, int, bool]]


@dataclass(frozen=True)
class RequestDone:
    """The worker has no part in a request any more and never touches its block again."""

    request: int


@dataclass(frozen=True)
class Failed:
    """The user's code failed.

    Attributes:
        error: The error, as text and integers.
        request: The request that cannot be completed, ``None`` outside of requests.
    """

    error: WorkerError
    request: int | None = None


@dataclass(frozen=True)
class Retiring:
    """The worker is worn and ends, to be replaced.

    Attributes:
        why: How worn it is.
    """

    why: str


Message = Any


class Pipe:
    """A worker's end of the pipe to the caller.

    Args:
        connection: A duplex connection over a Unix socket, at the other end of which is a
            ``CallerPipe``.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._poller = select.poll()
        self._poller.register(connection.fileno(), select.POLLIN)

    def send(self, message: Message) -> None:
        """Send a message, waiting until the caller has read enough of what was sent before.

        Raises:
            OSError: If the other end is gone.
        """
        self.connection.send_bytes(pickle.dumps((message, None), pickle.HIGHEST_PROTOCOL))

    def receive(self) -> tuple[Message, Memory | None]:
        """Wait for a message, and for the descriptor of its memory.

        Raises:
            EOFError, OSError: If the other end is gone.
        """
        message, size = pickle.loads(self.connection.recv_bytes())
        if size is None:
            return message, None
        with socket.socket(fileno=os.dup(self.connection.fileno())) as duplicate:
            _, descriptors, _, _ = socket.recv_fds(duplicate, 1, 1)
        if not descriptors:
            raise EOFError("the descriptor of a message is missing")
        is_private = isinstance(message, Update | Execute | Window | Probe)
        return message, Memory.attach(descriptors[0], size, private=is_private)

    def poll(self) -> bool:
        """Whether a message, or the end, can be read without waiting."""
        # Connection.poll() makes a new selector for every call, which costs 20 times as much.
        return not self.connection.closed and bool(self._poller.poll(0))
