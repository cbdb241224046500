"""Environments and agents that fail at a chosen place in a chosen way.

Where an episode fails is chosen per episode, through ``env_info`` and ``agent_info``, so that one
batcher can be hit many times::

    fault       index into ``KINDS``, as returned by ``code``
    fault_step  -1: in ``reset``, k: in the step (or agent call) that starts from step k

An observation is ``(identity, step)``, where the identity is the episode's ``id`` in ``env_info``,
so every expected row can be computed by hand. Before a fault strikes, time, seed and process
are written to the file ``struck_at``.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from rlpool import Agent, DictTensor, GymEnv, GymEnvInf
from rlpool.data.infos import info_rows

EXIT_CODE = 17
"""What ``os_exit`` exits with."""


class UnpicklableError(Exception):
    """Error that cannot be sent to another process, because of its lock."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class UnprintableError(Exception):
    """Error that cannot be converted to text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


_ODD_ERRORS = {"unpicklable": UnpicklableError, "unprintable": UnprintableError}
RAISES = ("raise", *_ODD_ERRORS, "sys_exit")
DEATHS = {
    "os_exit": (EXIT_CODE, None),
    "sigkill": (-signal.SIGKILL, "SIGKILL"),
    "segfault": (-signal.SIGSEGV, "SIGSEGV"),
}
"""Ways to die, with the exit code and the name of the signal."""

HANGS = ("hang", "hold_the_lock")
WRONG = ("wrong_shape", "wrong_dtype")
WRONG_REWARDS = {"wrong_reward": np.zeros(2), "huge_reward": 1e39}  # float32 holds less than 1e39
WRONG_FLAGS = {"wrong_flag": np.array([True, False]), "nan_flag": float("nan")}
WRONG_STEPS = (*WRONG_REWARDS, *WRONG_FLAGS)
FAILURES = (
    "none",
    "raise_second",
    "fork_and_sigkill",
    "stop",
    *RAISES,
    *DEATHS,
    *HANGS,
)
KINDS = (*FAILURES, *WRONG, *WRONG_STEPS)

ENDINGS = ("hang", "hold_the_lock", "linger", "raise", "os_exit", "sigkill", "segfault")
"""Faults in ``close``, including ``"linger"``."""

_FOREVER_S = 1000.0


def code(kind: str) -> int:
    """Return a kind as a number, for infos."""
    return KINDS.index(kind)


def strike(kind: str, struck_at: str | None = None, seed: int | None = None) -> str:
    """Fail, or return the kind if it is a wrong result rather than a failure, else ``"none"``.

    ``"linger"`` is supported as well: a thread and an exit handler keep the process alive.
    """
    if kind == "none":
        return "none"
    if kind == "raise_second" and struck_at is not None:
        while not os.path.exists(struck_at):  # until another one has been struck
            time.sleep(0.001)
        kind = "raise"
    if struck_at is not None:
        note = {"time": time.time(), "seed": seed, "pid": os.getpid()}
        partial = Path(f"{struck_at}.{os.getpid()}")
        partial.write_text(json.dumps(note))
        partial.replace(struck_at)  # the file appears with its full content
    if kind == "linger":
        threading.Thread(target=time.sleep, args=(_FOREVER_S,)).start()
        atexit.register(time.sleep, _FOREVER_S)
        return "none"
    if kind == "fork_and_sigkill" and os.fork() == 0:
        # It inherits all descriptors, as environments' helpers do.
        time.sleep(_FOREVER_S)
        os._exit(0)
    if kind in _ODD_ERRORS:
        raise _ODD_ERRORS[kind]("struck")
    if kind not in (*WRONG, *WRONG_STEPS):
        _fail(kind)
    return kind


def _fail(kind: str) -> None:
    if kind in ("raise", "sys_exit"):
        raise KeyError("struck") if kind == "raise" else SystemExit("struck")
    if kind == "os_exit":
        os._exit(EXIT_CODE)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind in ("sigkill", "fork_and_sigkill", "stop"):
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    # SIGKILL may arrive late and SIGSTOP may be undone, yet this process must not continue.
    while kind in ("hang", "stop", "sigkill", "fork_and_sigkill"):
        time.sleep(_FOREVER_S)
    while kind == "hold_the_lock":
        sum(range(10**13))  # one call in C: no other thread of this process runs until it returns


class FaultyEnv(gymnasium.Env[Any, Any]):
    """Environment that counts its steps and fails where ``env_info`` says so.

    Args:
        struck_at: File to note a fault in.
        close_fault: How ``close`` fails.
        created_in: Directory in which each process that makes an environment leaves a file.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space: Any = gymnasium.spaces.Discrete(1000)

    def __init__(
        self,
        struck_at: str | None = None,
        close_fault: str = "none",
        created_in: str | None = None,
    ) -> None:
        self._struck_at, self._close_fault = struck_at, close_fault
        if created_in is not None:
            (Path(created_in) / str(os.getpid())).touch()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seed, self.options, self.t = seed, dict(options or {}), 0
        self.length = self.options.get("length", 3)
        self._wait()
        return self._shown(self._strike(-1)), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, bool, dict[str, Any]]:
        self._wait()
        kind = self._strike(self.t)
        self.t += 1
        reward = WRONG_REWARDS.get(kind, self.reward(action))
        terminated = WRONG_FLAGS.get(kind, self.t >= self.length)
        return self._shown(kind), reward, terminated, False, {"t": self.t}

    def close(self) -> None:
        strike(self._close_fault, self._struck_at)

    def _fail_as(self, kind: str) -> str:
        return strike(kind, self._struck_at, self.seed)

    def reward(self, action: Any) -> float:
        return float(self.t)

    def observation(self) -> Any:
        return np.array([self.options.get("id", 0), self.t], np.float32)

    def _strike(self, step: int) -> str:
        is_hit = self.options.get("fault_step") == step
        return self._fail_as(KINDS[self.options["fault"]]) if is_hit else "none"

    def _wait(self) -> None:
        time.sleep(self.options.get("sleep_ms", 0) / 1000)

    def _shown(self, kind: str) -> Any:
        wrong = {"wrong_shape": np.zeros(5, np.float32), "wrong_dtype": np.zeros(2, np.complex64)}
        return wrong[kind] if kind in wrong else self.observation()


