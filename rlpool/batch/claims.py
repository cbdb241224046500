"""Which worker runs which episode: claims in shared memory that survive whoever made them.

Episode *i* belongs to row ``i % n_lanes`` of the workers' batches. For each row, every worker's
last claim is one word: where it ends, and how many episodes it has. The next claim of a row begins
where the furthest of them ends, the largest word, so nothing else has to be recorded: a worker that
dies has either made a claim or not. A lane replaces its claim only when all episodes of it are
finished.

Workers make claims under a lock of the kernel, which is released when its holder dies. Taking back
the claim of a dead worker needs no lock: it leaves the end of the claim where it was.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping, Sequence

from rlpool.memory.storage import Array

MAX_CLAIM = 8
"""Episodes claimed at once: enough to make the claim cheap. Near the end of a request they are
claimed one by one, so that no worker holds episodes that another could run."""

_COUNT_BITS, _COUNT_MASK = 4, 15


class Claims:
    """The claims of one request.

    Args:
        control: The control arrays of its block, see ``Layout.control``.
        n_episodes: Episodes of the request.
        lock_fd: Descriptor of a file that all workers lock to make a claim; ``None`` if there is
            only one worker.
    """

    def __init__(
        self, control: Mapping[str, Array], n_episodes: int, lock_fd: int | None = None
    ) -> None:
        self._n_episodes = n_episodes
        self._n_workers, self._n_lanes = control["claim"].shape
        self._rows = [control["claim"][:, lane].data for lane in range(self._n_lanes)]
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
        return max(lane, max(self._rows[lane]) >> _COUNT_BITS)

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
