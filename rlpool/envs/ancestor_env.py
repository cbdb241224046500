"""Environments with older or other signatures than Gymnasium's, made to look like Gymnasium's.

Understood are: ``reset()`` without arguments that returns the observation alone, ``seed(seed)``,
``step`` with four results, ``reset(env_info=...)``, ``reset(task=...)`` which gets the option of
that name, ``reset_task(task)`` which gets it where ``reset`` takes none, missing spaces, and any
subset of ``seed`` and ``options`` among the arguments of ``reset``. What a reset is not given, such
as ``env_info``, is left to the default of the environment's own ``reset``.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import gymnasium
from gymnasium.utils import seeding

from rlpool.envs.former_generator import give_former_names

_RESET_ARGUMENTS = ("seed", "options", "env_info", "task")
_OWN_ARGUMENTS = {"env_info", "task"}  # those that no wrapper of Gymnasium's hands on
# No name, but among the names: ``options`` has a default of its own, which None would replace.
_OWN_OPTIONS = "options by default"


class AncestorEnv(gymnasium.Env[Any, Any]):
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
        """Seed the environment the way it wants, reset it, hand over ``options``."""
        result = call_reset(self.inner, self._reset_arguments, seed, options)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        return result, {}

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

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether the environment, or what it wraps, has an attribute."""
        inner = getattr(self.inner, "has_wrapper_attr", None)
        return bool(inner(name)) if callable(inner) else hasattr(self.inner, name)

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the environment or of what it wraps."""
        inner = getattr(self.inner, "get_wrapper_attr", None)
        return inner(name) if callable(inner) else getattr(self.inner, name)

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def modernised(env: Any, *, with_tasks: bool = True, is_former: bool = False) -> Any:
    """Make an environment understand ``reset(seed=, options=)`` and five-fold steps.

    Gymnasium's own wrappers are looked through: what is inside them is replaced within them.

    Args:
        env: An environment of whatever age.
        with_tasks: Whether an environment with ``reset_task`` shall get the option ``task`` there.
        is_former: Whether its ``reset`` was seen to return the observation alone, as in the former
            gym: up to version 0.25 that took ``seed`` and ``options`` already.

    Returns:
        ``env`` itself where nothing is to do.
    """
    layer: Any = env
    wrapper: Any = None
    while isinstance(layer, gymnasium.Wrapper) and not _wants_more(layer):
        layer, wrapper = layer.env, layer
    arguments = reset_arguments(layer)
    if (
        isinstance(layer, gymnasium.Env)
        and arguments == {"seed", "options"}
        and not is_former
        and not (with_tasks and callable(getattr(layer, "reset_task", None)))
    ):
        return env
    adapter = AncestorEnv(layer, arguments)
    if wrapper is None:
        return adapter
    wrapper.env = adapter
    return env


def call_reset(
    env: Any, arguments: set[str], seed: int | None, options: dict[str, Any] | None = None
) -> Any:
    """Seed an environment the way it wants, and reset it.

    Args:
        env: The environment.
        arguments: What ``reset_arguments`` says of it.
        seed: The seed; ``None`` for none.
        options: Handed over as ``options`` or ``env_info``; ``"task"`` among them as ``task``
            where there is such an argument, else to ``reset_task`` before, if there is that.
            ``None`` or empty for none.

    Returns:
        Whatever its ``reset`` returns.
    """
    if seed is not None and "seed" not in arguments:
        _seed_former(env, seed)
    given: dict[str, Any] = {"seed": seed}
    if _OWN_OPTIONS not in arguments:
        given["options"] = None
    if options:
        given.update(options=options, env_info=options)
        reset_task = getattr(env, "reset_task", None)
        if "task" in arguments:
            others = dict(options)
            given["task"] = others.pop("task", None)
            given["options"] = others or None
        elif "task" in options and callable(reset_task):
            reset_task(options["task"])
    return env.reset(**{name: given[name] for name in arguments & given.keys()})


def _seed_former(env: Any, seed: int) -> None:
    """Seed an environment whose ``reset`` takes no seed, and give it the generator of its time."""
    own_seed = getattr(env, "seed", None)
    if callable(own_seed):
        own_seed(seed)
    elif isinstance(env, gymnasium.Env):
        with suppress(AttributeError):  # where it has another idea of its generator
            env.np_random = seeding.np_random(seed)[0]  # as the base class of that time did
    else:
        return
    give_former_names(env)


def _wants_more(wrapper: Any) -> bool:
    """Whether a wrapper's own ``reset`` takes what Gymnasium's does not."""
    return not _OWN_ARGUMENTS.isdisjoint(inspect.signature(wrapper.reset).parameters)


def reset_arguments(env: Any) -> set[str]:
    """Which arguments ``reset`` takes, by itself or by handing them on to what it wraps."""
    parameters = inspect.signature(env.reset).parameters
    arguments = {name for name in _RESET_ARGUMENTS if name in parameters}
    default = parameters["options"].default if "options" in parameters else None
    if default is not None and default is not inspect.Parameter.empty:
        arguments.add(_OWN_OPTIONS)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        inner = getattr(env, "env", None)
        arguments |= reset_arguments(inner) if hasattr(inner, "reset") else {"seed", "options"}
    return arguments
