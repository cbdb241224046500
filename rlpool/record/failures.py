"""Turns exceptions of the user's code into errors that say where it failed."""

from __future__ import annotations

import logging
import re
import struct
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec

from rlpool.envs.vec_env import LaneError
from rlpool.errors import (
    AgentError,
    AgentSpecError,
    EnvError,
    EnvSpecError,
    Reason,
    SpecError,
    UsageError,
    Where,
    WorkerError,
    described,
)
from rlpool.record.crash_capsule import CrashCapsule

_P = ParamSpec("_P")
_LOG = logging.getLogger("rlpool")

DEBUG_HINT = "run it in this process to debug"
"""The advice for what failed in a worker process of a batcher, which its worker completes."""
LOCAL_HINT = "it ran in this process: debug it here (the __cause__ of the error has the frames)"
"""The advice where the user's code failed in the caller's process: its exception is the cause."""
ENV_HINT = "step it in this process to debug: GymEnv([env_fn()])"
"""The advice for environments of a ``ParallelEnvManager``."""

THE_AGENT = "the agent"
"""What errors call an agent: they begin with it, or with the method that was called."""

_MISSES_OPTIONS = re.compile(
    r"\b(options|env_info|task)\b|'NoneType' object is not (subscriptable|iterable|a mapping)"
)
_OPTION = re.compile(r"""\b(?:options|env_info)(?:\[|\.get\()["'](\w+)["']|\b(task)\b""")
_SEED = re.compile(r"\bseed", re.IGNORECASE)
_REFUSES_SEED = (ValueError, TypeError, OverflowError, AssertionError, struct.error)
_NOT_HANDED_ON = re.compile(r"unexpected keyword argument '(seed|options)'")

_MISFIT = re.compile(r"\(\) (missing|takes|got)\b|takes no (keyword )?arguments")
_SIGNATURES = {
    "create_env": "let it take seed, by this name, and the keys of env_args: def create_env(seed)",
    "create_agent": "let it take the keys of agent_args, and pass all that it needs in agent_args",
    "env_fns": "it is called without arguments: functools.partial(function, ...) binds them",
    "agent.update": "define update(self, info)",
    "agent.initial_state": "define initial_state(self, agent_info, n)",
    "agent.seed": "define seed(self, seed)",
}
"""What to do about functions of the user that cannot be called as they are."""

_ROWS = "env_info={{{}}}, one row per episode"
"""How options are given to a batcher, with a place for them."""


def env_error(
    error: LaneError,
    where: Where,
    capsule: CrashCapsule | None = None,
    options: Mapping[str, Any] | None = None,
    options_as: str = _ROWS,
) -> EnvError:
    """The error for an environment that raised or returned what does not fit.

    Args:
        error: What a ``VecEnv`` said.
        where: Where it happened.
        capsule: What else is known about the episode.
        options: What a reset got, if ``where`` does not say it: not all options can travel.
        options_as: How the caller gives options, with a place for them.
    """
    told, hint, reason = None, DEBUG_HINT, None
    if isinstance(error, EnvError):  # put together in the process where it happened
        where = where._replace(worker=error.where.worker)
        what, fix, hint = error.what, error.own_fix, error.hint
        text, told, reason = error.traceback_text, error.capsule, error.reason
        is_spec = isinstance(error, SpecError)
    else:
        cause = error.__cause__ or error
        what, fix = what_and_fix(f"env.{error.call}", cause)
        if error.call == "reset" and not fix:
            given = dict(where.env_info or options or {})
            given.pop("seed", None)  # it replaces the episode's seed, see OneEnv
            fix, reason = reset_advice(cause, given, options_as)
        text, is_spec = text_of(cause), isinstance(cause, SpecError)
    if capsule is not None:
        place = capsule.where._replace(worker=where.worker)
        told = replace(capsule.told(what, text), where=place)
    kind = EnvSpecError if is_spec else EnvError
    return kind(
        what,
        where=where,
        fix=fix,
        hint=hint,
        traceback_text=text,
        capsule=told,
        reason=reason,
    )


