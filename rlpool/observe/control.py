"""The shared record of a batcher's or manager's workers: its layout, writers and readers.

One anonymous file contains all of it, as int64 words::

    header            the owner of the workers, and the running requests
    row of a worker   progress, its process and state, its time by activity
    lanes of a worker the episode of each lane, and the worker's step at which it began

Workers write their progress and the episodes of their lanes, the caller everything else. There are
no locks: every number is one word. The caller watches the progress (``Crew``), and reads the rest
for errors and ``stats()``; ``python -m rlpool top`` finds the file by its name.
"""

from __future__ import annotations

import os
from enum import IntEnum
from time import monotonic_ns
from typing import Any

import numpy as np

from rlpool.data.storage import Memory, NDArray

FILE_NAME = "rlpool-control"
"""Name of the file."""

FORMAT = int.from_bytes(b"rlpool\0\1", "little")
"""The first word: type and version of the file."""

MAX_SHOWN_LANES = 1024
"""Lanes of a worker that have words of their own; workers with more show none."""

MAX_REQUESTS = 8
"""Consecutive requests that workers may have at once: enough to keep them busy."""

HEADER_WORDS = 64
ROW_WORDS = 32
"""A row is a multiple of a 64-byte cache line, so workers do not write to each other's lines."""

_LANE_WORDS = 4

_NAME_BYTES = 32


class Head(IntEnum):
    """Words of the header."""

    FORMAT = 0
    OWNER_PID = 1
    N_WORKERS = 2
    NAME = 4  # up to the next
    REQUESTS = 16  # numbers of the last requests, each at number % MAX_REQUESTS
    N_ROWS = 24  # rows of each of them, 0 once it has ended or was cancelled


class Word(IntEnum):
    """Words of a worker's row."""

    STEPS = 0  # calls of the environments so far, 1 when the process begins
    LANE = 1  # the lane whose environment runs
    DONE = 2  # slots and commands completed
    N_LANES = 3
    N_STEPS = 4  # steps of all lanes, including earlier processes of this number
    N_EPISODES = 5  # episodes that ended, likewise
    AGENT_NS = 6  # these three as in WorkerRecord
    ENV_NS = 7
    WAITING_NS = 8
    N_FINISHED = 9  # episodes finished of each request
    PID = 18  # from here on written by the caller
    STATE = 19
    N_STARTS = 20
    SINCE_NS = 21  # when the process was started
    SEEN_KEYS = 24  # written by the worker: one bit per key of ``info_keys`` that an info contained


class State(IntEnum):
    """State of a worker, as known to its owner."""

    DOWN = 0
    STARTING = 1
    UP = 2
    LEAVING = 3
    GONE = 4  # without a successor


class WorkerRecord:
    """A worker's part of the shared record, as it writes it.

    The three times count the nanoseconds spent in calls of a kind. While such a call runs, its
    start time is already subtracted, so the number is negative. A reader therefore needs a single
    word at any time.

    Args:
        row: int64 ``[ROW_WORDS]``.
        lanes: int64 ``[_LANE_WORDS, MAX_SHOWN_LANES]``.

    Attributes:
        steps: One element, counts resets and steps: a worker that changes neither this nor
            ``lane`` is not doing anything.
        lane: One element: the lane whose environment runs.
        done: One element, counts completed slots and commands.
        n_steps: One element: steps of all lanes.
        n_episodes: One element: episodes that lanes have completed.
        finished: The same for the request *number* at ``number % MAX_REQUESTS``.
        agent_ns: One element: time in calls of the agent.
        env_ns: One element: time in steps and resets of the environments.
        waiting_ns: One element: time without work.
        seen_keys: One element: the keys found in infos, see ``VecEnv``.
        request: Of each lane, the number of its request.
        episode: Of each lane, the number of its episode plus 1; 0 if it is idle. Written last
            when an episode begins.
        first_step: Of each lane, the value of ``steps`` before the first step of its episode.
        pause: Of each lane that waits, the steps of its episode plus 1; 0 for the others.
    """

    def __init__(self, row: NDArray, lanes: NDArray) -> None:
        # As memoryviews, whose single numbers are faster to read and write.
        words, self._lanes = row.data, lanes
        self.steps, self.lane, self.done, self.n_steps, self.n_episodes = (
            words[word : word + 1]
            for word in (Word.STEPS, Word.LANE, Word.DONE, Word.N_STEPS, Word.N_EPISODES)
        )
        self.agent_ns, self.env_ns, self.waiting_ns = (
            words[word : word + 1] for word in (Word.AGENT_NS, Word.ENV_NS, Word.WAITING_NS)
        )
        self.seen_keys = words[Word.SEEN_KEYS : Word.SEEN_KEYS + 1]
        self._n_lanes = words[Word.N_LANES : Word.N_LANES + 1]
        self.finished = words[Word.N_FINISHED : Word.N_FINISHED + MAX_REQUESTS]
        self._name_lanes(lanes)

    @classmethod
    def private(cls) -> WorkerRecord:
        """Make a record without other readers."""
        return cls(np.zeros(ROW_WORDS, np.int64), np.zeros((_LANE_WORDS, 1), np.int64))

    def _name_lanes(self, lanes: NDArray) -> None:
        self.request, self.episode, self.first_step, self.pause = (a.data for a in lanes)

    def begin_lanes(self, n_lanes: int) -> None:
        """Set the number of lanes, all of them idle."""
        self._n_lanes[0] = n_lanes
        if n_lanes > self._lanes.shape[1]:
            self._lanes = np.zeros((_LANE_WORDS, n_lanes), np.int64)
            self._name_lanes(self._lanes)

    # Times by activity --------------------------------------------------------------------------

    def end_calls(self) -> None:
        """End the times of calls that raised instead of returning."""
        for word in (self.agent_ns, self.env_ns):
            if word[0] < 0:
                word[0] += monotonic_ns()

    def begin_wait(self) -> None:
        """Begin a time without work."""
        if self.waiting_ns[0] >= 0:
            self.waiting_ns[0] -= monotonic_ns()

    def end_wait(self) -> None:
        """End the time without work."""
        if self.waiting_ns[0] < 0:
            self.waiting_ns[0] += monotonic_ns()


