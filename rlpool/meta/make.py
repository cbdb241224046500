"""Makes environments of trials, one in this process or several in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium

from rlpool.machine.arguments import names_arguments, whole_number
from rlpool.machine.worker_limits import worker_count
from rlpool.manager.parallel_env import ParallelEnvManager
from rlpool.meta.trials import VariBadWrapper
from rlpool.record.crash_files import CrashDir
from rlpool.seeding import root_from, seed_from, worker_seed
from rlpool.workers.failure_policy import DEFAULT_MAX_RESTARTS, DEFAULT_TIMEOUT_S


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
        seed: Seeds the environment and its action space; above 2**31 a hash of it does. A later
            ``reset(seed=...)`` overrides it.
        oracle: Append the task to the observations.
        **kwargs: For the environment; ``max_episode_steps`` is its time limit.

    Returns:
        The environment. It needs a ``reset`` before the first step.
    """
    env = gymnasium.make(env_id, **kwargs) if isinstance(env_id, str) else env_id(**kwargs)
    trials = VariBadWrapper(env, episodes_per_task, oracle)
    if seed is not None:
        seed = seed_from(whole_number("seed", seed, 0))
        trials.env.reset(seed=seed)  # without a task: nobody asked for one yet
        trials.action_space.seed(seed)
    return trials


@names_arguments
def make_parallel_env(
    env_id: str | Callable[..., Any],
    episodes_per_task: int,
    num_workers: int | str,
    seed: int | None = None,
    oracle: bool = False,
    *,
    envs_per_worker: int = 1,
    timeout: float | None = DEFAULT_TIMEOUT_S,
    min_ready: int | None = None,
    on_worker_failure: str = "restart",
    max_restarts: int | None = DEFAULT_MAX_RESTARTS,
    on_env_error: str = "raise",
    max_episodes_per_worker: int | None = None,
    max_rss_bytes: int | None = None,
    start_method: str = "auto",
    crash_dir: CrashDir = None,
    **kwargs: Any,
) -> ParallelEnvManager:
    """Make environments of trials in processes of their own.

    Args:
        env_id: As for ``make_env``; it is resolved in the workers, where its module is imported.
        episodes_per_task: Episodes of a trial.
        num_workers: Number of processes; ``"auto"`` leaves two cores to others,
            ``max(1, cores - 2)``.
        seed: Determines all seeds; no two environments share a stream.
        oracle: Append the task to the observations.
        envs_per_worker: Environments in each process.
        timeout: Seconds without progress after which a worker counts as hanging; ``None`` for
            never.
        min_ready: How many environments a collection waits for at a time, so that a slow one does
            not hold the others; ``None`` for all of them. Results do not depend on it.
        on_worker_failure: See ``ParallelEnvManager``, as for the next six.
        max_restarts: Replacements of failed workers in all.
        on_env_error: What becomes of an environment that raises.
        max_episodes_per_worker: Trials after which a worker is replaced.
        max_rss_bytes: Resident memory above which a worker is replaced.
        start_method: How workers are started.
        crash_dir: Where capsules of failures are written.
        **kwargs: For the environment.

    Returns:
        A ``VecEnv`` of ``num_workers * envs_per_worker`` lanes.

    Raises:
        SpecError: For a number that is none, or more processes than the system allows.
        WorkerStartupError: If an environment cannot be made.
    """
    whole_number("episodes_per_task", episodes_per_task, 1)
    whole_number("envs_per_worker", envs_per_worker, 1)
    n_workers = worker_count(num_workers)
    root = root_from(seed)
    make = partial(make_env, env_id, episodes_per_task, oracle=oracle, **kwargs)
    n_envs = n_workers * envs_per_worker
    env_fns = [partial(make, seed=worker_seed(root, lane)) for lane in range(n_envs)]
    return ParallelEnvManager(
        env_fns,
        envs_per_worker=envs_per_worker,
        seed=seed,
        timeout=timeout,
        min_ready=min_ready,
        on_worker_failure=on_worker_failure,
        crash_dir=crash_dir,
        max_restarts=max_restarts,
        on_env_error=on_env_error,
        max_episodes_per_worker=max_episodes_per_worker,
        max_rss_bytes=max_rss_bytes,
        start_method=start_method,
    )
