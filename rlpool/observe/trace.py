"""Writes what happens during requests to a file that Perfetto and Chrome show."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import whole_number
from rlpool.observe.control import Control, State, followers, living, state_name
from rlpool.observe.events import Event, EventMemory, Kind

Json = dict[str, Any]

_TRACKS = 1_000_000
"""Numbers of threads from one batcher to the next, in processes that have several."""

_LOOP, _FIRST_LANE = 1, 10
_CALLER, _FIRST_WORKER, _FIRST_REQUEST = 900_000, 900_010, 990_000
"""What happens one after the other has a track, a thread in the file's terms, with this number."""

_CALLS = {
    Kind.AGENT: "agent",
    Kind.STEP: "env.step",
    Kind.RESET: "env.reset",
    Kind.WAIT_FOR_REQUEST: "waits for a request",
    Kind.WAIT_FOR_SLOT: "waits for a slot",
}


class trace:  # noqa: N801  (used like a function)
    """Write what happens in a block to a file that https://ui.perfetto.dev shows.

    All batchers of this process take part, also those that are made within the block::

        with rlpool.trace("request.json"):
            batcher.execute(n_episodes=64)
            trajectories = batcher.get()

    A worker begins with the first request that it begins within the block. The file has the trace
    event format in JSON: a process per worker, with a track for its step loop (calls of the agent,
    steps and resets of the environments, waits) and one per lane (its episodes, with request,
    number and steps, and waits for a slot in the middle of them); in the caller's process a track
    per worker (starting, alive, restarting), requests, and waits in ``get``. All times are of one
    clock, and begin with the block.

    Outside of such a block nothing is noted, and nothing of it costs time. Within, each process
    notes up to ``max_events`` events of 64 bytes in memory that outlives it, two per batch step;
    what does not fit is left out and counted in the file. The file is written when the block ends,
    also if by an exception: about 150 bytes per event.

    Args:
        path: The file, which is replaced; relative to the directory in which the block begins.
        max_events: How many events each worker, and the caller, may note.

    Raises:
        SpecError: If ``path`` is no path or ``max_events`` is below 1; on entering, if the file
            cannot be written, or the system does not give the memory for as many events. Nothing is
            traced then. A batcher that is made within the block may raise the latter, too.
        UsageError: On entering, if another trace is being made in this process.

    Example:
        >>> import json, tempfile
        >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_threads=0)
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
        ...     with trace(file.name):
        ...         batcher.execute(n_episodes=2)
        ...         trajectories = batcher.get()
        ...     events = json.load(file)["traceEvents"]
        >>> [event["name"] for event in events if event["name"].startswith("episode")]
        ['episode 0', 'episode 1']

    References:
        "Trace Event Format", Google (Chromium): what the file consists of.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_events: int = 500_000) -> None:
        if not isinstance(path, str | os.PathLike):
            raise SpecError(f"path is {path!r}", fix='pass a file, such as "request.json"')
        self._path = self._file = Path(path)
        self._n_events = whole_number("max_events", max_events, 1)
        self._traced: list[_Traced] = []
        self._start_ns = 0

    def __enter__(self) -> trace:
        if followers:
            what = "another trace is being made in this process"
            raise UsageError(what, fix="end the block of the other trace first")
        self._start_ns = time.monotonic_ns()
        try:
            followers.append(self._follow)
            for control in list(living):
                self._follow(control)
            self._begin_file()  # last: what is there is replaced
        except BaseException:
            self._stop()
            self._forget()
            raise
        return self

    def _begin_file(self) -> None:
        """Make the file, where it stays if the program changes its directory."""
        try:
            self._file = self._path.absolute()
            with self._file.open("w"):
                pass
        except OSError as error:
            what = f"the trace cannot be written to {str(self._path)!r}: {error.strerror}"
            fix = "choose a file in a directory that is there"
            raise SpecError(what, fix=_fix(error, fix)) from error

    def _follow(self, control: Control) -> None:
        """Let a batcher take part."""
        try:
            memory = control.begin_trace(self._start_ns, self._n_events)
        except (OSError, OverflowError) as error:
            n_processes = control.n_workers + 1
            what = (
                f"the system does not give the memory for max_events={self._n_events} events of "
                f"each of {n_processes} processes: {error}"
            )
            raise SpecError(what, fix=_fix(error, "lower max_events")) from error
        self._traced.append(_Traced(control, memory))

    def _stop(self) -> None:
        """Let nobody note events any more."""
        followers.clear()
        for traced in self._traced:
            traced.control.end_trace()

    def _forget(self) -> None:
        """Give back what the events are in."""
        for traced in self._traced:
            traced.memory.close()
        self._traced.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_ns = time.monotonic_ns()
        self._stop()
        try:
            with self._file.open("w") as file:
                self._write(file, end_ns)
        finally:
            self._forget()

    def _write(self, file: TextIO, end_ns: int) -> None:
        """Write the file, one event per line."""
        n_left_out = sum(traced.memory.n_left_out() for traced in self._traced)
        file.write('{"displayTimeUnit": "ms",\n"otherData": ')
        json.dump({"start_ns": self._start_ns, "events_left_out": n_left_out}, file)
        file.write(',\n"traceEvents": [')
        separator = "\n"
        for number, traced in enumerate(self._traced):
            tracks = _Tracks(traced.control.name, number * _TRACKS, self._start_ns, end_ns)
            for event in _events_of(traced, tracks):
                file.write(separator)
                json.dump(event, file)
                separator = ",\n"
        file.write("\n]}\n")


def _fix(error: Exception, otherwise: str) -> str:
    """What to do about something that the system does not give."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "close files, or raise the limit on their number (ulimit -n)"
    return otherwise


