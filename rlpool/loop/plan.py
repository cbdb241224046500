"""What a rollout runs: the contract between the step loop and its caller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlpool.data.storage import NDArray
from rlpool.envs.vec_env import Options
from rlpool.errors import WorkerError
from rlpool.record.tape import Tape
from rlpool.seeding import NoiseStart
from rlpool.slots.blocks import Arrays, Layout


@dataclass(slots=True)
class Episode:
    """An episode to run.

    Attributes:
        number: Row of the request.
        seed: Seed of its reset.
        options: Its row of ``env_info``.
        noise: Its noise, ``None`` if the agent needs none.
        slot: Slot of its first chunk.
        n_restarts: Number of automatic restarts of its lane before it.
        gives_up_at: Its step that fails, and is not made: it is truncated there. -1 if its reset
            does. ``None`` if none is known to fail.
        running_number: Its number among all episodes of the batcher; of a window that of its lane
            among all lanes.
    """

    number: int
    seed: int
    options: Options
    noise: NoiseStart | None
    slot: int
    n_restarts: int = 0
    gives_up_at: int | None = None
    running_number: int = 0


Chunk = tuple[int, int, int, bool]
"""Episode, slot, the chunk's number, and whether the episode ends with it."""


class Plan(ABC):
    """Decides which episodes a rollout runs and where it writes them.

    Attributes:
        number: Number of the request.
        worker: Number of the worker.
        layout: Layout of the block.
        arrays: The block.
        agent_info: ``[n, ...]`` per key, one row per episode, or ``None``.
        tapes: Lane to the tape of an episode that another worker has begun.
        lacks_slots: Whether an idle lane has an episode and lacks a slot for it.
        cancelled: One element, not zero once the request was cancelled.
        gives_up: Whether any of its episodes has a step that is known to fail.
        numbers_episodes: Whether ``running_number`` counts the episodes of the batcher.
    """

    number = worker = 0
    layout: Layout
    arrays: Arrays
    agent_info: dict[str, NDArray] | None = None
    tapes: Mapping[int, Tape] = {}
    lacks_slots = False
    cancelled: Sequence[int] = (0,)
    gives_up = False
    numbers_episodes = False

    @property
    def resets_all_lanes(self) -> bool:
        """Whether it begins with one reset of all lanes; it runs alone then."""
        return False

    @abstractmethod
    def next_episodes(self, lanes: Sequence[int]) -> dict[int, Episode]:
        """The next episode of each idle lane that gets one (for now)."""

    @abstractmethod
    def next_slots(self, lanes: Sequence[int]) -> dict[int, int]:
        """By lane, slots for the next chunks of their episodes, as far as there are any now."""

    def take_chunks(self, chunks: Sequence[Chunk]) -> None:  # noqa: B027
        """Take complete slots."""

    def flush(self) -> None:  # noqa: B027
        """Report the chunks completed since the last call."""

    def wait(self) -> bool:
        """Wait for slots when no lane can step; False if there is nothing to wait for."""
        return False

    def has_news(self) -> bool:
        """Whether slots may have become available since the last refusal."""
        return False

    def is_over(self) -> bool:
        """Whether no lane will get an episode or a slot any more, now that none runs any of it."""
        return True

    def is_left_over(self) -> bool:
        """Whether the rest is left to the successor of this worker."""
        return False

    # Of windows:

    def resumed(self, lane: int, n_restarts: int) -> Episode:
        """The episode on a lane's tape."""
        raise NotImplementedError

    def restarted(self, lane: int, episode: Episode) -> Episode:
        """The next episode of a lane whose episode ended within a window, in the same slot."""
        raise NotImplementedError

    # Of plans that run at the same time as others:

    def take_back(self, lane: int, episode: Episode, slot: int | None, chunk: int) -> None:
        """Let an episode begin again, which was in chunk ``chunk`` and in a slot, if any."""
        raise NotImplementedError


class PlanQueue(Protocol):
    """Where a rollout takes its plans from, one after the other."""

    def has_next(self) -> bool:
        """Whether ``next_plan`` may have one, at little cost."""

    def next_plan(self) -> Plan | None:
        """A further plan for lanes that the plans so far leave idle, ``None`` if there is none."""

    def done(self, plan: Plan) -> None:
        """Take note that a plan is over or was cancelled: no lane runs any of it."""

    def failed(self, plan: Plan, error: WorkerError) -> None:
        """Take note that a plan has failed; raise to stop all others as well."""


class OnePlan:
    """A queue of one plan, whose failure is raised.

    Args:
        plan: The plan.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan: Plan | None = plan

    def has_next(self) -> bool:
        """Whether the plan was not taken yet."""
        return self._plan is not None

    def next_plan(self) -> Plan | None:
        """The plan, once."""
        plan, self._plan = self._plan, None
        return plan

    def done(self, plan: Plan) -> None:
        """Nothing follows."""

    def failed(self, plan: Plan, error: WorkerError) -> None:
        """Raise the error."""
        raise error
