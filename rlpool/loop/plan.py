"""What a rollout runs: the contract between the step loop and whoever decides."""

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
        noise: Its noise, if the agent wants any.
        slot: Slot of its first chunk.
        n_restarts: How often its lane restarted on its own before it.
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
        parked: Its rows of the batch while it has no slot; ``None`` while it steps.
        tape: What the episode did in slots that it has left, ``None`` if it was in none.
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
        """The tape, a new one if the episode has not left a slot."""
        self.tape = self.tape or Tape(self.episode.seed, self.episode.options)
        return self.tape


class Plan(Protocol):
    """Which episodes a rollout runs, and where it writes them.

    Attributes:
        worker: Number of the worker.
        layout: Layout of the block.
        arrays: The block.
        agent_info: ``[n, ...]`` per key, by the episodes' numbers, or ``None``.
    """

    worker: int
    layout: Layout
    arrays: Arrays
    agent_info: dict[str, Array] | None

    def next_episode(self, lane: int) -> Episode | None:
        """The next episode of a lane that is idle, ``None`` if there is none (for now)."""

    def restarted(self, lane: int, episode: Episode) -> Episode:
        """The episode after one that ended inside a window, in the same slot."""

    def next_slot(self, lane: int, episode: int) -> int | None:
        """A slot for the next chunk of a lane's episode, ``None`` if there is none (for now)."""

    def chunk_done(self, episode: int, slot: int, chunk: int, is_last: bool) -> None:
        """A slot is complete: the episode ended, or it goes on in another slot."""

    def flush(self) -> None:
        """Let others know of the chunks done since the last time."""

    def wait(self) -> bool:
        """With nothing left to step: wait for slots; False if there is nothing to wait for."""

    def has_news(self) -> bool:
        """Whether slots may have become available since a lane got none."""

    def is_cancelled(self) -> bool:
        """Whether the request was given up."""


class ResumingPlan(Plan, Protocol):
    """A plan whose episodes may have been begun by another worker."""

    def resumed(self, lane: int, n_restarts: int) -> Episode:
        """The episode that had been begun in a lane."""
