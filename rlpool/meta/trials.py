"""Trials: several consecutive episodes on one task as one long episode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlpool.data.specs import fitted
from rlpool.envs.columns import flag_of
from rlpool.envs.legacy import modernised, seed_before_task
from rlpool.envs.single_envs import all_tasks, check_is_env
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import also_takes, whole_number
from rlpool.machine.limits import worker_count
from rlpool.manager.parallel_env import ParallelEnvManager
from rlpool.meta.agents import FINAL_KEY
from rlpool.meta.rollouts import TASK_OPTION
from rlpool.seeding import seed_from
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, FailurePolicy


class VariBadWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A trial of ``episodes_per_task`` episodes on one task, as one episode.

    The agent does not know the task and keeps its memory from one episode to the next; the task
    changes only at ``reset``. A trial is a Bayes-adaptive MDP and differs from its episodes:

    - The observation of an episode's last step has the flag 1, and the next action is based on it.
      The next episode has already begun: its first observation is ``info["start_state"]``, and that
      action is its first one. With ``show_start``, ``step`` returns that first observation instead,
      and the one with the flag is ``info["final_obs"]``.
    - A trial ends like its last episode: ``terminated`` if the environment terminated it,
      ``truncated`` at its time limit. (Within the trial, the end of an episode is neither; it is
      reported in ``info["done_mdp"]``.) A trial that merely reaches its horizon is therefore not
      ``terminated``, and an off-policy learner bootstraps there.
    - Box actions are clipped to [-1, 1] and scaled to the environment's own bounds.

    The environment can have Gymnasium's interface or an older one. An environment with tasks, or
    one of its wrappers, has ``reset_task(task)`` (``None`` draws one), ``get_current_task()``,
    ``n_tasks``, and optionally ``get_all_task_idx()``. Every trial begins with ``reset_task``
    followed by one reset.

    Args:
        env: The environment, with a time limit.
        episodes_per_task: Episodes of a trial, at least 1.
        oracle: Append the current task to the observation, before the flag, to measure the
            performance of an agent that knows the task.
        show_start: Show the agent the first observation of every episode of the trial, in place of
            the last one of the previous episode.

    Attributes:
        observation_space: The space of ``env``, extended by the task with ``oracle`` and by the
            flag if there is more than one episode per task.
        action_space: The space of ``env``; the bounds of a Box become [-1, 1].
        horizon_bamdp: Steps of the longest trial, ``episodes_per_task * max_episode_steps``.
        episode_count: Number of ended episodes of this trial.
        step_count_bamdp: Number of steps of this trial.
        done_mdp: Whether the last step ended an episode.
        step_info_keys: Keys of the info that ``GymEnv`` adds to its ``info_keys``: ``final_obs``
            with ``show_start``.

    Raises:
        SpecError: For anything but an environment, fewer than one episode, no time limit, an
            observation to extend that is not a vector, actions without bounds, or an oracle without
            tasks.

    References:
        Zintgraf et al. 2020, "VariBAD: a very good method for Bayes-adaptive deep RL via
        meta-learning". Ni et al. 2022, "Recurrent model-free RL can be a strong baseline for many
        POMDPs", the source of the original wrapper.

    Example:
        >>> env = VariBadWrapper(gymnasium.make("CartPole-v1"), episodes_per_task=2)
        >>> env.horizon_bamdp, env.observation_space.shape  # the flag is the fifth number
        (1000, (5,))
    """

    def __init__(
        self, env: Any, episodes_per_task: int, oracle: bool = False, *, show_start: bool = False
    ) -> None:
        fix = "pass an object with reset() and step(), such as gymnasium.make(...)"
        check_is_env("VariBadWrapper got", env, fix)
        super().__init__(modernised(env, with_tasks=False))
        self.episodes_per_task = whole_number("episodes_per_task", episodes_per_task, 1)
        self.oracle = bool(oracle)
        self.max_episode_steps = self._time_limit()
        self.horizon_bamdp = self.episodes_per_task * self.max_episode_steps
        self.episode_count = self.step_count_bamdp = 0
        self._elapsed = 0  # steps of the running episode
        self.done_mdp, self._is_running = True, False
        self._options: dict[str, Any] | None = None
        self._first_seed: int | None = None  # of the next reset, unless it gets another
        self._bounds: tuple[Any, Any, Any] | None = None
        if isinstance(self.env.action_space, spaces.Box):
            self.action_space = self._unit_space(self.env.action_space)
        self._is_extended = self.oracle or self.episodes_per_task > 1
        if self._is_extended:
            self.observation_space = self._extended_space()
        self.step_info_keys: dict[str, Any] = {}
        self.show_start = bool(show_start) and self.episodes_per_task > 1
        if self.show_start:
            dtype, shape = self.observation_space.dtype, self.observation_space.shape
            self.step_info_keys[FINAL_KEY] = (float if dtype == np.float64 else dtype), shape

    @property
    def n_tasks(self) -> int | None:
        """Number of tasks of the environment, ``None`` if there are none or it is unknown."""
        n_tasks = self._inner("n_tasks")
        return None if n_tasks is None else int(n_tasks)

    def reset_task(self, task: Any = None) -> Any:
        """Set the environment's task; ``None`` draws one."""
        reset_task = self._inner("reset_task")
        if reset_task is None:
            raise UsageError(
                f"{self.unwrapped} got the task {task!r} but has no reset_task(task)",
                fix="give the environment reset_task(task), or omit the task",
            )
        return reset_task(task)

    def get_current_task(self) -> Any:
        """Return the environment's description of its task."""
        return self.env.get_wrapper_attr("get_current_task")()

    def get_all_task_idx(self) -> list[Any] | None:
        """Return all tasks: the environment's list, or the numbers below ``n_tasks``.

        ``None`` for an environment that provides neither.
        """
        return all_tasks(self._inner)

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
        task: Any = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start a trial.

        Args:
            seed: Seeds the environment before it gets its task, and in the reset. It also
                determines the draws of ``reset_task`` from ``np_random`` or another generator among
                the environment's attributes.
            options: Options of every reset of the environment within the trial. An option
                ``"task"`` is used as ``task``.
            task: The task, passed to ``reset_task``. ``None`` draws one.

        Returns:
            The first observation, with the flag 0, and the environment's info.

        Raises:
            UsageError: For a task if the environment has no ``reset_task``.
        """
        given = dict(options or {})
        from_options = given.pop(TASK_OPTION, None)
        task = from_options if task is None else task
        self._options = given or None
        seed = self._first_seed if seed is None else seed
        self._first_seed = None
        if self._inner("reset_task") is not None or task is not None:
            if seed is not None:
                seed = seed_before_task(self.env, seed)
            self.reset_task(task)
        observation, info = self.env.reset(seed=seed, options=copy.deepcopy(self._options))
        self.episode_count = self.step_count_bamdp = self._elapsed = 0
        self.done_mdp = False
        self._is_running = True
        return self._extended(observation, flag=False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; at the end of an episode that is not the trial's last, the next one begins.

        Returns:
            Observation, reward, ``terminated``, ``truncated`` and an info with ``done_mdp``, and
            with ``start_state`` if an episode began within the trial. With ``show_start``, the
            observation is then that start, and the info has ``final_obs``.

        Raises:
            UsageError: Before ``reset``, or after the trial's end.
            SpecError: For a Box action of another shape.
        """
        if not self._is_running:
            raise UsageError("step() without a running trial", fix="call reset() first")
        observation, reward, ends, cut, info = self.env.step(self._scaled(action))
        self.step_count_bamdp += 1
        self._elapsed += 1
        terminated, is_cut = flag_of("terminated", ends), flag_of("truncated", cut)
        truncated = is_cut or self._elapsed >= self.max_episode_steps
        self.done_mdp = terminated or truncated
        self.episode_count += self.done_mdp
        self._is_running = self.episode_count < self.episodes_per_task
        extended = self._extended(observation, flag=self.done_mdp)
        info = {**info, "done_mdp": self.done_mdp}
        if not self._is_running:
            return extended, reward, terminated, truncated, info
        if self.done_mdp:
            self._elapsed = 0
            start, _ = self.env.reset(options=copy.deepcopy(self._options))
            info["start_state"] = start = self._extended(start, flag=False)
            if self.show_start:
                extended, info[FINAL_KEY] = start, extended
        return extended, reward, False, False, info

    def _extended_space(self) -> spaces.Box:
        space = self.env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise SpecError(
                f"a flag or a task can only be appended to vectors, not to {space}",
                fix="put gymnasium.wrappers.FlattenObservation around the environment",
            )
        if self.oracle:
            if self._inner("reset_task") is None or self._inner("get_current_task") is None:
                raise SpecError(
                    f"oracle=True, but {self.unwrapped} has no tasks",
                    fix="give it reset_task(task) and get_current_task(), or use oracle=False",
                )
            self.reset_task(None)  # to find the length of its description
        dtype = space.dtype if space.dtype.kind == "f" else np.dtype(np.float32)
        n_task, n_flag = len(self._task_vector()), int(self.episodes_per_task > 1)
        low = np.concatenate([space.low, np.full(n_task, -np.inf), np.zeros(n_flag)])
        high = np.concatenate([space.high, np.full(n_task, np.inf), np.ones(n_flag)])
        return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype.type)

    def _extended(self, observation: Any, *, flag: bool) -> Any:
        """Append task and flag to an observation, or return it unchanged."""
        if not self._is_extended:
            return observation
        flags = [flag] if self.episodes_per_task > 1 else []
        dtype: Any = self.observation_space.dtype
        parts = np.concatenate([observation, self._task_vector(), flags])
        return fitted("the observation with task and flag", parts, dtype)

    def _task_vector(self) -> Any:
        """Return the task for an oracle, empty without one."""
        if not self.oracle:
            return ()
        return np.asarray(self.get_current_task(), np.float64).reshape(-1)

    def _unit_space(self, space: Any) -> spaces.Box:
        if not space.is_bounded():
            raise SpecError(
                f"actions in [-1, 1] cannot be scaled to {space}, which is unbounded",
                fix="give the environment's action space finite bounds",
            )
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        self._bounds = low, high, 0.5 * (high - low)
        dtype = space.dtype if space.dtype.kind == "f" else np.float32
        return spaces.Box(-1.0, 1.0, space.shape, dtype)

    def _scaled(self, action: Any) -> Any:
        """Scale an action in [-1, 1] to the bounds of the environment."""
        if self._bounds is None:
            return action
        low, high, half_width = self._bounds
        action = np.asarray(action, np.float64)
        if action.shape != low.shape:
            raise SpecError(
                f"the action should have shape {list(low.shape)}, got {list(action.shape)}"
            )
        # np.clip would take longer than the rest of this method.
        scaled = (np.minimum(np.maximum(action, -1.0), 1.0) + 1.0) * half_width + low
        dtype: Any = self.env.action_space.dtype
        if dtype.kind != "f":
            scaled = np.rint(scaled)
        # Rounding may exceed the bounds by the last bit.
        return np.minimum(np.maximum(scaled, low), high).astype(dtype)

    def _inner(self, name: str) -> Any:
        """Return an attribute of the environment or one it wraps, ``None`` if it is missing."""
        try:
            return self.env.get_wrapper_attr(name)
        except AttributeError:
            return None

    def _time_limit(self) -> int:
        """Return the number of steps after which an episode is truncated: the smallest limit."""
        found = [self._inner(name) for name in ("_max_episode_steps", "max_episode_steps")]
        found.append(getattr(getattr(self.env, "spec", None), "max_episode_steps", None))
        limits = [int(limit) for limit in found if limit is not None and 1 <= limit < np.inf]
        if not limits:
            raise SpecError(
                f"{self.env} has no time limit, so a trial has no horizon",
                fix="gymnasium.make(..., max_episode_steps=...) or gymnasium.wrappers.TimeLimit",
            )
        return min(limits)


