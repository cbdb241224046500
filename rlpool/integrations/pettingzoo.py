"""PettingZoo: collection of joint episodes of environments with many agents.

Use ``PettingZooEnv`` in place of ``GymEnv``. Observations and actions have an axis of agents::

    PettingZoo                      rlpool, A agents in B environments
    observations[agent]             frame [B, A, ...], or the keys of a Dict space
    actions[agent]                  action [B, A, ...]
    rewards[agent]                  rewards [B, A]; reward [B] is their sum
    terminations[agent]             terminations [B, A]
    truncations[agent]              truncations [B, A]
    agent in env.agents             alive [B, A]; born [B, A], if it acts for the first time
    infos[agent][key]               key [B, A, ...], if it is one of info_keys
    env.state()                     state [B, ...], if requested

As elsewhere, the same keys with a leading ``_`` hold the values after a step: ``_rewards`` are the
rewards of the step. ``terminated`` and ``truncated`` are those of the joint episode. Agents with
different spaces form groups, whose names are prefixes: ``adversary/frame``,
``_adversary/rewards``, ``action/adversary``.

Agents that have left or are not born yet keep their index. Their values are zero, except that an
agent's last observation is still present at the start of the step after its last one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_differing_spaces

from rlpool.data.specs import (
    DEFAULT_OBSERVATION_KEY,
    TensorSpec,
    flattener,
    join_key,
    leaf_spaces,
    leaves_of,
    nester,
    refuse_collisions,
    structure_of_space,
)
from rlpool.data.storage import NDArray
from rlpool.envs.columns import BadValue, checked_count, checked_results, choices_of, converted
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.info_keys import InfoKeys, info_specs, value_of
from rlpool.envs.single_envs import check_all_differ, is_of_agents
from rlpool.errors import SpecError
from rlpool.machine.arguments import check_choice
from rlpool.machine.imports import import_extra

__all__ = ["JointEnv", "PettingZooEnv", "PettingZooEnvInf"]

_OBSERVATION, _MASK, _STATE = "observation", "action_mask", "state"
_AGENT_FLAGS = ("alive", "born", "terminations", "truncations")
_TURN = "acting"
_OF_A_STEP = ("rewards", "terminations", "truncations", "born")
_BY_AGENT = ("rewards", "terminations", "truncations")
_REWARDS = ("sum", "mean")


class JointEnv(gymnasium.Env[dict[str, Any], Any]):
    """All agents of one PettingZoo environment as one Gymnasium environment.

    For arguments that are single environments, such as the ``env_fns`` of a
    ``ParallelEnvManager``; use a ``PettingZooEnv`` for several.

    Args:
        env: A ``pettingzoo.ParallelEnv`` or ``AECEnv``. This object closes it.
        reward: As for ``PettingZooEnv``.
        state: As for ``PettingZooEnv``.
        info_keys: Keys of the agents' infos that are combined in the infos of this environment, as
            arrays ``[A, ...]``. As for ``PettingZooEnv``.

    Attributes:
        env: The environment, with PettingZoo's parallel interface.
        groups: Agents by group name; a single group is named ``""``.
        observation_space: A ``Dict`` of arrays with an axis of agents.
        action_space: The agents' action spaces, batched; a ``Dict`` if there are several groups.

    Raises:
        SpecError: For other objects, an environment without ``possible_agents``, and spaces
            without a fixed shape.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from rlpool.integrations.pettingzoo import JointEnv
        >>> env = JointEnv(simple_spread_v3.parallel_env())
        >>> observation, info = env.reset(seed=0)
        >>> observation["frame"].shape, env.action_space
        ((3, 18), MultiDiscrete([5 5 5]))
    """

    checks_actions = True  # of agents that are alive

    def __init__(
        self,
        env: Any,
        *,
        reward: str = "sum",
        state: bool = False,
        info_keys: InfoKeys = None,
    ) -> None:
        self.env, self._in_turns = _in_parallel(env)
        self.metadata = {**getattr(env, "metadata", {})}
        self.render_mode = getattr(env, "render_mode", None)
        check_choice("reward", reward, _REWARDS)
        self._is_mean = reward == "mean"
        members = _grouped(self.env)
        self._groups = [_AgentGroup(self.env, name, agents) for name, agents in members.items()]
        self.groups = {group.name: group.agents for group in self._groups}
        self._agents = [agent for agents in self.groups.values() for agent in agents]
        check_choice("state", state, (True, False))
        self._has_state = state
        self._alive: list[str] = []
        self._gone: set[str] = set()
        self._listed: set[str] = set()  # in env.agents one step earlier
        flags = [*_AGENT_FLAGS, _TURN] if self._in_turns else _AGENT_FLAGS
        seen = {key: space for group in self._groups for key, space in group.spaces.items()}
        spaces = {key: space for group in self._groups for key, space in group.own(flags).items()}
        if state:
            if getattr(env, "state_space", None) is None:
                raise SpecError(f"{env!r:.60} has no state_space", fix="omit state=True")
            spaces[_STATE] = env.state_space
        refuse_collisions({"PettingZooEnv": list(spaces), "the observation": list(seen)})
        spaces |= seen
        self.observation_space = gymnasium.spaces.Dict(spaces)
        self.step_keys = [group.key(key) for group in self._groups for key in _OF_A_STEP]
        actions = {group.name: group.action_space for group in self._groups}
        self.action_space = gymnasium.spaces.Dict(actions) if len(actions) > 1 else actions[""]
        self.info_specs = self._specs_of_infos(info_keys)

    @property
    def unwrapped(self) -> Any:
        """The innermost PettingZoo environment."""
        return self.env.unwrapped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the environment; returns arrays with an axis of agents, and infos.

        Infos are those of PettingZoo, by agent, and the ``info_keys``.

        Raises:
            SpecError: If it does not return observations and infos of its agents.
        """
        result = self.env.reset(seed=seed, options=options)
        observations, infos = checked_count("reset", 2, result)
        self._gone, self._listed = set(), set()
        self._alive = self._agents_now()
        if not self._alive:
            raise SpecError("reset() left no agents", fix="let agents act from the start")
        first = {agent: observations.get(agent) for agent in self._alive}
        return self._observed(first, {}, {}, {}), self._infos(infos)

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Step the environment with the actions of all agents that are alive.

        Args:
            action: An element of ``action_space``; actions of agents that are not alive are
                ignored.

        Raises:
            SpecError: For invalid results, such as a reward that is not a number, and for an agent
                that leaves without being terminated or truncated.
        """
        actions: dict[str, Any] = {}
        for group in self._groups:
            part = action if group.name == "" else action[group.name]
            actions |= group.split(part, self._alive)
        result = checked_count("step", 5, self.env.step(actions))
        observations, rewards, terminations, truncations, infos = result
        rewards, terminations, truncations = self._checked(rewards, terminations, truncations)
        # Some environments report agents that have left or are not born yet.
        terminations, truncations = (
            {agent: flags[agent] for agent in actions} for flags in (terminations, truncations)
        )
        ending = {agent for agent in actions if terminations[agent] or truncations[agent]}
        self._gone |= ending
        self._alive = self._agents_now()
        observations = {agent: observations.get(agent) for agent in [*actions, *self._alive]}
        for agent in actions:
            if agent not in ending and agent not in self._alive:
                raise SpecError(
                    f"agent {agent!r} left without being terminated or truncated",
                    fix="return True for it from step() in terminations or truncations",
                )
        is_over = not self._alive
        was_cut = any(truncations[agent] and not terminations[agent] for agent in ending)
        return (
            self._observed(observations, rewards, terminations, truncations),
            sum(rewards.values()) / (max(1, len(rewards)) if self._is_mean else 1),
            is_over and not was_cut,
            is_over and was_cut,
            self._infos(infos),
        )

    def render(self) -> Any:
        """Draw the environment."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _agents_now(self) -> list[str]:
        """Return the agents that act next, in the order of the groups."""
        there = set(self.env.agents)
        if back := there & self._gone - self._listed:
            message = f"agents {sorted(map(str, back))} came back after their end"
            raise SpecError(message, fix="let agents live once per episode; list others for more")
        self._listed = there
        there = there - self._gone
        if unknown := there.difference(self._agents):
            message = f"agents {sorted(map(str, unknown))} are not in possible_agents"
            raise SpecError(message, fix="list all agents that can appear in possible_agents")
        return [agent for agent in self._agents if agent in there]

    def _checked(
        self, rewards: Any, terminations: Any, truncations: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Check the results by agent, of all that acted and of others with a reward."""
        for name, part in zip(_BY_AGENT, (rewards, terminations, truncations), strict=True):
            if not isinstance(part, Mapping):
                message = f"step() returned {name} {part!r:.60}, not a dict of agents"
                raise SpecError(message, fix="return a dict with a value for each agent that acted")
        agents = [agent for agent in self._agents if agent in rewards or agent in self._alive]
        try:
            values = [rewards[agent] for agent in agents]
        except KeyError as error:
            message = f"agent {error} acted but got no reward"
            raise SpecError(message, fix="return a reward for each agent from step()") from None
        ends = [[flags.get(a, False) for a in agents] for flags in (terminations, truncations)]
        try:
            results = checked_results(range(len(agents)), (values, ends[0], ends[1]))
        except BadValue as error:
            raise SpecError(f"agent {agents[error.lane]!r}: {error.what}", fix=error.fix) from error
        # Unlike sums of small NumPy ints, sums of Python floats do not wrap around.
        results = list(map(float, results[0])), *results[1:]
        one, two, three = (dict(zip(agents, each, strict=True)) for each in results)
        return one, two, three

    def _observed(
        self,
        observations: Mapping[str, Any],
        rewards: Mapping[str, float],
        terminations: Mapping[str, bool],
        truncations: Mapping[str, bool],
    ) -> dict[str, Any]:
        cut = [agent for agent, flag in truncations.items() if flag and not terminations[agent]]
        for agent in (*self._alive, *cut):  # their observations have a value
            if observations.get(agent) is None:
                raise SpecError(
                    f"agent {agent!r} has no observation",
                    fix="return an observation for every agent in every step, even if others act, "
                    "and after its last one if that is truncated",
                )
        flags = {
            "alive": self._alive,
            "born": [agent for agent in self._alive if agent not in terminations],
            "terminations": [agent for agent, flag in terminations.items() if flag],
            "truncations": [agent for agent, flag in truncations.items() if flag],
        }
        if self._in_turns:
            flags[_TURN] = [a for a in self._alive if a == self.env.aec_env.agent_selection]
        arrays: dict[str, Any] = {}
        for group in self._groups:
            arrays |= group.observed(observations)
            arrays |= {group.key(key): group.flags(agents) for key, agents in flags.items()}
            of_agents = [rewards.get(agent, 0.0) for agent in group.agents]
            arrays[group.key("rewards")] = np.array(of_agents, np.float32)
        if self._has_state:
            arrays[_STATE] = self.env.state()
        return arrays

    def _infos(self, infos: Any) -> dict[str, Any]:
        """Return the infos by agent, and the requested keys with an axis of agents."""
        found = {**infos} if isinstance(infos, Mapping) else {}
        for group, key, name in self._wanted:
            values = group.stacked(name, found)
            if values is not None:
                found[key] = values
        return found

    def _specs_of_infos(self, info_keys: InfoKeys) -> dict[str, Any]:
        """Return the ``info_keys`` of a ``GymEnv`` for some keys of all agents' infos."""
        specs: dict[str, Any] = {}
        self._wanted: list[tuple[_AgentGroup, str, str]] = []
        for name, spec in info_specs(info_keys, keep_float64=True).items():
            head = name.partition("/")[0]
            for group in self._groups:
                if head in self.groups and head != group.name:
                    continue
                inner = name.partition("/")[2] if head == group.name else name
                self._wanted.append((group, group.key(inner), inner))
                shape = len(group.agents), *spec.shape
                specs[group.key(inner)] = TensorSpec(shape, spec.dtype)
        return specs


class PettingZooEnv(GymEnv):
    """PettingZoo environments as a batch of lanes: an episode contains all agents.

    Args:
        envs: ``pettingzoo.ParallelEnv``s or ``AECEnv``s, all with the same agents and spaces.
            PettingZoo's ``aec_to_parallel`` converts an ``AECEnv`` that is marked as
            parallelizable, and ``turn_based_aec_to_parallel`` any other: one agent acts in every
            step, marked in bool ``acting [A]``, and the actions of the others are ignored. This
            object closes the environments.
        seed: Root of the seeds of ``reset(env_info)``. A batcher uses its own seeds.
        reward: Reward of the joint episode: ``"sum"`` or ``"mean"`` of the agents' rewards in the
            step.
        state: Whether ``env.state()`` is a key.
        max_episode_steps: Truncate episodes after this many steps.
        keep_float64: As for ``GymEnv``.
        info_keys: Keys of the infos of agents that become keys ``[A, ...]`` of a step, as for
            ``GymEnv``; shapes are those of one agent. Zero if the key is missing from an agent's
            info. ``"adversary/x"`` requests a key of one group.

    Attributes:
        groups: Agents by group name, in the order of the axis; a single group is named ``""``.

    Raises:
        SpecError: As for ``JointEnv``, and for environments whose agents or spaces differ.

    Agents with equal spaces form a group, named after its first agent without the number:
    ``adversary`` for ``adversary_0``. Keys of a single group do not have a prefix.

    An observation that is a ``Dict`` of ``observation`` and ``action_mask`` becomes ``frame`` and
    ``action_mask``. The joint episode ends when no agent is left; it is truncated if one of the
    last agents was, else terminated. ``per_agent`` of its trajectories separates the agents.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from rlpool.integrations.pettingzoo import PettingZooEnv
        >>> env = PettingZooEnv([simple_spread_v3.parallel_env() for _ in range(2)], seed=0)
        >>> observation, lanes = env.reset()
        >>> observation["frame"].shape, observation["alive"]
        (torch.Size([2, 3, 18]), tensor([[True, True, True],
                [True, True, True]]))
    """

    def __init__(
        self,
        envs: Sequence[Any],
        seed: int | Sequence[int] | None = None,
        *,
        reward: str = "sum",
        state: bool = False,
        max_episode_steps: int | None = None,
        keep_float64: bool | Collection[str] = False,
        info_keys: InfoKeys = None,
    ) -> None:
        if not isinstance(envs, Iterable) or is_of_agents(envs):
            fix = "PettingZooEnv([make() for _ in range(n)], seed)"
            raise SpecError(f"PettingZooEnv got {envs!r:.60}, not a list of environments", fix=fix)
        check_all_differ(envs := list(envs), "PettingZooEnv([make() for _ in range(n)], seed)")
        joint = partial(JointEnv, reward=reward, state=state, info_keys=info_keys)
        lanes = [joint(env) for env in envs]
        for number, lane in enumerate(lanes):
            if lane.groups != lanes[0].groups:
                raise SpecError(
                    f"the agents of environment {number} are {lane.groups}, those of environment 0 "
                    f"{lanes[0].groups}",
                    fix="put only environments with the same agents into one PettingZooEnv",
                )
        super().__init__(
            lanes,
            seed,
            max_episode_steps=max_episode_steps,
            keep_float64=keep_float64,
            info_keys=lanes[0].info_specs if lanes else None,
        )
        self.groups = lanes[0].groups


class PettingZooEnvInf(PettingZooEnv):
    """A ``PettingZooEnv`` whose environments restart automatically, like a ``GymEnvInf``.

    Example:
        >>> from mpe2 import simple_spread_v3
        >>> from rlpool.integrations.pettingzoo import PettingZooEnvInf
        >>> env = PettingZooEnvInf([simple_spread_v3.parallel_env(max_cycles=1)], seed=0)
        >>> env.reset()[0]["frame"].shape
        torch.Size([1, 3, 18])
        >>> step = DictTensor({"action": torch.zeros(1, 3, dtype=torch.int64)})
        >>> ended, running = env.step(step)
        >>> ended[0]["done"], running[0]["initial_state"]
        (tensor([True]), tensor([True]))
    """

    auto_reset = True


# Agents -------------------------------------------------------------------------------------------


class _AgentGroup:
    """Agents with equal spaces, as arrays ``[A, ...]``.

    Args:
        env: The environment.
        name: The group's name, the first part of its keys.
        agents: Its agents.

    Attributes:
        spaces: Spaces of the observations by key, with an axis of agents.
        action_space: Space of the actions.
    """

    def __init__(self, env: Any, name: str, agents: Sequence[str]) -> None:
        self.name, self.agents = name, tuple(agents)
        self._places = {agent: place for place, agent in enumerate(agents)}
        n, space = len(agents), env.observation_space(agents[0])
        observation = structure_of_space(space, name=f"observation_space({agents[0]!r})")
        leaves = leaves_of(observation, DEFAULT_OBSERVATION_KEY)
        if leaves.keys() == {_OBSERVATION, _MASK}:
            leaves = {
                key.replace(_OBSERVATION, DEFAULT_OBSERVATION_KEY): leaf
                for key, leaf in leaves.items()
            }
        self._specs = {self.key(key): leaf.spec for key, leaf in leaves.items()}
        self._flatten = flattener(observation, "observation")
        parts = [batch_differing_spaces([part] * n) for part in leaf_spaces(space)]
        self.spaces = dict(zip(self._specs, parts, strict=True))
        space = env.action_space(agents[0])
        action = structure_of_space(space, name=f"action_space({agents[0]!r})")
        self.action_space = batch_differing_spaces([space] * n)
        batched = structure_of_space(self.action_space, name="action_space")
        self._split, self._nest = flattener(batched, "action"), nester(action)
        self._action_keys = list(leaves_of({"action": action}, ""))
        self._choices = choices_of([action])

    def key(self, key: str) -> str:
        """Return a key of this group."""
        return join_key(self.name, key)

    def own(self, flags: Iterable[str]) -> dict[str, gymnasium.Space[Any]]:
        """Return the spaces of each agent's flags and reward."""
        shape: Any = (len(self.agents),)
        flag: Any = np.bool_
        own: dict[str, Any] = {self.key(key): Box(0, 1, shape, flag) for key in flags}
        return own | {self.key("rewards"): Box(-np.inf, np.inf, shape)}

    def observed(self, observations: Mapping[str, Any]) -> dict[str, NDArray]:
        """Stack the agents' observations, zero for those without one.

        Raises:
            SpecError: If an observation does not match the space of its agent.
        """
        specs = self._specs
        arrays = {key: np.zeros((len(self.agents), *s.shape), s.dtype) for key, s in specs.items()}
        for agent, place in self._places.items():
            observation = observations.get(agent)
            if observation is None:
                continue
            values = self._flatten(observation)
            for (key, spec), value in zip(specs.items(), values, strict=True):
                is_alike = type(value) is np.ndarray and value.dtype == spec.dtype
                if not is_alike or value.shape != spec.shape:
                    value = converted(value, spec, f"{key} of {agent}")
                arrays[key][place] = value
        return arrays

    def split(self, action: Any, alive: Iterable[str]) -> dict[str, Any]:
        """Split an action among the agents that are alive.

        Raises:
            SpecError: If an action is outside its agent's space.
        """
        parts = self._split(action)
        places = {agent: self._places[agent] for agent in alive if agent in self._places}
        for choices in self._choices:
            part = parts[self._action_keys.index(choices.key)]
            try:
                choices.refuse(part, list(places.values()))
            except BadValue as error:
                message = f"agent {self.agents[error.lane]!r}: {error.what}"
                raise SpecError(message, fix=error.fix) from error
        return {
            agent: self._nest([part[place] for part in parts]) for agent, place in places.items()
        }

    def flags(self, agents: Iterable[str]) -> NDArray:
        """Return a mask of the agents among these, bool ``[A]``."""
        flags = np.zeros(len(self.agents), np.bool_)
        flags[[self._places[agent] for agent in agents if agent in self._places]] = True
        return flags

    def stacked(self, key: str, infos: Mapping[str, Any]) -> NDArray | None:
        """Stack the values of a key of its agents' infos, ``[A, ...]``; ``None`` if all lack it.

        Raises:
            SpecError: If shapes differ.
        """
        found = [infos.get(agent) for agent in self.agents]
        values = [value_of(info, key) if isinstance(info, Mapping) else None for info in found]
        there = [np.asarray(value) for value in values if value is not None]
        if not there:
            return None
        try:
            filled = [np.zeros_like(there[0]) if v is None else np.asarray(v) for v in values]
            return np.stack(filled)
        except ValueError as error:
            shapes = [list(value.shape) for value in there]
            raise SpecError(f"info {key!r} has the shapes {shapes} for different agents") from error


def _in_parallel(env: Any) -> tuple[Any, bool]:
    """Convert to the parallel interface; returns also whether agents act one at a time."""
    if not is_of_agents(env):
        raise SpecError(
            f"{env!r:.60} is not a PettingZoo environment",
            fix="pass a ParallelEnv or AECEnv; use GymEnv for Gymnasium environments",
        )
    if not hasattr(env, "possible_agents"):
        raise SpecError(
            f"{env!r:.60} has no possible_agents, so the size of arrays is unknown",
            fix="give it the attribute possible_agents",
        )
    if not hasattr(env, "agent_iter"):
        return env, False
    conversions = import_extra("pettingzoo.utils.conversions", "pettingzoo")
    if getattr(env, "metadata", {}).get("is_parallelizable", False):
        return conversions.aec_to_parallel(env), False
    return conversions.turn_based_aec_to_parallel(env), True


def _grouped(env: Any) -> dict[str, list[str]]:
    """Group agents with equal spaces, by name; a single group is named ``""``."""
    groups: dict[str, list[str]] = {}
    spaces: dict[str, tuple[Any, Any]] = {}
    for agent in env.possible_agents:
        both = env.observation_space(agent), env.action_space(agent)
        name = next((name for name, known in spaces.items() if known == both), "")
        if not name:
            stem = re.sub(r"[_-]?\d+$", "", str(agent)) or str(agent)
            name = str(agent) if stem in spaces else stem
            spaces[name] = both
        groups.setdefault(name, []).append(agent)
    if not groups:
        raise SpecError(f"{env!r:.60} has no agents", fix="list them in possible_agents")
    if len(groups) == 1:
        return {"": next(iter(groups.values()))}
    for name in groups:
        if not re.fullmatch("[^_/][^/]*", name) or name in ("action", "last_action"):
            raise SpecError(
                f"{name!r}, the name of a group of agents, cannot be the first part of keys",
                fix="give agents names without '/' or a leading '_', other than 'action'",
            )
    return groups
