"""Environments with PettingZoo's parallel interface, and the expected results of collecting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlpool import Agent, DictTensor, TemporalDictTensor

from support.envs import small_discrete

Life = tuple[int, int, str]
"""The step at which an agent is born, its number of steps, and how it ends."""


class Lives:
    """Environment whose agents are born and die by a plan, without PettingZoo.

    Args:
        lives: Agent to its life.
        masks: Location of action masks: ``"observation"``, ``"info"`` or nowhere.
        reward: Reward of every agent in every step; by default it depends on the action.
    """

    metadata: Mapping[str, Any] = {"name": "lives"}
    render_mode = None

    def __init__(self, lives: Mapping[str, Life], masks: str = "", reward: Any = None) -> None:
        self.lives, self.masks, self.reward = dict(lives), masks, reward
        self.possible_agents = list(lives)
        self.state_space = spaces.Box(-1e9, 1e9, (len(lives),))
        self.agents: list[str] = []

    @property
    def unwrapped(self) -> Lives:
        return self

    def observation_space(self, agent: str) -> Any:
        size = 2 + agent.startswith("big")
        box = spaces.Box(-1e9, 1e9, (size,))
        if self.masks == "observation":
            mask = spaces.Box(0, 1, (4,), np.int8)
            return spaces.Dict(observation=box, action_mask=mask)
        return box

    def action_space(self, agent: str) -> Any:
        if agent.startswith("big"):
            return spaces.Box(-1, 1, (2,))
        return small_discrete(4, start=1)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.rng, self.t = np.random.default_rng(seed), 0
        self.bias = 0.0 if options is None else float(options["bias"])
        self.agents = [agent for agent in self.lives if self._is_alive(agent)]
        return self._observed(self.agents), self._infos(self.agents)

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        assert set(actions) == set(self.agents)
        assert all(self.action_space(agent).contains(actions[agent]) for agent in actions)
        acted, self.t = list(self.agents), self.t + 1
        born = [a for a in self.lives if self.lives[a][0] == self.t]
        self.agents = [agent for agent in self.lives if self._is_alive(agent)]
        rewards = {agent: self._reward(agent, actions[agent]) for agent in acted}
        ends = {agent: sum(self.lives[agent][:2]) <= self.t for agent in acted}
        kinds = {agent: self.lives[agent][2] for agent in acted}
        return (
            self._observed([*acted, *born]),
            rewards,
            {agent: ends[agent] and kinds[agent] == "terminated" for agent in acted},
            {agent: ends[agent] and kinds[agent] == "truncated" for agent in acted},
            self._infos([*acted, *born]),
        )

    def state(self) -> Any:
        return np.array([self.t + agent.startswith("big") for agent in self.lives], np.float32)

    def close(self) -> None:
        """Do nothing."""

    def _is_alive(self, agent: str) -> bool:
        birth, n_steps, _ = self.lives[agent]
        return birth <= self.t < birth + n_steps

    def _reward(self, agent: str, action: Any) -> Any:
        if self.reward is not None:
            return self.reward
        return float(np.sum(action)) + 0.25 * self.possible_agents.index(agent)

    def _mask(self) -> Any:
        mask = np.zeros(4, np.int8)
        mask[self.rng.integers(4)] = 1
        return mask

    def _observed(self, agents: Sequence[str]) -> Any:
        observed = {}
        for agent in agents:
            values = self.rng.normal(size=2 + agent.startswith("big"))
            box = (values + self.bias).astype(np.float32)
            in_dict = self.masks == "observation"
            observed[agent] = {"observation": box, "action_mask": self._mask()} if in_dict else box
        return observed

    def _infos(self, agents: Sequence[str]) -> Any:
        if self.masks != "info":
            return {agent: {} for agent in agents}
        return {agent: {"action_mask": self._mask(), "age": self.t} for agent in agents}


class RandomAgents(Agent):
    """Agent that acts at random, within action masks, for all agents of a group at once.

    Args:
        sizes: Action key to its number of choices, 0 for numbers from -1 to 1.
        start: The first choice.
    """

    n_noise = 16

    def __init__(self, sizes: Mapping[str, int], start: int = 0) -> None:
        self.sizes, self.start = dict(sizes), start

    def __call__(
        self, state: Any, observation: DictTensor, agent_info: Any = None, history: Any = None
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        actions: dict[str, torch.Tensor] = {}
        for key, size in self.sizes.items():
            last = observation[f"last_{key}"]
            noise = observation["noise"]
            n_agents = last.shape[1]
            noise = noise.repeat(1, 1 + last[0].numel() // noise.shape[1])
            draws = noise[:, : last[0].numel()].reshape(last.shape)
            actions[key] = 2 * draws - 1
            if size:
                group = key.partition("/")[2]
                mask = f"{group}/action_mask" if group else "action_mask"
                weights = torch.ones(len(last), n_agents, size)
                if mask in observation:
                    weights = observation[mask].float()
                    weights = weights + (weights.sum(-1, keepdim=True) == 0)
                edges = weights.cumsum(-1)
                chosen = (draws[..., None] * edges[..., -1:] >= edges).sum(-1)
                actions[key] = self.start + chosen.clamp(max=size - 1)
        return DictTensor(), DictTensor(actions), DictTensor()


def by_hand(
    env: Any,
    seed: int,
    action_of: Callable[[int, str], Any],
    agents: Sequence[str],
    options: Any,
    limit: int | None,
) -> list[dict[str, dict[str, Any]]]:
    """Play an episode with PettingZoo's parallel interface.

    Returns:
        For each moment, from the reset to the end: ``observed``, ``rewards``, ``terminations``,
        ``truncations``, ``infos`` and ``alive``, each by agent.
    """
    observed, infos = env.reset(seed=seed, options=options)
    moments = [_moment(env, agents, observed, {}, {}, {}, infos)]
    while env.agents and len(moments) - 1 != limit:
        actions = {agent: action_of(len(moments) - 1, agent) for agent in env.agents}
        moments.append(_moment(env, agents, *env.step(actions)))
    return moments


def _moment(env: Any, agents: Sequence[str], *results: Any) -> dict[str, dict[str, Any]]:
    names = ("observed", "rewards", "terminations", "truncations", "infos")
    alive = {agent: agent in env.agents for agent in agents}
    return {**dict(zip(names, map(dict, results), strict=True)), "alive": alive}


def _value(
    episodes: TemporalDictTensor, row: int, prefix: str, place: int, step: int, key: str
) -> Any:
    """Return an agent's value at a step, or after the last one."""
    if step < episodes.lengths[row]:
        return episodes[prefix + key][row, step, place].numpy()
    return episodes[f"_{prefix}{key}"][row, step - 1, place].numpy()


