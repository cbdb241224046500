"""Signal handlers that raise inside a ``ParallelEnvManager``: the call may be repeated.

Everything is compared with the same environments in this process, to which nothing happens.
"""

# ruff: noqa: B023  (functions are called before the loop goes on)

from __future__ import annotations

import contextlib
import itertools
import linecache
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import (
    AgentError,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    UsageError,
    WorkerError,
)

from support.agents import ConstantAgent
from support.parallel import create_manager, create_serial, make_cartpole

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(120)]

N_LANES = 4
LANES = list(range(N_LANES))
STALL_S = 2.0
"""No call takes so long, unless it waits for something that never happens: for the timeout."""


class Alarm(Exception):
    """What the handler raises."""


class Alarms:
    """Repeats calls until they are not interrupted any more.

    Attributes:
        n_raised: How often one was interrupted.
    """

    def __init__(self) -> None:
        self.n_raised = 0
        self._random = random.Random(5)

    def raise_alarm(self, *_: Any) -> None:
        self.n_raised += 1
        raise Alarm

    def once(self, call: Callable[[], Any]) -> tuple[bool, Any]:
        """Call something; returns whether it came to its end, and what it returned.

        A handler may also run between the end of a call and the assignment of what it returns, if
        the call is more than that of a function: ``call(*arguments)`` would be.
        """
        is_there, result = False, None
        start_s = time.monotonic()
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-5, 6e-4))
                result = call()
                is_there = True
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Alarm:
            pass
        assert time.monotonic() - start_s < STALL_S
        return is_there, result

    def until(self, n_raised: int) -> Iterator[int]:
        """0, 1, 2, ..., 100 at least, until so many calls were interrupted."""
        for number in itertools.count():
            if number > 100 and self.n_raised > n_raised:
                return
            yield number

    def repeated(self, call: Callable[[], Any]) -> Any:
        """Call something again and again until it is not interrupted."""
        for _ in range(1000):
            is_there, result = self.once(call)
            if is_there:
                return result
        raise AssertionError("it never came to its end")


@pytest.fixture
def alarms() -> Iterator[Alarms]:
    alarms = Alarms()
    before = signal.signal(signal.SIGALRM, alarms.raise_alarm)
    yield alarms
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module", params=[1, 2], ids=["one_each", "two_each"])
def manager(request: pytest.FixtureRequest) -> Iterator[ParallelEnvManager]:
    with create_manager(1, make_cartpole, N_LANES, request.param) as manager:
        yield manager


def twin() -> GymEnv:
    return create_serial(1, make_cartpole, N_LANES)


def assert_same(manager: ParallelEnvManager, other: GymEnv, what: str = "") -> None:
    for key, array in other.current.items():
        assert manager.current[key].tobytes() == array.tobytes(), (what, key)


def actions(number: int) -> dict[str, Any]:
    return {"action": np.random.default_rng(number).integers(0, 2, N_LANES)}


def test_interrupted_steps_and_resets_may_be_repeated(
    manager: ParallelEnvManager, alarms: Alarms
) -> None:
    other, n_resets = twin(), itertools.count()
    ended = LANES
    for number in alarms.until(300):
        if ended:
            seeds, options = [next(n_resets) for _ in ended], [None] * len(ended)
            alarms.repeated(lambda: manager.reset_lanes(ended, seeds, options))
            other.reset_lanes(ended, seeds, options)
            assert_same(manager, other, f"reset before step {number}")
        lanes = LANES if number % 5 else [0, 2, 3]
        ended = alarms.repeated(lambda: manager.step_lanes(lanes, actions(number)))
        assert ended == other.step_lanes(lanes, actions(number))
        assert_same(manager, other, f"step {number}")


def test_after_an_interruption_something_else_may_be_done(
    manager: ParallelEnvManager, alarms: Alarms
) -> None:
    other = twin()
    for number in alarms.until(100):
        alarms.once(lambda: manager.reset_lanes(LANES, LANES, [None] * N_LANES))
        alarms.once(lambda: manager.step_lanes(LANES, actions(1)))
        alarms.once(lambda: manager.step_some(1, [0, 1], actions(2)))
        manager.reset_lanes([2, 3], [2, 3], [None, None])
        is_there, _ = alarms.once(lambda: manager.remotes[2].send(("step", 1)))
        if is_there:
            assert alarms.repeated(manager.remotes[2].recv)[0] == "transition"
        else:
            with contextlib.suppress(UsageError):  # it was not sent
                assert manager.remotes[2].recv()[0] == "transition"
        seeds = [number + lane for lane in LANES]
        manager.reset_lanes(LANES, seeds, [None] * N_LANES)
        other.reset_lanes(LANES, seeds, [None] * N_LANES)
        assert_same(manager, other, f"reset {number}")
        for step in range(3):
            manager.step_lanes(LANES, actions(step))
            other.step_lanes(LANES, actions(step))
            assert_same(manager, other, f"step {step} after reset {number}")


