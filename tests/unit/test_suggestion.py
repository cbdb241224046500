"""suggest_workers: right for environments whose costs are known, and what it says and refuses."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rlpool import (
    Agent,
    DictTensor,
    EnvError,
    GymEnv,
    GymEnvInf,
    SpecError,
    VectorGymEnv,
    WorkerStartupError,
    WorkerSuggestion,
    suggest_workers,
)
from rlpool.training.short_run import Parts, Run
from rlpool.training.suggestion import StepTime
from rlpool.training.suggestion import _suggestion as suggestion


class Spending(gymnasium.Env[Any, Any]):
    """A step that sleeps or uses a core for a while; the fifth may fail. Notes who is open."""

    n_open = 0
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(3, start=-1)

    def __init__(self, sleep_s: float = 0.0, cpu_s: float = 0.0, fails: bool = False) -> None:
        self.sleep_s, self.cpu_s, self.fails = sleep_s, cpu_s, fails
        Spending.n_open += 1

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.n_steps = 0
        return self.observation_space.low, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.n_steps += 1
        if self.fails and self.n_steps == 5:
            raise KeyError("the bug")
        time.sleep(self.sleep_s)
        end = time.thread_time() + self.cpu_s
        while time.thread_time() < end:
            pass
        return self.observation_space.low, 1.0, self.n_steps == 10, False, {}

    def close(self) -> None:
        Spending.n_open -= 1


class Policy(Agent):
    def __call__(self, state: Any, observation: Any, agent_info: Any = None, history: Any = None):
        return DictTensor(), DictTensor({"action": observation["frame"][:, 0].long()}), DictTensor()


def quick(create_env: Any, *arguments: Any, **options: Any) -> WorkerSuggestion:
    return suggest_workers(create_env, *arguments, seconds=0.05, n_cores=2, **options)


def create_lanes(seed: int, n_envs: int, **env_args: Any) -> GymEnv:
    return GymEnv([Spending(**env_args) for _ in range(n_envs)], seed)


@pytest.mark.parametrize("make", ["one", "lanes"])
@pytest.mark.parametrize("agent", [None, Policy])
def test_steps_that_compute_get_a_worker_per_core(make: str, agent: Any) -> None:
    cost = {"cpu_s": 1e-3}
    found = (
        quick(Spending, agent, env_args=cost, n_timesteps=50)
        if make == "one"
        else quick(create_lanes, agent, env_args={"n_envs": 2, **cost}, n_timesteps=50)
    )
    assert found.n_threads == 2
    assert found.n_lanes <= 16  # more lanes gain nothing
    assert found.mean_length is not None
    assert 10.0 <= found.mean_length <= 20.0
    assert 1e-3 <= found.parts.env_step < 10e-3
    assert "n_threads=2" in str(found)
    assert Spending.n_open == 0


def test_steps_that_sleep_get_more_workers_than_cores() -> None:
    found = quick(Spending, env_args={"sleep_s": 5e-3}, n_timesteps=50)
    assert found.n_threads > 4
    assert found.cpu.of(1) < 0.5 * found.wall.of(1)


def test_a_given_number_of_lanes_is_divided() -> None:
    found = quick(Spending, env_args={"cpu_s": 1e-3}, n_lanes=6)
    assert max(1, found.n_threads) * found.n_lanes == 6
    assert {max(1, n) * each for n, each in found.estimates} == {6}


def test_lanes_of_a_vector_environment_stay() -> None:
    def create_env(seed: int) -> VectorGymEnv:
        return VectorGymEnv(gymnasium.make_vec("CartPole-v1", num_envs=8), seed)

    assert quick(create_env).n_lanes == 8
    with pytest.raises(SpecError, match="leave out n_lanes"):
        quick(create_env, n_lanes=4)


MEASURED = [  # fixed and per lane, share that computes, n_lanes given -> workers, lanes
    pytest.param((60e-6, 8e-6), 1.0, 4, (0, 4), id="few cheap lanes"),
    pytest.param((60e-6, 8e-6), 1.0, 16, (2, 8), id="many cheap lanes"),
    pytest.param((60e-6, 8e-6), 1.0, 1, (0, 1), id="one lane"),
    pytest.param((60e-6, 1e-3), 0.02, 4, (4, 1), id="few lanes that wait"),
]


@pytest.mark.parametrize(("step_s", "computes", "n_lanes", "expected"), MEASURED)
def test_workers_are_suggested_where_they_are_worth_it(
    step_s: tuple[float, float], computes: float, n_lanes: int, expected: tuple[int, int]
) -> None:
    step = StepTime(*step_s)
    runs = [Run(n, step.of(n), computes * step.of(n), None, 16) for n in (1, 4)]
    found = suggestion(runs, Parts(0.0, 0.0, 0.0), n_lanes, n_timesteps=128, cores=2)
    assert (found.n_threads, found.n_lanes) == expected
    assert found.steps_per_s == found.estimates[expected]


def test_one_core_gets_no_workers() -> None:
    assert (
        suggest_workers(Spending, env_args={"cpu_s": 1e-3}, seconds=0.05, n_cores=1).n_threads == 0
    )


class Masked(Spending):
    """Needs the option ``offset``, and allows one action in each step, which its infos say."""

    def info(self) -> dict[str, Any]:
        self.allowed = (self.n_steps + self.offset) % 3
        mask = np.zeros(3, np.int8)
        mask[self.allowed] = 1
        return {"action_mask": mask, "at": np.full(2, self.n_steps)}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.offset = options["offset"]
        return super().reset()[0], self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action == self.allowed - 1
        return *super().step(action)[:4], self.info()


class MaskedPolicy(Agent):
    """Uses all keys that the environment gives, and needs an ``agent_info``."""

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, history: Any = None):
        assert observation["at"].shape[1:] == agent_info["goal"].shape[1:] == (2,)
        action = observation["action_mask"].argmax(1) - 1
        return DictTensor(), DictTensor({"action": action}), DictTensor()


DECLARED = {"action_mask": (np.int8, 3), "at": None}


@pytest.mark.parametrize("kind", [GymEnv, GymEnvInf])
@pytest.mark.parametrize("info_keys", [DECLARED, ["at", "action_mask"]])
@pytest.mark.parametrize("agent", [None, MaskedPolicy])
def test_environments_and_agents_get_what_they_would_get_in_a_batcher(
    kind: Any, info_keys: Any, agent: Any
) -> None:
    def create_env(seed: int) -> GymEnv:
        return kind([Masked(), Masked()], seed, info_keys=info_keys)

    infos = {"agent_info": {"goal": [[1.0, 2.0]]}, "env_info": {"offset": 1}}
    assert quick(create_env, agent, **infos).mean_length is not None
    assert Spending.n_open == 0


def test_random_actions_keep_to_the_masks_of_infos_that_nobody_asked_for() -> None:
    assert quick(Masked, env_info={"offset": [2]}).parts.env_step > 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"create_env": Masked, "env_info": {"offset": [1, 2]}}, "'offset' in env_info has 2 rows"),
        ({"create_env": 3}, "create_env is 3, not a function"),
        ({"create_env": lambda: 3}, "create_env returned 3, not an environment"),
        ({"create_env": Spending, "n_lanes": 0}, "n_lanes should be an int of at least 1"),
        ({"create_env": Spending, "seconds": 0}, "seconds should be a positive number"),
        ({"env_fn": Spending}, "pass create_env"),
        (
            {"create_env": lambda: gymnasium.make_vec("CartPole-v1", 2, "async")},
            "started processes",
        ),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        suggest_workers(**arguments)
    assert Spending.n_open == 0


def test_errors_of_environments_say_where_and_environments_are_closed() -> None:
    with pytest.raises(EnvError, match="the bug"):
        quick(Spending, env_args={"fails": True})
    with pytest.raises(WorkerStartupError, match=r"create_env raised TypeError: .*'size'"):
        quick(Spending, env_args={"size": 3})
    assert Spending.n_open == 0


def test_the_caller_s_threads_and_generators_stay() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.get_num_threads()
    quick(Spending)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.get_num_threads() == before[1]
