"""The request that fails is the one that caused it, and the error names the episode."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from rlpool import Agent, AgentError, DictTensor, EpisodeBatcher

from support.agents import zeros
from support.envs import create_counting


class Fussy(Agent):
    """Fails in the third step for an info of 1, or for many different infos.

    Args:
        call: ``"agent"`` or ``"initial_state"``.
        most: Fails if the rows have more different infos.
        once: Fails once only.
    """

    def __init__(self, call: str, most: int = 10**9, once: bool = False) -> None:
        self.call, self.most, self.once = call, most, once

    def makes_initial_states(self) -> bool:
        return self.call == "initial_state"

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        if agent_info is not None and (agent_info["bad"] == 1).any():
            raise RuntimeError("bad info")
        return DictTensor({"n": torch.zeros(n)})

    def __call__(self, state, observation, agent_info=None, history=None):
        is_third = observation["frame"][:, 0] == 2
        observation["frame"].fill_(2.0)
        if self.call == "agent" and agent_info is not None:
            bad = agent_info["bad"] * is_third
            if (bad == 1).any() or len(bad.unique()) > self.most:
                self.most = 10**9 if self.once else self.most
                raise RuntimeError("bad info")
        state = state or DictTensor({"n": torch.zeros(observation.n_elems())})
        return state, DictTensor({"action": zeros(observation)}), state


def requests(create_agent: Any, bad: list[list[int]], n_threads: int = 1) -> list[Any]:
    """Results or errors of requests that all run at once in eight lanes."""
    options: dict[str, Any] = {"n_threads": n_threads, "seeds": 3, "env_args": {"n_envs": 8}}
    with EpisodeBatcher(16, 64, create_agent, {}, create_counting, **options) as batcher:
        for infos in bad:
            batcher.execute(len(infos), {"bad": infos}, {"length": [5] * len(infos)})
        outcomes: list[Any] = []
        for _ in bad:
            try:
                outcomes.append(batcher.get().lengths.tolist())
            except AgentError as error:
                outcomes.append(error)
        return outcomes


@pytest.mark.parametrize("call", ["agent", "initial_state"])
@pytest.mark.parametrize("n_threads", [0, 1])
def test_the_request_and_the_row_that_made_the_agent_fail_are_found(
    call: str, n_threads: int
) -> None:
    outcomes = requests(partial(Fussy, call), [[0, 0], [0, 0, 1], [0], [0, 0]], n_threads)
    assert [outcomes[i] for i in (0, 2, 3)] == [[5, 5], [5], [5, 5]]
    error = outcomes[1]
    assert "not known" not in str(error)
    assert error.where.episode == 2
    assert error.where.step == (2 if call == "agent" else 0)
    assert error.capsule.agent_info["bad"] == 1


def test_a_failure_of_several_rows_together_fails_their_request() -> None:
    agent = partial(Fussy, "agent", most=2)
    outcomes = requests(agent, [[0, 0], [4, 5, 6], [4, 4]])
    assert [outcomes[i] for i in (0, 2)] == [[5, 5], [5, 5]]
    assert "which of them caused it is not known" in str(outcomes[1])


def test_a_failure_that_does_not_come_again_says_that_its_cause_is_not_known() -> None:
    agent = partial(Fussy, "agent", most=1, once=True)
    first, second = requests(agent, [[4, 5], [4, 4]])
    assert "which of them caused it is not known" in str(first)
    assert second == [5, 5]
