"""Policies, and operations of checks on the returned data."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import numpy as np

from benchmarks.conformance import expect
from benchmarks.conformance.checks import Library
from benchmarks.conformance.envs import STEP
from benchmarks.conformance.interface import Collector, Steps

PART = 13  # steps of a window; checks collect two windows


def alternating(observation: np.ndarray) -> np.ndarray:
    """Return the parity of the observed step."""
    return observation[:, STEP].astype(np.int64) % 2


def last_row(observation: np.ndarray) -> np.ndarray:
    """Return action 1 for the last environment of a batch, 0 for the others."""
    return (np.arange(len(observation)) == len(observation) - 1).astype(np.int64)


def leaning(observation: np.ndarray) -> np.ndarray:
    """Balance CartPole's pole for some dozens of steps."""
    return (observation[:, 2] > 0).astype(np.int64)


def numbers(observation: np.ndarray) -> np.ndarray:
    """Return tag, length and step of each observation of ``Numbered``, ``[T, 3]``."""
    return np.asarray(observation).reshape(len(observation), -1)[:, :3]


def steps(observation: np.ndarray) -> np.ndarray:
    """Return the step of each observation."""
    return numbers(observation)[:, STEP]


def window(collector: Collector) -> list[Steps]:
    """Return two consecutive windows, joined."""
    return list(map(join, collector.window(PART), collector.window(PART)))


def join(first: Steps, second: Steps) -> Steps:
    """Join two consecutive segments."""
    pairs = [(getattr(first, each.name), getattr(second, each.name)) for each in fields(Steps)]
    *arrays, infos = (None if pair[0] is None else pair for pair in pairs)
    info = infos and [*infos[0], *infos[1]]
    return Steps(*(pair and np.concatenate(pair) for pair in arrays), info)


def collected(library: Library, *args: Any, **arguments: Any) -> list[Steps]:
    """Return all data that the library can collect: joined windows, and episodes of ten requests.

    Whatever depends on the order in which workers end differs in some of the requests.
    """
    with library.open(*args, **arguments) as collector:
        streams = window(collector) if library.has("window") else []
    if library.has("episodes"):
        with library.open(*args, **arguments) as collector:
            streams += itertools.chain(*(collector.episodes(8) for _ in range(10)))
    return streams


def cut(stream: Steps) -> list[Steps]:
    """Split a stream into segments that end with an episode or with the stream."""
    ends = np.flatnonzero(np.asarray(stream.terminated) | np.asarray(stream.truncated)) + 1
    borders = [0, *ends.tolist(), len(stream)]
    pieces = [stream[slice(*pair)] for pair in itertools.pairwise(borders)]
    return [piece for piece in pieces if len(piece)]


def pieces(library: Library, *args: Any, **arguments: Any) -> list[Steps]:
    """Return all data that the library can collect, split at the ends of episodes."""
    return [each for stream in collected(library, *args, **arguments) for each in cut(stream)]


def ended(library: Library, *args: Any, **arguments: Any) -> list[Steps]:
    """Return the segments that end with an episode."""
    found = pieces(library, *args, **arguments)
    found = [each for each in found if each.terminated[-1] or each.truncated[-1]]
    expect.holds("episodes that end among what was collected", found)
    return found


def finished(library: Library, *args: Any, **arguments: Any) -> list[Steps]:
    """Return the episodes of ``Numbered`` that were collected from reset to end."""
    found = ended(library, *args, **arguments)
    found = [each for each in found if steps(each.observation)[0] == 0]
    expect.holds("complete episodes among what was collected", found)
    return found


def after(episode: Steps) -> np.ndarray:
    """Return the next observations of an episode, which must exist."""
    if episode.next_observation is None:
        raise expect.Unexpected("expected the observation after each step, none is returned")
    return np.asarray(episode.next_observation)
