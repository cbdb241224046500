"""The calls of a ``ParallelVectorEnv``: as a whole, or in two halves.

One half begins a call, the other waits for its outcome. Between the two the caller's process is
free, and the environments work. One call is pending at a time. One whose wait timed out, or was
interrupted, is given up: the next call waits for its end and forgets its outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from gymnasium import logger

from rlpool.errors import CallTimeoutError, NoPendingCallError, PendingCallError, SpecError
from rlpool.machine.arguments import checked_wait
from rlpool.manager.vector_env import Finish, VectorOverLanes, requests_to
from rlpool.memory.storage import Array

Reset = tuple[Any, dict[str, Any]]
Step = tuple[Any, Array, Array, Array, dict[str, Any]]


@dataclass(eq=False)
class PendingCall:
    """A call that was begun.

    Attributes:
        kind: ``"reset"``, ``"step"``, ``"call"`` or ``"set_attr"``.
        finish: Waits for it and returns its outcome.
        is_given_up: Whether nobody will ask for its outcome.
    """

    kind: str
    finish: Finish
    is_given_up: bool = True


class VectorCalls(VectorOverLanes):
    """What a ``ParallelVectorEnv`` has in common with ``gymnasium.vector.AsyncVectorEnv``."""

    _pending: PendingCall | None = None

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> Reset:
        """Reset the environments.

        A worker that dies later on is brought back by resetting its environments as here and
        repeating all actions since, automatic restarts included.

        Args:
            seed: An int gives environment *i* the seed ``seed + i``; or a list of one seed per
                environment. Environments whose seed is ``None`` go on with their generators.
            options: Passed to every environment, without ``"reset_mask"``: a bool array
                ``[num_envs]``, True for the environments to reset; the others are left alone.

        Returns:
            The observations of all environments, and the infos of those that were reset.

        Raises:
            SpecError: For seeds or a mask that do not fit; also a ``TypeError`` if the mask is
                no bool array.
            EnvError: If an environment raises.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs, for good.
        """
        result: Reset = self._whole("reset", self._begin_reset, seed, options)
        return result

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
        self._begin("reset", self._begin_reset, seed, options).is_given_up = False

    def reset_wait(self, timeout: float | None = None) -> Reset:
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
        result: Reset = self._outcome("reset", timeout)
        return result

    def step(self, actions: Any) -> Step:
        """Step all environments.

        If a signal handler raises in it, the step may have been made or not: go on with ``reset``.

        Args:
            actions: One row per environment, as ``action_space`` has them; converted to the dtypes
                of the space if they are of the same kind.

        Returns:
            Observations, rewards float64 ``[num_envs]``, terminated and truncated bool
            ``[num_envs]``, and infos. All but the observations are copies.

        Raises:
            SpecError: If the actions do not fit; also a ``TypeError`` for a single number.
            EnvError: If an environment raises; the environments of its worker need a reset.
            UsageError: If an environment needs a reset, or a call is pending.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs, for good.
        """
        result: Step = self._whole("step", self._begin_step, actions)
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
        self._begin("step", self._begin_step, actions).is_given_up = False

    def step_wait(self, timeout: float | None = None) -> Step:
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
        result: Step = self._outcome("step", timeout)
        return result

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute that cannot be called.

        What the method changes is lost if the worker is replaced; use ``set_attr`` for attributes.

        Args:
            name: The name; it is looked up through wrappers.
            *args: Its arguments; they are pickled, as the results are.
            **kwargs: Likewise.

        Returns:
            One result per environment.

        Raises:
            EnvError: If it raises in an environment, or there is none of that name.
        """
        requests = requests_to(self._all, name, args, kwargs)
        result: tuple[Any, ...] = self._whole("call", self._begin_call, requests, name)
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
        requests = requests_to(self._all, name, args, kwargs)
        self._begin("call", self._begin_call, requests, name).is_given_up = False

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

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment, a copy; a method is called, as by ``call``."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of the environments.

        The successor of a worker sets it, too. Set in the middle of episodes, it makes these
        impossible to repeat: if a worker dies before the next reset, the environments that it had
        raise ``EnvError`` until they are reset.

        Args:
            name: The name.
            values: A list or tuple of one value per environment, or one value for all.

        Raises:
            SpecError: If the list has another length.
        """
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise SpecError(
                f"got {len(values)} values of {name!r} for {self.num_envs} environments",
                fix="pass one per environment, or one that is neither list nor tuple",
            )
        requests = [("set_attr", {"attr": name, "value": value}) for value in values]
        self._whole("set_attr", self._begin_call, dict(enumerate(requests)), name)

    def render(self) -> tuple[Any, ...]:
        """What ``render`` returns in every environment."""
        return self.call("render")

    @property  # type: ignore[misc]  # Gymnasium's own have no setter either
    def np_random(self) -> Any:
        """Copies of the environments' generators."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        """The seeds of the environments' generators."""
        return self.get_attr("np_random_seed")

    # States ------------------------------------------------------------------------------------

    def _begin(self, kind: str, begin: Callable[..., Finish], *arguments: Any) -> PendingCall:
        """Begin a call, given up unless somebody asks for its outcome.

        Raises:
            EnvsClosedError: If the environments are closed.
            PendingCallError: If a call is pending.
        """
        self.manager.check_open()
        pending = self._pending
        if pending is not None:
            if not pending.is_given_up:
                raise PendingCallError(
                    f"{kind} was called while a {pending.kind} is pending",
                    pending.kind,
                    fix=f"call {pending.kind}_wait() first",
                )
            self.manager.drop_begun()
            self._note_ended()
            self._pending = None
        self._pending = begun = PendingCall(kind, begin(*arguments))
        return begun

    def _whole(self, kind: str, begin: Callable[..., Finish], *arguments: Any) -> Any:
        """Begin a call and wait for its outcome."""
        return self._finished(self._begin(kind, begin, *arguments))

    def _outcome(self, kind: str, timeout: float | None) -> Any:
        """The outcome of the pending call, which has to be of this kind."""
        self.manager.check_open()
        pending = self._pending
        if pending is None or pending.is_given_up or pending.kind != kind:
            what = f"{kind}_wait() was called, and no {kind} is pending"
            raise NoPendingCallError(what, kind, fix=f"call {kind}_async() first")
        timeout = checked_wait(timeout)
        pending.is_given_up = True  # unless its outcome gets to the caller
        if timeout is not None and not self.manager.is_over(monotonic() + timeout):
            raise CallTimeoutError(
                f"the {kind} has not ended after {timeout:g} s",
                fix="wait longer; the next call waits for its end and forgets its outcome",
            )
        return self._finished(pending)

    def _finished(self, pending: PendingCall) -> Any:
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
