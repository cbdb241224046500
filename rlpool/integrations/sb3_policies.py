"""Policies of Stable-Baselines3 as agents, and observations as these take them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import maybe_transpose
from stable_baselines3.dqn.policies import DQNPolicy
from stable_baselines3.td3.policies import TD3Policy
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from rlpool.agents.agent import Agent, AgentStep
from rlpool.agents.sampling import sample_categorical, sample_normal
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.rows import kind
from rlpool.data.specs import DEFAULT_OBSERVATION_KEY, refuse_missing
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError

Observation = NDArray | dict[str, NDArray]

_SAME = "let create_env make environments, and wrap them, like those that the model learns from"


def from_sb3(
    model: Any, *, deterministic: bool = False, device: torch.device | str = "cpu"
) -> Sb3Agent:
    """An agent that acts as the policy of a model of Stable-Baselines3 does.

    For ``evaluate``, and with ``Sb3Agent.copy`` for ``EpisodeBatcher`` and ``Batcher``. The
    parameters are copied: what the model learns later reaches the agents of a batcher with
    ``batcher.update(model.policy.state_dict())``.
    Where the model's environment is a ``VecNormalize``, the agent normalises observations with a
    copy of its statistics.

    Args:
        model: PPO, A2C, SAC, TD3, DDPG, DQN, or another algorithm with one of their policies. Load
            one that learned with ``VecNormalize`` together with it:
            ``PPO.load(path, env=VecNormalize.load(statistics, env))``.
        deterministic: Whether actions are the policy's best ones instead of samples, as for
            ``model.predict``.
        device: Where the policy runs.

    Raises:
        SpecError: If it is no model, or its policy is of another kind: recurrent, for instance.

    Example::

        agent = from_sb3(PPO.load("ppo.zip"), deterministic=True)
        print(evaluate(agent, create_env, 100, n_workers=4).returns.mean())
    """
    if not isinstance(model, BaseAlgorithm):
        got = f"the class {model.__name__}" if isinstance(model, type) else kind(model)
        raise SpecError(f"model is {got}", fix="pass a model, such as PPO.load(path)")
    policy = model.policy
    if _kind_of(policy) is None:
        raise SpecError(
            f"the policy of the model is a {type(policy).__name__}, which needs more than an "
            "observation, or draws actions in a way of its own",
            fix="use the policies of PPO, A2C, SAC, TD3, DDPG or DQN",
        )
    normalizer = model.get_vec_normalize_env()
    return Sb3Agent(
        *_parts_of_policy(policy),
        None if normalizer is None else cloudpickle.dumps(normalizer),
        float(getattr(model, "exploration_rate", 0.0)),
        deterministic,
        device,
    )


class Sb3Agent(Agent):
    """A policy of Stable-Baselines3 as an agent: what ``from_sb3`` returns.

    All randomness comes from the episode's noise, not from torch's generator, so that episodes are
    the same for any number of workers. The distributions are those of the policy; gSDE draws its
    noise anew in every step, as with ``sde_sample_freq=1``. TD3 and DDPG add no noise, DQN explores
    at the model's ``exploration_rate``, each row for itself.

    Outputs, besides ``action`` as the environment takes it, unless ``deterministic``: for PPO, A2C
    and others with an ``ActorCriticPolicy`` ``value`` and ``log_probability``, float32 ``[B]``, and
    with a ``Box`` of actions ``policy_action``, what was drawn before it was clipped or scaled.

    ``agent_info`` may have the key ``deterministic``, bool ``[B]``: in which episodes the best
    actions are taken.
    """

    def __init__(
        self,
        policy_class: type[Any],
        arguments: Mapping[str, Any],
        parameters: Mapping[str, Tensor],
        normalizer: bytes | None,
        exploration_rate: float,
        deterministic: bool,
        device: torch.device | str,
    ) -> None:
        with torch.random.fork_rng(devices=[]):  # layers draw their first weights
            self.policy = policy_class(**arguments)
        self.policy.load_state_dict(parameters)
        self.policy.to(device)
        self.policy.set_training_mode(False)
        # Unpickled, a VecNormalize has no environments, and still normalises.
        self._normalizer = normalizer
        self._vec_normalize: Any = None if normalizer is None else pickle.loads(normalizer)
        self._exploration_rate = exploration_rate
        self._deterministic = bool(deterministic)
        self._device = device
        self._kind = _kind_of(self.policy)
        self._space = self.policy.action_space
        self.n_noise = 0 if deterministic else self._n_draws()

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> AgentStep:
        """Choose actions as ``model.predict`` does."""
        space = self.policy.observation_space
        seen: Any = whole(space, observed(space, observation, "the observation"))
        if self._vec_normalize is not None:
            seen = self._vec_normalize.normalize_obs(seen)
        seen, _ = self.policy.obs_to_tensor(seen)
        if self._deterministic or not self.n_noise:
            drawn = self.policy._predict(seen, deterministic=True)
            outputs: dict[str, Tensor] = {}
        else:
            is_best = None
            if agent_info is not None and "deterministic" in agent_info:
                is_best = agent_info["deterministic"]
            drawn, outputs = self._drawn(seen, observation["noise"].to(self._device), is_best)
        outputs["action"] = self._as_taken(drawn)
        tensors = {key: tensor.cpu() for key, tensor in outputs.items()}
        return DictTensor(), DictTensor(tensors), DictTensor()

    def copy(self) -> Sb3Agent:
        """A copy, with parameters of its own.

        As the ``create_agent`` of a batcher, it sends workers the policy only. ``from_sb3`` with
        ``{"model": model}`` pickles the whole model: its environments and its buffers as well.

        Example::

            Batcher(128, None, from_sb3(model).copy, {}, create_env, {}, n_workers=4)
        """
        return copy.deepcopy(self)

    def update(self, info: Any) -> None:
        """Take over parameters: ``model.policy.state_dict()``."""
        self.policy.load_state_dict(info)

    def __reduce__(self) -> tuple[type[Sb3Agent], tuple[Any, ...]]:
        # Not the policy itself: its last distribution has tensors that cannot be copied.
        rest = self._normalizer, self._exploration_rate, self._deterministic, self._device
        return type(self), (*_parts_of_policy(self.policy), *rest)

    def _n_draws(self) -> int:
        """Random numbers per row."""
        if self._kind == "values":
            return 2  # whether to explore, and with which action
        if self._kind == "actor":
            return 0
        if isinstance(self._space, spaces.Discrete):
            return 1
        return int(np.prod(self._space.shape))

    def _drawn(
        self, seen: Any, noise: Tensor, is_best: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Actions of the policy, the best ones in some rows, and what else there is to tell."""
        if self._kind == "values":
            best = self.policy._predict(seen, deterministic=True)
            explores = noise[:, 0] < self._exploration_rate
            drawn = (noise[:, 1] * int(self._space.n)).long()
            return _chosen(is_best, best, torch.where(explores, drawn, best)), {}
        if self._kind == "squashed actor":
            actor = self.policy.actor
            mean, log_std, arguments = actor.get_action_dist_params(seen)
            distribution = actor.action_dist.proba_distribution(mean, log_std, **arguments)
            return _chosen(is_best, distribution.mode(), _sampled(distribution, noise)), {}
        distribution = self.policy.get_distribution(seen)
        drawn = _chosen(is_best, distribution.mode(), _sampled(distribution, noise))
        outputs = {
            "value": self.policy.predict_values(seen).flatten(),
            "log_probability": distribution.log_prob(drawn),
        }
        if isinstance(self._space, spaces.Box):
            outputs["policy_action"] = drawn.reshape(-1, *self._space.shape)
        return drawn, outputs

    def _as_taken(self, drawn: Tensor) -> Tensor:
        """Actions as the environment takes them: scaled or clipped to the bounds of a ``Box``."""
        space = self._space
        taken = drawn.detach().cpu().numpy().reshape(-1, *space.shape)
        if not isinstance(space, spaces.Box):
            return torch.from_numpy(taken.astype(space.dtype))
        if self.policy.squash_output:
            taken = self.policy.unscale_action(taken)
        else:
            taken = np.clip(taken, space.low, space.high)
        return torch.from_numpy(taken)


