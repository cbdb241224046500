"""States of batchers with requests in flight: they are made again, with the same bits.

A program knows how many results it has, and a batcher how many requests are pending: together they
say what is to be done next, wherever the program was interrupted.
"""

from __future__ import annotations

import io
import itertools
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from process.watching import assert_all_equal

from rlpool import Batcher, EnvError, EpisodeBatcher, SpecError, TemporalDictTensor, wait

from support.fragile import RecurrentAgent, create_fragile, failing
from support.striking import Strike
from support.variants import variants

pytestmark = [pytest.mark.timeout(120), pytest.mark.promise("I2")]

N_RESULTS = 7
MOST_PENDING = 3

Make = Callable[[int], Any]
Results = list[TemporalDictTensor]


def episodes(n_workers: int) -> EpisodeBatcher:
    return EpisodeBatcher(4, 24, RecurrentAgent, {}, create_fragile, {}, n_workers, seeds=5)


def windows(n_workers: int, restarts: bool = False) -> Batcher:
    """A batcher that was reset."""
    # Lanes of any number of workers are the same two.
    n_lanes = 2 // max(1, n_workers)
    env_args = {"restarts": restarts, "n_lanes": n_lanes}
    batcher = Batcher(5, None, RecurrentAgent, {}, create_fragile, env_args, n_workers, seeds=5)
    batcher.reset({"gain": [1.0, 1.5]}, {"length": [7, 100]})
    return batcher


def restarting(n_workers: int) -> Batcher:
    return windows(n_workers, restarts=True)


def policy(number: int) -> Any:
    return torch.full((2,), number / 10)


def request(batcher: Any, number: int) -> None:
    """The request of a number, with a policy, infos and seeds of its own."""
    if batcher.policy_version <= number:
        batcher.update(policy(number))
    gain = {"gain": 1.0 + number / 20}
    if isinstance(batcher, EpisodeBatcher):
        n_episodes = 5 + number
        seeds = list(range(n_episodes)) if number == 4 else None
        batcher.execute(n_episodes, gain, {"length": 2 + number}, episode_seeds=seeds)
        return
    batcher.execute(*((gain, {"length": 4}) if number in (2, 3) else ()))


def go_on(batcher: Any, n_done: int, n_results: int = N_RESULTS) -> Iterator[Any]:
    """Results from the next on, with several requests in flight."""
    while n_done < n_results:
        while batcher.n_pending < min(MOST_PENDING, n_results - n_done):
            request(batcher, n_done + batcher.n_pending)
        yield batcher.get()
        n_done += 1


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_the_same(found: Results, expected: Results) -> None:
    assert_all_equal(found, expected)
    for one, other in zip(found, expected, strict=True):
        for key in ("seed", "policy_version", "agent_info/gain"):
            assert torch.equal(one.info[key], other.info[key]), key


@pytest.mark.parametrize(
    ("make", "first", "second"),
    variants(
        [(episodes, 0, 2), (episodes, 2, 0), (windows, 2, 2), (restarting, 0, 0)],
        [
            *itertools.product([episodes], [0, 1, 2], [0, 2]),
            *((make, n, n) for make in (windows, restarting) for n in (0, 1, 2)),
        ],
    ),
)
def test_requests_in_flight_are_made_again_with_any_number_of_workers(
    make: Make, first: int, second: int
) -> None:
    with make(first) as batcher:
        expected = list(go_on(batcher, 0))
    for n_done in (0, 2, 4):
        found: Results = []
        with make(first) as batcher:
            for result in go_on(batcher, 0):
                if len(found) == n_done:
                    break  # that one was handed out
                found.append(result)
            request(batcher, n_done + 3)
            state = through_a_file(batcher.state_dict())
            found.append(result)
        with make(second) as batcher:
            batcher.load_state_dict(state)
            assert batcher.n_pending == len(state["pending"]) == MOST_PENDING
            found += [batcher.get() for _ in range(MOST_PENDING)]
            found += go_on(batcher, n_done + 4)
        assert_the_same(found[: len(expected)], expected)


def test_a_result_that_is_there_and_was_not_taken_is_pending() -> None:
    with episodes(2) as batcher, episodes(0) as other:
        request(batcher, 0)
        wait([batcher])
        batcher.progress  # noqa: B018  (which takes what was reported)
        other.load_state_dict(through_a_file(batcher.state_dict()))
        assert_the_same([other.get()], [batcher.get()])
        assert "pending" not in batcher.state_dict()


def test_further_requests_have_the_last_update_though_none_ran_with_it() -> None:
    with episodes(0) as batcher, episodes(2) as other:
        request(batcher, 0)
        batcher.update(policy(7))
        other.load_state_dict(batcher.state_dict())
        for each in (batcher, other):
            each.execute(3, {"gain": 2.0})
        results = [[each.get(), each.get()] for each in (batcher, other)]
        assert_the_same(*results)
        assert results[1][1].info["policy_version"].tolist() == [2] * 3


