"""A worker may die between any two lines: what it wrote and did not finish must not show later.

At every line of the code that writes a block a copy of the block is taken, as if the worker had
died there, and given to the caller's bookkeeping.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import pytest
import torch

from rlpool import Batcher, DictTensor, EnvError, EpisodeBatcher, GymEnv
from rlpool.batch.requests import EpisodeRequest, Request, WindowRequest
from rlpool.data.storage import Memory
from rlpool.slots.blocks import Block

from support.agents import StepCounter
from support.envs import CountingEnv, FailingEnv, create_counting
from support.striking import traced

pytestmark = [pytest.mark.promise("I3"), pytest.mark.promise("I7")]

N_TIMESTEPS = 3
WRITERS = ("rollout.py", "writer.py", "plans.py")


class Witness:
    """Looks at the block of every running request at every line, and counts what it sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[Request] = []
        self.n_seen = self.n_full = 0
        for kind in (EpisodeRequest, WindowRequest):
            monkeypatch.setattr(kind, "message", self._noting(kind.message))

    def _noting(self, message: Callable[..., Any]) -> Callable[..., Any]:
        def noted(request: Request, *arguments: Any) -> Any:
            self.requests.append(request)
            return message(request, *arguments)

        return noted

    def watching(self) -> AbstractContextManager[None]:
        return traced(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._look if frame.f_code.co_filename.endswith(WRITERS) else None

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:
        for request in self.requests:
            if request.remaining:
                self._let_end(request)
        return self._look

    def _let_end(self, request: Request) -> None:
        """Let the worker die here, in a copy of everything."""
        block, remains = request.running_block, copy.copy(request)
        remains.block = remains.packed = None
        remains = copy.deepcopy(remains)
        memory = Memory.local(block.memory.n_bytes)
        memory.root()[:] = block.memory.root()
        remains.block = Block(block.number, block.layout, memory)
        control = remains.block.arrays.control
        rows, running = control["row"][0], control["running"][0]
        self.n_full += bool(((rows % N_TIMESTEPS == 0) & (running >= 0)).any())
        remains.give_back(0)
        for key, array in remains.block.arrays.rows.items():
            for slot, dirty in enumerate(control["dirty"][:-1].tolist()):
                assert not array[slot, dirty:].any(), (key, slot, dirty)
        self.n_seen += 1


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> Witness:
    return Witness(monkeypatch)


def lengths(*values: int) -> DictTensor:
    return DictTensor({"length": torch.tensor(values), "id": torch.arange(1, len(values) + 1)})


@pytest.mark.parametrize("n_slots", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_rows_of_episodes_that_a_worker_did_not_finish_are_known(
    witness: Witness, n_slots: int
) -> None:
    with EpisodeBatcher(
        N_TIMESTEPS, n_slots, StepCounter, {}, create_counting, {"n_envs": 2}, n_threads=0, seeds=0
    ) as batcher:
        for some in (lengths(3, 7), lengths(6, 1, 2, 5)):
            batcher.execute(some.n_elems(), env_info=some)
            with witness.watching():
                result = batcher.get()
            assert not result["frame"][result.mask() == 0].any()
    assert witness.n_seen > 300
    assert witness.n_full > 30


def test_rows_of_a_request_that_failed_are_known(witness: Witness) -> None:
    envs = [FailingEnv(ValueError(), fails_at=3, step=2), CountingEnv()]
    with EpisodeBatcher(
        N_TIMESTEPS, 2, StepCounter, {}, lambda seed: GymEnv(envs, seed), n_threads=0, seeds=0
    ) as batcher:
        batcher.execute(4, env_info=lengths(3, 7, 4, 4))
        with witness.watching(), pytest.raises(EnvError, match="ValueError"):
            batcher.get()
        batcher.execute(2, env_info=lengths(1, 3))
        result = batcher.get()
    assert not result["frame"][result.mask() == 0].any()
    assert witness.n_seen > 300


@pytest.mark.parametrize("restarts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_of_windows_that_a_worker_did_not_finish_are_known(
    witness: Witness, restarts: bool
) -> None:
    env_args = {"n_envs": 2, "restarts": restarts}
    with Batcher(
        N_TIMESTEPS, 2, StepCounter, {}, create_counting, env_args, n_threads=0, seeds=0
    ) as batcher:
        batcher.reset(env_info=lengths(2, 8))
        for _ in range(2):
            batcher.execute()
            with witness.watching():
                batcher.get()
    assert witness.n_seen > 100
    assert witness.n_full > 20
