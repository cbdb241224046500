"""Stable-Baselines3: its buffers are filled, a pool is one of them, its policies are agents."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from rlpool.agents.agent import Agent, AgentStep
from rlpool.agents.sampling import sample_categorical, sample_normal
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.dict_tensor_base import instance
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, compose
from rlpool.machine.arguments import whole_number
from rlpool.memory.storage import Array
from rlpool.pool.pool import Pool
from rlpool.specs import DEFAULT_OBSERVATION_KEY

try:
    from gymnasium import spaces
    from stable_baselines3 import HerReplayBuffer
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer, RolloutBuffer
    from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
    from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
    from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.common.preprocessing import maybe_transpose
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.dqn.policies import DQNPolicy
    from stable_baselines3.td3.policies import TD3Policy
except ModuleNotFoundError as error:
    what = f"Stable-Baselines3 is not installed: {error}"
    raise ImportError(compose(what, fix="pip install 'rlpool[sb3]'")) from error

__all__ = ["PoolReplayBuffer", "Sb3Agent", "from_sb3", "to_sb3"]

_Observation = Array | dict[str, Array]

_MOST_SEED = 2**31 - 1

_SAME = "let create_env make environments, and wrap them, like those that the model learns from"


# Policies ----------------------------------------------------------------------------------------


def from_sb3(
    model: Any, *, deterministic: bool = False, device: torch.device | str = "cpu"
) -> Sb3Agent:
    """An agent that acts as the policy of a model of Stable-Baselines3 does.

    For ``EpisodeBatcher``, ``Batcher`` and ``evaluate``. The parameters are copied: what the model
    learns later reaches the agents of a batcher with ``batcher.update(model.policy.state_dict())``.
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
        print(evaluate(agent, create_env, 100, n_threads=4).returns.mean())
    """
    if not isinstance(model, BaseAlgorithm):
        got = model.__name__ if isinstance(model, type) else type(model).__name__
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
        type(policy),
        policy._get_constructor_parameters(),
        {key: tensor.detach().cpu().clone() for key, tensor in policy.state_dict().items()},
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
        seen: Any = _observed(self.policy.observation_space, observation, "the observation")
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

    def update(self, info: Any) -> None:
        """Take over parameters: ``model.policy.state_dict()``."""
        self.policy.load_state_dict(info)

    def __reduce__(self) -> tuple[type[Sb3Agent], tuple[Any, ...]]:
        # Not the policy itself: its last distribution has tensors that cannot be copied.
        parameters = {key: tensor.cpu() for key, tensor in self.policy.state_dict().items()}
        return type(self), (
            type(self.policy),
            self.policy._get_constructor_parameters(),
            parameters,
            self._normalizer,
            self._exploration_rate,
            self._deterministic,
            self._device,
        )

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
        return torch.from_numpy(taken.astype(np.float32, copy=False))


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


# Buffers -----------------------------------------------------------------------------------------


def to_sb3(trajectories: TemporalDictTensor, target: Any, policy: Any = None) -> None:
    """Put trajectories into a buffer of Stable-Baselines3.

    A ``ReplayBuffer`` gets them in addition to what it holds, its actions scaled to [-1, 1] where
    they are a ``Box``, as its algorithms want them. A truncation that is no termination is a
    timeout. A ``RolloutBuffer`` is emptied first and has to be full afterwards; its returns and
    advantages are computed. Rewards of truncated steps get the discounted value of the observation
    after them, as in its ``collect_rollouts``.

    A buffer of ``n_envs`` lanes takes full windows of that many rows; one with ``n_envs=1`` takes
    any trajectories, row after row.

    Args:
        trajectories: What a batcher returned. For a ``RolloutBuffer`` with the outputs ``value``
            and ``log_probability``, and ``policy_action`` where actions were clipped, as an agent
            of ``from_sb3`` has them; without the first two they are computed.
        target: A model, for its own buffer and policy, or a buffer.
        policy: For a ``RolloutBuffer``: the policy that gives values and log-probabilities that
            the trajectories lack, such as the values of observations after truncations.

    Raises:
        SpecError: If sizes, keys or shapes do not fit the buffer, a policy is needed, the model
            learns on-policy from a ``VecNormalize``, or the target is something else.

    Reference:
        Pardo et al., "Time Limits in Reinforcement Learning", ICML 2018, for truncation.
    """
    trajectories = instance(trajectories, TemporalDictTensor, "what to_sb3() gets")
    buffer = target
    if isinstance(target, OffPolicyAlgorithm):
        buffer = target.replay_buffer
    elif isinstance(target, OnPolicyAlgorithm):
        if target.get_vec_normalize_env() is not None:
            raise SpecError(
                "the model's environment is a VecNormalize, whose statistics follow from its own "
                "steps, and its rollouts hold what is normalised",
                fix="let create_env normalise, with gymnasium.wrappers.NormalizeObservation",
            )
        buffer, policy = target.rollout_buffer, target.policy if policy is None else policy
    if isinstance(buffer, RolloutBuffer):
        _fill_rollouts(trajectories, buffer, policy)
    elif isinstance(buffer, ReplayBuffer) and not isinstance(buffer, HerReplayBuffer):
        _add_transitions(trajectories, buffer)
    else:
        raise SpecError(
            f"to_sb3() cannot fill a {type(buffer).__name__}",
            fix="pass a model, or its replay_buffer or rollout_buffer; HerReplayBuffer needs the "
            "steps of its own environments",
        )


class _Steps:
    """Steps of trajectories in the order of a buffer: ``[n_steps, n_envs, ...]``.

    Args:
        trajectories: The trajectories.
        buffer: The buffer.
        n_steps: How many steps it takes at once, ``None`` for any number.

    Attributes:
        begins: bool ``[n_steps, n_envs]``: where an episode, or a row, begins.
        is_row_end: Likewise: where a row ends, and the next step is not the one that follows.
    """

    def __init__(
        self, trajectories: TemporalDictTensor, buffer: Any, n_steps: int | None = None
    ) -> None:
        self._trajectories = trajectories
        self._buffer = buffer
        self._has_lanes = trajectories.n_elems() == buffer.n_envs and trajectories.full()
        lengths = trajectories.lengths
        found = trajectories.n_timesteps() if self._has_lanes else int(lengths.sum())
        if (not self._has_lanes and buffer.n_envs > 1) or n_steps not in (None, found):
            size = "" if n_steps is None else f"buffer_size={n_steps} and "
            raise SpecError(
                f"trajectories of {_told(lengths)} steps do not fit a buffer with {size}"
                f"n_envs={buffer.n_envs}",
                fix="give it windows of as many lanes and steps, or make a buffer with n_envs=1"
                + ("" if n_steps is None else f" and buffer_size={int(lengths.sum())}"),
            )
        self.begins = self["initial_state"].astype(bool)
        self.is_row_end = np.zeros_like(self.begins)
        if not self._has_lanes:
            ends = lengths.cpu().numpy().cumsum()[lengths.cpu().numpy() > 0] - 1
            self.is_row_end[ends] = True
            self.begins[0] = True
            self.begins[1:] |= self.is_row_end[:-1]

    def __contains__(self, key: str) -> bool:
        return key in self._trajectories

    def __getitem__(self, key: str) -> Array:
        if key not in self._trajectories:
            raise SpecError(
                f"the trajectories have no {key!r}, they have {list(self._trajectories)}",
                fix="collect with environments and an agent that give it",
            )
        if self._has_lanes:
            steps = self._trajectories[key].transpose(0, 1)
        else:
            steps = self._trajectories.get([key]).flatten()[key][:, None]
        array: Array = steps.numpy(force=True)
        return array

    def observations(self, prefix: str = "") -> _Observation:
        """Observations before the steps, or after them with the prefix ``_``."""
        space = self._buffer.observation_space
        return _observed(space, self, "the trajectories", prefix)


def _add_transitions(trajectories: TemporalDictTensor, buffer: Any) -> None:
    """Add every step to a replay buffer."""
    if not trajectories.n_elems() or not trajectories.lengths.any():
        return
    steps = _Steps(trajectories, buffer)
    done, terminated = steps["_done"], steps["_terminated"]
    is_ordered = isinstance(buffer, NStepReplayBuffer) or buffer.optimize_memory_usage
    if is_ordered and (steps.is_row_end & ~done).any():
        raise SpecError(
            "rows end in the middle of episodes, and this buffer takes the next step for the one "
            "that follows",
            fix="give it complete episodes, or windows of n_envs lanes",
        )
    actions = steps["action"]
    if isinstance(buffer.action_space, spaces.Box):
        low, high = buffer.action_space.low, buffer.action_space.high
        actions = 2.0 * ((actions - low) / (high - low)) - 1.0
    rewards, is_timeout = steps["_reward"], steps["_truncated"] & ~terminated
    before, after = steps.observations(), steps.observations("_")
    for step in range(len(done)):
        infos = [{"TimeLimit.truncated": bool(flag)} for flag in is_timeout[step]]
        states = _at(before, step), _at(after, step)
        buffer.add(*states, actions[step], rewards[step], done[step], infos)


def _fill_rollouts(trajectories: TemporalDictTensor, buffer: Any, policy: Any) -> None:
    """Fill a rollout buffer, and compute its returns and advantages."""
    steps = _Steps(trajectories, buffer, buffer.buffer_size)
    observations, done = steps.observations(), steps["_done"].astype(bool)
    actions = steps["policy_action" if "policy_action" in steps else "action"]
    rewards = steps["_reward"].astype(np.float32)
    keys = ("value", "log_probability")
    if all(key in steps for key in keys):
        values, log_probabilities = (torch.tensor(steps[key]) for key in keys)
    else:
        space = buffer.action_space
        flat = torch.from_numpy(actions.reshape(-1, *space.shape).astype(np.float32))
        with torch.no_grad():
            told = _checked(policy).evaluate_actions(
                _seen(policy, observations), flat.to(policy.device)
            )
        values, log_probabilities = (each.reshape(done.shape).cpu() for each in told[:2])
    # Where the value of the next observation counts, and the buffer does not know it.
    is_cut = steps["_truncated"] & ~steps["_terminated"] | (steps.is_row_end & ~done)
    ends = done | steps.is_row_end
    if is_cut.any() or not ends[-1].all():
        after = steps.observations("_")
        rewards[is_cut] += buffer.gamma * _values(policy, after, is_cut)
        is_newest = np.zeros_like(done)
        is_newest[-1] = True
        last = torch.from_numpy(_values(policy, after, is_newest))
    else:
        last = torch.zeros(buffer.n_envs)
    buffer.reset()
    for step in range(len(done)):
        row = _at(observations, step), actions[step], rewards[step], steps.begins[step]
        buffer.add(*row, values[step], log_probabilities[step])
    buffer.compute_returns_and_advantage(last_values=last, dones=ends[-1])


def _checked(policy: Any) -> Any:
    if not isinstance(policy, ActorCriticPolicy):
        got = "missing" if policy is None else f"a {type(policy).__name__}"
        raise SpecError(
            f"values or log-probabilities have to be computed, and the policy is {got}",
            fix="pass the policy of the model that learns: to_sb3(trajectories, buffer, "
            "model.policy)",
        )
    return policy


def _values(policy: Any, observations: _Observation, where: Array) -> Array:
    """The policy's values where a mask ``[n_steps, n_envs]`` is true, float32 ``[n]``."""
    some = _at(observations, where)
    with torch.no_grad():
        values = _checked(policy).predict_values(policy.obs_to_tensor(some)[0])
    flat: Array = values.cpu().numpy().flatten()
    return flat


