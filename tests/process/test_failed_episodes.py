"""A failed episode can be reproduced: by its number with the policy, or by its actions without.

``test_fault_matrix`` checks that every failure carries the actions that led to it.
"""

from __future__ import annotations

import pickle
import zlib
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import (
    AgentError,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    SpecError,
    UsageError,
    WorkerError,
    replay,
)

from support.agents import FunctionAgent, StepCounter, zeros

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(240),
    pytest.mark.promise("I9"),
]

N_EPISODES = 40
TASKS = {"task": torch.arange(N_EPISODES)}


class UnluckyError(ValueError):
    """Error whose text depends on every argument of the episode so far and every number drawn."""


class UnluckyEnv(gymnasium.Env[Any, Any]):
    """Environment that draws observations, rewards and failures from its seeded generator.

    Args:
        chance: Probability of failing, per step.
        reset_chance: Probability of failing, per reset.
        action_space: Any space.
    """

    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)

    def __init__(
        self, chance: float = 0.05, reset_chance: float = 0.0, action_space: Any = None
    ) -> None:
        self.action_space = action_space or spaces.Discrete(1000)
        self.chance, self.reset_chance = chance, reset_chance

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.course = [repr((seed, options))]
        return self.drawn(self.reset_chance), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.course.append(repr(action))
        return self.drawn(self.chance), self.np_random.random(), False, False, {}

    def drawn(self, chance: float) -> Any:
        """Draw the next observation."""
        if self.np_random.random() < chance:
            raise UnluckyError(f"{zlib.crc32(repr(self.course).encode())}")
        observation = self.np_random.random(3).astype(np.float32)
        self.course.append(observation.tobytes().hex())
        return observation


def create_unlucky(seed: int, **arguments: Any) -> GymEnv:
    return GymEnv([UnluckyEnv(**arguments) for _ in range(2)], seed)


def make(env_args: dict[str, Any], agent: Any = StepCounter, n_workers: int = 0) -> EpisodeBatcher:
    return EpisodeBatcher(5, 6, agent, {}, create_unlucky, env_args, n_workers, 3)


def failure_of(*arguments: Any) -> WorkerError:
    """Return the failure of a request."""
    with make(*arguments) as batcher:
        batcher.seek(7)
        batcher.execute(N_EPISODES, env_info=TASKS)
        with pytest.raises(WorkerError) as caught:
            batcher.get()
    error = caught.value
    assert error.where.row is not None
    assert error.where.episode == error.where.row + 7
    assert error.options == {"task": error.where.row}
    return pickle.loads(pickle.dumps(error))


def assert_replayed(error: WorkerError, env: Any) -> None:
    with pytest.raises(UnluckyError) as caught:
        replay(env, error)
    assert error.what.endswith(f"raised UnluckyError: {caught.value}")


def test_an_episode_number_reproduces_the_failure() -> None:
    env_args = {"chance": 0.01}
    error = failure_of(env_args, StepCounter, 2)
    assert len(error.actions) == error.where.step + 1
    with make(env_args) as batcher:
        batcher.seek(error.where.episode)
        row = error.where.row
        batcher.execute(1, env_info={"task": TASKS["task"][row : row + 1]})
        with pytest.raises(EnvError) as caught:
            batcher.get()
    again = caught.value
    assert isinstance(again.__cause__, UnluckyError)
    assert (again.what, again.where[4:6]) == (error.what, error.where[4:6])  # step and seed
    assert again.actions.tolist() == error.actions.tolist()
    for env in (lambda: UnluckyEnv(**env_args)), UnluckyEnv(**env_args):
        assert_replayed(error, env)


def test_a_failure_in_the_first_reset_names_its_episode() -> None:
    error = failure_of({"reset_chance": 1.0}, StepCounter, 1)
    assert (error.where.row, error.where.episode) == (0, 7)
    assert_replayed(error, UnluckyEnv(reset_chance=1.0))


def act_nested(state: Any, observation: Any, *_: Any) -> Any:
    noise = observation["noise"]
    output = {
        "action/a/0": (noise[:, 0] * 5).long(),
        "action/a/1": noise[:, 1:3],
        "action/b": (noise[:, 3] * 3).long(),
    }
    return DictTensor(), DictTensor(output), DictTensor()


def test_actions_have_the_form_of_the_space() -> None:
    pair = spaces.Tuple((spaces.Discrete(5), spaces.Box(-1, 1, (2,), np.float32)))
    env_args = {"action_space": spaces.Dict(a=pair, b=spaces.Discrete(3))}
    error = failure_of(env_args, lambda: FunctionAgent(act_nested, n_noise=4))
    n_steps = error.where.step + 1
    assert error.actions.keys() == {"a", "b"}
    first, second = error.actions["a"]
    assert (first.shape, second.shape) == ((n_steps,), (n_steps, 2))
    assert_replayed(error, UnluckyEnv(**env_args))


def test_a_failing_agent_leaves_the_environment_at_that_step() -> None:
    def fail_late(state: Any, observation: Any, *_: Any) -> Any:
        if (observation["frame"][:, 0] > 0.95).any():
            raise RuntimeError("late")
        return None, DictTensor({"action": zeros(observation)}), None

    error = failure_of({"chance": 0.0}, lambda: FunctionAgent(fail_late))
    assert isinstance(error, AgentError)
    assert "in one call for the rows" in str(error)
    assert len(error.actions) == error.where.step
    replayed = replay(UnluckyEnv(0.0), error)
    assert (replayed.n_steps, replayed.has_ended) == (error.where.step, False)
    again = replay(replayed.env, error)
    assert np.array_equal(replayed.observation, again.observation)


@pytest.mark.parametrize(
    ("env", "error", "kind", "words"),
    [
        (UnluckyEnv, "crash.npz", SpecError, "error"),
        (3, EnvError("it broke", actions=np.zeros(1, np.int64)), SpecError, "env"),
        (UnluckyEnv, EnvError("it broke"), UsageError, "actions"),
    ],
)
def test_episodes_that_cannot_be_replayed_are_refused(
    env: Any, error: Any, kind: Any, words: str
) -> None:
    if isinstance(error, EnvError):
        error.where = error.where._replace(seed=1)
    with pytest.raises(kind, match=words):
        replay(env, error)
