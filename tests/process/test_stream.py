"""Concurrent requests in flight; ``property/test_against_loops`` draws streams of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import EnvError, EpisodeBatcher, SpecError, UsageError, WorkerDiedError

from support.agents import ConstantAgent
from support.envs import CountingEnv
from support.fragile import create_fragile, failing


def test_unstreamable_requests_are_refused_immediately() -> None:
    with EpisodeBatcher(10, 24, ConstantAgent, {}, create_fragile, {}, 0) as batcher:
        for arguments, named in (((0,), "n_episodes"), ((1, 1.5), "n_pending")):
            with pytest.raises(SpecError, match=named):
                batcher.stream(*arguments)
    with pytest.raises(UsageError, match="closed"):
        batcher.stream(1)


_clock = itertools.count()


class StampingEnv(CountingEnv):
    """Observes the number of steps made by all environments of its process."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return np.array([self.number, next(_clock)], np.float32), *rest  # type: ignore[return-value]


@pytest.mark.promise("I2")
def test_an_idle_lane_starts_with_the_next_request() -> None:
    arguments = {"kind": StampingEnv}
    with EpisodeBatcher(5000, 8, ConstantAgent, {}, create_fragile, arguments, 1) as batcher:
        batcher.execute(2, env_info={"length": [1, 5000]})
        batcher.execute(2, env_info={"length": [5, 1]})
        first, second = batcher.get(), batcher.get()
    last_of_first, last_of_second = (int(r["_frame"][:, :, 1].max()) for r in (first, second))
    assert int(second["_frame"][0, 4, 1]) < last_of_first < last_of_second


def test_a_death_names_the_running_episode_of_any_request(tmp_path: Any) -> None:
    arguments = {"n_lanes": 3, "marks": str(tmp_path)}
    options = {"n_threads": 1, "on_worker_failure": "raise"}
    with EpisodeBatcher(5, 60, ConstantAgent, {}, create_fragile, arguments, **options) as batcher:
        batcher.execute(3, env_info={"length": [1, 4000, 1]})
        columns = {"length": 77, **failing("sigkill", 2)}
        batcher.execute(2, env_info={key: [value] * 2 for key, value in columns.items()})
        with pytest.raises(WorkerDiedError) as caught:
            batcher.get()
    where = caught.value.where
    assert (where.row, where.step, where.env_info) == (0, 2, columns)


def test_long_episodes_repeated_after_a_failure_never_share_a_slot(
    tmp_path: Any,
) -> None:
    """Their first slots have been emptied by then and may be used by others."""
    lengths = {"length": [40, 40]}
    columns = {"length": 40, **failing("raise", 17)}
    arguments = {"n_lanes": 3, "marks": str(tmp_path), "times": 10}
    with EpisodeBatcher(3, 8, ConstantAgent, {}, create_fragile, arguments, 1, 0) as batcher:
        batcher.execute(2, env_info=lengths)
        expected = batcher.get()["frame"]
        for _ in range(10):
            batcher.seek(0)
            batcher.execute(2, env_info=lengths)
            for n in (1, 3):  # one in the third lane, and another one after it
                batcher.execute(n, env_info={key: [value] * n for key, value in columns.items()})
            assert torch.equal(batcher.get(timeout=60)["frame"], expected)
            for _ in range(2):
                with pytest.raises(EnvError):
                    batcher.get()
