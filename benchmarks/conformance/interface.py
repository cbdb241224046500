"""What an adapter of a library implements, in terms of NumPy.

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
NO_EVALUATION = {"evaluate": "has no function that evaluates a policy"}
NO_TARGETS = {"n_step": "computes no n-step returns", "targets": "computes no targets"}


@dataclass(frozen=True)
class Job:
    """What is to be run. All of it can be pickled.

    Attributes:
        env_id: Of the environment.
        env_args: Keyword arguments of ``gymnasium.make``.
        policy: Maps observations, one row per environment, to int64 actions; keeps no state.
        n_envs: Environments in all.
        n_workers: Processes that share them; a library with one per environment takes ``n_envs``.
        seed: Of the run.
        options: For ``reset``, from the first episode on.
        info_keys: Integers of infos that are wanted, for libraries that need to know in advance.
        frame_stack: How many frames the library's stacking shows, along the first axis, the oldest
            first.
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
        """Makes one environment, in any process."""
        return partial(envs.make, self.env_id, **self.env_args)

    @property
    def make_stacked_env(self) -> Callable[[], gym.Env]:
        """The same with Gymnasium's stack of frames, for libraries that recommend it."""
        return partial(envs.make, self.env_id, frame_stack=self.frame_stack, **self.env_args)


@dataclass
class Steps:
    """Consecutive transitions of one environment in the order in which they happened, ``[T, ...]``.

    The arrays are those of the library, without a copy where it hands out arrays or tensors. Steps
    that it marks as padding or as a mere reset are left out. ``next_observation`` is what the
    library says came after the step, ``info`` what came with it, as one dict per step; both are
    None where it returns no such thing.
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
        """Of one tuple per step, with the fields in their order."""
        *columns, infos = zip(*rows, strict=True)
        return cls(*map(np.stack, columns), list(infos))


class Collector:
    """One library's way to collect. Adapters inherit and implement what the library has.

    Attributes:
        package: The distribution whose version is shown.
        lacks: Capabilities that the library does not have, and why: checks that need them are grey.
            "environments" (it runs Gymnasium environments written in Python), "window", "episodes",
            "evaluate", "n_step" and "targets" (the methods below), "infos" (in results), "options"
            (of ``reset``), "seed", "workers" (processes that step environments), "worker_count" (a
            number of processes apart from that of environments), "frame_stack".
        intended: Checks whose failure the library documents as intended: a quotation, an address.
        start_s: What its processes may take to start, in seconds, on top of each deadline and of
            the time that its import takes.
        opened: What an adapter opens at the first request, where it cannot do so in ``open``.
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
        """Make the library's environments and collector, unless that has to wait for a request."""

    def window(self, n_steps: int) -> list[Steps]:
        """The next steps of every environment, in an order of environments that stays.

        Environments restart by themselves and go on from window to window. All windows of one
        collector have the same number of steps.
        """

    def episodes(self, n: int) -> list[Steps]:
        """Complete episodes, in the order of the library; each request begins new ones."""

    def evaluate(self, n: int) -> list[float]:
        """The returns of ``n`` episodes by the library's own function.

        One number, their mean, where the library returns no more than that.
        """

    def n_step(self, n_steps: int, n: int, gamma: float) -> Steps:
        """A window by way of the library's n-step returns, its transitions in any order.

        ``reward`` is the discounted sum, ``next_observation`` what it is bootstrapped from.
        """

    def targets(
        self, n_steps: int, value: Callable[[np.ndarray], np.ndarray], gamma: float
    ) -> list[tuple[Steps, np.ndarray]]:
        """A window and the library's targets of a value function for each step, with lambda 1."""

    def close(self) -> None:
        """Close by the library's own means."""
        self.at_end.close()

    @classmethod
    def version(cls) -> str:
        """Of the library, or that it is the one of this checkout."""
        try:
            return importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            return f"{importlib.import_module(cls.package).__version__}, this checkout"


class Stepping(Collector):
    """A collector over a library that steps environments.

    Adapters set ``envs`` and ``observation``, and step.
    """

    envs: Any
    observation: np.ndarray

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Sequence[tuple | None]]:
        """What to act on next, and for each environment what came of its action.

        That is ``(reward, terminated, truncated, next_observation, info)``, or None where the
        library says that the step was a mere reset.
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
