"""What runs in the workers of ``Pool.store()``: an environment, and an agent that asks the policy.

The errors of loading them are worded here, for a user who has written no ``create_env``.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.utils import seeding

from rlpool.agents.agent import Agent, AgentStep
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import structure_of_space, structure_of_value
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.columns import Columns
from rlpool.envs.info_keys import InfoKeys
from rlpool.envs.one_env import ACTION_KEY, OneEnv
from rlpool.errors import SpecError, Where
from rlpool.seeding import root_from, worker_seed
from rlpool.workers.sharing import Parcel
from rlpool.workers.worker_process import called

Policy = Callable[[Any], Any]
"""State to action, both as the environment hands them out and takes them."""


@dataclass
class WorkerFactory:
    """Makes the environment and the agent of a worker from pickles that all workers get.

    Attributes:
        envs: The environments, pickled, by their numbers in the pool.
        policy: The policy or ``None``, pickled.
        seeds: Seeds of the first episodes of all environments of the pool.
        root: The root seed, from which follows the seed that each worker gets.
        info_keys: Keys of the environments' ``info`` to keep.
    """

    envs: Mapping[int, Parcel]
    policy: Parcel
    seeds: Sequence[int]
    root: int
    info_keys: InfoKeys = None

    def create_env(self, seed: int) -> OneEnv:
        """The environment of the worker that is created with a seed."""
        _derive_entropy_from_process()
        root = root_from(self.root)
        worker_seeds = (worker_seed(root, worker) for worker in range(len(self.envs)))
        number = dict(zip(worker_seeds, self.envs, strict=True))[seed]
        self._where = Where(worker=number)

        def load() -> OneEnv:
            return OneEnv(
                self.envs[number].load(),
                self.seeds[number],
                owns_process=True,
                info_keys=self.info_keys,
            )

        env: OneEnv = called(self._where, f"loading environment {number}", load)
        self._env = env
        return env

    def create_agent(self) -> ActionChooser:
        """The agent of that environment."""
        return ActionChooser(self._env, called(self._where, "loading policy", self.policy.load))


class ActionChooser(Agent):
    """Actions for one environment: of the policy, random ones, or those that it takes itself.

    Args:
        env: The environment, which the agent asks what its actions look like.
        policy: Called with one state for one action; ``None`` samples the action space.
    """

    def __init__(self, env: OneEnv, policy: Policy | None) -> None:
        self._env = env
        self._policy = policy
        self._policy_sent: bytes | None = None
        self._columns: Columns | None = None
        self._first: dict[str, torch.Tensor] | None = None

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> AgentStep:
        """Choose the action of the only row."""
        if self._env.chooses_actions:
            # The environment follows its own actions, whatever it is given.
            leaves = self._env.action_leaves or {}
            actions = {key: observation[f"last_{key}"] for key in leaves}
        elif self._env.is_fresh and self._first is not None:
            actions = self._first  # the loop asks twice: before the episode, too
        else:
            actions = self._chosen(observation)
            self._first = actions if self._env.is_fresh else None
        return DictTensor(), DictTensor(actions), DictTensor()

    def update(self, info: bytes) -> None:
        """Take over another policy, which the next call loads: its errors say "policy", too.

        Args:
            info: The policy or ``None``, pickled.
        """
        self._policy_sent = info
        self._first = None

    def _chosen(self, observation: DictTensor) -> dict[str, torch.Tensor]:
        if self._policy_sent is not None:
            self._policy, self._policy_sent = pickle.loads(self._policy_sent), None
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
        if self._columns is None:
            if space is None:
                structure = structure_of_value(action, keep_float64=True, name=ACTION_KEY)
            else:
                structure = structure_of_space(space, keep_float64=True, name="action_space")
            self._columns = Columns({ACTION_KEY: structure}, "", 1, widens=True)
        try:
            self._columns.write((0,), ({ACTION_KEY: action},))
        except ValueError as error:
            raise SpecError(
                f"'action' should fit {space}, got {action!r} ({error})",
                fix="return actions of the action space's shape and kind",
            ) from error
        return {key: torch.from_numpy(array.copy()) for key, array in self._columns.arrays.items()}


def _derive_entropy_from_process() -> None:
    """Let Gymnasium's generators that nobody seeds be seeded by ``random``, which is.

    Environments that choose their own actions often wrap one of Gymnasium's, and reset it and
    sample its actions without a seed.
    """
    original = seeding.np_random

    def np_random(seed: int | None = None) -> tuple[np.random.Generator, int]:
        return original(random.getrandbits(31) if seed is None else seed)

    seeding.np_random = np_random
