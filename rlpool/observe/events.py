"""What a process notes for ``rlpool.trace``: events of a fixed size, in memory that survives it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from rlpool.memory.storage import anonymous_file

FILE_NAME = "rlpool-trace"
"""What the system calls the memory in which events are noted."""

_EVENT = Struct("8q")
_COUNTS = Struct("2q")
"""Events that were noted, and those for which there was no room."""

_FIRST = _EVENT.size  # where the events begin, after the counts


class Kind(IntEnum):
    """What an event tells; the names of its numbers follow."""

    AGENT = 1  # n_lanes
    STEP = 2  # n_lanes
    RESET = 3  # n_lanes
    WAIT_FOR_REQUEST = 4
    WAIT_FOR_SLOT = 5
    LANE_BEGINS = 6  # lane, request, episode, steps so far: an episode, or a further part of one
    LANE_PAUSES = 7  # lane
    LANE_ENDS = 8  # lane, number of steps, 1 if the episode is complete and 0 if it was abandoned
    WORKER_STATE = 9  # worker, state, process id, how often it was started
    REQUEST_BEGINS = 10  # request, n_rows
    REQUEST_ENDS = 11  # request, 1 if it is complete and 0 if it failed or was given up
    CALLER_WAITS = 12


class Event(NamedTuple):
    """One event.

    Attributes:
        kind: What it tells, a ``Kind``.
        start_ns: When it began, on the clock of ``time.monotonic_ns``, which all processes share.
        end_ns: When it ended, ``start_ns`` if it took no time.
        a, b, c, d: Numbers, see ``Kind``.
        pid: The process that noted it.
    """

    kind: int
    start_ns: int
    end_ns: int
    a: int
    b: int
    c: int
    d: int
    pid: int


class EventLog:
    """Notes the events of one process in shared memory; one that follows it goes on there.

    What does not fit is counted and left out.

    Args:
        region: The memory.
    """

    def __init__(self, region: mmap.mmap) -> None:
        self._region = region
        self._pid = os.getpid()
        self._room = (len(region) - _FIRST) // _EVENT.size
        self._counts = memoryview(region)[: _COUNTS.size].cast("q")
        self._n_noted = self._counts[0]

    def note(
        self, kind: int, start_ns: int, end_ns: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0
    ) -> None:
        """Note an event, see ``Event``."""
        n_noted = self._n_noted
        if n_noted == self._room:
            self._counts[1] += 1
            return
        at = _FIRST + n_noted * _EVENT.size
        _EVENT.pack_into(self._region, at, kind, start_ns, end_ns, a, b, c, d, self._pid)
        # Last: a process that is killed before this has not noted it.
        self._counts[0] = self._n_noted = n_noted + 1


class EventMemory:
    """The memory of the events of a caller and its workers, one region each.

    Pages are taken when events are written to them.

    Args:
        n_regions: How many processes there are.
        n_events: Events that fit into a region.

    Attributes:
        fd: Its descriptor.
        region_bytes: Size of a region.
    """

    def __init__(self, n_regions: int, n_events: int) -> None:
        n_bytes = _FIRST + n_events * _EVENT.size
        self.region_bytes = -(-n_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self.fd = anonymous_file(FILE_NAME)
        self._n_regions = n_regions
        try:
            os.ftruncate(self.fd, n_regions * self.region_bytes)
        except BaseException:
            self.close()
            raise

    def log(self, region: int) -> EventLog:
        """Where a process of this program notes its events."""
        return EventLog(mapped(self.fd, region, self.region_bytes))

    def events(self, region: int) -> Iterator[Event]:
        """The events of a region, in the order in which they were noted."""
        memory = mapped(self.fd, region, self.region_bytes)
        try:
            n_noted, _ = _COUNTS.unpack_from(memory)
            for at in range(_FIRST, _FIRST + n_noted * _EVENT.size, _EVENT.size):
                yield Event(*_EVENT.unpack_from(memory, at))
        finally:
            memory.close()

    def n_left_out(self) -> int:
        """Events for which there was no room, of all processes."""
        counts = (os.pread(self.fd, _COUNTS.size, n * self.region_bytes) for n in self._all)
        return sum(_COUNTS.unpack(count)[1] for count in counts)

    @property
    def _all(self) -> range:
        return range(self._n_regions)

    def close(self) -> None:
        """Close the descriptor; what is mapped stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def mapped(fd: int, region: int, region_bytes: int) -> mmap.mmap:
    """Map a region of a file of events."""
    return mmap.mmap(fd, region_bytes, offset=region * region_bytes)


def opened_log(pid: int, fd: int, region: int, region_bytes: int) -> EventLog:
    """Where another process of the program of process ``pid`` notes its events.

    Raises:
        OSError: If that process, or its descriptor, is not there or may not be opened.
    """
    path = f"/proc/{pid}/fd/{fd}"
    if FILE_NAME not in os.readlink(path):
        raise FileNotFoundError(f"{path} is another file")
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return EventLog(mapped(own, region, region_bytes))
    finally:
        os.close(own)
