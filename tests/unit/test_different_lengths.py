"""Values without a fixed shape: errors name the wrapper of the documentation, which pads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import Agent, DictTensor, EpisodeBatcher, GymEnv, RlpoolError
from rlpool.agents.agent import AgentStep
from rlpool.envs.vec_env import LaneError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "episodes.md"
MOST_LINES = 30


class ShowingEnv(gymnasium.Env[Any, Any]):
    """Shows one value after another."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: Any, *values: Any) -> None:
        if space is not None:
            self.observation_space = space
        self._values = values

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = list(self._values)
        return self._left.pop(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._left.pop(0), 0.0, False, False, {}


class ZeroAgent(Agent):
    def __call__(
        self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
    ) -> AgentStep:
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor(), DictTensor({"action": action}), DictTensor()


def run(env: gymnasium.Env[Any, Any], n_steps: int) -> list[Any]:
    batch = GymEnv([env], seed=0)
    batch.reset_lanes([0], [1], [None])
    seen = [{key: array[0].copy() for key, array in batch.current.items()}]
    for _ in range(n_steps):
        batch.step_lanes([0], {"action": np.zeros(1, np.int64)})
        seen.append({key: array[0].copy() for key, array in batch.current.items()})
    return seen


LONG, SHORT = np.ones((3, 2), np.float32), np.ones((2, 2), np.float32)
CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "text": (spaces.Text(9), ("abc", "ä"), {"dtype": np.int32}),
    "sequence": (spaces.Sequence(spaces.Box(-1, 1, (2,))), (tuple(LONG), ()), {"shape": (2,)}),
    "ragged": (spaces.Box(-1, 1, (3, 2)), (LONG, SHORT), {"shape": (2,)}),
    "lists": (spaces.Box(0, 1, (2, 2)), (np.ones((2, 2)), [[1.0, 1.0], [1.0]]), {}),
    "no space, ragged": (None, (LONG, SHORT), {"shape": (2,)}),
    "no space, text": (None, ("abc", "x"), {"dtype": np.int32}),
}


@pytest.mark.parametrize("case", CASES)
def test_errors_about_values_of_no_fixed_shape_name_the_wrapper(case: str) -> None:
    space, values, _ = CASES[case]

    def create_env(seed: int) -> GymEnv:
        return GymEnv([ShowingEnv(space, *values)], seed)

    def collect() -> None:
        with EpisodeBatcher(8, 1, ZeroAgent, {}, create_env, {}, 0, seeds=1) as batcher:
            batcher.execute(1)
            batcher.get()

    with pytest.raises(RlpoolError, match=r'docs/episodes\.md, "Values of different lengths"'):
        collect()
    assert "## Values of different lengths" in PAGE.read_text("utf-8")


@pytest.mark.parametrize("case", [case for case in CASES if case != "lists"])
def test_the_wrapper_of_the_documentation_pads_them_in_few_lines(case: str) -> None:
    found = re.search(r"^class Padded.*?(?=\n\n\nclass)", PAGE.read_text("utf-8"), re.M | re.S)
    assert found
    assert len(found[0].splitlines()) <= MOST_LINES
    names: dict[str, Any] = {"gym": gymnasium, "np": np, **vars(spaces)}
    exec(found[0], names)
    space, values, arguments = CASES[case]
    env = ShowingEnv(space, *values)
    first, second = run(names["Padded"](env, most=4, **arguments), 1)
    for seen, value in zip((first, second), values, strict=True):
        plain = [ord(c) for c in value] if isinstance(value, str) else [list(x) for x in value]
        assert seen["length"] == len(value)
        assert seen["value"][: len(value)].tolist() == plain
        assert not seen["value"][len(value) :].any()
    with pytest.raises(LaneError) as caught:
        run(names["Padded"](env, most=1, **arguments), 1)
    assert re.search(r"got \d elements, 1 are the most", str(caught.value.__cause__))
