"""Trials: several consecutive episodes on one task, as one long episode; and how to make them."""

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

    The agent does not know the task and keeps what it has learnt from one episode to the next;
    the task changes only at ``reset``. A trial, a Bayes-adaptive MDP, differs from its episodes:

    - The observation of an episode's last step has the flag 1, and the next action is chosen on
      it. By then the next episode has begun: its first observation is ``info["start_state"]``, and
      that action is its first one. With ``show_start``, ``step`` returns that first observation
      instead, and the one with the flag is ``info["final_obs"]``.
    - A trial ends as its last episode does: ``terminated`` if the environment terminated it,
      ``truncated`` if its time ran out. (Within the trial the end of an episode is neither; it is
      in ``info["done_mdp"]``.) So no trial is ``terminated`` merely because it reached its
      horizon, and an off-policy learner bootstraps there.
    - Box actions are in [-1, 1], clipped to that and scaled to the environment's own bounds.

    The environment may have Gymnasium's interface or an older one. If it has tasks, it or one of
    its wrappers has ``reset_task(task)`` (``None`` draws one), ``get_current_task()``,
    ``n_tasks``, and possibly ``get_all_task_idx()``. A trial begins with ``reset_task``, also the
    first one of an environment, and one reset follows.

    Args:
        env: The environment, with a time limit.
        episodes_per_task: Episodes of a trial, at least 1.
        oracle: Append the current task to the observation, before the flag, to measure what an
            agent that knows the task could achieve.
        show_start: Show the agent the first observation of every episode of the trial, instead of
            the last one of the episode before.

    Attributes:
        observation_space: The space of ``env``, extended by the task if ``oracle`` and by the flag
            if there is more than one episode per task.
        action_space: The space of ``env``; a Box becomes one of [-1, 1].
        horizon_bamdp: Steps of the longest trial, ``episodes_per_task * max_episode_steps``.
        episode_count: Episodes of this trial that have ended.
        step_count_bamdp: Steps of this trial.
        done_mdp: Whether the last step ended an episode.
        step_info_keys: Keys of the info that ``GymEnv`` adds to its ``info_keys``: ``final_obs``
            with ``show_start``.

    Raises:
        SpecError: For anything but an environment, fewer than one episode, no time limit, an
            observation that is not a vector but would be extended, actions without bounds, or an
            oracle without tasks.

    References:
        Zintgraf et al. 2020, "VariBAD: a very good method for Bayes-adaptive deep RL via
        meta-learning". Ni et al. 2022, "Recurrent model-free RL can be a strong baseline for many
        POMDPs", whose wrapper of this name this follows.

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
        self._first_seed: int | None = None  # of the next reset, unless that brings another
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
        """Number of tasks of the environment, ``None`` if it has none or cannot count them."""
        n_tasks = self._inner("n_tasks")
        return None if n_tasks is None else int(n_tasks)

    def reset_task(self, task: Any = None) -> Any:
        """Give the environment a task; ``None`` lets it draw one."""
        reset_task = self._inner("reset_task")
        if reset_task is None:
            raise UsageError(
                f"{self.unwrapped} got the task {task!r} but has no reset_task(task)",
                fix="give the environment reset_task(task), or leave the task out",
            )
        return reset_task(task)

    def get_current_task(self) -> Any:
        """The environment's description of its task."""
        return self.env.get_wrapper_attr("get_current_task")()

    def get_all_task_idx(self) -> list[Any] | None:
        """All tasks: those that the environment lists, or the numbers below ``n_tasks``.

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
            seed: Seeds the environment before it gets its task, and in the reset. What
                ``reset_task`` draws follows from the seed as well, if it draws from ``np_random``
                or another generator among the environment's attributes.
            options: For every reset of the environment within the trial. An option ``"task"`` is
                used as ``task``.
            task: The task, passed to ``reset_task``. ``None`` lets the environment draw one.

        Returns:
            The first observation, with the flag 0, and the environment's info.

        Raises:
            UsageError: For a task that the environment has no ``reset_task`` for.
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
            with ``start_state`` where an episode began within the trial. With ``show_start``, the
            observation is that start there, and the info has ``final_obs``.

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
            self.reset_task(None)  # its description shows how long it is
        dtype = space.dtype if space.dtype.kind == "f" else np.dtype(np.float32)
        n_task, n_flag = len(self._task_vector()), int(self.episodes_per_task > 1)
        low = np.concatenate([space.low, np.full(n_task, -np.inf), np.zeros(n_flag)])
        high = np.concatenate([space.high, np.full(n_task, np.inf), np.ones(n_flag)])
        return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype.type)

    def _extended(self, observation: Any, *, flag: bool) -> Any:
        """What the agent sees; ``observation`` itself if nothing is appended."""
        if not self._is_extended:
            return observation
        flags = [flag] if self.episodes_per_task > 1 else []
        dtype: Any = self.observation_space.dtype
        parts = np.concatenate([observation, self._task_vector(), flags])
        return fitted("the observation with task and flag", parts, dtype)

    def _task_vector(self) -> Any:
        """The task as an oracle sees it; empty without an oracle."""
        if not self.oracle:
            return ()
        return np.asarray(self.get_current_task(), np.float64).reshape(-1)

    def _unit_space(self, space: Any) -> spaces.Box:
        if not space.is_bounded():
            raise SpecError(
                f"actions in [-1, 1] cannot be scaled to {space}, which has no bounds",
                fix="give the environment's action space finite bounds",
            )
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        self._bounds = low, high, 0.5 * (high - low)
        dtype = space.dtype if space.dtype.kind == "f" else np.float32
        return spaces.Box(-1.0, 1.0, space.shape, dtype)

    def _scaled(self, action: Any) -> Any:
        """An action in [-1, 1], scaled to the bounds of the environment."""
        if self._bounds is None:
            return action
        low, high, half_width = self._bounds
        action = np.asarray(action, np.float64)
        if action.shape != low.shape:
            raise SpecError(
                f"the action should have shape {list(low.shape)}, got {list(action.shape)}"
            )
        # np.clip would take longer than everything else here.
        scaled = (np.minimum(np.maximum(action, -1.0), 1.0) + 1.0) * half_width + low
        dtype: Any = self.env.action_space.dtype
        if dtype.kind != "f":
            scaled = np.rint(scaled)
        # Rounding may exceed the bounds by the last bit.
        return np.minimum(np.maximum(scaled, low), high).astype(dtype)

    def _inner(self, name: str) -> Any:
        """An attribute of the environment or of what it wraps, ``None`` if it is missing."""
        try:
            return self.env.get_wrapper_attr(name)
        except AttributeError:
            return None

    def _time_limit(self) -> int:
        """Steps after which an episode is truncated: the smallest limit that can be found."""
        found = [self._inner(name) for name in ("_max_episode_steps", "max_episode_steps")]
        found.append(getattr(getattr(self.env, "spec", None), "max_episode_steps", None))
        limits = [int(limit) for limit in found if limit is not None and 1 <= limit < np.inf]
        if not limits:
            raise SpecError(
                f"{self.env} has no time limit, so a trial has no horizon",
                fix="gymnasium.make(..., max_episode_steps=...) or gymnasium.wrappers.TimeLimit",
            )
        return min(limits)


# Making them -------------------------------------------------------------------------------------


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
        seed: Seeds the action space and the first reset, unless that brings a seed; from 2**31 on,
            its hash does.
        oracle: Append the task to the observations.
        show_start: Show the first observation of every episode, see ``VariBadWrapper``.
        **kwargs: For the environment; ``max_episode_steps`` is its time limit.

    Returns:
        The environment. It needs a ``reset`` before the first step.

    Raises:
        SpecError: If ``env_id`` is neither an id nor callable, or makes no environment, or one that
            ``VariBadWrapper`` refuses.

    Example:
        >>> env = make_env("CartPole-v1", episodes_per_task=2, seed=0)
        >>> env.reset()[0].shape, env.horizon_bamdp
        ((5,), 1000)
    """
    maker: Any = env_id
    if not isinstance(maker, str) and not callable(maker):
        fix = "pass an id such as 'CartPole-v1', or the class or function that makes it"
        raise SpecError(f"env_id is {env_id!r:.60}, neither an id nor callable", fix=fix)
    env = gymnasium.make(env_id, **kwargs) if isinstance(env_id, str) else env_id(**kwargs)
    fix = "let it return one environment, an object with reset() and step()"
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
        env_id: As for ``make_env``; it is resolved in the workers, where its module is imported.
        episodes_per_task: Episodes of a trial.
        n_workers: Number of processes; ``"auto"`` for ``max(1, cores - 2)``.
        seed: Determines all seeds; no two environments share a stream.
        oracle: Append the task to the observations.
        show_start: Show the first observation of every episode, see ``VariBadWrapper``.
        envs_per_worker: Environments in each process.
        timeout: Seconds without progress after which a worker counts as hanging; ``None`` for
            never.
        min_ready: How many environments a collection waits for at a time, so that a slow one does
            not hold up the others; ``None`` for all of them. Results do not depend on it.
        **kwargs: ``on_worker_failure``, ``max_restarts``, ``on_env_error``,
            ``max_episodes_per_worker`` (trials, here) and ``start_method`` are
            those of ``ParallelEnvManager``; all others are for the environment.

    Returns:
        A ``VecEnv`` of ``n_workers * envs_per_worker`` lanes.

    Raises:
        SpecError: For wrong numbers of environments, or more processes than the system allows.
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
