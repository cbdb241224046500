"""Which worker runs which episode: claims in shared memory that survive whoever made them.

Episode *i* of a batcher belongs to row ``i % n_lanes`` of the workers' batches; claims number
episodes within their request. For each row, every worker's last claim is one word: where it ends,
and how many episodes it has. The next claim of a row begins where the furthest of them ends, the
largest word, so nothing else has to be recorded: a worker that dies has either made a claim or not.
A lane replaces its claim only when all episodes of it are finished.

Workers make claims under a lock of the kernel, which is released when its holder dies. Taking back
the claim of a dead worker needs no lock: it leaves the end of the claim where it was.

Where lanes cannot be seeded one by one, each worker has its share of the episodes beforehand.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Mapping, Sequence

from rlpool.data.storage import NDArray
from rlpool.errors import SpecError
from rlpool.seeding import episode_seeds
from rlpool.slots.blocks import Layout, StepSpecs

_LOG = logging.getLogger("rlpool")

MAX_CLAIM = 8
"""Episodes claimed at once: enough to make the claim cheap. Near the end of a request they are
claimed one by one, so that no worker holds episodes that another could run."""

_COUNT_BITS, _COUNT_MASK = 4, 15


class Claims:
    """The claims of one request.

    Args:
        control: The control arrays of its block, see ``Layout.control``.
        n_episodes: Episodes of the request.
        first: Number of the first one.
        lock_fd: Descriptor of a file that all workers lock to make a claim; ``None`` if there is
            only one worker.
    """

    def __init__(
        self,
        control: Mapping[str, NDArray],
        n_episodes: int,
        first: int,
        lock_fd: int | None = None,
    ) -> None:
        self._n_episodes = n_episodes
        self._n_workers, self._n_lanes = control["claim"].shape
        lanes = range(self._n_lanes)
        self._rows = [control["claim"][:, lane].data for lane in lanes]
        self._starts = [(lane - first) % self._n_lanes for lane in lanes]
        self._divisor = 4 * self._n_workers
        self._lock_fd = lock_fd

    def make(self, worker: int, lanes: Sequence[int]) -> list[range]:
        """Claim the next episodes of each of these rows, several at once while many are left."""
        lock_fd, n_episodes = self._lock_fd, self._n_episodes
        # A row's claims only move on: it takes no lock to see that nothing is left.
        if lock_fd is None or all(self._end(lane) >= n_episodes for lane in lanes):
            return [self._make(worker, lane) for lane in lanes]
        fcntl.lockf(lock_fd, fcntl.LOCK_EX)
        claimed = [self._make(worker, lane) for lane in lanes]
        fcntl.lockf(lock_fd, fcntl.LOCK_UN)
        return claimed

    def _make(self, worker: int, lane: int) -> range:
        first, stride = self._end(lane), self._n_lanes
        n_left = -(-(self._n_episodes - first) // stride)
        if n_left <= 0:
            return range(0)
        n_claimed = max(1, min(MAX_CLAIM, n_left // self._divisor))
        stop = first + n_claimed * stride
        self._rows[lane][worker] = (stop << _COUNT_BITS) + n_claimed
        return range(first, stop, stride)

    def _end(self, lane: int) -> int:
        """Where the claims of a row end: the first episode that is left."""
        return max(self._starts[lane], max(self._rows[lane]) >> _COUNT_BITS)

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


class Shares:
    """The fixed shares of a request's episodes.

    Episode *i* runs in row ``i % n_lanes`` of a worker, as always, and rows go around the workers.
    So each lane of a worker has its episodes beforehand, which it runs one after another.

    Args:
        layout: Layout of the request's block.
        n_episodes: Its number of episodes.
        first: Number of the first one.
    """

    def __init__(self, layout: Layout, n_episodes: int, first: int) -> None:
        self._n_lanes, self._n_workers = layout.step.n_lanes, layout.n_workers
        self._n_episodes, self._first = n_episodes, first

    def of(self, worker: int) -> list[int]:
        """The episodes of a worker, ascending."""
        return [number for number, other in enumerate(self.workers) if other == worker]

    @property
    def workers(self) -> list[int]:
        """The worker of each episode."""
        numbers = range(self._first, self._first + self._n_episodes)
        return [number // self._n_lanes % self._n_workers for number in numbers]

    def seeds(self, root: int) -> list[int]:
        """The seed of each episode: that of its worker's first one, as one reset serves all lanes.

        Args:
            root: Root of all seeds.
        """
        seeds = episode_seeds(root, self._first, self._n_episodes)
        firsts: dict[int, int] = {}
        return [
            firsts.setdefault(worker, seed)
            for worker, seed in zip(self.workers, seeds, strict=True)
        ]


def check_rows(step: StepSpecs | None, env_info: Mapping[str, NDArray]) -> None:
    """Refuse different rows for lanes that are reset together.

    Args:
        step: What a step consists of, ``None`` before that is known.
        env_info: Per row.

    Raises:
        SpecError: If there are.
    """
    if step is None or not step.resets_together:
        return
    for key, array in env_info.items():
        if len({row.tobytes() for row in array}) > 1:
            raise SpecError(
                f"env_info[{key!r}] has different rows, and one reset serves all lanes "
                f"(seeding is {step.seeding!r})",
                fix="give all rows the same value, or use environments that can be reset alone "
                "(GymEnv)",
            )


def check_shares(layout: Layout, env_info: Mapping[str, NDArray], n_rows: int) -> None:
    """Refuse what lanes that are reset together cannot run.

    Args:
        layout: Layout of the request's block.
        env_info: Its ``env_info``, per row.
        n_rows: Its number of rows.

    Raises:
        SpecError: If lanes have different ``env_info``, or there are too few slots for them.
    """
    check_rows(layout.step, env_info)
    n_lanes = layout.step.n_lanes * layout.n_workers
    if layout.n_slots < min(n_lanes, n_rows):
        raise SpecError(
            f"n_slots is {layout.n_slots}, and {n_lanes} lanes run at the same time: none of "
            f"them can wait for a slot (seeding is {layout.step.seeding!r})",
            fix=f"give n_slots={n_lanes} or more",
        )
