"""Several requests at once: lanes stay full, and nothing else changes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from process.watching import assert_all_equal

from rlpool import EnvError, EpisodeBatcher, WorkerDiedError

from support.agents import ConstantAgent
from support.envs import CountingEnv, create_counting
from support.fragile import RecurrentAgent, create_fragile, failing
from support.variants import variants

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


def gains(n: int) -> dict[str, Any]:
    return {"gain": torch.linspace(0.5, 2.0, n)}


def test_a_lane_without_an_episode_begins_with_the_next_request() -> None:
    arguments = {"kind": StampingEnv}
    with EpisodeBatcher(20000, 8, ConstantAgent, {}, create_fragile, arguments, 1) as batcher:
        batcher.execute(2, env_info={"length": [1, 20000]})
        batcher.execute(2, env_info={"length": [5, 1]})
        first, second = batcher.get(), batcher.get()
    last_of_first, last_of_second = (int(r["_frame"][:, :, 1].max()) for r in (first, second))
    assert int(second["_frame"][0, 4, 1]) < last_of_first < last_of_second


@pytest.mark.parametrize(("n_threads", "n_slots"), variants([(2, 60)], [(1, 60), (2, 90), (3, 40)]))
def test_pending_requests_have_the_bits_of_requests_one_by_one(
    n_threads: int, n_slots: int
) -> None:
    sizes = [1, 7, 30, 2, 40, 3, 3, 17]

    def collect(batcher: EpisodeBatcher, n_pending: int) -> list[Any]:
        results = []
        for number, n_episodes in enumerate(sizes):
            if number in (3, 6):
                batcher.update(0.25 * number)
            lengths = [1 + 5 * (i % 4) for i in range(n_episodes)]
            info = gains(n_episodes) if number in (1, 2, 5) else None
            batcher.execute(n_episodes, info, {"length": lengths})
            if number >= n_pending:
                results.append(batcher.get())
        results += [batcher.get() for _ in range(n_pending)]
        return results

    with open_fragile(0) as serial, open_fragile(n_threads, n_slots) as batcher:
        assert_all_equal(collect(serial, 0), collect(batcher, 5))


@pytest.mark.parametrize("step", variants([8], [-1, 0]))
def test_a_request_that_fails_does_not_disturb_the_others(step: int, tmp_path: Any) -> None:
    # Their episodes begin again: also those of which some slots were handed over.
    def collect(n_threads: int, fails: bool) -> list[Any]:
        env_args = {"marks": str(tmp_path), "times": 99} if fails else {}
        results = []
        with open_fragile(n_threads, env_args=env_args) as batcher:
            for number in range(4):
                fault = failing("raise", step) if number == 1 else {}
                columns = {key: [0] * 8 + [value] for key, value in fault.items()}
                columns["length"] = [12 + 2 * i for i in range(9)]
                batcher.execute(9, env_info=columns)
            for number in range(4):
                if fails and number == 1:
                    with pytest.raises(EnvError, match="env.reset" if step < 0 else "env.step"):
                        batcher.get()
                else:
                    results.append(batcher.get())
        return results if fails else [*results[:1], *results[2:]]

    assert_all_equal(collect(0, False), collect(2, True))


@pytest.mark.promise("I4")
def test_many_small_requests_never_wait_for_each_other() -> None:
    rng = random.Random(3)
    with EpisodeBatcher(
        8, 64, ConstantAgent, {}, create_counting, {"n_envs": 5}, 2, timeout=10.0
    ) as batcher:
        pending: list[list[int]] = []
        for _ in range(150):
            lengths = [rng.randint(1, 8) for _ in range(rng.randint(1, 12))]
            batcher.execute(len(lengths), env_info={"length": lengths})
            pending.append(lengths)
            if len(pending) > rng.randint(0, 7):
                assert batcher.get().lengths.tolist() == pending.pop(0)
        for lengths in pending:
            assert batcher.get().lengths.tolist() == lengths


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
