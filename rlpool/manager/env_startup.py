"""How a worker process makes its environments, and what it reports of them."""

from __future__ import annotations

import logging
import pickle
from functools import partial
from typing import Any

import cloudpickle
import numpy as np

from rlpool.envs.gym_env import GymEnv, all_tasks
from rlpool.envs.vec_env import LaneError, VecEnv
from rlpool.errors import RlpoolError, SpecError, Where, WorkerStartupError
from rlpool.generators import seed_generators
from rlpool.manager.env_messages import EnvReady, EnvSetup
from rlpool.record.failures import described, env_error, text_of
from rlpool.seeding import probe_seed, root_from, worker_seed
from rlpool.workers.shipment import arrived

_LOG = logging.getLogger("rlpool")


def made_environments(setup: EnvSetup, numbers: memoryview) -> GymEnv:
    """Make a worker's environments.

    Args:
        setup: What to make.
        numbers: Shared: steps done, lane in use.

    Raises:
        WorkerStartupError: If that failed.
    """
    seed = worker_seed(setup.root, setup.worker)
    where = Where(worker=setup.worker)
    try:
        functions = pickle.loads(arrived(setup.functions))
    except BaseException as error:
        raise _startup_error("loading env_fns", error, where) from error
    seed_generators(seed)
    envs = []
    for number, create in enumerate(functions):
        lane = setup.first_lane + number
        numbers[1] = number
        try:
            envs.append(create())
        except BaseException as error:
            what = f"env_fns[{lane}]"
            raise _startup_error(what, error, where._replace(lane=lane)) from error
        if isinstance(envs[-1], VecEnv) or not hasattr(envs[-1], "step"):
            raise WorkerStartupError(
                f"env_fns[{lane}] returned {type(envs[-1]).__name__}, not an environment",
                where=where._replace(lane=lane),
                fix="let it return one Gymnasium environment",
            )
    try:
        env = GymEnv(envs, root_from(seed), **setup.options)
    except SpecError as error:
        raise _startup_error("GymEnv", error, where) from error
    env.lane_in_use = numbers[1:]
    if not env.is_declared:
        _learn_observation(env, setup)
    return env


def _learn_observation(env: GymEnv, setup: EnvSetup) -> None:
    """Reset environments without an observation space once, to see what they return."""
    n = env.n_lanes
    try:
        env.reset_lanes(range(n), [probe_seed(setup.root)] * n, [None] * n)
    except LaneError as error:
        # They may need options: the first reset that brings some will tell.
        env.forget()
        where = Where(setup.worker, setup.first_lane + error.lane, step=0)
        _LOG.debug("observations are unknown until the first reset: %s", env_error(error, where))


def report_of(env: GymEnv, worker: int) -> EnvReady:
    """What a worker says of its environments when it has them.

    Raises:
        WorkerStartupError: If that cannot be said.
    """
    try:
        spaces = cloudpickle.dumps((env.observation_space, env.action_space))
    except Exception as error:
        where = Where(worker=worker)
        raise _startup_error("pickling the spaces", error, where) from error
    return EnvReady(
        env.n_lanes,
        env.shown_structure,
        env.is_declared,
        env.action_structure,
        env.native_action_specs(),
        spaces,
        _number(env, "n_tasks"),
        _number(env, "horizon_bamdp"),
        all_tasks(partial(_attribute, env)),
    )


def _attribute(env: GymEnv, name: str) -> Any:
    try:
        return env.attribute(0, name)
    except Exception:
        return None  # environments without tasks


def _number(env: GymEnv, name: str) -> int | None:
    value = _attribute(env, name)
    return int(value) if isinstance(value, int | np.integer) else None


def _startup_error(what: str, error: BaseException, where: Where) -> WorkerStartupError:
    if isinstance(error, RlpoolError):
        what, _, fix = str(error).partition("\n  fix:   ")
        return WorkerStartupError(what, where=where, fix=fix, traceback_text=text_of(error))
    return WorkerStartupError(
        f"{what} raised {described(error)}", where=where, traceback_text=text_of(error)
    )
