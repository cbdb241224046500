"""Environments with older or other signatures than Gymnasium's, made to look like Gymnasium's.

Understood are: ``reset()`` without arguments that returns the observation alone, ``seed(seed)``,
``step`` with four results, ``reset(env_info=...)``, missing spaces, and any subset of ``seed`` and
``options`` among the arguments of ``reset``.
"""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium

from rlpool.seeding import fold_seed

_RESET_ARGUMENTS = ("seed", "options", "env_info")


class AncestorEnv(gymnasium.Env[Any, Any]):
    """Gymnasium's interface around an environment with another one.

    Args:
        inner: The environment.
        reset_arguments: Which of ``seed``, ``options``, ``env_info`` its ``reset`` takes.
    """

    def __init__(self, inner: Any, reset_arguments: set[str]) -> None:
        self.inner = inner
        self._reset_arguments = reset_arguments
        self._seed = None if "seed" in reset_arguments else getattr(inner, "seed", None)
        for name in ("observation_space", "action_space", "metadata", "render_mode", "spec"):
            if getattr(inner, name, None) is not None:
                setattr(self, name, getattr(inner, name))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Seed the environment the way it wants, reset it, hand over ``options``."""
        if seed is not None and callable(self._seed):
            self._seed(fold_seed(seed))  # environments of that age expect 32 bits
        given = {"seed": seed, "options": options, "env_info": options or {}}
        result = self.inner.reset(**{name: given[name] for name in self._reset_arguments})
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        return result, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; of four results, ``done`` is a truncation if ``info`` says so."""
        result = self.inner.step(action)
        if len(result) == 5:
            return result  # type: ignore[no-any-return]
        observation, reward, done, info = result
        truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated, info

    def close(self) -> None:
        """Close the environment if it can be closed."""
        close = getattr(self.inner, "close", None)
        if callable(close):
            close()

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def modernised(env: Any) -> Any:
    """Make an environment understand ``reset(seed=, options=)`` and five-fold steps.

    Wrappers are looked through: where only the innermost environment is old, it is replaced
    within its wrapper.

    Args:
        env: An environment of whatever age.

    Returns:
        ``env`` itself where nothing is to do.
    """
    layer, wrapper = env, None
    while True:
        arguments, takes_anything = _reset_signature(layer)
        inner = _wrapped(layer)
        if {"seed", "options"} <= arguments or takes_anything:
            if inner is None:
                return env if isinstance(layer, gymnasium.Env) else _around(layer, wrapper, env)
            layer, wrapper = inner, layer
            continue
        return _around(layer, wrapper, env)


def _around(layer: Any, wrapper: Any, outermost: Any) -> Any:
    arguments, takes_anything = _reset_signature(layer)
    adapter = AncestorEnv(layer, {"seed", "options"} if takes_anything else arguments)
    if wrapper is None:
        return adapter
    wrapper.env = adapter
    return outermost


def _wrapped(layer: Any) -> Any:
    """The environment that a wrapper holds, ``None`` for an innermost environment."""
    if isinstance(layer, gymnasium.Env) and not isinstance(layer, gymnasium.Wrapper):
        return None
    inner = getattr(layer, "env", None)
    return inner if hasattr(inner, "reset") and hasattr(inner, "step") else None


def _reset_signature(env: Any) -> tuple[set[str], bool]:
    parameters = inspect.signature(env.reset).parameters
    takes_anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name for name in _RESET_ARGUMENTS if name in parameters}, takes_anything
