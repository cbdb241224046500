"""What runs in the process of one of a pool's environments: the environment and its agent."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium.utils import seeding

from rlpool.agents.agent import Agent, AgentStep
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.columns import converted
from rlpool.envs.one_env import ACTION_KEY, OneEnv, seed_process
from rlpool.errors import SpecError, Where, WorkerStartupError
from rlpool.memory.storage import Array
from rlpool.record.failures import described, text_of
from rlpool.specs import flattener, leaves_of, structure_of_space, structure_of_value, with_dtypes

Policy = Callable[[Any], Any]
"""State to action, both as the environment hands them out and takes them."""


@dataclass
class Station:
    """Makes the environment and the agent of one process, out of what was pickled for it.

    Attributes:
        process: Number of the process and of its environment.
        env: The environment, pickled.
        policy: The policy or ``None``, pickled.
        first_seed: Seed of the first episode.
        dtypes: Key to dtype, where it is not the environment's own.
    """

    process: int
    env: bytes
    policy: bytes
    first_seed: int
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    _made: OneEnv = field(init=False, repr=False)

    def create_env(self, seed: int) -> OneEnv:
        """The environment; ``seed`` is not needed, as every episode has its own."""
        _derive_entropy_from_process()
        seed_process(self.first_seed)
        env = self._loaded(self.env, f"environment {self.process}")
        self._made = OneEnv(env, self.first_seed, dtypes=self.dtypes, owns_process=True)
        return self._made

    def create_agent(self) -> ActionChooser:
        """The agent of that environment."""
        return ActionChooser(self._made, self._loaded(self.policy, "policy"), self.dtypes)

    def _loaded(self, pickled: bytes, what: str) -> Any:
        try:
            return pickle.loads(pickled)
        except Exception as error:
            raise WorkerStartupError(
                f"{what} cannot be loaded in its process: {described(error)}",
                where=Where(worker=self.process),
                fix="what its pickle needs has to be importable there, too",
                traceback_text=text_of(error),
            ) from error


class ActionChooser(Agent):
    """Actions for one environment: of the policy, random ones, or those that it takes itself.

    Args:
        env: The environment, which the agent asks what its actions look like.
        policy: Called with one state for one action; ``None`` samples the action space.
        dtypes: Key to dtype, where actions shall be stored in another one than their own.
    """

    def __init__(
        self, env: OneEnv, policy: Policy | None, dtypes: Mapping[str, np.dtype[Any]] | None = None
    ) -> None:
        self._env = env
        self._policy = policy
        self._dtypes = dict(dtypes or {})
        self._read: Callable[[Any], dict[str, Array]] | None = None
        self._kept: dict[str, Array] | None = None  # the first action of all

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> AgentStep:
        """Choose the action of the only row."""
        if self._env.chooses_actions:
            # Whatever is said here, the environment does what it wants.
            leaves = self._env.action_leaves or {}
            actions = {key: observation[f"last_{key}"] for key in leaves}
        else:
            actions = {key: torch.from_numpy(a) for key, a in self._chosen(observation).items()}
        return DictTensor(), DictTensor(actions), DictTensor()

    def update(self, info: bytes) -> None:
        """Take over another policy.

        Args:
            info: The policy or ``None``, pickled.
        """
        self._policy = pickle.loads(info)
        self._kept = None

    def _chosen(self, observation: DictTensor) -> dict[str, Array]:
        """The action by key; asked for once, although the loop wants to see the first one early."""
        if not self._env.is_fresh:
            self._kept = None
            return self._asked(observation)
        if self._kept is None:
            self._kept = self._asked(observation)
        return self._kept

    def _asked(self, observation: DictTensor) -> dict[str, Array]:
        space = self._env.action_space
        if self._policy is not None:
            action = self._policy(self._env.state_of(dict(observation.items())))
        elif space is not None:
            action = space.sample()
        else:
            raise SpecError(
                "the environment has no action_space to sample from",
                fix="give it one, or pass policy=..., a function from state to action",
            )
        if self._read is None:
            self._read = self._reader(space, action)
        return self._read(action)

    def _reader(self, space: Any, action: Any) -> Callable[[Any], dict[str, Array]]:
        """Compile the way from an action to arrays ``[1, ...]`` by key."""
        if space is None:
            structure = structure_of_value(action, keep_float64=True, name=ACTION_KEY)
        else:
            structure = structure_of_space(space, keep_float64=True, name="action_space")
        flatten = flattener(structure, ACTION_KEY)
        own = leaves_of({ACTION_KEY: structure}, "")
        stored = leaves_of({ACTION_KEY: with_dtypes(structure, self._dtypes, ACTION_KEY)}, "")

        def read(action: Any) -> dict[str, Array]:
            arrays = {}
            for part, (key, leaf) in zip(flatten(action), own.items(), strict=True):
                if isinstance(part, torch.Tensor):
                    part = part.detach().cpu().numpy()
                try:
                    array = converted(part, leaf.spec, key)
                except (
                    TypeError,
                    ValueError,
                ) as error:  # not a number, or no such one
                    raise SpecError(
                        f"{key!r} should fit {space or leaf.spec}, got {part!r}",
                        fix="return actions of the action space's shape and kind",
                    ) from error
                arrays[key] = np.array(array, stored[key].spec.dtype)[None]
            return arrays

        return read


def _derive_entropy_from_process() -> None:
    """Let Gymnasium's generators that nobody seeds be seeded by ``random``, which is.

    Environments that choose their own actions often wrap one of Gymnasium's, and reset it and
    sample its actions without a seed.
    """
    original = seeding.np_random

    def np_random(seed: int | None = None) -> tuple[np.random.Generator, int]:
        return original(random.getrandbits(31) if seed is None else seed)

    seeding.np_random = np_random
