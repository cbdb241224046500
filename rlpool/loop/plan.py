"""What a rollout runs: the contract between the step loop and its caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlpool.envs.vec_env import Options
from rlpool.memory.storage import Array
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
    """

    number: int
    seed: int
    options: Options
    noise: NoiseStart | None
    slot: int
    n_restarts: int = 0


@dataclass(slots=True)
class Lane:
    """A lane that runs an episode.

    Attributes:
        episode: Its episode.
        slot: The slot it writes to.
        chunk: Number of the chunk within the episode.
        steps_before: Steps of the episode before row 0 of the slot; negative if the episode
            started later in the slot.
        parked: Its rows of the batch while it waits for a slot; ``None`` while it steps.
        tape: Records the slots that the episode has left; ``None`` if it has left none.
    """

    episode: Episode
    slot: int
    chunk: int = 0
    steps_before: int = 0
    parked: list[tuple[Array, Array]] | None = None
    tape: Tape | None = None

    @property
    def start(self) -> int:
        """The first row of the slot that belongs to the episode."""
        return max(0, -self.steps_before)

    @property
    def tape_so_far(self) -> Tape:
        """The tape; a new one is made if there is none."""
        self.tape = self.tape or Tape(self.episode.seed, self.episode.options)
        return self.tape


class Plan(Protocol):
    """Decides which episodes a rollout runs and where it writes them.

    Attributes:
        worker: Number of the worker.
        layout: Layout of the block.
        arrays: The block.
        agent_info: ``[n, ...]`` per key, one row per episode, or ``None``.
    """

    worker: int
    layout: Layout
    arrays: Arrays
    agent_info: dict[str, Array] | None

    def next_episode(self, lane: int) -> Episode | None:
        """The next episode of an idle lane, ``None`` if there is none (for now)."""

    def restarted(self, lane: int, episode: Episode) -> Episode:
        """The next episode of a lane whose episode ended within a window, in the same slot."""

    def next_slot(self, lane: int, episode: int) -> int | None:
        """A slot for the next chunk of a lane's episode, ``None`` if there is none (for now)."""

    def chunk_done(self, episode: int, slot: int, chunk: int, is_last: bool) -> None:
        """Take a complete slot; unless ``is_last``, the episode continues in another slot."""

    def flush(self) -> None:
        """Report the chunks completed since the last call."""

    def wait(self) -> bool:
        """Wait for slots when no lane can step; False if there is nothing to wait for."""

    def has_news(self) -> bool:
        """Whether slots may have become available since the last refusal."""

    def is_cancelled(self) -> bool:
        """Whether the request was cancelled."""


class ResumingPlan(Plan, Protocol):
    """A plan with episodes that another worker may have begun."""

    def resumed(self, lane: int, n_restarts: int) -> Episode:
        """The episode that was running in a lane."""
