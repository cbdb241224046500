"""Trials: several episodes in a row on one task, as one long episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from rlpool.envs.ancestor_env import AncestorEnv, modernised
from rlpool.errors import SpecError, UsageError

TASK_OPTION = "task"
"""Key of the task among the options of a reset."""

_LIMIT_NAMES = ("_max_episode_steps", "max_episode_steps")


class VariBadWrapper(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """A trial of ``episodes_per_task`` episodes on one task, as one episode.

    The agent does not know the task and keeps what it learnt from one episode to the next; the
    task changes with ``reset`` only. What a trial adds to the environment (a Bayes-adaptive MDP):

    - The observation of an episode's last step carries the flag 1 and is the one that the next
      action is chosen on. The episode after it has begun by then: its first observation is
      ``info["start_state"]``, and the action is the first of that episode.
    - A trial ends with its last episode and the way this one ended: ``terminated`` if the
      environment terminated it, ``truncated`` if its time ran out. (Within the trial the end of an
      episode is neither: ``info["done_mdp"]`` tells.) So no trial is ``terminated`` merely because
      its horizon was reached, and an off-policy learner bootstraps there, as its ancestors did.
    - Box actions are in [-1, 1], clipped to that and scaled to the environment's own bounds.

    The environment may be of Gymnasium's interface or an older one. If it has tasks, it has
    ``reset_task(task)`` (``None`` draws one), ``get_current_task()`` and ``n_tasks``, and possibly
    ``get_all_task_idx()``, itself or in one of its wrappers.

    Args:
        env: The environment, with a time limit.
        episodes_per_task: Episodes of a trial, at least 1.
        oracle: Append the current task to the observation, before the flag: what an agent could
            do that knew the task.

    Attributes:
        observation_space: That of ``env``, with the task if ``oracle`` and the flag if there is
            more than one episode per task.
        action_space: That of ``env``; a Box becomes one of [-1, 1].
        horizon_bamdp: Steps of the longest trial, ``episodes_per_task * max_episode_steps``.
        episode_count: Episodes of this trial that have ended.
        step_count_bamdp: Steps of this trial.
        done_mdp: Whether the last step ended an episode.

    Raises:
        SpecError: For fewer than one episode, no time limit, an observation that nothing can be
            appended to, actions without bounds, or an oracle without tasks.

    References:
        Zintgraf et al. 2020, "VariBAD: a very good method for Bayes-adaptive deep RL via
        meta-learning". Ni et al. 2022, "Recurrent model-free RL can be a strong baseline for many
        POMDPs", whose wrapper of this name this follows.
    """

    def __init__(self, env: Any, episodes_per_task: int, oracle: bool = False) -> None:
        RecordConstructorArgs.__init__(self, episodes_per_task=episodes_per_task, oracle=oracle)
        gymnasium.Wrapper.__init__(self, modernised(env, with_tasks=False))
        if not isinstance(episodes_per_task, int | np.integer) or episodes_per_task < 1:
            raise SpecError(f"episodes_per_task should be at least 1, got {episodes_per_task!r}")
        self.episodes_per_task = int(episodes_per_task)
        self.oracle = bool(oracle)
        self.max_episode_steps = _time_limit(self.env)
        self.horizon_bamdp = self.episodes_per_task * self.max_episode_steps
        self.episode_count = 0
        self.step_count_bamdp = 0
        self.done_mdp = True
        self._has_tasks = self.env.has_wrapper_attr("reset_task")
        self._elapsed = 0  # steps of the running episode
        self._is_running = False
        self._options: dict[str, Any] | None = None
        self._bounds: Any = None
        action_space = self.env.action_space
        if isinstance(action_space, spaces.Box):
            self._bounds = _bounds(action_space)
            self._rounds_actions = not np.issubdtype(action_space.dtype, np.floating)
            dtype = np.float32 if self._rounds_actions else action_space.dtype
            self.action_space = spaces.Box(-1.0, 1.0, action_space.shape, dtype)
        self._has_flag = self.episodes_per_task > 1
        self._dtype = np.dtype(np.float32)
        if self.oracle or self._has_flag:
            self._extend_observations()

    @property
    def n_tasks(self) -> int | None:
        """Number of tasks of the environment, ``None`` if it has none or cannot count them."""
        n_tasks = self._of_env("n_tasks")
        return None if n_tasks is None else int(n_tasks)

    def reset_task(self, task: Any = None) -> Any:
        """Give the environment a task; ``None`` lets it draw one."""
        if not self._has_tasks:
            raise UsageError(
                f"{self.unwrapped} got the task {task!r} but has no reset_task(task)",
                fix="give the environment reset_task(task), or leave the task out",
            )
        return self.env.get_wrapper_attr("reset_task")(task)

    def get_current_task(self) -> Any:
        """The task, as the environment describes it."""
        return self.env.get_wrapper_attr("get_current_task")()

    def get_all_task_idx(self) -> Any:
        """All tasks: those that the environment lists, or the numbers below ``n_tasks``.

        ``None`` for an environment that tells neither.
        """
        if self.env.has_wrapper_attr("get_all_task_idx"):
            return self.env.get_wrapper_attr("get_all_task_idx")()
        return None if self.n_tasks is None else list(range(self.n_tasks))

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
        task: Any = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start a trial.

        Args:
            seed: Seeds the environment; a task that it draws itself follows from the seed as well.
            options: For every reset of the environment within the trial. An option ``"task"`` is
                the task.
            task: The task, handed to ``reset_task``. ``None`` lets the environment draw one.

        Returns:
            The first observation, with the flag 0, and the environment's info.

        Raises:
            UsageError: For a task that the environment has no ``reset_task`` for.
        """
        given = dict(options or {})
        asked_for = given.pop(TASK_OPTION, None)
        task = asked_for if task is None else task
        self._options = given or None
        if self._has_tasks or task is not None:
            if seed is not None:
                # Before the task, which the environment may draw from its generator.
                self.env.reset(seed=seed, options=self._options)
                seed = None
            self.reset_task(task)
        observation, info = self.env.reset(seed=seed, options=self._options)
        self.episode_count = self.step_count_bamdp = self._elapsed = 0
        self.done_mdp = False
        self._is_running = True
        return self._observation(observation, flag=False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; at the end of an episode that is not the trial's last, the next one begins.

        Returns:
            Observation, reward, ``terminated``, ``truncated`` and an info with ``done_mdp``, and
            with ``start_state`` where an episode began within the trial.

        Raises:
            UsageError: Before ``reset``, or after the trial's end.
            SpecError: For a Box action of another shape.
        """
        if not self._is_running:
            raise UsageError("step() without a running trial", fix="call reset() first")
        result = self.env.step(action if self._bounds is None else self._scaled(action))
        observation, reward, terminated, truncated, info = result
        self.step_count_bamdp += 1
        self._elapsed += 1
        truncated = bool(truncated) or self._elapsed >= self.max_episode_steps
        self.done_mdp = bool(terminated) or truncated
        extended = self._observation(observation, flag=self.done_mdp)
        info = {**info, "done_mdp": self.done_mdp}
        if not self.done_mdp:
            return extended, reward, False, False, info
        self.episode_count += 1
        self._elapsed = 0
        if self.episode_count == self.episodes_per_task:
            self._is_running = False
            return extended, reward, bool(terminated), truncated, info
        start, _ = self.env.reset(options=self._options)
        info["start_state"] = self._observation(start, flag=False)
        return extended, reward, False, False, info

    def _extend_observations(self) -> None:
        space = self.env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise SpecError(
                f"a flag or a task can only be appended to vectors, not to {space}",
                fix="put gymnasium.wrappers.FlattenObservation around the environment",
            )
        if np.issubdtype(space.dtype, np.floating):
            self._dtype = np.dtype(space.dtype)
        self._n_observed = space.shape[0]
        low, high = [space.low], [space.high]
        if self.oracle:
            infinite = np.full(len(self._task_vector()), np.inf)
            low.append(-infinite)
            high.append(infinite)
        if self._has_flag:
            low.append(np.zeros(1))
            high.append(np.ones(1))
        self._n_shown = sum(map(len, low))
        self.observation_space = spaces.Box(
            np.concatenate(low).astype(self._dtype),
            np.concatenate(high).astype(self._dtype),
            dtype=self._dtype.type,
        )

    def _observation(self, observation: Any, *, flag: bool) -> Any:
        """What the agent sees; ``observation`` itself if nothing is appended to it."""
        if not (self.oracle or self._has_flag):
            return observation
        extended = np.empty(self._n_shown, self._dtype)
        extended[: self._n_observed] = observation
        if self.oracle:
            task = self._task_vector()
            extended[self._n_observed : self._n_observed + len(task)] = task
        if self._has_flag:
            extended[-1] = flag
        return extended

    def _task_vector(self) -> Any:
        if not self._has_tasks or not self.env.has_wrapper_attr("get_current_task"):
            raise SpecError(
                f"oracle=True, but {self.unwrapped} has no tasks to tell",
                fix="give it reset_task(task) and get_current_task(), or use oracle=False",
            )
        task = self.get_current_task()
        if task is None:  # none was drawn yet
            self.reset_task(None)
            task = self.get_current_task()
        return np.asarray(task, np.float64).reshape(-1)

    def _scaled(self, action: Any) -> Any:
        """An action in [-1, 1] in the units of the environment."""
        low, high, half_width = self._bounds
        action = np.asarray(action, np.float64)
        if action.shape != low.shape:
            raise SpecError(
                f"the action should have shape {list(low.shape)}, got {list(action.shape)}"
            )
        # np.clip would take longer than everything else here.
        scaled = (np.minimum(np.maximum(action, -1.0), 1.0) + 1.0) * half_width + low
        if self._rounds_actions:
            scaled = np.rint(scaled)
        # Rounding could leave the bounds by a last bit.
        return np.minimum(np.maximum(scaled, low), high).astype(self.env.action_space.dtype)

    def _of_env(self, name: str) -> Any:
        return self.env.get_wrapper_attr(name) if self.env.has_wrapper_attr(name) else None


def _bounds(space: spaces.Box) -> tuple[Any, Any, Any]:
    """Lower and upper bounds of a Box and half their distance, as float64."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise SpecError(
            f"actions in [-1, 1] cannot be scaled to {space}, which has no bounds",
            fix="give the environment's action space finite bounds",
        )
    return low, high, 0.5 * (high - low)


def _time_limit(env: Any) -> int:
    """Steps after which an episode is truncated: the smallest limit on the way to the inside."""
    limits = []
    layer = env
    while layer is not None:
        for name in _LIMIT_NAMES:
            limit = getattr(layer, name, None)
            if limit is not None and limit < np.inf:
                limits.append(int(limit))
        if isinstance(layer, gymnasium.Wrapper):
            layer = layer.env
        else:
            layer = layer.inner if isinstance(layer, AncestorEnv) else None
    spec = getattr(env, "spec", None)
    if spec is not None and spec.max_episode_steps is not None and not limits:
        limits.append(int(spec.max_episode_steps))
    if not limits or min(limits) < 1:
        raise SpecError(
            f"{env} has no time limit, so that a trial has no horizon",
            fix="gymnasium.make(..., max_episode_steps=...) or gymnasium.wrappers.TimeLimit",
        )
    return min(limits)
