"""Refusals by ``GymEnv``, ``VectorGymEnv`` and ``check_env``, and the names in their errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from rlpool import (
    AgentError,
    DictTensor,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    SpecError,
    UsageError,
    VectorGymEnv,
    testing,
)

from support.agents import ConstantAgent, FunctionAgent
from support.envs import CountingEnv, SpaceEnv
from support.vector_envs import ArrayEnv, OwnVectorEnv

BIT, BOX = spaces.Discrete(2), spaces.Box(0, 99, (2,), np.float32)
ONE = CountingEnv()
SYNC = SyncVectorEnv([CountingEnv])
NO_SHAPE = spaces.Dict(a=spaces.Tuple([BIT, spaces.Sequence(BIT)]))


def of_spaces(*pairs: Any) -> GymEnv:
    return GymEnv([SpaceEnv(*pair) for pair in pairs], seed=0)


def telling(keys: Any) -> GymEnv:
    return GymEnv([CountingEnv()], seed=0, info_keys=keys)


def lanes() -> GymEnv:
    env = GymEnv([CountingEnv(), CountingEnv()], seed=0)
    env.reset()
    return env


def acted(action: torch.Tensor) -> None:
    """Collect with an agent that returns this action."""
    agent = FunctionAgent(lambda *_: (None, DictTensor({"action": action}), None))
    with EpisodeBatcher(3, 8, lambda: agent, {}, lambda seed: lanes(), n_workers=0) as batcher:
        batcher.execute(2)
        batcher.get()


def reset_to(result: Any) -> None:
    """Reset an environment with Gymnasium's arguments, whose ``reset`` returns this."""
    env = CountingEnv()
    env.reset = lambda seed=None, options=None: result  # type: ignore[method-assign]
    GymEnv([env], seed=0).reset()


def stepped(step: Callable[[Any], Any]) -> None:
    """Step an environment whose ``step`` is this function."""
    env = CountingEnv()
    env.step = step  # type: ignore[method-assign]
    one = GymEnv([env], seed=0)
    one.reset()
    one.step(DictTensor({"action": torch.zeros(1, dtype=torch.int64)}))


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # Environments.
    (lambda: GymEnv("CartPole-v1"), SpecError, "list of environments"),
    (lambda: GymEnv(ONE), SpecError, "list of environments"),
    (lambda: GymEnv(ArrayEnv(2)), SpecError, "VectorGymEnv"),
    (lambda: GymEnv([]), SpecError, "no environments"),
    (lambda: GymEnv([ONE, None]), SpecError, "environment 1"),
    (lambda: GymEnv([lanes()]), SpecError, "environment 0"),
    (lambda: VectorGymEnv([ONE]), SpecError, "GymEnv"),
    (lambda: VectorGymEnv(ONE), SpecError, "make_vec"),
    (lambda: VectorGymEnv(SYNC), SpecError, "SyncVectorEnv"),
    # Spaces.
    (lambda: of_spaces((spaces.Text(4), BIT)), SpecError, "Values of different lengths"),
    (lambda: of_spaces((BIT, spaces.Text(4))), SpecError, "action_space"),
    (lambda: of_spaces((NO_SHAPE, BIT)), SpecError, "observation_space['a'][1] is a Sequence"),
    (lambda: of_spaces((BIT, BIT), (BOX, BIT)), SpecError, "observation_space of environment 1"),
    (lambda: of_spaces((BIT, BIT), (BIT, BOX)), SpecError, "action_space of environment 1"),
    (lambda: of_spaces((spaces.Dict(reward=BOX), BIT)), SpecError, "'reward'"),
    (lambda: of_spaces((spaces.Dict(last_action=BOX), BIT)), SpecError, "'last_action'"),
    (lambda: VectorGymEnv(OwnVectorEnv([partial(SpaceEnv, NO_SHAPE, BIT)])), SpecError, "Sequence"),
    # Options.
    (lambda: GymEnv([ONE], max_episode_steps=0), SpecError, "max_episode_steps"),
    (lambda: GymEnv([ONE], keep_float64=["tim"]), SpecError, "keep_float64"),
    (lambda: VectorGymEnv(ArrayEnv(2), max_episode_steps=0), SpecError, "max_episode_steps"),
    (lambda: VectorGymEnv(ArrayEnv(2), seeding="lane"), SpecError, "seeding"),  # type: ignore[arg-type]
    (lambda: telling("success"), SpecError, "info_keys"),
    (lambda: telling({"x": str}), SpecError, "'x'"),
    (lambda: telling({"x": (float, -1)}), SpecError, "'x'"),
    (lambda: telling(["x", "x"]), SpecError, "'x'"),
    (lambda: telling({"reward": float}), SpecError, "'reward'"),
    (lambda: telling({"frame": float}), SpecError, "'frame'"),
    # Calls.
    (lambda: lanes().reset({"id": [1, 2, 3]}), SpecError, "3 rows"),
    (lambda: lanes().step(None), SpecError, "policy_output"),
    (lambda: lanes().step({"action": [0, 1]}), SpecError, "'action'"),
    (lambda: lanes().step(DictTensor({"move": torch.arange(2)})), SpecError, "'action'"),
    (lambda: lanes().step(DictTensor({"action": torch.arange(3)})), SpecError, "[2]"),
    (lambda: lanes().step(DictTensor({"action": torch.ones(2, 1)})), SpecError, "squeeze"),
    (lambda: acted(torch.arange(2)[:, None]), AgentError, "squeeze"),
    (lambda: acted(torch.rand(2)), AgentError, "argmax"),
    (lambda: GymEnv([ONE], seed=0).step(DictTensor()), UsageError, "reset"),
    (lambda: reset_to(np.zeros(2)), EnvSpecError, "(observation, info)"),
    (lambda: stepped(lambda action: {}["goal"]), KeyError, "goal"),
    (lambda: stepped(lambda action: (1, 2, 3)), EnvSpecError, "got 3"),
    (lambda: stepped(lambda action: None), EnvSpecError, "NoneType"),
    # Arguments of checks and tests.
    (lambda: testing.check_env(CountingEnv, n_steps=0), SpecError, "n_steps"),
    (lambda: testing.check_env(7), SpecError, "function"),
    (lambda: testing.check_env(CountingEnv, 5), SpecError, "env_args"),  # type: ignore[arg-type]
    (lambda: testing.check_env(ONE, {"length": 3}), SpecError, "env_args"),
    (lambda: testing.check_agent(ConstantAgent, 7), SpecError, "function"),  # type: ignore[arg-type]
    (lambda: testing.check_agent(7, CountingEnv), SpecError, "function"),  # type: ignore[arg-type]
    (lambda: testing.CountingEnv(length=1.5), SpecError, "length"),  # type: ignore[arg-type]
    (lambda: testing.CountingEnv().reset(options={"length": 0}), SpecError, "length"),
]


