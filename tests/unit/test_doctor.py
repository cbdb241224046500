"""What ``python -m rlpool doctor`` says about made-up machines."""

from __future__ import annotations

import json
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import pytest

from rlpool import SpecError, WorkerDiedError, doctor
from rlpool.doctor import Check, examine, main, would_bite
from rlpool.memory.storage import Memory
from rlpool.workers import warm_start
from rlpool.workers.warm_start import memory_of

from support.machines import machine, new_machine

MEMINFO = "MemTotal:  8388608 kB\nMemAvailable:  4194304 kB"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB, half of them free."""
    return machine(tmp_path, {"proc/meminfo": MEMINFO})


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch)
    monkeypatch.setattr(doctor, "n_cores", lambda: 16)
    monkeypatch.setattr(doctor, "seconds_of_an_episode", lambda: 2.0)
    monkeypatch.setattr(doctor, "why_spawned", lambda: "")
    monkeypatch.setattr(doctor, "memory_of", lambda _: memory_of("spawn"))


def limited(monkeypatch: pytest.MonkeyPatch, **limit: tuple[int, int]) -> None:
    numbers = {getattr(resource, name): value for name, value in limit.items()}
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda number: numbers.get(number, infinite))


def named(checks: list[Check], name: str) -> list[Check]:
    return [check for check in checks if check.name == name]


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.status == "FAIL"]


def test_nothing_bites_on_a_machine_with_room(root: Path) -> None:
    checks = examine(4, root=root)
    assert not would_bite(checks)
    assert {check.status for check in checks} == {"ok"}
    assert all(check.what and not check.fix for check in checks)
    assert [check.name for check in checks] == [
        "versions",
        "platform",
        "cores",
        "start method",
        "memory",
        "file descriptors",
        "processes and threads",
        "workers",
        "slots",
        "shared memory",
        "/dev/shm",
        "worker process",
    ]
    (memory,) = named(checks, "memory")
    assert memory.what == ("4 GiB are free of the 8 GiB that this machine has: room for 40 workers")
    assert named(checks, "workers")[0].what == "40 would fit, 4 are asked for"


def test_versions_are_told(root: Path) -> None:
    what = examine(1, root=root)[0].what
    for name in ("Python 3.", "rlpool 0.", "torch 2.", "numpy ", "gymnasium ", "cloudpickle "):
        assert name in what


def test_few_descriptors_bite(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    limited(monkeypatch, RLIMIT_NOFILE=(64, 4096))
    checks = examine(1, root=root)
    assert failed(checks) == ["file descriptors"]
    (check,) = named(checks, "file descriptors")
    assert "of the 64 that this process may open (RLIMIT_NOFILE)" in check.what
    assert "hard limit: 4096" in check.what
    assert "ulimit -n 128" in check.fix
    limited(monkeypatch, RLIMIT_NOFILE=(4096, 4096))
    assert not failed(examine(1, root=root))


def test_a_small_container_bites(root: Path) -> None:
    used = {"memory.max": str(2**30), "memory.current": str(800 * 2**20)}
    new_machine(root, "/", {**used, "pids.max": "20", "pids.current": "11"})
    checks = examine(2, root=root)
    assert not would_bite(checks)
    assert named(checks, "workers")[0].what == "2 would fit, 2 are asked for"
    checks = examine(3, root=root)
    assert failed(checks) == ["memory", "workers"]
    assert "memory.max" in named(checks, "memory")[1].what
    assert failed(examine(5, root=root)) == ["memory", "processes and threads", "workers"]


def test_a_block_that_cannot_be_had_bites(root: Path) -> None:
    checks = examine(2, slots=1000, timesteps=1000, observation_bytes=10**5, root=root)
    assert failed(checks) == ["slots"]
    (check,) = named(checks, "slots")
    assert "observation 93.3 GiB" in check.what
    assert "of the 8 GiB that this machine has 4 GiB are free" in check.what
    assert "n_slots=" in check.fix
    assert "n_timesteps=" in check.fix


def test_a_block_that_is_not_free_now_is_worth_a_warning(root: Path) -> None:
    checks = examine(2, slots=60, timesteps=1000, observation_bytes=10**5, root=root)
    assert not would_bite(checks)
    (check,) = named(checks, "slots")
    assert check.status == "warn"
    assert "n_slots=41 or n_timesteps=700 would fit" in check.fix


def test_a_block_that_fits_is_told_with_its_size(root: Path) -> None:
    (check,) = named(examine(2, 10, 100, 1000, root=root), "slots")
    assert (check.status, check.fix) == ("ok", "")
    assert "for 10 slots of 100 steps with observations of 1000 B" in check.what


def test_a_limit_of_address_space_is_told(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    limited(monkeypatch, RLIMIT_AS=(2**32, 2**32))
    (check,) = named(examine(1, root=root), "address space")
    assert check.status == "warn"
    limited(monkeypatch, RLIMIT_DATA=(2**20, 2**20))
    (check,) = named(examine(1, root=root), "address space")
    assert check.status == "FAIL"


def test_more_workers_than_cores_are_worth_a_warning(root: Path) -> None:
    (check,) = named(examine(17, root=root), "cores")
    assert check.status == "warn"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (WorkerDiedError("worker 0 died", exitcode=1, fix="look"), "worker 0 died"),
        (TimeoutError("no answer for 120 s"), "no answer for 120 s"),
        (OSError(11, "Resource temporarily unavailable"), "[Errno 11] Resource temporarily"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_worker_that_does_not_start_bites(
    monkeypatch: pytest.MonkeyPatch, root: Path, error: Exception, what: str
) -> None:
    def fail() -> float:
        raise error

    monkeypatch.setattr(doctor, "seconds_of_an_episode", fail)
    checks = examine(1, root=root)
    assert failed(checks) == ["worker process"]
    assert checks[-1].what.startswith(what)
    assert checks[-1].fix == ("look" if isinstance(error, WorkerDiedError) else "")


def test_a_worker_that_starts_slowly_is_worth_a_warning(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setattr(doctor, "seconds_of_an_episode", lambda: 60.0)
    assert examine(1, root=root)[-1].status == "warn"


def test_no_worker_is_started_if_none_is_wanted(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setattr(doctor, "seconds_of_an_episode", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "why_spawned", lambda: 1 / 0)
    checks = examine(1, start_worker=False, root=root)
    assert not named(checks, "worker process")
    (check,) = named(checks, "start method")
    assert check.status == "ok"
    assert "forked from a template if that, once started, proves that it is safe" in check.what


def test_the_way_workers_are_started_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    (check,) = named(examine(1, root=root), "start method")
    assert (check.status, check.fix) == ("ok", "")
    assert "forked from a template, which has proved that this is safe" in check.what
    monkeypatch.setattr(doctor, "memory_of", memory_of)
    monkeypatch.setattr(warm_start._templates, "is_up", lambda: False)
    assert "room for 400 workers" in named(examine(1, root=root), "memory")[0].what
    monkeypatch.setattr(doctor, "why_spawned", lambda: "it has 2 threads")
    assert "room for 40 workers" in named(examine(1, root=root), "memory")[0].what
    (check,) = named(examine(1, root=root), "start method")
    assert (check.status, check.what) == (
        "warn",
        "workers are spawned, not forked from a template: it has 2 threads",
    )
    monkeypatch.setattr(warm_start, "CAN_KILL", False)
    (check,) = named(examine(1, start_worker=False, root=root), "start method")
    assert check.status == "warn"
    assert check.what.startswith("workers are spawned, not forked from a template: this Python")


def test_memory_that_cannot_be_shared_bites(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    def fail(*_: Any) -> Memory:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Memory, "shared", fail)
    checks = examine(1, start_worker=False, root=root)
    assert failed(checks) == ["shared memory"]
    assert "Operation not permitted" in named(checks, "shared memory")[0].what


def test_without_memfd_a_file_is_used(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.delattr("os.memfd_create")
    (check,) = named(examine(1, root=root), "shared memory")
    assert check.status == "warn"
    assert "no memfd" in check.what


def test_the_callers_start_method_is_left_open(root: Path) -> None:
    before: Any = multiprocessing.get_start_method(allow_none=True)
    examine(1, root=root)
    assert multiprocessing.get_start_method(allow_none=True) == before


@pytest.mark.parametrize("name", ["workers", "slots", "timesteps", "observation_bytes"])
@pytest.mark.parametrize("number", [0, -1, True, 1.5, "2"])
def test_numbers_that_are_none_are_refused(name: str, number: Any) -> None:
    with pytest.raises(SpecError, match=name):
        examine(**{name: number})


def test_the_report_has_a_line_per_check(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert main(["doctor", "--workers", "2"], root=root) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(examine(2, root=root)) + 1
    assert all(line.startswith("ok ") for line in lines[:-1])
    assert lines[-1] == "nothing would bite"


def test_the_report_tells_how_to_fix_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    limited(monkeypatch, RLIMIT_NOFILE=(64, 4096))
    assert main(["doctor", "--workers", "20"], root=root) == 1
    lines = capsys.readouterr().out.splitlines()
    (number,) = [n for n, line in enumerate(lines) if line.startswith("FAIL  file descriptors")]
    assert lines[number + 1].strip().startswith("fix: ")
    assert lines[-1] == "2 would bite, 1 to know about"


def test_the_report_can_be_read_by_programs(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    arguments = ["doctor", "--json", "--slots", "7", "--timesteps", "9", "--observation-bytes", "5"]
    assert main([*arguments, "--workers", "100"], root=root) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    checks = [Check(**check) for check in report["checks"]]
    assert checks == examine(100, 7, 9, 5, root=root)
    assert failed(checks) == ["memory", "workers"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nurse"],
        ["doctor", "--workers", "0"],
        ["doctor", "--slots", "many"],
        ["doctor", "--timesteps", "-3"],
        ["doctor", "now"],
    ],
    ids=str,
)
def test_arguments_that_are_none_get_the_usage(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: python -m rlpool")
