"""Requests of remotes to single environments, as their worker answers them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from rlpool.envs.lanes import LaneError, Options
from rlpool.errors import EnvError, VectorAttributeError, Where, described
from rlpool.manager.messages import Call, Reply
from rlpool.manager.worker_lanes import NOT_RESTORED_FIX, WorkerLanes
from rlpool.memory.storage import Array
from rlpool.record.failures import text_of
from rlpool.record.repeat import batch_of
from rlpool.record.tape import action_row
from rlpool.specs import Declaration


def answer(lanes: WorkerLanes, call: Call, here: Where) -> Reply:
    """Carry out a request to one environment.

    Args:
        lanes: The worker's environments.
        call: The request.
        here: Which worker this is.

    Raises:
        LaneError: If the environment fails in a reset or a step.
    """
    lane, command = call.lane, call.command
    try:
        if command not in ("reset", "describe") and (lost := lanes.why_not_restored([lane])):
            raise EnvError(lost[1], fix=NOT_RESTORED_FIX)
        kind, answers = _ANSWERS[command]
        return Reply(lane, command, cloudpickle.dumps((kind, answers(lanes, lane, call.data))))
    except LaneError:
        raise
    except BaseException as error:
        kind_of_error = VectorAttributeError if isinstance(error, AttributeError) else EnvError
        text = text_of(error)
        failure = kind_of_error(described(error), where=here, traceback_text=text)
        return Reply(lane, command, pickle.dumps(("error", text)), failure)


def _get(lanes: WorkerLanes, lane: int, data: tuple[str]) -> Any:
    return lanes.env.attribute(lane, *data)


def _set(lanes: WorkerLanes, lane: int, attribute: tuple[str, Any]) -> None:
    lanes.env.attribute(lane, "set_wrapper_attr")(*attribute)
    lanes.changed.add(lane)


def _call(lanes: WorkerLanes, lane: int, data: Any) -> Any:
    name, arguments, named = data
    value = lanes.env.attribute(lane, name)
    return value(*arguments, **named) if callable(value) else value


def _describe(lanes: WorkerLanes, lane: int, data: tuple[int, Options]) -> Declaration | None:
    """What observations and infos consist of, which a reset has to show."""
    seed, options = data
    lanes.env.forget()
    with lanes.timed():
        lanes.env.reset_lanes([lane], [seed], [options])
    return lanes.env.declaration


def _reset(lanes: WorkerLanes, lane: int, data: tuple[int, Options]) -> Any:
    seed, options = data
    lanes.note_begin(lane, seed)
    observation, *_ = _result(lanes, lambda: lanes.env.reset_lanes([lane], [seed], [options]))
    for array in lanes.buffers.action.values():
        array[lane] = 0
    return observation


def _step(lanes: WorkerLanes, lane: int, action: Any) -> Any:
    """Step one environment; returns what its remote receives."""
    env, actions = lanes.env, _with_action(lanes, lane, action)
    observation, reward, _, _, info = _result(lanes, lambda: env.step_lanes([lane], actions))
    lanes.control.n_steps[0] += 1
    done = bool(env.current["done"][lane])
    if env.current["truncated"][lane] and not env.current["terminated"][lane]:
        info = {**info, "TimeLimit.truncated": True}
    return observation, reward, done, info


def _result(lanes: WorkerLanes, call: Callable[[], Any]) -> Any:
    """What an environment itself returns to a call."""
    env = lanes.env
    env.keeps_results = True
    try:
        with lanes.timed():
            call()
        return env.results[0]
    finally:
        env.keeps_results, env.results = False, []


def _with_action(lanes: WorkerLanes, lane: int, action: Any) -> Mapping[str, Array]:
    """The actions of all lanes, with a remote's in its lane."""
    env, batch = lanes.env, lanes.buffers.action
    row = action_row(env.action_structure, env.native_action_specs() or {}, action)
    values = {key: array[0, ...] for key, array in row.items()}  # arrays, of objects too
    if env.action_structure is None or not batch:
        return batch_of({lane: values}, env)
    for key, value in values.items():
        batch[key][lane] = value
    return batch


_ANSWERS: dict[str, tuple[str, Callable[[WorkerLanes, int, Any], Any]]] = {
    "get_attr": ("attr", _get),
    "set_attr": ("done", _set),
    "call": ("result", _call),
    "describe": ("declaration", _describe),
    "reset": ("obs", _reset),
    "step": ("transition", _step),
}
"""What carries out a request, and how its reply begins."""
