"""What a worker's rollout runs: its share of a request's episodes, or a window of its lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlpool.batch.claims import ClaimLock, Claims
from rlpool.batch.commands import ChunksDone, Execute, Infos, Window
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.loop.plan import Episode
from rlpool.seeding import LaneSeeds, NoiseStarts, episode_seeds, noise_keys
from rlpool.slots.blocks import Block
from rlpool.workers.child import Control, Place
from rlpool.workers.recycling import Recycling

Send = Callable[[object], None]
AnnounceSeeds = Callable[[Sequence[int]], None]
ReceiveCredit = Callable[[int, bool], list[int] | None]
"""``(number, blocking)`` to slots that came back: ``None`` if no message was there."""


@dataclass(frozen=True)
class Site:
    """Where a worker's requests run.

    Attributes:
        place: Which worker it is.
        lock: Guards the claims.
        control: Its shared numbers.
        recycling: Says when it should begin no further episode.
        send: Sends a message to the caller.
        receive_credit: Takes emptied slots.
        announce_seeds: Is told which seeds environments will be reset with.
    """

    place: Place
    lock: ClaimLock
    control: Control
    recycling: Recycling
    send: Send
    receive_credit: ReceiveCredit
    announce_seeds: AnnounceSeeds


class _Rows:
    """A request's infos on the worker's side."""

    def __init__(self, infos: Infos | None) -> None:
        agent_info, env_info = infos or ({}, {})
        self.agent_info = agent_info or None
        self.env_info = env_info
        self._env_columns = {key: array.tolist() for key, array in env_info.items()}

    def options(self, row: int) -> Options:
        """One row of ``env_info`` as Python values."""
        if not self._env_columns:
            return None
        return {key: column[row] for key, column in self._env_columns.items()}


class EpisodePlan:
    """A worker's share of the episodes of an ``execute``.

    Episode *i* always runs in row ``i % n_lanes`` of the batch: the bits of a matrix product
    depend on a row's position. Whoever is free takes the next episode of that row.

    Args:
        message: The request.
        block: The request's block.
        infos: Infos of the request.
        site: Where it runs.
    """

    def __init__(self, message: Execute, block: Block, infos: Infos | None, site: Site) -> None:
        root, self.worker = site.place.root, site.place.worker
        self.layout = block.layout
        self.arrays = block.arrays
        self._infos = _Rows(infos)
        self.agent_info = self._infos.agent_info
        self._message = message
        self._seeds = episode_seeds(root, message.first, message.n_episodes)
        site.announce_seeds(self._seeds)
        n_noise = self.layout.step.n_noise
        self._noise: NoiseStarts | None = None
        if n_noise:
            keys = noise_keys(root, message.execution, message.n_episodes)
            self._noise = NoiseStarts(keys, n_noise)
        self._n_lanes = self.layout.step.n_lanes
        self._free = list(reversed(message.slots))
        self._owns_slots = bool(message.slots)
        self._cancelled = self.arrays.control["cancelled"].data
        self._whole = self.arrays.control["whole"].data
        self._claims = Claims(self.arrays.control, message.n_episodes)
        self._site = site
        self._claimed: list[list[int]] = [[] for _ in range(self._n_lanes)]  # the next one last
        for number in sorted(message.again, reverse=True):
            self._claimed[number % self._n_lanes].append(number)
        self._exhausted: set[int] = set()
        self._recycling = site.recycling
        self._chunks: list[tuple[int, int, int, bool]] = []
        self._refused = False

    def announce_to(self, env: VecEnv) -> None:
        """Tell the environments which episodes will come, where no other worker takes any."""
        env.announce_episodes(self._seeds, self._infos.env_info)

    def next_episode(self, lane: int) -> Episode | None:
        """The lane's next episode, if it has a slot to write to."""
        if self._recycling.is_due():
            return None
        in_place = self._message.in_place
        if not in_place and not self._free:
            # Its slots come back when they are emptied; a worker that has none takes no part.
            self._refused = self._refused or (self._owns_slots and lane not in self._exhausted)
            return None
        if not self._claimed[lane] and (lane in self._exhausted or not self._claim(lane)):
            return None
        number = self._claimed[lane].pop()
        self._recycling.n_begun += 1
        return Episode(
            number,
            self._seeds[number],
            self._infos.options(number),
            self._noise[number] if self._noise is not None else None,
            number if in_place else self._free.pop(),
        )

    def _claim(self, lane: int) -> bool:
        """Claim episodes of the lane's row; False if there are none left."""
        self._site.lock.acquire()
        claimed = self._claims.make(self.worker, lane)
        self._site.lock.release()
        self._claimed[lane] = list(reversed(claimed))
        if not self._claimed[lane]:
            self._exhausted.add(lane)
        return bool(self._claimed[lane])

    def restarted(self, lane: int, episode: Episode) -> Episode:
        """Never asked for: an episode that ended is complete."""
        raise NotImplementedError

    def next_slot(self, lane: int, episode: int) -> int | None:
        """A slot for the next chunk of an episode."""
        if self._free:
            return self._free.pop()
        self._refused = True
        return None

    def chunk_done(self, episode: int, slot: int, chunk: int, is_last: bool) -> None:
        """Note a complete slot; one that is its row's whole episode stays where it is."""
        self._site.control.done[0] += is_last
        if self._message.in_place and is_last and chunk == 0:
            self._whole[episode] = 1  # the last of all that is written about it
        else:
            self._chunks.append((episode, slot, chunk, is_last))

    def flush(self) -> None:
        """Report the slots that wait to be emptied."""
        if self._chunks:
            self._site.send(ChunksDone(self._message.number, self._chunks))
            self._chunks = []
            # Read what came back, needed or not: a pipe that fills up would stop both sides.
            self._take_credit(blocking=False)

    def wait(self) -> bool:
        """Wait for slots, if any lane lacks one."""
        if not self._refused:
            return False
        self._take_credit(blocking=True)
        return True

    def has_news(self) -> bool:
        """Take slots that came back meanwhile."""
        return self._refused and self._take_credit(blocking=False)

    def is_cancelled(self) -> bool:
        """Whether the caller gave the request up."""
        return bool(self._cancelled[0])

    def _take_credit(self, blocking: bool) -> bool:
        slots = self._site.receive_credit(self._message.number, blocking)
        if slots is None:
            return False
        self._free.extend(slots)
        self._refused = False
        return True


