"""The interface that an adapter of a library implements, in terms of NumPy.

The library is used as its own documentation recommends. The adapter translates arguments and
results and repairs nothing: if the library lacks the final observation, so does the result.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from benchmarks.conformance import envs

IN_CALLER = dict.fromkeys(("workers", "worker_count"), "steps environments in the caller's process")
PER_ENVIRONMENT = {"worker_count": "has a process per environment"}
NO_EPISODES = {"episodes": "steps environments, has no function that collects episodes"}
NO_EPISODES |= {"results": "returns single steps, which the adapter copies"}
NO_EVALUATION = {"evaluate": "has no function that evaluates a policy"}
NO_TARGETS = {"n_step": "computes no n-step returns", "targets": "computes no targets"}


@dataclass(frozen=True)
class Job:
    """A run to perform. All attributes can be pickled.

    Attributes:
        env_id: Id of the environment.
        env_args: Keyword arguments of ``gymnasium.make``.
        policy: Maps observations, one row per environment, to int64 actions; keeps no state.
        n_envs: Total number of environments.
        n_workers: Processes that share them; a library with one per environment uses ``n_envs``.
        seed: Seed of the run.
        options: Options of ``reset``, from the first episode on.
        info_keys: Requested integers in infos, for libraries that need to know them in advance.
        frame_stack: Number of frames stacked by the library, along the first axis, oldest first.
        timeout_s: The limit for a step that hangs, where the library lets its user set one.
    """

    env_id: str
    env_args: dict[str, Any]
    policy: Callable[[np.ndarray], np.ndarray]
    n_envs: int = 4
    n_workers: int = 2
    seed: int | None = 0
    options: dict[str, Any] | None = None
    info_keys: tuple[str, ...] = ()
    frame_stack: int = 1
    timeout_s: float = 4.0

    @property
    def make_env(self) -> Callable[[], gym.Env]:
        """Create one environment, in any process."""
        return partial(envs.make, self.env_id, **self.env_args)

    @property
    def make_stacked_env(self) -> Callable[[], gym.Env]:
        """Create one with Gymnasium's frame stacking, for libraries that recommend it."""
        return partial(envs.make, self.env_id, frame_stack=self.frame_stack, **self.env_args)


@dataclass
class Steps:
    """Consecutive transitions of one environment in time order, ``[T, ...]``.

    The arrays are the library's own, without a copy if it returns arrays or tensors. Steps that it
    marks as padding or as a mere reset are omitted. ``next_observation`` is the observation after
    the step according to the library, ``info`` the info of the step, as one dict per step; both
    are None if the library does not return them.
    """

    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    next_observation: np.ndarray | None
    info: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.reward)

    def __getitem__(self, part: slice | np.ndarray) -> Steps:
        values = [getattr(self, field.name) for field in fields(self)]
        return Steps(*(None if value is None else value[part] for value in values))

    @classmethod
    def stack(cls, rows: Sequence[tuple]) -> Steps:
        """Build from one tuple per step, with the fields in order."""
        *columns, infos = zip(*rows, strict=True)
        return cls(*map(np.stack, columns), list(infos))


class Collector:
    """One way of collecting with a library. Adapters implement the methods that it supports.

    Attributes:
        package: The distribution whose version is shown.
        lacks: Missing capabilities with reasons: checks that need them are grey.
            "environments" (it runs Gymnasium environments written in Python), "window", "episodes",
            "evaluate", "n_step" and "targets" (the methods below), "results" (of several steps),
            "infos" (in results), "options" (of ``reset``), "seed", "workers" (processes that step
            environments), "worker_count" (a number of processes independent of that of
            environments), "frame_stack".
        intended: Checks whose failure the library documents as intended, with quotation and source.
        start_s: Additional seconds for the start of its processes, on top of each deadline and of
            its import time.
        opened: Object that an adapter opens at the first request if it cannot do so in ``open``.
        at_end: Callbacks that close it.
    """

    package = ""
    lacks: ClassVar[dict[str, str]] = {}
    intended: ClassVar[dict[str, str]] = {}
    start_s = 5.0
    opened: Any = None

    def __init__(self, job: Job) -> None:
        self.job, self.at_end = job, contextlib.ExitStack()
        self.open(job)

    def open(self, job: Job) -> None:
        """Create the library's environments and collector, unless this must wait for a request."""

    def window(self, n_steps: int) -> list[Steps]:
        """Return the next steps of every environment, in a fixed order of environments.

        Environments restart automatically and continue from window to window. All windows of one
        collector have the same number of steps.
        """

    def episodes(self, n: int) -> list[Steps]:
        """Return complete episodes in the library's order; each request starts new ones."""

    def evaluate(self, n: int) -> list[float]:
        """Return the returns of ``n`` episodes by the library's own function.

        The result is a single number, their mean, if the library does not return more.
        """

    def n_step(self, n_steps: int, n: int, gamma: float) -> Steps:
        """Return a window with the library's n-step returns, its transitions in any order.

        ``reward`` is the discounted sum, ``next_observation`` the observation to bootstrap from.
        """

    def targets(
        self, n_steps: int, value: Callable[[np.ndarray], np.ndarray], gamma: float
    ) -> list[tuple[Steps, np.ndarray]]:
        """Return a window and the library's value targets for each step, with lambda 1."""

    def close(self) -> None:
        """Close with the library's own function."""
        self.at_end.close()

    @classmethod
    def version(cls) -> str:
        """Return the library's version, or that it is this checkout."""
        try:
            return importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            return f"{importlib.import_module(cls.package).__version__}, this checkout"


class Stepping(Collector):
    """A collector over a library that only steps environments.

    Adapters set ``envs`` and ``observation``, and implement ``step``.
    """

    envs: Any
    observation: np.ndarray

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Sequence[tuple | None]]:
        """Return the next observation to act on, and each environment's result of its action.

        A result is ``(reward, terminated, truncated, next_observation, info)``, or None if the
        library reports the step as a mere reset.
        """

    def window(self, n_steps: int) -> list[Steps]:
        rows: list[list[tuple]] = [[] for _ in range(self.job.n_envs)]
        for _ in range(n_steps):
            observation, action = self.observation, self.job.policy(self.observation)
            self.observation, found = self.step(action)
            for i, each in enumerate(found):
                if each is not None:
                    rows[i].append((observation[i], action[i], *each))
        return [Steps.stack(each) for each in rows]

    def close(self) -> None:
        self.envs.close()
