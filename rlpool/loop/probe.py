"""Determines the keys of a step by one reset and one call of the agent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import TensorSpec, action_fix, is_action, row_specs
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.errors import SpecError
from rlpool.loop.agent_calls import AgentCalls, History
from rlpool.loop.agent_driver import AgentDriver, AgentFailure
from rlpool.slots.blocks import NOISE_KEY, StepSpecs, successor_key


def probe(
    env: VecEnv, calls: AgentCalls, seeds: Sequence[int], options: Sequence[Options], resets: bool
) -> StepSpecs:
    """Reset all lanes and call the agent, to learn keys, shapes and dtypes.

    Args:
        env: The environments; they are reset afterwards.
        calls: The agent, which is shown its ``infos``. It has the states after the call.
        seeds: Seed of each lane's reset.
        options: Options of each lane's reset.
        resets: Whether to reset all lanes. If not, one is reset, and only if nothing else shows
            what it observes; the agent is shown what is there.

    Raises:
        LaneError: If the user's code fails, or the actions do not fit the action space.
        SpecError: If keys collide.
    """
    if resets:
        env.reset_all_next()
        env.reset_lanes(range(env.n_lanes), seeds, options)
    else:
        if env.columns is None:
            env.reset_lanes([0], seeds[:1], options[:1])
        env.begin_lanes(range(env.n_lanes))
    leaves = env.action_leaves  # some are only known after a reset
    if leaves is not None:
        env.declare_actions({key: leaf.spec for key, leaf in leaves.items()})
    driver, noise = calls.driver, calls.noise
    wants_history = bool(driver.agent.require_history())
    _call_agent(env, calls, wants_history)
    outputs = driver.output_specs or {}
    _match_actions(env, driver, outputs)
    steps = StepSpecs(
        n_lanes=env.n_lanes,
        auto_reset=env.auto_reset,
        observation=row_specs(env.current),
        output=outputs,
        state=row_specs(driver.state),
        n_noise=0 if noise is None else noise.tensor.shape[1],
        wants_history=wants_history,
        seeding=env.seeding,
    )
    calls.history = History(steps) if wants_history else None
    return steps


def _call_agent(env: VecEnv, calls: AgentCalls, wants_history: bool) -> None:
    """Let the agent show its outputs and states."""
    driver, lanes = calls.driver, range(env.n_lanes)
    observation = dict(env.current)
    if calls.noise is not None:
        observation[NOISE_KEY] = calls.noise.tensor.numpy()
    known = dict(env.current)

    def no_history(rows: NDArray, _: Sequence[int]) -> TemporalDictTensor:
        return _no_history({key: array[rows] for key, array in known.items()})

    for _ in range(1 + wants_history):  # the second history includes the agent's keys
        driver.forget()
        driver.start(lanes, calls.infos)
        history = no_history if wants_history else None
        known |= driver.act(lanes, observation, calls.infos, history) | driver.state
    driver.commit()  # idle lanes need a valid state


def _match_actions(env: VecEnv, driver: AgentDriver, outputs: Mapping[str, TensorSpec]) -> None:
    """Let environments and agent have the same actions, whose dtypes may be converted."""
    actions = {key: spec for key, spec in outputs.items() if is_action(key)}
    if env.action_leaves is None:
        env.declare_actions(actions)
        return
    wanted = {key: leaf.spec for key, leaf in env.action_leaves.items()}
    for key in sorted(wanted.keys() | actions.keys()):
        mine, theirs = actions.get(key), wanted.get(key)
        kinds = {spec and (spec.shape, spec.dtype.kind == "f") for spec in (mine, theirs)}
        if len(kinds) > 1:
            problem = SpecError(
                f"action {key!r}: the agent gives {mine or 'nothing'} per row, "
                f"the action space wants {theirs or 'no such key'}",
                fix=action_fix(mine, theirs),
            )
            raise AgentFailure([0], "agent") from problem
    driver.converted_actions = {
        key: spec.dtype for key, spec in wanted.items() if spec.dtype != actions[key].dtype
    }


def _no_history(current: Mapping[str, NDArray]) -> TemporalDictTensor:
    """A history without steps."""
    known = {key: torch.from_numpy(array)[:, None][:, :0] for key, array in current.items()}
    known |= {successor_key(key): tensor for key, tensor in known.items()}
    n_lanes = len(current["reward"])
    lengths = torch.zeros(n_lanes, dtype=torch.int64, device="cpu")
    # The agent's own keys are not known yet.
    tensors = defaultdict(lambda: torch.zeros(n_lanes, 0, device="cpu"), known)
    return TemporalDictTensor._wrap(tensors, lengths, DictTensor())
