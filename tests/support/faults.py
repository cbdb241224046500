"""Environments and agents that fail at a chosen place in a chosen way.

Where an episode fails is chosen per episode, through ``env_info`` and ``agent_info``, so that one
batcher can be hit many times::

    fault       index into ``KINDS``, see ``code``
    fault_step  -1: in ``reset``, k: in the step (or agent call) that starts from step k

An observation is ``(identity, step)``, the identity being the episode's ``id`` in ``env_info``, so
that every expected row can be written down by hand. Before a fault strikes, time, seed and process
are noted in the file ``struck_at``; with ``once``, nothing strikes where that file is there.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from rlpool import Agent, DictTensor, GymEnv, GymEnvInf
from rlpool.testing import strike as strike_now
from rlpool.testing.faults import EXIT_CODE as EXIT_CODE  # what "os_exit" exits with

KINDS = (
    "none",
    "raise",
    "unpicklable",
    "unprintable",
    "sys_exit",
    "os_exit",
    "sigkill",
    "segfault",
    "hang",
    "hold_the_lock",
    "fork_and_sigkill",
    "wrong_shape",
    "wrong_dtype",
    "wrong_reward",
    "wrong_flag",
    "raise_and_die",
    "huge_reward",
    "nan_flag",
)

ENDINGS = ("hang", "hold_the_lock", "linger", "raise", "os_exit", "sigkill", "segfault")
"""What may go wrong in ``close``, ``"linger"`` beside the others."""

_FOREVER_S = 1000.0
_SOON_S = 0.1

# Kinds that the public kit has under another name.
_PUBLIC = {"os_exit": "exit", "hold_the_lock": "hang_gil", "fork_and_sigkill": "sigkill"}


def code(kind: str) -> int:
    """A kind as a number, for infos."""
    return KINDS.index(kind)


def strike(
    kind: str, struck_at: str | None = None, seed: int | None = None, once: bool = False
) -> str:
    """Fail; returns the kind if it is a wrong result rather than a failure, else ``"none"``.

    Beside ``KINDS`` there is ``"linger"``: a thread and an exit handler keep the process alive.
    """
    if kind == "none" or (once and struck_at is not None and os.path.exists(struck_at)):
        return "none"
    if struck_at is not None:
        note = {"time": time.time(), "seed": seed, "pid": os.getpid()}
        partial = Path(f"{struck_at}.{os.getpid()}")
        partial.write_text(json.dumps(note))
        partial.replace(struck_at)  # whoever sees the file sees all of it
    if kind == "linger":
        threading.Thread(target=time.sleep, args=(_FOREVER_S,)).start()
        atexit.register(time.sleep, _FOREVER_S)
        return "none"
    if kind == "raise_and_die":
        time.sleep(_SOON_S)  # until nobody looks any more who does not wait for it
        threading.Timer(_SOON_S, os._exit, args=(EXIT_CODE,)).start()
        kind = "raise"
    if kind == "fork_and_sigkill":
        _leave_a_child_behind(f"{struck_at}.child")
    strike_now(_PUBLIC.get(kind, kind))
    return kind


def _leave_a_child_behind(note: str) -> None:
    """Fork a process that inherits all descriptors, as environments' helpers do."""
    pid = os.fork()
    if pid == 0:
        time.sleep(_FOREVER_S)
        os._exit(0)
    Path(note).write_text(str(pid))


class FaultyEnv(gymnasium.Env):
    """Counts its steps and fails where ``env_info`` says so.

    Args:
        struck_at: File to note a fault in.
        close_fault: How ``close`` fails.
        created_in: Directory in which each process that makes an environment leaves a file.
        ran_in: Directory in which each reset with an ``id`` leaves a line.
        once: Whether only the first fault of all strikes.
    """

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(
        self,
        struck_at: str | None = None,
        close_fault: str = "none",
        created_in: str | None = None,
        ran_in: str | None = None,
        once: bool = False,
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self._struck_at = struck_at
        self._close_fault = close_fault
        self._ran_in = ran_in
        self._once = once
        self._options: dict[str, Any] = {}
        self._seed: int | None = None
        self._step = 0
        if created_in is not None:
            (Path(created_in) / str(os.getpid())).touch()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._options = dict(options or {})
        self._seed, self._step = seed, 0
        if self._ran_in is not None and "id" in self._options:
            with open(Path(self._ran_in) / str(os.getpid()), "a") as file:
                file.write(f"{self._options['id']}\n")
        self._wait()
        return self._observation(self._strike(-1)), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, bool, dict[str, Any]]:
        kind = self._strike(self._step)
        self._step += 1
        self._wait()
        reward: Any = float(self._step)
        terminated: Any = self._step >= self._options.get("length", 3)
        if kind == "wrong_reward":
            reward = np.zeros(2)
        if kind == "wrong_flag":
            terminated = np.array([True, False])
        if kind == "huge_reward":
            reward = 1e39  # more than float32 holds
        if kind == "nan_flag":
            terminated = float("nan")
        return self._observation(kind), reward, terminated, False, {}

    def close(self) -> None:
        strike(self._close_fault, self._struck_at, once=self._once)

    def _strike(self, step: int) -> str:
        kind = KINDS[self._options.get("fault", 0)]
        if kind == "none" or self._options["fault_step"] != step:
            return "none"
        return strike(kind, self._struck_at, self._seed, self._once)

    def _wait(self) -> None:
        time.sleep(self._options.get("sleep_ms", 0) / 1000)

    def _observation(self, kind: str) -> Any:
        if kind == "wrong_shape":
            return np.zeros(5, np.float32)
        if kind == "wrong_dtype":
            return np.zeros(2, np.complex64)
        return np.array([self._options.get("id", 0), self._step], np.float32)


