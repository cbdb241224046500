"""What a batcher tells its workers, and what they answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlpool.data.storage import Memory
from rlpool.errors import RlpoolError
from rlpool.loop.plan import Chunk
from rlpool.record.tape import Tape
from rlpool.seeding import LaneSeeds, episode_seeds
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
        advice: What to do about exceptions of the user's code.
    """

    functions: Any
    advice: str


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
        advice = f"run it in this process to debug: {owner_name}(..., n_workers=0)"
        self.setup = Setup(functions, advice)

    def close(self) -> None:
        """Close the descriptors. May be repeated."""
        self.shared.close()
        if self.memory is not None:
            self.memory.close_fd()


@dataclass(frozen=True)
class Probe:
    """Find out what a step consists of with the first rows of a request.

    Attributes:
        asked: The request's episodes, ``None`` for a window.
        payload: Its ``(agent_info, env_info, {})``.
    """

    asked: Episodes | None
    payload: Payload | None


@dataclass(frozen=True)
class MapBlock:
    """Map a new block, whose memory follows. Unmap those that are gone."""

    block: int
    layout: Layout
    unmap: list[int] = field(default_factory=list)

    shares_memory: ClassVar[bool] = True


@dataclass(frozen=True)
class Episodes:
    """What an ``execute`` asks for: everything that episodes follow from, infos and policy apart.

    Attributes:
        n_rows: How many.
        root: Root of their seeds and noise.
        first: Number of the first one, from which seeds, noise and batch rows derive.
        given_seeds: Their seeds, if the user gave them.
        tape: What workers repeat instead, an episode in lane ``first``.
    """

    n_rows: int
    root: int
    first: int
    given_seeds: list[int] | None = None
    tape: Tape | None = None

    def share_of(self, worker: int, layout: Layout) -> range:
        """The rows of a worker whose lanes cannot be seeded one by one."""
        return range((worker - self.first) % layout.n_workers, self.n_rows, layout.n_workers)

    def seeds(self, layout: Layout) -> list[int]:
        """Their seeds; where one reset serves all lanes of a worker, that of its first episode."""
        if not layout.step.resets_together:
            return self.given_seeds or episode_seeds(self.root, self.first, self.n_rows)
        n_workers = layout.n_workers
        seeds = episode_seeds(self.root, self.first, min(n_workers, self.n_rows))
        return [seeds[row % n_workers] for row in range(self.n_rows)]


@dataclass(frozen=True)
class Window:
    """What a window asks for: the next steps of the lanes that run.

    Attributes:
        lanes: They, numbered across workers, ascending: one per row.
        n_lanes: Lanes of each worker.
        seeds: Seeds of the lanes since their reset.
        is_first: Whether all lanes start anew.
    """

    lanes: list[int]
    n_lanes: int
    seeds: LaneSeeds
    is_first: bool

    def rows_of(self, worker: int) -> dict[int, int]:
        """By lane of a worker, as it numbers them, the row."""
        before = worker * self.n_lanes
        first, stop = (bisect_left(self.lanes, n) for n in (before, before + self.n_lanes))
        return {self.lanes[row] - before: row for row in range(first, stop)}


@dataclass(frozen=True)
class Run:
    """Run a worker's part of a request.

    Attributes:
        number: Number of the request.
        asked: What the whole request is.
        block: Number of the block.
        n_slots: Slots of the block that the request has.
        again: Episodes that an earlier worker of this number claimed and did not finish.
        fails_at: The steps that fail of episodes, see ``Lane.fails_at``.
        payload: ``(agent_info, env_info, tapes)``, its memory follows: infos of all rows, of a
            window those of all lanes, and, by lane of this worker, what running episodes have done
            so far if an earlier worker began them.
    """

    number: int
    asked: Episodes | Window
    block: int
    n_slots: int
    again: list[int]
    fails_at: dict[EpisodeKey, int]
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
