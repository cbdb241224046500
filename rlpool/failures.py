"""Turns exceptions of the user's code into errors that say where they happened."""

from __future__ import annotations

import traceback

from rlpool.envs.vec_env import LaneError
from rlpool.errors import AgentError, AgentSpecError, EnvError, EnvSpecError, SpecError, Where

DEBUG_HINT = "run it in this process to debug: EpisodeBatcher(..., n_threads=0)"


def env_error(error: LaneError, where: Where) -> EnvError:
    """The error for an environment that raised, or returned what does not fit."""
    cause = error.__cause__ or error
    if isinstance(error, EnvError):  # put together in the process where it happened
        kind = EnvSpecError if isinstance(error, SpecError) else EnvError
        where = where._replace(worker=error.where.worker)
        return kind(error.what, where=where, fix=error.fix, traceback_text=error.traceback_text)
    kind = EnvSpecError if isinstance(cause, SpecError) else EnvError
    what, fix = _what_and_fix(f"env.{error.call}", cause)
    return kind(what, where=where, fix=fix, traceback_text=text_of(cause))


def agent_error(error: BaseException, where: Where, who: str = "the agent") -> AgentError:
    """The error for an agent that raised, or returned what does not fit."""
    kind = AgentSpecError if isinstance(error, SpecError) else AgentError
    what, fix = _what_and_fix(who, error)
    return kind(what, where=where, fix=fix, traceback_text=text_of(error))


def text_of(error: BaseException) -> str:
    """The traceback as text, which crosses any process boundary."""
    return "".join(traceback.format_exception(error))


def described(error: BaseException) -> str:
    """Class and text of an exception in one line, even if it cannot be turned into text."""
    try:
        text = " ".join(str(error).split("\n"))
    except Exception:
        text = "<its text cannot be had>"
    return f"{type(error).__name__}: {text}"


def _what_and_fix(who: str, error: BaseException) -> tuple[str, str]:
    """What happened and what to do, in one line each."""
    if isinstance(error, SpecError):
        what, _, fix = str(error).partition("\n  fix:   ")
        return f"{who}: {what}", fix or DEBUG_HINT
    return f"{who} raised {described(error)}", DEBUG_HINT
