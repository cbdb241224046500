"""An agent that is always called with as many rows: the same bits for any number of lanes."""

from __future__ import annotations

from typing import Any

import torch

from rlpool import DictTensor, EpisodeBatcher

from support.agents import GruAgent
from support.envs import assert_same_tensors, create_counting

N_EPISODES = 21
LENGTHS = 2 + 7 * torch.arange(N_EPISODES) % 31


class LooksBack(GruAgent):
    """A stochastic policy with a memory that looks at its history and its info as well."""

    def __init__(self) -> None:
        super().__init__(n_hidden=32)

    def require_history(self) -> bool:
        return True

    def __call__(self, state, observation, agent_info=None, history=None):
        assert observation.n_elems() == 8
        frame = observation["frame"]
        if history["frame"].shape[1]:
            frame = frame + (history["frame"] * history.mask()[..., None]).mean(1)
        if agent_info is not None:
            frame = frame + agent_info["bias"][:, None]
        seen = DictTensor({"frame": frame, "noise": observation["noise"]})
        return super().__call__(state, seen)


def collected(n_envs: int, n_workers: int) -> list[Any]:
    """One request of all episodes, and one of the first ten, whose numbers follow."""
    make = LooksBack, None, create_counting, {"n_envs": n_envs}
    results = []
    with EpisodeBatcher(16, 64, *make, n_workers, 3, agent_rows=8) as batcher:
        for n in (N_EPISODES, 10):
            bias = torch.linspace(-1, 1, N_EPISODES)[:n]
            batcher.execute(n, {"bias": bias}, {"length": LENGTHS[:n], "id": torch.arange(n)})
            results.append(batcher.get())
    return results


def test_episodes_are_bitwise_the_same_for_any_number_of_lanes_and_workers() -> None:
    expected = collected(8, 0)
    for n_lanes, n_workers in [(1, 0), (3, 0), (16, 0), (3, 2)]:
        for got, wanted in zip(collected(n_lanes, n_workers), expected, strict=True):
            assert_same_tensors(got, dict(wanted.items()))
