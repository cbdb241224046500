"""Calls of a vector environment in two halves: one begins it, the other waits for its outcome.

Between the two the caller's process is free, and the environments work. One call is pending at a
time. One whose wait timed out is given up: the next call waits for its end and forgets its outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from gymnasium import logger

from rlpool.errors import CallTimeoutError, NoPendingCallError, PendingCallError
from rlpool.machine.arguments import checked_wait
from rlpool.manager.vector_env import VectorOverLanes
from rlpool.memory.storage import Array


@dataclass(eq=False)
class PendingCall:
    """A call that was begun.

    Attributes:
        kind: ``"reset"``, ``"step"`` or ``"call"``.
        is_over: Whether it is over, after waiting until a ``time.monotonic()``.
        finish: Waits for it and returns its outcome.
        is_given_up: Whether nobody will ask for its outcome.
    """

    kind: str
    is_over: Callable[[float], bool]
    finish: Callable[[], Any]
    is_given_up: bool = False


class CallsInHalves(VectorOverLanes):
    """What a ``ParallelVectorEnv`` has in common with ``gymnasium.vector.AsyncVectorEnv``."""

    _pending: PendingCall | None = None

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin a ``reset`` and return at once; ``reset_wait`` waits for it.

        Args:
            seed: As for ``reset``.
            options: As for ``reset``.

        Raises:
            PendingCallError: If a call is pending; also Gymnasium's ``AlreadyPendingCallError``.
            SpecError, UsageError: As for ``reset``.
        """
        self._refuse_pending("reset_async")
        lanes = self._begin_reset(seed, options)
        finish = partial(self._finish_reset, lanes)
        self._pending = PendingCall("reset", self.manager.is_over, finish)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset that ``reset_async`` began.

        Args:
            timeout: The most seconds to wait, ``None`` for no limit beside that of hanging workers.

        Returns:
            What ``reset`` returns.

        Raises:
            NoPendingCallError: If no reset is pending; also Gymnasium's ``NoAsyncCallError``.
            CallTimeoutError: If it takes longer, a ``TimeoutError`` of Python and of
                ``multiprocessing``. The reset goes on; the next call waits for its end and forgets
                its outcome.
            EnvError, WorkerDiedError, WorkerTimeoutError: As for ``reset``.
        """
        result: tuple[Any, dict[str, Any]] = self._outcome("reset", timeout)
        return result

    def step_async(self, actions: Any) -> None:
        """Begin a ``step`` and return at once; ``step_wait`` waits for it.

        Actions of spaces without a fixed shape may take part of the step's time here: those of
        more than 8 KB travel in pieces.

        Args:
            actions: As for ``step``.

        Raises:
            PendingCallError: If a call is pending; also Gymnasium's ``AlreadyPendingCallError``.
            SpecError, UsageError: As for ``step``.

        Example:
            >>> import gymnasium
            >>> envs = ParallelVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
            >>> _ = envs.reset(seed=1)
            >>> envs.step_async([0, 1])
            >>> observation, reward, *_ = envs.step_wait(timeout=60.0)
            >>> reward
            array([1., 1.])
            >>> envs.close()
        """
        self._refuse_pending("step_async")
        arrays = self._step_arrays(actions)
        self.manager.begin_step(arrays)
        finish = partial(self._finish_step, arrays)
        self._pending = PendingCall("step", self.manager.is_over, finish)

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Wait for the step that ``step_async`` began.

        Args:
            timeout: The most seconds to wait, ``None`` for no limit beside that of hanging workers.

        Returns:
            What ``step`` returns.

        Raises:
            NoPendingCallError: If no step is pending; also Gymnasium's ``NoAsyncCallError``.
            CallTimeoutError: If it takes longer, a ``TimeoutError`` of Python and of
                ``multiprocessing``. The step is made nevertheless; the next call waits for its end
                and forgets its outcome.
            EnvError, WorkerDiedError, WorkerTimeoutError: As for ``step``.
        """
        result: tuple[Any, Array, Array, Array, dict[str, Any]] = self._outcome("step", timeout)
        return result

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a ``call`` and return at once; ``call_wait`` waits for it.

        Args:
            name: As for ``call``.
            *args: As for ``call``.
            **kwargs: As for ``call``.

        Raises:
            PendingCallError: If a call is pending; also Gymnasium's ``AlreadyPendingCallError``.
            SpecError: If an argument cannot be pickled.
        """
        self._refuse_pending("call_async")
        lanes = self._begin_call(name, args, kwargs)
        finish = partial(self._finish_call, lanes, name)
        self._pending = PendingCall("call", partial(self._have_answered, lanes), finish)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the calls that ``call_async`` began.

        Args:
            timeout: The most seconds to wait, ``None`` for no limit beside that of hanging workers.

        Returns:
            What ``call`` returns.

        Raises:
            NoPendingCallError: If no call is pending; also Gymnasium's ``NoAsyncCallError``.
            CallTimeoutError: If it takes longer, a ``TimeoutError`` of Python and of
                ``multiprocessing``. The next call waits for its end and forgets its outcome.
            EnvError, WorkerDiedError, WorkerTimeoutError: As for ``call``.
        """
        result: tuple[Any, ...] = self._outcome("call", timeout)
        return result

    # States ------------------------------------------------------------------------------------

    def _refuse_pending(self, name: str) -> None:
        """Refuse to begin something while a call is pending, and end one that was given up.

        Raises:
            PendingCallError: If a call is pending.
        """
        super()._refuse_pending(name)
        pending = self._pending
        if pending is None:
            return
        if not pending.is_given_up:
            raise PendingCallError(
                f"{name}() was called while a {pending.kind} is pending",
                pending.kind,
                fix=f"call {pending.kind}_wait() first",
            )
        self.manager.drop_begun()
        self._note_ended()
        self._pending = None

    def _outcome(self, kind: str, timeout: float | None) -> Any:
        """The outcome of the pending call, which has to be of this kind."""
        self.manager.check_open()
        pending = self._pending
        if pending is None or pending.is_given_up or pending.kind != kind:
            what = f"{kind}_wait() was called, and no {kind} is pending"
            raise NoPendingCallError(what, kind, fix=f"call {kind}_async() first")
        timeout = checked_wait(timeout)
        pending.is_given_up = True  # unless its outcome gets to the caller
        if timeout is not None and not pending.is_over(monotonic() + timeout):
            raise CallTimeoutError(
                f"the {kind} has not ended after {timeout:g} s",
                fix="wait longer; the next call waits for its end and forgets its outcome",
            )
        try:
            outcome = pending.finish()
        except Exception:  # that of an environment or a worker: it is the outcome
            self._pending = None
            raise
        self._pending = None
        return outcome

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers; called by ``close``, whose arguments are not used.

        A pending call is given up, with a warning as Gymnasium gives it.
        """
        if self._pending is not None and not self._pending.is_given_up:
            logger.warn(f"`close` was called while a {self._pending.kind} is pending: it is lost")
        if hasattr(self, "manager"):  # else it was not made, which Gymnasium's __del__ does not ask
            self.manager.close()
