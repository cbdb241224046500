"""Which worker runs which episode: claims in shared memory that outlive whoever made them.

Episode *i* belongs to row ``i % n_lanes`` of the workers' batches. Of each row, every worker's last
claim is one word: its first episode and how many follow in that row. The next claim of a row, by
whomever, begins where the last of all workers ends, so that nothing else has to be written down: a
worker that dies has either made a claim or not, and what it had claimed is known. A claim is only
replaced by the lane's next one when all of its episodes are finished.
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

_COUNT_BITS, _COUNT_MASK = 4, 15

_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid


class ClaimLock:
    """Excludes the other processes while one reads or writes claims.

    A lock of the kernel on a shared file: it is gone with the process that holds it, so that no
    death can leave it locked.

    Args:
        fd: Descriptor of memory that all workers share; ``None`` if nobody else is there.
    """

    def __init__(self, fd: int | None = None) -> None:
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
    """

    def __init__(self, control: Mapping[str, Array], n_episodes: int) -> None:
        self._n_episodes = n_episodes
        self._n_workers, self._n_lanes = control["claim"].shape
        self._claim = control["claim"].data
        self._workers = range(self._n_workers)
        self._divisor = 4 * self._n_workers

    def make(self, worker: int, lane: int) -> range:
        """Claim the next episodes of a row, several while many are left; under the lock."""
        claims, stride, first = self._claim, self._n_lanes, lane
        for other in self._workers:
            claim = claims[other, lane]
            stop = (claim >> _COUNT_BITS) + (claim & _COUNT_MASK) * stride
            if stop > first:
                first = stop
        n_left = -(-(self._n_episodes - first) // stride)
        if n_left <= 0:
            return range(0)
        n_claimed = max(1, min(MAX_CLAIM, n_left // self._divisor))
        claims[worker, lane] = (first << _COUNT_BITS) + n_claimed
        return range(first, first + n_claimed * stride, stride)

    def give_back(self, worker: int) -> list[int]:
        """The episodes of a dead worker's last claims, finished or not; under the lock."""
        episodes: list[int] = []
        for lane in range(self._n_lanes):
            claimed = self._range(worker, lane)
            episodes.extend(claimed)
            if claimed:
                self._claim[worker, lane] = claimed.stop << _COUNT_BITS
        return sorted(episodes)

    @property
    def all_made(self) -> bool:
        """Whether nothing is left to claim."""
        return all(
            max(lane, *(self._range(w, lane).stop for w in self._workers)) >= self._n_episodes
            for lane in range(self._n_lanes)
        )

    def _range(self, worker: int, lane: int) -> range:
        claim = self._claim[worker, lane]
        first, n_claimed = claim >> _COUNT_BITS, claim & _COUNT_MASK
        return range(first, first + n_claimed * self._n_lanes, self._n_lanes)
