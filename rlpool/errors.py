"""All exceptions of rlpool, and the format of their messages.

::

    RlpoolError
    ├ UsageError(RuntimeError)        order of calls, closed, nothing pending, no __main__ guard
    │ ├ BatcherClosedError(ValueError)  as for closed files
    ├ SpecError(ValueError)           shape, dtype, device, key, space; names got and expected
    ├ NotEnoughDataError(ValueError)  a pool cannot fill the sample
    ├ ResultTimeoutError(TimeoutError)  get() waited as long as its timeout allows
    └ WorkerError(RuntimeError)       has .where (worker, lane, row, episode, step, seed, ...), and
      │                               .options and .actions, which repeat the failed episode
      ├ WorkerStartupError            create_env or create_agent raised, or could not be pickled
      ├ EnvError                      the environment raised; __cause__ has the remote traceback
      │ ├ NotRepeatedError             it does not repeat an episode: it is not deterministic
      │ └ EnvSpecError(SpecError)     the environment returned a wrong shape, dtype or key
      ├ AgentError                    the agent raised; __cause__ has the remote traceback
      │ └ AgentSpecError(SpecError)   the agent returned a wrong shape, dtype or key
      ├ WorkerDiedError               .exitcode, .signal_name, .history
      └ WorkerTimeoutError(TimeoutError)

Messages have up to three lines: what happened, where, and how to fix it. All exceptions can be
pickled, so that they pass through users' own process pools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple


class Where(NamedTuple):
    """The place of a failure; a field that does not apply is ``None``.

    Attributes:
        worker: Number of the worker process, 0-based.
        lane: Number of the environment within the worker, 0-based.
        row: Row of the running request, 0-based; the lane of a ``Batcher``.
        episode: Number of the episode in the batcher's life, see ``EpisodeBatcher.seek``.
        step: Step of the episode, 0-based; 0 for a failing ``reset``.
        seed: Seed that the episode was reset with.
        env_info: The episode's row of ``env_info`` as Python values.
        node: Name of the machine, if workers run on several.

    Example:
        >>> print(Where(worker=1, row=3, episode=35, step=7, seed=42))
        worker 1, row 3, episode 35, step 7, seed 42
    """

    worker: int | None = None
    lane: int | None = None
    row: int | None = None
    episode: int | None = None
    step: int | None = None
    seed: int | None = None
    env_info: Mapping[str, Any] | None = None
    node: str | None = None

    def __str__(self) -> str:
        fields = {"node": self.node, **self._asdict()}  # the machine first
        return ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)


class RlpoolError(Exception):
    """Base class of all exceptions that rlpool raises on purpose.

    Args:
        what: One line that says what happened.
        where: Where it happened, empty if obvious.
        fix: One line that says what to do about it, empty if unknown.

    Attributes:
        what: As given.
        fix: As given.

    Example:
        >>> try:
        ...     Pool(pool_size=0)
        ... except RlpoolError as error:
        ...     print(error)
        pool_size should be an int of at least 1, got 0
    """

    def __init__(self, what: str, *, where: Where | str = "", fix: str = "") -> None:
        self.what = what
        self.fix = fix
        # Not super(): the next class of a subclass, such as LaneError, may take other arguments.
        Exception.__init__(self, compose(what, where=str(where), fix=fix))


class UsageError(RlpoolError, RuntimeError):
    """Calls in the wrong order, a closed object, nothing pending, a missing ``__main__`` guard.

    Example:
        >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
        >>> try:
        ...     batcher.get()
        ... except UsageError as error:
        ...     print(error)
        nothing is pending
          fix:   call execute() before get()
    """


class BatcherClosedError(UsageError, ValueError):
    """A batcher is closed; a ``ValueError`` as for closed files, as ``selectors`` expects."""


class ResultTimeoutError(RlpoolError, TimeoutError):
    """The result is not ready after the ``timeout`` of ``get``; nothing is lost."""


class SpecError(RlpoolError, ValueError):
    """A shape, dtype, device, key or space does not fit; the message names got and expected.

    Example:
        >>> try:
        ...     DictTensor({"frame": torch.zeros(2, 4), "action": torch.zeros(3)})
        ... except SpecError as error:
        ...     print(error.what)
        key 'action' is float32 [3], key 'frame' is float32 [2, 4]
    """


class NotEnoughDataError(RlpoolError, ValueError):
    """A pool cannot fill the requested sample.

    Example:
        >>> try:
        ...     Pool(pool_size=100).sample(32)
        ... except NotEnoughDataError as error:
        ...     print(error.what)
        32 transitions were requested, but there are 0
    """


class RemoteTraceback(Exception):
    """The text of a traceback from another process, attached as ``__cause__``."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class WorkerError(RlpoolError, RuntimeError):
    """Something failed while a worker ran the user's code, or the worker itself failed.

    Args:
        what: One line that says what happened.
        where: Where it happened.
        fix: One line that says what to do about it, empty if unknown.
        traceback_text: The remote traceback, empty if there is none. It becomes ``__cause__``.
        options: Reset options of the failed episode.
        actions: Actions of the failed episode.

    Attributes:
        options: The ``options`` of the episode's ``reset``, ``None`` if there were none.
        actions: The actions of the failed episode from its reset on, including that of a step that
            failed, stacked to ``[step, ...]`` in the environment's form (for ``Dict`` and ``Tuple``
            spaces a dict or tuple of arrays). ``None`` for failures outside an episode, and where
            the first actions were not kept. See ``rlpool.replay``.
    """

    _arguments: tuple[str, ...] = ("what", "where", "fix", "traceback_text", "options", "actions")

    can_be_repeated = False  # whether the worker may be replaced and the episode run again

    def __init__(
        self,
        what: str,
        *,
        where: Where | None = None,
        fix: str = "",
        traceback_text: str = "",
        options: Mapping[str, Any] | None = None,
        actions: Any = None,
    ) -> None:
        self.where = where or Where()
        self.traceback_text = traceback_text
        self.options = options
        self.actions = actions
        super().__init__(what, where=self.where, fix=fix)
        if traceback_text:
            self.__cause__ = RemoteTraceback(traceback_text)

    def reworded(self, **changes: Any) -> WorkerError:
        """Copy the error and its cause, reworded for the function that the user called.

        Args:
            **changes: ``what``, ``where`` or ``fix``; the others are unchanged.
        """
        same = type(self)(**{**self._constructor_arguments(), **changes})
        same.__cause__ = self.__cause__
        return same

    def __reduce__(self) -> tuple[Callable[[], WorkerError], tuple[()]]:
        return partial(type(self), **self._constructor_arguments()), ()

    def _constructor_arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._arguments}


