"""Lanes without an episode: what the agent is shown of them, and that nothing fails there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from rlpool import (
    Agent,
    AgentError,
    DictTensor,
    EpisodeBatcher,
)

from support.agents import Vandal, zeros
from support.envs import create_counting

N_LANES = 4


class TableAgent(Agent):
    """Looks its info and its step up in tables that have no room for any other value.

    Args:
        initial: Whether it makes its initial states itself.
        fails: Whether it refuses info 2.
    """

    n_noise = 1

    def __init__(self, initial: bool = False, fails: bool = False) -> None:
        self.initial, self.fails = initial, fails
        self.infos, self.positions = torch.arange(3), torch.arange(6)

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        return DictTensor({"step": torch.zeros(n, dtype=torch.int64)})

    def makes_initial_states(self) -> bool:
        return self.initial

    def __call__(self, state, observation, agent_info=None, history=None):
        state = state or self.initial_state(agent_info, observation.n_elems())
        info = self.infos[agent_info["id"]]
        if self.fails and (info == 2).any():
            raise RuntimeError("no such task")
        step = self.positions[state["step"]]
        assert torch.equal(step, observation["frame"][:, 0].long())
        output = {"action": zeros(observation), "info": info}
        return state, DictTensor(output), DictTensor({"step": step + 1})


def make(create_agent: Any, create_env: Any = create_counting, **env_args: Any) -> EpisodeBatcher:
    options: dict[str, Any] = {"n_threads": 0, "seeds": 3, "env_args": env_args}
    return EpisodeBatcher(16, 64, create_agent, {}, create_env, **options)


def run(batcher: EpisodeBatcher, lengths: list[int], **agent_info: Any) -> Any:
    batcher.execute(len(lengths), agent_info or None, {"length": lengths})
    return batcher.get()


# What the agent is shown --------------------------------------------------------------------


@pytest.mark.parametrize("initial", [False, True])
def test_states_and_infos_of_idle_lanes_are_those_of_a_running_one(initial: bool) -> None:
    with make(partial(TableAgent, initial), n_envs=N_LANES) as batcher:
        for lengths in ([6, 1, 1, 2], [6], [1, 6, 6], [6, 6, 1, 1, 1, 1, 1]):
            result = run(batcher, lengths, id=[k % 3 for k in range(len(lengths))])
            assert result.lengths.tolist() == lengths


@pytest.mark.parametrize("initial", [False, True])
def test_infos_of_a_request_that_failed_are_shown_to_nobody(initial: bool) -> None:
    with make(partial(TableAgent, initial, fails=True), n_envs=N_LANES) as batcher:
        for lengths in ([3], [2, 3], [3, 1, 2, 5, 1]):
            with pytest.raises(AgentError, match="no such task"):
                run(batcher, [3] * 6, id=[2] * 6)
            assert run(batcher, lengths, id=[1] * len(lengths)).lengths.tolist() == lengths


# What an agent does in place ----------------------------------------------------------------


class StrictVandal(Vandal):
    """Compares what it is shown before it overwrites that."""

    def __call__(self, state, observation, agent_info=None, history=None):
        assert torch.equal(history.lengths, observation["frame"][:, 0].long())
        assert agent_info is None or not agent_info["gain"].any()
        return super().__call__(state, observation, agent_info or {"gain": torch.zeros(3)}, history)


@pytest.mark.parametrize("needs_info", [False, True])
def test_what_an_agent_does_in_place_is_not_shown_to_it_again(needs_info: bool) -> None:
    # The first request asks again for what the first call, of no episode, could not show.
    with make(partial(StrictVandal, history=True), n_envs=3) as batcher:
        infos = ({"gain": [0.0] * 4} if needs_info else None), {"length": [2, 1, 3, 1]}
        batcher.execute(4, *infos)
        assert batcher.get().lengths.tolist() == [2, 1, 3, 1]