def _seen(policy: Any, observations: _Observation) -> Any:
    """Observations ``[n_steps, n_envs, ...]`` as the policy takes them: ``[n, ...]``."""
    whole: Any = observations
    if isinstance(observations, dict):
        flat: Any = {key: each.reshape(-1, *each.shape[2:]) for key, each in observations.items()}
    else:
        flat = whole.reshape(-1, *whole.shape[2:])
    return policy.obs_to_tensor(flat)[0]


def _observed(space: Any, values: Any, what: str, prefix: str = "") -> _Observation:
    """The observation among named values, as arrays with the axes of a space.

    Args:
        space: The observation space of a policy or a buffer: images have their channels first.
        values: Key to tensor or array, with leading dimensions.
        what: What errors call the values.
        prefix: Of the keys.
    """
    is_dict = isinstance(space, spaces.Dict)
    parts = space.spaces if is_dict else {DEFAULT_OBSERVATION_KEY: space}
    arrays = {}
    for key, part in parts.items():
        name = prefix + key
        if name not in values:
            raise SpecError(
                f"{what} should have the keys {list(parts)}, {name!r} is missing", fix=_SAME
            )
        array: Array = np.asarray(values[name])
        lead = array.shape[: array.ndim - len(part.shape)]
        flat = maybe_transpose(array.reshape(-1, *array.shape[len(lead) :]), part)
        if flat.shape[1:] != part.shape:
            got = f"{list(flat.shape[1:])}, the model has {list(part.shape)}"
            raise SpecError(f"{name!r} of {what} has the shape {got}", fix=_SAME)
        arrays[key] = flat.reshape(*lead, *part.shape)
    return arrays if is_dict else arrays[DEFAULT_OBSERVATION_KEY]


