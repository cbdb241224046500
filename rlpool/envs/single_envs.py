"""Checks of single environments, their tasks, and wrappers that keep state across episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium

from rlpool.envs.vec_env import VecEnv
from rlpool.errors import SpecError

_A_LIST = (
    "pass a list of environments, objects with reset() and step(), such as "
    "GymEnv([gymnasium.make(...) for _ in range(n)], seed); use VectorGymEnv(vector_env, seed) for "
    "a vector environment, and PettingZooEnv for those of PettingZoo"
)
_OF_AGENTS = (
    "use rlpool.integrations.pettingzoo: PettingZooEnv for a list of PettingZoo environments, or "
    "JointEnv(env) to convert a single one to Gymnasium"
)


def checked_environments(envs: Any) -> list[Any]:
    """Check a list of environments; returns a copy."""
    is_list = isinstance(envs, Iterable) and not isinstance(envs, str) and not is_environment(envs)
    checked = list(envs) if is_list else []
    for number, env in enumerate(checked):
        check_is_env(f"environment {number} of a GymEnv is", env, _A_LIST)
    if not checked:
        got = "no environments" if is_list else f"{envs!r:.60}, not a list of environments"
        raise SpecError(f"GymEnv got {got}", fix=_A_LIST)
    check_all_differ(checked, _A_LIST)
    return checked


def check_all_differ(envs: Sequence[Any], fix: str) -> None:
    """Refuse a list with the same environment twice: two lanes would step the same episode."""
    for number, env in enumerate(envs):
        first = next(k for k, other in enumerate(envs) if other is env)
        if first < number:
            raise SpecError(f"environments {first} and {number} are the same object", fix=fix)


def is_environment(value: Any) -> bool:
    """Whether a value is a single environment of any protocol except PettingZoo's."""
    # Batches of environments also have both methods; in other libraries also step_async.
    is_batch = isinstance(value, VecEnv | gymnasium.vector.VectorEnv)
    is_batch = is_batch or (hasattr(value, "num_envs") and hasattr(value, "step_async"))
    return _has_methods(value) and not is_batch and not is_of_agents(value)


def check_is_env(beginning: str, value: Any, fix: str) -> None:
    """Raise unless a value is a single environment.

    Args:
        beginning: Beginning of the error, such as ``"env is"``.
        value: The value.
        fix: Advice of the error.

    Raises:
        SpecError: If it is not one.
    """
    if not is_environment(value):
        fix = _OF_AGENTS if is_of_agents(value) else fix
        raise SpecError(f"{beginning} {value!r:.60}, not a single environment", fix=fix)


def is_of_agents(value: Any) -> bool:
    """Whether a value is an environment of PettingZoo: its spaces are methods of an agent."""
    return _has_methods(value) and callable(getattr(value, "observation_space", None))


def _has_methods(value: Any) -> bool:
    methods = (getattr(value, name, None) for name in ("reset", "step"))
    return not isinstance(value, type) and all(map(callable, methods))


def all_tasks(attribute: Callable[[str], Any]) -> list[Any] | None:
    """List the tasks of an environment.

    Args:
        attribute: Returns an attribute of the environment by name, ``None`` if it is missing.

    Returns:
        The result of ``get_all_task_idx()``, or the numbers below ``n_tasks``; ``None`` if the
        environment has neither.
    """
    listing = attribute("get_all_task_idx")
    tasks = listing() if callable(listing) else None
    if tasks is not None:
        return list(tasks)
    n_tasks = attribute("n_tasks")
    return None if n_tasks is None else list(range(int(n_tasks)))


def state_keepers(env: Any) -> dict[str, str]:
    """Find wrappers that are known to carry state from one episode to the next.

    Returns:
        Fixes by name of the wrapper, outermost first.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()  # an environment may refer back to its wrapper
    while id(env) not in seen:
        seen.add(id(env))
        kind = type(env)
        if hasattr(kind, "update_running_mean") and env.update_running_mean:  # Gymnasium's
            found[kind.__qualname__] = "set update_running_mean to False, or normalise in the agent"
        elif any(each.__name__.startswith("EpisodicLife") for each in kind.__mro__):
            found[kind.__qualname__] = "omit it, so that episodes are whole games"
        held = getattr(env, "__dict__", {})
        env = held.get("inner", held.get("env", env))
    return found
