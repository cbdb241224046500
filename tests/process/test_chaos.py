"""Workers are killed, stopped, recycled and starved at random: no data is lost, nothing is left.

The template from which they are forked is killed as well.

The code is in ``tests/stress/chaos.py``, which runs for any length of time.
"""

from __future__ import annotations

import json

import pytest
from stress import chaos

from rlpool.workers import worker_process

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(280)]


@pytest.mark.promise("I1")
@pytest.mark.promise("I3")
@pytest.mark.promise("I5")
def test_no_data_is_lost_in_chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_STACKS_S", 0.05)  # stopped workers write none
    report = chaos.run(
        chaos.Plan(
            seconds=0.0,
            seed=3,
            n_workers=2,
            signal_s=0.2,
            template_s=2.0,
            signals_per_result=4,
            at_starting=0.02,
            rounds=2,
            timeout_s=0.4,
            sizes=(1, 12, 30),
            least_episodes=30,
            least_faults=6,
        )
    )
    assert report["is_sound"], json.dumps(report, indent=1)  # in full: pytest shortens a dict
    assert report["episodes"] >= 30
    assert report["windows"] >= 2
