"""Filling the buffers of Stable-Baselines3 with trajectories."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer, RolloutBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor

from rlpool.data.rows import instance
from rlpool.data.specs import (
    TensorSpec,
    fitted,
    fitted_rewards,
    refuse_missing,
)
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.integrations.sb3_policies import Observation, mapped, observed, parts_of, whole
from rlpool.integrations.sb3_pool import PoolReplayBuffer


def to_sb3(trajectories: TemporalDictTensor, target: Any, policy: Any = None) -> None:
    """Put trajectories into a buffer of Stable-Baselines3.

    A ``ReplayBuffer`` gets them in addition to what it holds, its actions scaled to [-1, 1] where
    they are a ``Box``, as its algorithms want them. A truncation that is no termination is a
    timeout. A ``RolloutBuffer`` is emptied first and has to be full afterwards; its returns and
    advantages are computed. Rewards of truncated steps get the discounted value of the observation
    after them, as in its ``collect_rollouts``.

    A buffer of ``n_envs`` lanes takes full windows of that many rows; one with ``n_envs=1`` takes
    any trajectories, row after row.

    A ``PoolReplayBuffer`` takes every row as a piece of its own: no n-step return goes on from one
    row or window to the next. An ``NStepReplayBuffer``, which takes each step for the one that
    follows the last, wants complete episodes or every window of its lanes.

    Args:
        trajectories: What a batcher returned. For a ``RolloutBuffer`` with the outputs ``value``
            and ``log_probability``, and ``policy_action`` where actions were clipped, as an agent
            of ``from_sb3`` has them; without the first two they are computed. Without the third,
            actions are those of the environment, scaled back for a policy with ``squash_output``.
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
        self._trajectories, self.keys = trajectories, trajectories.keys
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

    def __getitem__(self, key: str) -> NDArray:
        fix = "collect with environments and an agent that give it"
        refuse_missing("the trajectories", self._trajectories.keys(), [key], fix)
        if self._has_lanes:
            steps = self._trajectories[key].transpose(0, 1)
        else:
            steps = self._trajectories.get([key]).flatten()[key][:, None]
        array: NDArray = steps.numpy(force=True)
        return array

    def actions(self, key: str) -> NDArray:
        """Actions, checked against the buffer's space."""
        actions, space = self[key], self._buffer.action_space
        found = TensorSpec(actions.shape[2:], actions.dtype)
        if not TensorSpec(space.shape, np.dtype(space.dtype)).takes(found):
            raise SpecError(
                f"{key!r} of the trajectories is {found}, the buffer has {space}",
                fix="collect in environments like those that the model learns from",
            )
        fitted(repr(key), actions, np.dtype(space.dtype))
        return actions

    def observations(self, prefix: str = "") -> Observation:
        """Observations before the steps, or after them with the prefix ``_``."""
        space = self._buffer.observation_space
        shown = observed(space, self, "the trajectories", prefix)
        for key, part in parts_of(space).items():
            shown[key] = fitted(repr(prefix + key), shown[key], np.dtype(part.dtype))
        return whole(space, shown)


def _add_transitions(trajectories: TemporalDictTensor, buffer: Any) -> None:
    """Add every step to a replay buffer."""
    if not trajectories.n_elems() or not trajectories.lengths.any():
        return
    steps = _Steps(trajectories, buffer)
    done, terminated = steps["_done"].astype(bool), steps["_terminated"].astype(bool)
    if isinstance(buffer, NStepReplayBuffer) or buffer.optimize_memory_usage:
        _check_order(steps, done, buffer)
    actions = steps.actions("action")
    if isinstance(buffer.action_space, spaces.Box):
        low, high = buffer.action_space.low, buffer.action_space.high
        actions = 2.0 * ((actions - low) / (high - low)) - 1.0
    rewards, is_timeout = steps["_reward"], steps["_truncated"] & ~terminated
    before, after = steps.observations(), steps.observations("_")
    if isinstance(buffer, PoolReplayBuffer):
        buffer.add_steps(before, after, actions, rewards, done, is_timeout, steps.begins)
        return
    for step in range(len(done)):
        infos = [{"TimeLimit.truncated": bool(flag)} for flag in is_timeout[step]]
        at_step = itemgetter(step)
        states = mapped(before, at_step), mapped(after, at_step)
        buffer.add(*states, actions[step], rewards[step], done[step], infos)


