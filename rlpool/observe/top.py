"""``python -m rlpool top``: what a running program's workers do, seen from outside.

It reads the record that the program's workers share anyway, through ``/proc``: nothing is sent to
the program, which neither waits nor notices.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from rlpool.errors import RlpoolError, UsageError
from rlpool.machine.limits import has_ended, human
from rlpool.observe.control import FILE_NAME, FORMAT, Control, Head, control_bytes
from rlpool.observe.stats import LaneStats, Stats, StatsReader, WorkerStats

EVERY_S = 0.5
"""Twice a second: what people can follow."""

_SHOWN_LANES = 64
"""Lanes of a worker that are shown; JSON has all."""

_OTHERS = "python -m rlpool top lists the programs that there are"
"""What to do about a process that is not there."""

_COLUMNS: dict[str, Callable[[WorkerStats], str]] = {
    "worker": lambda worker: str(worker.worker),
    "pid": lambda worker: str(worker.pid),
    "state": lambda worker: worker.state,
    "steps/s": lambda worker: f"{worker.steps_per_s:,.0f}",
    "env": lambda worker: f"{worker.env_share:.0%}",
    "agent": lambda worker: f"{worker.agent_share:.0%}",
    "waiting": lambda worker: f"{worker.waiting_share:.0%}",
    "RSS": lambda worker: human(worker.rss_bytes),
    "private": lambda worker: human(worker.private_bytes),
    "restarts": lambda worker: str(worker.restarts),
    "episodes": lambda worker: f"{worker.n_episodes:,}",
    "steps": lambda worker: f"{worker.n_steps:,}",
}
"""What a table shows of a worker, by the heading of the column."""

_TEXT_COLUMNS = ("worker", "pid", "state")
"""Columns that hold text; the others hold numbers."""

_BY_IMPORTANCE = (
    *("pid", "steps/s", "state", "env", "agent", "worker"),
    *("waiting", "RSS", "episodes", "restarts", "steps", "private"),
)
"""Columns in the order in which narrow terminals have room for them: six fit into 40 characters."""

_UNLIMITED = 10_000
"""Characters of a line where nothing says how many there are."""

_EVERY_PLAIN_S = 2.0
"""Between two tables where there is no terminal, and every one of them stays."""


class Program:
    """A running program, seen from outside.

    Args:
        pid: Its process.

    Raises:
        UsageError: If there is no such process, it has ended or belongs to somebody else, or it
            has no batcher and no ``ParallelEnvManager``.
    """

    def __init__(self, pid: int) -> None:
        if not Path(f"/proc/{pid}").exists():
            raise UsageError(f"there is no process {pid}", fix=_OTHERS)
        self.pid = pid
        self._owner = pid
        self._readers: dict[int, StatsReader] = {}  # by the number of the file that they read
        if self.read():
            return
        if self._owner != pid:
            what = f"process {pid} is a worker of process {self._owner}"
            raise UsageError(what, fix=f"python -m rlpool top {self._owner}")
        raise self.shows_nothing()

    def shows_nothing(self) -> UsageError:
        """What to raise if it has neither a batcher nor a manager."""
        what = f"process {self.pid} has no batcher and no ParallelEnvManager"
        return UsageError(what, fix="look again when it has made one, or give another process")

    def read(self) -> list[Stats]:
        """What the workers of each of its batchers and managers do, the oldest first.

        Raises:
            UsageError: If the process has ended, whether or not its parent has noticed, or may not
                be looked at.
        """
        readers = {}
        for path in _control_files(self.pid):
            with suppress(OSError):  # closed meanwhile
                number = path.stat().st_ino
                known = self._readers.get(number)
                control = None if known else _opened(path, self.pid)
                if control is not None:
                    self._owner = int(control.header[Head.OWNER_PID])
                    known = StatsReader(control) if self._owner == self.pid else None
                if known is not None:
                    readers[number] = known
        self._readers = dict(sorted(readers.items()))
        all_stats = [reader.read() for reader in self._readers.values()]
        # Last, since it may end at any time; what ends has no files, or none that may be read.
        if has_ended(self.pid):
            raise UsageError(f"process {self.pid} has ended", fix=_OTHERS)
        return all_stats


def programs() -> list[int]:
    """Processes of this user that have a batcher or a ``ParallelEnvManager``."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        with suppress(UsageError, OSError):
            if directory.stat().st_uid == os.getuid():
                Program(pid)
                found.append(pid)
    return sorted(found)


def _control_files(pid: int) -> list[Path]:
    """The shared records that a process has open; none if it has ended.

    Raises:
        UsageError: If it may not be looked at.
    """
    directory = Path(f"/proc/{pid}/fd")
    try:
        files = list(directory.iterdir())
    except OSError:
        if has_ended(pid):
            return []
        what = f"process {pid} belongs to another user, or may not be looked at"
        fix = "run it as that user; in a container, run it inside"
        raise UsageError(what, fix=fix) from None
    found = []
    for file in files:
        with suppress(OSError):  # closed meanwhile
            if os.readlink(file).startswith(f"/memfd:{FILE_NAME} "):
                found.append(file)
    return found


