"""Reports of ``python -m rlpool doctor`` about fake machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlpool import WorkerDiedError, doctor
from rlpool.__main__ import COMMANDS, main
from rlpool.doctor import Check, examine

from support.machines import limit_descriptors, machine

pytestmark = pytest.mark.linux

MEMINFO = "MemTotal:  8388608 kB\nMemAvailable:  4194304 kB"


class FakeManager:
    """Manager that starts nothing, or fails."""

    error: Exception | None = None

    def __init__(self, *_: Any, **__: Any) -> None:
        if self.error is not None:
            raise self.error

    def __enter__(self) -> FakeManager:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def reset(self) -> None:
        pass


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a machine with 16 cores, 8 GiB of memory, half of it free, and no other limits."""
    limit_descriptors(monkeypatch)
    monkeypatch.setattr(doctor, "n_cores", lambda: 16)
    monkeypatch.setattr(doctor, "why_spawned", lambda: "")
    monkeypatch.setattr(doctor, "ParallelEnvManager", FakeManager)
    return machine(tmp_path, {"proc/meminfo": MEMINFO})


def named(name: str, n_workers: int, root: Path) -> Check:
    (check,) = [check for check in examine(n_workers, root) if check.name == name]
    return check


def test_a_machine_with_enough_resources_passes(root: Path) -> None:
    checks = [*examine(4, root)]
    assert {(check.status, check.fix) for check in checks} == {("ok", "")}
    what = {check.name: check.what for check in checks}
    names = ["versions", "cores", "start method", "memory", "file descriptors", "worker process"]
    assert list(what) == names
    assert what["memory"] == "4 GiB of the 8 GiB that this machine has are free"


def test_missing_resources_are_reported_with_a_fix(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    assert named("cores", 17, root).status == "warn"
    limit_descriptors(monkeypatch, 32)
    check = named("file descriptors", 1, root)
    assert check.status == "FAIL"
    assert "ulimit -n" in check.fix
    monkeypatch.setattr(doctor, "why_spawned", lambda: "it has 2 threads")
    check = named("start method", 1, root)
    assert check.status == "warn"
    assert check.what == "workers are spawned, not forked from a template: it has 2 threads"


def test_workers_that_do_not_start_are_reported(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    for error, what, fix in (
        (WorkerDiedError("worker 0 died", exitcode=1, fix="look"), "worker 0 died", "look"),
        (RuntimeError(), "RuntimeError", ""),
    ):
        monkeypatch.setattr(FakeManager, "error", error)
        assert [*examine(1, root)][-1] == Check("worker process", "FAIL", what, fix)
        assert main(["doctor", "--hand-overs", "1"]) == 1


class LateManager(FakeManager):
    """Manager that returns the previous values after a step."""

    def step(self, _: Any) -> Any:
        return ({"frame": torch.zeros(4, 9), "reward": torch.zeros(4)}, None), None


def test_stale_hand_overs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ParallelEnvManager", LateManager)
    check = doctor.hand_overs(0.001)
    n_wrong, _, n_steps, *_ = check.what.split()
    assert (check.status, n_wrong) == ("FAIL", n_steps)
    assert check.fix


def test_the_exit_code_reports_whether_something_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor"]) == 0
    assert {line[:3] for line in capsys.readouterr().out.splitlines()} == {"ok "}
    limit_descriptors(monkeypatch, 32)
    assert main(["doctor", "--n-workers", "20"]) == 1
    assert "FAIL  file descriptors" in capsys.readouterr().out
    assert main([]) == 0
    assert "python -m rlpool" in (listed := capsys.readouterr().out)
    assert all(f"    {command} " in listed for command in COMMANDS)
    for arguments in ("nurse", "doctor --n-workers 0"):
        with pytest.raises(SystemExit) as caught:
            main(arguments.split())
        assert (caught.value.code, capsys.readouterr().out) == (2, "")
