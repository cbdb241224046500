"""Environments with tasks, storages and agents with ``act``, for meta-RL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlpool import DictTensor, GymEnv, VariBadWrapper


class TaskEnv(gymnasium.Env[Any, Any]):
    """The observation is ``[step, task]``, the reward ``10 * task + step``, plus optional noise.

    Args:
        length: Steps after which an episode terminates; ``None`` for never.
        limit: Its time limit, which a wrapper has to enforce.
        noise: Standard deviation of noise added to the observation.
        bounds: Bounds of the two actions.
    """

    def __init__(
        self,
        length: int | None = None,
        limit: int | None = 3,
        noise: float = 0.0,
        bounds: tuple[float, float] = (-2.0, 4.0),
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(*bounds, (2,), np.float32)
        if limit is not None:
            self.max_episode_steps = limit
        self.n_tasks, self.length, self.noise = 7, length, noise
        self.task = self.t = -1
        self.calls: list[Any] = []
        self.actions: list[Any] = []

    def get_all_task_idx(self) -> list[int]:
        return list(range(self.n_tasks))

    def get_current_task(self) -> Any:
        return np.array([self.task, -self.task], np.float32)

    def reset_task(self, task: Any = None) -> None:
        self.calls.append(("reset_task", task))
        self.task = int(self.np_random.integers(self.n_tasks)) if task is None else task

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.calls.append(("reset", seed, options))
        super().reset(seed=seed)
        self.t = 0
        return self.observation(), {"n_resets": len(self.calls)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.t += 1
        # The effect of an action is visible, so a wrong one is detected.
        reward = 10.0 * self.task + self.t + 0.25 * float(np.sum(action))
        terminated = self.length is not None and self.t >= self.length
        return self.observation(), reward, terminated, False, {}

    def observation(self) -> Any:
        noise = self.noise * self.np_random.normal() if self.noise else 0.0
        return np.array([self.t + noise, self.task], np.float32)


class RaggedTaskEnv(TaskEnv):
    """Environment whose episode lengths are drawn from its generator."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        result = super().reset(seed=seed, options=options)
        self.length = int(self.np_random.integers(1, 8))
        return result


class DrawingEnv(RaggedTaskEnv):
    """Environment whose reset draws as many numbers as the task says, which affects later draws."""

    def __init__(self) -> None:
        super().__init__(limit=6)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        TaskEnv.reset(self, seed=seed, options=options)
        self.draw(int(self.task))
        self.length = 1 + int(self.draw(1)[0] * 7)
        return self.observation(), {}

    def observation(self) -> Any:
        return np.array([self.t + self.draw(1)[0], self.task], np.float32)

    def draw(self, n: int) -> list[float]:
        numbers: list[float] = self.np_random.random(n).tolist()
        return numbers


class TaskFirstEnv(DrawingEnv):
    """Environment that does not have a task before ``reset_task``."""

    def __init__(self) -> None:
        super().__init__()
        del self.task


class DrawnTaskEnv(DrawingEnv):
    """Environment that draws its task and does not list tasks."""

    n_tasks = get_all_task_idx = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        del self.n_tasks

    def reset_task(self, task: Any = None) -> None:
        self.calls.append(("reset_task", task))
        n_drawn = 3 if task is None else task
        self.task = 10 * sum(self.draw(n_drawn + 1))


class OldGymEnv:
    """An environment written for the old gym: only ``seed`` seeds it.

    ``step`` has four results, ``reset`` has no arguments, and the time limit is stored as in the
    old gym.

    Args:
        inner: The environment.
        limit: Steps of an episode.
    """

    def __init__(self, inner: TaskEnv, limit: int) -> None:
        self.inner, self._max_episode_steps = inner, limit
        self.observation_space, self.action_space = inner.observation_space, inner.action_space
        self.calls, self.reset_task = inner.calls, inner.reset_task
        self.get_current_task = inner.get_current_task
        if inner.n_tasks is not None:
            self.n_tasks = inner.n_tasks

    def seed(self, seed: int | None = None) -> None:
        self.inner.np_random = np.random.default_rng(seed)

    def reset(self) -> Any:
        return self.inner.reset()[0]

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        observation, reward, terminated, _, info = self.inner.step(action)
        return observation, reward, terminated, info


class LegacyDrawingEnv(OldGymEnv):
    def __init__(self) -> None:
        super().__init__(DrawnTaskEnv(), 6)


DRAWING = (
    DrawingEnv,
    TaskFirstEnv,
    DrawnTaskEnv,
    LegacyDrawingEnv,
)
"""Environments whose resets and tasks draw what the next draws depend on."""


