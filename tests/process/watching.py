"""Waiting for conditions, inspecting processes, running scripts."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from rlpool import TemporalDictTensor

from support.staying import stays

TESTS = Path(__file__).resolve().parents[1]

POLL_S = 0.005
"""How often a condition is looked at."""

START_S = 60.0
"""Longest wait for what has no bar of its own, such as a script's start on a busy machine."""


def wait_until(condition: Callable[[], Any], timeout_s: float = START_S) -> float:
    """Wait for a condition and return the waiting time in seconds."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        assert waited < timeout_s, f"still waiting after {waited:.1f} s"
        time.sleep(POLL_S)
    return time.monotonic() - start


def worker_pids(pid: int | None = None) -> set[int]:
    """Return a process's descendants, except those that live as long as it does."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True) if not stays(child)}


@contextlib.contextmanager
def in_new(method: str, function: Any, *arguments: Any, exitcode: int = 0) -> Iterator[Any]:
    """Run a function in a new process during this context, which yields its pipe."""
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *arguments))
    with warnings.catch_warnings():  # Python 3.12 warns about forking with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()  # the end of the child ends the pipe
    try:
        yield here
    finally:
        here.close()
        process.join(START_S)
    assert process.exitcode == exitcode
    process.close()


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_files(pid: int | str) -> set[str]:
    """Return the inodes of rlpool's anonymous shared memory that a process has mapped or open.

    The page shared with its template is excluded, since it lives as long as the process.
    """
    files = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if _is_of_workers(line):
                files.add(line.split()[4])
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if _is_of_workers(os.readlink(entry.path)):
                    files.add(str(os.stat(entry.path).st_ino))
    return files


def _is_of_workers(file: str) -> bool:
    return "memfd:rlpool" in file and "memfd:rlpool-template" not in file


def who_holds(files: set[str]) -> dict[str, set[str]]:
    """Return all processes that have any of this memory mapped or open."""
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
    held = {pid: shared_files(pid) & files for pid in pids}
    return {pid: of_pid for pid, of_pid in held.items() if of_pid}


def n_descriptors() -> int:
    """Return the number of descriptors of this process."""
    return len(os.listdir("/proc/self/fd")) - 1  # one belongs to the listing


def assert_equal(one: TemporalDictTensor | None, other: TemporalDictTensor | None) -> None:
    """Check that two results and their infos are the same, bit for bit."""
    assert one is not None
    assert other is not None
    assert list(one.keys()) == list(other.keys())
    assert one.lengths.tolist() == other.lengths.tolist()
    for mine, theirs in ((one, other), (one.info, other.info)):
        for key, values in theirs.items():
            assert (mine[key].dtype, mine[key].shape) == (values.dtype, values.shape), key
            assert torch.equal(mine[key], values), key


def assert_all_equal(
    some: Iterable[TemporalDictTensor | None], others: Iterable[TemporalDictTensor | None]
) -> None:
    """Check that results are pairwise the same; ``None`` equals only ``None``."""
    for one, other in zip(some, others, strict=True):
        if one is not other:
            assert_equal(one, other)


@dataclass
class Struck:
    """The file in which a fault leaves a record.

    Attributes:
        path: Its path.
    """

    path: str

    @property
    def is_there(self) -> bool:
        return os.path.exists(self.path)

    @property
    def seed(self) -> int:
        return self._note["seed"]

    @property
    def pid(self) -> int:
        return self._note["pid"]

    @property
    def seconds_ago(self) -> float:
        return time.time() - self._note["time"]

    @property
    def _note(self) -> dict[str, Any]:
        return json.loads(Path(self.path).read_text())


class Script:
    """A Python script that runs in its own process and session.

    Its output is written to files: waiting for the end of a pipe would mean waiting for every
    process that holds its other end, including orphaned workers.

    Args:
        directory: Directory of the files.
        arguments: Command-line arguments of the interpreter.
    """

    def __init__(self, directory: Path, arguments: list[str]) -> None:
        directory.mkdir()
        self._out, self._err = directory / "stdout", directory / "stderr"
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        with (
            open(self._out, "w") as out,
            open(self._err, "w") as err,
        ):
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        self.pid = self._process.pid
        self.family: list[psutil.Process] = []
        self.memory: set[str] = set()

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait_for_line(self, line: str) -> None:
        """Wait until the script prints a line, and record its processes at that time."""
        wait_until(lambda: line in self.stdout.split() or self.returncode is not None)
        assert self.returncode is None, self.stderr
        self.note_family()

    def note_family(self) -> None:
        """Record the processes that must be gone in the end, and the memory they share."""
        self.family = psutil.Process(self.pid).children(recursive=True)
        for pid in (self.pid, *(process.pid for process in self.family)):
            self.memory |= shared_files(pid)

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the script, or to all processes of its session, as Ctrl-C does."""
        (os.killpg if group else os.kill)(self.pid, number)

    def finish(self, timeout_s: float = START_S) -> None:
        """Wait for the end of the script."""
        wait_until(lambda: self.returncode is not None, timeout_s)

    def left_after(self, timeout_s: float) -> list[psutil.Process]:
        """Return its descendants that are still running after some time."""
        deadline = time.monotonic() + timeout_s
        while left := [process for process in self.family if is_running(process.pid)]:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        return left

    def kill(self) -> None:
        """Kill the script and all its descendants."""
        if self.returncode is None:
            self.note_family()
            self._process.kill()
            self._process.wait()
        for process in self.left_after(0.0):
            process.kill()
