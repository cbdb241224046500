"""Ways to fail, each with a name and a number."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Sequence

import numpy as np

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.infos import info_rows
from rlpool.errors import SpecError

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
