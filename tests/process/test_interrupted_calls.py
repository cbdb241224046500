"""A signal handler raises at random points of any call, and the batcher is used afterwards."""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from process.watching import is_running, n_descriptors, wait_until, worker_pids

from rlpool import (
    AgentError,
    Batcher,
    EnvError,
    EpisodeBatcher,
    ParallelEnvManager,
    RlpoolError,
    SpecError,
    UsageError,
)

from support.envs import CountingEnv, create_counting
from support.faults import create_agent
from support.parallel import create_manager, create_serial, make_cartpole
from support.striking import Alarm, Strike, alarms
from support.variants import variants

N_STRIKES = int(os.environ.get("RLPOOL_STRIKES", "24"))

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left", "short_patience"),
    pytest.mark.timeout(240),
    pytest.mark.promise("I3"),
]


MANAGED = create_manager, {"make_env": CountingEnv, "n_lanes": 2}


def create(kind: Any, n_workers: int, is_managed: bool = False) -> Any:
    make = MANAGED if is_managed else (create_counting, {"restarts": kind is Batcher})
    return kind(5, 9, create_agent, {}, *make, n_workers, 3)


def prepare(batcher: Any) -> None:
    """Leave one request pending."""
    if isinstance(batcher, Batcher):
        batcher.reset()
        batcher.execute()
    else:
        batcher.execute(4)


def collect(batcher: Any) -> Any:
    """Use a batcher after an interrupt."""
    while batcher.n_pending:
        with suppress(AgentError, EnvError):
            assert batcher.get() is not None
    prepare(batcher)
    return batcher.get(timeout=60)


CALLS: dict[str, Callable[[Any], Any]] = {
    "execute": lambda b: b.execute() if isinstance(b, Batcher) else b.execute(30),
    "get": lambda b: b.get(),
    "get(progress)": lambda b: b.get(progress=lambda done, asked: None),
    "update": lambda b: b.update(7),
    "reset": lambda b: b.reset() if isinstance(b, Batcher) else b.reexecute(),
    "progress": lambda b: b.progress,
    "load_state_dict": lambda b: b.load_state_dict(b.state_dict()),
}


def n_points(batcher: Any, call: Callable[[Any], Any]) -> int:
    prepare(batcher)
    with Strike(10**9) as strike, suppress(UsageError):
        call(batcher)
    while batcher.n_pending:
        batcher.get()
    return strike.n_points


@pytest.mark.parametrize(
    ("call", "kind", "n_workers", "is_managed"),
    variants(
        [
            *(("execute", EpisodeBatcher, 2, False), ("get", Batcher, 2, False)),
            *(("update", EpisodeBatcher, 2, False), ("reset", Batcher, 2, False)),
            *(("get(progress)", EpisodeBatcher, 0, False), ("get", EpisodeBatcher, 0, True)),
        ],
        itertools.product(CALLS, (EpisodeBatcher, Batcher), (0, 2), (False,)),
    ),
)
def test_a_batcher_can_be_used_after_any_interrupt(
    call: str, kind: Any, n_workers: int, is_managed: bool
) -> None:
    rng = random.Random(f"{call} {kind} {n_workers} {os.environ.get('RLPOOL_FIRST_CASE', 0)}")
    create(kind, n_workers, is_managed).close()  # starts the template
    before = n_descriptors(), worker_pids()
    with alarms(), create(kind, n_workers, is_managed) as batcher:
        points = n_points(batcher, CALLS[call])
        for _ in range(N_STRIKES):
            prepare(batcher)
            version, strike = batcher.policy_version, Strike(rng.randrange(points))
            first = batcher.state_dict()["next_episode"]
            try:
                with strike:
                    CALLS[call](batcher)
            except Alarm:
                if batcher.is_interrupted:
                    assert batcher.n_pending == 0
                    with pytest.raises(UsageError, match="the last call was interrupted"):
                        batcher.get()
            except RlpoolError:  # such as that of an agent interrupted by the handler
                assert not batcher.is_interrupted
            result = collect(batcher)
            assert batcher.state_dict()["next_episode"] > first
            assert int(result.info["policy_version"][0]) == batcher.policy_version
            assert batcher.policy_version - version in ((0, 1) if call == "update" else (0,))
            number = 7 if batcher.policy_version else 0
            assert set(result["version"][result.mask() > 0].tolist()) == {number}
    assert batcher.closed
    wait_until(lambda: worker_pids() == before[1])
    del strike, result  # a strike holds a frame
    gc.collect()
    assert n_descriptors() <= before[0]


