"""Finds out what a step consists of, by one reset and one call of the agent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlpool.agent_driver import AgentDriver
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.errors import SpecError, Where, compose
from rlpool.failures import agent_error, env_error
from rlpool.slots import NOISE_KEY, StepSpecs, successor_key
from rlpool.specs import TensorSpec, row_specs


def probe(
    env: VecEnv,
    driver: AgentDriver,
    noise: torch.Tensor | None,
    seed: int,
    options: Sequence[Options],
    agent_info: DictTensor | None,
    worker: int,
) -> StepSpecs:
    """Reset all lanes and call the agent once; nothing of it is kept but the keys.

    Args:
        env: The environments; left reset.
        driver: The agent; left with the states after that one call.
        noise: ``[n_lanes, n_noise]`` or ``None``.
        seed: Seed of every lane's reset.
        options: Options of each lane's reset.
        agent_info: ``[n_lanes, ...]`` or ``None``.
        worker: Number of the worker, for errors.

    Raises:
        EnvError, AgentError: If the user's code fails, keys collide, or actions do not fit the
            action space.
    """
    lanes = range(env.n_lanes)
    if env.action_leaves is not None:
        env.declare_actions({key: leaf.spec for key, leaf in env.action_leaves.items()})
    try:
        env.reset_lanes(lanes, [seed] * env.n_lanes, options)
    except LaneError as error:
        where = Where(worker, error.lane, error.lane, 0, seed, options[error.lane])
        raise env_error(error, where) from error.__cause__
    observation = {key: torch.from_numpy(array) for key, array in env.current.items()}
    if noise is not None:
        observation[NOISE_KEY] = noise
    history = _empty_history(env) if driver.agent.require_history() else None
    try:
        driver.start(lanes, agent_info)
        driver.act(observation, agent_info, history)
        driver.commit()  # idle lanes keep a state that is valid
        return _specs(env, driver, 0 if noise is None else noise.shape[1])
    except BaseException as error:
        raise agent_error(error, Where(worker, 0, 0, 0, seed, options[0])) from error


def _specs(env: VecEnv, driver: AgentDriver, n_noise: int) -> StepSpecs:
    outputs = driver.output_specs or {}
    actions = {k: s for k, s in outputs.items() if k == "action" or k.startswith("action/")}
    leaves = env.action_leaves
    if leaves is None:
        env.declare_actions(actions)
    else:
        for key in sorted(leaves.keys() | actions.keys()):
            _refuse_misfit(key, actions.get(key), leaves[key].spec if key in leaves else None)
    return StepSpecs(
        n_lanes=env.n_lanes,
        auto_reset=env.auto_reset,
        observation=row_specs(env.current),
        output=outputs,
        state=row_specs(driver.state),
        n_noise=n_noise,
    )


def _empty_history(env: VecEnv) -> TemporalDictTensor:
    """A history without steps, made before the agent's outputs are known."""
    specs = row_specs(env.current)
    specs.update({successor_key(key): spec for key, spec in list(specs.items())})
    specs.update({key: leaf.spec for key, leaf in (env.action_leaves or {}).items()})
    rows = {
        key: torch.zeros(env.n_lanes, 0, *spec.shape, dtype=spec.torch_dtype)
        for key, spec in specs.items()
    }
    return TemporalDictTensor(rows, torch.zeros(env.n_lanes, dtype=torch.int64))


def _refuse_misfit(key: str, given: TensorSpec | None, wanted: TensorSpec | None) -> None:
    """Refuse actions that do not fit the action space."""
    if given is None or wanted is None:
        raise SpecError(
            f"action {key!r}: the agent gives {given or 'nothing'}, "
            f"the action space has {wanted or 'no such key'}"
        )
    is_float, wants_float = given.dtype.kind == "f", wanted.dtype.kind == "f"
    if given.shape != wanted.shape or is_float != wants_float:
        raise SpecError(
            compose(
                f"action {key!r}: the agent gives {given} per row, the action space wants {wanted}",
                fix="return actions of the action space's shape and kind",
            )
        )
