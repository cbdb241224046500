"""Requests in flight while a result is learned from: order, policies, ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlpool import EpisodeBatcher, SpecError, UsageError
from rlpool.testing import CountingEnv

from support.agents import ConstantAgent
from support.variants import variants
from support.vector_envs import create_lanes


class Following(ConstantAgent):
    """Does what the last update says."""

    def update(self, info: Any) -> None:
        self.action = int(info)


def create(n_workers: int, over: str = "gym") -> EpisodeBatcher:
    env_args = {"over": over, "n_lanes": 2, "kind": CountingEnv}
    arguments: Any = (10, 24, Following, {}, create_lanes, env_args, n_workers, 5)
    return EpisodeBatcher(*arguments)


def streamed(n_workers: int, n_pending: int, over: str = "gym") -> list[list[Any]]:
    found = []
    with create(n_workers, over) as batcher:
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
    assert found == streamed(2, n_pending, over="own")
    for number, (actions, ages, versions, _, in_flight) in enumerate(found):
        version = max(0, number - n_pending + 1)
        assert actions == versions == [version] * 4
        assert ages == [number - version] * 4
        assert max(ages) <= n_pending - 1
        assert in_flight == n_pending - 1


def test_infos_may_depend_on_the_number_of_the_request() -> None:
    with create(1) as batcher:
        lengths = []
        requests = batcher.stream(2, env_info=lambda number: {"length": [number + 1] * 2})
        for episodes in requests:
            lengths.append(episodes.lengths.tolist())
            if len(lengths) == 3:
                break
        requests.close()
    assert lengths == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("places", [[0, "own"], [2, "gym"], [1, "gym", 2]])
def test_a_batcher_can_be_used_after_a_stream_was_left(places: Any) -> None:
    with create(*places) as batcher:
        with pytest.raises(ZeroDivisionError):
            [1 // 0 for _ in batcher.stream(4, n_pending=3)]
        for _ in batcher.stream(4, n_pending=3):
            break
        assert batcher.n_pending == 0
        batcher.execute(3)
        result = batcher.get()
        assert len(result) == 3
        assert "policy_age" not in result.info


def test_while_a_stream_is_open_nothing_else_takes_its_results() -> None:
    with create(0) as batcher:
        batcher.execute(4)
        unused = batcher.stream(4)  # which has not begun
        results = batcher.stream(4, n_pending=2)
        assert len(batcher.get()) == 4
        next(results)
        calls: Any = [
            lambda: batcher.execute(9),
            batcher.reexecute,
            batcher.get,
            lambda: batcher.stream(3),
            lambda: next(unused),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="while a stream of this batcher is open") as error:
                call()
            assert "second batcher" in error.value.fix
        assert len(next(results)) == 4
        results.close()
        unused.close()
        for length in (5, 6):
            assert len(next(batcher.stream(length))) == length  # nobody has it any more
            batcher.execute(3)
            assert len(batcher.get()) == 3


def test_a_stream_that_outlives_its_batcher_ends_quietly() -> None:
    with create(1) as batcher:
        requests = batcher.stream(2)
        assert torch.equal(next(requests).info["policy_age"], torch.zeros(2, dtype=torch.int64))
    requests.close()


def test_what_is_pending_when_a_stream_begins_comes_first_and_counts() -> None:
    with create(0) as batcher:
        batcher.execute(3)
        numbers: list[int] = []

        def info(number: int) -> dict[str, int]:
            numbers.append(number)
            return {"length": number + 1}

        results = batcher.stream(2, n_pending=2, env_info=info)
        assert [len(next(results)) for _ in range(3)] == [3, 2, 2]
        assert numbers == [1, 2, 3]


def test_what_cannot_be_streamed_is_refused_at_once() -> None:
    with create(0) as batcher:
        for arguments in ((0,), (1, 0), (1, 1.5)):
            with pytest.raises(SpecError, match="should be an int"):
                batcher.stream(*arguments)
        named: Any
        for named, name in (({"pending": 2}, "n_pending"), ({"num_episodes": 3}, "n_episodes")):
            with pytest.raises(TypeError, match=f"fix: +pass {name}"):
                batcher.stream(**named)
    with pytest.raises(UsageError, match="closed"):
        batcher.stream(1)
