"""Pools that keep agent_info and other columns of the info of trajectories."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlpool import (
    Agent,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    Pool,
    SpecError,
    TemporalDictTensor,
    replay_agent,
)
from rlpool.agents.agent import AgentStep

from support.envs import CountingEnv

INFOS = ["agent_info", "env_info/level"]


class TunedAgent(torch.nn.Module, Agent):
    """Its output follows from its agent_info, and from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def __call__(
        self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
    ) -> AgentStep:
        gain = agent_info["gain"]
        output = {
            "action": (observation["frame"][:, 0] % 2).long(),
            "score": gain * self.weight * observation["frame"][:, 0],
            "shift": agent_info["shift"].sum(1),
        }
        return DictTensor(), DictTensor(output), DictTensor()


def create_env(seed: int) -> GymEnv:
    return GymEnv([CountingEnv(length=5) for _ in range(2)], seed)


N = 6
AGENT_INFO = {"gain": torch.arange(N) / 4, "shift": torch.arange(2.0 * N).reshape(N, 2)}


@pytest.fixture(scope="module")
def episodes() -> Any:
    with EpisodeBatcher(8, 8, TunedAgent, {}, create_env, {}, 0, seeds=1) as batcher:
        batcher.execute(N, agent_info=AGENT_INFO, env_info={"level": torch.arange(N)})
        return batcher.get()


@pytest.mark.parametrize(
    ("processes", "keys"), [(1, None), (3, ["frame", "action", "score", "shift", "initial_state"])]
)
def test_samples_sequences_and_replays_have_what_is_kept(
    processes: int, keys: Any, episodes: Any
) -> None:
    pool = Pool(pool_size=60, processes=processes, keys=keys, info_keys=INFOS, seed=0)
    pool.extend(episodes)
    loaded = Pool(pool_size=60, processes=processes)
    loaded.load_state_dict(pool.state_dict())
    for source in (pool, loaded):
        for options in ({}, {} if keys else {"n_step": 3}):
            batch = source.sample(20, **options)
            assert torch.equal(batch["agent_info/shift"].sum(1), batch["shift"])
            assert torch.equal(batch["agent_info/gain"] * 4, batch["env_info/level"].float())
        assert set(source.transitions()["env_info/level"].tolist()) == set(range(N))
        sequences = source.sample_sequences(10, 3)
        assert [k for k in sequences if "info" in k] == []
        assert set(sequences.info) == {"agent_info/gain", "agent_info/shift", "env_info/level"}
        if keys is None:
            agent = TunedAgent()
            for state in ("recompute", "stored"):
                replayed = replay_agent(agent, sequences, state=state)  # type: ignore[arg-type]
                assert torch.equal(replayed["score"].detach(), sequences["score"])
                assert torch.equal(replayed["shift"], sequences["shift"])
            replayed["score"].sum().backward()
            assert agent.weight.grad


def test_what_is_missing_is_named(episodes: Any) -> None:
    pool = Pool(pool_size=60, info_keys=["agent_info"])
    pool.extend(episodes)
    for add in (
        lambda: pool.extend(TemporalDictTensor(dict(episodes.items()), episodes.lengths)),
        lambda: pool.pool([0.0], 0, [1.0], 0.5, done=True),
        lambda: Pool(pool_size=60, info_keys=["env_info"]).load_state_dict(pool.state_dict()),
    ):
        with pytest.raises(SpecError, match=r"agent_info/gain|info_keys"):
            add()
    plain = Pool(pool_size=60)
    plain.extend(episodes)
    assert "agent_info/gain" not in plain.specs