def test_invalid_input_is_refused() -> None:
    for call, error, named in REFUSED:
        with pytest.raises(error, match=re.escape(named)):
            call()


# Results of steps


class WrongEnv(SpaceEnv):
    """Environment that returns given values instead of its own from the second step on."""

    wrong: Any = None

    def step(self, action: Any) -> Any:
        names = ("observation", "reward", "terminated", "truncated", "info")
        result = dict(zip(names, super().step(action), strict=True))
        return tuple({**result, **((self.wrong or {}) if self.t > 1 else {})}.values())


INTS, BYTES = (spaces.Box(0, 99, (2,), dtype) for dtype in (np.int32, np.uint8))
NAN = float("nan")
WRONG: list[tuple[Any, Any, str]] = [  # a space and an observation, or a key and a value
    (BOX, np.zeros(3, np.float32), "'frame'"),
    (BOX, np.zeros(2, np.int64), "'frame'"),
    (BOX, ["a", "b"], "'frame'"),
    (BOX, np.zeros(1), "Values of different lengths"),
    (BOX, torch.zeros(2, dtype=torch.bfloat16), "'frame'"),
    (INTS, np.zeros(2, np.float32), "'frame'"),
    (INTS, np.array([2**40, 0]), "1099511627776"),
    (BYTES, [1, 256], "256"),
    (spaces.Discrete(5), 1.5, "'frame'"),
    (spaces.Dict(a=BIT), {"b": 1}, "['b']"),
    (spaces.Dict(a=BIT), {"a": 0, "b": 1}, "omit ['b']"),
    (spaces.Dict(a=BIT), 5, "['a']"),
    (spaces.Tuple([BIT]), (1, 2), "tuple"),
    *(("terminated", flag, "'terminated'") for flag in (NAN, None, "", 2, [False, True], 1j)),
    ("truncated", None, "'truncated'"),
    *(("reward", reward, "'reward'") for reward in (1e39, 10**400, None, "a", [1.0, 2.0], 1j)),
]


@pytest.mark.parametrize(("what", "value", "named"), WRONG)
def test_invalid_step_results_are_refused_with_their_lane(
    what: Any, value: Any, named: str
) -> None:
    is_observed = isinstance(what, gymnasium.Space)
    envs = [WrongEnv(what if is_observed else BOX, BIT, length=9) for _ in range(3)]
    envs[1].wrong = {"observation" if is_observed else what: value}
    env = GymEnv(envs, seed=0)
    env.reset()
    still = DictTensor({"action": torch.zeros(3, dtype=torch.int64)})
    env.step(still)
    with pytest.raises(EnvSpecError, match=re.escape(named)) as caught:
        env.step(still)
    assert caught.value.where.lane == 1
    env.reset()
