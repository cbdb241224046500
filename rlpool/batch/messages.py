"""What a batcher tells its workers, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlpool.data.storage import Memory
from rlpool.errors import RlpoolError
from rlpool.loop.plan import Chunk
from rlpool.record.failures import DEBUG_HINT, LOCAL_HINT
from rlpool.record.tape import Tape
from rlpool.seeding import LaneSeeds
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.workers.payload import Payload
from rlpool.workers.sharing import Shared, pickled

_LARGE_BYTES = 2**14
"""Larger pickled functions travel in shared memory, once for all workers."""

_HOW_TO_PICKLE = (
    "create it inside create_env or create_agent, which run in the worker, or leave it out in "
    "the __getstate__ of what holds it"
)

EpisodeKey = tuple[int | None, int | None]
"""Row and seed of an episode; the row of a window is the lane among all."""

# From the caller to a worker ----------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What a worker has to create, its first message.

    Attributes:
        functions: Both functions and their arguments, pickled for another process; ``None`` if the
            pickle is in the memory that follows.
        hint: What stands in place of ``DEBUG_HINT``.
        in_process: Whether the worker runs in the caller's process, where Ctrl-C may reach it.
    """

    functions: Any
    hint: str
    in_process: bool = False


class Recipe:
    """What workers are started with, now or after an interrupt.

    Args:
        n_workers: Number of worker processes, 0 for one worker in this process.
        given: Both functions and their arguments, by name.
        rest: What else a worker has to know.
        owner_name: What advice calls the class that does the same in the caller's process.

    Attributes:
        shared: What the functions share with this process.
        memory: Where their pickle is, if it is large.
        setup: The first message to each worker.
    """

    def __init__(
        self, n_workers: int, given: Mapping[str, Any], rest: tuple[Any, ...], owner_name: str
    ) -> None:
        self.n_workers, self.shared = n_workers, Shared()
        self.memory: Memory | None = None
        functions: Any = (*given.values(), *rest)
        if n_workers:
            functions, self.shared = pickled(given, functions, fix=_HOW_TO_PICKLE)
            if len(functions) > _LARGE_BYTES:
                self.memory = Memory.shared(len(functions), "rlpool-setup")
                self.memory.root()[:] = memoryview(functions)
                functions = None
        hint = f"{DEBUG_HINT}: {owner_name}(..., n_workers=0)" if n_workers else LOCAL_HINT
        self.setup = Setup(functions, hint, in_process=not n_workers)

    def close(self) -> None:
        """Close the descriptors. May be repeated."""
        self.shared.close()
        if self.memory is not None:
            self.memory.close_fd()


@dataclass(frozen=True)
class Probe:
    """Find out what a step consists of with the first rows of a request.

    Attributes:
        first: Number of the request's first episode, ``None`` for a window.
        seeds: The episodes' seeds, as many as there are rows for lanes; none for a window.
        payload: Its ``(agent_info, env_info, {})``.
    """

    first: int | None
    seeds: list[int]
    payload: Payload | None


@dataclass(frozen=True)
class MapBlock:
    """Map a new block, whose memory follows. Unmap those that are gone."""

    block: int
    layout: Layout
    unmap: list[int] = field(default_factory=list)

    shares_memory: ClassVar[bool] = True


@dataclass(frozen=True)
class Execute:
    """Run a share of a request's episodes.

    Attributes:
        number: Number of the request.
        root: Root of the episodes' seeds and noise.
        first: Number of its first episode, from which seeds, noise and batch rows derive.
        seeds: Seeds of all episodes of the request, if the user gave them.
        n_episodes: Episodes of the whole request.
        block: Number of the block.
        in_place: Whether episode *i* is written into slot *i*.
        slots: Slots that this worker may use for everything else.
        again: Episodes that an earlier worker of this number claimed and did not finish.
        given_up: The steps that fail of episodes, see ``Episode.gives_up_at``.
        payload: ``(agent_info, env_info, {})``, its memory follows.
        tape: What to repeat instead, an episode in lane ``first``.
    """

    number: int
    root: int
    first: int
    seeds: list[int] | None
    n_episodes: int
    block: int
    in_place: bool
    slots: list[int]
    again: list[int]
    given_up: dict[EpisodeKey, int]
    payload: Payload | None
    tape: Tape | None = None


@dataclass(frozen=True)
class Window:
    """Run the next window of lanes.

    Attributes:
        number: Number of the request.
        block: Number of the block.
        slots: Lane of this worker to slot, for the lanes that run.
        seeds: Seeds of the lanes since their reset.
        is_first: Whether all lanes start anew.
        given_up: As for ``Execute``.
        payload: ``(agent_info, env_info, tapes)``, its memory follows: infos of all lanes of all
            workers and, by lane of this one, what running episodes have done so far if an earlier
            worker began them.
    """

    number: int
    block: int
    slots: dict[int, int]
    seeds: LaneSeeds
    is_first: bool
    given_up: dict[EpisodeKey, int]
    payload: Payload | None


@dataclass(frozen=True)
class Credit:
    """The answer to ``ChunksDone``: slots that may be used again, none if the request failed."""

    number: int
    slots: list[int]


@dataclass(frozen=True)
class Update:
    """Call ``agent.update`` with the object in the payload, whose memory follows."""

    payload: Payload


# From a worker to the caller ----------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a worker knows about its environments and its agent, also the answer to a ``Probe``.

    Attributes:
        n_lanes: Number of its environments.
        specs: What a step consists of, ``None`` if that could not be found out.
        error: Why not: a ``WorkerError`` if the user's code failed, which may succeed with infos;
            any other error is final.
        environment: What the environments are, see ``rlpool.envs.description``.
        state_keepers: See ``VecEnv.state_keepers``.
    """

    n_lanes: int
    specs: StepSpecs | None
    error: RlpoolError | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    state_keepers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChunksDone:
    """Slots that are complete and have to be emptied.

    Chunk 0 of an episode takes the place of all its earlier chunks: the episode began again.
    """

    number: int
    chunks: list[Chunk]
