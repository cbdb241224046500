"""A signal handler that raises at random points of any call; the batcher is used again then."""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from process.watching import n_descriptors, shared_files, wait_until, worker_pids

from rlpool import AgentError, Batcher, EnvError, EpisodeBatcher, RlpoolError, UsageError

from support.agents import NoisyAgent
from support.envs import CountingEnv, create_counting
from support.parallel import create_manager
from support.striking import Alarm, Strike, alarms

N_STRIKES = int(os.environ.get("RLPOOL_STRIKES", "6"))

pytestmark = [pytest.mark.timeout(240), pytest.mark.promise("I3")]


def create(kind: Any, n_workers: int, over: str = "gym") -> Any:
    if over == "manager":
        create_env, env_args = create_manager, {"make_env": CountingEnv, "n_lanes": 2}
    else:
        create_env, env_args = create_counting, {"restarts": kind is Batcher}
    return kind(5, 9, Updated, {"n_noise": 1}, create_env, env_args, n_workers, 3)


class Updated(NoisyAgent):
    """Outputs the number that it was updated with last."""

    number = 0

    def __call__(self, state, observation, agent_info=None, history=None):
        state, output, new_state = super().__call__(state, observation)
        output.set("number", torch.full((observation.n_elems(),), self.number))
        return state, output, new_state

    def update(self, info: int) -> None:
        self.number = info


def prepare(batcher: Any) -> None:
    """Leave one request pending."""
    if isinstance(batcher, Batcher):
        batcher.reset()
        batcher.execute()
    else:
        batcher.execute(4)


def collect(batcher: Any) -> Any:
    """Use a batcher after whatever has happened."""
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
    "state_dict": lambda b: b.state_dict(),
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
    ("call", "kind", "n_workers", "over"),
    [
        *itertools.product(CALLS, (EpisodeBatcher, Batcher), (0, 2), ("gym",)),
        ("get", EpisodeBatcher, 0, "manager"),
    ],
)
def test_a_batcher_can_be_used_after_any_interrupt(
    call: str, kind: Any, n_workers: int, over: str
) -> None:
    rng = random.Random(f"{call} {kind} {n_workers} {os.environ.get('RLPOOL_FIRST_CASE', 0)}")
    create(kind, n_workers, over).close()  # starts the template
    before = n_descriptors(), worker_pids()
    with alarms(), create(kind, n_workers, over) as batcher:
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
            except RlpoolError:  # such as of an agent that the handler interrupted
                assert not batcher.is_interrupted
            result = collect(batcher)
            assert batcher.state_dict()["next_episode"] > first
            assert int(result.info["policy_version"][0]) == batcher.policy_version
            assert batcher.policy_version - version in ((0, 1) if call == "update" else (0,))
            number = 7 if batcher.policy_version else 0
            assert set(result["number"][result.mask() > 0].tolist()) == {number}
    assert batcher.closed
    wait_until(lambda: worker_pids() == before[1])
    del strike, result  # a strike knows a frame
    gc.collect()
    assert n_descriptors() <= before[0]


def test_a_batcher_can_be_closed_after_its_close_was_interrupted() -> None:
    files = shared_files(os.getpid())
    for number in (0, 40, 150, 300):
        batcher = create(EpisodeBatcher, 2)
        prepare(batcher)
        with alarms():
            try:
                with Strike(number):
                    batcher.close()
            except Alarm:
                batcher.close()
        assert batcher.closed
        wait_until(lambda: not worker_pids())
    del batcher
    gc.collect()
    assert shared_files(os.getpid()) <= files


def test_episodes_after_an_interrupt_are_those_behind_the_dropped_ones() -> None:
    with create(EpisodeBatcher, 0) as batcher, create(EpisodeBatcher, 1) as other:
        batcher.execute(4)
        with alarms(), pytest.raises(Alarm), Strike(200):
            batcher.get()
        batcher.execute(3)
        other.seek(4)
        other.execute(3)
        got, expected = batcher.get(), other.get()
        assert got.info["seed"].tolist() == expected.info["seed"].tolist()
        assert torch.equal(got["seen"], expected["seen"])
