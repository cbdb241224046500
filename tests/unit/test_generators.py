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
import rlpool.generators
import rlpool.machine.interrupts
from rlpool import (
    AgentError,
    Batcher,
    EnvError,
    EpisodeBatcher,
    MonoThreadEpisodeBatcher,
    TemporalDictTensor,
    WorkerError,
    WorkerStartupError,
)
from rlpool.generators import OwnGenerators

from support.drawing import DrawingAgent, create_drawing, create_drawing_manager, drawn


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
    given = {"n_timesteps": 2, "n_slots": 8, "create_env": create_drawing, **arguments}
    return EpisodeBatcher(create_agent=DrawingAgent, n_threads=n_threads, seeds=7, **given)


def windows(n_threads: int = 0, **arguments: Any) -> Batcher:
    given = {"create_env": create_drawing, "env_args": {"restarts": True}, **arguments}
    return Batcher(4, create_agent=DrawingAgent, n_threads=n_threads, seeds=7, **given)


def alone(**arguments: Any) -> MonoThreadEpisodeBatcher:
    return MonoThreadEpisodeBatcher(DrawingAgent, {}, create_drawing, {}, seeds=7)


def request(batcher: EpisodeBatcher | Batcher, n_episodes: int) -> None:
    if isinstance(batcher, EpisodeBatcher):
        batcher.execute(n_episodes)
        return
    if n_episodes == 5:
        batcher.reset()
    batcher.execute()


def bits(result: TemporalDictTensor | None) -> dict[str, bytes]:
    assert result is not None
    return {key: tensor.numpy().tobytes() for key, tensor in result.items()}


def run(batcher: EpisodeBatcher | Batcher) -> Iterator[dict[str, bytes]]:
    """Some requests, one after the other, with an update in between."""
    for n_episodes in (5, 3, 4):
        request(batcher, n_episodes)
        result = batcher.get(blocking=False)
        yield bits(batcher.get() if result is None else result)
        if n_episodes == 3:
            batcher.update(None)


BATCHERS = [episodes, windows, alone]


@pytest.mark.parametrize("make", [*BATCHERS, "a manager"])
def test_the_callers_generators_are_as_they_were_after_every_call(make: Any) -> None:
    arguments = {}
    if make == "a manager":
        make, arguments = episodes, {"create_env": create_drawing_manager}
    with untouched():
        batcher = make(**arguments)
    try:
        for _ in range(3):
            with untouched():
                request(batcher, 5)
            with untouched():
                while batcher.get(blocking=False) is None:
                    pass
            with untouched():
                batcher.update(None)
            with untouched():
                request(batcher, 3)
            with untouched():
                batcher.get()
    finally:
        with untouched():
            batcher.close()


@pytest.mark.parametrize("make", [episodes, windows])
def test_the_same_is_drawn_as_in_a_worker(make: Callable[..., Any]) -> None:
    random.seed(0)
    with make(n_threads=1) as batcher:
        expected = list(run(batcher))
    for number in range(2):
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002
        torch.manual_seed(number)
        with make() as batcher:
            assert list(run(batcher)) == expected


def test_what_the_caller_draws_in_between_changes_nothing_and_neither_does_another_batcher() -> (
    None
):
    with episodes() as batcher:
        expected = list(run(batcher))
    with episodes() as one, windows() as other:
        found = []
        for result, _ in zip(run(one), run(other), strict=True):
            found.append(result)
            drawn()
            torch.manual_seed(3)
    assert found == expected


class Stop(BaseException):
    """Not an ``Exception``."""


@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("fails_in", ["reset", "step"])
def test_the_callers_generators_are_back_if_users_code_raises(fails_in: str, error: Any) -> None:
    expected: Any = EnvError
    if error is KeyboardInterrupt:
        expected = (KeyboardInterrupt, WorkerError)  # told again of the request that was lost
    batcher = episodes(env_args={"fails_in": fails_in, "error": error})
    for n_episodes in (5, 3):
        with untouched():
            batcher.execute(n_episodes)
            with pytest.raises(expected):
                batcher.get()
    with untouched():
        batcher.close()


def test_the_callers_generators_are_back_if_nothing_could_be_created() -> None:
    def create_env(seed: int) -> Any:
        drawn()
        raise KeyError("goal")

    def create_agent() -> Any:
        drawn()
        raise KeyError("goal")

    for arguments in (
        {"create_env": create_env, "create_agent": DrawingAgent},
        {"create_env": create_drawing, "create_agent": create_agent},
    ):
        with untouched(), pytest.raises(WorkerStartupError):
            EpisodeBatcher(2, 8, n_threads=0, seeds=7, **arguments)


def test_the_callers_generators_are_back_if_an_agent_or_a_close_raises() -> None:
    with (
        untouched(),
        EpisodeBatcher(2, 8, DrawingAgent, {"fails": True}, create_drawing, n_threads=0) as batcher,
    ):
        batcher.execute(3)
        with pytest.raises(AgentError):
            batcher.get()
    with untouched():
        episodes(env_args={"fails_in": "close"}).close()


# Interruptions ------------------------------------------------------------------------------------

MODULES = tuple(
    m.__file__ for m in (rlpool.generators, rlpool.machine.interrupts, rlpool.batch.local)
)


class PressesCtrlC:
    """Sends this process SIGINT before some line of those modules is run, counted from 0."""

    def __init__(self, n_lines: int) -> None:
        self.n_left = n_lines

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in MODULES:
            return None
        if event == "line":
            self.n_left -= 1
            if self.n_left == -1:
                signal.raise_signal(signal.SIGINT)
        return self


class NotesPlaces:
    """Notes for each such line where it was run: the lines of the functions that were running."""

    def __init__(self) -> None:
        self.places: list[tuple[Any, ...]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in MODULES:
            return None
        if event == "line":
            self.places.append(tuple((f.f_code, number) for f, number in walk_stack(frame)))
        return self


def traced(trace: Any, action: Callable[[], Any]) -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def n_interrupted(action: Callable[[], Any]) -> int:
    """Interrupt an action at every place, the first and the last time that it gets there.

    What comes in between are rounds of the same loop.
    """
    traced(notes := NotesPlaces(), action)
    last = {place: n_lines for n_lines, place in enumerate(notes.places)}
    first = {place: n_lines for n_lines, place in reversed(list(enumerate(notes.places)))}
    n = 0
    for n_lines in sorted({*first.values(), *last.values()}):
        traced(press := PressesCtrlC(n_lines), action)
        n += press.n_left < 0
    return n


def use(generators: OwnGenerators) -> None:
    with generators.in_use():
        drawn()


def use_batcher() -> None:
    with episodes() as batcher:
        batcher.execute(2)
        batcher.get()


def test_an_interruption_anywhere_gives_the_callers_generators_back() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        generators = OwnGenerators()
        with untouched():
            assert n_interrupted(lambda: use(generators)) > 30
        with untouched():
            assert n_interrupted(use_batcher) > 60
    finally:
        signal.signal(signal.SIGINT, handler)