def test_a_state_does_not_change_and_can_be_taken_from_a_batcher_that_has_just_loaded_it() -> None:
    with restarting(0) as batcher, restarting(0) as other, restarting(0) as third:
        for _ in zip(range(3), go_on(batcher, 0), strict=False):
            pass
        request(batcher, 3)
        state = batcher.state_dict()
        before = through_a_file(state)
        expected = [batcher.get() for _ in range(batcher.n_pending)]
        other.load_state_dict(state)
        third.load_state_dict(other.state_dict())
        for each in (other, third):
            assert_the_same([each.get() for _ in range(each.n_pending)], expected)
        assert str(state) == str(before)


def test_a_request_that_has_failed_and_was_not_taken_fails_again(tmp_path: Any) -> None:
    def make() -> EpisodeBatcher:
        env_args = {"marks": str(tmp_path), "times": 99}
        return EpisodeBatcher(4, 24, RecurrentAgent, {}, create_fragile, env_args, 1, seeds=5)

    with make() as batcher, make() as other:
        columns = {key: [value, 0] for key, value in failing("raise", 1).items()}
        batcher.execute(2, {"gain": 1.0}, columns)
        request(batcher, 1)
        wait([batcher])
        other.load_state_dict(batcher.state_dict())
        for each in (batcher, other):
            with pytest.raises(EnvError):
                each.get()
        assert_all_equal([batcher.get()], [other.get()])


# Ctrl-C -----------------------------------------------------------------------------------------


def interrupted(make: Make, n_workers: int, strike: Strike) -> tuple[Results, Any]:
    """What a program has that was struck somewhere, and the state that it saved."""
    found: Results = []
    with make(n_workers) as batcher:
        try:
            with suppress(KeyboardInterrupt), strike:
                found.extend(go_on(batcher, 0))
        finally:
            state = through_a_file(batcher.state_dict())
    return found, state


def points_of(make: Make, n_workers: int, n: int, **how: Any) -> list[int]:
    strike = Strike(10**9, **how)
    interrupted(make, n_workers, strike)
    return random.Random(n).sample(range(strike.n_points), n)


LINES, FILES = {"lines": True}, {"files": ("batch/",)}


@pytest.mark.promise("I3")
@pytest.mark.parametrize(
    ("make", "n_workers", "n", "how"),
    variants(
        [(episodes, 0, 6, LINES), (windows, 0, 6, FILES), (restarting, 2, 2, {})],
        itertools.starmap(
            lambda make, how: (make, *how),
            itertools.product(
                [episodes, windows, restarting], [(0, 60, LINES), (0, 60, FILES), (2, 20, {})]
            ),
        ),
    ),
)
def test_a_state_that_is_saved_after_ctrl_c_at_any_point_goes_on_with_the_same_bits(
    make: Make, n_workers: int, n: int, how: dict[str, Any]
) -> None:
    with make(n_workers) as batcher:
        expected = list(go_on(batcher, 0))
    n_struck = 0
    for point in points_of(make, n_workers, n, **how):
        strike = Strike(point, signal_number=signal.SIGINT, **how)
        found, state = interrupted(make, n_workers, strike)
        n_struck += strike.has_struck
        with make(n_workers) as batcher:
            if found or "pending" in state:  # otherwise it begins anew
                batcher.load_state_dict(state)
            found += go_on(batcher, len(found))
        assert_all_equal(found, expected)
    assert n_struck >= 0.5 * n


# Streams ----------------------------------------------------------------------------------------


class StoppedError(Exception):
    """What ends a program in the middle."""


def streamed(
    batcher: EpisodeBatcher, found: Results, stops_at: int = -1, n_pending: int = MOST_PENDING
) -> None:
    """Learn from a stream, from the next result on; the loop may be left in its body."""
    infos = {"env_info": lambda number: {"length": 2 + number}}
    for result in batcher.stream(4, n_pending, {"gain": 1.5}, **infos):
        found.append(result)
        if len(found) == N_RESULTS:
            return
        batcher.update(policy(len(found)))
        if len(found) == stops_at:
            raise StoppedError


def ages(results: Results) -> list[Any]:
    return [result.info["policy_age"].tolist() for result in results]