@dataclass(frozen=True)
class _Traced:
    """What takes part.

    Attributes:
        control: Its record.
        memory: Its events.
    """

    control: Control
    memory: EventMemory


def _events_of(traced: _Traced, tracks: _Tracks) -> Iterator[Json]:
    """All events of a batcher as they are in the file, with the names of processes and tracks."""
    memory, n_workers = traced.memory, traced.control.n_workers
    yield from _caller_events(memory.events(0), tracks)
    for worker in range(n_workers):
        yield from _worker_events(worker, memory.events(worker + 1), tracks)
    yield from tracks.names()


class _Tracks:
    """Makes events as they are in the file, and knows which processes and tracks they are on.

    Args:
        name: What the workers belong to.
        first: Numbers of tracks begin here.
        start_ns: When the trace begins.
        end_ns: When it ends.
    """

    def __init__(self, name: str, first: int, start_ns: int, end_ns: int) -> None:
        self.end_ns = end_ns
        self.name = name
        self._first = first
        self._start_ns = start_ns
        self._processes: dict[int, str] = {}
        self._tracks: dict[tuple[int, int], str] = {}

    def process(self, pid: int, name: str) -> None:
        """Name a process, unless it has a name already."""
        self._processes.setdefault(pid, name)

    def span(
        self,
        pid: int,
        track: tuple[int, str],
        name: str,
        start_ns: int,
        end_ns: int,
        **numbers: Any,
    ) -> Json:
        """Something that took time, on the track of a process; cut to the time of the trace.

        Args:
            pid: The process.
            track: Number and name of the track.
            name: What happened.
            start_ns: When it began.
            end_ns: When it ended.
            **numbers: What else is known of it, and ``cat``: its kind.
        """
        number, called = self._first + track[0], track[1]
        self._tracks.setdefault((pid, number), called)
        start_ns = min(max(start_ns, self._start_ns), self.end_ns)
        end_ns = min(max(end_ns, start_ns), self.end_ns)
        category = numbers.pop("cat", "call")
        return {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": (start_ns - self._start_ns) / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "pid": pid,
            "tid": number,
            "args": numbers,
        }

    def names(self) -> Iterator[Json]:
        """Names of processes and tracks."""
        for pid, name in self._processes.items():
            yield _name_event("process_name", pid, 0, name)
        for (pid, number), name in self._tracks.items():
            yield _name_event("thread_name", pid, number, f"{self.name}: {name}")


