"""How a worker process makes its environments, and what it reports about them."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import cloudpickle
import numpy as np

from rlpool.envs.gym_env import GymEnv
from rlpool.envs.single_envs import all_tasks, how_to_make_one, is_environment, is_of_agents
from rlpool.envs.vec_env import LaneError
from rlpool.errors import SpecError, Where, WorkerStartupError
from rlpool.machine.generators import seed_generators
from rlpool.manager.messages import Report, Setup
from rlpool.observe.control import WorkerRecord
from rlpool.record.failures import env_error, text_of
from rlpool.seeding import probe_seed, root_from
from rlpool.workers.worker_process import Place, called

_LOG = logging.getLogger("rlpool")


def made_environments(setup: Setup, place: Place, control: WorkerRecord) -> GymEnv:
    """Make a worker's environments.

    Args:
        setup: What to make.
        place: Which worker makes them.
        control: Its part of the shared record.

    Raises:
        WorkerStartupError: If that failed.
    """
    seed = place.seed
    where = Where(worker=place.worker)
    functions = called(where, "loading env_fns", pickle.loads, setup.functions)
    seed_generators(seed)
    envs = []
    for number, create in enumerate(functions):
        lane = setup.first_lane + number
        control.lane[0] = number
        env = called(where._replace(lane=lane), f"env_fns[{lane}]", create)
        if not is_environment(env):
            raise WorkerStartupError(
                f"env_fns[{lane}] returned {type(env).__name__}, not an environment",
                where=where._replace(lane=lane),
                fix=how_to_make_one(env)
                if is_of_agents(env)
                else "let it return one Gymnasium environment",
            )
        envs.append(env)
    try:
        batch = GymEnv(envs, root_from(seed), **setup.options)
    except SpecError as error:
        raise WorkerStartupError(
            error.what, where=where, fix=error.fix, traceback_text=text_of(error)
        ) from error
    batch.lane_in_use = control.lane
    if not batch.is_declared:
        _learn_observation(batch, setup, place)
    return batch


def _learn_observation(env: GymEnv, setup: Setup, place: Place) -> None:
    """Reset environments once, to see what observations and infos are that nothing declares."""
    n = env.n_lanes
    try:
        env.reset_lanes(range(n), [probe_seed(place.root)] * n, [None] * n)
    except LaneError as error:
        # They may need options: the first reset with options shows them.
        env.forget()
        where = Where(place.worker, setup.first_lane + error.lane, step=0)
        _LOG.debug("observations are unknown until the first reset: %s", env_error(error, where))


def report_of(env: GymEnv, worker: int) -> Report:
    """What a worker reports about the environments that it has made.

    Raises:
        WorkerStartupError: If their spaces cannot be pickled.
    """
    spaces = called(
        Where(worker=worker),
        "pickling the spaces",
        cloudpickle.dumps,
        (env.observation_space, env.action_space),
    )
    return Report(
        env.declaration,
        env.is_declared,
        env.action_structure,
        env.native_action_specs(),
        spaces,
        tasks_of(env),
    )


def tasks_of(env: GymEnv) -> tuple[int | None, int | None, list[Any] | None]:
    """``(n_tasks, horizon_bamdp, all_tasks)`` of environments, ``None`` for what they lack."""

    def attribute(name: str) -> Any:
        try:
            return env.attribute(0, name)
        except Exception:
            return None  # environments without tasks

    counts = [attribute(name) for name in ("n_tasks", "horizon_bamdp")]
    n_tasks, horizon = (int(n) if isinstance(n, int | np.integer) else None for n in counts)
    return n_tasks, horizon, all_tasks(attribute)
