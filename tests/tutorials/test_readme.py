"""Every Python block of the README runs as a script of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$",
    (REPOSITORY / "README.md").read_text(encoding="utf-8"),
    flags=re.MULTILINE | re.DOTALL,
)

TIMEOUT_S = 120.0
# How long processes may take to end after the script that started them has ended.
GRACE_S = 5.0


def test_readme_has_a_program() -> None:
    assert BLOCKS


@pytest.mark.parametrize("source", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))])
def test_readme_block_runs(source: str, tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(source, encoding="utf-8")
    # A session of its own, by which the processes that the script starts can be found.
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors
        assert errors == ""
        assert output
        assert _remaining_after_grace(process.pid) == []
    finally:
        for pid in _session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _remaining_after_grace(session: int) -> list[int]:
    deadline = time.monotonic() + GRACE_S
    while (remaining := _session(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return remaining


def _session(session: int) -> list[int]:
    """Numbers of the living processes of a session."""
    members = []
    for process in psutil.process_iter(["status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        try:
            if os.getsid(process.pid) == session:
                members.append(process.pid)
        except (ProcessLookupError, PermissionError):
            continue
    return members