def _parts_of_policy(policy: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """Class, arguments and copied parameters, of which the same policy can be made."""
    parameters = {k: tensor.detach().cpu().clone() for k, tensor in policy.state_dict().items()}
    return type(policy), policy._get_constructor_parameters(), parameters


def _kind_of(policy: Any) -> str | None:
    """How a policy draws actions, ``None`` if that is not known."""
    if isinstance(policy, ActorCriticPolicy):
        return None if hasattr(policy, "lstm_actor") else "actor and critic"
    if isinstance(policy, DQNPolicy):
        return "values"
    if isinstance(policy, TD3Policy):
        return "actor"
    is_squashed = hasattr(getattr(policy, "actor", None), "get_action_dist_params")
    return "squashed actor" if is_squashed else None


def _chosen(is_best: Tensor | None, best: Tensor, drawn: Tensor) -> Tensor:
    """The best actions in some rows, what was drawn in the others."""
    if is_best is None:
        return drawn
    rows = is_best.to(drawn.device).bool().view(-1, *[1] * (drawn.ndim - 1))
    return torch.where(rows, best, drawn)


def _sampled(distribution: Any, noise: Tensor) -> Tensor:
    """Samples of a distribution of Stable-Baselines3, from uniform noise ``[B, n]``."""
    inner = distribution.distribution
    if isinstance(inner, list):  # one per component
        columns = [sample_categorical(d.logits, noise[:, i])[0] for i, d in enumerate(inner)]
        return torch.stack(columns, 1)
    if isinstance(inner, Categorical):
        return sample_categorical(inner.logits, noise[:, 0])[0]
    if isinstance(inner, Bernoulli):
        return (noise < inner.probs).to(inner.probs.dtype)
    drawn, _ = sample_normal(inner.mean, inner.stddev.log(), noise)
    is_squashed = isinstance(distribution, SquashedDiagGaussianDistribution)
    is_squashed = is_squashed or getattr(distribution, "bijector", None) is not None
    return torch.tanh(drawn) if is_squashed else drawn


# Observations ------------------------------------------------------------------------------------


def parts_of(space: Any) -> dict[str, Any]:
    """The spaces of the parts of an observation, by key."""
    return (
        dict(space.spaces) if isinstance(space, spaces.Dict) else {DEFAULT_OBSERVATION_KEY: space}
    )


def whole(space: Any, parts: dict[str, NDArray]) -> Observation:
    """An observation of its parts: a dict only where the space is one."""
    return parts if isinstance(space, spaces.Dict) else parts[DEFAULT_OBSERVATION_KEY]


def mapped(observation: Observation, change: Callable[[NDArray], Any]) -> Any:
    """Change every part of an observation."""
    if isinstance(observation, dict):
        return {key: change(part) for key, part in observation.items()}
    return change(observation)


def observed(space: Any, values: Any, what: str, prefix: str = "") -> dict[str, NDArray]:
    """The parts of the observation among named values, as arrays with the axes of a space.

    Args:
        space: The observation space of a policy or a buffer: images have their channels first.
        values: Key to tensor or array, with leading dimensions.
        what: What errors call the values.
        prefix: Of the keys.
    """
    parts = parts_of(space)
    refuse_missing(what, values.keys(), [prefix + key for key in parts], _SAME)
    arrays = {}
    for key, part in parts.items():
        array: NDArray = np.asarray(values[prefix + key])
        lead = array.shape[: array.ndim - len(part.shape)]
        flat = maybe_transpose(array.reshape(-1, *array.shape[len(lead) :]), part)
        if flat.shape[1:] != part.shape:
            got = f"{list(flat.shape[1:])}, the model has {list(part.shape)}"
            raise SpecError(f"{prefix + key!r} of {what} has the shape {got}", fix=_SAME)
        arrays[key] = flat.reshape(*lead, *part.shape)
    return arrays