def test_episodes_after_an_interrupt_follow_the_dropped_ones() -> None:
    with create(EpisodeBatcher, 0) as batcher, create(EpisodeBatcher, 1) as other:
        batcher.execute(4)
        with alarms(), pytest.raises(Alarm), Strike(200):
            batcher.get()
        batcher.execute(3)
        other.seek(4)
        other.execute(3)
        got, expected = batcher.get(), other.get()
        assert got.info["seed"].tolist() == expected.info["seed"].tolist()


# Managers ----------------------------------------------------------------------------------------

LANES = [0, 1, 2]


def open_manager() -> ParallelEnvManager:
    return create_manager(1, make_cartpole, 3, restarts=True, envs_per_worker=2)


def actions(number: int = 0) -> dict[str, Any]:
    return {"action": np.random.default_rng(number).integers(0, 2, 3)}


def ask(manager: ParallelEnvManager) -> None:
    for request in (("reset", {"seed": 7}), ("step", 1), ("get_attr", {"attr": "spec"})):
        manager.remotes[1].send(request)
        assert manager.remotes[1].recv()[0] != "error"


COMMANDS: dict[str, Callable[[ParallelEnvManager], Any]] = {
    "reset": lambda manager: manager.reset(),
    "step_some": lambda manager: manager.step_some(1, [0, 2], actions()),
    "remote": ask,
}


def struck(call: Callable[[], Any], number: int) -> int:
    """Interrupt a call at a given point and return the number of points."""
    with Strike(number) as strike, suppress(Alarm, SpecError):  # reported as an action's
        call()
    return strike.n_points


def states(env: Any) -> list[dict[str, bytes]]:
    """Return the observations of two steps."""
    env.reset_lanes(LANES, LANES, [None] * 3)
    seen = []
    for number in range(2):
        env.step_lanes(LANES, actions(number))
        seen.append({key: array.tobytes() for key, array in sorted(env.current.items())})
    return seen


@pytest.mark.parametrize("name", COMMANDS)
def test_a_manager_starts_new_workers_after_an_interrupt(name: str) -> None:
    serial, n_interrupted, rng = create_serial(1, make_cartpole, 3), 0, random.Random(name)
    serial.reset()  # declares the actions, as a manager's does
    with alarms(), open_manager() as manager:
        manager.reset()
        n_points = struck(lambda: COMMANDS[name](manager), 10**9)
        n_fds = n_descriptors()
        for number in rng.sample(range(n_points), min(N_STRIKES, n_points)):
            manager.reset()
            before = [worker.pid for worker in manager.workers]
            struck(lambda: COMMANDS[name](manager), number)
            try:
                manager.step_some(3)
            except UsageError:
                n_interrupted += 1
                manager.reset()
                assert not any(is_running(pid or 0) for pid in before)
            else:  # before it had started
                with suppress(UsageError):
                    manager.remotes[1].recv()
            assert states(manager) == states(serial), f"point {number}"
        gc.collect()
        assert n_descriptors() == n_fds
    assert n_interrupted  # others were struck before they had started, or while they waited


@pytest.mark.parametrize("create_one", [partial(create, EpisodeBatcher, 2), open_manager])
def test_an_interrupted_constructor_or_close_leaves_nothing_behind(create_one: Any) -> None:
    create_one().close()  # starts the template
    others, n_fds, rng = worker_pids(), n_descriptors(), random.Random(0)
    with alarms():
        n_points = struck(lambda: create_one().close(), 10**9)
        for number in (*range(0, 12, 3), *rng.sample(range(n_points), N_STRIKES)):
            struck(lambda: create_one().close(), number)
            gc.collect()
            wait_until(lambda: worker_pids() == others)
        one = create_one()
        for number in (1, 20, 60):
            struck(one.close, number)
        one.close()
    assert worker_pids() == others
    assert n_descriptors() <= n_fds + 2  # the tracker of multiprocessing
