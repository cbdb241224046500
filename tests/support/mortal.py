"""Environments that end their worker once, agents that remember: what restarts have to repeat."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from rlpool import Agent, DictTensor, GymEnv, GymEnvInf, TemporalDictTensor
from rlpool.slots.writer import SlotWriter

from support.faults import strike

_LEAK_BYTES = 2**24


class MortalWalk(gymnasium.Env[Any, Any]):
    """A random walk that depends on seed and actions, and strikes once per chosen place.

    The observation is ``[position, step]``; an episode has ``length`` steps (an option), or a
    number that its seed decides.

    Args:
        marks: Directory for the marks of what has struck already.
        strikes: ``(episode's id, step) -> kind of ``support.faults.strike``; step -1 is a reset.
        leaks: Whether every episode keeps 16 MiB.
        close_fault: How ``close`` fails, a kind of ``support.faults.strike``.
        step_s: How long a step takes, in seconds.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(
        self,
        marks: str,
        strikes: Mapping[tuple[int, int], str] | None = None,
        leaks: bool = False,
        close_fault: str = "none",
        step_s: float = 0.0,
    ) -> None:
        self._step_s = step_s
        self._close_fault = close_fault
        self._marks = Path(marks)
        self._strikes = dict(strikes or {})
        self._leaks = leaks
        self._leaked: list[bytes] = []
        self._id = -1

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        given = dict(options or {})
        self._id = given.get("id", self._id)
        self._length = given.get("length") or int(self.np_random.integers(1, 12))
        self._position, self._step = float(self.np_random.normal()), 0
        (self._marks / f"pid-{os.getpid()}").touch()
        if self._leaks:
            self._leaked.append(b"x" * _LEAK_BYTES)
        self._strike(-1)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._step_s)
        self._strike(self._step)
        self._step += 1
        self._position += float(self.np_random.normal()) * (1 + int(action))
        is_over = self._step >= self._length
        return self._observation(), self._position, is_over, False, {}

    def close(self) -> None:
        strike(self._close_fault)

    def _observation(self) -> Any:
        return np.array([self._position, self._step], np.float32)

    def _strike(self, step: int) -> None:
        kind = self._strikes.get((self._id, step))
        if kind is None:
            return
        try:
            mark = self._marks / f"{self._id}@{step}"
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        strike(kind, str(self._marks / "struck"))


class RememberingAgent(Agent):
    """Chooses by its state, its noise and the last update."""

    n_noise = 1

    def __init__(self, wants_history: bool = False) -> None:
        self._wants_history = wants_history
        self._bias = 0.0

    def require_history(self) -> bool:
        return self._wants_history

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        if state is None:
            state = DictTensor({"memory": torch.zeros(observation.n_elems())})
        memory = 0.9 * state["memory"] + observation["frame"][:, 0]
        score = memory.sin() + observation["noise"][:, 0] + self._bias
        if agent_info is not None:
            score = score + agent_info["offset"]
        action = (score > 0.3).long() + (score > 0.9).long()
        bias = torch.full((observation.n_elems(),), self._bias)
        output = DictTensor({"action": action, "bias": bias})
        return state, output, DictTensor({"memory": memory})

    def update(self, info: float) -> None:
        self._bias = info


def create_walks(seed: int, n_lanes: int = 2, restarts: bool = False, **arguments: Any) -> GymEnv:
    """``n_lanes`` walks; they begin again on their own with ``restarts``."""
    kind = GymEnvInf if restarts else GymEnv
    return kind([MortalWalk(**arguments) for _ in range(n_lanes)], seed)


def create_walks_once(seed: int, marks: str, kind: str) -> GymEnv:
    """Two walks; whoever makes them again fails, or with ``"reset"`` whoever resets them then."""
    mark = Path(marks) / "made"
    if mark.exists() and kind == "reset":
        MortalWalk.reset = lambda *_, **__: strike("raise")  # type: ignore[assignment, method-assign]
    elif mark.exists():
        strike(kind)
    mark.touch()
    return create_walks(seed, marks=marks, strikes={(2, 0): "sigkill"})


def create_walks_that_end_with_a_full_slot(seed: int, marks: str, n_timesteps: int) -> GymEnv:
    """A walk; the first worker that has filled a slot is killed before it says so.

    The first episode is shorter then, so that its second run leaves rows of the first alone.
    """
    complete, mark = SlotWriter.complete, Path(marks) / "struck"

    def fatal_complete(writer: SlotWriter, slot: int, lane: int, length: int, starts: bool) -> None:
        if length == n_timesteps and not mark.exists():
            strike("sigkill", str(mark))
        complete(writer, slot, lane, length, starts)

    SlotWriter.complete = fatal_complete  # type: ignore[method-assign]
    lengths = {0: n_timesteps // 2} if mark.exists() else {}
    return GymEnv([ShrunkWalk(marks, lengths)], seed)


class ShrunkWalk(MortalWalk):
    """A walk some of whose episodes are of another length than asked for: ``id -> length``."""

    def __init__(self, marks: str, lengths: Mapping[int, int]) -> None:
        super().__init__(marks)
        self._lengths = lengths

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        result = super().reset(**arguments)
        self._length = self._lengths.get(self._id, self._length)
        return result


class UnsteadyWalk(MortalWalk):
    """A walk that is another one in every process."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, *rest = super().step(action)
        return observation + np.float32(os.getpid()), *rest


def create_unsteady_walks(seed: int, **arguments: Any) -> GymEnv:
    """One walk that does not repeat itself in another process."""
    return GymEnvInf([UnsteadyWalk(**arguments)], seed)
