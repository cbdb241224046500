"""Without workers, Ctrl-C at any line of ``get()`` does not change what ``get()`` returns next."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from rlpool import Agent, Batcher, DictTensor, EpisodeBatcher

from support.agents import zeros
from support.envs import assert_same_tensors, create_counting
from support.striking import Strike

NEVER = 10**9
N_CALLS = 6


class Remembering(Agent):
    """Acts by all that could be lost: its state, its parameters, noise and infos."""

    n_noise = 1

    def __init__(self) -> None:
        self.version = 0

    def __call__(self, state, observation, agent_info=None, history=None):
        state = state or DictTensor({"sum": zeros(observation)})
        drawn = (observation["noise"][:, 0] * 10).long() + agent_info["gain"]
        action = (state["sum"] + drawn + self.version) % 7
        output = DictTensor({"action": action, "version": zeros(observation) + self.version})
        return state, output, DictTensor({"sum": state["sum"] + action})

    def update(self, info: int) -> None:
        self.version = info


def episodes() -> Iterator[Any]:
    """Requests of more episodes than slots, of long ones, and with a policy of their own."""
    env_args = {"n_envs": 3}
    with EpisodeBatcher(
        4, 6, Remembering, {}, create_counting, env_args, n_threads=0, seeds=1
    ) as batcher:
        for version, lengths in enumerate(([3, 9, 1], [2] * 8, [1, 5, 2, 4])):
            batcher.update(version)
            infos = {"gain": list(range(len(lengths)))}, {"length": lengths}
            batcher.execute(len(lengths), *infos)
        for _ in range(3):
            yield batcher.get


def windows(restarts: bool) -> Iterator[Any]:
    """Windows of lanes in the middle of episodes, whose policy and infos change."""
    env_args = {"n_envs": 3, "restarts": restarts}
    with Batcher(
        4, None, Remembering, {}, create_counting, env_args, n_threads=0, seeds=1
    ) as batcher:
        for lengths in ([6, 3, 100], [100, 7, 2]):
            batcher.reset({"gain": [1, 2, 3]}, {"length": lengths})
            for version in range(3):
                batcher.update(version)
                batcher.execute({"gain": [version, 1, 2]} if version == 2 else None)
                yield batcher.get


LIVES: dict[str, Callable[[], Iterator[Any]]] = {
    "episodes": episodes,
    "windows": lambda: windows(restarts=False),
    "windows that restart": lambda: windows(restarts=True),
}


def lived(life: str, strikes: Mapping[int, Strike]) -> list[Any]:
    """All results of ``get``, called again where a strike interrupts it, by number of the call."""
    results: list[Any] = []
    for number, get in enumerate(LIVES[life]()):
        with suppress(KeyboardInterrupt), strikes.get(number, nullcontext()):
            results.append(get())
        if len(results) == number:
            results.append(get())
    return results


@pytest.mark.promise("I3")
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("share", [900, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_line_is_interrupted_the_next_get_returns_the_same(life: str, share: int) -> None:
    counts = {number: Strike(NEVER, lines=True) for number in range(N_CALLS)}
    expected = lived(life, counts)
    lines = [(number, line) for number, one in counts.items() for line in range(one.n_points)]
    chosen = random.Random(share).sample(lines, len(lines) // share)
    assert len(chosen) > 6
    n_struck = 0
    for number, line in chosen:
        strike = Strike(line, lines=True, signal_number=signal.SIGINT)
        found = lived(life, {number: strike})
        n_struck += strike.has_struck
        for got, result in zip(found, expected, strict=True):
            assert (got is None) == (result is None), (number, line)
            if result is None:
                continue
            assert got.lengths.tolist() == result.lengths.tolist(), (number, line)
            assert_same_tensors(got, dict(result.items()))
            assert torch.equal(got.info["policy_version"], result.info["policy_version"])
    assert n_struck > 0.8 * len(chosen)  # the last lines are not in every run, such as of garbage
