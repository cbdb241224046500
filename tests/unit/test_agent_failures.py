"""An agent that fails ends one request, and the error names the rows of the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlpool import Agent, AgentError, DictTensor, EpisodeBatcher

from support.agents import zeros
from support.envs import create_counting


class Fussy(Agent):
    """Fails in the third step for an info of 1."""

    def __init__(self, call: str) -> None:
        self.call = call

    def makes_initial_states(self) -> bool:
        return self.call == "initial_state"

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        if agent_info is not None and (agent_info["bad"] == 1).any():
            raise RuntimeError("bad info")
        return DictTensor({"n": torch.zeros(n)})

    def __call__(self, state, observation, agent_info=None, history=None):
        is_third = observation["frame"][:, 0] == 2
        observation["frame"].fill_(2.0)
        fails = self.call == "agent" and agent_info is not None
        if fails and (agent_info["bad"] * is_third == 1).any():
            raise RuntimeError("bad info")
        state = state or DictTensor({"n": torch.zeros(observation.n_elems())})
        return state, DictTensor({"action": zeros(observation)}), state


@pytest.mark.parametrize("call", ["agent", "initial_state"])
@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_failing_agent_ends_the_oldest_request_and_names_all_its_rows(
    call: str, n_workers: int
) -> None:
    options: dict[str, Any] = {"n_workers": n_workers, "seeds": 3, "env_args": {"n_envs": 8}}
    create = {"create_agent": Fussy, "agent_args": {"call": call}, "create_env": create_counting}
    with EpisodeBatcher(16, 64, **create, **options) as batcher:
        for bad in ([0, 1, 0], [0, 0]):
            batcher.execute(len(bad), {"bad": bad}, {"length": [5] * len(bad)})
        with pytest.raises(AgentError, match=r"in one call for the rows 0, 1, 2\)") as caught:
            batcher.get()
        assert caught.value.where.step == (2 if call == "agent" else 0)
        assert "bad info" in str(caught.value)
        assert batcher.get().lengths.tolist() == [5, 5]
