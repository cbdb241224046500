"""A ``CountingEnv`` that fails where and how it is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlpool.errors import SpecError
from rlpool.testing.counting_env import CountingEnv, Result
from rlpool.testing.faults import AT_RESET, KINDS, WRONG, code, kind_of, strike

PLACES = ("init", "reset", "step", "close")

_OF_STEPS_ONLY = ("nan_reward", "wrong_reward", "wrong_flag")


@dataclass(frozen=True)
class _Fault:
    """What goes wrong in an episode; a step of ``None`` is every step."""

    kind: str
    at: str
    step: int | None
    episode: int | None


class FaultyEnv(CountingEnv):
    """Counts like a ``CountingEnv`` and fails in a chosen way at a chosen place.

    ``FaultyEnv("sigkill", at_step=3)`` kills its process in the call of ``step`` that starts from
    step 3 (the fourth of the episode). The kinds of faults are

    ============================  =================================================================
    ``none``                      nothing
    ``raise``                     ``KeyError``
    ``unpicklable``               an exception that cannot be pickled
    ``unprintable``               an exception that cannot be turned into text
    ``sys_exit``                  ``SystemExit``
    ``exit``                      ``os._exit`` with the code 17
    ``sigkill``                   the process kills itself
    ``segfault``                  the process reads address 0
    ``hang``                      sleeps for ever
    ``hang_gil``                  computes for ever in C, no other Python thread runs
    ``stop``                      the process stops itself, as after Ctrl-Z
    ``leak``                      keeps ``leak_bytes`` of memory, written to, until it is dropped
    ``nan``                       NaN as observation and reward
    ``nan_observation``           NaN as observation
    ``nan_reward``                NaN as reward
    ``buffer_reuse``              from then on all observations are one array, changed in place
    ``wrong_dtype``               an int64 observation
    ``wrong_shape``               an observation ``[2]``
    ``wrong_reward``              an array as reward
    ``wrong_flag``                an array as ``terminated``
    ============================  =================================================================

    Single episodes are chosen by the options of their reset, that is by ``env_info``: ``fault``
    (the number of a kind, see ``code``) and ``fault_step`` (-1 for ``reset``) stand in place of
    ``fault``, ``at``, ``at_step`` and ``in_episode`` for this episode.
    ``faults(n_rows, row, kind, step)`` makes such an ``env_info``.

    Kinds that end, stop or block a process do so to the caller's where the environment lives in
    the caller's, as with ``n_threads=0``.

    Args:
        fault: One of ``rlpool.testing.KINDS``.
        at: Where: ``"init"``, ``"reset"``, ``"step"`` or ``"close"``. Kinds that are wrong results
            need ``"reset"`` or ``"step"``.
        at_step: Which step of an episode, 0-based; ``None`` for every step.
        in_episode: Only after so many episodes of this instance that had at least one step;
            ``None`` for every episode. A batcher's workers reset their environments once before
            the first episode, to learn the keys; that episode has no step.
        once: A file. Only who creates it fails, that is one environment in one process one time:
            whatever replaces it afterwards works.
        leak_bytes: How much ``leak`` keeps each time it strikes.
        length: Steps of an episode.
        id: As for ``CountingEnv``.
        truncate: As for ``CountingEnv``.
        n_actions: As for ``CountingEnv``.

    Attributes:
        n_episodes: Episodes with at least one step before the current one.

    Raises:
        SpecError: For an unknown kind or place, or a kind that cannot be at that place.
    """

    def __init__(
        self,
        fault: str = "none",
        *,
        at: str = "step",
        at_step: int | None = 0,
        in_episode: int | None = None,
        once: str | os.PathLike[str] | None = None,
        leak_bytes: int = 2**20,
        length: int = 10,
        id: int = 0,
        truncate: bool = False,
        n_actions: int = 2,
    ) -> None:
        super().__init__(length, id, truncate, n_actions)
        _refuse_misplaced(fault, at, at_step, in_episode)
        if once is not None and not Path(once).parent.is_dir():
            raise SpecError(f"once={os.fspath(once)!r} is in no directory", fix="make it first")
        self._standing = _Fault(fault, at, at_step, in_episode)
        self._fault = self._standing
        self._once = None if once is None else os.fspath(once)
        self._leak_bytes = leak_bytes
        self._leaked: list[bytes] = []
        self._buffer: Any = None
        self.n_episodes = 0
        self._strike("init")

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, or fail."""
        self.n_episodes += self.t > 0
        self.t = 0
        self._fault = self._fault_of(options or {})
        kind = self._strike("reset")
        observation, info = super().reset(seed=seed, options=options)
        return self._spoiled(observation, kind), info

    def step(self, action: Any) -> Result:
        """Count one step, or fail."""
        kind = self._strike("step")
        observation, reward, terminated, truncated, info = super().step(action)
        if kind in ("nan", "nan_reward"):
            reward = float("nan")
        if kind == "wrong_reward":
            reward = np.zeros(2)
        if kind == "wrong_flag":
            terminated = np.array([True, False])
        return self._spoiled(observation, kind), reward, terminated, truncated, info

    def close(self) -> None:
        """Close, or fail."""
        super().close()
        self._fault = self._standing
        self._strike("close")

    def _fault_of(self, options: Mapping[str, Any]) -> _Fault:
        if "fault" not in options:
            return self._standing
        kind, step = kind_of(options["fault"]), int(options.get("fault_step", 0))
        return _Fault(kind, "reset" if step == AT_RESET else "step", step, None)

    def _strike(self, place: str) -> str:
        """Fail if this is the place; the kind of a wrong result, else ``"none"``."""
        fault = self._fault
        if fault.kind == "none" or fault.at != place:
            return "none"
        if fault.episode is not None and fault.episode != self.n_episodes:
            return "none"
        if place == "step" and fault.step is not None and fault.step != self.t:
            return "none"
        if self._once is not None and not _creates(self._once):
            return "none"
        if fault.kind == "leak":
            self._leaked.append(b"\1" * self._leak_bytes)
        strike(fault.kind)
        return fault.kind

    def _spoiled(self, observation: Any, kind: str) -> Any:
        if kind in ("nan", "nan_observation"):
            return np.full_like(observation, np.nan)
        if kind == "wrong_dtype":
            return observation.astype(np.int64)
        if kind == "wrong_shape":
            return np.zeros(2, np.float32)
        if kind == "buffer_reuse" and self._buffer is None:
            self._buffer = np.empty_like(observation)
        if self._buffer is not None:
            self._buffer[...] = observation
            return self._buffer
        return observation


def _refuse_misplaced(kind: str, at: str, at_step: int | None, in_episode: int | None) -> None:
    code(kind)
    if at not in PLACES:
        raise SpecError(f"at is {at!r}", fix=f"choose one of {', '.join(PLACES)}")
    for name, number in (("at_step", at_step), ("in_episode", in_episode)):
        if number is not None and number < 0:
            raise SpecError(f"{name} is {number}", fix=f"{name} counts from 0")
    if in_episode is not None and at in ("init", "close"):
        raise SpecError(f"in_episode with at={at!r}", fix="leave one of them out")
    impossible = at in ("init", "close") and kind in WRONG
    if impossible or (at == "reset" and kind in _OF_STEPS_ONLY):
        possible = [k for k in KINDS if k not in (WRONG if at != "reset" else _OF_STEPS_ONLY)]
        raise SpecError(
            f"the fault {kind!r} cannot be at {at!r}, which returns nothing of the kind",
            fix=f"use at='step', or one of {', '.join(possible)}",
        )


def _creates(path: str) -> bool:
    """Whether this call creates the file; of all processes only one does."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True
