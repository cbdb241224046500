"""Environments that fail a given number of times, leak, or are not reproducible.

Also an agent with memory, noise and a policy, whose actions reveal the loss of any of them.
All are at module level, so that worker processes can unpickle them by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlpool import Agent, DictTensor, GymEnv, GymEnvInf, ParallelEnvManager, sample_categorical

from support.faults import KINDS, FaultyEnv, code, strike

Rows = list[dict[str, Any]]


def strike_marked(marks: str | None, name: str, kind: str, times: int = 1) -> str:
    """Fail like ``support.faults.strike``, but only a given number of times.

    Args:
        marks: Directory for a file per fault, with the process id; ``None`` for no faults.
        name: Prefix of the file names, identifying the failing code.
        kind: Kind of fault.
        times: Maximum number of faults.
    """
    for number in range(times if marks is not None and kind != "none" else 0):
        with suppress(FileExistsError):
            with open(Path(marks or "", f"{name}.{number}"), "x") as file:
                file.write(str(os.getpid()))
            return strike(kind)
    return "none"


class FragileEnv(FaultyEnv):
    """Environment determined by seed, options and actions, unless it fails.

    An observation is ``[step, random number of the episode, sum of all actions]``.

    Args:
        marks: Directory for a file per fault; without one there are no faults.
        times: Number of times a fault strikes.
        arguments: For ``FaultyEnv``.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(100)

    def __init__(self, marks: str | None = None, times: int = 1, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._marks, self._times = marks, times

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.total = 0
        return super().reset(seed=seed, options={"length": 3 + (seed or 0) % 5, **(options or {})})

    def reward(self, action: Any) -> float:
        self.total += int(action)
        return self.np_random.random() + self.total

    def observation(self) -> Any:
        return np.array([self.t, self.np_random.random(), self.total])

    def _fail_as(self, kind: str) -> str:
        return strike_marked(self._marks, f"{self.seed}.{self.t}", kind, self._times)


class ChancyEnv(FragileEnv):
    """Environment whose observations are not reproducible."""

    def observation(self) -> Any:
        return np.frombuffer(os.urandom(24), np.uint64).astype(np.float64)


class RecurrentAgent(Agent):
    """Agent whose actions depend on its noise and all its inputs, with sizes that do not vectorise.

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


class FragileAgent(RecurrentAgent):
    """Agent that fails where ``agent_info`` says so, in updates with a text, and when closed.

    Args:
        marks: As for ``FragileEnv``.
        times: As for ``FragileEnv``.
        close_fault: As for ``FragileEnv``.
    """

    def __init__(self, marks: str | None = None, times: int = 1, close_fault: str = "none") -> None:
        super().__init__()
        self._marks, self._times, self._close_fault = marks, times, close_fault

    def __call__(self, state, observation, agent_info=None, history=None):
        step = observation["frame"][:, 0]
        state, output, new_state = super().__call__(state, observation, agent_info)
        action = output["action"]
        for fault in agent_info["fault"][agent_info["fault_step"] == step].tolist():
            name = f"agent.{step[0]:.0f}"
            kind = strike_marked(self._marks, name, KINDS[fault], self._times)
            wrong = {"wrong_shape": action.repeat(2), "wrong_dtype": action + 1j}
            output.set("action", wrong.get(kind, action))
        return state, output, new_state

    def update(self, info: Any) -> None:
        kind, bias = info
        strike_marked(self._marks, "update", kind, self._times)
        super().update(bias)

    def close(self) -> None:
        strike(self._close_fault)


def create_fragile_agent(fault: str = "none", **arguments: Any) -> FragileAgent:
    """Create a ``FragileAgent``, or fail."""
    strike_marked(arguments.get("marks"), "create", fault, arguments.get("times", 1))
    return FragileAgent(**arguments)


def make_fragile(fault: str = "none", **arguments: Any) -> FragileEnv:
    """Create a ``FragileEnv``, or fail."""
    strike_marked(arguments.get("marks"), "create", fault, arguments.get("times", 1))
    return FragileEnv(**arguments)


def create_fragile(
    seed: int,
    n_lanes: int = 2,
    restarts: bool = False,
    kind: Any = FragileEnv,
    fault: str = "none",
    **arguments: Any,
) -> GymEnv:
    """Create lanes of ``FragileEnv`` with its infos, or of another kind, or fail."""
    strike_marked(arguments.get("marks"), "create", fault, arguments.get("times", 1))
    envs = [kind(**arguments) for _ in range(n_lanes)]
    info_keys = {"t": int} if issubclass(kind, FragileEnv) else None
    return (GymEnvInf if restarts else GymEnv)(envs, seed, info_keys=info_keys)


def failing(kind: str, step: int, **options: int) -> dict[str, int]:
    """Return options of a reset that fails."""
    return {"fault": code(kind), "fault_step": step, **options}


def played(
    env: GymEnv | ParallelEnvManager,
    fault: Mapping[str, int] | None = None,
    before_step: Callable[[int], None] = lambda number: None,
) -> Rows:
    """Play three episodes in each of three lanes, with seeds 0 to 8, and return all values.

    Args:
        env: The lanes.
        fault: Options with which the episode with seed 4 fails.
        before_step: Called with the number of each step before it.
    """
    rows: Rows = []
    for number in range(15):
        if number % 5 == 0:
            seeds = [3 * number // 5 + lane for lane in (0, 1, 2)]
            options = [{"length": 5, **(fault or {} if seed == 4 else {})} for seed in seeds]
            env.reset_lanes([0, 1, 2], seeds, options)
        before_step(number)
        live = [lane for lane in (0, 1, 2) if not env.current["done"][lane]]
        ended = env.step_lanes(live, {"action": np.array([number, 2, 3])})
        rows.append({key: array.copy() for key, array in env.current.items()})
        rows[-1]["ended"] = np.isin([0, 1, 2], ended)
        rows[-1]["failed"] = np.isin([0, 1, 2], list(getattr(env, "failures", ())))
    return rows


def assert_same_rows(got: Rows, expected: Rows) -> None:
    """Check that all values are bit-identical."""
    assert len(got) == len(expected)
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for key, values in theirs.items():
            assert mine[key].dtype == values.dtype, (number, key)
            assert mine[key].tobytes() == values.tobytes(), (number, key, mine[key], values)
