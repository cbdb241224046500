"""Several requests at once: lanes stay full, and nothing else changes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rlpool import EpisodeBatcher, WorkerDiedError

from support.agents import ConstantAgent
from support.envs import CountingEnv
from support.fragile import RecurrentAgent, create_fragile, failing

pytestmark = [pytest.mark.timeout(120), pytest.mark.promise("I2")]

_clock = itertools.count()


class StampingEnv(CountingEnv):
    """Shows how many steps all environments of its process have made."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return np.array([self.number, next(_clock)], np.float32), *rest  # type: ignore[return-value]


def open_fragile(n_threads: int, n_slots: int = 60, **options: Any) -> EpisodeBatcher:
    env_args = {"n_lanes": 3, **options.pop("env_args", {})}
    return EpisodeBatcher(
        5, n_slots, RecurrentAgent, {}, create_fragile, env_args, n_threads, 7, **options
    )


def test_a_lane_without_an_episode_begins_with_the_next_request() -> None:
    arguments = {"kind": StampingEnv}
    with EpisodeBatcher(20000, 8, ConstantAgent, {}, create_fragile, arguments, 1) as batcher:
        batcher.execute(2, env_info={"length": [1, 20000]})
        batcher.execute(2, env_info={"length": [5, 1]})
        first, second = batcher.get(), batcher.get()
    last_of_first, last_of_second = (int(r["_frame"][:, :, 1].max()) for r in (first, second))
    assert int(second["_frame"][0, 4, 1]) < last_of_first < last_of_second


def test_a_death_names_the_episode_that_was_running_in_whichever_request(tmp_path: Any) -> None:
    env_args = {"marks": str(tmp_path)}
    with open_fragile(1, on_worker_failure="raise", env_args=env_args) as batcher:
        batcher.execute(3, env_info={"length": [4000, 1, 1]})
        columns = {"length": 77, **failing("sigkill", 2)}
        batcher.execute(2, env_info={key: [value] * 2 for key, value in columns.items()})
        with pytest.raises(WorkerDiedError) as caught:
            batcher.get()
    where = caught.value.where
    assert (where.row, where.step, where.env_info) == (1, 2, columns)