class Control:
    """The whole record, for its owner and its readers.

    Args:
        words: int64 ``[...]``, all of it.
        n_workers: Number of workers.
        memory: Contains the words, if this is the owner.

    Attributes:
        header: int64 ``[HEADER_WORDS]``.
        rows: int64 ``[n_workers, ROW_WORDS]``.
        lanes: int64 ``[n_workers, _LANE_WORDS, MAX_SHOWN_LANES]``.
        n_workers: Number of workers.
    """

    def __init__(self, words: NDArray, n_workers: int, memory: Any = None) -> None:
        self.n_workers = n_workers
        self._memory = memory
        rows, lanes = HEADER_WORDS + n_workers * ROW_WORDS, _LANE_WORDS * MAX_SHOWN_LANES
        self.header: NDArray = words[:HEADER_WORDS]
        self._name = self.header[Head.NAME : Head.NAME + _NAME_BYTES // 8].view(f"S{_NAME_BYTES}")
        self._header = self.header.data  # whose single numbers are faster to read and write
        self.rows: NDArray = words[HEADER_WORDS:rows].reshape(n_workers, ROW_WORDS)
        shape = n_workers, _LANE_WORDS, MAX_SHOWN_LANES
        self.lanes: NDArray = words[rows : rows + n_workers * lanes].reshape(shape)

    @classmethod
    def create(cls, n_workers: int) -> Control:
        """Create a record in memory that other processes can map."""
        memory = Memory.shared(control_bytes(n_workers), FILE_NAME)
        control = cls(memory.root().view(np.int64), n_workers, memory)
        control.name = "workers"
        control.header[[Head.FORMAT, Head.N_WORKERS]] = FORMAT, n_workers
        control.header[Head.OWNER_PID] = os.getpid()  # last, because it may be read from now on
        return control

    @property
    def fd(self) -> int:
        """Descriptor of the memory, available only to the owner."""
        fd: int = self._memory.fd
        return fd

    def close(self) -> None:
        """Close the descriptor, so that the record can no longer be found."""
        self._memory.close_fd()

    @property
    def name(self) -> str:
        """Class that owns the workers, such as ``"EpisodeBatcher"``."""
        name: bytes = self._name[0]
        return name.decode(errors="replace")

    @name.setter
    def name(self, name: str) -> None:
        self._name[0] = name.encode()

    def of_worker(self, worker: int) -> WorkerRecord:
        """A worker's part."""
        return WorkerRecord(self.rows[worker], self.lanes[worker])

    def lane_in_use(self, worker: int) -> int:
        """Return the lane whose environment a worker ran last."""
        return int(self.rows[worker, Word.LANE])

    # Written by the caller ----------------------------------------------------------------------

    def worker_starts(self, worker: int) -> None:
        """Reset a worker's row for a new process, except for its counts."""
        row = self.rows[worker]
        row[[Word.STEPS, Word.LANE, Word.DONE, Word.PID]] = 0
        row[[Word.AGENT_NS, Word.ENV_NS, Word.WAITING_NS]] = 0
        row[Word.N_STARTS] += 1
        row[Word.SINCE_NS] = monotonic_ns()
        self.lanes[worker, 1] = 0

    def request_begins(self, number: int, n_rows: int) -> None:
        """Record that a request is sent to the workers."""
        entry = number % MAX_REQUESTS
        self.rows[:, Word.N_FINISHED + entry] = 0
        self._header[Head.REQUESTS + entry] = number
        self._header[Head.N_ROWS + entry] = n_rows

    def request_ends(self, number: int) -> None:
        """Record that a request is over or cancelled; workers may still be busy with it."""
        self._header[Head.N_ROWS + number % MAX_REQUESTS] = 0

    def n_finished(self, number: int) -> int:
        """Return the finished episodes of a request that was sent, 0 for one that was not.

        An episode whose worker died just after its end is counted again when it is repeated.
        """
        entry = number % MAX_REQUESTS
        is_sent = self.header[Head.REQUESTS + entry] == number
        return int(self.rows[:, Word.N_FINISHED + entry].sum()) if is_sent else 0

    def forget_finished(self, number: int, worker: int) -> None:
        """Reset a worker's count for a request, since its successor runs all of it again."""
        self.rows[worker, Word.N_FINISHED + number % MAX_REQUESTS] = 0


def control_bytes(n_workers: int) -> int:
    """Size of the record of some workers."""
    return 8 * (HEADER_WORDS + n_workers * (ROW_WORDS + _LANE_WORDS * MAX_SHOWN_LANES))


def worker_record(control_fd: int, n_workers: int, worker: int) -> WorkerRecord:
    """A worker's part, in its process; closes the descriptor."""
    memory = Memory.attach(control_fd, control_bytes(n_workers))
    return Control(memory.root().view(np.int64), n_workers).of_worker(worker)
