"""Turns exceptions of the user's code into errors with a place and a fix."""

from __future__ import annotations

import traceback
from typing import Any

from rlpool.envs.vec_env import LaneError
from rlpool.errors import (
    AgentError,
    AgentSpecError,
    EnvError,
    EnvSpecError,
    SpecError,
    UsageError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    described,
)

_debug_advice = "it ran in this process: debug it here (the __cause__ of the error has the frames)"
"""Fix to suggest for exceptions of the user's code, if nothing better is known."""

THE_AGENT = "the agent"
"""Name of an agent in errors, which begin with it or with the name of the called method."""

_SIGNATURES = {
    "create_env": "let it take seed, by this name, and the keys of env_args: def create_env(seed)",
    "create_agent": "let it take the keys of agent_args, and pass all its inputs in agent_args",
    "env_fns": "it is called without arguments: functools.partial(function, ...) binds them",
    "agent.update": "define update(self, info)",
    "agent.initial_state": "define initial_state(self, agent_info, n)",
    "agent.seed": "define seed(self, seed)",
}
"""Fixes for the user's functions whose arguments do not match."""


_SAME_DTYPE = 'use one dtype: network.float(), or network(observation["frame"].to(dtype))'
_ONE_TENSOR = 'compute with its tensors, such as observation["frame"]'
_ADVICE = {
    "Expected state_dict": "send the parameters: batcher.update(policy.state_dict())",
    "no key 'noise'": "set n_noise of the agent's class to the number of random numbers per step",
    "same dtype": _SAME_DTYPE,
    "weight dtype": _SAME_DTYPE,
    "bias type": _SAME_DTYPE,
    "scalar type": _SAME_DTYPE,
    "DictTensor": _ONE_TENSOR,
    "does not require grad": "agents collect without gradients: compute the loss from the result, "
    "with replay_agent(agent, trajectories)",
    "'NoneType' object is not subscriptable": "agent_info is None in a request without it; state "
    "is None where episodes start, unless the agent defines initial_state",
    "loading state_dict": "send the parameters of a module like that of create_agent",
    "parameter_and_buffer_dicts": "give it a dict: dict(agent_info.items())",
    "Module.__init__()": "call super().__init__() first in its __init__",
}
"""Substrings of agents' exceptions, and fixes for them."""


def env_error(error: LaneError, where: Where, **episode: Any) -> EnvError:
    """Make the error for an environment that raised or returned an invalid value.

    Args:
        error: The exception of a ``VecEnv``.
        where: Where it happened.
        **episode: ``options`` and ``actions`` of the episode.
    """
    if isinstance(error, WorkerError):  # made in the process where it happened
        message, fix, text = error.what, error.fix, error.traceback_text
        where = where._replace(worker=error.where.worker)
        episode = episode or {"options": error.options, "actions": error.actions}
        is_spec = isinstance(error, SpecError)
    else:
        cause = error.__cause__ or error
        message, fix = message_and_fix(f"env.{error.call}", cause)
        text, is_spec = text_of(cause), isinstance(cause, SpecError)
    kind = EnvSpecError if is_spec else EnvError
    return kind(message, where=where, fix=fix, traceback_text=text, **episode)


def agent_error(
    error: BaseException, where: Where, who: str = THE_AGENT, **episode: Any
) -> AgentError:
    """Make the error for an agent that raised or returned an invalid value.

    Args:
        error: Its exception.
        where: Where it happened.
        who: Name of the called method or object, for the message.
        **episode: ``options`` and ``actions`` of the episode.
    """
    message, fix = message_and_fix(who, error)
    kind = AgentSpecError if isinstance(error, SpecError) else AgentError
    return kind(message, where=where, fix=fix, traceback_text=text_of(error), **episode)


def advise_to_debug(advice: str) -> None:
    """Set the fix for errors of this process where nothing better is known."""
    global _debug_advice
    _debug_advice = advice


class LaneFailure(EnvError, LaneError):
    """An ``EnvError`` of a manager's lane, as callers of the lane contract expect it."""


class LaneSpecFailure(LaneFailure, EnvSpecError):
    """An ``EnvSpecError`` of a lane."""


class LaneDeath(WorkerDiedError, LaneError):
    """The repeated death of a manager's worker in one lane's call."""

    can_be_repeated = True


class LaneHang(WorkerTimeoutError, LaneError):
    """The same for a worker that hangs."""

    can_be_repeated = True


_OF_LANE: dict[type[WorkerError], Any] = {
    EnvError: LaneFailure,
    EnvSpecError: LaneSpecFailure,
    WorkerDiedError: LaneDeath,
    WorkerTimeoutError: LaneHang,
}


def of_lane(failure: WorkerError, lane: int, call: str, **changes: Any) -> WorkerError:
    """Convert a failure in a manager's worker to one of its lane, whose episode can be abandoned.

    Args:
        failure: The failure.
        lane: The lane.
        call: ``"reset"`` or ``"step"``.
        **changes: ``where``, ``options`` and ``actions`` of the lane.
    """
    kind = _OF_LANE.get(type(failure))
    if kind is None:
        return failure
    error: Any = kind(**{**failure._constructor_arguments(), **changes})
    error.lane, error.call = lane, call
    return error  # type: ignore[no-any-return]


def text_of(error: BaseException) -> str:
    """Return the traceback as text, which can be sent to other processes."""
    return "".join(traceback.format_exception(error))


def message_and_fix(who: str, error: BaseException) -> tuple[str, str]:
    """Return message and fix, one line each."""
    if isinstance(error, SpecError | UsageError):
        return error.what if error.what.startswith(who) else f"{who}: {error.what}", error.fix
    fix = _SIGNATURES.get(who.partition("[")[0], "") if _could_not_be_called(error) else ""
    raised = described(error)
    if "agent" in who:
        fix = next((advice for words, advice in _ADVICE.items() if words in raised), fix)
    if any(kind.__name__ == "UnregisteredEnv" for kind in type(error).__mro__):
        fix = "call gym.register where the module is imported, or gym.make('module:Id')"
    return f"{who} raised {raised}", fix or _debug_advice


def _could_not_be_called(error: BaseException) -> bool:
    """Whether a user's function was called with arguments it does not take, and so never ran."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    are_own = (frame.f_globals.get("__name__", "").startswith("rlpool.") for frame in frames)
    return isinstance(error, TypeError) and all(are_own)
