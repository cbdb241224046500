"""Signal handlers that raise inside a ``ParallelEnvManager``: the call may be repeated.

Everything is compared with the same environments in this process, to which nothing happens.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import (
    AgentError,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    UsageError,
)

from support.agents import ConstantAgent
from support.envs import CountingEnv, assert_same_tensors
from support.parallel import create_manager, create_serial, make_cartpole
from support.striking import Alarm, Strike, alarms, until_done
from support.variants import variants

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(60),
    pytest.mark.promise("I4"),
]

N_LANES = 4
LANES = list(range(N_LANES))
STALL_S = 2.0
"""Only a call that waits for something that never happens takes this long."""


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    with alarms():
        yield


@contextlib.contextmanager
def without_stall() -> Iterator[None]:
    start_s = time.monotonic()
    yield
    assert time.monotonic() - start_s < STALL_S


@pytest.fixture(scope="module", params=variants([2], [1]))
def manager(request: pytest.FixtureRequest) -> Iterator[ParallelEnvManager]:
    with create_manager(
        1, make_cartpole, N_LANES, True, envs_per_worker=request.param, max_episode_steps=2
    ) as manager:
        yield manager


def twin() -> GymEnv:
    return create_serial(1, make_cartpole, N_LANES, True, max_episode_steps=2)


def state_of(env: Any) -> dict[str, bytes]:
    return {key: array.tobytes() for key, array in sorted(env.current.items())}


def actions(number: int) -> dict[str, Any]:
    return {"action": np.random.default_rng(number).integers(0, 2, N_LANES)}


def ask(manager: ParallelEnvManager, *request: Any) -> Callable[[], Any]:
    """What sends environment 1 a request and receives the reply."""

    def receive() -> None:
        if not waits:
            manager.remotes[1].send(request)
            waits.append(True)
        assert manager.remotes[1].recv()[0] != "error"

    waits: list[bool] = []
    return receive


def step_lanes(*lanes: int) -> Any:
    return lambda env, step: [lambda: env.step_lanes(list(lanes), step)]


def reset_lane(env: Any, _: Any) -> list[Any]:
    return [lambda: env.reset_lanes([2], [5], [None])]


# What a call does to a manager, in parts that may be repeated, and to the same environments here.
CALLS: dict[str, tuple[Any, Any]] = {
    "step all": (step_lanes(*LANES), step_lanes(*LANES)),
    "step two": (step_lanes(1, 2), step_lanes(1, 2)),
    "step some": (
        lambda env, step: [lambda: env.step_some(3, [0, 1, 3], step)],
        step_lanes(0, 1, 3),
    ),
    "reset": (reset_lane, reset_lane),
    "announced": (
        lambda env, step: [
            lambda: env.announce_episodes([7, 8, 9, 10], {}),
            lambda: env.reset_lanes([2], [9], [None]),
        ],
        lambda env, step: [lambda: None, lambda: env.reset_lanes([2], [9], [None])],
    ),
    "remote": (
        lambda env, step: [
            ask(env, "reset", {"seed": 7}),
            ask(env, "step", {"action": step["action"][1]}),
        ],
        lambda env, step: [
            lambda: env.reset_lanes([1], [7], [None]),
            lambda: env.step_lanes([1], step),
        ],
    ),
}


def expected_states(call: str, number: int) -> list[dict[str, bytes]]:
    """After the first parts of a call and another step, with no part, one and so on done."""
    env, states = twin(), []
    for n_done in range(3):
        env.reset_lanes(LANES, LANES, [None] * N_LANES)
        for part in CALLS[call][1](env, actions(number))[:n_done]:
            part()
        env.step_lanes(LANES, actions(number + 1))
        states.append(state_of(env))
    return states


@pytest.mark.parametrize(
    ("call", "is_repeated"),
    variants(
        [
            *(("step two", True), ("step some", False), ("reset", False)),
            *(("announced", True), ("remote", True)),
        ],
        itertools.product(CALLS, [True, False]),
    ),
)
def test_a_call_that_is_interrupted_at_any_point_may_be_repeated_or_given_up(
    manager: ParallelEnvManager, call: str, is_repeated: bool
) -> None:
    number, reached, strike = 0, set(), Strike(0)
    states = [expected_states(call, choice) for choice in range(3)]  # what is left over would show
    while strike.has_struck or not number:
        # Whatever was done whole: nothing, or the first parts of the call.
        choice = number % len(states)
        expected = states[choice][:]
        manager.reset_lanes(LANES, LANES, [None] * N_LANES)
        parts = CALLS[call][0](manager, actions(choice))
        strike = Strike(number, lines=True)
        for part in parts:
            try:
                with without_stall(), strike:
                    part()
            except Alarm:
                if not is_repeated:
                    break
                part()
        else:
            expected[:-1] = []
        with contextlib.suppress(UsageError):  # nothing was sent
            manager.remotes[1].recv()
        if call == "step some":
            manager.step_some(N_LANES)
        manager.step_lanes(LANES, actions(choice + 1))
        assert state_of(manager) in expected, f"point {number}"
        reached.add(len(expected) == 1 or expected.index(state_of(manager)))
        number += 1
    assert number > 30
    assert is_repeated or {0, 1} <= reached


def test_interrupted_calls_with_tensors_may_be_repeated(manager: ParallelEnvManager) -> None:
    """Every second step ends all episodes, which restart."""
    other, number = twin(), 0
    strike = Strike(0)
    manager._n_resets = 0
    while strike.has_struck or not number:
        output = DictTensor({"action": torch.from_numpy(actions(number)["action"])})
        strike = Strike(number, lines=True)
        for name, arguments in (("reset", ()), ("step", (output,)), ("step", (output,))):
            call = getattr(manager, name)
            with without_stall():
                result = until_done(functools.partial(call, *arguments), strike)
            assert_equal(result, getattr(other, name)(*arguments))
        number += 13


@pytest.mark.parametrize("only", [(), ("step", "_made_step", "step_some", "recv", "reset")])
def test_calls_that_were_struck_when_their_work_was_done_may_be_repeated(only: Any) -> None:
    """Episodes of several lengths end, after which fewer environments run."""
    other, point, has_struck = create_serial(1, CountingEnv, 3), 0, True
    strikes: list[Strike] = []

    def struck(call: Any, *arguments: Any) -> Any:
        strikes.append(Strike(point, only))
        return until_done(lambda: call(*arguments), strikes[-1])

    with create_manager(1, CountingEnv, 3) as manager:
        while has_struck:
            strikes.clear()
            info = {"length": [1, 3, 2], "id": point}
            assert_equal(struck(manager.reset, info), other.reset(info))
            for n_running in (3, 2, 1):
                step = DictTensor({"action": torch.zeros(n_running, dtype=torch.int64)})
                assert_equal(struck(manager.step, step), other.step(step))
            with pytest.raises(UsageError, match="no running environment"):
                manager.step(step)
            manager.reset_lanes([0, 2], [1, 2], [None, None])
            ready = struck(manager.step_some, 1, [0, 2], {"action": np.zeros(3, np.int64)})
            ready += manager.step_some(2)
            assert sorted(ready) == [0, 2]
            manager.remotes[1].send(("get_attr", {"attr": "number"}))
            assert struck(manager.remotes[1].recv) == ("attr", point)
            has_struck = any(strike.has_struck for strike in strikes)
            point += 1 if only else 61
    assert point > 5


def assert_equal(some: Any, other: Any) -> None:
    """What ``reset`` or ``step`` returns is the same."""
    if isinstance(some, tuple):
        for mine, theirs in zip(some, other, strict=True):
            assert_equal(mine, theirs)
    elif isinstance(some, torch.Tensor):
        assert torch.equal(some, other)
    else:
        assert_same_tensors(some, dict(other.items()))


def test_a_batcher_over_a_manager_begins_again_and_works_on() -> None:
    """What the handler raises comes out of ``get``, or out of the agent that it interrupted."""
    env_args = {"make_env": make_cartpole, "n_lanes": 2}
    batchers = [
        EpisodeBatcher(16, 16, ConstantAgent, {}, create, env_args, n_threads=0, seeds=1)
        for create in (create_manager, create_serial)
    ]
    n_lost = n_kept = 0
    with batchers[0] as batcher, batchers[1] as other:
        for number in range(0, 4000, 149):
            batcher.execute(3)
            other.execute(3)
            expected = other.get()
            try:
                with contextlib.suppress(Alarm), without_stall(), Strike(number, lines=True):
                    batcher.get()
                result = batcher.get()
            except (EnvError, AgentError):
                n_lost += 1
            except UsageError:  # it was not interrupted
                continue
            else:
                n_kept += 1
                assert_same_tensors(result, dict(expected.items()))
        batcher.execute(3)
        other.execute(3)
        assert_same_tensors(batcher.get(), dict(other.get().items()))
    assert n_kept > 10
    assert n_lost < n_kept
