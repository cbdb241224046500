"""Workers are killed, stopped, fed up and starved at random times: nothing is lost, nothing left.

And the template from which they are forked is killed as well.

The code is that of ``benchmarks/chaos.py``, which goes on for as long as one likes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(280)]


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> object:
    """The script, as a module; its workers find what it imports on the same path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__("chaos")


def test_nothing_is_lost_in_chaos(chaos: object) -> None:
    report = chaos.run(
        chaos.Plan(
            seconds=0.0,
            seed=3,
            template_s=2.0,
            signals_per_result=6,
            at_starting=0.0,
            rounds=10_000,
            timeout_s=0.5,
            sizes=(1, 12, 60),
            least_episodes=400,
            least_faults=30,
        )
    )
    assert report["errors"] == []
    assert (report["lost"], report["wrong"]) == (0, 0)
    assert not any(report["left"].values()), report["left"]
    assert report["is_sound"]
    assert report["episodes"] >= 400
    assert report["faults"] >= 30
    assert report["restarts"] >= 3


def test_a_wrong_or_missing_row_would_be_noticed(chaos: object) -> None:
    rough = sys.modules["rough"]
    with chaos.EpisodeBatcher(
        8, 8, rough.create_agent, {}, rough.create_env, {}, n_threads=0, seeds=1
    ) as batcher:
        batcher.execute(6, **rough.infos(6, 1))
        expected = batcher.get()
    assert expected is not None
    assert chaos.n_wrong_rows(expected.clone(), expected) == 0
    assert chaos.n_wrong_rows(expected.slice(0, 5), expected) == 6
    for key in ("frame", "reward", "action", "hidden"):
        got = expected.clone()
        value = got[key].view(torch.uint8) if got[key].dtype == torch.bool else got[key]
        value[2].view(-1)[0] += 1
        assert chaos.n_wrong_rows(got, expected) == 1, key
    got = expected.clone()
    got.info["seed"][4] += 1
    assert chaos.n_wrong_rows(got, expected) == 1
