"""Shared part of all batchers: workers, seeds, results, updates, state, closing."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from rlpool.agents.agent import check_is_factory
from rlpool.batch.checks import (
    CreateAgent,
    CreateEnv,
    Seeds,
    ShowProgress,
    State,
    checked_batcher_seeds,
    checked_progress,
    checked_state,
    showing_progress,
)
from rlpool.batch.dispatch import Dispatcher, packed
from rlpool.batch.messages import Recipe
from rlpool.batch.requests import Policy
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import (
    BatcherClosedError,
    ResultTimeoutError,
    UsageError,
    WorkerError,
)
from rlpool.machine.arguments import (
    also_takes,
    check_choice,
    checked_timeout,
    keywords,
    optional_number,
    whole_number,
)
from rlpool.machine.calls import CrashOnly, crash_only
from rlpool.machine.imports import refuse_during_import
from rlpool.machine.limits import WORKER_DESCRIPTORS, check_workers
from rlpool.machine.platform import require_linux
from rlpool.observe.stats import Stats
from rlpool.seeding import root_from
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, BatcherOptions, policy_of
from rlpool.workers.process_owner import ProcessOwner, refuse_forked_copy

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LOG = logging.getLogger("rlpool")

_SHOW_EVERY_S = 0.25
"""A few times a second is as fast as people can follow and costs nothing."""


class BatcherBase(CrashOnly, ProcessOwner):
    """Owns a batcher's workers; updates and closes them.

    An interrupted call drops the requests in flight; the next request starts new workers.
    """

    _dispatcher: Dispatcher | None = None
    _recipe: Recipe | None = None
    _is_closed = False
    _policy = Policy()
    _failures: tuple[WorkerError, ...] = ()

    _NAME: str
    """Name of the class in error messages; of an internal batcher, the public function's name."""

    _WATCHES_INFOS = False
    """Whether a key of ``info_keys`` that no info contains is an error instead of a warning."""

    _max_steps: int | None = None  # limit at which episodes are truncated

    @also_takes(n_threads="n_workers", seed="seeds")
    def __init__(
        self,
        n_timesteps: int,
        n_slots: int | None = None,
        create_agent: CreateAgent | None = None,
        agent_args: Mapping[str, Any] | None = None,
        create_env: CreateEnv | None = None,
        env_args: Mapping[str, Any] | None = None,
        n_workers: int = 1,
        seeds: Seeds = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        agent_rows: int | None = None,
        progress: ShowProgress = False,
        **policy: Unpack[BatcherOptions],
    ) -> None:
        refuse_during_import()
        self._progress = checked_progress(progress)
        n_timesteps = whole_number("n_timesteps", n_timesteps, 1)
        fix = 'rlpool.worker_count("auto") says how many this machine has room for'
        n_workers = whole_number("n_workers", n_workers, 0, fix=fix)
        n_slots = optional_number("n_slots", n_slots, 1)
        agent_rows = optional_number("agent_rows", agent_rows, 1)
        options: Any = policy  # without the second names, which also_takes has replaced
        failure_policy = policy_of(self._NAME, options)
        timeout = checked_timeout(timeout)
        for name, function in (("create_agent", create_agent), ("create_env", create_env)):
            check_is_factory(name, function)
        self._root = root_from(checked_batcher_seeds(seeds, n_workers))
        if seeds is None:
            _LOG.info("drew the root seed %d", self._root)
        self._n_workers = max(1, n_workers)
        self._n_timesteps = n_timesteps
        self._is_private = n_workers == 0
        self._repeats = n_workers > 0 or failure_policy.truncates
        self._owner_pid = os.getpid()
        given = {
            "create_env": create_env,
            "env_args": keywords("env_args", env_args),
            "create_agent": create_agent,
            "agent_args": keywords("agent_args", agent_args),
        }
        rest = agent_rows, self._WATCHES_INFOS, self._max_steps
        self._recipe = Recipe(n_workers, given, rest, self._NAME)
        if n_workers:
            require_linux(f"n_workers={n_workers}", "n_workers=0 works here, with the same bits")
            check_workers(n_workers, WORKER_DESCRIPTORS, "lower n_workers")
        # Not methods of this object: without references back to it, a batcher that is dropped (a
        # notebook cell that is run again, for example) ends its workers at once.
        self._start_workers = partial(
            Dispatcher,
            self._recipe,
            make_layout=partial(self.layout, n_timesteps, n_slots, self._n_workers),
            policy=failure_policy,
            timeout_s=timeout if n_workers else None,
        )
        self._begin()

    @classmethod
    def layout(
        cls, n_timesteps: int, n_slots: int | None, n_workers: int, specs: StepSpecs
    ) -> Layout:
        """Make the layout of the blocks and check that they fit into memory."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed or self._dispatcher is None

    @property
    def n_lanes(self) -> int:
        """Lanes of all workers, that is, environments that run at the same time."""
        return self._not_closed().n_lanes * self._n_workers

    @property
    def environment(self) -> Mapping[str, Any]:
        """Class, spec, wrappers and seeding of the environments; empty while unknown.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.environment["class"]
            'CountingEnv'
        """
        return self._not_closed().environment

    @property
    def policy_version(self) -> int:
        """Number of updates so far, which new requests report as ``info["policy_version"]``."""
        self._not_closed()
        return self._policy.version

    @property
    def n_pending(self) -> int:
        """Number of requests whose results ``get`` has not returned yet."""
        dispatcher = self._not_closed()
        return 0 if self.is_interrupted else len(dispatcher.pending)

    def fileno(self) -> int:
        """Return a descriptor for ``asyncio``, ``selectors`` and the like.

        It stays open until ``close``, or until a call is interrupted. It becomes readable when a
        worker has sent something or has ended, which need not mean a complete result. So call
        ``get(blocking=False)`` first, wait for the descriptor only after ``None``, then call again.
        Call again after a second at the latest, because failed workers are only restarted inside
        calls. Do not read from the descriptor. With ``n_workers=0`` it is always readable.

        Raises:
            UsageError: If the batcher is closed.

        Example:
            >>> import selectors
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.execute(2)
            >>> with selectors.DefaultSelector() as selector:
            ...     key = selector.register(batcher, selectors.EVENT_READ)
            ...     while (trajectories := batcher.get(blocking=False)) is None:
            ...         events = selector.select(timeout=1.0)
            >>> len(trajectories)
            2
        """
        return self._not_closed().crew.fileno()

    def __repr__(self) -> str:
        name = type(self).__name__
        if self.closed or self._dispatcher is None:
            return f"{name}(closed)"
        n_workers = 0 if self._is_private else self._n_workers
        failed = self._dispatcher.crew.fatal is not None and not self.is_interrupted
        state = "failed" if failed else "open"
        n_lanes, n_pending = self.n_lanes, self.n_pending
        return f"{name}(n_workers={n_workers}, n_lanes={n_lanes}, n_pending={n_pending}, {state})"

    @property
    @crash_only
    def progress(self) -> tuple[int, int]:
        """Finished and requested rows of the oldest pending request.

        Rows are episodes, or lanes for a ``Batcher``; a lane counts once its worker has finished
        the window. The call reads the workers' reports and returns at once; with ``n_workers=0``
        it runs the whole request, like ``get``.

        Raises:
            RlpoolError: If that request failed, or a worker died or hung for good; ``get`` raises
                the same error.
        """
        dispatcher = self._open()
        if dispatcher.pending:
            dispatcher.crew.look()
        if (failure := dispatcher.failure) is not None:
            raise failure
        return dispatcher.finished()

    @overload
    def get(
        self,
        blocking: Literal[True] = True,
        *,
        timeout: float | None = None,
        progress: ShowProgress | None = None,
    ) -> TemporalDictTensor: ...

    @overload
    def get(
        self,
        blocking: bool,
        *,
        timeout: float | None = None,
        progress: ShowProgress | None = None,
    ) -> TemporalDictTensor | None: ...

    @crash_only
    def get(
        self,
        blocking: bool = True,
        *,
        timeout: float | None = None,
        progress: ShowProgress | None = None,
    ) -> TemporalDictTensor | None:
        """Return the result of the oldest request: its episodes, or the window of a ``Batcher``.

        Args:
            blocking: Wait for the result; otherwise return ``None`` until it is complete. With
                ``n_workers=0`` environments run only inside calls, so ``get`` always waits.
            timeout: Maximum wait in seconds; ``None`` for no limit. The request continues, and a
                later ``get`` returns its result. Ignored with ``n_workers=0``.
            progress: ``True`` shows a tqdm bar while this call waits. A function is called instead
                as ``progress(done, asked)`` at the beginning, a few times a second and at the end;
                it must not call the batcher. The default is the batcher's own ``progress``.
                A ``Batcher`` counts lanes, once their worker has finished the window.

        Returns:
            Tensors ``[n_rows, T, ...]`` with one row per episode (of a ``Batcher``, per lane that
            ran), where T is the length of the longest row; zero past each row's length. Keys: the
            environment's keys, ``reward``, ``terminated``, ``truncated``, ``done``,
            ``initial_state``, ``last_action``, the agent's outputs and state, and, prefixed with
            ``_``, the environment's keys and the agent's state after the step (computed on first
            access). ``info`` has one value per row: ``episode``, ``seed``, ``policy_version``,
            ``agent_info/...`` and ``env_info/...``, for a ``Batcher`` also ``batcher``, ``lane``
            and ``first_step``. The tensors are views of memory that is reused once you drop the
            last of them.

            Window lengths are 1 to ``n_timesteps`` (from 0 where lanes cannot be reset one by one,
            since the steps in which they restart are left out). A ``Batcher`` returns ``None``
            once, when all lanes have stopped (see ``all_stopped``).

        Raises:
            UsageError: If nothing is pending, for example after an interrupted call; if the batcher
                is closed; if a ``Batcher`` has already returned ``None``; or for ``progress=True``
                without tqdm.
            TimeoutError: If the result is not complete after ``timeout``: a ``ResultTimeoutError``.
            EnvError, AgentError: If the user's code failed. The request is lost, but the batcher
                still works; a ``Batcher`` needs a ``reset`` first.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hung.
            Exception: Any error of a ``progress`` function. It interrupts the call, which drops
                the requests in flight.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.execute(2, env_info={"length": [2, 3]})
            >>> trajectories = batcher.get()
            >>> trajectories["_reward"]
            tensor([[1., 2., 0.],
                    [1., 2., 3.]])
            >>> trajectories["frame"].shape, trajectories.lengths
            (torch.Size([2, 3, 1]), tensor([2, 3]))
        """
        dispatcher = self._open()
        if blocking is not True:
            check_choice("blocking", blocking, (True, False))
        if timeout is not None:
            timeout = checked_timeout(timeout, "from 0 on, and finite")
        progress = self._progress if progress is None else checked_progress(progress)
        if dispatcher.is_closed:
            message = "nothing is pending: the last call was interrupted"
            raise UsageError(message, fix="call execute() (reset() of a Batcher) for new workers")
        if not dispatcher.pending:
            if self._has_stopped():
                return None
            dispatcher.crew.refuse_if_dead()
            raise UsageError("nothing is pending", fix="call execute() before get()")
        self._wait(dispatcher, blocking, timeout, progress)
        if not dispatcher.is_done():
            if not blocking:
                return None
            message = f"no result after {timeout:g} s"
            raise ResultTimeoutError(message, fix="call get() again: the request continues")
        return self._hand_out(dispatcher)

    def _has_stopped(self) -> bool:
        """Whether nothing will ever be pending again, which is not an error the first time."""
        return False

    def _wait(
        self, dispatcher: Dispatcher, blocking: bool, timeout: float | None, progress: ShowProgress
    ) -> None:
        """Wait until the oldest request is done."""
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        is_done, crew = dispatcher.is_done, dispatcher.crew
        if not blocking or timeout == 0.0:
            crew.look()
        if blocking and not progress:
            crew.wait_until(is_done, until_s)
        elif progress:
            with showing_progress(progress, dispatcher.finished) as show:
                dispatcher.show = show
                while blocking and not is_done() and time.monotonic() < until_s:
                    crew.wait_until(is_done, min(until_s, time.monotonic() + _SHOW_EVERY_S))
                    show()
            dispatcher.show = None

    def _hand_out(self, dispatcher: Dispatcher) -> TemporalDictTensor:
        """Return the result of the oldest request, which is done."""
        trajectories, failures = dispatcher.hand_out()
        self._failures = tuple(failures[row] for row in sorted(failures))
        return trajectories

    @crash_only
    def update(self, info: Any) -> None:
        """Send new parameters to every worker's ``agent.update``.

        The object is copied now, once for all workers, and takes effect with the next ``execute``:
        episodes already requested keep their policy, later ones use the new one. Each update must
        be complete, because an agent may get only the last of several in a row. If ``agent.update``
        raises, the ``get`` of the next ``execute`` raises that error, and so does every further one
        until an update succeeds.

        Args:
            info: Any object that cloudpickle can pickle, such as ``model.state_dict()``. Tensors
                arrive on the CPU without gradients.

        Raises:
            UsageError: If the batcher is closed.
            SpecError: If the object cannot be pickled, or there is no memory or descriptor for it.

        Example:
            >>> policy = torch.nn.Linear(4, 2)
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.update(policy.state_dict())
            >>> batcher.execute(2)
            >>> batcher.get().info["policy_version"]
            tensor([1, 1])
        """
        self._open()
        version, packed_info = self._policy.version + 1, packed(info, self._is_private)
        self._policy = Policy(version, packed_info)

    @crash_only
    def state_dict(self) -> State:
        """Return the state from which a new batcher can continue, see ``load_state_dict``.

        Save it with the learner's own state::

            torch.save({"batcher": batcher.state_dict(), "policy": policy.state_dict()}, path)

        Returns:
            ``root`` of all seeds, ``next_episode``, and ``policy_version``. While requests are
            pending, ``next_episode`` is the first episode that was not returned: requests in flight
            are collected again after loading, with the policy loaded then.

        Raises:
            UsageError: If the batcher is closed.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0, seeds=3)
            >>> batcher.execute(2)
            >>> trajectories = batcher.get()
            >>> torch.save(batcher.state_dict(), "batcher.pt")
            >>> torch.load("batcher.pt")["next_episode"]
            2
        """
        numbers = {"next_episode": self._first_pending(self._open())}
        return {"root": self._root, **numbers, "policy_version": self._policy.version}

    @crash_only
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the ``state_dict`` of another batcher.

        The next request of an ``EpisodeBatcher`` returns the same bits as the other batcher's next
        request would have, given the same arguments and no pending requests. A ``Batcher`` begins
        new episodes: call ``reset``. The seeds of the state replace this batcher's.

        The state does not include the agents' parameters: call ``update`` before the next request.
        Nor does it include what environments and wrappers keep across episodes, such as the
        statistics of ``NormalizeObservation``.

        Args:
            state: The return value of ``state_dict``, saved and loaded or not.

        Raises:
            SpecError: If it is anything else; nothing has changed then.
            UsageError: If results are pending here, or the batcher is closed.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> other = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> other.load_state_dict(batcher.state_dict())
            >>> for each in (batcher, other):
            ...     each.execute(2)
            >>> torch.equal(batcher.get()["action"], other.get()["action"])
            True
        """
        self._refuse_pending("load_state_dict()")
        state = checked_state(state)
        # Workers distinguish policies by version: a version must not return with other parameters.
        version = max(self._policy.version, state["policy_version"])
        self._policy = self._policy._replace(version=version)
        self._root = state["root"]
        self._go_to(state["next_episode"])

    def _refuse_pending(self, call: str) -> None:
        if n_pending := len(self._open().pending):
            message = f"{call} while {n_pending} results are pending"
            raise UsageError(message, fix="take them with get() first")

    def _first_pending(self, dispatcher: Dispatcher) -> int:
        """Return the number of the first episode that was not returned yet."""
        raise NotImplementedError

    def _go_to(self, number: int) -> None:
        """Make this the number of the next episode."""
        raise NotImplementedError

    @property
    def failures(self) -> tuple[WorkerError, ...]:
        """Errors of the truncated episodes in the last result of ``get``, in order of rows.

        ``where.row`` of an error is its row (of a ``Batcher``, its lane). Unless ``on_env_error``
        is ``"raise"``, ``info["failed"]`` of the result marks the rows with truncated episodes.
        """
        self._not_closed()
        return self._failures

    def stats(self) -> Stats:
        """Read the activity of the workers from shared memory, without waiting.

        ``python -m rlpool top`` shows the same numbers from outside the program.

        Returns:
            Numbers per worker and lane; rates and shares cover the time since the previous call,
            see ``WorkerStats``. With ``n_workers=0`` this process is worker 0, and its time outside
            of rlpool counts as waiting.

        Raises:
            UsageError: If the batcher is closed, or its workers belong to a cluster.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.execute(n_episodes=6)
            >>> trajectories = batcher.get()
            >>> worker = batcher.stats().workers[0]
            >>> worker.state, worker.n_episodes, worker.n_steps
            ('alive', 6, 24)
            >>> 0 < worker.env_share < 1
            True
        """
        return replace(self._not_closed().read_stats(), name=type(self).__name__)

    def close(self) -> None:
        """End the workers, whatever they are doing, within a few seconds. Can be repeated.

        Results already returned stay valid.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.close()  # a "with" statement does that, too
            >>> batcher.closed
            True
        """
        self._is_closed = True
        if self._dispatcher is None or os.getpid() != self._owner_pid:
            return  # in a forked copy, workers, pipes and blocks belong to the original process
        self._dispatcher.close()
        if self._recipe is not None:  # Ray's nodes have recipes of their own
            self._recipe.close()
        if self._policy.packed is not None:
            self._policy.packed.memory.close_fd()

    def _has_processes(self) -> bool:
        return self._dispatcher is not None

    def _begin(self) -> Dispatcher:
        """Start workers: the first ones, or new ones after an interruption."""
        dispatcher = self._start_workers(root=self._root)
        dispatcher.crew.control.name = type(self).__name__
        self._dispatcher = dispatcher
        self.is_interrupted = False
        return dispatcher

    def _abandon(self) -> None:
        if self._dispatcher is not None and not self._is_private:
            self._dispatcher.close(at_once=True)

    def _open(self) -> Dispatcher:
        """First step of every call: after an interrupted one, end the workers."""
        dispatcher = self._not_closed()
        if self.is_interrupted and not dispatcher.is_closed:
            dispatcher.close(at_once=True)
        return dispatcher

    def _ready(self) -> Dispatcher:
        """Like ``_open``, but start new workers if the last call was interrupted."""
        dispatcher = self._open()
        return self._begin() if self.is_interrupted else dispatcher

    def _not_closed(self) -> Dispatcher:
        if self._dispatcher is None or self._is_closed:
            fix = "make a new one, or close it later"
            raise BatcherClosedError("the batcher is closed", fix=fix)
        if not self._is_private and os.getpid() != self._owner_pid:
            refuse_forked_copy(self._owner_pid)
        return self._dispatcher
