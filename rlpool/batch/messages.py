"""Messages between a batcher and its workers."""

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
    "the __getstate__ of the object that holds it"
)

EpisodeKey = tuple[int | None, int | None]
"""Row and seed of an episode; for windows the row is the lane, numbered across workers."""

# From the caller to a worker ----------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Description of the environments and agent to create; the first message to a worker.

    Attributes:
        functions: Both functions and their arguments, pickled for another process; ``None`` if the
            pickle is in the memory that follows.
        advice: Fix to suggest for exceptions of the user's code.
    """

    functions: Any
    advice: str


class Recipe:
    """Start-up data of workers, now or after an interruption.

    Args:
        n_workers: Number of worker processes, 0 for one worker in this process.
        given: Both functions and their arguments, by name.
        rest: Further settings of the worker.
        owner_name: Name of the class to suggest for running in the caller's process.

    Attributes:
        shared: Objects that the functions share with this process.
        memory: Memory of their pickle, if it is large.
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
        """Close the descriptors. Can be repeated."""
        self.shared.close()
        if self.memory is not None:
            self.memory.close_fd()


@dataclass(frozen=True)
class Probe:
    """Discover the contents of a step with the first rows of a request.

    Attributes:
        asked: The request's episodes, ``None`` for a window.
        payload: Its ``(agent_info, env_info, {})``.
    """

    asked: Episodes | None
    payload: Payload | None


@dataclass(frozen=True)
class MapBlock:
    """Map a new block, whose memory follows, and unmap those in ``unmap``."""

    block: int
    layout: Layout
    unmap: list[int] = field(default_factory=list)

    shares_memory: ClassVar[bool] = True


@dataclass(frozen=True)
class Episodes:
    """The episodes of an ``execute``: everything that determines them except infos and policy.

    Attributes:
        n_rows: Number of episodes.
        root: Root of their seeds and noise.
        first: Number of the first one, which determines seeds, noise and batch rows.
        given_seeds: Their seeds, if given by the user.
        tape: Episode for workers to repeat instead, in lane ``first``.
    """

    n_rows: int
    root: int
    first: int
    given_seeds: list[int] | None = None
    tape: Tape | None = None

    def share_of(self, worker: int, layout: Layout) -> range:
        """Return the rows of a worker whose lanes cannot be seeded one by one."""
        return range((worker - self.first) % layout.n_workers, self.n_rows, layout.n_workers)

    def seeds(self, layout: Layout) -> list[int]:
        """Return their seeds; if a reset serves all lanes of a worker, its first episode's seed."""
        if not layout.step.resets_together:
            return self.given_seeds or episode_seeds(self.root, self.first, self.n_rows)
        n_workers = layout.n_workers
        seeds = episode_seeds(self.root, self.first, min(n_workers, self.n_rows))
        return [seeds[row % n_workers] for row in range(self.n_rows)]


@dataclass(frozen=True)
class Window:
    """A window: the next steps of the running lanes.

    Attributes:
        lanes: The running lanes, numbered across workers, ascending: one per row.
        n_lanes: Lanes of each worker.
        seeds: Seeds of the lanes since their reset.
        is_first: Whether all lanes begin new episodes.
    """

    lanes: list[int]
    n_lanes: int
    seeds: LaneSeeds
    is_first: bool

    def rows_of(self, worker: int) -> dict[int, int]:
        """Map a worker's lanes, in its own numbering, to rows."""
        before = worker * self.n_lanes
        first, stop = (bisect_left(self.lanes, n) for n in (before, before + self.n_lanes))
        return {self.lanes[row] - before: row for row in range(first, stop)}


@dataclass(frozen=True)
class Run:
    """Run a worker's part of a request.

    Attributes:
        number: Number of the request.
        asked: The whole request.
        block: Number of the block.
        n_slots: Number of the block's slots that the request may use.
        again: Episodes that a predecessor of this worker claimed and did not finish.
        fails_at: Steps that are known to fail, by episode, see ``Lane.fails_at``.
        payload: ``(agent_info, env_info, tapes)``, whose memory follows: infos of all rows (for a
            window, of all lanes) and, by lane of this worker, the tapes of running episodes that
            a predecessor began.
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
    """The answer to ``ChunksDone``: slots that can be reused, none if the request failed."""

    number: int
    slots: list[int]


@dataclass(frozen=True)
class Update:
    """Call ``agent.update`` with the object in the payload, whose memory follows."""

    payload: Payload


# From a worker to the caller ----------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """A worker's report on its environments and agent, also the answer to a ``Probe``.

    Attributes:
        n_lanes: Number of its environments.
        specs: Contents of a step, ``None`` if unknown.
        error: Why ``specs`` is unknown: a ``WorkerError`` if the user's code failed, which may
            succeed with infos; any other error is final.
        environment: Description of the environments, see ``rlpool.envs.description``.
        state_keepers: As in ``VecEnv.state_keepers``.
    """

    n_lanes: int
    specs: StepSpecs | None
    error: RlpoolError | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    state_keepers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChunksDone:
    """Complete slots, to be emptied by the caller.

    Chunk 0 of an episode replaces all its earlier chunks: the episode began again.
    """

    number: int
    chunks: list[Chunk]