def _at(observations: _Observation, where: Any) -> Any:
    if isinstance(observations, dict):
        return {key: each[where] for key, each in observations.items()}
    return observations[where]


def _told(lengths: Tensor) -> str:
    """Numbers of steps, in words."""
    return f"{lengths.tolist()}" if len(lengths) <= 4 else f"{lengths[:3].tolist()} and more"


# A pool in place of a buffer ---------------------------------------------------------------------


class PoolReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    """A ``Pool`` as the replay buffer of an off-policy algorithm of Stable-Baselines3.

    It takes dict observations as well, stores the observation after a step only once (half the
    memory), may be larger than memory, and finds stacked frames. Each environment has a sub-pool.
    A model's ``save_replay_buffer`` and ``load_replay_buffer`` keep it, so that the next samples
    are those that would have been. An algorithm that is seeded gets the same samples again.

    Args:
        buffer_size: Transitions of all environments together.
        observation_space: Of a single environment, as the algorithm gives it; nested dicts are
            not supported by Stable-Baselines3.
        action_space: Likewise.
        device: Where samples go.
        n_envs: Environments.
        optimize_memory_usage: Not to be used: the pool does so anyway.
        handle_timeout_termination: Whether a truncation is not a termination.
        n_steps: Steps of n-step returns.
        gamma: Their discount per step; give it the algorithm's.
        seed: Root seed of the samples; drawn from NumPy's generator by default, which the algorithm
            seeds.
        storage: ``"local"``, ``"shared"`` or ``"memmap"``, see ``Pool``.
        directory: Directory of the file of ``"memmap"``.
        frame_stack: See ``Pool``; channels are first here.

    Attributes:
        pool: The ``Pool``. It holds actions as the algorithm stores them: scaled to [-1, 1].

    Raises:
        SpecError: With ``optimize_memory_usage``, and for what ``Pool`` refuses.

    Example::

        model = SAC(
            "MlpPolicy",
            "Pendulum-v1",
            replay_buffer_class=PoolReplayBuffer,
            replay_buffer_kwargs={"storage": "memmap"},
        )
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        seed: int | None = None,
        storage: str = "local",
        directory: str | Path | None = None,
        frame_stack: Any = None,
    ) -> None:
        if optimize_memory_usage:
            fix = "leave optimize_memory_usage out: a pool stores every observation once"
            raise SpecError("a PoolReplayBuffer has no optimize_memory_usage", fix=fix)
        # Past the constructor of ReplayBuffer, which makes arrays for everything.
        super(ReplayBuffer, self).__init__(
            buffer_size, observation_space, action_space, device, n_envs=n_envs
        )
        self.pos, self.full = 0, False  # what size() tells, in steps of all environments
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps = whole_number("n_steps", n_steps, 1)
        self.gamma = gamma
        self._is_dict = isinstance(observation_space, spaces.Dict)
        self._pool_arguments = {
            "pool_size": self.buffer_size * n_envs,
            "processes": n_envs,
            "random": False,
            "seed": int(np.random.randint(_MOST_SEED)) if seed is None else seed,  # noqa: NPY002
            "storage": storage,
            "directory": directory,
            "frame_stack": frame_stack,
        }
        self.pool = Pool(**self._pool_arguments)

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]],
    ) -> None:
        """Add a transition of each environment; see ``ReplayBuffer.add``."""
        before, after = self._rows(obs), self._rows(next_obs)
        dtype = self._maybe_cast_dtype(self.action_space.dtype)
        actions = np.asarray(action, dtype).reshape(self.n_envs, self.action_dim)
        for env, info in enumerate(infos):
            is_timeout = self.handle_timeout_termination and info.get("TimeLimit.truncated", False)
            ended = bool(done[env])
            states = actions[env], _at(after, env), float(reward[env]), ended, env
            self.pool(_at(before, env), *states, terminated=ended and not is_timeout)
        self.pos = (self.pos + 1) % self.buffer_size
        self.full = self.full or self.pos == 0

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw transitions with replacement; see ``ReplayBuffer.sample``.

        Args:
            batch_size: How many.
            env: A ``VecNormalize`` that normalises observations and rewards.

        Raises:
            NotEnoughDataError: If there is no transition.
            SpecError: If rewards of several steps are to be normalised.
        """
        if self.n_steps > 1 and env is not None and env.norm_reward:
            fix = "use VecNormalize(..., norm_reward=False), or n_steps=1"
            raise SpecError("sums of several rewards cannot be normalised one by one", fix=fix)
        n_step = self.n_steps if self.n_steps > 1 else None
        # Algorithms ask for more than there is when they begin; drawing twice is no different.
        n_held = max(len(self.pool), 1)
        sizes = [min(n_held, batch_size - start) for start in range(0, batch_size, n_held)]
        batch = DictTensor.cat(
            [self.pool.sample(n, n_step=n_step, discount=self.gamma) for n in sizes]
        )
        discounts = None
        rewards, ended = batch["_reward"], batch["_terminated"]
        if n_step is not None:
            rewards, discounts = batch["n_step_return"], batch["n_step_discount"]
            ended, discounts = discounts == 0, self.to_torch(discounts[:, None].numpy(), copy=False)
        normalised = self._normalize_reward(rewards[:, None].numpy(), env)
        observed = [self._seen(batch, prefix, env) for prefix in ("", "_")]
        kind = DictReplayBufferSamples if self._is_dict else ReplayBufferSamples
        return kind(
            observations=observed[0],
            actions=self.to_torch(batch["action"].numpy(), copy=False),
            next_observations=observed[1],
            dones=self.to_torch(ended[:, None].float().numpy(), copy=False),
            rewards=self.to_torch(normalised, copy=False),
            discounts=discounts,
        )

    def reset(self) -> None:
        """Drop all transitions."""
        super().reset()
        self.pool.clear()

    def _rows(self, observations: Any) -> Any:
        """Observations with one row per environment; those of a ``Discrete`` have no dimension."""
        if self._is_dict:
            shapes = self.obs_shape.items()
            return {k: np.asarray(observations[k]).reshape(self.n_envs, *s) for k, s in shapes}
        return np.asarray(observations).reshape(self.n_envs, *self.obs_shape)

    def _seen(self, batch: DictTensor, prefix: str, env: Any) -> Any:
        """The observations of a sample, normalised, on the device."""
        if not self._is_dict:
            array = batch[prefix + DEFAULT_OBSERVATION_KEY].numpy()
            return self.to_torch(self._normalize_obs(array, env), copy=False)
        arrays = {key: batch[prefix + key].numpy() for key in self.obs_shape}
        normalised = self._normalize_obs(arrays, env)
        return {key: self.to_torch(array, copy=False) for key, array in normalised.items()}

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in vars(self).items() if key != "pool"}
        return {**state, "_pool_state": self.pool.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_pool_state")
        self.__dict__.update(state)
        self.pool = Pool(**self._pool_arguments)
        self.pool.load_state_dict(saved)
