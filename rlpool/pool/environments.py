"""Checks and pickles the environments that a pool is given."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from rlpool.batch.batcher_base import check_count
from rlpool.errors import SpecError
from rlpool.machine.pickling import pickled

_HOW_TO_PICKLE = (
    "make it in the first reset() or call, which runs in the process, or leave it out in "
    "__getstate__"
)


def check_environments(envs: Any, processes: Any) -> None:
    """Refuse what is no list of environments, or one of another length.

    Args:
        envs: The environments.
        processes: How many there should be, ``None`` for any number.

    Raises:
        SpecError: Naming the environment, or both numbers.
    """
    if not isinstance(envs, Sequence) or isinstance(envs, str):
        raise SpecError(f"env is {envs!r}, not a list", fix="pass one environment per process")
    if processes is not None:
        check_count("processes", processes, 1)
    if processes is not None and len(envs) != processes:
        raise SpecError(
            f"env has {len(envs)} environments, processes is {processes}",
            fix="pass one environment per process",
        )
    if not envs:
        raise SpecError("env has no environments", fix="pass at least one")
    for number, env in enumerate(envs):
        methods = [name for name in ("reset", "step") if not callable(getattr(env, name, None))]
        if isinstance(env, type) or methods:
            kind = f"the class {env.__name__}" if isinstance(env, type) else repr(env)
            lack = "" if isinstance(env, type) else f", which has no {' and no '.join(methods)}"
            raise SpecError(
                f"environment {number} is {kind}{lack}",
                fix="pass an object with reset() and step(), such as gymnasium.make(...)",
            )


def pickled_environments(envs: Sequence[Any]) -> list[bytes]:
    """The pickle of each environment.

    Raises:
        WorkerStartupError: Naming the environment and the attribute that cannot be pickled.
    """
    return [
        pickled({f"env[{number}]": env}, env, fix=_HOW_TO_PICKLE, what=f"environment {number}")
        for number, env in enumerate(envs)
    ]


def pickled_policy(policy: Any) -> bytes:
    """The pickle of the policy.

    Raises:
        WorkerStartupError: Naming the attribute that cannot be pickled.
    """
    return pickled({"policy": policy}, policy, fix=_HOW_TO_PICKLE)


def digest_of(words: bytes) -> bytes:
    """A digest that tells whether two pickles are the same."""
    return hashlib.blake2b(words, digest_size=16).digest()
