"""An agent that is always called with as many rows: the same bits for any number of lanes."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
import torch
from torch import nn

from rlpool import (
    Agent,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    SpecError,
    TemporalDictTensor,
)

from support.variants import variants

N_EPISODES = 21
BIASES = {"bias": torch.linspace(-1, 1, N_EPISODES)}
DIVISIONS = [(1, 0), (3, 0), (4, 0), (16, 0), (20, 0), (3, 2), (5, 2)]


class Recurrent(nn.Module, Agent):
    """A stochastic policy with a memory, which may look at its history as well.

    Args:
        looks_back: Whether it requires a history.
    """

    n_noise = 1

    def __init__(self, looks_back: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head, self.past = nn.GRUCell(3, 32), nn.Linear(32, 1), nn.Linear(3, 4)
        self.looks_back = looks_back
        self.n_rows: set[int] = set()

    def require_history(self) -> bool:
        return self.looks_back

    def update(self, info: Any) -> None:
        self.load_state_dict(info)

    def __call__(
        self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
    ) -> Any:
        frame = observation["frame"]
        self.n_rows.add(len(frame))
        if state is None:
            state = DictTensor({"memory": torch.zeros(len(frame), 32)})
        memory = self.cell(frame, state["memory"])
        mean = self.head(memory)
        if history is not None and history["frame"].shape[1]:
            past = self.past(history["frame"]) * history.mask()[..., None]
            mean = mean + past.mean((1, 2))[:, None]
        if agent_info is not None:
            mean = mean + agent_info["bias"][:, None]
        action = 2 * torch.tanh(mean + observation["noise"] - 0.5)
        return state, DictTensor({"action": action}), DictTensor({"memory": memory})


def pendulum(n_steps: int = 25) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("Pendulum-v1", max_episode_steps=n_steps)


def create_pendulums(n_lanes: int, seed: int) -> GymEnv:
    return GymEnv([pendulum() for _ in range(n_lanes)], seed)


def collected(n_lanes: int, n_threads: int, looks_back: bool) -> list[TemporalDictTensor]:
    """One request of all episodes, and one of the first ten, whose numbers follow."""
    with EpisodeBatcher(
        *(16, 64, Recurrent, {"looks_back": looks_back}, create_pendulums, {"n_lanes": n_lanes}),
        *(n_threads, 3),
        agent_rows=8,
    ) as batcher:
        results = []
        for n in (N_EPISODES, 10):
            batcher.execute(n, {"bias": BIASES["bias"][:n]})
            results.append(batcher.get())
        return results


def same(one: TemporalDictTensor, other: TemporalDictTensor) -> bool:
    return list(one.keys()) == list(other.keys()) and all(
        torch.equal(one[key], other[key])
        for key in one.keys()  # noqa: SIM118
    )


@pytest.mark.parametrize("looks_back", variants([True], [False]))
def test_episodes_are_bitwise_the_same_for_any_number_of_lanes_and_workers(
    looks_back: bool,
) -> None:
    expected = collected(8, 0, looks_back)
    for n_lanes, n_threads in DIVISIONS:
        found = collected(n_lanes, n_threads, looks_back)
        assert all(map(same, expected, found)), (n_lanes, n_threads)


def test_the_agent_is_called_with_that_many_rows_and_no_others() -> None:
    agent = Recurrent()
    for n_lanes in (1, 5, 8, 11):
        with EpisodeBatcher(
            16, 64, lambda: agent, None, create_pendulums, {"n_lanes": n_lanes}, 0, agent_rows=8
        ) as batcher:
            batcher.execute(13)
            batcher.get()
    assert agent.n_rows == {8}


@pytest.mark.parametrize("rows", [0, 1.5, True, "8"])
def test_a_number_of_rows_that_is_none_is_refused(rows: Any) -> None:
    with pytest.raises(SpecError, match="agent_rows should be an int of at least 1"):
        EpisodeBatcher(8, 8, Recurrent, None, create_pendulums, {"n_lanes": 1}, 0, agent_rows=rows)