def check_joint_episode(
    episodes: TemporalDictTensor,
    row: int,
    env: Any,
    groups: Mapping[str, Sequence[str]],
    options: Any = None,
    reward: str = "sum",
    max_episode_steps: int | None = None,
) -> None:
    """Compare a row, step by step, with a loop over the parallel interface."""
    agents = [agent for members in groups.values() for agent in members]
    group_of = {agent: group for group, members in groups.items() for agent in members}

    def action_of(step: int, agent: str) -> Any:
        group = group_of[agent]
        key = f"action/{group}" if group else "action"
        value = episodes[key][row, step, groups[group].index(agent)].numpy()
        return value.astype(env.action_space(agent).dtype)[()]

    seed = int(episodes.info["seed"][row])
    moments = by_hand(env, seed, action_of, agents, options, max_episode_steps)
    n_steps = int(episodes.lengths[row])
    assert n_steps == len(moments) - 1
    for group, members in groups.items():
        prefix = f"{group}/" if group else ""
        for place, agent in enumerate(members):
            at = partial(_value, episodes, row, prefix, place)
            for step, moment in enumerate(moments):
                if 0 < step < n_steps:  # the values after a step are those before the next one
                    for key in ("frame", "alive", "rewards"):
                        after = episodes[f"_{prefix}{key}"][row, step - 1, place].numpy()
                        assert np.array_equal(after, at(step, key))
                assert at(step, "alive") == moment["alive"][agent]
                was_alive = step > 0 and moments[step - 1]["alive"][agent]
                assert at(step, "born") == (moment["alive"][agent] and not was_alive)
                shown = moment["observed"].get(agent, 0)
                if isinstance(shown, dict):
                    assert np.array_equal(at(step, "action_mask"), shown["action_mask"])
                    shown = shown["observation"]
                elif agent not in moment["observed"] and f"{prefix}action_mask" in episodes:
                    assert not at(step, "action_mask").any()
                frame = at(step, "frame")
                expected = np.broadcast_to(shown, frame.shape)
                assert np.array_equal(frame, expected.astype(frame.dtype))
                assert at(step, "rewards") == np.float32(moment["rewards"].get(agent, 0))
                for key in ("terminations", "truncations"):
                    assert at(step, key) == bool(moment[key].get(agent, False))
    for step in range(n_steps):
        rewards = moments[step + 1]["rewards"].values()
        total = sum(rewards) / (len(rewards) if reward == "mean" else 1)
        assert episodes["_reward"][row, step] == np.float32(total)
    last = moments[-1]
    ending = [agent for agent in agents if moments[-2]["alive"][agent]]
    is_cut = any(not last["terminations"].get(agent) for agent in ending)
    assert bool(episodes["_truncated"][row, n_steps - 1]) == is_cut
    assert bool(episodes["_terminated"][row, n_steps - 1]) == (not is_cut)


