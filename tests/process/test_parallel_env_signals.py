"""Signal handlers that raise inside a ``ParallelEnvManager``: the call may be repeated.

Everything is compared with the same environments in this process, to which nothing happens.
"""

# ruff: noqa: B023  (functions are called before the loop goes on)

from __future__ import annotations

import contextlib
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

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(60),
    pytest.mark.promise("I4"),
]

N_LANES = 4
LANES = list(range(N_LANES))
STALL_S = 2.0
"""Only a call that waits for something that never happens takes this long."""


class Alarm(Exception):
    """What the handler raises."""


class Alarms:
    """Interrupts calls at random times.

    Attributes:
        n_raised: How many calls were interrupted.
    """

    def __init__(self) -> None:
        self.n_raised = 0
        self._random = random.Random(5)

    def raise_alarm(self, *_: Any) -> None:
        self.n_raised += 1
        raise Alarm

    def once(self, call: Callable[[], Any]) -> tuple[bool, Any]:
        """Call a function; returns whether it came to its end, and what it returned.

        With arguments, a handler could also run between the end of the call and the assignment.
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

    def repeated(self, call: Callable[[], Any]) -> Any:
        """Call a function until it is not interrupted."""
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


@pytest.fixture(scope="module", params=[2, pytest.param(1, marks=pytest.mark.slow)])
def manager(request: pytest.FixtureRequest) -> Iterator[ParallelEnvManager]:
    with create_manager(1, make_cartpole, N_LANES, envs_per_worker=request.param) as manager:
        yield manager


def twin() -> GymEnv:
    return create_serial(1, make_cartpole, N_LANES)


def assert_same(manager: ParallelEnvManager, other: GymEnv, what: str = "") -> None:
    for key, array in other.current.items():
        assert manager.current[key].tobytes() == array.tobytes(), (what, key)


def actions(number: int) -> dict[str, Any]:
    return {"action": np.random.default_rng(number).integers(0, 2, N_LANES)}


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
    for _ in range(200):
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
    with create_manager(1, make_cartpole, N_LANES, restarts, envs_per_worker=2) as manager:
        running: Any = []
        for number in range(200):
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
    assert alarms.n_raised > 50


def assert_equal(some: DictTensor, other: DictTensor) -> None:
    assert list(some) == list(other)
    for key, values in other.items():
        assert torch.equal(some[key], values), key


def test_a_batcher_over_a_manager_loses_the_request_and_works_on(alarms: Alarms) -> None:
    """What the handler raises comes out of ``get``, or out of the agent that it interrupted."""
    env_args = {"make_env": make_cartpole, "n_lanes": 2}
    batchers = [
        EpisodeBatcher(16, 16, ConstantAgent, {}, create, env_args, n_threads=0, seeds=1)
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
    """Raises an alarm before a line of rlpool is run, counted from the beginning of a call.

    Not before a ``return``: handlers run where functions begin, loops repeat and calls end.

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


def remote(manager: ParallelEnvManager, step: Any, do: Any) -> None:
    """Reset environment 1 with seed 7 and step it, through its remote."""
    remote = manager.remotes[1]
    for request in (("reset", {"seed": 7}), ("step", {"action": step["action"][1]})):
        do(lambda: remote.send(request))
        assert do(remote.recv)[0] != "error"


def announced(manager: ParallelEnvManager, step: Any, do: Any) -> None:
    do(lambda: manager.announce_episodes([7, 8, 9, 10], {}))
    do(lambda: manager.reset_lanes([2], [9], [None]))


@pytest.mark.parametrize("is_repeated", [True, False], ids=["repeated", "given up"])
@pytest.mark.parametrize(
    ("call", "lanes_reset", "lanes_stepped"),
    [
        (lambda env, step, do: do(lambda: env.step_lanes(LANES, step)), {}, LANES),
        (lambda env, step, do: do(lambda: env.step_lanes([1, 2], step)), {}, [1, 2]),
        (lambda env, step, do: do(lambda: env.step_some(3, [0, 1, 3], step)), {}, [0, 1, 3]),
        (lambda env, step, do: do(lambda: env.reset_lanes([2], [5], [None])), {2: 5}, []),
        (announced, {2: 9}, []),
        (remote, {1: 7}, [1]),
    ],
    ids=["step all", "step two", "step some", "reset", "announced", "remote"],
)
@pytest.mark.usefixtures("alarms")
def test_a_call_that_is_interrupted_at_any_line_may_be_repeated_or_given_up(
    manager: ParallelEnvManager,
    call: Any,
    lanes_reset: dict[int, int],
    lanes_stepped: list[int],
    is_repeated: bool,
) -> None:
    other, number = twin(), 0
    tracer = Tracer(0)

    def do(part: Callable[[], Any]) -> Any:
        try:
            return part()
        except Alarm:
            if not is_repeated:
                raise
            return part()

    while tracer.has_struck or not number:
        for env in (manager, other):
            env.reset_lanes(LANES, LANES, [None] * N_LANES)
        tracer = Tracer(number)
        before, start_s, is_done = sys.gettrace(), time.monotonic(), True
        sys.settrace(tracer)
        try:
            call(manager, actions(number), do)
        except Alarm:
            is_done = False
            with contextlib.suppress(UsageError):  # nothing was sent
                manager.remotes[1].recv()
            seeds = [number + lane for lane in LANES]
            for env in (manager, other):
                env.reset_lanes(LANES, seeds, [None] * N_LANES)
        finally:
            sys.settrace(before)
        assert time.monotonic() - start_s < STALL_S
        for lane, seed in lanes_reset.items() if is_done else ():
            other.reset_lanes([lane], [seed], [None])
        if lanes_stepped and is_done:
            other.step_lanes(lanes_stepped, actions(number))
        assert_same(manager, other, f"line {number}")
        for env in (manager, other):
            env.step_lanes(LANES, actions(number + 1))
        assert_same(manager, other, f"after line {number}")
        number += 1
    assert number > 30
