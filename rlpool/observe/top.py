"""``python -m rlpool top``: activity of a running program's workers, seen from outside.

It reads the shared record of the program's workers through the kernel: nothing is sent to the
program, which neither waits nor notices.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from rlpool.errors import RlpoolError, UsageError
from rlpool.machine.platform import (
    anonymous_files,
    command_of,
    has_ended,
    human,
    own_processes,
    require_linux,
)
from rlpool.observe.control import FILE_NAME, FORMAT, HEADER_WORDS, Control, Head
from rlpool.observe.stats import LaneStats, Stats, StatsReader, WorkerStats

EVERY_S = 0.5
"""Twice a second, about as fast as people can follow."""

_SHOWN_LANES = 64
"""Lanes shown per worker."""

_COLUMNS: dict[str, Callable[[WorkerStats], str]] = {
    "worker": lambda worker: str(worker.worker),
    "pid": lambda worker: str(worker.pid),
    "state": lambda worker: worker.state,
    "steps/s": lambda worker: f"{worker.steps_per_s:,.0f}",
    "env": lambda worker: f"{worker.env_share:.0%}",
    "agent": lambda worker: f"{worker.agent_share:.0%}",
    "waiting": lambda worker: f"{worker.waiting_share:.0%}",
    "RSS": lambda worker: human(worker.rss_bytes),
    "restarts": lambda worker: str(worker.restarts),
    "episodes": lambda worker: f"{worker.n_episodes:,}",
    "steps": lambda worker: f"{worker.n_steps:,}",
}
"""Columns of a worker's table by heading."""

_CLEAR = "\x1b[H\x1b[J"
"""Moves a terminal's cursor to the top, and clears the screen below it."""


class Program:
    """A running program, seen from outside.

    Args:
        pid: Its process.

    Raises:
        UsageError: If the process does not exist, has ended or belongs to another user, or has no
            batcher and no ``ParallelEnvManager``.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._readers: dict[int, StatsReader] = {}  # by the inode of their file
        if not self.read():
            message = f"process {pid} has no batcher and no ParallelEnvManager"
            raise UsageError(message, fix="try again once it has made one, or give another process")

    def read(self) -> list[Stats]:
        """Return statistics of each of its batchers and managers, the oldest first.

        Raises:
            UsageError: If the process has ended, whether or not its parent has noticed, or access
                is denied.
        """
        readers = {}
        try:
            for file in anonymous_files(self.pid, FILE_NAME):
                with suppress(OSError):  # closed meanwhile
                    number = file.stat().st_ino
                    if reader := self._readers.get(number) or _reader_of(file, self.pid):
                        readers[number] = reader
        except OSError:
            if not has_ended(self.pid):
                message = f"process {self.pid} belongs to another user, or may not be inspected"
                fix = "run it as that user; in a container, run it inside"
                raise UsageError(message, fix=fix) from None
        self._readers = dict(sorted(readers.items()))
        all_stats = [reader.read() for reader in self._readers.values()]
        # Last, since it may end at any time; an ending process has no readable files.
        if has_ended(self.pid):
            fix = "python -m rlpool top lists the running programs"
            raise UsageError(f"process {self.pid} does not exist or has ended", fix=fix)
        return all_stats


def programs() -> list[int]:
    """Processes of this user that have a batcher or a ``ParallelEnvManager``."""
    found = []
    for pid in own_processes():
        with suppress(UsageError):
            Program(pid)
            found.append(pid)
    return sorted(found)


def _reader_of(path: Path, pid: int) -> StatsReader | None:
    """Open a shared record; ``None`` if it is incomplete, or the process is a worker.

    Raises:
        UsageError: If another version of rlpool wrote it.
    """
    words = np.fromfile(path, np.int64, HEADER_WORDS)
    if not words.any() or words[Head.OWNER_PID] != pid:
        return None
    if words[Head.FORMAT] != FORMAT:
        message = f"process {pid} runs another version of rlpool"
        raise UsageError(message, fix="use python -m rlpool top of its own environment")
    words = np.asarray(np.memmap(path, np.int64, "r"))
    return StatsReader(Control(words, int(words[Head.N_WORKERS])))


# The command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m rlpool top``; returns the exit code.

    Args:
        arguments: Arguments after ``top``, by default those of this process.
    """
    text = "show the activity of a running program's workers"
    parser = argparse.ArgumentParser(prog="python -m rlpool top", description=text)
    parser.add_argument("pid", type=int, nargs="?", help="its process (default: list all)")
    parser.add_argument("--once", action="store_true", help="print it once, after half a second")
    options = parser.parse_args(arguments)
    try:
        require_linux("python -m rlpool top", "call stats() in the program itself")
        if options.pid is None:
            sys.stdout.write("     pid  command\n")
            for pid in programs():
                sys.stdout.write(f"{pid:>8}  {command_of(pid)}\n")
        else:
            _show(Program(options.pid), options.once)
    except RlpoolError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _show(program: Program, once: bool) -> None:
    """Show a table per batcher, once or until the program ends.

    Raises:
        UsageError: When there is nothing to show, or access is denied.
    """
    is_live = sys.stdout.isatty() and not once
    while True:
        time.sleep(EVERY_S)  # for rates over half a second, as those of a whole run say little
        sys.stdout.write((_CLEAR if is_live else "") + _text(program.read()))
        sys.stdout.flush()
        if once:
            return


def _text(all_stats: Sequence[Stats]) -> str:
    """Make a table per batcher with its lanes; lines are cut at the terminal's width."""
    lines: list[str] = []
    for stats in all_stats:
        requests = [f"request {r.number}: {r.n_finished}/{r.n_episodes}" for r in stats.requests]
        title = f"{stats.name} of process {stats.pid}, {stats.steps_per_s:,.0f} steps/s"
        lines.append(
            ", ".join([title, f"{stats.restarts} restarts", *(requests or ["no request"])])
        )
        rows = [list(_COLUMNS)]
        rows += [[show(worker) for show in _COLUMNS.values()] for worker in stats.workers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(map(str.rjust, row, widths)) for row in rows]
        for worker in stats.workers:
            if worker.lanes:
                cells = [*map(_lane, worker.lanes[:_SHOWN_LANES])]
                cells += ["..."] * (len(worker.lanes) > _SHOWN_LANES)
                lines.append(f"worker {worker.worker}: {' '.join(cells)}")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "".join(f"{line[:width]}\n" for line in lines)


def _lane(lane: LaneStats) -> str:
    """Return episode and step of a lane, ``-`` if it is idle; ``w`` marks a waiting lane."""
    mark = "w" if lane.state == "waiting" else ""
    return "-" if lane.episode is None else f"{lane.episode}:{lane.step}{mark}"
