"""With ``n_threads=0`` users' code has a worker's generators, and the caller keeps its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import (
    AgentError,
    Batcher,
    EnvError,
    EpisodeBatcher,
    WorkerStartupError,
)

from support.drawing import DrawingAgent, DrawingEnv, create_drawing, create_drawing_manager, drawn

pytestmark = pytest.mark.promise("I6")


def states() -> list[Any]:
    of_numpy: Any = np.random.get_state()  # noqa: NPY002
    numpy_parts = [of_numpy[0], of_numpy[1].tolist(), *of_numpy[2:]]
    return [random.getstate(), numpy_parts, torch.get_rng_state().tolist()]


@contextmanager
def untouched() -> Iterator[None]:
    """A section that leaves the caller's generators bitwise as they were."""
    drawn()  # of normal numbers there is one left over now
    before = states()
    yield
    assert states() == before


def episodes(n_threads: int = 0, **arguments: Any) -> EpisodeBatcher:
    given: dict[str, Any] = {"create_agent": DrawingAgent, "create_env": create_drawing}
    return EpisodeBatcher(2, 8, n_threads=n_threads, seeds=7, **given | arguments)


def windows(n_threads: int = 0) -> Batcher:
    restarts = {"restarts": True}
    return Batcher(4, None, DrawingAgent, {}, create_drawing, restarts, n_threads, seeds=7)


def request(batcher: Any, n_episodes: int) -> None:
    if isinstance(batcher, EpisodeBatcher):
        batcher.execute(n_episodes)
        return
    if n_episodes == 5:
        batcher.reset()
    batcher.execute()


def run(batcher: Any) -> Iterator[dict[str, bytes]]:
    """Some requests, one after the other, with an update in between."""
    for n_episodes in (5, 3, 4):
        request(batcher, n_episodes)
        result = batcher.get()
        yield {key: tensor.numpy().tobytes() for key, tensor in result.items()}
        if n_episodes == 3:
            batcher.update(None)


def in_manager() -> EpisodeBatcher:
    return episodes(create_env=create_drawing_manager)


@pytest.mark.parametrize("make", [windows, in_manager])
def test_the_callers_generators_are_as_they_were_after_every_call(make: Any) -> None:
    with untouched():
        batcher = make()
    calls: list[Callable[[], Any]] = [
        lambda: request(batcher, 5),
        lambda: batcher.get(blocking=False) or batcher.get(),
        lambda: batcher.update(None),
        lambda: request(batcher, 3),
        batcher.get,
        batcher.close,
    ]
    for call in calls:
        with untouched():
            call()


@pytest.mark.parametrize("make", [episodes, windows])
def test_the_same_is_drawn_as_in_a_worker_whatever_the_caller_and_others_draw(make: Any) -> None:
    with make(n_threads=1) as batcher:
        expected = list(run(batcher))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    found = []
    with make() as one, (windows if make is episodes else episodes)() as other:
        for result, _ in zip(run(one), run(other), strict=True):
            found.append(result)
            drawn()
    assert found == expected


@pytest.mark.parametrize(
    ("fails_in", "error", "expected"),
    [
        ((DrawingEnv, "reset"), KeyError, EnvError),
        ((DrawingEnv, "step"), KeyboardInterrupt, KeyboardInterrupt),
        ((DrawingAgent, "__call__"), KeyError, AgentError),
        ((DrawingEnv, "close"), KeyError, None),
        (None, KeyError, WorkerStartupError),
    ],
)
def test_the_callers_generators_are_back_if_users_code_raises(
    fails_in: Any, error: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **named: Any) -> Any:
        drawn()
        raise error("goal")

    if fails_in:
        monkeypatch.setattr(*fails_in, fail)
    raises = pytest.raises(expected) if expected else nullcontext()
    create_env = create_drawing if fails_in else fail
    with untouched(), raises, episodes(create_env=create_env) as batcher:
        batcher.execute(5)
        batcher.get()
