"""With ``n_threads=0`` users' code has a worker's generators, and the caller keeps its own."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_stack
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import rlpool.batch.local
import rlpool.machine.interrupts
import rlpool.seeding
from rlpool import (
    AgentError,
    Batcher,
    EnvError,
    EpisodeBatcher,
    WorkerError,
    WorkerStartupError,
)
from rlpool.seeding import OwnGenerators

from support.drawing import DrawingAgent, create_drawing, create_drawing_manager, drawn

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


def with_manager() -> EpisodeBatcher:
    return episodes(create_env=create_drawing_manager)


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


@pytest.mark.parametrize("make", [episodes, windows, with_manager])
def test_the_callers_generators_are_as_they_were_after_every_call(make: Any) -> None:
    with untouched():
        batcher = make()
    calls: list[Callable[[], Any]] = [
        lambda: request(batcher, 5),
        lambda: batcher.get(blocking=False) or batcher.get(),
        lambda: batcher.update(None),
        lambda: request(batcher, 3),
        lambda: batcher.get(),
        batcher.close,
    ]
    with batcher:
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


class Stop(BaseException):
    """Not an ``Exception``."""


def failing(fails_in: str, error: Any) -> Any:
    def create(*arguments: Any, **named: Any) -> Any:
        drawn()
        raise error("goal")

    if fails_in == "agent":
        return episodes(agent_args={"fails": True})
    if fails_in in ("create_env", "create_agent"):
        return episodes(**{fails_in: create})
    return episodes(env_args={"fails_in": fails_in, "error": error})


@pytest.mark.parametrize(
    ("fails_in", "error", "expected"),
    [
        ("reset", KeyError, EnvError),
        ("step", SystemExit, EnvError),
        ("step", Stop, EnvError),
        ("step", KeyboardInterrupt, (KeyboardInterrupt, WorkerError)),  # and again: it was lost
        ("agent", KeyError, AgentError),
        ("create_env", KeyError, WorkerStartupError),
        ("create_agent", KeyError, WorkerStartupError),
        ("close", KeyError, ()),
    ],
)
def test_the_callers_generators_are_back_if_users_code_raises(
    fails_in: str, error: Any, expected: Any
) -> None:
    caught = []
    with untouched():
        try:
            with failing(fails_in, error) as batcher:
                for n_episodes in (5, 3):
                    batcher.execute(n_episodes)
                    try:
                        batcher.get()
                    except expected as failure:
                        caught.append(failure)
        except WorkerStartupError as failure:
            caught += [failure, failure]
    assert len(caught) == (2 if expected else 0)
    assert all(isinstance(failure, expected) for failure in caught)


# Interruptions ------------------------------------------------------------------------------------

FILES = (rlpool.machine.interrupts.__file__, rlpool.batch.local.__file__)
FUNCTIONS = {"in_use", "_give_back", "generator_states", "_set_generator_states"}


def is_watched(frame: FrameType) -> bool:
    code = frame.f_code
    is_ours = code.co_filename == rlpool.seeding.__file__ and code.co_name in FUNCTIONS
    return is_ours or code.co_filename in FILES


class Trace:
    """Notes where each watched line is run, or presses Ctrl-C before one, counted from 1."""

    def __init__(self, presses_at: int = 0) -> None:
        self.presses_at, self.n_lines = presses_at, 0
        self.places: list[tuple[Any, ...]] = []  # the lines of the functions that were running

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not is_watched(frame):
            return None
        if event == "line":
            self.n_lines += 1
            if not self.presses_at:
                self.places.append(tuple((f.f_code, number) for f, number in walk_stack(frame)))
            elif self.n_lines == self.presses_at:
                signal.raise_signal(signal.SIGINT)
        return self

    def follow(self, action: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            action()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)


def n_interrupted(action: Callable[[], Any]) -> int:
    """Interrupt an action at every place, the first time that it gets there."""
    (notes := Trace()).follow(action)
    first = {place: number for number, place in reversed(list(enumerate(notes.places, 1)))}
    n = 0
    for number in sorted(first.values()):
        (press := Trace(number)).follow(action)
        n += press.n_lines >= number
    return n


def use_batcher() -> None:
    with episodes() as batcher:
        batcher.execute(2)
        batcher.get()


GENERATORS = OwnGenerators()


def use_generators() -> None:
    with GENERATORS.in_use():
        drawn()


@pytest.mark.parametrize(
    ("use", "n_places"),
    [(use_generators, 30), pytest.param(use_batcher, 60, marks=pytest.mark.slow)],
)
def test_an_interruption_anywhere_gives_the_callers_generators_back(
    use: Callable[[], None], n_places: int
) -> None:
    with untouched():
        assert n_interrupted(use) > n_places
