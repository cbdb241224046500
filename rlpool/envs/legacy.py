"""Adapts environments with older or different signatures to Gymnasium's interface.

Supported are:

- ``reset()`` that returns only the observation, ``step`` with four results, ``seed(seed)``;
- ``reset`` with any subset of ``seed``, ``options``, ``env_info`` and ``task`` among its arguments;
  arguments that are not given, such as ``env_info``, keep the default of the environment;
- the option ``task``, passed to ``reset(task=...)`` or, without such an argument, to
  ``reset_task(task)``;
- missing spaces.

Generators of Gymnasium are NumPy's ``Generator``. Environments written for the old gym draw with
``self.np_random.rand()``, ``randn`` or ``randint``, methods of NumPy's ``RandomState``. They get a
``LegacyGenerator``, which has the methods of both.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding

_RESET_ARGUMENTS = ("seed", "options", "env_info", "task")
_OWN_ARGUMENTS = {"env_info", "task"}  # not passed on by Gymnasium's wrappers
# Not an argument: marks that ``options`` has a default, which None would override.
_OWN_OPTIONS = "options by default"


class LegacyEnv(gymnasium.Env[Any, Any]):
    """Gymnasium's interface around an environment with a different one.

    Args:
        inner: The environment.
        reset_arguments: The result of ``reset_arguments(inner)``.
    """

    def __init__(self, inner: Any, reset_arguments: set[str]) -> None:
        self.inner = inner
        self._reset_arguments = reset_arguments
        for name in ("observation_space", "action_space", "metadata", "render_mode", "spec"):
            if getattr(inner, name, None) is not None:
                setattr(self, name, getattr(inner, name))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Seed and reset the environment, with ``options`` as it takes them."""
        result = self._called_reset(seed, options)
        return result if is_pair(result) and isinstance(result[1], dict) else (result, {})

    def _called_reset(self, seed: int | None, options: dict[str, Any] | None) -> Any:
        """Seed and reset the environment; returns the result as it is."""
        env, arguments = self.inner, self._reset_arguments
        if seed is not None and "seed" not in arguments:
            _seed_legacy(env, seed)
        given: dict[str, Any] = {"seed": seed}
        if _OWN_OPTIONS not in arguments:
            given["options"] = None
        if options:
            given |= {"options": options, "env_info": options}
            if "task" in arguments:
                others = dict(options)
                given |= {"task": others.pop("task", None), "options": others or None}
            elif "task" in options and callable(getattr(env, "reset_task", None)):
                env.reset_task(options["task"])
        return env.reset(**{name: given[name] for name in arguments & given.keys()})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; with four results, ``info`` tells whether ``done`` is a truncation."""
        result = self.inner.step(action)
        if not isinstance(result, tuple) or len(result) != 4:
            return result
        observation, reward, done, info = result
        flags = (False, done) if (info or {}).get("TimeLimit.truncated", False) else (done, False)
        return observation, reward, *flags, info

    def render(self) -> Any:
        """What the environment shows; ``gymnasium.Env`` would hide it."""
        return self.inner.render()

    def close(self) -> None:
        """Close the environment, if it has ``close``."""
        close = getattr(self.inner, "close", None)
        if callable(close):
            close()

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the environment or of one that it wraps."""
        inner = getattr(self.inner, "get_wrapper_attr", None)
        return inner(name) if callable(inner) else getattr(self.inner, name)

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("_"):
            raise AttributeError(name)
        return self.get_wrapper_attr(name)


def modernised(env: Any, *, with_tasks: bool = True, returns_pair: bool = True) -> Any:
    """Make an environment take ``reset(seed=, options=)`` and return five values from ``step``.

    An environment inside Gymnasium's wrappers is replaced within them.

    Args:
        env: Any environment.
        with_tasks: Whether to pass the option ``task`` to ``reset_task``, if there is one.
        returns_pair: False if ``reset`` is known to return only the observation: gym 0.22 to 0.25
            did so, although ``reset`` took ``seed`` and ``options``.

    Returns:
        ``env`` itself if nothing has to be adapted.
    """
    layer: Any = env
    wrapper: Any = None
    while isinstance(layer, gymnasium.Wrapper):
        if not _OWN_ARGUMENTS.isdisjoint(inspect.signature(layer.reset).parameters):
            break  # the wrapper itself takes what Gymnasium's do not
        layer, wrapper = layer.env, layer
    arguments = reset_arguments(layer)
    is_modern = isinstance(layer, gymnasium.Env) and arguments == {"seed", "options"}
    gets_task = with_tasks and callable(getattr(layer, "reset_task", None))
    if is_modern and returns_pair and not gets_task:
        return env
    adapter = LegacyEnv(layer, arguments)
    if wrapper is None:
        return adapter
    wrapper.env = adapter
    return env


def is_pair(result: Any) -> bool:
    """Whether a result is a tuple of two."""
    return isinstance(result, tuple) and len(result) == 2


def reset_arguments(env: Any) -> set[str]:
    """The arguments of ``reset``, including those that it passes on to a wrapped environment."""
    try:
        parameters = inspect.signature(env.reset).parameters
    except (TypeError, ValueError):  # compiled code need not tell
        return set()
    arguments = {name for name in _RESET_ARGUMENTS if name in parameters}
    default = parameters["options"].default if "options" in parameters else None
    if default is not None and default is not inspect.Parameter.empty:
        arguments.add(_OWN_OPTIONS)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        inner = getattr(env, "env", None)
        arguments |= reset_arguments(inner) if hasattr(inner, "reset") else {"seed", "options"}
    return arguments


def _seed_legacy(env: Any, seed: int) -> None:
    """Seed an environment whose ``reset`` takes no seed, and give it a ``LegacyGenerator``."""
    if callable(getattr(env, "seed", None)):
        env.seed(seed)
    elif isinstance(env, gymnasium.Env):
        with suppress(AttributeError):  # it may be read-only
            env.np_random = seeding.np_random(seed)[0]  # as gym.Env did
    else:
        return
    layer = env
    while layer is not None:
        attributes = getattr(layer, "__dict__", {})
        for name, value in attributes.items():
            if type(value) is np.random.Generator:
                attributes[name] = LegacyGenerator(value.bit_generator)
        layer = attributes.get("env")


class LegacyGenerator(np.random.Generator):
    """A ``numpy.random.Generator`` that also has the methods of ``numpy.random.RandomState``.

    They draw from the same bits.

    Args:
        bit_generator: Where the bits come from.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.random.RandomState(self.bit_generator), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.bit_generator,)
