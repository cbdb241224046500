"""An environment that counts its steps, one that fails at a chosen place, and ways to fail."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import info_rows
from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number

_RAISING = ("raise", "unpicklable", "unprintable", "sys_exit")
_ENDING = ("exit", "sigkill", "segfault", "hang", "hang_gil", "stop")
_NAN = ("nan", "nan_observation", "nan_reward")
WRONG = (*_NAN, "buffer_reuse", "wrong_dtype", "wrong_shape", "wrong_reward", "wrong_flag")
KINDS = ("none", *_RAISING, *_ENDING, "leak", *WRONG)
"""All kinds of faults; a kind's number in ``env_info`` is its place here.

Example:
    >>> "sigkill" in KINDS, KINDS.index("raise")
    (True, 1)
"""

EXIT_CODE = 17
"""What ``exit`` exits with."""

AT_RESET = -1
"""The step that means ``reset``."""


class UnpicklableError(Exception):
    """Cannot be sent to another process, because its lock cannot."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class UnprintableError(Exception):
    """Cannot be turned into text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def code(kind: str) -> int:
    """The number of a kind, for ``env_info``.

    Raises:
        SpecError: If there is no such kind.

    Example:
        >>> code("raise"), KINDS[code("raise")]
        (1, 'raise')
    """
    if kind not in KINDS:
        raise SpecError(f"no fault is called {kind!r}", fix=f"choose one of {', '.join(KINDS)}")
    return KINDS.index(kind)


def faults(
    n_rows: int,
    row: int | Sequence[int] | None = None,
    kind: str = "raise",
    step: int = 0,
    **columns: int,
) -> DictTensor:
    """An ``env_info`` in which the episodes of some rows fail, for a ``FaultyEnv``.

    Args:
        n_rows: Number of episodes.
        row: Row, or rows, that fail; ``None`` for no row. Negative ones count from the end.
        kind: How they fail, one of ``KINDS``.
        step: The step that fails, 0-based; -1 for ``reset``.
        columns: Further columns, the same in every row, such as ``length=5``. ``id`` is the number
            of the row unless it is given here.

    Returns:
        int64 ``[n_rows]`` under ``fault``, ``fault_step``, ``id`` and the keys of ``columns``.

    Raises:
        SpecError: For an unknown kind, a row that does not exist, or a step below -1.

    Example:
        >>> faults(3, row=1, kind="sigkill", step=2)["fault"].nonzero().tolist()
        [[1]]
    """
    if step < AT_RESET:
        raise SpecError(f"step is {step}", fix="steps count from 0, -1 is reset")
    fault = np.zeros(n_rows, np.int64)
    try:
        fault[np.array([] if row is None else row, np.int64)] = code(kind)
    except IndexError:
        raise SpecError(f"row {row} of {n_rows}", fix=f"rows are 0 to {n_rows - 1}") from None
    info = {"fault": fault, "fault_step": step, "id": np.arange(n_rows), **columns}
    return info_rows("env_info", info, n_rows)


def strike(kind: str) -> None:
    """Fail here and now.

    Useful in agents and factories of your own. Returns only for ``"none"``, ``"leak"`` and the
    kinds that are wrong results rather than failures.

    Args:
        kind: One of ``KINDS``. ``exit``, ``sigkill``, ``segfault`` end this process, ``stop`` stops
            it as Ctrl-Z does, ``hang`` and ``hang_gil`` never return.

    Raises:
        KeyError: For ``raise``.
        UnpicklableError: For ``unpicklable``.
        UnprintableError: For ``unprintable``.
        SystemExit: For ``sys_exit``.
        SpecError: If there is no such kind.

    Example:
        >>> strike("raise")
        Traceback (most recent call last):
            ...
        KeyError: 'struck'
    """
    code(kind)
    raised = {"raise": KeyError, "unpicklable": UnpicklableError, "unprintable": UnprintableError}
    if error := {**raised, "sys_exit": SystemExit}.get(kind):
        raise error("struck")
    if kind == "exit":
        os._exit(EXIT_CODE)
    if kind == "segfault":
        ctypes.string_at(0)
    if kind in ("sigkill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "sigkill" else signal.SIGSTOP)
    # SIGKILL may arrive late, and SIGSTOP may end: this process still does not continue.
    while kind in ("hang", "stop", "sigkill"):
        time.sleep(3600.0)
    while kind == "hang_gil":
        sum(range(10**13))  # one call in C: no other thread of this process runs until it returns


class CountingEnv(gymnasium.Env[Any, Any]):
    """Counts its steps, so that a batcher's results can be compared with tensors made by hand.

    With ``t`` for the number of steps since the reset, the observation is ``[t]``, float32 ``[1]``:
    ``[0.]`` after the reset, ``[length]`` after the last step. The reward of a step is
    ``1000 * id + t`` with the ``t`` after it: 1, 2, 3 ... for the id 0. The step in which ``t``
    reaches ``length`` ends the episode. Seeds and actions change nothing. ``info`` holds ``id``.

    ``reset(options={"length": 3, "id": 7})`` overrides the arguments for one episode, and so does
    ``env_info``; ``truncate`` may be there as well. Other options are ignored.

    Args:
        length: Steps of an episode.
        id: Number of an episode; part of its rewards.
        truncate: End episodes by ``truncated`` instead of ``terminated``.
        n_actions: Size of the action space, a ``Discrete``. Any action is accepted.

    Attributes:
        t: Steps since the reset.
        is_closed: Whether ``close`` was called.

    Raises:
        SpecError: If ``length`` or ``n_actions`` is no int of at least 1.

    Example:
        >>> env = CountingEnv(length=2)
        >>> env.reset()[0].tolist()
        [0.0]
        >>> env.step(0)[:4]
        (array([1.], dtype=float32), 1.0, False, False)
        >>> env.step(0)[:4]
        (array([2.], dtype=float32), 2.0, True, False)
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (as Gymnasium declares it)

    def __init__(
        self, length: int = 10, id: int = 0, truncate: bool = False, n_actions: int = 2
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, np.inf, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(whole_number("n_actions", n_actions, 1))
        whole_number("length", length, 1)
        self._default = self._episode = {"length": length, "id": id, "truncate": truncate}
        self._is_running = self.is_closed = False
        self.t = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode at 0.

        Args:
            seed: Changes nothing.
            options: May hold ``length``, ``id`` and ``truncate`` of this episode.
        """
        super().reset(seed=seed)
        given = options or {}
        self._episode = {key: given.get(key, value) for key, value in self._default.items()}
        whole_number("length", self._episode["length"], 1)
        self.t = 0
        self._is_running = True
        return self._observation(), {"id": int(self._episode["id"])}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Count one step.

        Raises:
            gymnasium.error.ResetNeeded: Before a reset, or after the end of the episode.
        """
        if not self._is_running:
            raise gymnasium.error.ResetNeeded("step() without a running episode: call reset()")
        self.t += 1
        number, is_over = int(self._episode["id"]), self.t >= self._episode["length"]
        self._is_running = not is_over
        # Rewards tell episodes apart.
        reward, truncate = 1000.0 * number + self.t, bool(self._episode["truncate"])
        ends = is_over and not truncate, is_over and truncate
        return self._observation(), reward, *ends, {"id": number}

    def close(self) -> None:
        """Set ``is_closed``."""
        self.is_closed = True

    def _observation(self) -> Any:
        return np.array([self.t], np.float32)


_REWARDS = {"nan": np.nan, "nan_reward": np.nan, "wrong_reward": np.zeros(2)}
_OF_STEPS = ("nan_reward", "wrong_reward", "wrong_flag")  # a reset has no such result
_PLACES = {"init": WRONG, "reset": _OF_STEPS, "step": (), "close": WRONG}
"""Place to the kinds that cannot be there."""


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
    ``hang``                      sleeps forever
    ``hang_gil``                  computes forever in C, no other Python thread runs
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

    Kinds that end, stop or block a process do so to yours if the environment lives there, as with
    ``n_threads=0``.

    Args:
        fault: One of ``rlpool.testing.KINDS``.
        at: Where: ``"init"``, ``"reset"``, ``"step"`` or ``"close"``. Kinds that are wrong results
            need ``"reset"`` or ``"step"``.
        at_step: Which step of an episode, 0-based; ``None`` for every step.
        in_episode: Which episode of this instance, 0-based, counting only those with at least one
            step; ``None`` for every episode. (A batcher's workers reset their environments once
            before the first episode, to learn the keys; that episode has no step.)
        once: A file. Only the environment that creates it fails, once in all processes; whatever
            replaces it afterwards works.
        leak_bytes: How much ``leak`` keeps each time it strikes.
        **counting: Arguments of ``CountingEnv``.

    Attributes:
        n_episodes: Episodes with at least one step before the current one.

    Raises:
        SpecError: For an unknown kind or place, or a kind that cannot be at that place.

    Example:
        >>> env = FaultyEnv("raise", at_step=1)
        >>> observation, info = env.reset()
        >>> env.step(0)[0]
        array([1.], dtype=float32)
        >>> env.step(0)
        Traceback (most recent call last):
            ...
        KeyError: 'struck'
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
        **counting: Any,
    ) -> None:
        super().__init__(**counting)
        for name, number in (("at_step", at_step), ("in_episode", in_episode)):
            whole_number(name, number or 0, 0)
        if KINDS[code(fault)] in _PLACES.get(at, KINDS):
            places = [place for place, kinds in _PLACES.items() if fault not in kinds]
            what = f"the fault {fault!r} cannot be at {at!r}"
            raise SpecError(what, fix=f"choose one of {', '.join(places)}")
        self._fault = self._standing = fault, at, at_step, in_episode
        self._once, self._leak_bytes, self._leaked = once, leak_bytes, list[bytes]()
        self._buffer: Any = None  # the observation of buffer_reuse
        self.n_episodes = 0
        self._trigger("init")

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, or fail."""
        self.n_episodes += self.t > 0
        self.t, self._fault = 0, self._standing
        if options and "fault" in options:
            number, step = int(options["fault"]), int(options.get("fault_step", 0))
            if not 0 <= number < len(KINDS):
                fix = "use rlpool.testing.code(kind) for numbers"
                raise SpecError(f"no fault has the number {number}", fix=fix)
            self._fault = KINDS[number], "reset" if step == AT_RESET else "step", step, None
        kind = self._trigger("reset")
        observation, info = super().reset(seed=seed, options=options)
        return self._spoiled(observation, kind), info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Count one step, or fail."""
        kind = self._trigger("step")
        observation, reward, terminated, truncated, info = super().step(action)
        terminated = np.array([True, False]) if kind == "wrong_flag" else terminated
        reward = _REWARDS.get(kind, reward)
        return self._spoiled(observation, kind), reward, terminated, truncated, info

    def close(self) -> None:
        """Close, or fail."""
        super().close()
        self._fault = self._standing
        self._trigger("close")

    def _trigger(self, place: str) -> str:
        """Fail if this is the place; the kind of a wrong result, else ``"none"``."""
        kind, at, step, episode = self._fault
        is_here = at == place and episode in (None, self.n_episodes)
        if kind == "none" or not is_here or (place == "step" and step not in (None, self.t)):
            return "none"
        if self._once is not None:
            try:  # of all processes only one creates it
                Path(self._once).touch(exist_ok=False)
            except FileExistsError:
                return "none"
        if kind == "leak":
            self._leaked.append(b"\1" * self._leak_bytes)
        strike(kind)
        return kind

    def _spoiled(self, observation: Any, kind: str) -> Any:
        wrong = {
            **dict.fromkeys(("nan", "nan_observation"), np.full_like(observation, np.nan)),
            "wrong_dtype": observation.astype(np.int64),
            "wrong_shape": np.zeros(2, np.float32),
        }
        if kind == "buffer_reuse" and self._buffer is None:
            self._buffer = np.empty_like(observation)
        if kind in wrong or self._buffer is None:
            return wrong.get(kind, observation)
        self._buffer[...] = observation
        return self._buffer