def test_an_interrupted_step_is_made_once_whatever_follows(
    manager: ParallelEnvManager, alarms: Alarms
) -> None:
    """Lanes step on with other actions: where they are tells whether the step was made."""
    left, right = ({"action": np.full(N_LANES, action)} for action in (0, 1))
    states = []
    for steps in ([left], [right, left]):
        other = twin()
        other.reset_lanes(LANES, LANES, [None] * N_LANES)
        for step in steps:
            other.step_lanes(LANES, step)
        states.append(other.current["frame"].tobytes())
    was_made = set()
    for _ in range(300):
        manager.reset_lanes(LANES, LANES, [None] * N_LANES)
        is_there, _ = alarms.once(lambda: manager.step_lanes(LANES, right))
        manager.step_lanes(LANES, left)
        reached = states.index(manager.current["frame"].tobytes())
        assert reached or not is_there
        was_made.add((is_there, reached))
    assert {(False, 0), (False, 1)} <= was_made


@pytest.mark.parametrize("restarts", [False, True])
def test_interrupted_calls_with_tensors_may_be_repeated(alarms: Alarms, restarts: bool) -> None:
    other = create_serial(1, make_cartpole, N_LANES, restarts)
    with create_manager(1, make_cartpole, N_LANES, 2, restarts) as manager:
        running: Any = []
        for number in alarms.until(100):
            if len(running) == 0:
                (values, running), (expected, _) = alarms.repeated(manager.reset), other.reset()
                assert_equal(values, expected)
            output = DictTensor({"action": torch.from_numpy(actions(number)["action"])[running]})
            (first, ran), (second, running) = alarms.repeated(lambda: manager.step(output))
            (one, one_ran), (two, two_running) = other.step(output)
            assert ran.tolist() == one_ran.tolist()
            assert running.tolist() == two_running.tolist()
            assert_equal(first, one)
            assert_equal(second, two)


def assert_equal(some: DictTensor, other: DictTensor) -> None:
    assert list(some) == list(other)
    for key, values in other.items():
        assert torch.equal(some[key], values), key


def test_interrupted_calls_first_come_first_served_may_be_repeated(
    manager: ParallelEnvManager, alarms: Alarms
) -> None:
    other = twin()
    alarms.repeated(lambda: manager.reset_lanes(LANES, LANES, [None] * N_LANES))
    other.reset_lanes(LANES, LANES, [None] * N_LANES)
    n_steps, ready, number = [0] * N_LANES, LANES, 0
    seeds = itertools.count(N_LANES)
    for number in alarms.until(200):
        given = actions(number)
        told = alarms.repeated(lambda: manager.step_some(1, ready, given))
        if ready:
            other.step_lanes(ready, given)
        ready = told
        for lane in ready:
            n_steps[lane] += 1
            for key, array in other.current.items():
                assert manager.current[key][lane].tobytes() == array[lane].tobytes(), key
        ended = [lane for lane in ready if other.current["done"][lane]]
        if ended:
            new, options = [next(seeds) for _ in ended], [None] * len(ended)
            alarms.repeated(lambda: manager.reset_lanes(ended, new, options))
            other.reset_lanes(ended, new, options)
    while any(manager.step_some(1)):
        pass
    assert min(n_steps) > 10


def test_interrupted_requests_of_remotes_may_be_repeated(
    manager: ParallelEnvManager, alarms: Alarms
) -> None:
    other = make_cartpole()
    remote, seeds = manager.remotes[1], itertools.count()
    is_over = True
    for number in alarms.until(100):
        if is_over:
            seed = next(seeds)
            alarms.repeated(lambda: remote.send(("reset", {"seed": seed})))
            kind, value = alarms.repeated(remote.recv)
            assert kind == "obs"
            assert value.tobytes() == other.reset(seed=seed)[0].tobytes()
        action = number % 2
        alarms.repeated(lambda: remote.send(("step", action)))
        kind, (value, reward, is_over, _) = alarms.repeated(remote.recv)
        assert kind == "transition"
        expected = other.step(action)
        assert value.tobytes() == expected[0].tobytes()
        assert (reward, is_over) == (expected[1], expected[2] or expected[3])
    manager.reset_lanes(LANES, LANES, [None] * N_LANES)


