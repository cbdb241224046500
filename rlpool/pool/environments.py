"""Checks and pickles the environments that a pool is given."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import cloudpickle

from rlpool.batcher_base import check_count
from rlpool.errors import SpecError, WorkerStartupError, compose


def check_environments(envs: Any, processes: Any) -> None:
    """Refuse what is no list of environments, or one of another length.

    Args:
        envs: The environments.
        processes: How many there should be, ``None`` for any number.

    Raises:
        SpecError: Naming the environment, or both numbers.
    """
    if not isinstance(envs, Sequence) or isinstance(envs, str):
        raise SpecError(
            compose(f"env is {envs!r}, not a list", fix="pass one environment per process")
        )
    if processes is not None:
        check_count("processes", processes, 1)
    if processes is not None and len(envs) != processes:
        raise SpecError(
            compose(
                f"env has {len(envs)} environments, processes is {processes}",
                fix="pass one environment per process",
            )
        )
    if not envs:
        raise SpecError(compose("env has no environments", fix="pass at least one"))
    for number, env in enumerate(envs):
        methods = [name for name in ("reset", "step") if not callable(getattr(env, name, None))]
        if isinstance(env, type) or methods:
            kind = f"the class {env.__name__}" if isinstance(env, type) else repr(env)
            lack = "" if isinstance(env, type) else f", which has no {' and no '.join(methods)}"
            raise SpecError(
                compose(
                    f"environment {number} is {kind}{lack}",
                    fix="pass an object with reset() and step(), such as gymnasium.make(...)",
                )
            )


def pickled_environments(envs: Sequence[Any]) -> list[bytes]:
    """The pickle of each environment.

    Raises:
        WorkerStartupError: Naming the environment and the attribute that cannot be pickled.
    """
    return [pickled(f"environment {number}", env) for number, env in enumerate(envs)]


def pickled(what: str, value: Any) -> bytes:
    """The pickle of an object.

    Args:
        what: How an error calls it.
        value: The object.

    Raises:
        WorkerStartupError: Naming the attribute that cannot be pickled, as far as it is found.
    """
    try:
        words: bytes = cloudpickle.dumps(value)
    except Exception as error:
        path, cause = _culprit(value, error)
        where = f" because of its {path}" if path else ""
        raise WorkerStartupError(
            f"{what} cannot be pickled{where}: {type(cause).__name__}: {cause}",
            fix="make what cannot be pickled in its first reset(), which runs in the process, or "
            "leave it out in __getstate__",
        ) from error
    return words


def _culprit(value: Any, error: Exception, depth: int = 4) -> tuple[str, Exception]:
    """The attribute that cannot be pickled, as ``.a.b``, and why; ``""`` if it is the whole."""
    attributes = getattr(value, "__dict__", None)
    if depth and isinstance(attributes, dict):
        for name, inner in attributes.items():
            try:
                cloudpickle.dumps(inner)
            except Exception as cause:
                path, cause = _culprit(inner, cause, depth - 1)
                return f".{name}{path}", cause
    return "", error


def digest_of(words: bytes) -> bytes:
    """A digest that tells whether two pickles are the same."""
    return hashlib.blake2b(words, digest_size=16).digest()
