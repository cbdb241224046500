"""Stable-Baselines3 policies as agents."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlpool.agents.agent import Agent, AgentStep
from rlpool.agents.sampling import sample_categorical, sample_normal
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.rows import kind
from rlpool.data.specs import DEFAULT_OBSERVATION_KEY, refuse_missing
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.machine.imports import imports_of

with imports_of("sb3"):
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.common.preprocessing import maybe_transpose
    from stable_baselines3.dqn.policies import DQNPolicy
    from stable_baselines3.sac.policies import SACPolicy
    from stable_baselines3.td3.policies import TD3Policy

__all__ = ["Sb3Agent", "from_sb3"]

_SAME = "create and wrap environments in create_env as for the training of the model"


def from_sb3(
    model: Any, *, deterministic: bool = False, device: torch.device | str = "cpu"
) -> Sb3Agent:
    """Make an agent from the policy of a Stable-Baselines3 model.

    For ``evaluate``, and with ``Sb3Agent.copy`` for ``EpisodeBatcher`` and ``Batcher``. The
    parameters are copied: send later ones to the agents of a batcher with
    ``batcher.update(model.policy.state_dict())``. If the model's environment is a
    ``VecNormalize``, the agent normalises observations with a copy of its statistics.

    Args:
        model: PPO, A2C, SAC, TD3, DDPG, DQN, or another algorithm with one of their policies. A
            model trained with ``VecNormalize`` has to be loaded with it:
            ``PPO.load(path, env=VecNormalize.load(statistics, env))``.
        deterministic: Take the policy's best actions instead of samples, as in ``model.predict``.
        device: Device of the policy.

    Raises:
        SpecError: If it is not a model, its policy needs more than an observation, or it samples
            actions with gSDE or from a ``MultiBinary`` space.

    Example::

        agent = from_sb3(PPO.load("ppo.zip"), deterministic=True)
        print(evaluate(agent, create_env, 100, n_workers=4).returns.mean())
    """
    if not isinstance(model, BaseAlgorithm):
        got = f"the class {model.__name__}" if isinstance(model, type) else kind(model)
        raise SpecError(f"model is {got}", fix="pass a model, such as PPO.load(path)")
    policy = model.policy
    known = ActorCriticPolicy | SACPolicy | TD3Policy | DQNPolicy
    if not isinstance(policy, known) or hasattr(policy, "lstm_actor"):
        raise SpecError(
            f"from_sb3() cannot run a {type(policy).__name__}",
            fix="use the policies of PPO, A2C, SAC, TD3, DDPG or DQN",
        )
    is_unusual = model.use_sde or isinstance(policy.action_space, spaces.MultiBinary)
    if is_unusual and not deterministic:
        raise SpecError(
            "from_sb3() cannot sample with gSDE or from a MultiBinary space",
            fix="pass deterministic=True, or train with use_sde=False",
        )
    return Sb3Agent(
        *_parts_of_policy(policy),
        cloudpickle.dumps(model.get_vec_normalize_env()),
        deterministic,
        device,
    )


class Sb3Agent(Agent):
    """A Stable-Baselines3 policy as an agent, returned by ``from_sb3``.

    Samples are drawn from the episode's noise, not from torch's generator, so episodes are the same
    for any number of workers. TD3, DDPG and DQN do not explore: they take the best action.

    Policies of PPO and A2C that are not ``deterministic`` have further outputs besides ``action``:
    ``value`` and ``log_probability``, float32 ``[B]``, and ``policy_action``, the action before
    clipping to the bounds of the environment.
    """

    def __init__(
        self,
        policy_class: type[Any],
        arguments: Mapping[str, Any],
        parameters: Mapping[str, Tensor],
        normalizer: bytes,
        deterministic: bool,
        device: torch.device | str,
    ) -> None:
        with torch.random.fork_rng(devices=[]):  # layers draw initial weights
            self.policy = policy_class(**arguments)
        self.policy.load_state_dict(parameters)
        self.policy.to(device)
        self.policy.set_training_mode(False)
        # An unpickled VecNormalize has no environments, but still normalises. It may be None.
        self._normalizer = normalizer
        self._vec_normalize: Any = pickle.loads(normalizer)
        self._deterministic, self._device = bool(deterministic), device
        self._is_best = deterministic or isinstance(self.policy, TD3Policy | DQNPolicy)
        self.n_noise = 0 if self._is_best else int(np.prod(self.policy.action_space.shape))

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> AgentStep:
        """Choose actions like ``model.predict``."""
        seen: Any = _observed(self.policy.observation_space, observation)
        if self._vec_normalize is not None:
            seen = self._vec_normalize.normalize_obs(seen)
        seen, _ = self.policy.obs_to_tensor(seen)
        outputs: dict[str, Tensor] = {}
        if self._is_best:
            drawn = self.policy._predict(seen, deterministic=True)
        else:
            drawn, outputs = self._drawn(seen, observation["noise"].to(self._device))
        outputs["action"] = self._as_taken(drawn)
        tensors = {key: tensor.cpu() for key, tensor in outputs.items()}
        return DictTensor(), DictTensor(tensors), DictTensor()

    def copy(self) -> Sb3Agent:
        """Copy the agent and its parameters.

        As the ``create_agent`` of a batcher, it sends only the policy to workers. ``from_sb3`` with
        ``{"model": model}`` would pickle the whole model, including environments and buffers.

        Example::

            Batcher(128, None, from_sb3(model).copy, {}, create_env, {}, n_workers=4)
        """
        return copy.deepcopy(self)

    def update(self, info: Any) -> None:
        """Load parameters: ``model.policy.state_dict()``."""
        self.policy.load_state_dict(info)

    def __reduce__(self) -> tuple[type[Sb3Agent], tuple[Any, ...]]:
        # Not the policy itself, whose last distribution has tensors that cannot be copied.
        rest = self._normalizer, self._deterministic, self._device
        return type(self), (*_parts_of_policy(self.policy), *rest)

    def _drawn(self, seen: Any, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Sample the policy's actions, and return its other outputs."""
        if isinstance(self.policy, SACPolicy):
            mean, log_std, _ = self.policy.actor.get_action_dist_params(seen)
            return torch.tanh(sample_normal(mean, log_std, noise)[0]), {}
        distribution = self.policy.get_distribution(seen)
        inner = distribution.distribution
        if isinstance(inner, list):  # one per component of a MultiDiscrete
            columns = [sample_categorical(d.logits, noise[:, i])[0] for i, d in enumerate(inner)]
            drawn = torch.stack(columns, 1)
        elif isinstance(inner, torch.distributions.Categorical):
            drawn, _ = sample_categorical(inner.logits, noise[:, 0])
        else:
            drawn, _ = sample_normal(inner.mean, inner.stddev.log(), noise)
        return drawn, {
            "value": self.policy.predict_values(seen).flatten(),
            "log_probability": distribution.log_prob(drawn),
            "policy_action": drawn.reshape(-1, *self.policy.action_space.shape),
        }

    def _as_taken(self, drawn: Tensor) -> Tensor:
        """Scale or clip actions to the bounds of the environment's ``Box``."""
        space = self.policy.action_space
        taken = drawn.detach().cpu().numpy().reshape(-1, *space.shape)
        if not isinstance(space, spaces.Box):
            return torch.from_numpy(taken.astype(space.dtype))
        if self.policy.squash_output:
            return torch.from_numpy(self.policy.unscale_action(taken))
        return torch.from_numpy(np.clip(taken, space.low, space.high))


def _parts_of_policy(policy: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return the class, arguments and copied parameters of a policy, to make the same one."""
    parameters = {k: tensor.detach().cpu().clone() for k, tensor in policy.state_dict().items()}
    return type(policy), policy._get_constructor_parameters(), parameters


def _observed(space: Any, observation: DictTensor) -> Any:
    """Convert an observation to NumPy arrays, with the channel order of the policy."""
    is_dict = isinstance(space, spaces.Dict)
    parts = space.spaces if is_dict else {DEFAULT_OBSERVATION_KEY: space}
    refuse_missing("the observation", observation.keys(), list(parts), _SAME)
    arrays = {}
    for key, part in parts.items():
        arrays[key] = maybe_transpose(np.asarray(observation[key]), part)
        if arrays[key].shape[1:] != part.shape:
            got = f"{list(arrays[key].shape[1:])}, but the model expects {list(part.shape)}"
            raise SpecError(f"{key!r} of the observation has shape {got}", fix=_SAME)
    return arrays if is_dict else arrays[DEFAULT_OBSERVATION_KEY]
