"""What checks share: their register, what they ask of a library, and how they compare.

A check is an expectation about what comes back, whatever the interface. It raises ``Unexpected``
where something else came, which is a red cell, and ``DoesNotApply`` where it cannot say (grey).
"""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.conformance.envs import NUMBERED, STEP
from benchmarks.conformance.interface import Collector, Job, Steps

GROUPS = ("values", "selection", "seeds", "faults", "limits")
ALONE = ("faults", "limits")  # groups whose checks have a process of their own each
PART = 13  # steps of a window, of which checks collect two


class Unexpected(Exception):
    """Something else came than was expected."""


class DoesNotApply(Exception):
    """The check cannot say anything about this library."""


@dataclass(frozen=True)
class Check:
    """One property. ``function`` gets a ``Library``; what ends it tells the result."""

    function: Callable[[Library], None]
    group: str
    thread: str
    needs: tuple[str, ...]
    signal: signal.Signals | None = None
    """Sent to the process once it has called ``ready``, which then has to end."""
    leaves_nothing: bool = False
    """Whether processes or files in /dev/shm that outlive the process by 5 s are red."""
    shm_mb: int = 4096
    """The size of /dev/shm."""

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def text(self) -> str:
        return " ".join((self.function.__doc__ or "").split())


CHECKS: dict[str, Check] = {}


def check(group: str, thread: str, *needs: str, standard_env: bool = False, **more: Any) -> Any:
    """Register a check. All but those on a standard environment need environments in Python."""

    def register(function: Callable[[Library], None]) -> Callable[[Library], None]:
        needed = needs if standard_env else (*needs, "environments")
        CHECKS[function.__name__] = Check(function, group, thread, needed, **more)
        return function

    return register


class Library:
    """An adapter as checks use it. ``ready`` reports that the signal may come."""

    def __init__(self, adapter: type[Collector], folder: str, ready: Callable[[], None]) -> None:
        self.adapter, self.folder, self.ready = adapter, folder, ready

    def has(self, *capabilities: str) -> bool:
        return not any(each in self.adapter.lacks for each in capabilities)

    def make(
        self,
        policy: Callable[[np.ndarray], np.ndarray] | None = None,
        env_id: str = NUMBERED,
        job: dict[str, Any] | None = None,
        **env_args: Any,
    ) -> Collector:
        return self.adapter(Job(env_id, env_args, policy or zeros, **(job or {})))

    @contextlib.contextmanager
    def open(self, *args: Any, **arguments: Any) -> Iterator[Collector]:
        """A collector that is closed at the end."""
        collector = self.make(*args, **arguments)
        try:
            yield collector
        finally:
            collector.close()

    def file(self, name: str) -> str:
        """A path that does not exist yet."""
        return f"{self.folder}/{name}"


def zeros(observation: np.ndarray) -> np.ndarray:
    """Action 0."""
    return np.zeros(len(observation), np.int64)


def alternating(observation: np.ndarray) -> np.ndarray:
    """The parity of the step that is observed."""
    return observation[:, STEP].astype(np.int64) % 2


def leaning(observation: np.ndarray) -> np.ndarray:
    """CartPole's balance, for some dozens of steps."""
    return (observation[:, 2] > 0).astype(np.int64)


def numbers(observation: np.ndarray) -> np.ndarray:
    """Tag, episode and step of each observation of ``Numbered``, ``[T, 3]``."""
    return np.asarray(observation).reshape(len(observation), -1)[:, :3]


def window(collector: Collector) -> list[Steps]:
    """Two windows in a row, joined."""
    pairs = zip(collector.window(PART), collector.window(PART), strict=True)
    return [join(first, second) for first, second in pairs]


def join(first: Steps, second: Steps) -> Steps:
    """Two pieces that follow each other, as one."""
    values = []
    for name in ("observation", "action", "reward", "terminated", "truncated", "next_observation"):
        pair = [getattr(first, name), getattr(second, name)]
        values.append(None if pair[0] is None else np.concatenate(pair))
    infos = None if first.info is None or second.info is None else [*first.info, *second.info]
    return Steps(*values, infos)


def collected(library: Library, *args: Any, **arguments: Any) -> list[Steps]:
    """All that the library can collect: joined windows, and episodes."""
    streams = []
    with library.open(*args, **arguments) as collector:
        if library.has("window"):
            streams += window(collector)
    if library.has("episodes"):
        with library.open(*args, **arguments) as collector:
            streams += collector.episodes(8)
    return streams


def cut(stream: Steps) -> list[Steps]:
    """A stream in pieces, each of which ends with an episode, or where the stream does."""
    ends = np.flatnonzero(np.asarray(stream.terminated) | np.asarray(stream.truncated)) + 1
    borders = [0, *ends.tolist(), len(stream)]
    pieces = [stream[slice(*pair)] for pair in itertools.pairwise(borders)]
    return [piece for piece in pieces if len(piece)]


def finished(library: Library, *args: Any, **arguments: Any) -> list[Steps]:
    """Episodes of ``Numbered`` that were collected from their reset to their end."""
    pieces = [each for stream in collected(library, *args, **arguments) for each in cut(stream)]
    episodes = [
        each
        for each in pieces
        if each.observation.reshape(len(each), -1)[0, STEP] == arguments.get("base", 0)
        and (each.terminated | each.truncated)[-1]
    ]
    holds("complete episodes among what was collected", len(episodes) > 0)
    return episodes


def after(episode: Steps) -> np.ndarray:
    """The next observations of an episode, which have to be there."""
    if episode.next_observation is None:
        raise Unexpected("expected the observation after each step, none is returned")
    return np.asarray(episode.next_observation)


def equal(what: str, got: Any, expected: Any) -> None:
    """Compare numbers or arrays, whatever their dtype."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape or not (got == expected).all():
        raise Unexpected(f"{what}: expected {expected.tolist()}, got {got.tolist()}")


def holds(what: str, condition: bool) -> None:
    """Expect something that is said in words."""
    if not condition:
        raise Unexpected(f"expected {what}")


def error_of(call: Callable[..., Any], *args: Any) -> BaseException:
    """What a call raises, which it has to; ``SystemExit`` counts as well."""
    try:
        call(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    raise Unexpected("expected an error, the call returned as if nothing had happened")


def text_of(error: BaseException | None) -> str:
    """The texts of an error and of its causes."""
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', []))}")
        error = error.__cause__ or error.__context__
    return "\n".join(texts)