def _check_order(steps: _Steps, done: NDArray, buffer: Any) -> None:
    """Refuse steps that do not follow each other, nor the last ones of the buffer."""
    ends, is_open = steps.is_row_end & ~done, np.zeros(buffer.n_envs, bool)
    ends[:-1] |= steps.begins[1:] & ~done[:-1]
    if buffer.size():
        is_open = buffer.dones[buffer.pos - 1] == 0
    if ends.any() or (steps.begins[0] & is_open).any():
        where = "rows" if ends.any() else "the steps in the buffer"
        raise SpecError(
            f"{where} end in the middle of episodes, and this buffer takes the next step for the "
            "one that follows",
            fix="give it complete episodes, or windows of n_envs lanes, every one of them",
        )


def _fill_rollouts(trajectories: TemporalDictTensor, buffer: Any, policy: Any) -> None:
    """Fill a rollout buffer, and compute its returns and advantages."""
    steps = _Steps(trajectories, buffer, buffer.buffer_size)
    observations, done = steps.observations(), steps["_done"].astype(bool)
    actions, space = _policy_actions(steps, policy), buffer.action_space
    rewards = np.array(fitted_rewards("'_reward'", steps["_reward"]))
    keys = ("value", "log_probability")
    if all(key in steps for key in keys):
        values, log_probabilities = (torch.tensor(steps[key]) for key in keys)
    else:
        shape = (buffer.action_dim,) if isinstance(space, spaces.Box) else space.shape
        flat = torch.from_numpy(actions.reshape(-1, *shape).astype(np.float32))
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
    columns = actions, rewards, steps.begins, values, log_probabilities
    for step in range(len(done)):
        row = [column[step] for column in columns]
        buffer.add(mapped(observations, itemgetter(step)), *row)
    buffer.compute_returns_and_advantage(last_values=last, dones=ends[-1])


def _policy_actions(steps: _Steps, policy: Any) -> NDArray:
    """Actions as the policy drew them, as far as they are known."""
    if "policy_action" in steps:
        return steps.actions("policy_action")
    actions = steps.actions("action")
    # Such a policy has no actions but from -1 to 1, which the environment's bounds stretch.
    is_squashed = getattr(policy, "squash_output", False)
    scaled: NDArray = policy.scale_action(actions) if is_squashed else actions
    return scaled


def _checked(policy: Any) -> Any:
    if not isinstance(policy, ActorCriticPolicy):
        got = "missing" if policy is None else f"a {type(policy).__name__}"
        raise SpecError(
            f"values or log-probabilities have to be computed, and the policy is {got}",
            fix="pass the policy of the model that learns: to_sb3(trajectories, buffer, "
            "model.policy)",
        )
    return policy


def _values(policy: Any, observations: Observation, where: NDArray) -> NDArray:
    """The policy's values where a mask ``[n_steps, n_envs]`` is true, float32 ``[n]``."""
    some = mapped(observations, itemgetter(where))
    with torch.no_grad():
        values = _checked(policy).predict_values(policy.obs_to_tensor(some)[0])
    flat: NDArray = values.cpu().numpy().flatten()
    return flat


def _seen(policy: Any, observations: Observation) -> Any:
    """Observations ``[n_steps, n_envs, ...]`` as the policy takes them: ``[n, ...]``."""
    flat = mapped(observations, lambda part: part.reshape(-1, *part.shape[2:]))
    return policy.obs_to_tensor(flat)[0]


def _told(lengths: Tensor) -> str:
    """Numbers of steps, in words."""
    return f"{lengths.tolist()}" if len(lengths) <= 4 else f"{lengths[:3].tolist()} and more"
