"""Environments that fail a given number of times, leak, or are not reproducible.

And an agent with memory, noise and a policy, whose actions show whether any of them was lost.
All at module level, so that worker processes can unpickle them by name.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlpool import Agent, DictTensor, GymEnv, GymEnvInf, ParallelEnvManager, sample_categorical

from support.faults import KINDS, code, strike

Rows = list[dict[str, Any]]


class FragileEnv(gymnasium.Env[Any, Any]):
    """All it returns follows from seed, options and actions, unless it fails.

    An observation is ``[step, random number of the episode, sum of all actions]``. The options of a
    reset are those of ``faults_at``, and ``length``.

    Args:
        marks: Directory for a file per fault that struck; without one there are no faults.
        times: How often a fault strikes.
        noted_in: Directory in which each process leaves a line per reset.
        close_fault: How ``close`` fails, a kind of ``support.faults.strike``.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space: Any = spaces.Discrete(100)

    def __init__(
        self,
        marks: str | None = None,
        times: int = 1,
        noted_in: str | None = None,
        close_fault: str = "none",
    ) -> None:
        self._marks, self._times = marks, times
        self._noted_in, self._close_fault = noted_in, close_fault
        self.n_resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed, self.options = seed, dict(options or {})
        self.t, self.total = 0, 0
        self.length = self.options.get("length", 3 + (seed or 0) % 5)
        self.n_resets += 1
        if self._noted_in is not None:
            with open(Path(self._noted_in) / str(os.getpid()), "a") as file:
                file.write(f"{seed}\n")
        self._fail(-1)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._fail(self.t)
        self.t += 1
        self.total += int(action)
        reward = self.np_random.random() + self.total
        return self._observation(), reward, self.t >= self.length, False, {"t": self.t}

    def close(self) -> None:
        strike(self._close_fault)

    def _observation(self) -> Any:
        return np.array([self.t, self.np_random.random(), self.total])

    def _fail(self, step: int) -> None:
        kind = KINDS[self.options.get("fault", 0)]
        if self._marks is None or kind == "none" or self.options["fault_step"] != step:
            return
        for number in range(self._times):
            mark = Path(self._marks) / f"{self.seed}.{step}.{number}"
            if not mark.exists():
                mark.touch()
                strike(kind)
                return


class ChancyEnv(FragileEnv):
    """Its observations are not reproducible."""

    def _observation(self) -> Any:
        return np.frombuffer(os.urandom(24), np.uint64).astype(np.float64)


class RecurrentAgent(Agent):
    """Draws its actions from its noise and from all it has seen, with sizes no vector unit likes.

    Its policy is a number, or the mean of a tensor; ``gain`` in ``agent_info`` sharpens it.
    """

    n_noise = 1
    N_HIDDEN, N_ACTIONS = 33, 5

    def __init__(self, wants_history: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self._wants_history = wants_history
        self._bias = 0.0
        self._cell = torch.nn.GRUCell(3, self.N_HIDDEN)
        self._head = torch.nn.Linear(self.N_HIDDEN, self.N_ACTIONS)
        for parameter in (*self._cell.parameters(), *self._head.parameters()):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def require_history(self) -> bool:
        return self._wants_history

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        hidden = torch.full((n, self.N_HIDDEN), self._bias)
        if agent_info is not None:
            hidden += agent_info["gain"].unsqueeze(1)
        return DictTensor({"hidden": hidden})

    def __call__(self, state, observation, agent_info=None, history=None):
        hidden = self._cell(observation["frame"], state["hidden"])
        logits = self._head(hidden) + self._bias * hidden[:, : self.N_ACTIONS]
        if agent_info is not None and not agent_info.empty():
            logits = logits * agent_info["gain"].unsqueeze(1)
        action, log_probability = sample_categorical(logits, observation["noise"])
        output = {"action": action, "log_probability": log_probability}
        output["bias"] = torch.full(action.shape, self._bias)
        return state, DictTensor(output), DictTensor({"hidden": hidden})

    def update(self, info: Any) -> None:
        self._bias = float(torch.as_tensor(info).mean())


def create_fragile(
    seed: int, n_lanes: int = 2, restarts: bool = False, kind: Any = FragileEnv, **arguments: Any
) -> GymEnv:
    """Lanes of ``FragileEnv``, with what it tells in its infos, or of another kind."""
    envs = [kind(**arguments) for _ in range(n_lanes)]
    info_keys = {"t": int} if issubclass(kind, FragileEnv) else None
    return (GymEnvInf if restarts else GymEnv)(envs, seed, info_keys=info_keys)


def failing(kind: str, step: int, **options: int) -> dict[str, int]:
    """Options of a reset."""
    return {"fault": code(kind), "fault_step": step, **options}


def played(
    env: GymEnv | ParallelEnvManager,
    options: Mapping[int, Mapping[str, int]],
    n_steps: int = 12,
    before_step: Any = None,
) -> Rows:
    """Step all lanes, reset those that end, and copy all that is seen.

    Args:
        env: The environments.
        options: Of the episodes that have some, by their seeds, which count from 0.
        n_steps: How many steps.
        before_step: Called with the number of each step before it.
    """
    rng = np.random.default_rng(5)
    lanes = list(range(env.n_lanes))
    n_begun = 0
    rows: Rows = []

    def note(ended: list[int]) -> None:
        rows.append({key: array.copy() for key, array in env.current.items()})
        rows[-1]["ended"] = np.array(ended)

    def begin(these: list[int]) -> None:
        nonlocal n_begun
        seeds = list(range(n_begun, n_begun + len(these)))
        n_begun += len(these)
        env.reset_lanes(these, seeds, [options.get(seed) for seed in seeds])
        note([])

    begin(lanes)
    for step in range(n_steps):
        actions = {"action": rng.integers(0, 100, env.n_lanes)}
        if before_step is not None:
            before_step(step)
        ended = env.step_lanes(lanes, actions)
        note(ended)
        if ended:
            begin(ended)
    return rows


def assert_same_rows(got: Rows, expected: Rows) -> None:
    """All that was seen agrees, to the bit."""
    assert len(got) == len(expected)
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for key, values in theirs.items():
            assert mine[key].dtype == values.dtype, (number, key)
            assert mine[key].tobytes() == values.tobytes(), (number, key, mine[key], values)


def dies_once_it_is_made(marks: str) -> FragileEnv:
    """The first of these environments kills its process soon after it was made."""
    with suppress(FileExistsError), open(Path(marks, "pid"), "x") as file:
        file.write(str(os.getpid()))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return FragileEnv()


def made_after_a_death(marks: str) -> FragileEnv:
    """An environment that is made when the process of ``dies_once_it_is_made`` has ended."""
    path = Path(marks, "pid")
    while not path.exists() or not path.read_text() or Path("/proc", path.read_text()).exists():
        time.sleep(0.02)
    return FragileEnv()
