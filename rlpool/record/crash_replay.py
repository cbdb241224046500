"""Repeats an episode that failed in a worker, in this process."""

from __future__ import annotations

import logging
import os
import pdb  # noqa: T100  (asked for with debug=True)
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from rlpool.agents.agent import refuse_no_factory
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import TensorSpec
from rlpool.data.storage import NDArray
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.one_env import OneEnv
from rlpool.envs.single_envs import refuse_no_environment
from rlpool.envs.vec_env import LaneError, VecEnv
from rlpool.envs.vector_gym_env import as_vec_env
from rlpool.errors import RlpoolError, SpecError, UsageError, WorkerError, described
from rlpool.machine.arguments import called_with_seed, check_choice
from rlpool.machine.generators import seeded_generators
from rlpool.record.crash_capsule import CrashCapsule
from rlpool.record.repeat import Divergence, Reached, batch_of, repeat
from rlpool.record.tape import REWARD, Tape
from rlpool.seeding import N_SEEDS

_LOG = logging.getLogger("rlpool")


@dataclass(frozen=True, eq=False)
class Replay:
    """A repeated episode, at the step where the agent failed.

    ``agent(replay.state, replay.observation, replay.agent_info)`` repeats the failed call.

    Attributes:
        env: The environments; close them when done.
        lane: The lane that was replayed; it stands at that step.
        step: The step, 0-based.
        observation: ``[n_lanes, ...]``: the agent's input for all lanes of its worker. The lane
            that failed is row ``capsule.where.lane``.
        agent_info: ``[n_lanes, ...]`` or ``None``.
        state: ``[n_lanes, ...]``: the agent's state, undefined in rows that had just started;
            ``None`` if the agent has none, or if all rows had just started.
        diverged_at: The first step whose reward or observation differs from the recorded one,
            ``None`` if all agree.

    Example:
        >>> class Navigator(Agent):
        ...     def __call__(self, state, observation, agent_info=None, history=None):
        ...         return observation["goal"]
        >>> try:
        ...     evaluate(Navigator(), create_env, n_episodes=1)
        ... except AgentError as error:
        ...     replay = replay_crash(error, create_env)
        >>> replay.step, replay.observation["frame"]
        (0, tensor([[0.],
                [0.]]))
    """

    env: VecEnv
    lane: int
    step: int
    observation: DictTensor
    agent_info: DictTensor | None
    state: DictTensor | None
    diverged_at: int | None


def replay_crash(
    capsule: CrashCapsule | WorkerError | str | os.PathLike[str],
    create_env: Callable[..., Any],
    env_args: Mapping[str, Any] | None = None,
    *,
    debug: bool | Literal["before"] = False,
) -> Replay:
    """Repeat the episode of a crash in this process, up to the call that failed.

    The environment is made as it was in the worker, reset with the episode's seed and options,
    and stepped with the same actions. If it fails again, its own exception is raised with its own
    frames: ``pdb.pm()``, ``python -m pdb`` and an editor's debugger stop at the line that failed.
    The process's generators (``random``, NumPy's, torch's) are seeded as in the worker and restored
    afterwards.

    Args:
        capsule: A capsule, the error that carries it, or the file that holds it.
        create_env: The function that the batcher got, called as ``create_env(seed=...,
            **env_args)``; or any function that makes one environment, such as
            ``lambda: gymnasium.make("CartPole-v1")``.
        env_args: Keyword arguments of ``create_env``.
        debug: ``True`` opens ``pdb`` in the frame that failed, before the exception is raised;
            ``"before"`` calls ``breakpoint()`` right before the call that failed, to step into
            it (or, if the agent failed, before the replay is returned).

    Returns:
        If the agent failed: the environment at that step, and the agent's input. If the
        environment failed, this function does not return.

    Raises:
        Exception: The environment's own exception.
        WorkerError: If the environment does not fail again; the message says from which step on
            it diverged, as far as that shows.
        SpecError: If the file is not a capsule, or ``create_env`` makes no environment.
        UsageError: For errors without a capsule, and for episodes so long that their first
            actions were not kept.

    Example:
        >>> class Broken(CountingEnv):
        ...     def step(self, action):
        ...         return super().step(action if self.t < 3 else {}["struck"])
        >>> def broken(seed):
        ...     return GymEnv([Broken()], seed)
        >>> try:
        ...     evaluate(create_agent(), broken, n_episodes=1)
        ... except EnvError as error:
        ...     capsule = error.capsule
        >>> replay_crash(capsule, broken)  # in a debugger, this stops at the line that fails
        Traceback (most recent call last):
            ...
        KeyError: 'struck'
    """
    capsule = _capsule_of(capsule)
    refuse_no_factory("create_env", create_env)
    check_choice("debug", debug, (True, False, "before"))
    if (capsule.seed or 0) >= N_SEEDS:
        _LOG.warning(
            "this capsule was saved by rlpool %s, whose seeds were longer, and were shortened for "
            "environments without reset(seed=...): replay those with that version",
            capsule.versions.get("rlpool"),
        )
    with seeded_generators(capsule.worker_seed):
        env, lane = _environment(capsule, create_env, dict(env_args or {}))
        reached, failure = _repeated(capsule, env, lane, stops_before=debug == "before")
    if failure is None and capsule.call in ("reset", "step"):
        env.close()
        raise _no_failure(capsule, reached)
    if reached.divergence is not None:
        _LOG.warning("the replay went another way: %s", reached.divergence)
    if failure is None:
        return _replay(capsule, env, lane, reached.divergence)
    told = str(failure).partition("\n")[0] if isinstance(failure, SpecError) else described(failure)
    if reached.n_steps != len(capsule.rewards) or told not in capsule.error:
        _LOG.warning("the replay failed in another way than the episode did: %s", capsule.error)
    if debug and debug != "before":
        pdb.post_mortem(failure.__traceback__)
    raise failure