class WindowPlan:
    """The next window of a worker's lanes, for a ``Batcher``.

    Args:
        message: The window.
        block: The window's block.
        infos: Infos of all lanes of all workers, from the reset.
        site: Where it runs.
        seeds: Seeds of the lanes since their reset.
    """

    def __init__(
        self, message: Window, block: Block, infos: Infos | None, site: Site, seeds: LaneSeeds
    ) -> None:
        self.worker = site.place.worker
        self.layout = block.layout
        self.arrays = block.arrays
        self._infos = _Rows(infos)
        self.agent_info = self._infos.agent_info
        self._seeds = seeds
        self._recycling = site.recycling
        self._slots = dict(message.slots)
        self._starts = message.is_first
        self._first_lane = self.worker * self.layout.step.n_lanes
        self._cancelled = self.arrays.control["cancelled"].data

    def next_episode(self, lane: int) -> Episode | None:
        """In the first window after a reset: the lane's episode."""
        if not self._starts or lane not in self._slots:
            return None
        self._recycling.n_begun += 1
        return self._episode(self._first_lane + lane, self._slots.pop(lane), 0)

    def resumed(self, lane: int, n_restarts: int) -> Episode:
        """The episode that another worker had begun in a lane; it has no slot yet."""
        return self._episode(self._first_lane + lane, -1, n_restarts)

    def restarted(self, lane: int, episode: Episode) -> Episode:
        """The lane's next episode, in the same slot."""
        self._recycling.n_begun += 1
        return self._episode(episode.number, episode.slot, episode.n_restarts + 1)

    def next_slot(self, lane: int, episode: int) -> int | None:
        """The lane's slot in this window, once."""
        return self._slots.pop(lane, None)

    def chunk_done(self, episode: int, slot: int, chunk: int, is_last: bool) -> None:
        """Nothing to do: the caller reads the block when all workers are done."""

    def flush(self) -> None:
        """Nothing to report before the end."""

    def wait(self) -> bool:
        """A window never waits."""
        return False

    def has_news(self) -> bool:
        """A window gets no slots on the way."""
        return False

    def is_cancelled(self) -> bool:
        """Whether the caller gave the window up."""
        return bool(self._cancelled[0])

    def _episode(self, number: int, slot: int, n_restarts: int) -> Episode:
        seed = self._seeds.seed(number, n_restarts)
        n_noise = self.layout.step.n_noise
        noise = None
        if n_noise:
            key = self._seeds.noise_key(number, n_restarts)
            noise = NoiseStarts(np.array([key], np.uint64), n_noise)[0]
        return Episode(number, seed, self._infos.options(number), noise, slot, n_restarts)