def agent_error(
    error: BaseException,
    where: Where,
    who: str = THE_AGENT,
    capsule: CrashCapsule | None = None,
) -> AgentError:
    """The error for an agent that raised or returned what does not fit.

    Args:
        error: What it raised.
        where: Where it happened.
        who: What of the agent was called, for the message.
        capsule: What else is known about the episode.
    """
    what, fix = what_and_fix(who, error)
    has_agent_info = capsule is None or bool(capsule.agent_info)
    advice, reason = _agent_advice(error, has_agent_info=has_agent_info)
    text = text_of(error)
    told = None if capsule is None else capsule.told(what, text)
    kind = AgentSpecError if isinstance(error, SpecError) else AgentError
    return kind(
        what,
        where=where,
        fix=advice or fix,
        hint=DEBUG_HINT,
        traceback_text=text,
        capsule=told,
        reason=reason,
    )


def worker_error(error: BaseException, where: Where) -> WorkerError:
    """The error for a worker that fails by itself, not by the user's code."""
    what, text = f"the worker failed with {described(error)}", text_of(error)
    return WorkerError(what, where=where, traceback_text=text)


def attempted(make: Callable[_P, CrashCapsule]) -> Callable[_P, CrashCapsule | None]:
    """Let a function that makes a capsule log a warning if it fails itself."""

    @wraps(make)
    def attempt(*args: _P.args, **kwargs: _P.kwargs) -> CrashCapsule | None:
        try:
            return make(*args, **kwargs)
        except Exception as error:  # it must not hide the user's failure
            _LOG.warning("a failure has no crash capsule: %s", described(error))
            return None

    return attempt


def reset_advice(
    error: BaseException, options: Mapping[str, Any] | None, options_as: str = _ROWS
) -> tuple[str, Reason | None]:
    """What to do about a ``reset`` that lacks an option or refuses its seed, and why it failed.

    Args:
        error: What it raised.
        options: What it got.
        options_as: How the caller gives options, with a place for them.
    """
    told = _told(error)
    if isinstance(error, TypeError) and (lacks := _NOT_HANDED_ON.search(told)):
        return f"let every reset() that is called on the way take {lacks[1]}, and hand it on", None
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    is_missing = key not in options if options and isinstance(key, str) else not options
    if is_missing and _MISSES_OPTIONS.search(told):
        found = _OPTION.search(told)
        name = found[1] or found[2] if found else key
        is_name = isinstance(name, str) and name.isidentifier()
        if not (is_name and name in (options or {})):
            each = f'"{name}": ...' if is_name else "..."
            fix = f"if it needs options, pass {options_as.format(each)}"
            return fix, Reason.LACKS_OPTIONS
    if isinstance(error, _REFUSES_SEED) and _SEED.search(told):
        fix = "let reset(seed=...) take every int from 0 to 2**31 - 1: that is what rlpool gives"
        return fix, None
    return "", None


def _agent_advice(error: BaseException, *, has_agent_info: bool) -> tuple[str, Reason | None]:
    """What to do about an agent that lacks an input it has not requested, and why it failed."""
    told = _told(error)
    is_noise = "no key 'noise'" in told or told.startswith("KeyError: 'noise'")
    if isinstance(error, KeyError) and is_noise:
        return "set n_noise of the agent's class to how many random numbers it needs per step", None
    if not has_agent_info and "agent_info" in told:
        fix = "if the agent needs it, pass agent_info={...}, one row per episode"
        return fix, Reason.LACKS_AGENT_INFO
    return "", None


def _told(error: BaseException) -> str:
    """What an exception says, and the line that raised it, which says more for ``None[0]``."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{described(error)} {frames[-1].line if frames else ''}"


def text_of(error: BaseException) -> str:
    """The traceback as text, which crosses any process boundary."""
    return "".join(traceback.format_exception(error))


def what_and_fix(who: str, error: BaseException) -> tuple[str, str]:
    """What happened in one line, and what to do about it, empty if nothing is known."""
    if isinstance(error, SpecError | UsageError):
        return f"{who}: {error.what}", error.fix
    fix = _SIGNATURES.get(who.partition("[")[0], "") if _could_not_be_called(error) else ""
    if who == "agent.update" and "Expected state_dict" in described(error):
        fix = "send the parameters: batcher.update(policy.state_dict())"
    return f"{who} raised {described(error)}", fix


def _could_not_be_called(error: BaseException) -> bool:
    """Whether a function of the user does not take what it was called with: none of it ran."""
    if not isinstance(error, TypeError) or not _MISFIT.search(described(error)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return all(frame.f_globals.get("__name__", "").startswith("rlpool.") for frame in frames)
