"""Workers that are forked from a template and workers that are spawned: the same results."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import rlpool
from rlpool import Batcher, DictTensor, EpisodeBatcher, GymEnv, ParallelEnvManager, Pool, SpecError

pytestmark = pytest.mark.timeout(120)

_LENGTH = 9

_WAS_SPAWNED = gc.get_freeze_count() == 0
"""Whether this worker imported torch by itself. The template froze what it had imported, which is
about all that tells the two apart."""


class StartedEnv(gymnasium.Env):
    """Draws from every generator there is, and shows whether its process was spawned."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._shown(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._shown(action), float(self._step), self._step == _LENGTH, False, {}

    def _shown(self, action: int) -> Any:
        legacy = np.random.normal()  # noqa: NPY002 (the one that all share)
        drawn = self.np_random.normal(), legacy, torch.rand(()).item()
        return np.array([_WAS_SPAWNED, action, *drawn], np.float32)


class GeneratorAgent(rlpool.Agent):
    """Chooses by torch's own generator."""

    def __call__(self, state: Any, observation: DictTensor, *_: Any) -> Any:
        action = torch.randint(2, (observation.n_elems(),))
        return DictTensor(), DictTensor({"action": action}), DictTensor()


def create_env(seed: int) -> GymEnv:
    return GymEnv([StartedEnv(), StartedEnv()], seed)


def create_limited() -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(StartedEnv(), _LENGTH)


def collected(owner: type, n_threads: int, **arguments: Any) -> torch.Tensor:
    n_slots = 7 if owner is EpisodeBatcher else None
    with owner(
        _LENGTH, n_slots, GeneratorAgent, {}, create_env, {}, n_threads, seeds=3, **arguments
    ) as batcher:
        if owner is Batcher:
            batcher.reset()
        batcher.execute(*[7] * (owner is EpisodeBatcher))
        return torch.as_tensor(batcher.get()["frame"]).clone()


def steps(**arguments: Any) -> torch.Tensor:
    with rlpool.make_parallel_env(create_limited, 2, 2, seed=3, **arguments) as manager:
        manager.reset()
        shown = [manager.current["frame"].copy()]
        for t in range(5):
            manager.step_lanes([0, 1], {"action": np.array([t % 2, 1])})
            shown.append(manager.current["frame"].copy())
    return torch.as_tensor(np.stack(shown, 1))


def stored(**arguments: Any) -> torch.Tensor:
    envs = [StartedEnv(), StartedEnv()]
    with Pool(envs, 2, 100, random=False, seed=3, **arguments) as pool:
        pool.store()
        return torch.as_tensor(pool.get_pool()[0]).reshape(2, _LENGTH, -1)


def test_results_are_the_same_bits_however_workers_start() -> None:
    # One worker: else what its own generators give is a matter of who comes first.
    for collect in (partial(collected, EpisodeBatcher, 1), steps, stored):
        forked, spawned = collect(start_method="auto"), collect(start_method="spawn")
        assert not (forked[:, :, 0] == 1).any()
        assert (spawned[:, 0, 0] == 1).all()
        assert torch.equal(forked[:, :, 1:], spawned[:, :, 1:])
    assert not (collected(Batcher, 2)[:, :, 0] == 1).any()  # the template is the default


DOORS: dict[str, Callable[..., Any]] = {
    "EpisodeBatcher": partial(EpisodeBatcher, 4, 6, GeneratorAgent, {}, create_env, {}, 0),
    "Batcher": partial(Batcher, 4, None, GeneratorAgent, {}, create_env, {}, 0),
    "Pool": partial(Pool, pool_size=10),
    "Pool of environments": partial(Pool, [StartedEnv()], pool_size=10),
    "ParallelEnvManager": partial(ParallelEnvManager, [StartedEnv]),
    "make_parallel_env": partial(rlpool.make_parallel_env, create_limited, 2, 1),
}


def test_what_is_no_start_method_is_refused() -> None:
    for name, opened in DOORS.items():
        for value in ("fork", "", None, 1, ["spawn"]):
            with pytest.raises(SpecError, match="should be 'auto' or 'spawn', got") as caught:
                opened(start_method=value)
            assert repr(value) in str(caught.value), name
    for name in list(DOORS)[:4]:  # which start no process
        for value in ("auto", "spawn"):
            DOORS[name](start_method=value).close()