def check_agents(episodes: TemporalDictTensor, groups: Mapping[str, Sequence[str]]) -> None:
    """Compare ``per_agent`` with loops over the joint episodes."""
    for group, members in groups.items():
        prefix = f"{group}/" if group else ""
        own = episodes.per_agent(group)
        assert own.n_elems() == episodes.n_elems() * len(members)
        for row in range(episodes.n_elems()):
            n_steps = int(episodes.lengths[row])
            for place in range(len(members)):
                mine = row * len(members) + place
                assert own.info["agent"][mine] == place
                assert own.info["seed"][mine] == episodes.info["seed"][row]
                alive = episodes[f"{prefix}alive"][row, :, place]
                steps = [step for step in range(n_steps) if alive[step]]
                assert own.lengths[mine] == len(steps)
                for number, step in enumerate(steps):
                    is_last = number == len(steps) - 1
                    pairs = {
                        "frame": f"{prefix}frame",
                        "_frame": f"_{prefix}frame",
                        "_reward": f"_{prefix}rewards",
                        "action": f"action/{group}" if group else "action",
                    }
                    for name, key in pairs.items():
                        assert torch.equal(own[name][mine, number], episodes[key][row, step, place])
                    assert bool(own["initial_state"][mine, number]) == (number == 0)
                    ends = {
                        "_terminated": episodes[f"_{prefix}terminations"][row, step, place],
                        "_truncated": episodes[f"_{prefix}truncations"][row, step, place],
                    }
                    if not any(ends.values()):
                        ends = {name: episodes[name][row, step] for name in ends}
                    for name, end in ends.items():
                        assert own[name][mine, number] == end
                    assert bool(own["_done"][mine, number]) == any(ends.values()) == is_last
                for key in own:
                    assert not own[key][mine, len(steps) :].any()
        rewards = episodes.from_agents(own["_reward"], group)
        alive = episodes[f"{prefix}alive"]
        assert torch.equal(rewards, episodes[f"_{prefix}rewards"] * alive)