def _opened(path: Path, pid: int) -> Control | None:
    """A shared record, read only; ``None`` if it is just being made.

    Raises:
        UsageError: If another version of rlpool wrote it.
    """
    with path.open("rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if not n_bytes:
            return None  # it is being made
        memory = mmap.mmap(file.fileno(), n_bytes, prot=mmap.PROT_READ)
    words = np.frombuffer(memory, np.int64)
    written, n_workers = int(words[Head.FORMAT]), int(words[Head.N_WORKERS])
    if not written:
        return None
    if written != FORMAT or n_bytes < control_bytes(n_workers):
        what = f"process {pid} runs another version of rlpool"
        raise UsageError(what, fix="use python -m rlpool top of the environment that it runs in")
    return Control(words, n_workers)


# The command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m rlpool top``; returns the exit code.

    Args:
        arguments: What follows ``top``, by default that of this process.
    """
    text = "show what the workers of a running program do"
    parser = argparse.ArgumentParser(prog="python -m rlpool top", description=text)
    parser.add_argument("pid", type=int, nargs="?", help="its process (default: list those there)")
    parser.add_argument("--once", action="store_true", help="print it once, half a second's worth")
    parser.add_argument("--json", action="store_true", help="print JSON, with --once")
    options = parser.parse_args(arguments)
    if options.json and options.pid is not None and not options.once:
        parser.error("--json goes with --once")
    try:
        if options.pid is None:
            _list(options.json)
        elif options.once:
            _show_once(Program(options.pid), options.json)
        else:
            _show_live(Program(options.pid))
    except RlpoolError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _list(as_json: bool) -> None:
    """Print the programs of this user."""
    found = [{"pid": pid, "command": _command(pid)} for pid in programs()]
    if as_json:
        sys.stdout.write(json.dumps({"programs": found}, indent=2) + "\n")
    elif not found:
        sys.stdout.write("no running program of this user has a batcher or a ParallelEnvManager\n")
    else:
        lines = [f"{program['pid']:>8}  {program['command']}" for program in found]
        sys.stdout.write("\n".join(["     pid  command", *lines]) + "\n")


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""


def _show_once(program: Program, as_json: bool) -> None:
    """Print rates of half a second, since those of a whole life say little about now.

    Raises:
        UsageError: If there is nothing left to show after it.
    """
    time.sleep(EVERY_S)
    all_stats = program.read()
    if not all_stats:  # closed meanwhile
        raise program.shows_nothing()
    if as_json:
        report = {"pid": program.pid, "batchers": [asdict(stats) for stats in all_stats]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    sys.stdout.write(_text(all_stats, _width()))


def _show_live(program: Program) -> None:
    """Show a table per batcher until the program ends, or Ctrl-C; without a terminal, plain lines.

    Raises:
        UsageError: If there is a terminal and rich is not installed, or the program may no longer
            be looked at.
    """
    if not sys.stdout.isatty():
        for all_stats in _looks(program, _EVERY_PLAIN_S):
            sys.stdout.write(_text(all_stats, _width()))
            sys.stdout.flush()
    else:
        try:
            from rich.live import Live
            from rich.text import Text
        except ImportError:
            what = "the display needs the package rich, which is not installed"
            fix = 'pip install "rlpool[top]", or print it once: python -m rlpool top PID --once'
            raise UsageError(what, fix=fix) from None
        with Live(auto_refresh=False, screen=True) as display:
            for all_stats in _looks(program, EVERY_S):
                display.update(Text(_text(all_stats, display.console.width)), refresh=True)
    sys.stdout.write(f"process {program.pid} has ended\n")


def _looks(program: Program, every_s: float) -> Iterator[list[Stats]]:
    """What a program's workers do, again and again until it ends."""
    while True:
        time.sleep(every_s)
        try:
            all_stats = program.read()
        except UsageError:
            if not has_ended(program.pid):
                raise
            return
        yield all_stats


def _width() -> int:
    """Characters of a line, as the terminal or the variable COLUMNS says."""
    return shutil.get_terminal_size((_UNLIMITED, 0)).columns


def _text(all_stats: Sequence[Stats], width: int) -> str:
    """A table per batcher, with the columns for which a line has room, and its lanes."""
    wrap = partial(textwrap.wrap, width=width, subsequent_indent="  ")
    lines: list[str] = []
    for stats in all_stats:
        lines += wrap(_title(stats))
        rows = [{name: name for name in _COLUMNS}]
        rows += [{n: show(worker) for n, show in _COLUMNS.items()} for worker in stats.workers]
        widths = {name: max(len(row[name]) for row in rows) for name in _COLUMNS}
        shown: set[str] = set()
        for name in _BY_IMPORTANCE:
            if sum(widths[each] + 2 for each in {*shown, name}) - 2 > width:
                break
            shown.add(name)
        for row in rows:
            aligned = [
                f"{row[name]:{'<' if name in _TEXT_COLUMNS else '>'}{widths[name]}}"
                for name in _COLUMNS
                if name in shown
            ]
            lines.append("  ".join(aligned).rstrip())
        for worker in stats.workers:
            lines += wrap(f"worker {worker.worker}: {_lanes(worker.lanes)}") if worker.lanes else []
    return "\n".join([*lines, ""])


def _title(stats: Stats) -> str:
    requests = [f"request {r.number}: {r.n_finished}/{r.n_episodes}" for r in stats.requests]
    parts = [f"{stats.name} of process {stats.pid}", f"{stats.steps_per_s:,.0f} steps/s"]
    return ", ".join([*parts, f"{stats.restarts} restarts", *(requests or ["no request"])])


def _lanes(lanes: Sequence[LaneStats]) -> str:
    """Episode and step of each lane; one that waits is marked, and ``-`` is idle."""
    marks = {"waiting": "w", "running": ""}
    shown = [
        "-" if lane.episode is None else f"{lane.episode}:{lane.step}{marks[lane.state]}"
        for lane in lanes[:_SHOWN_LANES]
    ]
    return " ".join(shown + ["..."] * (len(lanes) > _SHOWN_LANES))
