"""The register of checks, and their view of a library.

A check is an expectation about the returned data, independent of the interface.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.conformance.envs import NUMBERED
from benchmarks.conformance.interface import Collector, Job

ALONE = ("faults", "limits")  # groups whose checks each run in a separate process


@dataclass(frozen=True)
class Check:
    """One property.

    Attributes:
        function: Gets a ``Library``; its outcome is the result.
        group: A key of ``GROUPS``.
        thread: Issue in which a user reported a failure of this property.
        needs: Required capabilities of the library.
        signal: Sent to the process once it has called ``ready``; the process must then end.
        leaves_no: Part of the names of processes and files in /dev/shm that make the cell red if
            they outlive the process by some seconds: all by default if there is a signal.
        shm_mb: The size of /dev/shm.
        times: How often it runs, unless it fails before.
    """

    function: Callable[[Library], None]
    group: str
    thread: str
    needs: tuple[str, ...]
    signal: signal.Signals | None = None
    leaves_no: str | None = None
    shm_mb: int = 4096
    times: int = 1

    def __str__(self) -> str:
        return " ".join((self.function.__doc__ or "").split())


REGISTER: dict[str, Check] = {}


def check(group: str, thread: str, *needs: str, standard_env: bool = False, **more: Any) -> Any:
    """Register a check. All except those on a standard environment need environments in Python."""

    def register(function: Callable[[Library], None]) -> Callable[[Library], None]:
        needed = needs if standard_env else (*needs, "environments")
        more.setdefault("leaves_no", "" if "signal" in more else None)
        REGISTER[function.__name__] = Check(function, group, thread, needed, **more)
        return function

    return register


class Library:
    """An adapter as used by checks. ``ready`` reports that the signal may be sent."""

    def __init__(self, adapter: type[Collector], folder: str, ready: Callable[[], None]) -> None:
        self.adapter, self.folder, self.report, self.is_ready = adapter, folder, ready, False

    def ready(self) -> None:
        self.is_ready = True
        self.report()

    def has(self, *capabilities: str) -> bool:
        return not any(each in self.adapter.lacks for each in capabilities)

    def make(
        self, policy: Any = None, env_id: str = "", job: Any = (), **env_args: Any
    ) -> Collector:
        """Create a collector for a policy, by default action 0, and an environment.

        By default this is ``Numbered``, or CartPole if the library supports only its own
        environments.
        """
        env_id = env_id or (NUMBERED if self.has("environments") else "CartPole-v1")
        return self.adapter(Job(env_id, env_args, policy or _zeros, **dict(job)))

    @contextlib.contextmanager
    def open(self, *args: Any, **arguments: Any) -> Iterator[Collector]:
        """Return a collector that is closed at the end."""
        with contextlib.closing(self.make(*args, **arguments)) as collector:
            yield collector

    def file(self, name: str) -> str:
        """Return a path that does not exist yet."""
        return f"{self.folder}/{name}"


def _zeros(observation: np.ndarray) -> np.ndarray:
    """Return action 0."""
    return np.zeros(len(observation), np.int64)
