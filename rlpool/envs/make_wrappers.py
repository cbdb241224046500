"""Does the work of the wrappers of ``gymnasium.make`` once per batch instead of once per call.

``PassiveEnvChecker`` checks the first reset and steps and then only passes calls on, as
``OrderEnforcing`` does after the first reset; ``TimeLimit`` counts. Passing every call through
three wrappers is a fifth of a CartPole step.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit


def have_passed(env: Any) -> bool:
    """Whether all checkers around an environment have nothing left to check."""
    while isinstance(env, gymnasium.Wrapper):
        if type(env) is PassiveEnvChecker:
            checks = (env.checked_reset, env.checked_step, getattr(env, "checked_data_reuse", True))
            if not all(checks):
                return False
        env = env.env
    return True


def without_checkers(env: Any) -> Any:
    """The environment without its checkers, which must have passed.

    Wrappers around a checker are linked to what is inside it; the environment belongs to the
    ``GymEnv`` that was given it.
    """
    if not isinstance(env, gymnasium.Wrapper):
        return env
    inner = without_checkers(env.env)
    if type(env) in (PassiveEnvChecker, OrderEnforcing):
        return inner
    env.env = inner
    return env


def without_time_limit(env: Any) -> tuple[Any, int | None]:
    """The environment inside its outermost time limit, and the limit in steps, if it has one."""
    if type(env) is TimeLimit:
        return env.env, int(env._max_episode_steps)
    return env, None