@pytest.mark.parametrize(("n_workers", "stops_at"), variants([(0, 4), (2, 1)], [(0, 1), (2, 4)]))
def test_a_stream_that_was_left_goes_on_from_a_state(n_workers: int, stops_at: int) -> None:
    expected: Results = []
    with episodes(0) as batcher:
        streamed(batcher, expected)
    found: Results = []
    with episodes(n_workers) as batcher:
        try:
            with suppress(StoppedError):
                streamed(batcher, found, stops_at)
        finally:
            state = through_a_file(batcher.state_dict())
        assert batcher.n_pending == 0
        batcher.execute(1, {"gain": 1.0})
        assert len(batcher.get()) == 1
        assert "pending" not in batcher.state_dict()
    with episodes(2 - n_workers) as batcher:
        batcher.load_state_dict(state)
        assert batcher.n_pending == MOST_PENDING - 1
        streamed(batcher, found)
    assert_the_same(found, expected)
    assert ages(found) == ages(expected)


@pytest.mark.parametrize("n_pending", variants([2], [1]))
def test_a_stream_counts_on_after_a_state_was_loaded(n_pending: int) -> None:
    lengths = []
    with episodes(0) as batcher, episodes(0) as other:
        for part in (batcher, other):
            found: Results = []
            with suppress(StoppedError):
                streamed(part, found, 3, n_pending)
            lengths += [result.info["env_info/length"][0].item() for result in found]
            state = through_a_file(batcher.state_dict())
            if part is batcher:
                other.load_state_dict(state)
        # A new stream begins with the first number where no state was loaded, or after execute().
        del found[:]
        other.execute(1, {"gain": 1.5}, {"length": 2})
        with suppress(StoppedError):
            streamed(other, found, 3, n_pending)
    assert lengths == [2, 3, 4, 5, 6, 7]
    assert [result.info["env_info/length"][0].item() for result in found] == [2, 3, 4]


@pytest.mark.promise("I3")
# Python ignores what a handler raises while an iterator that nobody has any more is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("n", variants([6], [150]))
def test_a_stream_that_ctrl_c_has_ended_at_any_point_goes_on_from_a_state(n: int) -> None:
    expected: Results = []
    how: dict[str, Any] = {"files": ("batch/",)}
    counted = Strike(10**9, **how)
    with episodes(0) as batcher, counted:
        streamed(batcher, expected)
    for point in random.Random(n).sample(range(counted.n_points), n):
        found: Results = []
        with episodes(0) as batcher:
            with suppress(KeyboardInterrupt), Strike(point, signal_number=signal.SIGINT, **how):
                streamed(batcher, found)
            state = through_a_file(batcher.state_dict())
        with episodes(0) as batcher:
            if found or "pending" in state:
                batcher.load_state_dict(state)
            if batcher.policy_version < len(found):
                batcher.update(policy(len(found)))
            if len(found) < N_RESULTS:
                streamed(batcher, found)
        assert_all_equal(found, expected)


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [episodes, windows])
def test_a_state_that_is_damaged_is_refused_and_changes_nothing(make: Make) -> None:
    with make(0) as batcher, make(0) as other:
        request(batcher, 0)
        state = batcher.state_dict()
        lacks = [({**state, "pending": [{}]}, "KeyError"), ({**state, "pending": 3}, "TypeError")]
        lacks.append(({k: v for k, v in state.items() if k != "policies"}, "'policies'"))
        lacks += [({**state, "root": "zz"}, "ValueError"), ({**state, "agent_info": 1}, "")]
        if make is episodes:
            del lacks[-1]
            first = {k: v for k, v in state["pending"][0].items() if k != "first"}
            lacks.append(({**state, "pending": [first]}, "'first'"))
        before = str(other.state_dict())
        for damaged, text in lacks:
            with pytest.raises(SpecError, match=f"the state cannot be read: .*{text}"):
                other.load_state_dict(damaged)
        assert str(other.state_dict()) == before


def test_requests_are_not_made_again_by_agents_that_were_updated_before() -> None:
    with episodes(0) as batcher, episodes(0) as other:
        request(batcher, 0)
        other.update(policy(3))
        before = other.state_dict()
        with pytest.raises(SpecError, match="agents here were updated before") as caught:
            other.load_state_dict(batcher.state_dict())
        assert caught.value.fix == "call load_state_dict() before update()"
        assert other.state_dict() == before


def test_a_state_that_is_saved_after_ctrl_c_in_a_step_has_the_request() -> None:
    class Interrupting(RecurrentAgent):
        def __call__(self, *arguments: Any) -> Any:
            if strikes:
                strikes.pop()
                raise KeyboardInterrupt
            return super().__call__(*arguments)

    def make() -> EpisodeBatcher:
        return EpisodeBatcher(4, 24, Interrupting, {}, create_fragile, {}, 0, seeds=5)

    strikes: list[int] = []
    with make() as batcher, make() as other:
        strikes.append(1)
        request(batcher, 0)
        with pytest.raises(KeyboardInterrupt):
            batcher.get()
        state = through_a_file(batcher.state_dict())
        other.load_state_dict(state)
        assert_the_same([other.get()], [batcher.get()])