class FaultyAgent(Agent):
    """Fails where ``agent_info`` says so; ``update`` and ``close`` in the way they are told.

    Its outputs are the action, which is 1, and the last number it was updated with.
    """

    def __init__(
        self, struck_at: str | None = None, close_fault: str = "none", once: bool = False
    ) -> None:
        self._struck_at = struck_at
        self._close_fault = close_fault
        self._once = once
        self._version = 0
        self._wrong = "none"

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: Any = None,
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        n = observation.n_elems()
        kind = self._kind(observation["frame"][:, 1], agent_info)
        kind = strike(kind, self._struck_at, once=self._once)
        kind = self._wrong if kind == "none" else kind
        action = torch.ones(n, dtype=torch.int64)
        if kind == "wrong_shape":
            action = torch.ones(n, 2, dtype=torch.int64)
        if kind == "wrong_dtype":
            action = torch.ones(n, dtype=torch.complex64)
        version = torch.full((n,), self._version)
        return DictTensor({}), DictTensor({"action": action, "version": version}), DictTensor({})

    def update(self, info: Any) -> None:
        if isinstance(info, str):
            # Parameters that do not fit, say: what is wrong is what the agent then returns.
            self._wrong = strike(info, self._struck_at, once=self._once)
            return
        self._version, self._wrong = int(info), "none"

    def close(self) -> None:
        strike(self._close_fault, self._struck_at, once=self._once)

    @staticmethod
    def _kind(step: torch.Tensor, agent_info: DictTensor | None) -> str:
        if agent_info is None:
            return "none"
        hit = (agent_info["fault"] > 0) & (agent_info["fault_step"] == step)
        return KINDS[int(agent_info["fault"][hit][0])] if bool(hit.any()) else "none"


def create_env(
    seed: int,
    n_lanes: int = 1,
    fault: str = "none",
    first: str | None = None,
    struck_at: str | None = None,
    once: bool = False,
    restarts: bool = False,
    **env_args: Any,
) -> Any:
    """Make a ``GymEnv`` of ``n_lanes`` environments, or fail.

    Args:
        seed: Ignored.
        n_lanes: Number of environments.
        fault: How this call fails.
        first: A file; only the process that can create it fails, any other hangs.
        struck_at: As for ``FaultyEnv``.
        once: As for ``FaultyEnv``.
        restarts: Whether episodes follow each other on their own.
        env_args: For ``FaultyEnv``.
    """
    if fault != "none" and first is not None and not _is_first(first):
        strike("hang")
    fault = strike(fault, struck_at, once=once)
    if fault == "wrong_shape":
        return [FaultyEnv()]
    kind: Any = GymEnvInf if restarts else GymEnv
    envs = [FaultyEnv(struck_at, once=once, **env_args) for _ in range(n_lanes)]
    if fault == "wrong_dtype":
        envs[0].observation_space.dtype = np.dtype(object)
    return kind(envs, seed)


def create_agent(
    fault: str = "none", struck_at: str | None = None, once: bool = False, **agent_args: Any
) -> Any:
    """Make a ``FaultyAgent``, or fail."""
    fault = strike(fault, struck_at, once=once)
    if fault == "wrong_shape":
        return lambda *arguments: None
    agent = FaultyAgent(struck_at, once=once, **agent_args)
    if fault == "wrong_dtype":
        agent.n_noise = 1.5  # type: ignore[assignment]
    return agent


def _is_first(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def faults_at(n_rows: int, row: int, kind: str, step: int, **columns: int) -> DictTensor:
    """An info of ``n_rows`` rows, one of which fails at a step.

    Args:
        n_rows: Rows.
        row: The row that fails.
        kind: How.
        step: Where; -1 for ``reset``.
        columns: Further columns, the same in all rows.
    """
    fault = torch.zeros(n_rows, dtype=torch.int64)
    fault[row] = code(kind)
    return DictTensor(
        {
            "fault": fault,
            "fault_step": torch.full((n_rows,), step),
            **{key: torch.full((n_rows,), value) for key, value in columns.items()},
        }
    )
