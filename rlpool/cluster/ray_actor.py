"""What the caller knows of the actors of nodes, and the errors that say how they failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlpool.errors import Where, WorkerDiedError, WorkerStartupError


@dataclass(eq=False)
class Actor:
    """An actor, whether or not it is there at the moment.

    Attributes:
        handle: Ray's.
        name: What errors call its node; empty before it has joined.
        home: Id of the node that it was made for; empty if Ray chooses one.
        strategy: Where Ray may run it.
        node_id: Id of the node that it was last seen on.
        is_up: Whether it has joined and not left.
        retry_s: When to ask next whether it is there, if nobody has been asked.
        is_asked: Whether ``look`` was not answered yet.
    """

    handle: Any
    strategy: Any
    home: str = ""
    name: str = ""
    node_id: str = ""
    is_up: bool = False
    retry_s: float | None = None
    is_asked: bool = False


def not_created(error: Exception) -> WorkerStartupError:
    """The error for an actor that Ray could not create."""
    what = f"a node's process could not be created ({first_line(error)})"
    fix = "install rlpool and what it needs on every machine, or send it (runtime_env)"
    return WorkerStartupError(what, fix=fix, traceback_text=str(error))


def is_gone(actor: Actor, error: Exception, *, was_up: bool) -> WorkerDiedError:
    """The error for an actor that is gone."""
    what = f"node {actor.name} is gone" if was_up else "the process of a node died in its start"
    return WorkerDiedError(
        f"{what} ({type(error).__name__})",
        exitcode=None,
        where=Where(node=actor.name or None),
        fix="look at the log of its machine (ray logs)",
        traceback_text=str(error),
    )


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
