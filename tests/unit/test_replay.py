"""An agent replayed over trajectories reproduces its outputs during collection."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
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
    SpecError,
    TemporalDictTensor,
    replay_agent,
    sample_categorical,
)

N_LANES = 3
STANDARD_KEYS = {"frame", "reward", "terminated", "truncated", "done", "initial_state"}


def kinds(n):
    return DictTensor({"kind": torch.arange(n) % 5 + 1})


def create_env(seed, kind=GymEnv):
    return kind([gym.make("CartPole-v1") for _ in range(N_LANES)], seed, max_episode_steps=25)


class FeedForwardAgent(nn.Module, Agent):
    n_noise = 1
    n_inputs = 4

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(self.n_inputs, 2)

    def output(self, features, noise):
        # Zeros in padding would corrupt the gradient.
        logits = self.head(features / features.norm(dim=1, keepdim=True))
        action, log_probability = sample_categorical(logits, noise)
        output = {"action": action, "logits": logits, "log_probability": log_probability}
        return DictTensor(output)

    def __call__(self, state, observation, agent_info=None, history=None):
        frame = observation["frame"]
        if agent_info is not None:
            frame = frame * agent_info["kind"].unsqueeze(1)
        return DictTensor(), self.output(frame, observation["noise"]), DictTensor()


class HistoryAgent(FeedForwardAgent):
    """Agent that depends on the sum of all frames so far and its last action."""

    def require_history(self):
        return True

    def __call__(self, state, observation, agent_info=None, history=None):
        frames = observation["frame"]
        if history.n_timesteps():
            mask = history.mask().unsqueeze(-1)
            frames = frames - (history["_frame"] * mask).sum(1) - (history["frame"] * mask).sum(1)
            frames = frames + history["action"].sum(1, keepdim=True) * 0.1
        seen = DictTensor({"frame": frames, "noise": observation["noise"]})
        return super().__call__(state, seen, agent_info)


class RecurrentAgent(FeedForwardAgent):
    """GRU with a learned initial state per kind of agent, created in its first call."""

    n_inputs = 8

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 8)
        self.table = nn.Embedding(6, 8)

    def start(self, agent_info, n):
        kinds = torch.zeros(n, dtype=torch.int64) if agent_info is None else agent_info["kind"]
        return DictTensor({"hidden": self.table(kinds)})

    def __call__(self, state, observation, agent_info=None, history=None):
        if state is None:
            state = self.start(agent_info, observation.n_elems())
        hidden = self.cell(observation["frame"], state["hidden"])
        output = self.output(hidden, observation["noise"])
        return state, output, DictTensor({"hidden": hidden})


class AskedForStartAgent(RecurrentAgent):
    def initial_state(self, agent_info, n):
        return self.start(agent_info, n)


RECURRENT = [RecurrentAgent, AskedForStartAgent]
AGENTS = [*RECURRENT, FeedForwardAgent, HistoryAgent]
each_agent = pytest.mark.parametrize("create_agent", AGENTS)
each_source = pytest.mark.parametrize("state", ["recompute", "stored"])


def collect_episodes(create_agent, n_episodes=8, agent_info=None):
    with EpisodeBatcher(7, 16, create_agent, {}, create_env, {}, n_threads=0, seeds=0) as batcher:
        batcher.execute(n_episodes, agent_info)
        return batcher.get()


def collect_windows(create_agent, n_windows, n_timesteps=30, agent_info=None, kind=GymEnvInf):
    create = partial(create_env, kind=kind)
    with Batcher(n_timesteps, None, create_agent, {}, create, {}, n_threads=0, seeds=0) as batcher:
        batcher.reset(agent_info)
        return [batcher.execute() or batcher.get() for _ in range(n_windows)]


def assert_replayed(replayed, collected):
    assert torch.equal(replayed.lengths, collected.lengths)
    assert replayed.n_timesteps() == collected.n_timesteps()
    assert set(replayed.keys()) == {"action", "logits", "log_probability"}
    for key in replayed:
        assert replayed[key].dtype == collected[key].dtype
        torch.testing.assert_close(replayed[key], collected[key])


@each_source
@each_agent
def test_replay_of_episodes_equals_the_collected_outputs(create_agent, state):
    collected = collect_episodes(create_agent, agent_info=kinds(8))
    shortest = collected[collected.lengths == collected.lengths.min()]
    assert not collected.full()
    for part in (collected, shortest):
        replayed = replay_agent(create_agent(), part, state=state)
        assert_replayed(replayed, part)
        assert torch.equal(replayed.info["agent_info/kind"], part.info["agent_info/kind"])


@each_source
@each_agent
def test_replay_of_windows_restarts_where_episodes_begin(create_agent, state):
    windows = collect_windows(create_agent, 3, agent_info=kinds(N_LANES))
    assert all(window["initial_state"][:, 1:].any(1).all() for window in windows)
    n_starting = [int(window["initial_state"][:, 0].sum()) for window in windows]
    assert n_starting[0] == N_LANES
    assert min(n_starting) == 0
    # A window does not contain the history that an agent saw before it.
    for window in windows[:1] if create_agent is HistoryAgent else windows:
        assert_replayed(replay_agent(create_agent(), window, state=state), window)


@each_source
@pytest.mark.parametrize("create_agent", RECURRENT)
def test_replay_of_windows_continues_from_the_stored_state(create_agent, state):
    first, second, third = collect_windows(create_agent, 3, n_timesteps=6, kind=GymEnv)
    assert not any(window["initial_state"].any() for window in (second, third))
    mixed = TemporalDictTensor.cat([second, first])  # only some rows start an episode
    episodes = collect_episodes(create_agent)
    later = episodes.temporal_slice(int(episodes.lengths.min()), episodes.n_timesteps())
    assert 0 in later.lengths
    for window in (first, second, third, mixed, later):
        assert_replayed(replay_agent(create_agent(), window, state=state), window)


@each_source
@each_agent
def test_the_gradient_equals_that_of_the_unpadded_rows(create_agent, state):
    collected = collect_episodes(create_agent, agent_info=kinds(8))
    whole, parts = create_agent(), create_agent()
    replay_agent(whole, collected, state=state)["logits"].square().sum().backward()
    for row in collected.unfold():
        replay_agent(parts, row.shorten(), state=state)["logits"].square().sum().backward()
    for (name, left), right in zip(whole.named_parameters(), parts.parameters(), strict=True):
        if name == "table.weight" and state == "stored":
            assert left.grad is None  # stored states are constants
        else:
            assert left.grad.abs().sum() > 0, name
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-4)
    ordered = collected[collected.lengths.argsort()]
    later = ordered.temporal_slice(int(ordered.lengths[0]), ordered.n_timesteps())
    replay_agent(whole, later, state=state)["logits"].sum().backward()  # rows without steps
    assert whole.head.weight.grad.isfinite().all()


class CuriousAgent(AskedForStartAgent):
    """Agent that records its arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __call__(self, state, observation, agent_info=None, history=None):
        self.seen.append((set(state.keys()), set(observation.keys()), observation.n_elems()))
        return super().__call__(state, observation, agent_info, history)


