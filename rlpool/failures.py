"""Turns exceptions of the user's code into errors that say where they happened."""

from __future__ import annotations

import traceback

from rlpool.envs.vec_env import LaneError
from rlpool.errors import AgentError, AgentSpecError, EnvError, EnvSpecError, SpecError, Where

DEBUG_HINT = "run it in this process to debug: EpisodeBatcher(..., n_threads=0)"


def env_error(error: LaneError, where: Where) -> EnvError:
    """The error for an environment that raised, or returned what does not fit."""
    cause = error.__cause__ or error
    kind = EnvSpecError if isinstance(cause, SpecError) else EnvError
    return kind(
        _what(f"env.{error.call}", cause),
        where=where,
        fix=DEBUG_HINT,
        traceback_text=text_of(cause),
    )


def agent_error(error: BaseException, where: Where, who: str = "the agent") -> AgentError:
    """The error for an agent that raised, or returned what does not fit."""
    kind = AgentSpecError if isinstance(error, SpecError) else AgentError
    return kind(_what(who, error), where=where, fix=DEBUG_HINT, traceback_text=text_of(error))


def text_of(error: BaseException) -> str:
    """The traceback as text, which crosses any process boundary."""
    return "".join(traceback.format_exception(error))


def _what(who: str, error: BaseException) -> str:
    if isinstance(error, SpecError):
        return f"{who}: {error}"
    return f"{who} raised {type(error).__name__}: {error}"