# Constructors ------------------------------------------------------------------------------------


def make_env(
    env_id: str | Callable[..., Any],
    episodes_per_task: int,
    seed: int | None = None,
    oracle: bool = False,
    *,
    show_start: bool = False,
    **kwargs: Any,
) -> VariBadWrapper:
    """Make one environment of trials, see ``VariBadWrapper``.

    Args:
        env_id: An id for ``gymnasium.make``, also ``"module:EnvId"``, which imports the module
            first; or a callable that makes the environment, such as its class.
        episodes_per_task: Episodes of a trial.
        seed: Seed of the action space, and of the first reset unless that has a seed. Seeds from
            2**31 on are hashed.
        oracle: Append the task to the observations.
        show_start: Show the first observation of every episode, see ``VariBadWrapper``.
        **kwargs: Arguments of the environment; ``max_episode_steps`` is its time limit.

    Returns:
        The environment. It needs a ``reset`` before the first step.

    Raises:
        SpecError: If ``env_id`` is neither an id nor callable, or its result is not an environment
            that ``VariBadWrapper`` accepts.

    Example:
        >>> env = make_env("CartPole-v1", episodes_per_task=2, seed=0)
        >>> env.reset()[0].shape, env.horizon_bamdp
        ((5,), 1000)
    """
    maker: Any = env_id
    if not isinstance(maker, str) and not callable(maker):
        fix = "pass an id such as 'CartPole-v1', or a class or function that makes it"
        raise SpecError(f"env_id is {env_id!r:.60}, neither an id nor callable", fix=fix)
    env = gymnasium.make(env_id, **kwargs) if isinstance(env_id, str) else env_id(**kwargs)
    fix = "return one environment, an object with reset() and step()"
    check_is_env("env_id returned", env, fix)
    trials = VariBadWrapper(env, episodes_per_task, oracle, show_start=show_start)
    if seed is not None:
        trials._first_seed = seed_from(whole_number("seed", seed, 0))
        trials.action_space.seed(trials._first_seed)
    return trials


