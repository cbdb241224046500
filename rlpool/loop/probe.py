"""Finds out what a step consists of, by one reset and one call of the agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.errors import SpecError, Where
from rlpool.loop.agent_driver import AgentDriver
from rlpool.loop.crash_scene import CrashScene
from rlpool.record.failures import agent_error, env_error
from rlpool.record.tape import is_action
from rlpool.slots.blocks import NOISE_KEY, StepSpecs, successor_key
from rlpool.specs import TensorSpec, row_specs


def probe(
    env: VecEnv,
    driver: AgentDriver,
    scene: CrashScene,
    worker: int,
    seed: int,
    options: Sequence[Options],
    agent_info: DictTensor | None,
    noise: torch.Tensor | None,
) -> StepSpecs:
    """Reset all lanes and call the agent once; nothing of it is kept but the keys.

    After a failure not even those: another probe, with other infos, may follow.

    Args:
        env: The environments; left reset.
        driver: The agent; left with the states after that one call.
        scene: Makes the capsules of failures.
        worker: Number of the worker, for errors.
        seed: Seed of every lane's reset.
        options: Options of each lane's reset.
        agent_info: ``[n_lanes, ...]`` or ``None``.
        noise: ``[n_lanes, n_noise]`` or ``None``.

    Raises:
        EnvError, AgentError: If the user's code fails, or actions do not fit the action space.
        SpecError: If keys collide.
    """
    driver.forget()
    infos = {} if agent_info is None else {k: tensor.numpy() for k, tensor in agent_info.items()}
    try:
        try:
            env.reset_lanes(range(env.n_lanes), [seed] * env.n_lanes, options)
        except LaneError as error:
            lane = error.lane
            where = Where(worker, lane, lane, 0, seed, options[lane])
            capsule = scene.first("reset", where, infos, has_begun=False)
            raise env_error(error, where, capsule) from error.__cause__
        try:
            _call(env, driver, agent_info, noise)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            where = Where(worker, 0, 0, 0, seed, options[0])
            capsule = scene.first("agent", where, infos, has_begun=True)
            raise agent_error(error, where, capsule=capsule) from error
        return StepSpecs(
            n_lanes=env.n_lanes,
            auto_reset=env.auto_reset,
            observation=row_specs(env.current),
            output=driver.output_specs or {},
            state=row_specs(driver.state),
            n_noise=0 if noise is None else noise.shape[1],
            wants_history=bool(driver.agent.require_history()),
        )
    except BaseException:
        env.forget()
        raise


def _call(
    env: VecEnv, driver: AgentDriver, agent_info: DictTensor | None, noise: torch.Tensor | None
) -> None:
    """Call the agent on environments that were just reset, and declare its actions."""
    if env.action_leaves is not None:
        env.declare_actions({key: leaf.spec for key, leaf in env.action_leaves.items()})
    observation = {key: torch.from_numpy(array) for key, array in env.current.items()}
    if noise is not None:
        observation[NOISE_KEY] = noise
    driver.start(range(env.n_lanes), agent_info)
    if driver.agent.require_history():
        # Once to learn the outputs, and once more with a history that has them.
        driver.act(observation, agent_info, empty_history(env, {}))
        outputs = {**(driver.output_specs or {}), **row_specs(driver.state)}
        driver.forget()
        driver.start(range(env.n_lanes), agent_info)
        driver.act(observation, agent_info, empty_history(env, outputs))
    else:
        driver.act(observation, agent_info, None)
    driver.commit()  # idle lanes keep a state that is valid
    _declare_actions(env, driver)


def _declare_actions(env: VecEnv, driver: AgentDriver) -> None:
    """Hold the agent's actions against the action space; without one, they define it."""
    outputs = driver.output_specs or {}
    actions = {k: s for k, s in outputs.items() if is_action(k)}
    leaves = env.action_leaves
    if leaves is None:
        env.declare_actions(actions)
        return
    for key in sorted(leaves.keys() | actions.keys()):
        refuse_misfit(key, actions.get(key), leaves[key].spec if key in leaves else None)


class _NoSteps(dict[str, torch.Tensor]):
    """Keys of no steps at all; an agent may ask for outputs and states of its own among them.

    Args:
        known: Keys whose shapes are known.
        n_lanes: Rows of the others, which are taken for numbers.
    """

    def __init__(self, known: dict[str, torch.Tensor], n_lanes: int) -> None:
        super().__init__(known)
        self._n_lanes = n_lanes

    def __missing__(self, key: str) -> torch.Tensor:
        return torch.zeros(self._n_lanes, 0, device="cpu")


def empty_history(env: VecEnv, own: Mapping[str, TensorSpec]) -> TemporalDictTensor:
    """A history without steps, with as many of the agent's own keys as are known."""
    specs = row_specs(env.current)
    specs.update({successor_key(key): spec for key, spec in list(specs.items())})
    specs.update({key: leaf.spec for key, leaf in (env.action_leaves or {}).items()})
    specs.update(own)
    rows = {
        key: torch.zeros(env.n_lanes, 0, *spec.shape, dtype=spec.torch_dtype, device="cpu")
        for key, spec in specs.items()
    }
    lengths = torch.zeros(env.n_lanes, dtype=torch.int64, device="cpu")
    return TemporalDictTensor._wrap(_NoSteps(rows, env.n_lanes), lengths, DictTensor())


def refuse_misfit(key: str, given: TensorSpec | None, wanted: TensorSpec | None) -> None:
    """Refuse actions that do not fit the action space."""
    if given is None or wanted is None:
        raise SpecError(
            f"action {key!r}: the agent gives {given or 'nothing'}, "
            f"the action space has {wanted or 'no such key'}"
        )
    is_float, wants_float = given.dtype.kind == "f", wanted.dtype.kind == "f"
    if given.shape != wanted.shape or is_float != wants_float:
        raise SpecError(
            f"action {key!r}: the agent gives {given} per row, the action space wants {wanted}",
            fix="return actions of the action space's shape and kind",
        )
