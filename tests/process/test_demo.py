"""``python -m rlpool demo`` and ``--version``."""

from __future__ import annotations

import itertools
import os
import pty
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

import rlpool
from rlpool import demo
from rlpool.__main__ import main

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(120)]


def test_the_demo_learns_and_says_what_ran_and_what_comes_next(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It looks at the time twice per window.
    clock = itertools.count(0.0, 0.3)
    monkeypatch.setattr(demo, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert demo.main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    returns = [float(each) for each in re.findall(r"return +([\d.]+)", out)]
    assert len(returns) >= 4
    assert returns[-1] > 3 * returns[0]
    assert f"{demo.n_workers_here()} worker processes" in out
    assert out.endswith("docs/tour.md goes through a first program of your own.\n")


def fake_run(seconds: float, show: Callable[[str, list[float]], None]) -> tuple[int, list[float]]:
    for n in range(1, 4):
        show(f"{n} s", [100.0 * n] * n)
    return 300, [100.0, 300.0]


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_terminal_shows_a_curve_with_rich_and_lines_without(
    has_rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.setattr(demo, "run", fake_run)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert demo.main(["--seconds", "1"]) == 0
        terminal.flush()
        told = b""
        while b"of your own." not in told:
            told += os.read(ours, 100_000)
    shown = told.decode()
    os.close(ours)
    assert ("█" in shown) == has_rich
    assert ("####" in shown) == (not has_rich)
    assert "from 100 to 300, in 300 steps" in shown


def test_a_curve_has_a_column_per_point_until_they_are_too_many() -> None:
    lines = demo.drawn([0.0, 250.0, 500.0], 10).splitlines()
    assert lines[0] == "  500 |  █"
    assert lines[demo.N_ROWS // 2] == "  250 | ██"
    assert max(map(len, demo.drawn([500.0] * 1000, 10).splitlines())) == 7 + 10


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_no_time_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main([f"--seconds={seconds}"])
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"rlpool {rlpool.__version__}\n"
