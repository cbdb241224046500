"""Without workers, Ctrl-C at any line of ``get()`` does not change what ``get()`` returns next."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import rlpool
from rlpool import Agent, Batcher, DictTensor, EpisodeBatcher

from support.agents import zeros
from support.envs import assert_same_tensors, create_counting
from support.striking import is_hidden

LIBRARY = str(Path(rlpool.__file__).parent)


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


class Striking:
    """A section in which SIGINT arrives once, at a line of the library."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> Striking:
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        if event == "call" and is_hidden(frame):
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                signal.raise_signal(signal.SIGINT)
        return self


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


def lived(life: str, strike_at: int = 0) -> tuple[list[Any], int]:
    """All results, and the lines that ``get`` took; one of these is interrupted, if asked for."""
    results, n_lines = [], 0
    for get in LIVES[life]():
        before = n_lines
        with Striking(strike_at - before if strike_at > before else -1) as section:
            first, is_done = section.left, False
            try:
                results.append(get())
                is_done = True
            except KeyboardInterrupt:
                pass
        n_lines += first - section.left
        if not is_done:
            results.append(get())
    return results, n_lines


@pytest.mark.promise("I3")
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("share", [100, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_line_is_interrupted_the_next_get_returns_the_same(life: str, share: int) -> None:
    expected, n_lines = lived(life)
    lines = random.Random(share).sample(range(1, n_lines + 1), n_lines // share)
    assert len(lines) > 20
    for line in lines:
        found, _ = lived(life, line)
        for got, result in zip(found, expected, strict=True):
            assert (got is None) == (result is None), line
            if result is None:
                continue
            assert got.lengths.tolist() == result.lengths.tolist(), line
            assert_same_tensors(got, dict(result.items()))
            assert torch.equal(got.info["policy_version"], result.info["policy_version"]), line
