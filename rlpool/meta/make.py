"""Make environments of trials, one in this process or several in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import gymnasium

from rlpool.envs.legacy import seed_before_task
from rlpool.envs.single_envs import check_is_env
from rlpool.errors import SpecError
from rlpool.machine.arguments import also_takes, whole_number
from rlpool.machine.limits import worker_count
from rlpool.manager.parallel_env import ParallelEnvManager
from rlpool.meta.trials import VariBadWrapper
from rlpool.seeding import root_from, seed_from, worker_seed
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, FailurePolicy


def make_env(
    env_id: str | Callable[..., Any],
    episodes_per_task: int,
    seed: int | None = None,
    oracle: bool = False,
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
    _refuse_no_maker(env_id)
    env = gymnasium.make(env_id, **kwargs) if isinstance(env_id, str) else env_id(**kwargs)
    fix = "let it return one environment, an object with reset() and step()"
    check_is_env("env_id returned", env, fix)
    trials = VariBadWrapper(env, episodes_per_task, oracle)
    if seed is not None:
        seed = seed_from(whole_number("seed", seed, 0))
        if trials._inner("reset_task") is None:
            trials.env.reset(seed=seed)
        else:  # it may need its first task before its first reset
            trials._first_seed = seed_before_task(trials.env, seed)
        trials.action_space.seed(seed)
    return trials


def _refuse_no_maker(env_id: Any) -> None:
    if not isinstance(env_id, str) and not callable(env_id):
        raise SpecError(
            f"env_id is {env_id!r:.60}, neither an id nor callable",
            fix="pass an id such as 'CartPole-v1', or the class or function that makes it",
        )


@also_takes(num_workers="n_workers")
def make_parallel_env(
    env_id: str | Callable[..., Any],
    episodes_per_task: int,
    n_workers: int | str,
    seed: int | None = None,
    oracle: bool = False,
    *,
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
        SpecError: For wrong numbers, an ``env_id`` that is neither an id nor callable, or more
            processes than the system allows.
        WorkerStartupError: If an environment cannot be made.

    Example:
        >>> with make_parallel_env("CartPole-v1", 2, n_workers=1, envs_per_worker=3) as env:
        ...     print(env.n_lanes, env.horizon_bamdp)
        3 1000
    """
    _refuse_no_maker(env_id)
    whole_number("episodes_per_task", episodes_per_task, 1)
    whole_number("envs_per_worker", envs_per_worker, 1)
    n_workers = worker_count(n_workers)
    root = root_from(seed)
    policy = {
        each.name: kwargs.pop(each.name) for each in fields(FailurePolicy) if each.name in kwargs
    }
    make = partial(make_env, env_id, episodes_per_task, oracle=oracle, **kwargs)
    n_envs = n_workers * envs_per_worker
    env_fns = [partial(make, seed=worker_seed(root, lane)) for lane in range(n_envs)]
    return ParallelEnvManager(
        env_fns,
        envs_per_worker=envs_per_worker,
        seed=seed,
        timeout=timeout,
        min_ready=min_ready,
        **policy,
    )
