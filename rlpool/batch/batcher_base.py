"""What all batchers share: workers, seeds, updates, closing."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from threading import get_ident
from typing import Any, Literal, overload

from rlpool.agents.agent import Agent, refuse_no_factory
from rlpool.batch.claims import warn_if_unseeded
from rlpool.batch.dispatch import Dispatcher
from rlpool.batch.progress import Meter, ShowProgress, checked_progress
from rlpool.batch.repeated_calls import once
from rlpool.batch.request_queue import RequestQueue
from rlpool.batch.requests import Asked, Request
from rlpool.batch.resuming import (
    FORMAT,
    State,
    checked_state,
    pending_of_state,
    state_of_pending,
)
from rlpool.data.infos import Infos
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import VecEnv
from rlpool.errors import BatcherClosedError, RlpoolError, SpecError, UsageError, WorkerError
from rlpool.machine.arguments import (
    check_choice,
    checked_timeout,
    checked_wait,
    keywords,
    whole_number,
)
from rlpool.machine.imports import refuse_during_import
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.limits import WORKER_DESCRIPTORS, check_workers
from rlpool.machine.one_thread import OneThread
from rlpool.machine.pickling import why_not
from rlpool.observe.stats import Stats
from rlpool.seeding import root_from
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.workers.failure_policy import FailurePolicy
from rlpool.workers.process_owner import ProcessOwner, refuse_forked_copy
from rlpool.workers.process_start import memory_of
from rlpool.workers.sharing import pickled

_LOG = logging.getLogger("rlpool")

CreateEnv = Callable[..., VecEnv]
CreateAgent = Callable[..., Agent]
Seeds = int | Sequence[int] | None


class BatcherBase(ProcessOwner):
    """The owner of a batcher's workers, who updates and closes them."""

    _dispatcher: RequestQueue | None = None
    _unconfirmed: tuple[Any, Infos] | None = None  # see ``once``
    _progress: ShowProgress = False

    _HOW_TO_PICKLE = (
        "create it inside create_env or create_agent, which run in the worker, or leave it out in "
        "the __getstate__ of what holds it"
    )

    _ONE_SEED_PER_WORKER = True
    """Whether a list of ``seeds`` is as long as there are workers."""

    _NAME: str
    """What advice and states call the class; advice may name the function whose batcher it is."""

    def __init__(
        self,
        n_timesteps: int,
        n_slots: int | None,
        create_agent: CreateAgent | None,
        agent_args: Mapping[str, Any] | None,
        create_env: CreateEnv | None,
        env_args: Mapping[str, Any] | None,
        n_workers: int,
        seeds: Seeds,
        timeout: float | None,
        policy: FailurePolicy,
        agent_rows: int | None = None,
    ) -> None:
        refuse_during_import()
        n_timesteps = whole_number("n_timesteps", n_timesteps, 1)
        fix = 'rlpool.worker_count("auto") says how many this machine has room for'
        n_workers = whole_number("n_workers", n_workers, 0, fix=fix)
        if n_slots is not None:
            n_slots = whole_number("n_slots", n_slots, 1)
        if agent_rows is not None:
            agent_rows = whole_number("agent_rows", agent_rows, 1)
        timeout = checked_timeout(timeout)
        for name, function in (("create_agent", create_agent), ("create_env", create_env)):
            refuse_no_factory(name, function)
        n_seeds = n_workers if self._ONE_SEED_PER_WORKER else 0
        self._root = root_from(checked_batcher_seeds(seeds, n_seeds))
        if seeds is None:
            _LOG.info("drew the root seed %d", self._root)
        self._n_workers = max(1, n_workers)
        self._n_timesteps = n_timesteps
        self._is_private = n_workers == 0
        self._owner_pid = os.getpid()
        self._one_thread = OneThread("_open")
        env_args, agent_args = keywords("env_args", env_args), keywords("agent_args", agent_args)
        given = (create_env, env_args, create_agent, agent_args)
        functions: Any = (*given, agent_rows)
        if n_workers:
            names = ("create_env", "env_args", "create_agent", "agent_args")
            parts = dict(zip(names, given, strict=True))
            how = {"fix": self._HOW_TO_PICKLE}
            functions = pickled(parts, functions, **how)
        failing = policy, timeout if n_workers else None
        self._dispatcher = self._started(functions, n_timesteps, n_slots, n_workers, *failing)
        if self._dispatcher.control is not None:
            self._dispatcher.control.name = type(self).__name__

    def _started(
        self,
        functions: Any,
        n_timesteps: int,
        n_slots: int | None,
        n_workers: int,
        policy: FailurePolicy,
        timeout_s: float | None,
    ) -> RequestQueue:
        """Start the workers.

        Args:
            functions: ``(create_env, env_args, create_agent, agent_args, agent_rows)``, a
                ``Parcel`` if there are worker processes.
            n_timesteps: Steps per slot.
            n_slots: Slots in flight.
            n_workers: Number of worker processes.
            policy: What happens when workers fail.
            timeout_s: Seconds without progress after which a worker counts as hanging.
        """
        if n_workers:
            memory = memory_of(policy.start_method)
            check_workers(n_workers, WORKER_DESCRIPTORS, "lower n_workers", memory)
        return Dispatcher(
            n_workers,
            self._root,
            functions,
            # Not a method of this object: a batcher that is dropped, as when a notebook's cell is
            # run again, ends its workers at once only if nothing refers back to it.
            make_layout=partial(self._first_layout, n_timesteps, n_slots, self._n_workers),
            policy=policy,
            timeout_s=timeout_s,
            owner_name=self._NAME,
        )

    @classmethod
    def _first_layout(
        cls, n_timesteps: int, n_slots: int | None, n_workers: int, specs: StepSpecs
    ) -> Layout:
        """``layout``, in the caller's process, where it is known at last how to seed lanes."""
        layout = cls.layout(n_timesteps, n_slots, n_workers, specs)
        warn_if_unseeded(specs)
        return layout

    @classmethod
    def layout(
        cls, n_timesteps: int, n_slots: int | None, n_workers: int, specs: StepSpecs
    ) -> Layout:
        """The layout of blocks, which fit into memory."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._dispatcher is None or self._dispatcher.is_closed

    @property
    def n_lanes(self) -> int:
        """Lanes of all workers: environments that run at the same time."""
        return self._not_closed().n_lanes * self._n_workers

    @property
    def policy_version(self) -> int:
        """How many updates there were: what ``info["policy_version"]`` of new requests will say.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.update({})
            >>> batcher.policy_version
            1
        """
        return self._not_closed().policy.version

    @property
    def n_pending(self) -> int:
        """Requests whose results were not taken with ``get``."""
        return self._n_pending(self._not_closed())

    def _n_pending(self, dispatcher: RequestQueue) -> int:
        return len(dispatcher.pending)

    @property
    def patience_s(self) -> float:
        """How many seconds a program that waits for ``fileno`` may let pass between two calls."""
        return self._not_closed().patience_s

    def has_outcome(self) -> bool:
        """Whether ``get`` would return a result, or raise an error, without waiting for workers.

        With ``n_workers=0`` that is so if anything is pending: ``get`` runs it then.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.execute(2)
            >>> batcher.has_outcome()
            True
        """
        return self._open().has_outcome()

    def fileno(self) -> int:
        """A descriptor for ``asyncio``, ``selectors`` and the like, open until ``close``.

        It can be read when a worker or a node has sent something or has ended, which need not be a
        whole result. So ask with ``get(blocking=False)`` first, wait for the descriptor only after
        ``None``, and ask again when it can be read; also after a second without, because workers
        that failed are started again inside of calls. Do not read from it. With ``n_workers=0``
        it can always be read. docs/asynchronous.md has a program.

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
        return self._not_closed().fileno()

    def __repr__(self) -> str:
        name = type(self).__name__
        if self.closed or self._dispatcher is None:
            return f"{name}(closed)"
        n_workers = 0 if self._is_private else self._n_workers
        dispatcher = self._dispatcher
        state = "failed" if dispatcher.fatal is not None else "open"
        n_lanes, n_pending = dispatcher.n_lanes * self._n_workers, self._n_pending(dispatcher)
        return f"{name}(n_workers={n_workers}, n_lanes={n_lanes}, n_pending={n_pending}, {state})"

    @cached_property
    def _meter(self) -> Meter:
        return Meter()

    @property
    def progress(self) -> tuple[int, int]:
        """Rows finished and requested, of the oldest request that was not handed out.

        Rows are episodes; of a ``Batcher`` they are lanes, which count once their worker is done
        with the window. Looks at what workers have reported, and returns at once. With
        ``n_workers=0`` there is nobody else to run the request: as in ``get``, all of it runs
        here, unless the function that shows progress asks.

        Raises:
            RlpoolError: If that request failed, or a worker died or hangs for good; ``get`` raises
                the same.
        """
        return self._open().finished_episodes()

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

    @once
    def get(
        self,
        blocking: bool = True,
        *,
        timeout: float | None = None,
        progress: ShowProgress | None = None,
    ) -> TemporalDictTensor | None:
        """Take the result of the oldest request: its episodes, or of a ``Batcher`` the window.

        Args:
            blocking: Wait for it; otherwise return ``None`` until all of it is there. With
                ``n_workers=0`` nothing runs but in calls like this one, so it waits in any case.
            timeout: Seconds to wait at most; ``None`` for no limit. The request goes on, and
                another ``get`` returns its result. It is ignored with ``n_workers=0``.
            progress: ``True`` shows a bar of episodes, with steps per second, until all of it is
                there: one of tqdm if that is installed, otherwise a line on stderr. A function is
                called instead with a ``Progress``, at the beginning, a few times a second and at
                the end; with ``n_workers=0`` only when an episode has ended or filled a slot. It
                may look at the batcher's ``progress``, but not call ``get``. By default, what an
                ``EpisodeBatcher``'s own argument ``progress`` says. A ``Batcher`` counts lanes in
                place of episodes, once their worker is done with the window.

        Returns:
            Tensors ``[n_rows, T, ...]``, a row per episode, or per lane that ran, T being the
            length of the longest row, zero past each row's length: the environments' keys,
            ``reward``, ``terminated``, ``truncated``, ``done``, ``initial_state``,
            ``last_action``, the agent's outputs and state, and with a leading ``_`` the
            environment's keys and the state after the step (computed on first access). ``info``
            has per row ``episode``, ``seed``, ``policy_version``, ``agent_info/...`` and
            ``env_info/...``. They are views of memory that is yours until you drop the last of
            them, and is reused afterwards.

            Lengths of windows are from 1 to ``n_timesteps`` (from 0 where lanes cannot be reset one
            by one: the steps in which they restart are missing). A ``Batcher`` returns ``None``
            once all lanes have stopped (see ``all_stopped``).

        Raises:
            UsageError: If nothing is pending, the batcher is closed, or a ``stream`` is open.
            TimeoutError: If the result is not there after ``timeout``: a ``ResultTimeoutError``.
            EnvError, AgentError: If the user's code failed. The request is lost, the batcher
                still works; a ``Batcher`` needs a ``reset`` to go on.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
            Exception: What a function given as ``progress`` raises. ``get`` can be called again:
                episodes of workers go on meanwhile; with ``n_workers=0`` those that were running
                begin again then.

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
        self._refuse_get()
        request = self._next_result(dispatcher, blocking, timeout, progress)
        return None if request is None else request.trajectories

    def _refuse_get(self) -> None:
        """Refuse results that somebody else is waiting for."""

    def _next_result(
        self,
        dispatcher: RequestQueue,
        blocking: bool,
        timeout: float | None,
        progress: ShowProgress | None,
    ) -> Request | None:
        """The oldest request, finished; see ``get``."""
        check_choice("blocking", blocking, (True, False))
        timeout = checked_wait(timeout)
        progress = self._progress if progress is None else checked_progress(progress)
        with self._meter.shown(progress, dispatcher.so_far) as look:
            return dispatcher.wait(blocking=blocking, look=look, timeout_s=timeout)

    def update(self, info: Any) -> None:
        """Hand new parameters to every worker's ``agent.update``.

        The object is copied now, once for all workers, and takes effect with the next
        ``execute``: episodes that were requested before keep their policy, and all that is
        requested later runs with the new one. Each update has to be complete: of several in a row
        an agent may get only the last. What ``agent.update`` raises surfaces in the ``get`` of the
        next ``execute``, and of every further one until an update succeeds.

        Args:
            info: Any object that cloudpickle can pickle, such as ``model.state_dict()``. Tensors
                arrive on the CPU, without gradients.

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
        dispatcher = self._open()
        try:
            policy = dispatcher.updated(info)
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            fix = "send only what the agents need, such as model.state_dict()"
            raise SpecError(why_not({"info": info}, error), fix=fix) from error
        dispatcher.policy = policy  # the last act: an update that was interrupted may be repeated

    def state_dict(self) -> State:
        """What a new batcher needs to go on from here, see ``load_state_dict``.

        It holds counters, the root of all seeds, infos, and for a ``Batcher`` what the lanes have
        done in the episodes that are running: their actions and rewards, the last observations and
        the agent's states. It may be called at any time, such as after Ctrl-C, which may have
        interrupted any call::

            try:
                train(batcher)
            finally:
                torch.save(batcher.state_dict(), "batcher.pt")

        Requests are pending until ``get`` has returned their results. A state has no results: it
        holds what these requests were made with, their policies included, and the last update.

        Returns:
            Dicts, lists, tensors, numbers and strings, all of them copies: ``torch.save`` it, with
            the learner's own state. ``torch.load`` reads it with ``weights_only=True``; if
            something is pending, only if what ``update`` was given is made of the same.

        Raises:
            UsageError: If the batcher is closed.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.execute(2)
            >>> trajectories = batcher.get()
            >>> torch.save(batcher.state_dict(), "batcher.pt")
            >>> torch.load("batcher.pt")["n_episodes"]
            2
        """
        dispatcher = self._open()
        whose = {"kind": self._NAME, "format": FORMAT, "root": f"{self._root:x}"}
        pending = state_of_pending(self._asked(dispatcher), dispatcher.policy)
        state = {**whose, **self._state(dispatcher), **pending}
        if state["why_lost"]:
            _LOG.warning("this state cannot be resumed: %s", state["why_lost"])
        return {**state, "policy_version": dispatcher.policy.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another batcher was when its ``state_dict`` was called.

        If this batcher was made with the same arguments, its results are bit by bit those that the
        other one would have gone on with, also if one has worker processes and the other none, with
        the same number of environments per worker. The seeds of the state replace this batcher's.
        A ``Batcher`` resets its environments with the next window and repeats the actions of
        the episodes that were running; if they do not lead to the same observation, ``get``
        raises ``EnvError``.

        Requests that were pending are made again, in the same order, and ``get`` returns the same
        results: look at ``n_pending`` to see whether there are any. Their agents, and those of
        further requests, have the parameters that they had then.

        Three things are not part of a state. The parameters of the agents, where no request was
        pending: call ``update`` before or after. What environments and their wrappers keep from one
        episode to the next, such as the statistics of ``NormalizeObservation``. The generators of
        worker processes, which environments and agents draw from that do not use the seeds and the
        noise they are given.

        Args:
            state: What ``state_dict`` returned, saved and loaded or not.

        Raises:
            SpecError: If it is of another kind of batcher or of another format, or lacks something
                or is damaged; for a ``Batcher`` also of one with other lanes, another
                ``n_timesteps`` or an agent with other states or actions. If its episodes cannot be
                repeated: the agent requires a history, environments cannot be reset one by one or
                not be seeded, or episodes were so long that their first actions were dropped. If
                it has pending requests, and this batcher was updated before. Nothing has changed
                then.
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
        dispatcher = self._open()
        if n_pending := self._n_pending(dispatcher):
            what = f"load_state_dict() while {n_pending} results are pending"
            raise UsageError(what, fix="take them with get() first")
        keys = ("root", "policy_version", "why_lost", *self._KEYS)
        checked = checked_state(state, self._NAME, keys, self._expected(dispatcher))
        if "pending" in checked and dispatcher.policy.packed is not None:
            what = "the state has pending requests, and the agents here were updated before"
            raise SpecError(what, fix="call load_state_dict() before update()")
        asked: Sequence[Asked] = ()
        try:
            # Workers tell policies apart by their versions: none may come back with other
            # parameters.
            version = max(dispatcher.policy.version, checked["policy_version"])
            policy = dispatcher.policy._replace(version=version)
            loaded = {**self._loaded(dispatcher, checked), "_root": int(checked["root"], 16)}
            if "pending" in checked:
                asked, policy = pending_of_state(checked, self._DETAILS, dispatcher.updated)
        except RlpoolError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"the state cannot be read: {type(error).__name__}: {error}"
            fix = f"pass what state_dict() of the same {self._NAME} returned, all of it"
            raise SpecError(what, fix=fix) from error
        with InterruptsHeld():
            vars(self).update(loaded, _unconfirmed=None)
            dispatcher.policy = policy
            self._repeat(dispatcher, asked)

    _KEYS: tuple[str, ...] = ()
    """What ``_state`` returns beside ``why_lost`` and what is expected to be the same."""

    def _state(self, dispatcher: RequestQueue) -> State:
        """What is particular to this kind of batcher, and ``why_lost``: why it cannot go on."""
        raise NotImplementedError

    def _expected(self, dispatcher: RequestQueue) -> Mapping[str, Any]:
        """What has to be the same where a state is loaded."""
        return {}

    _DETAILS: tuple[str, ...] = ()
    """The ``details`` of what ``_asked`` returns."""

    def _loaded(self, dispatcher: RequestQueue, state: State) -> dict[str, Any]:
        """What becomes of the attributes where a state is loaded, by name."""
        raise NotImplementedError

    def _asked(self, dispatcher: RequestQueue) -> Sequence[Asked]:
        """The requests that a state makes again, in order."""
        raise NotImplementedError

    def _repeat(self, dispatcher: RequestQueue, asked: Sequence[Asked]) -> None:
        """Make requests again that are counted already."""
        raise NotImplementedError

    @property
    def failures(self) -> tuple[WorkerError, ...]:
        """Why episodes were given up, of the result that ``get`` returned last, in order of rows.

        ``where.row`` of an error is the row (of a ``Batcher`` the lane). ``info["failed"]`` of the
        result says in which rows an episode was
        given up, if ``on_env_error`` is not ``"raise"``.
        """
        return self._open().failures

    def stats(self) -> Stats:
        """What the workers are doing, read from memory that they share: nobody waits for anybody.

        On a cluster, the nodes are asked; one that does not answer within four seconds is left out.

        ``python -m rlpool top`` shows the same numbers from outside the program.

        Returns:
            Numbers per worker and lane; rates and shares are those of the time since the previous
            call, see ``WorkerStats``. With ``n_workers=0`` this process is worker 0, and whatever
            it does outside of rlpool counts as waiting.

        Raises:
            UsageError: If the batcher is closed.

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
        """End the workers, whatever they are doing, within a few seconds. May be repeated.

        Results that were handed out stay valid.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.close()  # a "with" statement does that, too
            >>> batcher.closed
            True
        """
        if self._dispatcher is not None:
            self._dispatcher.close()
        if "_meter" in vars(self):
            self._meter.close()

    def _has_processes(self) -> bool:
        return self._dispatcher is not None

    def _give_up(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.give_up()

    def _open(self) -> RequestQueue:
        """What every call begins with that is for one thread at a time."""
        dispatcher = self._not_closed()
        if get_ident() != self._one_thread.thread:
            self._one_thread.hand_over()
        dispatcher.deliver_logs()
        return dispatcher

    def _not_closed(self) -> RequestQueue:
        if self._dispatcher is None or self._dispatcher.is_closed:
            fix = "make a new one, or close it later"
            raise BatcherClosedError("the batcher is closed", fix=fix)
        if not self._is_private:
            refuse_forked_copy(self._owner_pid)
        return self._dispatcher


def checked_batcher_seeds(seeds: Any, n_workers: int = 0) -> Seeds:
    """Seeds as an int, or a list of them that is as long as there are workers, if there are any."""
    if seeds is None:
        return None
    try:
        numbers = [whole_number("each of seeds", seed, 0) for seed in seeds]
    except TypeError:
        return whole_number("seeds", seeds, 0, fix="give one int, or one per worker")
    # In this process any list is fine: one from a run with workers gives the same data.
    if not numbers or (n_workers and len(numbers) != n_workers):
        raise SpecError(
            f"seeds has {len(numbers)} entries, n_workers is {n_workers}",
            fix="give one int, or one per worker",
        )
    return numbers
