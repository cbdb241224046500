"""The states of batchers, with which a program that is started again goes on with the same bits.

The lanes of a ``Batcher`` are in the middle of episodes. What these have done so far is on tapes,
from which workers take them over, as the successors of workers that died do: a state holds tapes.

Requests whose results were not handed out are made again, whatever was there of their results. So
tapes are those of where the oldest of them begins, and a state holds the policies of all of them.

A state is made of dicts, lists, tensors, numbers and strings, which ``torch.load`` reads with
``weights_only=True``; policies are what ``update`` was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlpool.batch.requests import Asked, Policy
from rlpool.data.infos import Infos, options_of
from rlpool.data.specs import is_action
from rlpool.data.storage import NDArray
from rlpool.envs.vec_env import Options
from rlpool.errors import SpecError
from rlpool.machine.arguments import refuse_other_states
from rlpool.record.tape import Tape
from rlpool.slots.blocks import StepSpecs
from rlpool.workers.payload import unpacked_copy

State = dict[str, Any]

_FIX = "call reset() instead, or save states right after reset(), before execute()"


FORMAT = 1
"""Of the states of batchers; another number where a state is made of other things."""


def checked_state(state: Any, kind: str, keys: Iterable[str], expected: Mapping[str, Any]) -> State:
    """Refuse what no batcher with these arguments can go on from.

    Args:
        state: What ``state_dict`` returned.
        kind: The kind of batcher.
        keys: What a state of that kind consists of.
        expected: What has to be the same in the state, by argument or property of the batcher.

    Raises:
        SpecError: If it is something else, another batcher's or another version's, lacks a key, or
            cannot be resumed.
    """
    if not isinstance(state, Mapping) or state.get("kind") != kind:
        found = state.get("kind") if isinstance(state, Mapping) else None
        what = f"a state of {found}" if found else f"{type(state).__name__}, no state of a batcher"
        raise SpecError(f"got {what}", fix=f"pass what state_dict() of the same {kind} returned")
    refuse_other_states(state, kind, [*keys, *expected], FORMAT)
    for name, value in expected.items():
        if state[name] != value:
            what = f"{name} was {state[name]} where the state was saved, it is {value} here"
            raise SpecError(what, fix="make the batcher with the same arguments as then")
    if state["why_lost"]:
        raise SpecError(f"the state cannot be resumed: {state['why_lost']}", fix=_FIX)
    return dict(state)


def refuse_other_agents(step: StepSpecs | None, states: Iterable[Mapping[str, Any]]) -> None:
    """Refuse tapes of agents whose states or actions are made of other keys or shapes.

    Args:
        step: What a step consists of here, ``None`` before that is known.
        states: What ``state_of_tapes`` returned.

    Raises:
        SpecError: If there are such tapes; it names both sides.
    """
    if step is None:
        return
    expected = {key: list(spec.shape) for key, spec in step.state.items()}
    actions = {key: list(spec.shape) for key, spec in step.output.items() if is_action(key)}
    for state in states:
        found = {key: list(tensor.shape) for key, tensor in state["state"].items()}
        steps = state["steps"].items()
        done = {key: list(tensor.shape[1:]) for key, tensor in steps if is_action(key)}
        for name, saved, here in [("states", found, expected), ("actions", done, actions)]:
            if saved and saved != here:  # a lane may not have begun yet
                what = f"the agent's {name} were {saved} where the state was saved, here {here}"
                raise SpecError(what, fix="make the batcher with the same agent as then")


def why_lost(step: StepSpecs | None, tapes: Mapping[int, Tape], lanes: Iterable[int]) -> str:
    """Why lanes that are in the middle of episodes cannot be brought there again.

    Args:
        step: What a step consists of.
        tapes: Lane to the tape of its episode.
        lanes: The lanes.

    Returns:
        The reason, empty if they can.
    """
    if why := why_unseeded(step):
        return why
    for lane in lanes:
        if step is not None and step.wants_history:
            return "the agent requires a history, and earlier observations are not kept"
        if step is not None and step.resets_together:
            return f"the environments cannot be reset one by one (seeding={step.seeding!r})"
        if lane not in tapes:
            return f"what lane {lane} has done was not recorded"
        if tapes[lane].why_lost:
            return f"lane {lane}: {tapes[lane].why_lost}"
    return ""


def why_unseeded(step: StepSpecs | None) -> str:
    """Why not even new episodes would be the same, empty if they are."""
    if step is None or step.seeding != "stream":
        return ""
    return "the environments cannot be seeded after their construction (seeding='stream')"


def state_of_pending(asked: Sequence[Asked], policy: Policy) -> State:
    """Requests that are to be made again, and all policies up to the last update; copies.

    Args:
        asked: The requests, in order.
        policy: That of the last update.
    """
    if not asked:
        return {}  # the agents' parameters are not part of it
    requests = [
        {"policy_version": each.policy.version, **state_of_infos(each.infos), **each.details}
        for each in asked
    ]
    packed = dict([*(each.policy for each in asked), policy])
    policies = {n: unpacked_copy(each) for n, each in packed.items() if each is not None}
    return {"pending": requests, "policies": policies}


def pending_of_state(
    state: Mapping[str, Any], details: Iterable[str], updated: Callable[[Any], Policy]
) -> tuple[list[Asked], Policy]:
    """The inverse of ``state_of_pending``; copies.

    Args:
        state: A state with what it returned.
        details: What it says of each request besides.
        updated: Makes the policy of agents that are updated with something.
    """
    policies = {n: Policy(n, updated(info).packed) for n, info in state["policies"].items()}

    def policy(version: int) -> Policy:
        return policies.get(version, Policy(version))

    asked = [
        Asked(policy(each["policy_version"]), infos_of_state(each), {k: each[k] for k in details})
        for each in state["pending"]
    ]
    return asked, policy(state["policy_version"])


def state_of_infos(infos: Infos) -> State:
    """``agent_info`` and ``env_info``; copies."""
    return dict(zip(("agent_info", "env_info"), map(_tensors, infos), strict=True))


def infos_of_state(state: Mapping[str, Any]) -> Infos:
    """The inverse of ``state_of_infos``; copies."""
    return _arrays(state["agent_info"]), _arrays(state["env_info"])


def state_of_tapes(tapes: Mapping[int, Tape]) -> list[State]:
    """Tapes by lane, as far as a worker does not know better; copies."""
    return [
        {
            "lane": lane,
            "n_restarts": tape.n_restarts,
            "options": tape.options,
            "steps": _tensors(tape.columns),
            "observation": _tensors(tape.observation),
            "state": _tensors(tape.state),
        }
        for lane, tape in tapes.items()
    ]


def tapes_of_state(
    states: Iterable[Mapping[str, Any]], env_info: Mapping[str, NDArray]
) -> dict[int, Tape]:
    """The inverse of ``state_of_tapes``; copies.

    Args:
        states: What it returned; before version 0.4 without the options of episodes.
        env_info: Of all lanes, which said what these were.
    """

    def before(lane: int) -> Options:
        return options_of(env_info, lane) if env_info else None

    return {
        state["lane"]: Tape(
            options=state["options"] if "options" in state else before(state["lane"]),
            n_restarts=state["n_restarts"],
            chunks=[_arrays(state["steps"])] if state["steps"] else [],
            observation=_arrays(state["observation"]),
            state=_arrays(state["state"]),
        )
        for state in states
    }


def _tensors(arrays: Mapping[str, NDArray]) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray]:
    return {key: np.array(tensor.cpu().numpy()) for key, tensor in tensors.items()}