def test_a_batcher_over_a_manager_loses_the_request_and_works_on(alarms: Alarms) -> None:
    """What the handler raises comes out of ``get``, or out of the agent that it interrupted."""
    batchers = [
        EpisodeBatcher(
            16,
            16,
            ConstantAgent,
            {},
            create,
            {"make_env": make_cartpole, "n_lanes": 2},
            n_threads=0,
            seeds=1,
        )
        for create in (create_manager, create_serial)
    ]
    n_lost = 0
    with batchers[0] as batcher, batchers[1] as other:
        for _ in range(150):
            batcher.execute(3)
            other.execute(3)
            expected = other.get()
            try:
                is_there, result = alarms.once(batcher.get)
                if not is_there:
                    result = batcher.get()  # it was complete, or has yet to begin
            except (WorkerError, AgentError):
                n_lost += 1
                continue
            assert_equal(result, expected)
        batcher.execute(3)
        other.execute(3)
        assert_equal(batcher.get(), other.get())
    assert n_lost > 20


# At every line ----------------------------------------------------------------------------------


class Tracer:
    """Sends an alarm before a line of rlpool is run, counted from the beginning of a call.

    Not before a ``return``: signals' handlers run when functions begin, loops go round, and calls
    are over.

    Args:
        number: Which line.

    Attributes:
        has_struck: Whether it came to that.
    """

    def __init__(self, number: int) -> None:
        self.has_struck = False
        self._left = number

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if "/rlpool/" not in path or path.endswith("interrupts.py"):
            return None
        is_return = linecache.getline(path, frame.f_lineno).lstrip().startswith("return")
        if event == "line" and not is_return and not self.has_struck:
            self._left -= 1
            if self._left < 0:
                self.has_struck = True
                signal.raise_signal(signal.SIGALRM)
        return self


def step_all(manager: ParallelEnvManager, step: Any) -> Any:
    return manager.step_lanes(LANES, step)


def step_two_of_them(manager: ParallelEnvManager, step: Any) -> Any:
    return manager.step_lanes([1, 2], step)


def step_some_and_wait(manager: ParallelEnvManager, step: Any) -> Any:
    return manager.step_some(3, [0, 1, 3], step)


def reset_one(manager: ParallelEnvManager, step: Any) -> Any:
    manager.reset_lanes([2], [5], [None])


def reset_one_that_is_announced(manager: ParallelEnvManager, step: Any) -> Any:
    manager.announce_episodes([7, 8, 9, 10], {})
    manager.reset_lanes([2], [9], [None])


@pytest.mark.parametrize(
    ("call", "alone"),
    [
        (step_all, lambda other, step: other.step_lanes(LANES, step)),
        (step_two_of_them, lambda other, step: other.step_lanes([1, 2], step)),
        (step_some_and_wait, lambda other, step: other.step_lanes([0, 1, 3], step)),
        (reset_one, lambda other, _: other.reset_lanes([2], [5], [None])),
        (reset_one_that_is_announced, lambda other, _: other.reset_lanes([2], [9], [None])),
    ],
)
def test_a_call_that_is_interrupted_at_any_line_may_be_repeated(
    manager: ParallelEnvManager, alarms: Alarms, call: Any, alone: Any
) -> None:
    other, number = twin(), 0
    tracer = Tracer(0)
    while tracer.has_struck or not number:
        for each in (manager, other):
            each.reset_lanes(LANES, LANES, [None] * N_LANES)
        tracer = Tracer(number)
        before = sys.gettrace()
        start_s = time.monotonic()
        sys.settrace(tracer)
        try:
            call(manager, actions(number))
        except Alarm:
            sys.settrace(before)
            call(manager, actions(number))
        finally:
            sys.settrace(before)
        assert time.monotonic() - start_s < STALL_S
        alone(other, actions(number))
        assert_same(manager, other, f"line {number}")
        for each in (manager, other):
            each.step_lanes(LANES, actions(number + 1))
        assert_same(manager, other, f"after line {number}")
        number += 1
    assert number > 30
