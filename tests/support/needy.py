"""Environments that cannot be reset, and agents that cannot be called, without their infos."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gymnasium import spaces

from rlpool import Batcher, DictTensor, EpisodeBatcher, GymEnv, ParallelEnvManager

from support import envs
from support.agents import StepCounter
from support.envs import COUNTING_SPACE, AncestorCountingEnv, CountingEnv

LENGTHS, IDS = [2, 1], [5, 6]


def env_info(ids: list[int] = IDS) -> DictTensor:
    return DictTensor({"length": torch.tensor(LENGTHS), "id": torch.tensor(ids)})


def agent_info() -> DictTensor:
    return DictTensor({"gain": torch.ones(2)})


class Runs:
    """Both kinds of batcher by one call, two episodes at a time."""

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
        observes: ``"box"`` and ``"dict"`` declare their spaces, ``"undeclared"`` and
            ``"undeclared dict"`` do not. The key is always ``frame``.
        acts: Whether there is an action space.
        needs: Whether it needs its options.
    """

    def __init__(self, observes: str = "box", acts: bool = True, needs: bool = True) -> None:
        super().__init__()
        self.needs = needs
        self.is_dict = "dict" in observes
        self.observation_space: Any = {
            "box": COUNTING_SPACE,
            "dict": spaces.Dict({"frame": COUNTING_SPACE}),
        }.get(observes)
        if not acts:
            self.action_space: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        given: Any = options
        if self.needs:
            assert given["id"] >= 0, "ids are not negative"
        return super().reset(seed=seed, options=options)

    def observation(self) -> Any:
        observation = super().observation()
        return {"frame": observation} if self.is_dict else observation


class OldNeedyEnv(AncestorCountingEnv):
    """Likewise in the former gym's interface, without any space."""

    def __init__(self, observes: str = "", acts: bool = False, needs: bool = True) -> None:
        super().__init__()

    def reset(self, env_info: Any) -> Any:  # type: ignore[override]
        self.length, self.number = env_info["length"], env_info["id"]
        return super().reset()


class NeedyAgent(StepCounter):
    """A ``StepCounter`` that fails without ``agent_info``."""

    def __call__(self, state, observation, agent_info=None, history=None):
        agent_info["gain"]
        return super().__call__(state, observation, agent_info, history)


def create_needy(seed: int, n_envs: int = 2, kind: Any = NeedyEnv, **arguments: Any) -> GymEnv:
    """Lanes, all of which need their options."""
    return GymEnv([kind(**arguments) for _ in range(n_envs)], seed)


def create_partly_needy(seed: int, **arguments: Any) -> GymEnv:
    """Lanes, the second of which needs its options."""
    return GymEnv([NeedyEnv(needs=needs, **arguments) for needs in (False, True)], seed)


def Needy(kind: Any = NeedyEnv, **arguments: Any) -> Any:  # noqa: N802
    """What makes one environment, in whatever process."""
    return partial(kind, **arguments)


def create_manager(seed: int, n_envs: int = 2, **arguments: Any) -> ParallelEnvManager:
    """Lanes in processes of their own."""
    return ParallelEnvManager([Needy(**arguments)] * n_envs, seed=seed, envs_per_worker=2)
