"""What a worker's rollout runs: its share of a request's episodes, or a window of its lanes."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Sequence

from rlpool.envs.vec_env import Options, VecEnv
from rlpool.plan import Episode
from rlpool.seeding import LaneSeeds, NoiseStarts, episode_seeds
from rlpool.slots import Block
from rlpool.storage import Array
from rlpool.workers.messages import ChunksDone, Execute, Window

_MAX_CLAIM = 8
"""Episodes claimed at once: enough to make the claim cheap. Near a request's end they are claimed
one by one, so that no worker sits on episodes that another could run."""

Send = Callable[[object], None]
AnnounceSeeds = Callable[[Sequence[int]], None]
ReceiveCredit = Callable[[int, bool], list[int] | None]
"""``(request, blocking)`` to slots that came back: ``None`` if no message was there."""


class ClaimLock:
    """Excludes the other workers while one claims an episode.

    A lock of the kernel on a shared descriptor: it is gone with the process that holds it, so
    that no death can leave it locked.

    Args:
        fd: Descriptor of memory that all workers share; ``None`` if there is one worker only.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def acquire(self) -> None:
        """Wait for the lock and take it."""
        if self._fd is not None:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        """Give it back."""
        if self._fd is not None:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)


class _Infos:
    """A request's infos on the worker's side."""

    def __init__(self, infos: tuple[dict[str, Array], dict[str, Array]] | None) -> None:
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
    depend on a row's position. Each row has a cursor that all workers advance, so that whoever
    is free takes the next episode of that row.

    Args:
        message: The request.
        worker: This worker's number.
        block: The request's block.
        root: Root of the seeds.
        infos: Infos of the request.
        lock: Guards the cursors.
        send: Sends a message to the caller.
        receive_credit: Takes emptied slots.
        announce_seeds: Is told which seeds the environments will be reset with.
    """

    def __init__(
        self,
        message: Execute,
        worker: int,
        block: Block,
        root: int,
        infos: tuple[dict[str, Array], dict[str, Array]] | None,
        lock: ClaimLock,
        send: Send,
        receive_credit: ReceiveCredit,
        announce_seeds: AnnounceSeeds,
    ) -> None:
        self.worker = worker
        self.layout = block.layout
        self.arrays = block.arrays
        self._infos = _Infos(infos)
        self.agent_info = self._infos.agent_info
        self._message = message
        self._seeds = episode_seeds(root, message.execution, message.n_episodes)
        announce_seeds(self._seeds)
        n_noise = self.layout.step.n_noise
        self._noise = NoiseStarts(self._seeds, n_noise) if n_noise else None
        self._n_lanes = self.layout.step.n_lanes
        self._free = list(reversed(message.slots))
        self._owns_slots = bool(message.slots)
        self._cursor = self.arrays.control["cursor"].data
        self._cancelled = self.arrays.control["cancelled"].data
        self._claim_divisor = 4 * self.layout.n_workers
        self._claimed: list[list[Episode]] = [[] for _ in range(self._n_lanes)]
        self._exhausted: set[int] = set()
        self._lock = lock
        self._send = send
        self._receive_credit = receive_credit
        self._chunks: list[tuple[int, int, int]] = []
        self._refused = False

    def announce_to(self, env: VecEnv) -> None:
        """Tell the environments which episodes will come, where no other worker takes any."""
        env.announce_episodes(self._seeds, self._infos.env_info)

    def next_episode(self, lane: int) -> Episode | None:
        """The lane's next episode, if it has a slot to write to."""
        in_place = self._message.in_place
        if not in_place and not self._free:
            # Its slots come back when they are emptied; a worker that has none takes no part.
            self._refused = self._refused or (self._owns_slots and lane not in self._exhausted)
            return None
        if not self._claimed[lane] and (lane in self._exhausted or not self._claim(lane)):
            return None
        episode = self._claimed[lane].pop()
        if not in_place:
            episode.slot = self._free.pop()
        return episode

    def _claim(self, lane: int) -> bool:
        """Claim episodes of the lane's row: several while many are left, one by one at the end."""
        stride, n_episodes = self._n_lanes, self._message.n_episodes
        self._lock.acquire()
        first = self._cursor[lane]
        n_left = max(0, -(-(n_episodes - first) // stride))
        n_claimed = min(n_left, max(1, min(_MAX_CLAIM, n_left // self._claim_divisor)))
        self._cursor[lane] = first + n_claimed * stride
        self._lock.release()
        if not n_claimed:
            self._exhausted.add(lane)
            return False
        self._claimed[lane] = [
            Episode(
                number,
                self._seeds[number],
                self._infos.options(number),
                self._noise[number] if self._noise is not None else None,
                number,
            )
            for number in range(first + (n_claimed - 1) * stride, first - 1, -stride)
        ]
        return True

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
        if not (self._message.in_place and is_last and chunk == 0):
            self._chunks.append((episode, slot, chunk))

    def flush(self) -> None:
        """Report the slots that wait to be emptied."""
        if self._chunks:
            self._send(ChunksDone(self._message.request, self._chunks))
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
        slots = self._receive_credit(self._message.request, blocking)
        if slots is None:
            return False
        self._free.extend(slots)
        self._refused = False
        return True


class WindowPlan:
    """The next window of a worker's lanes, for a ``Batcher``.

    Args:
        message: The window.
        worker: This worker's number.
        block: The window's block.
        seeds: Seeds of the lanes since their reset.
        infos: Infos of all lanes of all workers, from the reset.
    """

    def __init__(
        self,
        message: Window,
        worker: int,
        block: Block,
        seeds: LaneSeeds,
        infos: tuple[dict[str, Array], dict[str, Array]] | None,
    ) -> None:
        self.worker = worker
        self.layout = block.layout
        self.arrays = block.arrays
        self._infos = _Infos(infos)
        self.agent_info = self._infos.agent_info
        self._seeds = seeds
        self._slots = dict(message.slots)
        self._starts = message.is_first
        self._first_lane = worker * self.layout.step.n_lanes
        self._cancelled = self.arrays.control["cancelled"].data

    def next_episode(self, lane: int) -> Episode | None:
        """In the first window after a reset: the lane's episode."""
        if not self._starts or lane not in self._slots:
            return None
        return self._episode(self._first_lane + lane, self._slots.pop(lane), 0)

    def restarted(self, lane: int, episode: Episode) -> Episode:
        """The lane's next episode, in the same slot."""
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
        noise = NoiseStarts([seed], n_noise)[0] if n_noise else None
        return Episode(number, seed, self._infos.options(number), noise, slot, n_restarts)