class FaultyAgent(Agent):
    """Agent that fails where ``agent_info`` says so, and in ``update`` and ``close`` on request.

    Its outputs are the action, which is 1, and the number of the last update.
    """

    def __init__(self, struck_at: str | None = None, close_fault: str = "none") -> None:
        self._struck_at, self._close_fault = struck_at, close_fault
        self._version = 0

    def __call__(self, state, observation, agent_info=None, history=None):
        n = observation.n_elems()
        if agent_info is not None:
            for fault in agent_info["fault"][
                agent_info["fault_step"] == observation["frame"][:, 1]
            ]:
                strike(KINDS[int(fault)], self._struck_at)
        output = {"action": torch.ones(n, dtype=torch.int64)}
        output["version"] = torch.full((n,), self._version)
        return DictTensor({}), DictTensor(output), DictTensor({})

    def update(self, info: Any) -> None:
        if isinstance(info, str):
            strike(info, self._struck_at)
        else:
            self._version = int(info)

    def close(self) -> None:
        strike(self._close_fault, self._struck_at)


def create_env(
    seed: int,
    n_lanes: int = 1,
    fault: str = "none",
    struck_at: str | None = None,
    restarts: bool = False,
    **env_args: Any,
) -> Any:
    """Make a ``GymEnv`` of ``n_lanes`` environments, or fail.

    Args:
        seed: Ignored.
        n_lanes: Number of environments.
        fault: How this call fails.
        struck_at: As for ``FaultyEnv``.
        restarts: Whether lanes restart automatically.
        env_args: For ``FaultyEnv``.
    """
    strike(fault, struck_at)
    envs = [FaultyEnv(struck_at, **env_args) for _ in range(n_lanes)]
    return (GymEnvInf if restarts else GymEnv)(envs, seed)


def create_agent(fault: str = "none", struck_at: str | None = None, **agent_args: Any) -> Any:
    """Make a ``FaultyAgent``, or fail."""
    strike(fault, struck_at)
    return FaultyAgent(struck_at, **agent_args)


def faults(n_rows: int, hits: Mapping[int, tuple[str, int]], **columns: Any) -> DictTensor:
    """Return an info in which some rows fail.

    Args:
        n_rows: Rows.
        hits: How and at which step a row fails, -1 for ``reset``: ``row -> (kind, step)``.
        columns: Further columns; a number is the same in all rows.
    """
    hit = [hits.get(row, ("none", 0)) for row in range(n_rows)]
    columns |= {"fault": [code(kind) for kind, _ in hit], "fault_step": [step for _, step in hit]}
    return info_rows("info", columns, n_rows)


def faults_at(n_rows: int, row: int, kind: str, step: int, **columns: int) -> DictTensor:
    """Return an info in which one row fails at a step."""
    return faults(n_rows, {row: (kind, step)}, **columns)
