"""Groups of agents that have the same spaces, and what else PettingZoo's environments tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_differing_spaces

from rlpool.data.specs import (
    DEFAULT_OBSERVATION_KEY,
    flattener,
    join_key,
    leaves_of,
    nester,
    structure_of_space,
)
from rlpool.data.storage import NDArray
from rlpool.envs.columns import converted
from rlpool.envs.info_keys import value_of
from rlpool.envs.single_envs import is_of_agents
from rlpool.errors import SpecError
from rlpool.machine.imports import import_extra

Groups = Mapping[str, Sequence[str]] | None

OBSERVATION, MASK, STATE = "observation", "action_mask", "state"
AGENT_FLAGS = ("alive", "born", "terminations", "truncations")
TURN = "acting"
OF_A_STEP = ("rewards", "terminations", "truncations", "born")
_ACTIONS = ("action", "last_action")  # names of groups follow these in keys


class AgentGroup:
    """Agents with spaces of the same structure: their places in arrays ``[A, ...]``.

    Args:
        env: The environment.
        name: The group's name, the first part of its keys.
        agents: Its agents.

    Attributes:
        spaces: Key to space of what they observe, with an axis of agents.
        action_space: The space of what they do.
    """

    def __init__(self, env: Any, name: str, agents: Sequence[str]) -> None:
        self.name, self.agents = name, tuple(agents)
        self._places = {agent: place for place, agent in enumerate(agents)}
        observation, spaces = _same_structure(env, "observation_space", self.agents)
        leaves = leaves_of(observation, DEFAULT_OBSERVATION_KEY)
        if leaves.keys() == {OBSERVATION, MASK}:
            leaves = {
                key.replace(OBSERVATION, DEFAULT_OBSERVATION_KEY): leaf
                for key, leaf in leaves.items()
            }
        self._specs = {self.key(key): leaf.spec for key, leaf in leaves.items()}
        self._flatten = flattener(observation, "observation")
        parts = [
            batch_differing_spaces(list(parts))
            for parts in zip(*map(_leaf_spaces, spaces), strict=True)
        ]
        self.spaces = dict(zip(self._specs, parts, strict=True))
        action, spaces = _same_structure(env, "action_space", self.agents)
        self.action_space = batch_differing_spaces(list(spaces))
        batched = structure_of_space(self.action_space, keep_float64=True, name="action_space")
        self._split, self._nest = flattener(batched, "action"), nester(action)

    def key(self, key: str) -> str:
        """A key of this group."""
        return join_key(self.name, key)

    def own(self, flags: Iterable[str]) -> dict[str, gymnasium.Space[Any]]:
        """The space of what each of its agents has beside an observation: flags, and a reward."""
        shape: Any = (len(self.agents),)
        flag: Any = np.bool_
        own: dict[str, Any] = {self.key(key): Box(0, 1, shape, flag) for key in flags}
        return own | {self.key("rewards"): Box(-np.inf, np.inf, shape)}

    def observed(self, observations: Mapping[str, Any]) -> dict[str, NDArray]:
        """What the agents have observed, zero for those without an observation.

        Raises:
            SpecError: If an observation does not fit the space of its agent.
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
        """The actions of those of its agents that are alive."""
        parts = self._split(action)
        places = [(agent, self._places[agent]) for agent in alive if agent in self._places]
        return {agent: self._nest([part[place] for part in parts]) for agent, place in places}

    def flags(self, agents: Iterable[str]) -> NDArray:
        """Which agents are among these, bool ``[A]``."""
        flags = np.zeros(len(self.agents), np.bool_)
        flags[[self._places[agent] for agent in agents if agent in self._places]] = True
        return flags

    def numbers(self, values: Mapping[str, float]) -> NDArray:
        """A number of each agent, float32 ``[A]``; 0 for others."""
        return np.array([values.get(agent, 0.0) for agent in self.agents], np.float32)

    def stacked(self, key: str, infos: Mapping[str, Any]) -> NDArray | None:
        """What infos of its agents hold under a key ``[A, ...]``, ``None`` if none of them has it.

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


def in_parallel(env: Any) -> tuple[Any, bool]:
    """An environment with the parallel interface, and whether its agents act one at a time."""
    if not is_of_agents(env):
        raise SpecError(
            f"{env!r:.60} is no environment of PettingZoo",
            fix="pass a ParallelEnv or AECEnv; GymEnv takes environments of Gymnasium",
        )
    if not hasattr(env, "possible_agents"):
        raise SpecError(
            f"{env!r:.60} does not say which agents there can be, so their arrays have no size",
            fix="give it the attribute possible_agents",
        )
    if not hasattr(env, "agent_iter"):
        return env, False
    conversions = import_extra("pettingzoo.utils.conversions", "pettingzoo")
    if getattr(env, "metadata", {}).get("is_parallelizable", False):
        return conversions.aec_to_parallel(env), False
    return conversions.turn_based_aec_to_parallel(env), True


def grouped(env: Any, groups: Groups) -> dict[str, list[str]]:
    """Names of groups and their agents; a single group is called ``""``."""
    agents = list(env.possible_agents)
    made: dict[str, list[str]] = {}
    if groups is None:
        spaces: dict[str, tuple[Any, Any]] = {}
        for agent in agents:
            both = env.observation_space(agent), env.action_space(agent)
            name = next((name for name, known in spaces.items() if known == both), "")
            if not name:
                stem = re.sub(r"[_-]?\d+$", "", str(agent)) or str(agent)
                name = str(agent) if stem in spaces else stem
                spaces[name] = both
            made.setdefault(name, []).append(agent)
    elif not isinstance(groups, Mapping) or not all(
        isinstance(each, list | tuple) for each in groups.values()
    ):
        what = f"groups should be a dict of names to lists of agents, got {groups!r:.80}"
        raise SpecError(what, fix=f"such as groups={{'team': {agents[:2]}, ...}}")
    else:
        made = {name: list(members) for name, members in groups.items()}
        members = [agent for part in made.values() for agent in part]
        if len(members) != len(agents) or any(agent not in members for agent in agents):
            raise SpecError(
                f"groups are {made}, agents are {agents}", fix="put each agent into one group"
            )
    if not agents or not all(made.values()):
        raise SpecError(f"groups are {made}, agents are {agents}", fix="leave out empty groups")
    if len(made) == 1:
        return {"": next(iter(made.values()))}
    for name, members in made.items():
        is_name = isinstance(name, str) and re.fullmatch("[^_/][^/]*", name)
        if not is_name or name in _ACTIONS:
            raise SpecError(
                f"{name!r} cannot be the name of a group, with which its keys begin",
                fix="give names without '/', a leading '_', and none that is 'action': "
                f"groups={{'team': {members}, ...}}",
            )
    return made


def _same_structure(env: Any, name: str, agents: Sequence[str]) -> tuple[Any, list[Any]]:
    """The common structure of the agents' spaces, and these."""
    spaces = [getattr(env, name)(agent) for agent in agents]
    structures = [
        structure_of_space(space, keep_float64=True, name=f"{name}({agent!r})")
        for space, agent in zip(spaces, agents, strict=True)
    ]
    for agent, structure, space in zip(agents, structures, spaces, strict=True):
        if structure != structures[0]:
            raise SpecError(
                f"{name} of {agent!r} is {space}, that of {agents[0]!r} is {spaces[0]}",
                fix="put them into different groups",
            )
    return structures[0], spaces


def _leaf_spaces(space: Any) -> Iterator[Any]:
    """The parts of a space that are no ``Dict`` or ``Tuple``, in order."""
    if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        parts: Any = space.spaces
        for part in parts.values() if isinstance(parts, Mapping) else parts:
            yield from _leaf_spaces(part)
    else:
        yield space


def state_space(env: Any) -> Any:
    """The space of ``env.state()``, as the environment declares it."""
    space = getattr(env, "state_space", None)
    if space is None:
        raise SpecError(f"{env!r:.60} has no state_space", fix="leave out state=True")
    return space