def _repeated(
    capsule: CrashCapsule, env: VecEnv, lane: int, *, stops_before: bool
) -> tuple[Reached, BaseException | None]:
    """Repeat an episode; returns how far that was without failure, and what was raised then."""
    n_steps = len(capsule.rewards)
    done = {key: array[:n_steps] for key, array in capsule.actions.items()}
    chunks = [{**done, REWARD: capsule.rewards}] if n_steps else []
    tape = Tape(capsule.seed or 0, capsule.options, 0, 0, chunks, capsule.observation)
    reached = Reached(0, False, None)
    try:
        if stops_before and capsule.call == "reset":
            sys.breakpointhook()  # noqa: T100  (step into what follows)
        for reached in repeat(env, lane, tape):
            if not reached.n_steps:
                _declare_actions(env, capsule.actions)
            if reached.has_ended:
                ended = Divergence(reached.n_steps - 1, "done", "the episode ended")
                return reached._replace(divergence=reached.divergence or ended), None
        if stops_before and capsule.call != "reset":
            sys.breakpointhook()  # noqa: T100  (step into the next line)
        if capsule.call == "step":
            failing = {key: array[n_steps] for key, array in capsule.actions.items()}
            env.step_lanes([lane], batch_of({lane: failing}, env))
    except LaneError as error:
        is_own = error.__cause__ is None or isinstance(error, RlpoolError)
        return reached, error if is_own else error.__cause__
    return reached, None


def _capsule_of(given: Any) -> CrashCapsule:
    if isinstance(given, str | os.PathLike):
        given = CrashCapsule.load(given)
    if isinstance(given, WorkerError):
        if given.capsule is None:
            raise UsageError(
                f"this {type(given).__name__} carries no capsule: {given.what}",
                fix="only failures of an environment or an agent in an episode have one",
            )
        given = given.capsule
    if not isinstance(given, CrashCapsule):
        raise SpecError(
            f"{given!r} is not a crash capsule",
            fix="pass an error of rlpool, its capsule, or the path of a saved one",
        )
    if given.first_step:
        raise UsageError(
            f"the first {given.first_step} actions of this episode were not kept, so that it "
            "cannot be repeated",
            fix="end episodes earlier, such as with GymEnv(..., max_episode_steps=...)",
        )
    return given


def _environment(
    capsule: CrashCapsule, create_env: Callable[..., Any], env_args: dict[str, Any]
) -> tuple[VecEnv, int]:
    """The environment, and which of its lanes to use."""
    seed = capsule.worker_seed if capsule.worker_seed is not None else capsule.seed
    made = as_vec_env(called_with_seed(create_env, seed, env_args), seed)
    lane = capsule.where.lane or 0
    if isinstance(made, VecEnv):
        if lane >= made.n_lanes:
            made.close()
            raise SpecError(
                f"lane {lane} failed, and create_env made {made.n_lanes} environments",
                fix="pass the create_env and env_args of the batcher, or make the one environment",
            )
        return made.in_this_process(lane)  # a debugger sees the frames of this process only
    fix = "return a GymEnv, or one environment with reset() and step()"
    refuse_no_environment("create_env returned", made, fix)
    if capsule.env_type == OneEnv.__name__:
        return OneEnv(made, owns_process=True), 0
    is_wide = any(array.dtype == np.float64 for array in capsule.observation.values())
    return GymEnv([made], keep_float64=is_wide), 0


def _declare_actions(env: VecEnv, actions: Mapping[str, NDArray]) -> None:
    leaves = env.action_leaves
    if leaves is None:
        env.declare_actions({k: TensorSpec(a.shape[1:], a.dtype) for k, a in actions.items()})
        return
    env.declare_actions({key: leaf.spec for key, leaf in leaves.items()})
    if actions.keys() - leaves.keys():
        raise SpecError(
            f"the episode had the actions {sorted(actions)}, this environment takes "
            f"{sorted(leaves)}",
            fix="make the environment that failed",
        )


def _replay(capsule: CrashCapsule, env: VecEnv, lane: int, divergence: Divergence | None) -> Replay:
    arrays = dict(capsule.batch)
    if not any(name.startswith("observation/") for name in arrays):
        arrays |= {f"observation/{key}": row[None] for key, row in capsule.observation.items()}
    groups: dict[str, dict[str, torch.Tensor]] = {"observation": {}, "agent_info": {}, "state": {}}
    for name, array in arrays.items():
        group, _, key = name.partition("/")
        groups[group][key] = torch.from_numpy(np.array(array))
    return Replay(
        env=env,
        lane=lane,
        step=len(capsule.rewards),
        observation=DictTensor(groups["observation"]),
        agent_info=DictTensor(groups["agent_info"]) if groups["agent_info"] else None,
        state=DictTensor(groups["state"]) if groups["state"] else None,
        diverged_at=None if divergence is None else divergence.step,
    )


def _no_failure(capsule: CrashCapsule, reached: Reached) -> WorkerError:
    call = "reset" if capsule.call == "reset" else f"step {len(capsule.rewards)}"
    outcome = f"it ended before {call}" if reached.has_ended else f"{call} went through"
    what = f"the episode did not fail again: {outcome}"
    if reached.divergence is not None:
        what += f", and it went another way {reached.divergence}"
    return WorkerError(
        f"{what}. It had failed with: {capsule.error}",
        where=capsule.where,
        fix="let the environment depend on its seed, options and actions alone; or look for what "
        "else is different here: earlier episodes, files, time, what processes share, the machine",
        traceback_text=capsule.traceback,
        capsule=capsule,
    )