def _name_event(kind: str, pid: int, tid: int, name: str) -> Json:
    args = {"name": name}
    return {"name": kind, "cat": "names", "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


# What a worker has noted -------------------------------------------------------------------------


@dataclass
class _Episode:
    """An episode that a lane runs.

    Attributes:
        start_ns: When it began; for one that had begun before, when it was first heard of.
        request: Its request, the last of several windows.
        number: Its number.
        n_before: Steps that it had made then.
        pause_ns: Since when it waits for a slot, 0 if it does not.
        waits_ns: When such waits began and ended.
    """

    start_ns: int
    request: int
    number: int
    n_before: int
    pause_ns: int
    waits_ns: list[tuple[int, int]]


def _worker_events(worker: int, events: Iterable[Event], tracks: _Tracks) -> Iterator[Json]:
    """What a worker did, and those that took its place."""
    running: dict[int, _Episode] = {}
    pid, last_ns = 0, 0
    loop = _LOOP, f"worker {worker}, loop"
    for event in events:
        if event.pid != pid:
            # The lanes of a process that is gone did nothing after its last event.
            yield from _interrupted(running, pid, worker, last_ns, tracks)
            pid = event.pid
            tracks.process(pid, f"{tracks.name}: worker {worker}")
        last_ns = max(last_ns, event.end_ns)
        if event.kind in _CALLS:
            name = _CALLS[Kind(event.kind)]
            lanes = {"lanes": event.a} if event.a else {}
            yield tracks.span(pid, loop, name, event.start_ns, event.end_ns, **lanes)
        elif event.kind == Kind.LANE_BEGINS:
            _begin(running, event)
        elif event.kind == Kind.LANE_PAUSES and event.a in running:
            running[event.a].pause_ns = event.start_ns
        elif event.kind == Kind.LANE_ENDS and event.a in running:
            episode = running.pop(event.a)
            ends = {"steps": event.b, "complete": bool(event.c)}
            yield from _episode(episode, event.a, pid, worker, event.start_ns, tracks, **ends)
    yield from _interrupted(running, pid, worker, tracks.end_ns, tracks)


def _begin(running: dict[int, _Episode], event: Event) -> None:
    """A lane begins an episode, or goes on with its own in another slot."""
    episode = running.get(event.a)
    if episode is None:
        episode = _Episode(event.start_ns, event.b, event.c, event.d, 0, [])
        running[event.a] = episode
    elif episode.pause_ns:
        episode.waits_ns.append((episode.pause_ns, event.start_ns))
        episode.pause_ns, episode.request = 0, event.b


def _interrupted(
    running: dict[int, _Episode], pid: int, worker: int, end_ns: int, tracks: _Tracks
) -> Iterator[Json]:
    """The episodes of which the end was not noted."""
    for lane, episode in running.items():
        yield from _episode(episode, lane, pid, worker, end_ns, tracks, complete=False)
    running.clear()


def _episode(
    episode: _Episode,
    lane: int,
    pid: int,
    worker: int,
    end_ns: int,
    tracks: _Tracks,
    **numbers: Any,
) -> Iterator[Json]:
    """An episode of a lane, and its waits in the middle of it."""
    track = _FIRST_LANE + lane, f"worker {worker}, lane {lane}"
    numbers = {"request": episode.request, "episode": episode.number, **numbers}
    if episode.n_before:
        numbers["steps_before"] = episode.n_before
    name = f"episode {episode.number}"
    yield tracks.span(pid, track, name, episode.start_ns, end_ns, cat="episode", **numbers)
    if episode.pause_ns:
        episode.waits_ns.append((episode.pause_ns, end_ns))
    for start_ns, stop_ns in episode.waits_ns:
        yield tracks.span(pid, track, "waits for a slot", start_ns, stop_ns, cat="wait")


# What the caller has noted -----------------------------------------------------------------------


def _caller_events(events: Iterable[Event], tracks: _Tracks) -> Iterator[Json]:
    """What workers were doing as the caller knows it, its requests, and its waits."""
    states: dict[int, Event] = {}
    requests: dict[int, tuple[Event, int]] = {}  # with their track
    pid = os.getpid()
    tracks.process(pid, "caller")
    for event in events:
        if event.kind == Kind.CALLER_WAITS:
            track = _CALLER, "caller"
            yield tracks.span(pid, track, "get waits", event.start_ns, event.end_ns, cat="wait")
        elif event.kind == Kind.WORKER_STATE:
            before = states.get(event.a)
            if before is not None and _state_of(before) == _state_of(event):
                states[event.a] = before._replace(c=before.c or event.c)  # it has a process now
                continue
            if before is not None:
                yield _state(before, event.start_ns, pid, tracks)
            states[event.a] = event
        elif event.kind == Kind.REQUEST_BEGINS:
            taken = {track for _, track in requests.values()}
            free = next(n for n in range(len(taken) + 1) if n not in taken)
            requests[event.a] = event, free
        elif event.kind == Kind.REQUEST_ENDS and event.a in requests:
            yield _request(*requests.pop(event.a), event.start_ns, bool(event.b), pid, tracks)
    for begun, track_number in requests.values():
        yield _request(begun, track_number, tracks.end_ns, False, pid, tracks)
    for state in states.values():
        yield _state(state, tracks.end_ns, pid, tracks)


def _state_of(event: Event) -> str:
    """What a worker was doing from an event on."""
    return state_name(State(event.b), n_starts=event.d)


def _state(event: Event, end_ns: int, pid: int, tracks: _Tracks) -> Json:
    """What a worker was doing for some time, in the first process that it had then."""
    worker, worker_pid, n_starts = event.a, event.c, event.d
    track = _FIRST_WORKER + worker, f"worker {worker}"
    numbers = {"worker": worker, "process": worker_pid, "restarts": max(0, n_starts - 1)}
    name = _state_of(event)
    return tracks.span(pid, track, name, event.start_ns, end_ns, cat="worker", **numbers)


def _request(
    event: Event, track_number: int, end_ns: int, is_complete: bool, pid: int, tracks: _Tracks
) -> Json:
    track = _FIRST_REQUEST + track_number, f"requests {track_number}"
    numbers = {"request": event.a, "rows": event.b, "complete": is_complete}
    name = f"request {event.a}"
    return tracks.span(pid, track, name, event.start_ns, end_ns, cat="request", **numbers)
