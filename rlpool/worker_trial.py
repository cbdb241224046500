"""One worker process that runs one episode: whether that works, and how long it takes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import torch

from rlpool.agents.agent import Agent, AgentStep
from rlpool.batch.batcher import EpisodeBatcher
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.gym_env import GymEnv

_PATIENCE_S = 120.0
"""A worker that takes longer counts as never starting."""

_EPISODE_STEPS = 5


def seconds_of_an_episode() -> float:
    """Start a worker, let it run an episode, and return the seconds until that was here.

    Raises:
        RlpoolError: If a limit keeps the worker from starting, or it ends.
        TimeoutError: If it does not answer for two minutes.
        RuntimeError: If it answers with another episode.
    """
    start_s = time.monotonic()
    with _deadline(_PATIENCE_S), _batcher() as batcher:
        batcher.execute(1)
        trajectories = batcher.get()
        took_s = time.monotonic() - start_s
    if trajectories is None or trajectories["frame"][0, :, 0].tolist() != [*range(_EPISODE_STEPS)]:
        raise RuntimeError("a worker returned a wrong episode")
    return took_s


def _batcher() -> EpisodeBatcher:
    return EpisodeBatcher(
        n_timesteps=_EPISODE_STEPS,
        n_slots=1,
        create_agent=_Still,
        create_env=_create_env,
        n_threads=1,
        seeds=0,
        timeout=_PATIENCE_S,
    )


class _Counting(gymnasium.Env[Any, Any]):
    """Its observation is the number of the step."""

    observation_space = gymnasium.spaces.Box(0.0, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._step = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        is_last = self._step == _EPISODE_STEPS
        return np.full(1, self._step, np.float32), 0.0, is_last, False, {}


class _Still(Agent):
    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> AgentStep:
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor({}), DictTensor({"action": action}), DictTensor({})


def _create_env(seed: int) -> GymEnv:
    return GymEnv([_Counting()], seed)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Interrupt what takes too long, where that is possible and nobody else does it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def interrupt(*_: Any) -> None:
        raise TimeoutError(f"no answer for {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
