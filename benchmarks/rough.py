"""Environments that strike by chance, and a policy with memory and noise to run in them.

What an episode consists of follows from its seed, its task and the policy alone. Whether and when
an environment strikes does not: it is drawn from the system's entropy, per process, so that the
episode that is run again does not meet the same fate.

Everything is at module level, so that spawned workers can import it by name.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import torch

from rlpool import Agent, DictTensor, GymEnv, GymEnvInf, TemporalDictTensor, sample_categorical

N_ACTIONS = 3
_HOG_BYTES = 128 * 2**20
"""What a memory hog takes: more than ``max_rss_bytes`` in the scripts leaves."""

_PEACE_S = 1.0
"""No environment strikes sooner: a batcher checks what its workers hold when they are ready."""

_hoarded: list[Any] = []


class Strikes:
    """When and how the environments of this process strike.

    Args:
        notes: Directory in which each process leaves a line per strike; none by default.
        mean_s: Mean seconds between two strikes of a process, 0 for never.
        kinds: Ways of striking to choose from.
    """

    def __init__(self, notes: str | None, mean_s: float, kinds: tuple[str, ...]) -> None:
        self._notes = notes
        self._mean_s = mean_s
        self._kinds = kinds
        self._chance = random.SystemRandom()
        self._next_s = self._draw()
        if notes is not None:
            note(notes, "created")

    def _draw(self) -> float:
        if not self._mean_s:
            return float("inf")
        return time.monotonic() + _PEACE_S + self._chance.expovariate(1 / self._mean_s)

    def maybe(self) -> None:
        """Strike if it is time to."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = self._draw()
        kind = self._chance.choice(self._kinds)
        if self._notes is not None:
            note(self._notes, kind)
        strike(kind)


def note(directory: str, what: str) -> None:
    """Leave a line that outlives this process."""
    with open(Path(directory) / f"{os.getpid()}.notes", "a") as file:
        file.write(f"{what}\n")


def noted(directory: str) -> Counter[str]:
    """How often what was noted."""
    return Counter(
        line for path in Path(directory).glob("*.notes") for line in path.read_text().split()
    )


def strike(kind: str) -> None:
    """Fail in a way; a hoarder goes on."""
    if kind == "raise":
        raise ValueError("struck")
    if kind == "sys_exit":
        raise SystemExit("struck")
    if kind == "os_exit":
        os._exit(9)
    if kind == "memory_error":
        _run_out_of_memory()
    if kind == "hoard":
        _hoarded.append(np.ones(_HOG_BYTES, np.uint8))
    if kind == "oom_kill":
        hog = np.ones(_HOG_BYTES, np.uint8)
        os.kill(os.getpid(), signal.SIGKILL)
        del hog
    if kind.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, kind))


def _run_out_of_memory() -> None:
    """Take memory until the limit that is set here refuses it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + _HOG_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    hog = []
    try:
        while True:
            hog.append(np.ones(_HOG_BYTES // 4, np.uint8))
    finally:
        del hog
        resource.setrlimit(resource.RLIMIT_AS, before)


class RoughEnv(gymnasium.Env[Any, Any]):
    """A walk that depends on its seed, its ``task`` and the actions; now and then it strikes.

    Args:
        strikes: When it does; never by default.
        longest: Steps of the longest episodes, of which there are a few.
        sleep_s: What a step takes.
    """

    action_space = gymnasium.spaces.Discrete(N_ACTIONS)

    def __init__(
        self, strikes: Strikes | None = None, longest: int = 60, sleep_s: float = 0.0
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self._strikes = strikes
        self._longest = longest
        self._sleep_s = sleep_s
        self._task = 0.0
        self._position = np.zeros(2)
        self._steps_left = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._task = float((options or {}).get("task", 0.0))
        self._position = self.np_random.normal(size=2)
        is_long = self.np_random.random() < 0.1
        self._steps_left = self._longest if is_long else int(self.np_random.integers(1, 15))
        self._maybe_strike()
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        self._position += 0.1 * (int(action) - 1) + 0.05 * self.np_random.normal(size=2)
        self._steps_left -= 1
        self._maybe_strike()
        reward = float(self._position.sum() - self._task)
        return self._observation(), reward, self._steps_left == 0, False, {}

    def _maybe_strike(self) -> None:
        if self._strikes is not None:
            self._strikes.maybe()

    def _observation(self) -> Any:
        return np.array([*self._position, self._task], np.float32)


class RoughAgent(Agent):
    """A recurrent policy that draws its actions from its noise."""

    n_noise = 1
    N_HIDDEN = 8

    def __init__(self) -> None:
        self.cell = torch.nn.GRUCell(3, self.N_HIDDEN)
        self.head = torch.nn.Linear(self.N_HIDDEN, N_ACTIONS)
        self.update(parameters(0))

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        n = observation.n_elems()
        if state is None:
            state = DictTensor({"hidden": torch.zeros(n, self.N_HIDDEN)})
        hidden = self.cell(observation["frame"], state["hidden"])
        logits = self.head(hidden)
        if agent_info is not None and not agent_info.empty():
            logits = logits * agent_info["sharpness"].unsqueeze(1)
        action, log_probability = sample_categorical(logits, observation["noise"])
        output = DictTensor({"action": action, "log_probability": log_probability})
        return state, output, DictTensor({"hidden": hidden})

    def update(self, info: Any) -> None:
        self.cell.load_state_dict(info["cell"])
        self.head.load_state_dict(info["head"])


def parameters(version: int) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters of the policy that follow from a number."""
    generator = torch.Generator().manual_seed(version)
    cell = torch.nn.GRUCell(3, RoughAgent.N_HIDDEN)
    head = torch.nn.Linear(RoughAgent.N_HIDDEN, N_ACTIONS)
    return {
        name: {
            key: 0.5 * torch.randn(value.shape, generator=generator)
            for key, value in module.state_dict().items()
        }
        for name, module in (("cell", cell), ("head", head))
    }


def infos(n_rows: int, version: int) -> dict[str, DictTensor]:
    """A task and a sharpness for each of some rows, that follow from a number."""
    generator = torch.Generator().manual_seed(1000 + version)
    task, sharpness = torch.rand(2, n_rows, generator=generator)
    return {
        "env_info": DictTensor({"task": task}),
        "agent_info": DictTensor({"sharpness": sharpness}),
    }


def create_env(
    seed: int,
    n_lanes: int = 2,
    restarts: bool = False,
    notes: str | None = None,
    mean_s: float = 0.0,
    kinds: tuple[str, ...] = (),
    **env_args: Any,
) -> GymEnv:
    """Some lanes of ``RoughEnv``.

    Args:
        seed: As given by the batcher.
        n_lanes: Environments.
        restarts: Whether episodes follow each other on their own.
        notes: As for ``Strikes``.
        mean_s: As for ``Strikes``.
        kinds: As for ``Strikes``.
        env_args: For ``RoughEnv``.
    """
    strikes = Strikes(notes, mean_s, kinds)
    kind = GymEnvInf if restarts else GymEnv
    return kind([RoughEnv(strikes, **env_args) for _ in range(n_lanes)], seed)


def create_agent() -> RoughAgent:
    """Make the policy."""
    return RoughAgent()
