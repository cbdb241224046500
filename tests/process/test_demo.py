"""``python -m rlpool demo``, and the hand-over test of ``doctor``."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest

from rlpool import demo
from rlpool.__main__ import main

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(120)]


def test_the_demo_learns_and_reports_its_run_and_next_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 0.6)  # it checks the time once per window
    monkeypatch.setattr(demo, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    returns = [float(each) for each in re.findall(r"return +([\d.]+)", out)]
    assert len(returns) >= 4
    assert returns[-1] > 2 * returns[0]
    assert f": {demo.__file__}\n" in out
    assert out.endswith("docs/tour.md in rlpool's repository, the five-minute tour.\n")


def test_doctor_tests_the_hand_over_between_processes(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--hand-overs", "0.1"]) == 0
    assert capfd.readouterr().out.startswith("ok    hand-overs  0 of ")
