"""A worker's part of a request: its share of the episodes, or a window of its lanes.

Workers distribute episodes through claims in shared memory, which survive the death of a worker.
Episode *i* of a batcher belongs to row ``i % n_lanes`` of the workers' batches; claims number
episodes within their request. For each row, every worker's last claim is one word: its end and its
number of episodes. The next claim of a row begins at the furthest end, the largest word, so nothing
else has to be recorded: a worker that dies has either made a claim or not. A lane replaces its
claim only when all episodes of it are finished.

Workers make claims under a kernel lock, which is released when its holder dies. Taking back the
claim of a dead worker needs no lock, because it does not move the end of the claim.

Where lanes cannot be seeded one by one, each worker has a fixed share of the episodes, and a lane
that is ready takes the next of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rlpool.agents.noise import NoiseStarts
from rlpool.batch.messages import ChunksDone, Episodes, Run, Window
from rlpool.data.infos import Infos, options_of
from rlpool.data.storage import NDArray
from rlpool.errors import SpecError
from rlpool.loop.plan import Chunk, Lane, Plan
from rlpool.machine.platform import HAS_ORDERED_STORES, NO_LOCK
from rlpool.record.tape import Tape
from rlpool.seeding import noise_keys
from rlpool.slots.blocks import Block, Layout
from rlpool.workers.failure_policy import Recycling
from rlpool.workers.worker_process import Place

MAX_CLAIM = 8
"""Episodes claimed at once: enough to make the claim cheap. Near the end of a request they are
claimed one by one, so that no worker holds episodes that another could run."""

_COUNT_BITS, _COUNT_MASK = 4, 15


SILENT, REPORTED = 1, 2
"""State that a worker leaves in ``over`` of the request's block when it has finished its part.

Only the last worker reports the end of a request, so that the caller wakes up once. A worker that
has sent any other message about the request reports its own end too, since its messages come first.
So do all workers where stores may be reordered: the caller reads these states without a lock.
"""


class Claims:
    """The claims of one request.

    Args:
        control: Control arrays of its block, see ``Layout.control``.
        n_episodes: Episodes of the request.
        first: Number of the first one.
        lock: Lock that all workers hold to make a claim; a no-op if there is only one worker.
    """

    def __init__(
        self,
        control: Mapping[str, NDArray],
        n_episodes: int,
        first: int,
        lock: AbstractContextManager[None] = NO_LOCK,
    ) -> None:
        self._n_episodes = n_episodes
        self._n_workers, self._n_lanes = control["claim"].shape
        lanes = range(self._n_lanes)
        self._rows = [control["claim"][:, lane].data for lane in lanes]
        self._starts = [(lane - first) % self._n_lanes for lane in lanes]
        self._divisor = 4 * self._n_workers
        self._lock = lock

    def make(self, worker: int, lane: int) -> list[int]:
        """Claim the next episodes of a row, several at once while many are left; the next one last.

        The end of a row's claims only grows, so checking that nothing is left needs no lock.
        """
        if self._end(lane) >= self._n_episodes:
            return []
        with self._lock:
            first, stride = self._end(lane), self._n_lanes
            n_left = -(-(self._n_episodes - first) // stride)
            n_claimed = min(n_left, max(1, min(MAX_CLAIM, n_left // self._divisor)))
            stop = first + n_claimed * stride
            if n_claimed > 0:
                self._rows[lane][worker] = (stop << _COUNT_BITS) + n_claimed
        return list(range(first, stop, stride))[::-1]

    def _end(self, lane: int) -> int:
        """Return the end of a row's claims, that is, its first unclaimed episode."""
        end: int = max(self._starts[lane], max(self._rows[lane]) >> _COUNT_BITS)
        return end

    def give_back(self, worker: int) -> list[int]:
        """Empty a dead worker's last claims; returns their episodes, finished or not."""
        episodes: list[int] = []
        for row in self._rows:
            stop, n_claimed = row[worker] >> _COUNT_BITS, row[worker] & _COUNT_MASK
            episodes.extend(range(stop - n_claimed * self._n_lanes, stop, self._n_lanes))
            row[worker] = stop << _COUNT_BITS
        return episodes

    @property
    def all_made(self) -> bool:
        """Whether no episode is left to claim."""
        return all(self._end(lane) >= self._n_episodes for lane in range(self._n_lanes))


