"""Finds out what a step consists of, by one reset and one call of the agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.errors import SpecError
from rlpool.loop.agent_driver import AgentDriver, AgentFailure
from rlpool.loop.agent_inputs import History
from rlpool.memory.storage import Array
from rlpool.record.tape import is_action
from rlpool.slots.blocks import NOISE_KEY, StepSpecs
from rlpool.specs import TensorSpec, row_specs


def probe(
    env: VecEnv,
    driver: AgentDriver,
    seed: int,
    options: Sequence[Options],
    agent_info: DictTensor | None,
    noise: torch.Tensor | None,
) -> StepSpecs:
    """Reset all lanes and call the agent once; nothing of it is kept but the keys.

    Args:
        env: The environments; left reset.
        driver: The agent; left with the states after that one call.
        seed: Seed of every lane's reset.
        options: Options of each lane's reset.
        agent_info: ``[n_lanes, ...]`` or ``None``.
        noise: ``[n_lanes, n_noise]`` or ``None``.

    Raises:
        LaneError: If the user's code fails, or actions do not fit the action space.
        SpecError: If keys collide.
    """
    driver.forget()
    wants_history = driver.agent.require_history()
    env.reset_lanes(range(env.n_lanes), [seed] * env.n_lanes, options)
    actions = {key: leaf.spec for key, leaf in (env.action_leaves or {}).items()}
    if env.action_leaves is not None:
        env.declare_actions(actions)
    observation = {key: torch.from_numpy(array) for key, array in env.current.items()}
    if noise is not None:
        observation[NOISE_KEY] = noise
    history = None
    driver.start(range(env.n_lanes), agent_info)
    if wants_history:
        # Once to learn the outputs, and once more with a history that has them.
        driver.act(observation, agent_info, _empty_history(env, actions, {}))
        history = _empty_history(env, driver.output_specs or {}, dict(driver.state))
        driver.forget()
        driver.start(range(env.n_lanes), agent_info)
    driver.act(observation, agent_info, history)
    driver.commit()  # idle lanes keep a state that is valid
    _declare_actions(env, driver)
    return StepSpecs(
        n_lanes=env.n_lanes,
        auto_reset=env.auto_reset,
        observation=row_specs(env.current),
        output=driver.output_specs or {},
        state=row_specs(driver.state),
        n_noise=0 if noise is None else noise.shape[1],
        wants_history=bool(wants_history),
    )


def _declare_actions(env: VecEnv, driver: AgentDriver) -> None:
    """Hold the agent's actions against the action space; without one, they define it."""
    actions = {key: spec for key, spec in (driver.output_specs or {}).items() if is_action(key)}
    leaves = env.action_leaves
    if leaves is None:
        env.declare_actions(actions)
        return
    for key in sorted(leaves.keys() | actions.keys()):
        given, wanted = actions.get(key), leaves[key].spec if key in leaves else None
        if (
            given is None
            or wanted is None
            or given.shape != wanted.shape
            or (given.dtype.kind == "f") != (wanted.dtype.kind == "f")
        ):
            problem = SpecError(
                f"action {key!r}: the agent gives {given or 'nothing'} per row, "
                f"the action space wants {wanted or 'no such key'}",
                fix="return actions of the action space's shape and kind",
            )
            raise AgentFailure(0, "agent") from problem


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


def _empty_history(
    env: VecEnv, output: Mapping[str, TensorSpec], state: Mapping[str, Array]
) -> TemporalDictTensor:
    """A history without steps, with as many of the agent's own keys as are known."""
    step = StepSpecs(env.n_lanes, False, row_specs(env.current), output, row_specs(state))
    history = History(step).view({**env.current, **state})
    return TemporalDictTensor._wrap(
        _NoSteps(dict(history.items()), env.n_lanes), history.lengths, DictTensor()
    )
