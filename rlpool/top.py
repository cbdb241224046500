"""``python -m rlpool top``: what a running program's workers do, seen from outside.

It reads the record that the program's workers share anyway, through ``/proc``: nothing is sent to
the program, which neither waits nor notices.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlpool.errors import RlpoolError, UsageError
from rlpool.machine.limits import has_ended, human
from rlpool.observe.control import FILE_NAME, FORMAT, Control, Head, control_bytes
from rlpool.observe.stats import LaneStats, Stats, StatsReader, WorkerStats

if TYPE_CHECKING:
    from rich.table import Table

EVERY_S = 0.5
"""Twice a second: what people can follow."""

_SHOWN_LANES = 64
"""Lanes of a worker that a table shows; JSON has all."""

_OTHERS = "python -m rlpool top lists the programs that there are"
"""What to do about a process that is not there."""

_COLUMNS = (
    *("worker", "pid", "state"),
    *("steps/s", "env", "agent", "waiting"),
    *("RSS", "private", "restarts", "episodes", "steps"),
)

_TEXT_COLUMNS = 3
"""Columns at the left that hold text; the others hold numbers."""


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
    for stats in all_stats:
        rows = [list(_COLUMNS), *(_cells(worker) for worker in stats.workers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [_title(stats)]
        for row in rows:
            cells = [
                cell.ljust(width) if n < _TEXT_COLUMNS else cell.rjust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        lines += [f"worker {w.worker}: {_lanes(w.lanes)}" for w in stats.workers if w.lanes]
        sys.stdout.write("\n".join(lines) + "\n")


def _show_live(program: Program) -> None:
    """Show a table per batcher until the program ends, or Ctrl-C.

    Raises:
        UsageError: If rich is not installed, or the program may no longer be looked at.
    """
    try:
        from rich.console import Group
        from rich.live import Live
    except ImportError:
        what = "the display needs the package rich, which is not installed"
        fix = 'pip install "rlpool[top]", or print it once: python -m rlpool top PID --once'
        raise UsageError(what, fix=fix) from None
    with Live(auto_refresh=False, screen=sys.stdout.isatty()) as display:
        while True:
            time.sleep(EVERY_S)
            try:
                all_stats = program.read()
            except UsageError:
                if not has_ended(program.pid):
                    raise
                break
            display.update(Group(*map(_table, all_stats)), refresh=True)
    sys.stdout.write(f"process {program.pid} has ended\n")


def _table(stats: Stats) -> Table:
    """A table of rich."""
    from rich.table import Table

    table = Table(title=_title(stats), title_justify="left")
    for n, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if n < _TEXT_COLUMNS else "right")
    table.add_column("lanes: episode:step", overflow="fold")
    for worker in stats.workers:
        table.add_row(*_cells(worker), _lanes(worker.lanes))
    return table


def _title(stats: Stats) -> str:
    requests = [f"request {r.number}: {r.n_finished}/{r.n_episodes}" for r in stats.requests]
    parts = [f"{stats.name} of process {stats.pid}", f"{stats.steps_per_s:,.0f} steps/s"]
    return ", ".join([*parts, f"{stats.restarts} restarts", *(requests or ["no request"])])


def _cells(worker: WorkerStats) -> list[str]:
    """A worker's row of a table."""
    shares = worker.env_share, worker.agent_share, worker.waiting_share
    sizes = worker.rss_bytes, worker.private_bytes
    return [
        str(worker.worker),
        str(worker.pid),
        worker.state,
        f"{worker.steps_per_s:,.0f}",
        *(f"{share:.0%}" for share in shares),
        *map(human, sizes),
        str(worker.restarts),
        f"{worker.n_episodes:,}",
        f"{worker.n_steps:,}",
    ]


def _lanes(lanes: Sequence[LaneStats]) -> str:
    """Episode and step of each lane; one that waits is marked, and ``-`` is idle."""
    marks = {"waiting": "w", "running": ""}
    shown = [
        "-" if lane.episode is None else f"{lane.episode}:{lane.step}{marks[lane.state]}"
        for lane in lanes[:_SHOWN_LANES]
    ]
    return " ".join(shown + ["..."] * (len(lanes) > _SHOWN_LANES))