def test_the_agent_gets_the_same_keys_and_batch_as_in_collection_or_all_transitions_at_once():
    collected = collect_episodes(CuriousAgent)
    collected.set("advantage", torch.zeros(8, collected.n_timesteps()))  # a user-defined key
    keys = STANDARD_KEYS | {"last_action", "noise"}
    steps, at_once = CuriousAgent(), CuriousAgent()
    replay_agent(steps, collected)
    assert steps.seen == [({"hidden"}, keys, 8)] * collected.n_timesteps()
    replay_agent(at_once, collected, state="stored")
    assert at_once.seen == [({"hidden"}, keys, int(collected.lengths.sum()))]


class WrongAgent(FeedForwardAgent):
    """Agent that returns only part of the required outputs."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def __call__(self, state, observation, agent_info=None, history=None):
        return self.part(super().__call__(state, observation, agent_info, history))


@pytest.mark.parametrize(
    ("agent", "changes", "named"),
    [
        (WrongAgent(lambda result: result[1]["action"]), {}, "the agent returned"),
        (WrongAgent(lambda result: [part[:1] for part in result]), {}, "the agent returned"),
        (RecurrentAgent, {}, "agent is "),
        (RecurrentAgent(), {"state": "zero"}, "'stored'"),
        (RecurrentAgent(), {"trajectories": TemporalDictTensor({"a": torch.ones(2, 0)})}, "steps"),
    ],
)
def test_the_reason_replay_is_impossible_is_named(agent, changes, named):
    arguments = {"trajectories": collect_episodes(RecurrentAgent, n_episodes=2), **changes}
    with pytest.raises(SpecError, match=named):
        replay_agent(agent, **arguments)
