"""Progress while ``get`` waits: a function of (done, total), or a tqdm bar."""

from __future__ import annotations

import itertools
import sys
import time
from functools import partial
from typing import Any

import pytest

from rlpool import EpisodeBatcher, UsageError

from support.agents import StepCounter
from support.envs import create_counting

SLOWLY = dict.fromkeys(range(3), partial(time.sleep, 0.003))


def make(n_workers: int = 0, **options: Any) -> EpisodeBatcher:
    return EpisodeBatcher(
        2, 8, StepCounter, {}, create_counting, {"script": SLOWLY}, n_workers, 0, **options
    )


@pytest.fixture(autouse=True)
def shown_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpool.batch.batcher_base._SHOW_EVERY_S", 0.005)


# In place, and in slots that are emptied.
@pytest.mark.parametrize(("n_workers", "n_episodes"), [(2, 6), (0, 20)])
def test_a_function_is_called_with_done_and_total(n_workers: int, n_episodes: int) -> None:
    calls: list[tuple[int, int]] = []
    with make(n_workers, progress=lambda *call: calls.append(call)) as batcher:
        batcher.execute(n_episodes)
        batcher.get()
        assert len(calls) > 2
        assert calls[0][0] < calls[-1][0] == n_episodes
        assert {asked for _, asked in calls} == {n_episodes}
        assert all(one[0] <= other[0] for one, other in itertools.pairwise(calls))
        calls.clear()
        batcher.execute(2)
        assert batcher.get(progress=False) is not None
        assert calls == []


def test_the_progress_bar_is_from_tqdm(capfd: pytest.CaptureFixture[str]) -> None:
    with make() as batcher:
        batcher.execute(4)
        batcher.get(progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "4/4" in err


def test_the_extra_is_named_if_tqdm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with make() as batcher:
        batcher.execute(4)
        with pytest.raises(UsageError, match=r"rlpool\[evaluation\]"):
            batcher.get(progress=True)
        assert len(batcher.get()) == 4