@dataclass(frozen=True)
class Site:
    """Surroundings of a worker's requests.

    Attributes:
        place: Which worker it is.
        lock: Lock of claims, see ``Claims``.
        recycling: Decides when the worker should not begin further episodes.
        send: Sends a message to the caller.
        read: Reads messages from the caller, waiting for one if True is passed; False if there
            was none. Emptied slots are given to their plans.
        notice: Called when episodes have ended, unless it is ``None``.
    """

    place: Place
    lock: AbstractContextManager[None]
    recycling: Recycling
    send: Callable[[object], None]
    read: Callable[[bool], bool]
    notice: Callable[[], None] | None


class RequestPlan(Plan):
    """Shared part of both plans.

    Attributes:
        env_info: ``env_info`` of the request.
    """

    _starts = True  # whether lanes begin without episodes

    def __init__(self, message: Run, block: Block, infos: Infos, site: Site) -> None:
        self.agent_info, self.env_info = infos
        self.number, self.worker = message.number, site.place.worker
        self._fails_at, self.has_failing = message.fails_at, bool(message.fails_at)
        self.layout, self.arrays = block.layout, block.arrays
        self._site = site
        self.cancelled = self.arrays.control["cancelled"].data
        self.reports_end = not HAS_ORDERED_STORES  # True as soon as anything about it is sent

    def ends(self) -> bool:
        """Record that this worker's part is over; returns whether to report that."""
        over = self.arrays.control["over"]
        with self._site.lock:
            over[self.worker] = REPORTED if self.reports_end else SILENT
            is_last = bool(over.all())
        return is_last or self.reports_end

    @property
    def resets_all_lanes(self) -> bool:
        """Whether lanes are reset together, and begin this plan without episodes."""
        return self._starts and self.layout.step.resets_together


