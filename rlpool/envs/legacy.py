"""Adapts environments of the former gym, and other signatures of ``reset``, to Gymnasium's.

Supported are:

- ``reset()`` that returns only the observation, ``step`` with four results, ``seed(seed)``;
- ``reset`` with any subset of ``seed``, ``options``, ``env_info`` and ``task`` among its arguments;
  arguments that are not given, such as ``env_info``, keep the default of the environment;
- the option ``task``, passed to ``reset(task=...)`` or, without such an argument, to
  ``reset_task(task)``;
- missing spaces.

Gymnasium's generators are NumPy's ``Generator``. Environments of the former gym draw with
``self.np_random.rand()``, ``randn`` or ``randint``, methods of NumPy's ``RandomState``. Their
``np_random`` becomes a ``LegacyGenerator``, which has the methods of both.

A task comes before the reset, and the environment is seeded before the task, since both may draw.
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

_GYMNASIUMS = {"seed": None, "options": None}  # arguments of reset, and their defaults
_OTHERS = {"env_info", "task"}  # not passed on by Gymnasium's wrappers
_TASK = 2  # stream of an episode's seed; those of ``one_env`` are 0 and 1
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
        """Seed and reset the environment, with ``options`` as it takes them."""
        result = self._called_reset(seed, options)
        return result if is_pair(result) and isinstance(result[1], dict) else (result, {})

    def _called_reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Seed and reset the environment; returns the result as it is."""
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
        """Step; with four results, ``info`` tells whether ``done`` is a truncation."""
        result = self.inner.step(action)
        if not isinstance(result, tuple) or len(result) != 4:
            return result
        observation, reward, done, info = result
        flags = (False, done) if (info or {}).get("TimeLimit.truncated", False) else (done, False)
        return observation, reward, *flags, info

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the environment or of one that it wraps."""
        inner = getattr(self.inner, "get_wrapper_attr", None)
        return inner(name) if callable(inner) else getattr(self.inner, name)

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("_"):
            raise AttributeError(name)
        return self.get_wrapper_attr(name)


def modernised(env: Any, *, with_tasks: bool = True) -> Any:
    """Make an environment take ``reset(seed=, options=)`` and return five values from ``step``.

    An environment inside Gymnasium's wrappers is replaced within them.

    Args:
        env: Any environment.
        with_tasks: Whether to pass the option ``task`` to ``reset_task``, if there is one.

    Returns:
        ``env`` itself if nothing has to be adapted.
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
    """Seed an environment for a ``reset_task`` that may draw, which comes before its reset.

    Its ``np_random`` gets a stream of its own: a reset with the same seed would draw what was drawn
    for the task again. An environment of the former gym, whose ``reset`` takes no seed, is seeded
    once for both.

    Args:
        env: An environment with Gymnasium's interface.
        seed: The seed of the episode.

    Returns:
        The seed for the reset that follows, ``None`` if nothing is left to be seeded.
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
    """The error for options that no argument of ``reset`` takes."""
    signature = "()"
    with suppress(TypeError, ValueError):  # compiled code need not tell
        signature = str(signature_of(env.reset))
    if "**" in signature and hasattr(getattr(env, "env", None), "reset"):
        return _refused_options(env.env, options)  # to which a wrapper passes everything on
    return SpecError(
        f"reset{signature} of {type(env).__name__} takes no options, got {dict(options)!r:.99}",
        fix="let reset() take options=None, or leave env_info out",
    )


def is_pair(result: Any) -> bool:
    """Whether a result is a tuple of two."""
    return isinstance(result, tuple) and len(result) == 2


def reset_arguments(env: Any) -> dict[str, Any]:
    """The arguments of ``reset``, including those that it passes on to a wrapped environment.

    Returns:
        Name to what the environment gets unless something is given: its own default, or ``None``.
    """
    try:
        parameters = signature_of(env.reset).parameters
    except (TypeError, ValueError):  # compiled code need not tell
        return {}
    defaults = {name: None if p.default is p.empty else p.default for name, p in parameters.items()}
    found = {name: defaults[name] for name in defaults.keys() & (_GYMNASIUMS.keys() | _OTHERS)}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        inner = getattr(env, "env", None)
        found = (reset_arguments(inner) if hasattr(inner, "reset") else _GYMNASIUMS) | found
    return found


def _seed_legacy(env: Any, seed: int) -> None:
    """Seed an environment whose ``reset`` takes no seed, and give it a ``LegacyGenerator``."""
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

    They draw from the same bits.

    Args:
        bit_generator: Where the bits come from.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(np.random.RandomState(self.bit_generator), name)
