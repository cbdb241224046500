"""What ``python -m rlpool doctor`` says about fake machines."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpool import SpecError, WorkerDiedError, doctor
from rlpool.doctor import Check, examine, main, would_bite
from rlpool.memory.storage import Memory
from rlpool.workers import process_start
from rlpool.workers.process_start import memory_of

from support.machines import container, machine

MEMINFO = "MemTotal:  8388608 kB\nMemAvailable:  4194304 kB"
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
FEW_DESCRIPTORS = {resource.RLIMIT_NOFILE: (32, 4096)}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 16 cores, 8 GiB of which half are free, and no other limits."""
    limit_to(monkeypatch, {})
    monkeypatch.setattr(doctor, "n_cores", lambda: 16)
    monkeypatch.setattr(doctor, "_seconds_of_an_episode", lambda: 2.0)
    monkeypatch.setattr(doctor, "why_spawned", lambda: "")
    monkeypatch.setattr(doctor, "memory_of", lambda _: memory_of("spawn"))
    return machine(tmp_path, {"proc/meminfo": MEMINFO})


def limit_to(monkeypatch: pytest.MonkeyPatch, limits: dict[int, tuple[int, int]]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: limits.get(number, UNLIMITED))


def named(name: str, *arguments: Any, **options: Any) -> Check:
    """The last check of that name."""
    return [check for check in examine(*arguments, **options) if check.name == name][-1]


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.status == "FAIL"]


def test_a_machine_with_room(root: Path) -> None:
    checks = examine(4, 10, 100, 1000, root=root)
    assert not would_bite(checks)
    assert {(check.status, check.fix) for check in checks} == {("ok", "")}
    what = {check.name: check.what for check in checks}
    names = "versions,platform,cores,start method,memory,file descriptors,processes and threads"
    others = "workers,slots,shared memory,worker process"
    assert list(what) == [*names.split(","), *others.split(",")]
    for package in ("Python 3.", "rlpool 0.", "torch 2.", "numpy ", "gymnasium ", "cloudpickle "):
        assert package in what["versions"]
    memory = "4 GiB of the 8 GiB that this machine has are free: room for 40 workers"
    assert what["memory"] == memory
    assert what["workers"] == "40 would fit, 4 are asked for"
    assert "for 10 slots of 100 steps with observations of 1000 B" in what["slots"]


def test_limits_of_the_process(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    limit_to(monkeypatch, FEW_DESCRIPTORS)
    assert failed(examine(1, root=root)) == ["file descriptors", "workers"]
    check = named("file descriptors", 1, root=root)
    assert "1 worker needs at least 35 file descriptors" in check.what
    assert "of the 32 that this process may open (RLIMIT_NOFILE)" in check.what
    assert "ulimit -n " in check.fix
    limit_to(monkeypatch, {resource.RLIMIT_NOFILE: (4096, 4096)})
    assert not failed(examine(1, root=root))
    limit_to(monkeypatch, {resource.RLIMIT_AS: (2**32, 2**32)})
    assert named("address space", 1, root=root).status == "warn"
    limit_to(monkeypatch, {resource.RLIMIT_DATA: (2**20, 2**20)})
    assert named("address space", 1, root=root).status == "FAIL"


def test_a_small_container(root: Path) -> None:
    container(root, "/", {"memory.max": str(2**30), "memory.current": str(800 * 2**20)})
    assert not would_bite(examine(2, root=root))
    assert failed(examine(3, root=root)) == ["memory", "workers"]
    assert "memory.max" in named("memory", 3, root=root).what


@pytest.mark.parametrize(("slots", "status"), [(1000, "FAIL"), (60, "warn"), (10, "ok")])
def test_large_blocks(root: Path, slots: int, status: str) -> None:
    check = named("slots", 2, slots, timesteps=1000, observation_bytes=10**5, root=root)
    assert check.status == status
    if status != "ok":
        assert "only 4 GiB of the 8 GiB that this machine has are free" in check.what
        assert check.fix.startswith("lower n_slots or n_timesteps")


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
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
def test_workers_that_do_not_start_and_memory_that_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch, root: Path, error: Exception, what: str, fix: str
) -> None:
    monkeypatch.setattr(doctor, "_seconds_of_an_episode", raising(error))
    assert examine(1, root=root)[-1] == Check("worker process", "FAIL", what, fix)
    monkeypatch.setattr(Memory, "shared", raising(PermissionError(1, "Operation not permitted")))
    check = named("shared memory", 1, root=root)
    assert (check.status, "Operation not permitted" in check.what) == ("FAIL", True)


def test_what_is_worth_a_warning(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    assert named("cores", 17, root=root).status == "warn"
    monkeypatch.setattr(doctor, "_seconds_of_an_episode", lambda: 60.0)
    assert named("worker process", 1, root=root).status == "warn"


def test_no_worker_is_started_on_request(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    for name in ("_seconds_of_an_episode", "why_spawned"):
        monkeypatch.setattr(doctor, name, lambda: pytest.fail("started"))
    checks = examine(1, start_worker=False, root=root)
    assert checks[-1].name == "shared memory"
    assert "forked from a template if that, once started, proves that it is safe" in checks[3].what


def test_how_workers_are_started(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    what = named("start method", 1, root=root).what
    assert what == "workers are forked from a template, which has proved that this is safe"
    monkeypatch.setattr(doctor, "memory_of", memory_of)
    monkeypatch.setattr(process_start._templates, "is_up", lambda: False)
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
    assert summary == "nothing would bite"
    limit_to(monkeypatch, FEW_DESCRIPTORS)
    assert main(["doctor", "--workers", "20"], root=root) == 1
    lines = capsys.readouterr().out.splitlines()
    (number,) = [n for n, line in enumerate(lines) if line.startswith("FAIL  file descriptors")]
    assert lines[number + 1].strip().startswith("fix: ")
    assert lines[-1] == "2 would bite, 1 to know about"


def test_the_report_as_json(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    arguments = "doctor --json --slots 7 --timesteps 9 --observation-bytes 5 --workers 100"
    assert main(arguments.split(), root=root) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    checks = [Check(**check) for check in report["checks"]]
    assert checks == examine(100, 7, 9, 5, root=root)
    assert failed(checks) == ["memory", "workers"]


@pytest.mark.parametrize("arguments", ["", "nurse", "doctor --workers 0", "doctor now"])
def test_invalid_arguments_get_the_usage(
    capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert err.startswith("usage: python -m rlpool")
    for number in (0, True, "2"):
        with pytest.raises(SpecError, match="observation_bytes"):
            examine(observation_bytes=number)  # type: ignore[arg-type]