class EpisodePlan(RequestPlan):
    """A worker's share of the episodes of an ``execute``.

    Episode *i* of the batcher's life always runs in row ``i % n_lanes`` of the batch, because the
    bits of a matrix product depend on a row's position. Any idle worker takes the next episode of
    that row. If lanes cannot be seeded one by one, the next lane that is ready takes the next
    episode of its worker's share: its row depends on the lengths of earlier episodes, and is the
    same for the same workers and lanes.

    Args:
        message: The worker's part of the request.
        asked: The episodes.
        block: The request's block.
        infos: Infos of the request.
        site: Surroundings of the worker's requests.

    Attributes:
        seeds: Seeds of all episodes of the request.
    """

    numbers_episodes = True

    def __init__(
        self, message: Run, asked: Episodes, block: Block, infos: Infos, site: Site
    ) -> None:
        super().__init__(message, block, infos, site)
        n_rows, first, step = asked.n_rows, asked.first, self.layout.step
        self._noise: NoiseStarts | None = None
        if step.n_noise:
            self._noise = NoiseStarts(noise_keys(asked.root, first, n_rows), step.n_noise)
        self._first, self.seeds = first, asked.seeds(self.layout)
        # Whether episode i is written into slot i, and the further slots that this worker may use.
        self._in_place = n_rows <= self.layout.n_slots
        begin = self.worker + (n_rows if self._in_place else 0)
        self._free = list(range(begin, message.n_slots, self.layout.n_workers))[::-1]
        if self._in_place:
            self.complete = self.arrays.control["complete"].data
        self._exhausted: set[int] = set()  # lanes whose episodes are all claimed
        self._claimed: list[list[int]] = [[] for _ in range(step.n_lanes)]  # the next one last
        if step.resets_together:
            share = asked.share_of(self.worker, self.layout)
            self._claimed = [list(share)[::-1]] * step.n_lanes  # one list for all lanes
            self._exhausted.update(range(step.n_lanes))
        else:
            self._claims = Claims(self.arrays.control, n_rows, first, site.lock)
            for number in reversed(message.again):
                self._claimed[(first + number) % step.n_lanes].append(number)
        self._recycling = site.recycling
        self._moved: set[int] = set()  # episodes begun again, whose slots others may have taken
        self._chunks: list[Chunk] = []
        self.lacks_slots = False

    def next_episode(self, lane: Lane) -> bool:
        """Let a lane take its next episode if there is a slot for it."""
        if self._recycling.max_episodes is not None and self.is_left_over():
            return False
        number = lane.number
        mine = self._claimed[number]
        if not mine and number not in self._exhausted:
            mine = self._claimed[number] = self._claims.make(self.worker, number)
        if not mine:
            self._exhausted.add(number)
            self.is_dealt = not any(self._claimed) and len(self._exhausted) == len(self._claimed)
            return False
        row = mine[-1]
        slot = row if self._in_place and row not in self._moved else self._free_slot()
        if slot is None:
            return False
        mine.pop()
        self._recycling.n_begun += 1
        noise = self._noise[row] if self._noise is not None else None
        options = options_of(self.env_info, row) if self.env_info else None
        seed = self.seeds[row]
        fails_at = self._fails_at.get((row, seed)) if self.has_failing else None
        self.begin(lane, row, seed, options, noise, slot, fails_at, self._first + row)
        return True

    def next_slot(self, lane: Lane) -> bool:
        """Give a lane a free slot, if there is one."""
        slot = self._free_slot()
        if slot is None:
            return False
        lane.slot = slot
        return True

    def _free_slot(self) -> int | None:
        self.lacks_slots = not self._free
        return self._free.pop() if self._free else None

    def is_over(self) -> bool:
        """Whether all episodes are claimed, here or elsewhere, and no lane waits for a slot."""
        if self.lacks_slots:
            return False
        is_dealt = not any(self._claimed) and len(self._exhausted) == len(self._claimed)
        return is_dealt or self.is_left_over()

    def is_left_over(self) -> bool:
        """Whether this worker is due for replacement; it finishes a fixed share first."""
        return self._recycling.is_due() and not self.layout.step.resets_together

    def take_back(self, lane: Lane, slot: int | None) -> None:
        """Begin an episode again in this worker; its first chunk replaces the caller's chunks."""
        self._claimed[lane.number].append(lane.row)
        self._exhausted.discard(lane.number)
        self.is_dealt = False
        if lane.chunk:
            self._moved.add(lane.row)
        is_at_home = self._in_place and lane.row not in self._moved
        if slot is not None and not is_at_home:
            self._free.append(slot)
        self.flush()

    def take_slot_of(self, lane: Lane, *, is_last: bool) -> None:
        """Add a slot to those that the caller has to empty."""
        self._chunks.append((lane.row, lane.slot, lane.chunk, is_last))

    def flush(self) -> None:
        """Report the slots to be emptied."""
        if self._chunks:
            self._site.send(ChunksDone(self.number, self._chunks))
            self.reports_end = True
            self._chunks = []
            self._site.read(False)  # for emptied slots
        if self._site.notice is not None:
            self._site.notice()

    def wait(self) -> bool:
        """Wait for slots, if any lane lacks one."""
        if self.lacks_slots and not self._free:
            self._site.read(True)
        return self.lacks_slots

    def has_news(self) -> bool:
        """Whether missing slots have become available."""
        if self.lacks_slots and not self._free:
            self._site.read(False)
        return self.lacks_slots and bool(self._free)

    def take_slots(self, slots: Sequence[int]) -> None:
        """Add slots that the caller has emptied."""
        self._free.extend(slots)


