"""What ``python -m rlpool doctor`` says about fake machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpool import SpecError, WorkerDiedError, doctor
from rlpool.doctor import Check, examine, main
from rlpool.workers import process_start
from rlpool.workers.process_start import memory_of

from support.machines import limit_to, machine

MEMINFO = "MemTotal:  8388608 kB\nMemAvailable:  4194304 kB"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 16 cores, 8 GiB of which half are free, and no other limits."""
    limit_to(monkeypatch)
    monkeypatch.setattr(doctor, "n_cores", lambda: 16)
    monkeypatch.setattr(doctor, "_seconds_of_a_worker", lambda: 2.0)
    monkeypatch.setattr(doctor, "why_spawned", lambda: "")
    monkeypatch.setattr(doctor, "memory_of", lambda _: memory_of("spawn"))
    return machine(tmp_path, {"proc/meminfo": MEMINFO})


def named(name: str, *arguments: Any, **options: Any) -> Check:
    """The last check with this name."""
    return [check for check in examine(*arguments, **options) if check.name == name][-1]


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.status == "FAIL"]


def test_a_machine_with_room(root: Path) -> None:
    checks = examine(4, 10, 100, 1000, root=root)
    assert {(check.status, check.fix) for check in checks} == {("ok", "")}
    what = {check.name: check.what for check in checks}
    names = "versions,cores,start method,memory,file descriptors,processes and threads"
    assert list(what) == [*names.split(","), "workers", "slots", "worker process"]
    for package in ("Python 3.", "rlpool 0.", "torch 2.", "numpy ", "gymnasium ", "cloudpickle "):
        assert package in what["versions"]
    memory = "4 GiB of the 8 GiB that this machine has are free: room for 40 workers"
    assert what["memory"] == memory
    assert what["workers"] == "40 fit, 4 wanted"
    assert "for 10 slots of 100 steps with observations of 1000 B" in what["slots"]


@pytest.mark.parametrize(
    ("name", "limit", "subject", "status"),
    [
        ("RLIMIT_NOFILE", 32, "file descriptors", "FAIL"),
        ("RLIMIT_NOFILE", 4096, "file descriptors", "ok"),
        ("RLIMIT_AS", 2**20, "address space", "FAIL"),
        ("RLIMIT_AS", 2**32, "address space", "warn"),
        ("RLIMIT_FSIZE", 2**20, "file size", "FAIL"),
        ("RLIMIT_FSIZE", 2**30, "file size", "warn"),
    ],
)
def test_limits_of_the_process(
    monkeypatch: pytest.MonkeyPatch, root: Path, name: str, limit: int, subject: str, status: str
) -> None:
    limit_to(monkeypatch, **{name: limit})
    check = named(subject, 1, root=root)
    assert check.status == status
    assert ("ulimit -" in check.fix) == (status != "ok")


@pytest.mark.parametrize(("slots", "status"), [(1000, "FAIL"), (60, "warn"), (10, "ok")])
def test_large_blocks(root: Path, slots: int, status: str) -> None:
    check = named("slots", 2, slots, timesteps=1000, observation_bytes=10**5, root=root)
    assert check.status == status
    if status != "ok":
        assert "only 4 GiB of the 8 GiB that this machine has are free" in check.what
        assert check.fix.startswith("lower n_slots or n_timesteps")


@pytest.mark.parametrize(
    ("workers", "remedy"),
    [
        (60, "use fewer workers (40 would fit), or free memory"),
        (10**5, "use fewer workers (40 would fit), or use a machine or container with 9.54 TiB"),
    ],
)
def test_memory_is_to_be_freed_only_where_there_is_enough(
    root: Path, workers: int, remedy: str
) -> None:
    assert named("memory", workers, root=root).fix == remedy


def raising(error: Exception) -> Callable[..., Any]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "what", "fix"),
    [
        (WorkerDiedError("worker 0 died", exitcode=1, fix="look"), "worker 0 died", "look"),
        (OSError(11, "Resource unavailable"), "[Errno 11] Resource unavailable", ""),
        (RuntimeError(), "RuntimeError", ""),
    ],
)
def test_workers_that_do_not_start(
    monkeypatch: pytest.MonkeyPatch, root: Path, error: Exception, what: str, fix: str
) -> None:
    monkeypatch.setattr(doctor, "_seconds_of_a_worker", raising(error))
    assert examine(1, root=root)[-1] == Check("worker process", "FAIL", what, fix)


def test_no_worker_is_started_on_request(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    for name in ("_seconds_of_a_worker", "why_spawned"):
        monkeypatch.setattr(doctor, name, lambda: pytest.fail("started"))
    checks = examine(1, start_worker=False, root=root)
    assert checks[-1].name == "slots"
    assert "forked from a template if that, once started, proves that it is safe" in checks[2].what


def test_how_workers_are_started(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    what = named("start method", 1, root=root).what
    assert what == "workers are forked from a template, which has proved that this is safe"
    monkeypatch.setattr(doctor, "memory_of", memory_of)
    monkeypatch.setattr(process_start._template, "is_up", lambda: False)
    assert "room for 400 workers" in named("memory", 1, root=root).what
    monkeypatch.setattr(doctor, "why_spawned", lambda: "it has 2 threads")
    assert "room for 40 workers" in named("memory", 1, root=root).what
    check = named("start method", 1, root=root)
    assert check.status == "warn"
    assert check.what == "workers are spawned, not forked from a template: it has 2 threads"


def test_the_report_as_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    assert main(["doctor", "--workers", "2"], root=root) == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in lines] == ["ok "] * len(examine(2, root=root))
    assert summary == "problems: 0, warnings: 0"
    limit_to(monkeypatch, RLIMIT_NOFILE=32)
    assert main(["doctor", "--workers", "20"], root=root) == 1
    lines = capsys.readouterr().out.splitlines()
    (number,) = [n for n, line in enumerate(lines) if line.startswith("FAIL  file descriptors")]
    assert lines[number + 1].strip().startswith("fix: ")
    assert lines[-1] == "problems: 2, warnings: 1"


def test_the_report_as_json(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    arguments = "doctor --json --slots 7 --timesteps 9 --observation-bytes 5 --workers 100"
    assert main(arguments.split(), root=root) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    checks = [Check(**check) for check in report["checks"]]
    assert checks == examine(100, 7, 9, 5, root=root)
    assert failed(checks) == ["memory", "workers"]


def test_a_number_that_does_not_fit_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--workers", "0"])
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert "workers should be an int of at least 1, got 0; pass" in err


@pytest.mark.parametrize("arguments", ["", "nurse", "doctor now"])
def test_invalid_arguments_get_the_usage(
    capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert err.startswith("usage: python -m rlpool")
    with pytest.raises(SpecError, match="observation_bytes"):
        examine(observation_bytes=True)