class WorkerStartupError(WorkerError):
    """``create_env`` or ``create_agent`` raised, or could not be pickled.

    Example:
        >>> def forgets_to_return(seed):
        ...     GymEnv([CountingEnv()], seed)
        >>> try:
        ...     EpisodeBatcher(8, 4, create_agent, {}, forgets_to_return, n_workers=0)
        ... except WorkerStartupError as error:
        ...     print(error)
        create_env returned NoneType, not a VecEnv
          where: worker 0
          fix:   end create_env with return GymEnv([...environments...], seed)
    """


class EnvError(WorkerError):
    """The environment's ``reset`` or ``step`` raised."""

    can_be_repeated = True


class NotRepeatedError(EnvError):
    """The environment behaved differently when an episode was repeated."""

    can_be_repeated = False


class EnvSpecError(EnvError, SpecError):
    """The environment returned a value of a wrong shape, dtype or structure."""


class AgentError(WorkerError):
    """The agent's call, ``initial_state``, ``update`` or ``seed`` raised.

    Example:
        >>> def broken(observation):
        ...     return 1 / 0
        >>> try:
        ...     evaluate(broken, create_env, n_episodes=1)
        ... except AgentError as error:
        ...     print(error.what)
        the agent raised ZeroDivisionError: division by zero
    """


class AgentSpecError(AgentError, SpecError):
    """The agent returned a value of a wrong shape, dtype or structure.

    Example:
        >>> def one_row(observation):
        ...     return {"action": torch.zeros(1)}
        >>> try:
        ...     evaluate(one_row, create_env, n_episodes=1)  # calls it with 16 rows
        ... except AgentSpecError as error:
        ...     print(error.what)
        the agent: 'action' in the agent's output should have 16 rows, got shape [1]
    """


class WorkerDiedError(WorkerError):
    """A worker process ended unexpectedly.

    Args:
        what: One line that says what happened.
        exitcode: The process's exit code, negative for a signal; ``None`` if unknown.
        signal_name: Name of the signal that ended it, such as ``"SIGKILL"``; ``None`` otherwise.
        history: The failures that used up the restarts, this one last; empty if there were no
            restarts.
        **report: The other arguments of ``WorkerError``.
    """

    _arguments = (*WorkerError._arguments, "exitcode", "signal_name", "history")

    def __init__(
        self,
        what: str,
        *,
        exitcode: int | None,
        signal_name: str | None = None,
        history: Sequence[WorkerError] = (),
        **report: Any,
    ) -> None:
        super().__init__(what, **report)
        self.exitcode = exitcode
        self.signal_name = signal_name
        self.history: tuple[WorkerError, ...] = tuple(history)


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker made no progress for longer than ``timeout`` seconds."""


def compose(what: str, *, where: str = "", fix: str = "") -> str:
    """Join the parts of a message, one line each: what, where, fix; empty parts are left out."""
    parts = (what, where and f"  where: {where}", fix and f"  fix:   {fix}")
    return "\n".join(part for part in parts if part)


def described(error: BaseException) -> str:
    """Describe an exception in one line by class and text, even one without text."""
    try:
        text = " ".join(str(error).split("\n")).strip()
    except Exception:
        text = "<its text is not available>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