@also_takes(num_workers="n_workers")
def make_parallel_env(
    env_id: str | Callable[..., Any],
    episodes_per_task: int,
    n_workers: int | str,
    seed: int | None = None,
    oracle: bool = False,
    *,
    show_start: bool = False,
    envs_per_worker: int = 1,
    timeout: float | None = DEFAULT_TIMEOUT_S,
    min_ready: int | None = None,
    **kwargs: Any,
) -> ParallelEnvManager:
    """Make environments of trials in worker processes.

    Args:
        env_id: As for ``make_env``; it is resolved in the workers, which import its module.
        episodes_per_task: Episodes of a trial.
        n_workers: Number of processes; ``"auto"`` for ``max(1, cores - 2)``.
        seed: Determines all seeds; each environment has its own stream.
        oracle: Append the task to the observations.
        show_start: Show the first observation of every episode, see ``VariBadWrapper``.
        envs_per_worker: Environments in each process.
        timeout: Seconds without progress after which a worker counts as hanging; ``None`` for
            never.
        min_ready: Number of environments a collection waits for at a time, so that a slow one does
            not delay the others; ``None`` for all. Results do not depend on it.
        **kwargs: ``on_worker_failure``, ``max_restarts``, ``on_env_error``,
            ``max_episodes_per_worker`` (here: trials) and ``start_method`` are arguments of
            ``ParallelEnvManager``; all others are for the environment.

    Returns:
        A ``VecEnv`` of ``n_workers * envs_per_worker`` lanes.

    Raises:
        SpecError: For invalid numbers of environments, or more processes than the system allows.
        WorkerStartupError: If an environment cannot be made.

    Example:
        >>> with make_parallel_env("CartPole-v1", 2, n_workers=1, envs_per_worker=3) as env:
        ...     print(env.n_lanes, env.horizon_bamdp)
        3 1000
    """
    n_workers = worker_count(n_workers)
    policy = {
        each.name: kwargs.pop(each.name) for each in fields(FailurePolicy) if each.name in kwargs
    }
    options = {"oracle": oracle, "show_start": show_start}
    make = partial(make_env, env_id, episodes_per_task, **options, **kwargs)
    return ParallelEnvManager(
        [make] * (n_workers * envs_per_worker),
        envs_per_worker=envs_per_worker,
        seed=seed,
        timeout=timeout,
        min_ready=min_ready,
        **policy,
    )
