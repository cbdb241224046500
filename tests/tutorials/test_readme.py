"""Every Python block of the README runs, as ``__main__``."""

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

from support.programs import run_as_main

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


each_block = pytest.mark.parametrize(
    "source", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))]
)


def is_for_a_process_of_its_own(source: str) -> bool:
    """Whether it is the first program, or says how all of its process logs and takes signals."""
    return source == BLOCKS[0] or "on_signal(" in source


@each_block
def test_readme_block_runs(
    source: str, program_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = program_folder / "readme.py"
    script.write_text(source, encoding="utf-8")
    if is_for_a_process_of_its_own(source):
        output, errors = _run_script(script)
    else:
        run_as_main(script, folder=program_folder)
        output, errors = capfd.readouterr()
    assert errors == ""
    assert output


def _run_script(script: Path) -> tuple[str, str]:
    """Run it to its end, which must be that of its workers; returns what it printed."""
    # A session of its own, by which the processes that the script starts can be found.
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors
        assert _remaining_after_grace(process.pid) == []
        return output, errors
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
