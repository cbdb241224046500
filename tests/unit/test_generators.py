"""With ``n_threads=0``, user code has a worker's generators, and the caller keeps its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlpool import (
    Agent,
    AgentError,
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    ParallelEnvManager,
    WorkerStartupError,
)

pytestmark = pytest.mark.promise("I6")


def drawn() -> list[float]:
    """Draw one number from every generator; normals are drawn in pairs and the second is cached."""
    return [
        random.random(),
        random.gauss(0.0, 1.0),
        float(np.random.rand()),  # noqa: NPY002
        float(np.random.normal()),  # noqa: NPY002
        torch.rand(()).item(),
        torch.randn(()).item(),
    ]


class DrawingEnv(gymnasium.Env[Any, Any]):
    """Environment whose observation is what it has just drawn."""

    observation_space = spaces.Box(-np.inf, np.inf, (6,), np.float64)
    action_space = spaces.Discrete(1000)

    def __init__(self) -> None:
        self.base = np.array(drawn())

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.base + drawn(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.base + drawn(), float(action), self.t == 3, False, {}

    def close(self) -> None:
        drawn()


class DrawingAgent(Agent):
    """Agent with an unseeded, never updated network and random actions."""

    def __init__(self) -> None:
        drawn()
        self.linear = torch.nn.Linear(6, 3)

    def __call__(self, state, observation, agent_info=None, history=None):
        n = observation.n_elems()
        output = {
            "action": torch.randint(1000, (n,)),
            "logits": self.linear(observation["frame"].float()),
            "noisy": torch.from_numpy(np.random.normal(size=n)),  # noqa: NPY002
        }
        return DictTensor(), DictTensor(output), DictTensor()

    def update(self, info: Any) -> None:
        torch.nn.init.normal_(self.linear.weight)

    def close(self) -> None:
        drawn()


def create_drawing(seed: int, restarts: bool = False) -> GymEnv:
    drawn()
    random.seed(random.random())
    envs = [DrawingEnv() for _ in range(2)]
    return (GymEnvInf if restarts else GymEnv)(envs, seed, keep_float64=True)


def create_drawing_manager(seed: int) -> ParallelEnvManager:
    drawn()
    return ParallelEnvManager([DrawingEnv] * 2, seed=seed, keep_float64=True, envs_per_worker=2)


def states() -> list[Any]:
    of_numpy: Any = np.random.get_state()  # noqa: NPY002
    numpy_parts = [of_numpy[0], of_numpy[1].tolist(), *of_numpy[2:]]
    return [random.getstate(), numpy_parts, torch.get_rng_state().tolist()]


@contextmanager
def untouched() -> Iterator[None]:
    """Check that this context leaves the caller's generators unchanged, bit for bit."""
    drawn()  # one normal number is now cached
    before = states()
    yield
    assert states() == before


def episodes(n_threads: int = 0, **arguments: Any) -> EpisodeBatcher:
    given: dict[str, Any] = {"create_agent": DrawingAgent, "create_env": create_drawing}
    return EpisodeBatcher(2, 8, n_threads=n_threads, seeds=7, **given | arguments)


def windows(n_threads: int = 0) -> Batcher:
    restarts = {"restarts": True}
    return Batcher(4, None, DrawingAgent, {}, create_drawing, restarts, n_threads, seeds=7)


def request(batcher: Any, n_episodes: int) -> None:
    if isinstance(batcher, EpisodeBatcher):
        batcher.execute(n_episodes)
        return
    if n_episodes == 5:
        batcher.reset()
    batcher.execute()


def run(batcher: Any) -> Iterator[dict[str, bytes]]:
    """Make sequential requests with an update in between."""
    for n_episodes in (5, 3, 4):
        request(batcher, n_episodes)
        result = batcher.get()
        yield {key: tensor.numpy().tobytes() for key, tensor in result.items()}
        if n_episodes == 3:
            batcher.update(None)


def in_manager() -> EpisodeBatcher:
    return episodes(create_env=create_drawing_manager)


@pytest.mark.parametrize("make", [windows, in_manager])
def test_the_callers_generators_are_unchanged_after_every_call(make: Any) -> None:
    with untouched():
        batcher = make()
    calls: list[Callable[[], Any]] = [
        lambda: request(batcher, 5),
        lambda: batcher.get(blocking=False) or batcher.get(),
        lambda: batcher.update(None),
        lambda: request(batcher, 3),
        batcher.get,
        batcher.close,
    ]
    for call in calls:
        with untouched():
            call()


@pytest.mark.parametrize("make", [episodes, windows])
def test_draws_match_a_workers_regardless_of_other_draws(make: Any) -> None:
    with make(n_threads=1) as batcher:
        expected = list(run(batcher))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    found = []
    with make() as one, (windows if make is episodes else episodes)() as other:
        for result, _ in zip(run(one), run(other), strict=True):
            found.append(result)
            drawn()
    assert found == expected


@pytest.mark.parametrize(
    ("fails_in", "error", "expected"),
    [
        ((DrawingEnv, "reset"), KeyError, EnvError),
        ((DrawingEnv, "step"), KeyboardInterrupt, KeyboardInterrupt),
        ((DrawingAgent, "__call__"), KeyError, AgentError),
        ((DrawingEnv, "close"), KeyError, None),
        (None, KeyError, WorkerStartupError),
    ],
)
def test_the_callers_generators_are_restored_if_user_code_raises(
    fails_in: Any, error: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **named: Any) -> Any:
        drawn()
        raise error("goal")

    if fails_in:
        monkeypatch.setattr(*fails_in, fail)
    raises = pytest.raises(expected) if expected else nullcontext()
    create_env = create_drawing if fails_in else fail
    with untouched(), raises, episodes(create_env=create_env) as batcher:
        batcher.execute(5)
        batcher.get()
