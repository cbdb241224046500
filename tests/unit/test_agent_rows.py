"""An agent that is always called with as many rows: the same bits for any number of lanes."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
import torch
from torch import nn

from rlpool import (
    Agent,
    Batcher,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    ParallelEnvManager,
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


class Prepared(Recurrent):
    """Its memory begins with what ``agent_info`` says."""

    def initial_state(self, agent_info: Any, n_rows: int) -> DictTensor:
        return DictTensor({"memory": agent_info["bias"][:, None].expand(n_rows, 32) @ self.weights})

    @property
    def weights(self) -> torch.Tensor:
        return torch.arange(1024).view(32, 32).sin()


def pendulum(n_steps: int = 25) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("Pendulum-v1", max_episode_steps=n_steps)


def create_pendulums(n_lanes: int, seed: int) -> GymEnv:
    return GymEnv([pendulum() for _ in range(n_lanes)], seed)


def collected(kind: Any, n_lanes: int, n_threads: int, **args: Any) -> list[TemporalDictTensor]:
    """One request of all episodes, and one of the first ten, whose numbers follow."""
    with EpisodeBatcher(
        16, 64, kind, args, create_pendulums, {"n_lanes": n_lanes}, n_threads, 3, agent_rows=8
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


@pytest.mark.parametrize(
    ("kind", "args"),
    variants([(Recurrent, {"looks_back": True})], [(Recurrent, {}), (Prepared, {})]),
)
def test_episodes_are_bitwise_the_same_for_any_number_of_lanes_and_workers(
    kind: Any, args: dict[str, Any]
) -> None:
    expected = collected(kind, 8, 0, **args)
    for n_lanes, n_threads in DIVISIONS:
        found = collected(kind, n_lanes, n_threads, **args)
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


def test_requests_that_are_divided_otherwise_have_the_same_episodes() -> None:
    with EpisodeBatcher(
        16, 64, Recurrent, None, create_pendulums, {"n_lanes": 3}, 0, 3, agent_rows=8
    ) as batcher:
        batcher.execute(20)
        whole = batcher.get()
    with EpisodeBatcher(
        16, 64, Recurrent, None, create_pendulums, {"n_lanes": 5}, 0, 3, agent_rows=8
    ) as batcher:
        parts = []
        for n in (7, 13):
            batcher.update(Recurrent().state_dict())
            batcher.execute(n)
            parts.append(batcher.get())
    assert torch.equal(whole["action"], torch.cat([part["action"] for part in parts]))


def test_windows_are_bitwise_the_same_however_lanes_are_divided_among_workers() -> None:
    def create_lanes(n_lanes: int, seed: int) -> GymEnvInf:
        return GymEnvInf([pendulum(7) for _ in range(n_lanes)], seed)

    results = []
    for n_threads, n_lanes in ((0, 6), (2, 3)):
        with Batcher(
            10, None, Recurrent, None, create_lanes, {"n_lanes": n_lanes}, n_threads, 1,
            agent_rows=4,
        ) as batcher:  # fmt: skip
            batcher.reset()
            windows = []
            for _ in range(3):
                batcher.execute()
                windows.append(batcher.get())
            results.append(windows)
    assert all(map(same, *results))


def test_a_manager_in_the_place_of_environments_has_the_same_episodes() -> None:
    def create_manager(seed: int) -> ParallelEnvManager:
        return ParallelEnvManager([pendulum] * 5, seed=seed, envs_per_worker=3)

    with EpisodeBatcher(
        16, 64, Recurrent, None, create_manager, n_threads=0, seeds=3, agent_rows=8
    ) as batcher:
        batcher.execute(N_EPISODES, BIASES)
        found = batcher.get()
    assert same(collected(Recurrent, 8, 0)[0], found)


@pytest.mark.parametrize("rows", [0, 1.5, True, "8"])
def test_a_number_of_rows_that_is_none_is_refused(rows: Any) -> None:
    with pytest.raises(SpecError, match="agent_rows should be an int of at least 1"):
        EpisodeBatcher(8, 8, Recurrent, None, create_pendulums, {"n_lanes": 1}, 0, agent_rows=rows)