class WindowPlan(RequestPlan):
    """The next window of a worker's lanes, for a ``Batcher``.

    Args:
        message: The worker's part of the window.
        asked: The window.
        block: The window's block.
        infos: Infos of all lanes of all workers.
        tapes: Lane to the tape of an episode that another worker began.
        site: Surroundings of the worker's requests.
    """

    def __init__(
        self,
        message: Run,
        asked: Window,
        block: Block,
        infos: Infos,
        tapes: Mapping[int, Tape],
        site: Site,
    ) -> None:
        super().__init__(message, block, infos, site)
        self.tapes = tapes
        self._seeds, self._starts = asked.seeds, asked.is_first
        self._slots = asked.rows_of(self.worker)
        self._first_lane = self.worker * self.layout.step.n_lanes
        resets_together = self.layout.step.resets_together
        self._only_seed = self._seeds.seed(self._first_lane, 0) if resets_together else None

    def next_episode(self, lane: Lane) -> bool:
        """In the first window after a reset, let a lane take its episode."""
        if not self._starts or lane.number not in self._slots:
            return False
        self._site.recycling.n_begun += 1
        self._begin(lane, self._slots.pop(lane.number), 0)
        return True

    def resume(self, lane: Lane, n_restarts: int) -> None:
        """Let a lane take the episode that another worker began; it has no slot yet."""
        self._begin(lane, -1, n_restarts)

    def restart(self, lane: Lane) -> None:
        """Let a lane take its next episode in the same slot."""
        self._site.recycling.n_begun += 1
        self._begin(lane, lane.slot, lane.n_restarts + 1)

    def next_slot(self, lane: Lane) -> bool:
        """Give a lane its slot of this window, once."""
        lane.slot = self._slots.pop(lane.number, -1)
        return lane.slot >= 0

    def _begin(self, lane: Lane, slot: int, n_restarts: int) -> None:
        number = self._first_lane + lane.number
        seed, n_noise = self._only_seed, self.layout.step.n_noise
        if seed is None:
            seed = self._seeds.seed(number, n_restarts)
        noise = self._seeds.noise(number, n_restarts, n_noise) if n_noise else None
        options = options_of(self.env_info, number) if self.env_info else None
        fails_at = self._fails_at.get((number, seed))
        self.begin(lane, number, seed, options, noise, slot, fails_at, number, n_restarts)


def check_together(
    layout: Layout,
    env_info: Mapping[str, NDArray],
    n_rows: int,
    seeds: Sequence[int] | None = None,
) -> None:
    """Refuse a request that lanes cannot run because they are reset together.

    Args:
        layout: Layout of the request's block.
        env_info: Its ``env_info``, per row.
        n_rows: Its number of rows.
        seeds: Its ``episode_seeds``, if there are any.

    Raises:
        SpecError: If lanes have different ``env_info`` or seeds of their own, or there are too few
            slots for them.
    """
    step = layout.step
    if not step.resets_together:
        return
    problems = [
        f"env_info[{key!r}] has different rows"
        for key, array in env_info.items()
        if len({row.tobytes() for row in array}) > 1
    ]
    if seeds is not None:
        problems.append("episode_seeds has a seed per episode")
    if problems:
        raise SpecError(
            f"{problems[0]}, and one reset serves all lanes (seeding is {step.seeding!r})",
            fix="leave it out, or use environments that can be reset alone (GymEnv)",
        )
    n_lanes = step.n_lanes * layout.n_workers
    if layout.n_slots < min(n_lanes, n_rows):
        raise SpecError(
            f"n_slots is {layout.n_slots}, and {n_lanes} lanes run at the same time: none of "
            f"them can wait for a slot (seeding is {step.seeding!r})",
            fix=f"give n_slots={n_lanes} or more",
        )
