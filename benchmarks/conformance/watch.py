"""Run a process of checks with deadlines, and detect anything it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks.conformance.checks.every import CHECKS

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = {"values": 120, "selection": 120, "seeds": 120, "faults": 45, "limits": 45}
IMPORT_S = 60  # until the first check begins
SIGNAL_AFTER_S = 2  # from ``ready`` to the signal
END_S = 25  # from the last check, or the signal, to the end of the process
LEFT_S = 10  # from the end of the process to that of all others
MOUNT = 'mount -t tmpfs -o size="$1"m tmpfs /dev/shm && shift && exec "$@"'


@functools.cache
def namespace() -> tuple[str, ...]:
    """Return a command prefix that provides a private /dev/shm; empty where not permitted."""
    options = ["-m"] if os.geteuid() == 0 else ["-Urm"]
    command = ("unshare", *options, "sh", "-c", MOUNT, "sh")
    works = shutil.which("unshare") and subprocess.call([*command, "64", "true"]) == 0
    return command if works else ()


def with_shared_memory(shm_mb: int) -> list[str]:
    """Return a prefix that limits /dev/shm, or else the size of any file to below 64 MB."""
    if namespace():
        return [*namespace(), str(shm_mb)]
    return ["prlimit", f"--fsize={shm_mb * 2**20}"] if shm_mb < 1024 else []


class Watched:
    """A process that runs some checks of a library, and all its descendants."""

    def __init__(self, python: str, library: str, names: list[str], start_s: float) -> None:
        self.names, self.cells, self.about, self.token = names, {}, {}, uuid.uuid4().hex
        self.start_s = start_s
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.report, self.log = (Path(self.folder.name) / name for name in ("report", "log"))
        self.first = CHECKS[names[0]]
        command = [python, "-m", "benchmarks.conformance.cell", library, str(self.report), *names]
        command = with_shared_memory(self.first.shm_mb) + command
        env = {**os.environ, "CONFORMANCE": self.token, "PYTHONPATH": str(ROOT)}
        with self.log.open("w", encoding="utf-8") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            more = {"env": env, "cwd": self.folder.name, "start_new_session": True}
            self.process = subprocess.Popen(command, **streams, **more)
        self.current, self.since, self.signalled, self.n_read = "", time.monotonic(), False, 0
        self.shm, self.shm_before = -1, set()

    def run(self) -> dict[str, dict[str, Any]]:
        """Return the cells of all checks that started; the last one may have hung."""
        while self.process.poll() is None:
            self.read()
            if time.monotonic() - self.since > self.limit():
                if self.current or self.first.leaves_no is not None or not self.about:
                    self.finish("red", "did not end in time")
                break
            time.sleep(0.02)
        else:
            self.read()
            self.judge_end()
        self.end()
        return self.cells

    def limit(self) -> float:
        """Return the seconds allowed since the last event."""
        if not self.about:
            return IMPORT_S + self.start_s
        is_ending = self.signalled or not self.current
        return self.start_s + (END_S if is_ending else DEADLINE_S[CHECKS[self.current].group])

    def read(self) -> None:
        """Read the events reported by the process."""
        text = self.report.read_text(encoding="utf-8") if self.report.exists() else ""
        lines = text.split("\n")[:-1]
        for line in lines[self.n_read :]:
            self.on_event(json.loads(line))
        self.n_read = len(lines)

    def on_event(self, event: dict[str, Any]) -> None:
        """Handle one event."""
        self.since, kind = time.monotonic(), event.pop("event")
        if kind == "adapter":
            self.about = event
            with contextlib.suppress(OSError):  # it may have ended already
                shm = Path("/proc", str(self.process.pid), "root", "dev", "shm")
                self.shm = os.open(shm, os.O_RDONLY | os.O_DIRECTORY)  # outlives the process
                self.shm_before = set(os.listdir(self.shm))
        elif kind == "begin":
            self.current = event["check"]
        elif kind == "end":
            self.cells[event.pop("check")] = event
            self.current = ""
        elif kind == "ready":
            time.sleep(SIGNAL_AFTER_S)
            self.since, self.signalled = time.monotonic(), self.process.poll() is None
            number = CHECKS[self.current].signal
            send = os.kill if number == signal.SIGKILL else os.killpg  # as a terminal does
            if self.signalled:  # otherwise it ended by itself
                send(self.process.pid, number)

    def finish(self, status: str, message: str) -> None:
        """Record the cell of the running check, or of the only one that has run."""
        cell = {"status": status, "message": message}
        cell["seconds"] = round(time.monotonic() - self.since, 1)
        self.cells[self.current or self.names[0]] = cell

    def judge_end(self) -> None:
        """Check that the process was supposed to end, and that nothing is left behind."""
        if (self.current and not self.signalled) or not (self.current or self.cells):
            self.finish("red", f"the process ended with code {self.process.returncode}")
        elif self.current:
            self.finish("green", "")
        cell = self.cells.get(self.names[0], {})
        if self.first.leaves_no is not None and cell.get("status") == "green":
            until = time.monotonic() + LEFT_S
            while (left := self.left()) and time.monotonic() < until:
                time.sleep(0.1)
            if left:
                self.finish("red", f"left {LEFT_S} s after the end: {', '.join(left)}")

    def left(self) -> list[str]:
        """Return the processes and files in /dev/shm that are left."""
        found = []
        for pid in self.marked():
            with contextlib.suppress(OSError):
                program, *rest = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                found.append(f"process `{' '.join([Path(program).name, *rest[:2]])}`")
        now = set(os.listdir(self.shm)) if self.shm >= 0 else set()
        found += [f"/dev/shm/{name}" for name in sorted(now - self.shm_before)]
        return [name for name in found if (self.first.leaves_no or "") in name]

    def marked(self) -> list[int]:
        """Return the processes that inherited the token of this run."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"CONFORMANCE={self.token}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def end(self) -> None:
        """End all processes and delete all files that are left."""
        while pids := self.marked():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
        self.process.wait()
        if self.shm >= 0:
            os.close(self.shm)
