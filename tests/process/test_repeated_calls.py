"""A call in which a signal's handler raises is repeated, and has done its work once."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from rlpool import Batcher, EnvError, EpisodeBatcher, GymEnv, GymEnvInf

from support.agents import InfoEcho
from support.envs import CountingEnv, assert_same_tensors
from support.striking import Alarm, Strike, alarms, until_done

pytestmark = [pytest.mark.timeout(120), pytest.mark.promise("I1")]

N_PARTS = 6
"""Points of each call that are struck, from its beginning to its end."""
NEVER = 10**9

Calls = list[Callable[[], Any]]


@pytest.fixture(autouse=True)
def handler_raises() -> Iterator[None]:
    with alarms():
        yield


class Updated(InfoEcho):
    def update(self, info: Any) -> None:
        """Take anything."""


class Env(CountingEnv):
    def step(self, action: Any) -> Any:
        if self.number == FAILS:
            raise KeyError("goal")
        return super().step(action)


class Acting(CountingEnv):
    """Draws from the generator that its seed determines."""

    def step(self, action: Any) -> Any:
        result = super().step(action)
        return result[0], float(self.np_random.random()), *result[2:]


FAILS = 999  # the id of an episode that fails


def create_env(seed: int, cls: Any) -> GymEnv:
    return cls([Env(length=3) for _ in range(2)], seed)


def episodes(n_threads: int) -> EpisodeBatcher:
    return EpisodeBatcher(4, 16, Updated, {}, create_env, {"cls": GymEnv}, n_threads, seeds=1)


def windows(n_threads: int) -> Batcher:
    return Batcher(4, None, Updated, {}, create_env, {"cls": GymEnvInf}, n_threads, seeds=1)


def calls_of_episodes(batcher: EpisodeBatcher, number: int) -> Calls:
    ids = [number, number + 1, number + 2]
    given = {"agent_info": {"id": ids}, "env_info": {"id": [100 + each for each in ids]}}
    failing = {"agent_info": {"id": [0]}, "env_info": {"id": [FAILS]}}
    return [
        lambda: batcher.update({"number": number}),
        partial(batcher.execute, 3, **given),
        partial(batcher.execute, 1, **failing),
        partial(batcher.execute, 3, **given),  # the same as the first
        batcher.reexecute,
        batcher.get,
        batcher.get,
        batcher.get,
        batcher.get,
    ]


def calls_of_windows(batcher: Batcher, number: int) -> Calls:
    return [
        lambda: batcher.reset({"id": [number, 1]}, {"id": [2, number], "length": [2, 9]}),
        batcher.execute,
        lambda: batcher.update({"number": number}),
        lambda: batcher.execute({"id": [number + 1, 1]}),
        batcher.get,
        batcher.get,
    ]


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except EnvError as error:
        return error.what, error.where.row, error.where.seed


@pytest.mark.parametrize(
    ("create", "calls_of"), [(episodes, calls_of_episodes), (windows, calls_of_windows)]
)
def test_a_batcher_s_call_that_is_struck_at_any_point_and_repeated_does_its_work_once(
    create: Callable[[int], Any], calls_of: Callable[[Any, int], Calls]
) -> None:
    def play(number: int, strikes: Iterable[Strike]) -> list[Strike]:
        """All calls, each of them struck and repeated."""
        strikes = list(strikes)
        pairs = zip(calls_of(batcher, number), calls_of(other, number), strict=True)
        for strike, (mine, others) in zip(strikes, pairs, strict=True):
            assert_equal(until_done(partial(outcome, mine), strike), outcome(others), number)
        assert batcher.n_pending == 0
        return strikes

    with create(1) as batcher, create(0) as other:
        n_calls = len(calls_of(batcher, 0))
        counted = play(0, [Strike(NEVER) for _ in range(n_calls)])
        n_struck = 0
        for part in range(N_PARTS):
            points = [each.n_points * part // N_PARTS for each in counted]
            n_struck += sum(each.has_struck for each in play(part, map(Strike, points)))
        assert n_struck > 0.8 * N_PARTS * n_calls
        point, struck = 0, [True]
        while any(struck):
            # Where the work is done, and the user does not know yet.
            ends = [
                Strike(point, ("outermost", "checked", "get", "update")) for _ in range(n_calls)
            ]
            struck = [each.has_struck for each in play(point, ends)]
            point += 1
        assert point > 5


def assert_equal(got: Any, expected: Any, number: int) -> None:
    if not hasattr(expected, "info"):
        assert got == expected, f"point {number}"
        return
    assert got is not None, f"point {number}"
    assert_same_tensors(got, dict(expected.items()))
    for key in ("episode", "seed", "policy_version"):
        assert torch.equal(got.info[key], expected.info[key]), f"{key}, point {number}"


LENGTHS = [3, 50, 9]
"""Of episodes in slots of four steps, so that some are drained."""


def alarm_soon(rng: random.Random) -> None:
    signal.setitimer(signal.ITIMER_REAL, 1e-6 + 0.0006 * rng.random())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="handlers run when a call has returned")
def test_results_survive_a_storm_of_real_signals() -> None:
    rng, n_interrupts = random.Random(1), 0
    with episodes(2) as batcher:
        for number in range(40):
            ids = [number, 0, number + 1]
            agent_info, env_info = {"id": ids}, {"id": ids, "length": LENGTHS}
            is_requested, result = False, None
            while result is None:
                try:
                    alarm_soon(rng)
                    if not is_requested:
                        # With *infos, a handler could run after it has returned.
                        batcher.execute(3, agent_info, env_info)
                        is_requested = True
                    result = batcher.get()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Alarm:
                    n_interrupts += 1
            assert result.lengths.tolist() == LENGTHS
            assert result.info["episode"].tolist() == [0, 1, 2]
            for row, length in enumerate(LENGTHS):
                assert result["info_id"][row, :length].tolist() == [ids[row]] * length
                assert result["frame"][row, :length, 0].tolist() == list(range(length))
        assert batcher._n_episodes == 120
    assert n_interrupts > 10
