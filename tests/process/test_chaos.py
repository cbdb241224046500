"""Workers are killed, stopped, fed up and starved at random times: nothing is lost, nothing left.

And the template from which they are forked is killed as well.

The code is that of ``tests/stress/chaos.py``, which goes on for as long as one likes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from stress import chaos, rough

from rlpool import EpisodeBatcher, shutdown

from support.fragile import RecurrentAgent

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(280)]


@pytest.fixture
def another_template_afterwards() -> Iterator[None]:
    """Forget a template that was killed so often while it started that workers are spawned."""
    yield
    shutdown()


@pytest.mark.promise("I1")
@pytest.mark.promise("I3")
@pytest.mark.promise("I5")
@pytest.mark.usefixtures("another_template_afterwards")
def test_nothing_is_lost_in_chaos() -> None:
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
    assert report["is_sound"], json.dumps(report, indent=1)  # all of it: pytest shortens a dict
    assert report["episodes"] >= 30
    assert report["windows"] >= 2


def test_a_wrong_or_missing_row_would_be_noticed() -> None:
    with EpisodeBatcher(8, 8, RecurrentAgent, {}, rough.create_rough, {}, 0, 1) as batcher:
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
