"""Requests in flight while a result is learned from: order, policies, ends."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rlpool import EpisodeBatcher, SpecError, UsageError, WorkerDiedError
from rlpool.seeding import episode_seeds, root_from

from support.agents import ConstantAgent
from support.envs import CountingEnv
from support.fragile import create_fragile, failing
from support.variants import variants
from support.vector_envs import create_lanes


class Following(ConstantAgent):
    """Does what the last update says."""

    def update(self, info: Any) -> None:
        self.action = int(info)


def create(n_workers: int) -> EpisodeBatcher:
    env_args = {"over": "gym", "n_lanes": 2, "kind": CountingEnv}
    arguments: Any = (10, 24, Following, {}, create_lanes, env_args, n_workers, 5)
    return EpisodeBatcher(*arguments)


def streamed(n_workers: int, n_pending: int) -> list[list[Any]]:
    found = []
    with create(n_workers) as batcher:
        for number, episodes in enumerate(batcher.stream(n_episodes=4, n_pending=n_pending)):
            info = episodes.info
            actions = episodes["action"][:, 0].tolist()
            ages = info["policy_age"].tolist(), info["policy_version"].tolist()
            found.append([actions, *ages, info["seed"].tolist(), batcher.n_pending])
            if number == 5:
                break
            batcher.update(number + 1)
    return found


@pytest.mark.parametrize("n_pending", variants([2], [1, 4]))
def test_the_order_of_calls_decides_which_policy_an_episode_runs_with(n_pending: int) -> None:
    found = streamed(0, n_pending)
    assert found == streamed(2, n_pending)
    for number, (actions, ages, versions, _, in_flight) in enumerate(found):
        version = max(0, number - n_pending + 1)
        assert actions == versions == [version] * 4
        assert ages == [number - version] * 4
        assert max(ages) <= n_pending - 1
        assert in_flight == n_pending - 1


def test_infos_may_depend_on_the_number_of_the_request() -> None:
    with create(0) as batcher:
        lengths = []
        for episodes in batcher.stream(2, env_info=lambda number: {"length": [number + 1] * 2}):
            lengths.append(episodes.lengths.tolist())
            if len(lengths) == 3:
                break
    assert lengths == [[1, 1], [2, 2], [3, 3]]


def test_a_batcher_can_be_used_after_a_stream_was_left() -> None:
    with create(2) as batcher:
        with pytest.raises(ZeroDivisionError):
            [1 // 0 for _ in batcher.stream(4, n_pending=3)]
        for _ in batcher.stream(4, n_pending=3):
            break
        assert batcher.n_pending == 0
        batcher.execute(3)
        assert batcher.get().info["seed"].tolist() == episode_seeds(root_from(5), 24, 3)
        requests = batcher.stream(2)
        next(requests)
    requests.close()  # after its batcher


def test_a_state_saved_in_a_loop_continues_with_what_was_in_flight() -> None:
    with create(0) as batcher, create(0) as other:
        results = batcher.stream(4, n_pending=3)
        found = [next(results).info["seed"].tolist() for _ in range(2)]
        other.load_state_dict(batcher.state_dict())
        results = other.stream(4, n_pending=3)
        found += [next(results).info["seed"].tolist() for _ in range(2)]
    assert found == [episode_seeds(root_from(5), 4 * n, 4) for n in range(4)]


def test_what_cannot_be_streamed_is_refused_at_once() -> None:
    with create(0) as batcher:
        for arguments, named in (((0,), "n_episodes"), ((1, 1.5), "n_pending")):
            with pytest.raises(SpecError, match=named):
                batcher.stream(*arguments)
    with pytest.raises(UsageError, match="closed"):
        batcher.stream(1)


# Lanes stay full ------------------------------------------------------------------------------

_clock = itertools.count()


class StampingEnv(CountingEnv):
    """Shows how many steps all environments of its process have made."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return np.array([self.number, next(_clock)], np.float32), *rest  # type: ignore[return-value]


@pytest.mark.promise("I2")
def test_a_lane_without_an_episode_begins_with_the_next_request() -> None:
    arguments = {"kind": StampingEnv}
    with EpisodeBatcher(5000, 8, ConstantAgent, {}, create_fragile, arguments, 1) as batcher:
        batcher.execute(2, env_info={"length": [1, 5000]})
        batcher.execute(2, env_info={"length": [5, 1]})
        first, second = batcher.get(), batcher.get()
    last_of_first, last_of_second = (int(r["_frame"][:, :, 1].max()) for r in (first, second))
    assert int(second["_frame"][0, 4, 1]) < last_of_first < last_of_second


def test_a_death_names_the_episode_that_was_running_in_whichever_request(tmp_path: Any) -> None:
    arguments = {"n_lanes": 3, "marks": str(tmp_path)}
    options = {"n_threads": 1, "on_worker_failure": "raise"}
    with EpisodeBatcher(5, 60, ConstantAgent, {}, create_fragile, arguments, **options) as batcher:
        batcher.execute(3, env_info={"length": [4000, 1, 1]})
        columns = {"length": 77, **failing("sigkill", 2)}
        batcher.execute(2, env_info={key: [value] * 2 for key, value in columns.items()})
        with pytest.raises(WorkerDiedError) as caught:
            batcher.get()
    where = caught.value.where
    assert (where.row, where.step, where.env_info) == (1, 2, columns)
