"""Policies, and what checks do with the data that comes back."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import numpy as np

from benchmarks.conformance import expect
from benchmarks.conformance.checks import Library
from benchmarks.conformance.envs import STEP
from benchmarks.conformance.interface import Collector, Steps

PART = 13  # steps of a window, of which checks collect two


def alternating(observation: np.ndarray) -> np.ndarray:
    """The parity of the step that is observed."""
    return observation[:, STEP].astype(np.int64) % 2


def last_row(observation: np.ndarray) -> np.ndarray:
    """Action 1 for the last of the environments that a process acts for, 0 for the others."""
    return (np.arange(len(observation)) == len(observation) - 1).astype(np.int64)


def leaning(observation: np.ndarray) -> np.ndarray:
    """CartPole's balance, for some dozens of steps."""
    return (observation[:, 2] > 0).astype(np.int64)


def numbers(observation: np.ndarray) -> np.ndarray:
    """Tag, length and step of each observation of ``Numbered``, ``[T, 3]``."""
    return np.asarray(observation).reshape(len(observation), -1)[:, :3]


def steps(observation: np.ndarray) -> np.ndarray:
    """The step of each observation."""
    return numbers(observation)[:, STEP]


def window(collector: Collector) -> list[Steps]:
    """Two windows in a row, joined."""
    return list(map(join, collector.window(PART), collector.window(PART)))


def join(first: Steps, second: Steps) -> Steps:
    """Two pieces that follow each other, as one."""
    pairs = [(getattr(first, each.name), getattr(second, each.name)) for each in fields(Steps)]
    *arrays, infos = (None if pair[0] is None else pair for pair in pairs)
    info = infos and [*infos[0], *infos[1]]
    return Steps(*(pair and np.concatenate(pair) for pair in arrays), info)


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


def pieces(library: Library, *args: Any, **arguments: Any) -> list[Steps]:
    """All that the library can collect, cut at the ends of episodes."""
    return [each for stream in collected(library, *args, **arguments) for each in cut(stream)]


def ended(library: Library, *args: Any, **arguments: Any) -> list[Steps]:
    """Those pieces that an end closes."""
    found = pieces(library, *args, **arguments)
    found = [each for each in found if each.terminated[-1] or each.truncated[-1]]
    expect.holds("episodes that end among what was collected", found)
    return found


def finished(library: Library, *args: Any, **arguments: Any) -> list[Steps]:
    """Episodes of ``Numbered`` that were collected from their reset to their end."""
    found = ended(library, *args, **arguments)
    found = [each for each in found if steps(each.observation)[0] == 0]
    expect.holds("complete episodes among what was collected", found)
    return found


def after(episode: Steps) -> np.ndarray:
    """The next observations of an episode, which have to be there."""
    if episode.next_observation is None:
        raise expect.Unexpected("expected the observation after each step, none is returned")
    return np.asarray(episode.next_observation)
