"""An environment that counts its steps, one that fails at a chosen place, and ways to fail."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import info_rows
from rlpool.errors import SpecError
from rlpool.machine.arguments import names_arguments, whole_number

_NAN = np.full(1, np.nan, np.float32)
_WRONG: dict[str, dict[str, Any]] = {
    "nan": {"observation": _NAN, "reward": np.nan},
    "nan_observation": {"observation": _NAN},
    "nan_reward": {"reward": np.nan},
    "wrong_dtype": {"observation": np.zeros(1, np.int64)},
    "wrong_shape": {"observation": np.zeros(2, np.float32)},
    "wrong_reward": {"reward": np.zeros(2)},
    "wrong_flag": {"terminated": np.array([True, False])},
}
"""What is returned in place of what, for kinds that are wrong results rather than failures."""

_ENDING = ("exit", "sigkill", "segfault", "hang", "hang_gil", "stop")
KINDS = ("none", "raise", "sys_exit", *_ENDING, *_WRONG)
"""All kinds of faults; a kind's number in ``env_info`` is its place here.

Example:
    >>> "sigkill" in KINDS, KINDS.index("raise")
    (True, 1)
"""

EXIT_CODE = 17
"""What ``exit`` exits with."""

AT_RESET = -1
"""The step that means ``reset``."""


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
        SpecError: For an unknown kind, or a step below -1.
        IndexError: For a row that does not exist.

    Example:
        >>> faults(3, row=1, kind="sigkill", step=2)["fault"].nonzero().tolist()
        [[1]]
    """
    whole_number("step (-1 is reset)", step, AT_RESET)
    fault = np.zeros(n_rows, np.int64)
    fault[np.array([] if row is None else row, np.int64)] = code(kind)
    info = {"fault": fault, "fault_step": step, "id": np.arange(n_rows), **columns}
    return info_rows("env_info", info, n_rows)


def strike(kind: str) -> None:
    """Fail here and now.

    Useful in environments, agents and factories of your own. Returns only for ``"none"`` and the
    kinds that are wrong results rather than failures.

    Args:
        kind: One of ``KINDS``. ``exit``, ``sigkill``, ``segfault`` end this process, ``stop`` stops
            it as Ctrl-Z does, ``hang`` and ``hang_gil`` never return.

    Raises:
        KeyError: For ``raise``.
        SystemExit: For ``sys_exit``.
        SpecError: If there is no such kind.

    Example:
        >>> strike("raise")
        Traceback (most recent call last):
            ...
        KeyError: 'struck'
    """
    code(kind)
    if kind in ("raise", "sys_exit"):
        raise KeyError("struck") if kind == "raise" else SystemExit("struck")
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

    def __init__(
        self, length: int = 10, id: int = 0, truncate: bool = False, n_actions: int = 2
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, np.inf, (1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(whole_number("n_actions", n_actions, 1))
        whole_number("length", length, 1)
        self._default = self._episode = {"length": length, "id": id, "truncate": truncate}
        self._is_running = False
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

    def _observation(self) -> Any:
        return np.array([self.t], np.float32)


class FaultyEnv(CountingEnv):
    """Counts like a ``CountingEnv`` and fails in a chosen way at a chosen step.

    ``FaultyEnv("sigkill", at_step=3)`` kills its process in the call of ``step`` that starts from
    step 3 (the fourth of the episode). The kinds of faults are

    ============================  =================================================================
    ``none``                      nothing
    ``raise``                     ``KeyError``
    ``sys_exit``                  ``SystemExit``
    ``exit``                      ``os._exit`` with the code 17
    ``sigkill``                   the process kills itself
    ``segfault``                  the process reads address 0
    ``hang``                      sleeps forever
    ``hang_gil``                  computes forever in C, no other Python thread runs
    ``stop``                      the process stops itself, as after Ctrl-Z
    ``nan``                       NaN as observation and reward
    ``nan_observation``           NaN as observation
    ``nan_reward``                NaN as reward
    ``wrong_dtype``               an int64 observation
    ``wrong_shape``               an observation ``[2]``
    ``wrong_reward``              an array as reward
    ``wrong_flag``                an array as ``terminated``
    ============================  =================================================================

    A reset has no reward and no flag that could be wrong.

    Single episodes are chosen by the options of their reset, that is by ``env_info``: ``fault``
    (the number of a kind, see ``code``) and ``fault_step`` stand in place of ``fault`` and
    ``at_step`` for this episode. ``faults(n_rows, row, kind, step)`` makes such an ``env_info``.

    Kinds that end, stop or block a process do so to yours if the environment lives there, as with
    ``n_workers=0``.

    Args:
        fault: One of ``rlpool.testing.KINDS``.
        at_step: Which step of an episode, 0-based; -1 for ``reset``, ``None`` for every step.
        once: A file. Only the environment that creates it fails, once in all processes; whatever
            replaces it afterwards works.
        length: Steps of an episode.

    Raises:
        SpecError: For an unknown kind, or an ``at_step`` below -1.

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

    @names_arguments
    def __init__(
        self,
        fault: str = "none",
        *,
        at_step: int | None = 0,
        once: str | os.PathLike[str] | None = None,
        length: int = 10,
    ) -> None:
        super().__init__(length)
        code(fault)
        whole_number("at_step (-1 is reset)", at_step or 0, AT_RESET)
        self._fault = self._standing = fault, at_step
        self._once = once

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, or fail."""
        self._fault = self._standing
        if options and "fault" in options:
            self._fault = KINDS[int(options["fault"])], int(options.get("fault_step", 0))
        wrong = self._struck(AT_RESET)
        observation, info = super().reset(seed=seed, options=options)
        return wrong.get("observation", observation), info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Count one step, or fail."""
        wrong = self._struck(self.t)
        observation, reward, terminated, truncated, info = super().step(action)
        observation, reward = wrong.get("observation", observation), wrong.get("reward", reward)
        return observation, reward, wrong.get("terminated", terminated), truncated, info

    def _struck(self, step: int) -> Mapping[str, Any]:
        """Fail if this is the step; what to return in place of what."""
        kind, at_step = self._fault
        is_here = step == at_step or (at_step is None and step != AT_RESET)
        if kind == "none" or not is_here:
            return {}
        if self._once is not None:
            try:  # of all processes only one creates it
                Path(self._once).touch(exist_ok=False)
            except FileExistsError:
                return {}
        strike(kind)
        return _WRONG.get(kind, {})
