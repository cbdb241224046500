"""Every tutorial runs as a user runs it, made small by its flags."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

TUTORIALS = sorted((Path(__file__).resolve().parents[2] / "tutorials").glob("*.py"))

# Flags that make a tutorial small, and the files that it leaves where it was started.
SMALL = {
    "a2c": ("--n-epochs 3 --n-envs 4 --n-threads 1", []),
    "arrays": ("", []),
    "datastructures": ("", []),
    "dqn": ("--n-steps 20 --n-threads 1", ["dqn.png", "dqn.pt"]),
    "environments": ("--n-steps 20", []),
    "meta_rl": (
        "--num-iters 2 --num-iters-baselines 1 --num-rollouts-per-iter 8",
        ["meta_rl.png"],
    ),
    "multiprocess_episode_batcher": ("--n-cartpole-episodes 40 --n-threads 1", []),
    "nonblocking": ("--n-epochs 3 --n-episodes 8 --n-evaluation-episodes 8", []),
    "pool": ("", []),
    "recurrent_policy": ("--n-epochs 2 --n-episodes 8 --n-threads 1", ["recurrent_policy.png"]),
    "reinforce": ("--n-epochs 3 --n-episodes 8 --n-threads 1", ["reinforce.png"]),
}

# Besides the façade.
PUBLIC_MODULES = ("rlpool.patterns",)

# One takes about 10 s on two busy cores, most of it to import torch in every process.
TIMEOUT_S = 120.0
# How long processes may take to end after the script that started them has ended.
GRACE_S = 5.0

each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def test_no_tutorial_is_forgotten() -> None:
    assert {path.stem for path in TUTORIALS} == SMALL.keys()


@each_tutorial
def test_tutorial_runs(path: Path, tmp_path: Path) -> None:
    flags, files = SMALL[path.stem]
    # A session of its own, by which the processes that the script starts can be found.
    process = subprocess.Popen(
        [sys.executable, str(path), *flags.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
        assert output
        assert ("tqdm" in path.read_text(encoding="utf-8")) == ("100%|" in errors)
        assert all((tmp_path / name).stat().st_size for name in files)
        assert _remaining_after_grace(process.pid) == []
    finally:
        for pid in _session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@each_tutorial
def test_tutorial_says_what_it_teaches_and_uses_the_facade_only(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert "you will learn" in (ast.get_docstring(tree) or "").lower()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert module in PUBLIC_MODULES or not module.startswith("rlpool.")
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("rlpool") for alias in node.names)


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
