"""Environments with older or other signatures than Gymnasium's, made to look like Gymnasium's.

Understood are: ``reset()`` without arguments that returns the observation alone, ``seed(seed)``,
``step`` with four results, ``reset(env_info=...)``, ``reset(task=...)`` which gets the option of
that name, ``reset_task(task)`` which gets it where ``reset`` takes none, missing spaces, and any
subset of ``seed`` and ``options`` among the arguments of ``reset``. What a reset is not given, such
as ``env_info``, is left to the default of the environment's own ``reset``.

Generators of Gymnasium are NumPy's ``Generator``. Environments written for the old gym draw with
``self.np_random.rand()``, ``randn``, ``randint``: methods of NumPy's ``RandomState``, later of
gym's ``RandomNumberGenerator``. They get a ``LegacyGenerator``, which has those names too.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding

_RESET_ARGUMENTS = ("seed", "options", "env_info", "task")
_OWN_ARGUMENTS = {"env_info", "task"}  # those that no wrapper of Gymnasium's passes on
# No name, but among the names: ``options`` has a default of its own, which None would replace.
_OWN_OPTIONS = "options by default"


class LegacyEnv(gymnasium.Env[Any, Any]):
    """Gymnasium's interface around an environment with another one.

    Args:
        inner: The environment.
        reset_arguments: What ``reset_arguments`` says of it.
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
        """Seed the environment the way it wants, reset it, pass on ``options``."""
        result = call_reset(self.inner, self._reset_arguments, seed, options)
        return result if is_pair_with_info(result) else (result, {})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; of four results, ``done`` is a truncation if ``info`` says so."""
        result = self.inner.step(action)
        if len(result) == 5:
            return result  # type: ignore[no-any-return]
        observation, reward, done, info = result
        flags = (False, done) if info.get("TimeLimit.truncated", False) else (done, False)
        return observation, reward, *flags, info

    def close(self) -> None:
        """Close the environment if it can be closed."""
        close = getattr(self.inner, "close", None)
        if callable(close):
            close()

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the environment or of what it wraps."""
        inner = getattr(self.inner, "get_wrapper_attr", None)
        return inner(name) if callable(inner) else getattr(self.inner, name)

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("_"):
            raise AttributeError(name)
        return self.get_wrapper_attr(name)


def modernised(env: Any, *, with_tasks: bool = True, returns_pair: bool = True) -> Any:
    """Make an environment take ``reset(seed=, options=)`` and return five values from ``step``.

    Gymnasium's own wrappers are looked through: what is inside them is replaced within them.

    Args:
        env: An environment of whatever age.
        with_tasks: Whether an environment with ``reset_task`` gets the option ``task`` there.
        returns_pair: Whether its ``reset`` is not known to return the observation alone, as in the
            old gym, which took ``seed`` and ``options`` already in versions 0.22 to 0.25.

    Returns:
        ``env`` itself where there is nothing to do.
    """
    layer: Any = env
    wrapper: Any = None
    while isinstance(layer, gymnasium.Wrapper) and not _takes_more(layer):
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


def is_pair_with_info(result: Any) -> bool:
    """Whether this came from the ``reset`` of a Gymnasium environment."""
    return isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)


def call_reset(
    env: Any, arguments: set[str], seed: int | None, options: dict[str, Any] | None = None
) -> Any:
    """Seed an environment the way it wants, and reset it.

    Args:
        env: The environment.
        arguments: What ``reset_arguments`` says of it.
        seed: The seed; ``None`` for none.
        options: Passed on as ``options`` or ``env_info``; ``"task"`` among them as ``task``
            where there is such an argument, else to ``reset_task`` before, if there is that.
            ``None`` or empty for none.

    Returns:
        Whatever its ``reset`` returns.
    """
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


def _takes_more(wrapper: Any) -> bool:
    """Whether a wrapper's own ``reset`` takes what Gymnasium's does not."""
    return not _OWN_ARGUMENTS.isdisjoint(inspect.signature(wrapper.reset).parameters)


def reset_arguments(env: Any) -> set[str]:
    """Which arguments ``reset`` takes, by itself or by passing them on to what it wraps."""
    parameters = inspect.signature(env.reset).parameters
    arguments = {name for name in _RESET_ARGUMENTS if name in parameters}
    default = parameters["options"].default if "options" in parameters else None
    if default is not None and default is not inspect.Parameter.empty:
        arguments.add(_OWN_OPTIONS)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        inner = getattr(env, "env", None)
        arguments |= reset_arguments(inner) if hasattr(inner, "reset") else {"seed", "options"}
    return arguments


def _seed_legacy(env: Any, seed: int) -> None:
    """Seed an environment whose ``reset`` takes no seed, and give it the generator of its time."""
    if callable(getattr(env, "seed", None)):
        env.seed(seed)
    elif isinstance(env, gymnasium.Env):
        with suppress(AttributeError):  # where it has another idea of its generator
            env.np_random = seeding.np_random(seed)[0]  # as the base class of that time did
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
    """A ``numpy.random.Generator`` that has the old names as well; they draw the same numbers.

    Args:
        bit_generator: Where the bits come from.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.bit_generator,)

    random_sample = ranf = sample = np.random.Generator.random

    def rand(self, *size: int) -> Any:
        """Uniform in [0, 1), of the shape ``size``; a float without one."""
        return self.random(size or None)

    def randn(self, *size: int) -> Any:
        """Normal, of the shape ``size``; a float without one."""
        return self.standard_normal(size or None)

    def randint(self, low: Any, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
        """Integers from ``low`` to below ``high``, or from 0 to below ``low``."""
        return self.integers(low, high, size=size, dtype=dtype)

    def random_integers(self, low: Any, high: Any = None, size: Any = None) -> Any:
        """Integers from ``low`` to ``high``, or from 1 to ``low``, both included."""
        low, high = (1, low) if high is None else (low, high)
        return self.integers(low, high, size=size, endpoint=True)

    def seed(self, seed: Any = None) -> None:
        """Start again from a seed."""
        self.bit_generator.state = type(self.bit_generator)(seed).state

    def get_state(self) -> Any:
        """What ``set_state`` takes to draw the same numbers again."""
        return self.bit_generator.state

    def set_state(self, state: Any) -> None:
        """Go back to where ``get_state`` was called."""
        self.bit_generator.state = state
