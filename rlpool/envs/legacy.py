"""Adapters from the old gym interface, and other signatures of ``reset``, to Gymnasium.

Supported are:

- ``reset()`` that returns only the observation, ``step`` with four results, ``seed(seed)``;
- ``reset`` with any subset of the arguments ``seed``, ``options``, ``env_info`` and ``task``;
  arguments without a value, such as ``env_info``, keep the environment's default;
- the option ``task``, passed to ``reset(task=...)`` or, without such an argument, to
  ``reset_task(task)``;
- missing spaces.

Gymnasium uses NumPy's ``Generator``. Environments of the old gym call ``self.np_random.rand()``,
``randn`` or ``randint``, methods of NumPy's ``RandomState``. Their ``np_random`` becomes a
``LegacyGenerator``, which has the methods of both.

The order is seed, task, reset, since setting a task and resetting may both draw random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding

from rlpool.errors import SpecError
from rlpool.machine.arguments import signature_of
from rlpool.seeding import stream_seed

_GYMNASIUMS = {"seed": None, "options": None}  # arguments of reset with their defaults
_OTHERS = {"env_info", "task"}  # not forwarded by Gymnasium's wrappers
_TASK = 2  # stream of an episode's seed; ``one_env`` uses 0 and 1
_KEPT = ("observation_space", "action_space", "metadata", "render_mode", "spec", "render", "close")


class LegacyEnv(gymnasium.Env[Any, Any]):
    """Gymnasium's interface around an environment with a different one.

    Args:
        inner: The environment.
        reset_arguments: The result of ``reset_arguments(inner)``.
    """

    def __init__(self, inner: Any, reset_arguments: dict[str, Any]) -> None:
        self.inner = inner
        self._reset_arguments = reset_arguments
        for name in _KEPT:
            if getattr(inner, name, None) is not None:
                setattr(self, name, getattr(inner, name))

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Seed and reset the environment, passing ``options`` as its signature requires."""
        result = self._called_reset(seed, options)
        return result if is_pair(result) and isinstance(result[1], dict) else (result, {})

    def _called_reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Seed and reset the environment; returns the unconverted result."""
        env, arguments = self.inner, self._reset_arguments
        if seed is not None and "seed" not in arguments:
            _seed_legacy(env, seed)
        given: dict[str, Any] = {"seed": seed}
        if options:
            given |= {"options": options, "env_info": options}
            takes_task = callable(getattr(env, "reset_task", None)) or "task" in arguments
            taken = {"task"} if takes_task else set()
            if arguments.keys().isdisjoint(("options", "env_info")) and options.keys() - taken:
                raise _refused_options(env, options)
            if "task" in arguments:
                others = dict(options)
                given |= {"task": others.pop("task", None), "options": others or None}
            elif "task" in options and takes_task:
                if seed is not None and "seed" in arguments:
                    seed_before_task(env, seed)
                env.reset_task(options["task"])
        return env.reset(**{n: given.get(n, default) for n, default in arguments.items()})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; of four results, ``info`` determines whether ``done`` is a truncation."""
        result = self.inner.step(action)
        if not isinstance(result, tuple) or len(result) != 4:
            return result
        observation, reward, done, info = result
        flags = (False, done) if (info or {}).get("TimeLimit.truncated", False) else (done, False)
        return observation, reward, *flags, info

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the environment or of the environments that it wraps."""
        inner = getattr(self.inner, "get_wrapper_attr", None)
        return inner(name) if callable(inner) else getattr(self.inner, name)

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("_"):
            raise AttributeError(name)
        return self.get_wrapper_attr(name)


def modernised(env: Any, *, with_tasks: bool = True) -> Any:
    """Adapt an environment to ``reset(seed=, options=)`` and five values from ``step``.

    An environment inside Gymnasium's wrappers is replaced within them.

    Args:
        env: Any environment.
        with_tasks: Whether to pass the option ``task`` to ``reset_task``, if there is one.

    Returns:
        ``env`` itself if it does not need an adapter.
    """
    is_wrapper = isinstance(env, gymnasium.Wrapper)
    if is_wrapper and _OTHERS.isdisjoint(signature_of(env.reset).parameters):
        env.env = modernised(env.env, with_tasks=with_tasks)
        if _GYMNASIUMS.keys() <= reset_arguments(env).keys():
            return env
    arguments = reset_arguments(env)
    is_modern = isinstance(env, gymnasium.Env) and arguments == _GYMNASIUMS
    has_tasks = with_tasks and callable(getattr(env, "reset_task", None))
    return env if is_modern and not has_tasks else LegacyEnv(env, arguments)


def seed_before_task(env: Any, seed: int) -> int | None:
    """Seed an environment before ``reset_task``, which may draw random numbers.

    Its ``np_random`` gets a separate stream; otherwise a reset with the same seed would repeat the
    draws for the task. An environment of the old gym, whose ``reset`` does not take a seed, is
    seeded once for both.

    Args:
        env: An environment with Gymnasium's interface.
        seed: The seed of the episode.

    Returns:
        The seed for the reset that follows, ``None`` if it does not need one.
    """
    inner = env.unwrapped
    if isinstance(inner, LegacyEnv):
        if "seed" not in inner._reset_arguments:
            _seed_legacy(inner.inner, seed)
            return None
        inner = getattr(inner.inner, "unwrapped", inner.inner)
    inner.np_random = seeding.np_random(stream_seed(seed, _TASK))[0]
    return seed


def _refused_options(env: Any, options: Mapping[str, Any]) -> SpecError:
    """Return the error for options that ``reset`` does not accept."""
    signature = "()"
    with suppress(TypeError, ValueError):  # compiled code may lack a signature
        signature = str(signature_of(env.reset))
    if "**" in signature and hasattr(getattr(env, "env", None), "reset"):
        return _refused_options(env.env, options)  # the wrapper forwards all arguments to it
    return SpecError(
        f"reset{signature} of {type(env).__name__} takes no options, got {dict(options)!r:.99}",
        fix="add options=None to reset(), or omit env_info",
    )


def is_pair(result: Any) -> bool:
    """Whether a result is a tuple of two."""
    return isinstance(result, tuple) and len(result) == 2


def reset_arguments(env: Any) -> dict[str, Any]:
    """Return the arguments of ``reset``, including those forwarded to a wrapped environment.

    Returns:
        Default values by name, ``None`` for arguments without a default.
    """
    try:
        parameters = signature_of(env.reset).parameters
    except (TypeError, ValueError):  # compiled code may lack a signature
        return {}
    defaults = {name: None if p.default is p.empty else p.default for name, p in parameters.items()}
    found = {name: defaults[name] for name in defaults.keys() & (_GYMNASIUMS.keys() | _OTHERS)}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        inner = getattr(env, "env", None)
        found = (reset_arguments(inner) if hasattr(inner, "reset") else _GYMNASIUMS) | found
    return found


def _seed_legacy(env: Any, seed: int) -> None:
    """Seed an environment whose ``reset`` does not take a seed, and set a ``LegacyGenerator``."""
    has_seed = callable(getattr(env, "seed", None))
    if has_seed:
        env.seed(seed)
    with suppress(AttributeError):  # np_random may be read-only
        if not has_seed and isinstance(env, gymnasium.Env):
            env.np_random = seeding.np_random(seed)[0]  # as gym.Env did
        if type(env.np_random) is np.random.Generator:
            env.np_random = LegacyGenerator(env.np_random.bit_generator)


class LegacyGenerator(np.random.Generator):
    """A ``numpy.random.Generator`` that also has the methods of ``numpy.random.RandomState``.

    Both draw from the same bits.

    Args:
        bit_generator: Source of the bits.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(np.random.RandomState(self.bit_generator), name)
