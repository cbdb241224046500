"""How much memory there is, and what is said about memory that does not fit."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

import pytest

from rlpool import SpecError
from rlpool.machine import limits
from rlpool.machine.limits import (
    Bound,
    check_size,
    free_bytes,
    human,
    machine_bytes,
    memory_bounds,
    own_bounds,
    shared_bounds,
)

from support.machines import machine, new_machine

MEMINFO = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  400 kB"


def limited_to(monkeypatch: pytest.MonkeyPatch, **limit: int) -> None:
    """Let this process have these limits and no others."""
    numbers = {getattr(resource, name): value for name, value in limit.items()}
    monkeypatch.setattr(
        resource, "getrlimit", lambda n: (numbers.get(n, resource.RLIM_INFINITY),) * 2
    )


def bounded(monkeypatch: pytest.MonkeyPatch, *bounds: Bound) -> None:
    monkeypatch.setattr(limits, "memory_bounds", lambda **_: list(bounds))


def test_the_machine_bounds_memory(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/meminfo": MEMINFO})
    assert shared_bounds(root) == [Bound("this machine has", 1024000, 409600, 1024000)]


def test_groups_bound_memory(tmp_path: Path) -> None:
    root = new_machine(tmp_path, "/", {"memory.max": "5000", "memory.current": "6000"})
    machine(root, {"proc/meminfo": MEMINFO})
    _, bound = shared_bounds(root)
    assert bound.name.startswith("the control group of this process allows (")
    assert bound.name.endswith("memory.max)")
    assert (bound.total, bound.free, bound.most) == (5000, 0, 5000)


def test_what_is_mapped_counts_against_address_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = machine(tmp_path, {"proc/self/status": "Name: x\nVmSize:  3 kB\nVmData:  2 kB"})
    limited_to(monkeypatch, RLIMIT_AS=10240, RLIMIT_DATA=4096)
    assert own_bounds(private=False, root=root) == [
        Bound("RLIMIT_AS allows (ulimit -v)", 10240, 7168, 7168)
    ]
    assert own_bounds(private=True, root=root)[1] == Bound(
        "RLIMIT_DATA allows (ulimit -d)", 4096, 2048, 2048
    )
    limited_to(monkeypatch)
    assert own_bounds(private=True, root=root) == []


def test_all_that_bounds_memory_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limited_to(monkeypatch, RLIMIT_AS=10240, RLIMIT_DATA=4096)
    root = machine(tmp_path, {"proc/meminfo": MEMINFO})
    assert len(memory_bounds(root=root)) == 2
    assert len(memory_bounds(private=True, root=root)) == 3


def test_there_is_memory() -> None:
    assert 0 < free_bytes() <= machine_bytes()


def test_memory_is_what_the_tightest_bound_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(monkeypatch, Bound("a has", 100, 30, 100), Bound("b has", 90, 40, 90))
    assert (machine_bytes(), free_bytes()) == (90, 30)


BOUNDS = Bound("the group has", 2000, 500, 2000), Bound("this machine has", 900, 600, 900)
ADVICE = "lower n_slots to {}".format


def test_what_is_free_is_accepted_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bounded(monkeypatch, Bound("this machine has", 1000, 500, 1000))
    check_size({"a": 400, "b": 100}, ADVICE)
    assert not caplog.records


def test_what_is_not_free_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bounded(
        monkeypatch,
        Bound("the group has", 2000, 500, 2000),
        Bound("this machine has", 900, 600, 900),
    )
    with caplog.at_level(logging.WARNING, logger="rlpool"):
        check_size({"a": 401, "b": 100}, ADVICE, "the block")
    (record,) = caplog.records
    assert record.getMessage() == (
        "the block may take up to 501 B (a 401 B, b 100 B), but of the 1.95 KiB that the group has "
        "500 B are free: lower n_slots to 500 if memory runs out"
    )


def test_what_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(
        monkeypatch,
        Bound("the group has", 2000, 500, 2000),
        Bound("this machine has", 900, 600, 900),
    )
    check_size({"a": 900}, ADVICE)
    with pytest.raises(SpecError) as caught:
        check_size({"a": 1, "b": 900}, ADVICE, "the block")
    what, fix = str(caught.value).splitlines()
    assert what == (
        "the block would need 901 B (b 900 B, a 1 B), but of the 900 B that this machine has 600 B "
        "are free"
    )
    assert fix == "  fix:   lower n_slots to 500"


def test_address_space_in_use_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(monkeypatch, Bound("RLIMIT_AS allows", 1000, 400, 400))
    with pytest.raises(SpecError, match="RLIMIT_AS"):
        check_size({"a": 500}, ADVICE)


def test_many_keys_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(monkeypatch, Bound("this machine has", 9, 9, 9))
    sizes: dict[str, Any] = {f"key_{n}": n for n in range(1, 21)}
    with pytest.raises(SpecError) as caught:
        check_size(sizes, ADVICE)
    what = str(caught.value)
    assert "210 B (key_20 20 B, " in what
    assert "key_13 13 B, 12 smaller ones 78 B)" in what
    assert "key_12" not in what


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1023 << 20, "1023 MiB"),
        (3 << 30, "3 GiB"),
        (5 << 40, "5 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes_are_readable(n_bytes: int, text: str) -> None:
    assert human(n_bytes) == text