def ragged_trials(episodes_per_task: int = 2, noise: float = 1.0) -> VariBadWrapper:
    """Return trials of noisy episodes that terminate or are truncated, whichever comes first."""
    return VariBadWrapper(RaggedTaskEnv(limit=6, noise=noise), episodes_per_task)


class Storage:
    """Storage that keeps all additions in order."""

    def __init__(self) -> None:
        self.samples: list[tuple[Any, ...]] = []
        self.episodes: list[tuple[Any, ...]] = []

    def add_sample(self, *columns: Any) -> None:
        self.samples.append(columns)

    def add_episode(self, *columns: Any) -> None:
        self.episodes.append(columns)

    def as_bytes(self) -> list[list[bytes]]:
        """Return everything as bytes."""
        rows = [*self.samples, *self.episodes]
        return [[np.asarray(value).tobytes() for value in row] for row in rows]


class MarkovActor(nn.Module):
    """Actor that depends on the observation only, without noise."""

    def __init__(self, n_observed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.linear = nn.Linear(n_observed, 2)
        self.n_rows: list[int] = []

    def act(self, obs: Tensor, deterministic: bool = False) -> tuple[Any, ...]:
        self.n_rows.append(obs.shape[0])
        return torch.tanh(self.linear(obs)), None, None, None


class MemoryActor(nn.Module):
    """Actor that depends on its memory, whose kind is a key of ``STATES``."""

    STATES: ClassVar[dict[str, Any]] = {
        "gru": torch.zeros(1, 1, 5),
        "cell": torch.zeros(1, 5),
        "lstm": (torch.zeros(1, 1, 5), torch.zeros(1, 1, 5)),
        "dict": DictTensor({"hidden": torch.zeros(1, 5)}),
    }

    def __init__(self, kind: str = "gru", n_observed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            body = {"gru": nn.GRU, "lstm": nn.LSTM}.get(kind, nn.GRUCell)
            self.body: nn.Module = body(n_observed + 3, 5)
            self.head = nn.Linear(5, 2)
        self.kind = kind
        self.initial = torch.zeros(1, 2), torch.zeros(1, 1), self.STATES[kind]
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def get_initial_info(self) -> tuple[Tensor, Tensor, Any]:
        return self.initial

    def act(self, prev_internal_state, prev_action, reward, obs, deterministic=False):
        self.calls.append((prev_action.clone(), reward.clone(), obs.clone()))
        inputs = torch.cat([obs, prev_action, reward], -1)
        if self.kind in ("gru", "lstm"):
            output, state = self.body(inputs[None], prev_internal_state)
            return (torch.tanh(self.head(output[0])), None, None, None), state
        is_dict = self.kind == "dict"
        output = self.body(inputs, prev_internal_state["hidden" if is_dict else ...])
        state = DictTensor({"hidden": output}) if is_dict else output
        return (torch.tanh(self.head(output)), None, None, None), state


class CountingActor:
    """Actor whose action is its number of calls in this rollout / 100, on every dimension."""

    def get_initial_info(self) -> tuple[Tensor, Tensor, Any]:
        return torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1, 1)

    def act(self, prev_internal_state: Any, **others: Any) -> tuple[Any, Any]:
        steps = prev_internal_state + 1
        return steps.expand(-1, 2) / 100, steps


gymnasium.register(id="Ragged-v0", entry_point="support.meta:RaggedTaskEnv")


class LaggingLanes(GymEnv):
    """Lanes in which ``step_some`` completes the lane requested last first."""

    def __init__(
        self, envs: list[Any], min_ready: int, seed: int | None = None, **options: Any
    ) -> None:
        super().__init__(envs, seed, **options)
        self.min_ready = min_ready
        self.queue: list[tuple[int, dict[str, Any]]] = []
        self.most_ready = 0

    def reset_lanes(self, lanes: Any, seeds: Any, options: Any) -> None:
        self.queue = [(lane, given) for lane, given in self.queue if lane not in lanes]
        super().reset_lanes(lanes, seeds, options)

    def step_some(
        self, min_ready: int = 1, lanes: Any = (), actions: Mapping[str, Any] | None = None
    ) -> list[int]:
        given = {key: values.copy() for key, values in (actions or {}).items()}
        self.queue += [(lane, given) for lane in lanes]
        n_ready = min(min_ready, len(self.queue))
        ready = [self.queue.pop() for _ in range(n_ready)]
        for lane, asked in ready:
            self.step_lanes([lane], asked)
        self.most_ready = max(self.most_ready, n_ready)
        return sorted(lane for lane, _ in ready)
