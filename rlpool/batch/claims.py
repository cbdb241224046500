"""Which worker runs which episode: claims in shared memory that outlive whoever made them.

Episode *i* belongs to row ``i % n_lanes`` of the workers' batches. Each row has a cursor, the
next episode of that row that nobody has claimed. A worker claims the next few of a row::

    pending[lane] = the claim and who makes it
    claim[worker, lane] = the claim
    cursor[lane] += what was claimed
    pending[lane] = 0

under a lock that the kernel takes back from the dead. If its owner dies on the way, whoever comes
next finishes what is pending first. So what a dead worker had claimed is always known: a claim is
only replaced by the lane's next one when all of its episodes are finished.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Mapping

from rlpool.memory.storage import Array

MAX_CLAIM = 8
"""Episodes claimed at once: enough to make the claim cheap. Near a request's end they are claimed
one by one, so that no worker sits on episodes that another could run."""

_COUNT_BITS = 4  # a claim is one word, so that it is written whole: first episode and count

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class ClaimLock:
    """Excludes the other processes while one reads or writes claims.

    A lock of the kernel on a shared file: it is gone with the process that holds it, so that no
    death can leave it locked.

    Args:
        fd: Descriptor of memory that all workers share; ``None`` if nobody else is there.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def acquire(self) -> None:
        """Wait for the lock and take it."""
        if self._fd is not None:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)

    def try_acquire(self) -> bool:
        """Take the lock if nobody has it."""
        if self._fd is None:
            return True
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def release(self) -> None:
        """Give it back."""
        if self._fd is not None:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def holder(self) -> int | None:
        """Process that holds the lock now, ``None`` if none does or the system does not tell."""
        if self._fd is None:
            return None
        question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            answer = fcntl.fcntl(self._fd, fcntl.F_GETLK, question)
            kind, _, _, _, pid = struct.unpack(_FLOCK, answer)
        except (OSError, struct.error):
            return None
        return pid if kind != fcntl.F_UNLCK else None


class Claims:
    """The claims of one request.

    Args:
        control: The control arrays of its block, see ``Layout.control``.
        n_episodes: Episodes of the request.
        lock: ``make`` takes it; around ``of`` the caller has to.
    """

    def __init__(self, control: Mapping[str, Array], n_episodes: int, lock: ClaimLock) -> None:
        self.lock = lock
        self._n_episodes = n_episodes
        self._n_workers, self._n_lanes = control["claim"].shape
        self._cursor = control["cursor"].data
        self._pending = control["pending"].data
        self._claim = control["claim"].data
        self._divisor = 4 * self._n_workers

    def make(self, worker: int, lane: int) -> range:
        """Claim the next episodes of a row: several while many are left, one by one at the end."""
        stride = self._n_lanes
        self.lock.acquire()
        if self._pending[lane]:
            self._finish(lane)
        first = self._cursor[lane]
        n_left = max(0, -(-(self._n_episodes - first) // stride))
        n_claimed = min(n_left, max(1, min(MAX_CLAIM, n_left // self._divisor)))
        if n_claimed:
            claim = (first << _COUNT_BITS) + n_claimed
            self._pending[lane] = claim * self._n_workers + worker + 1
            self._claim[worker, lane] = claim
            self._cursor[lane] = first + n_claimed * stride
            self._pending[lane] = 0
        self.lock.release()
        return range(first, first + n_claimed * stride, stride)

    def of(self, worker: int) -> list[int]:
        """The episodes of a worker's last claims, finished or not."""
        episodes: list[int] = []
        for lane in range(self._n_lanes):
            if self._pending[lane]:
                self._finish(lane)
            first, n_claimed = self._parts(self._claim[worker, lane])
            stop = first + n_claimed * self._n_lanes
            episodes.extend(range(first, stop, self._n_lanes))
        return sorted(episodes)

    @property
    def all_made(self) -> bool:
        """Whether nothing is left to claim."""
        return all(cursor >= self._n_episodes for cursor in self._cursor.tolist())

    def _finish(self, lane: int) -> None:
        """Finish a claim whose owner died while making it."""
        claim, worker = divmod(self._pending[lane] - 1, self._n_workers)
        first, n_claimed = self._parts(claim)
        self._claim[worker, lane] = claim
        self._cursor[lane] = first + n_claimed * self._n_lanes
        self._pending[lane] = 0

    @staticmethod
    def _parts(claim: int) -> tuple[int, int]:
        return claim >> _COUNT_BITS, claim & ((1 << _COUNT_BITS) - 1)
