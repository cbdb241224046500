"""Environments that cannot be reset, and agents that cannot be called, without their infos."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlpool import Batcher, DictTensor, EpisodeBatcher, GymEnv, ParallelEnvManager

from support import envs
from support.agents import StepCounter
from support.envs import CountingEnv, LegacyCountingEnv

LENGTHS, IDS = [2, 1], [5, 6]


def env_info(ids: list[int] = IDS) -> DictTensor:
    return DictTensor({"length": torch.tensor(LENGTHS), "id": torch.tensor(ids)})


def agent_info() -> DictTensor:
    return DictTensor({"gain": torch.ones(2)})


class Runs:
    """Runs either kind of batcher by one call, two episodes at a time."""

    def __init__(
        self,
        create_env: Any,
        create_agent: Any = StepCounter,
        n_threads: int = 0,
        kind: Any = EpisodeBatcher,
    ) -> None:
        seeds = [0] * n_threads or 0
        self.batcher = kind(4, 8, create_agent, {}, create_env, {}, n_threads, seeds=seeds)

    def __call__(self, **infos: Any) -> Any:
        if isinstance(self.batcher, Batcher):
            self.batcher.reset(**infos)
            self.batcher.execute()
        else:
            self.batcher.execute(2, **infos)
        return self.batcher.get()

    def assert_right(self, **infos: Any) -> None:
        envs.assert_same_tensors(self(**infos), envs.counting_trajectories(LENGTHS, IDS))


class NeedyEnv(CountingEnv):
    """A ``CountingEnv`` that fails without ``id`` among its options.

    Args:
        observes: ``"box"``; or ``"undeclared"`` and ``"undeclared dict"``, without spaces. The key
            is always ``frame``.
        needs: Whether it needs the options.
    """

    def __init__(self, observes: str = "box", needs: bool = True) -> None:
        super().__init__()
        self.needs, self.is_dict = needs, "dict" in observes
        if observes != "box":
            self.observation_space = self.action_space = None  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        given: Any = options
        if self.needs:
            assert given["id"] >= 0, "ids are not negative"
        return super().reset(seed=seed, options=options)

    def observation(self) -> Any:
        observation = super().observation()
        return {"frame": observation} if self.is_dict else observation


class OldNeedyEnv(LegacyCountingEnv):
    """The same with the old gym's interface, without spaces."""

    def __init__(self, needs: bool = True) -> None:
        super().__init__()

    def reset(self, env_info: Any) -> Any:  # type: ignore[override]
        self.length, self.number = env_info["length"], env_info["id"]
        assert self.number >= 0, "ids are not negative"
        return super().reset()


class NeedyAgent(StepCounter):
    """A ``StepCounter`` that fails without ``agent_info``."""

    def __call__(self, state, observation, agent_info=None, history=None):
        agent_info["gain"]
        return super().__call__(state, observation, agent_info, history)


def create_needy(
    seed: int, kind: Any = NeedyEnv, needs: tuple[bool, bool] = (True, True), **arguments: Any
) -> GymEnv:
    """Create two lanes; the selected ones, by default all, need their options."""
    return GymEnv([kind(needs=each, **arguments) for each in needs], seed)


def Needy(kind: Any = NeedyEnv, **arguments: Any) -> Any:  # noqa: N802
    """Return a picklable factory of one environment."""
    return partial(kind, **arguments)


def create_manager(seed: int, **arguments: Any) -> ParallelEnvManager:
    """Create lanes in a separate process."""
    return ParallelEnvManager([Needy(**arguments)] * 2, seed=seed, envs_per_worker=2)
