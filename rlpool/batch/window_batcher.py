"""Batcher of windows: the next steps of every lane as named tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlpool.batch.batcher_base import BatcherBase, CreateAgent, CreateEnv, Seeds
from rlpool.batch.claims import check_rows
from rlpool.batch.progress import ShowProgress
from rlpool.batch.repeated_calls import is_repeated, once
from rlpool.batch.request_queue import RequestQueue
from rlpool.batch.requests import Asked, Policy, Request, WindowRequest
from rlpool.batch.resuming import (
    State,
    infos_of_state,
    refuse_other_agents,
    state_of_infos,
    state_of_tapes,
    tapes_of_state,
    why_lost,
)
from rlpool.data.infos import Info, Infos, as_infos
from rlpool.errors import RlpoolError, UsageError
from rlpool.machine.arguments import also_takes
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.record.tape import Tape, WindowTapes
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.workers.failure_policy import (
    DEFAULT_TIMEOUT_S,
    BatcherOptions,
    FailurePolicy,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Batcher(BatcherBase):
    """Collects windows: the next ``n_timesteps`` steps of every lane, in lane order.

    A lane is one environment of one worker; lanes of worker 0 come first. With environments that
    restart on their own (``GymEnvInf``) lanes never end.

    Args:
        n_timesteps: Steps per window.
        n_slots: Ignored; accepted because ``EpisodeBatcher`` takes it.
        create_agent: As for ``EpisodeBatcher``.
        agent_args: As for ``EpisodeBatcher``.
        create_env: As for ``EpisodeBatcher``.
        env_args: As for ``EpisodeBatcher``.
        n_workers: As for ``EpisodeBatcher``.
        seeds: As for ``EpisodeBatcher``, but lanes that restart on their own share no seed for
            2**30 steps of all lanes together, resets included.
        timeout: As for ``EpisodeBatcher``.
        agent_rows: As for ``EpisodeBatcher``.
        **policy: As for ``EpisodeBatcher``. The successor of a worker restores every running
            episode by repeating its recorded actions; if that does not lead to the same
            observation, ``get`` raises ``EnvError``. If the agent requires a history, the failure
            is reported, and ``reset`` goes on with new workers.

    Example:
        >>> def create_endless_env(seed):
        ...     return GymEnvInf([CountingEnv(length=4) for _ in range(2)], seed)
        >>> batcher = Batcher(6, None, create_agent, {}, create_endless_env, n_workers=0)
        >>> batcher.reset()
        >>> for _ in range(2):
        ...     batcher.execute()
        ...     print(batcher.get()["_reward"][0])
        tensor([1., 2., 3., 4., 1., 2.])
        tensor([3., 4., 1., 2., 3., 4.])
    """

    _NAME = "Batcher"
    _WINDOWS = WindowRequest

    _n_resets = _n_windows = 0
    _n_windows_before = 0  # those before the last reset
    _infos: Infos = ({}, {})
    _running: Sequence[int] = ()
    _tapes: WindowTapes | None = None  # if the caller records, and after load_state_dict()
    _is_first = False
    _followed = 0  # number of the last request behind which a queued one was submitted
    _is_reset = False  # False again after an error, which ends all episodes
    # What windows run with that wait for the previous one.
    _queued: tuple[tuple[Policy, Infos], ...] = ()

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
        **policy: Unpack[BatcherOptions],
    ) -> None:
        factories = create_agent, agent_args, create_env, env_args
        failing = timeout, FailurePolicy(**policy)
        super().__init__(n_timesteps, n_slots, *factories, n_workers, seeds, *failing, agent_rows)

    @property
    def all_stopped(self) -> bool:
        """Whether every lane has ended, so that ``get`` returns ``None``."""
        return self._has_stopped(self._not_closed())

    def _n_pending(self, dispatcher: RequestQueue) -> int:
        return len(dispatcher.pending) and len(dispatcher.pending) + len(self._queued)

    def _has_stopped(self, dispatcher: RequestQueue) -> bool:
        return self._is_reset and not self._running and not dispatcher.pending

    @once
    def reset(self, agent_info: Info = None, env_info: Info = None) -> None:
        """Restart every lane with the next window; pending windows are dropped.

        Args:
            agent_info: ``[n_lanes, ...]`` or empty, as for ``EpisodeBatcher.execute``.
            env_info: Likewise; its rows are passed to the environments at every reset.

        Raises:
            SpecError: If an info holds anything but numbers, or has another number of rows; or if
                rows of ``env_info`` differ for environments that can only be reset together, see
                ``VectorGymEnv``. Nothing has changed then.

        Example:
            >>> def create_endless_env(seed):
            ...     return GymEnvInf([CountingEnv(length=4) for _ in range(2)], seed)
            >>> batcher = Batcher(6, None, create_agent, {}, create_endless_env, n_workers=0)
            >>> batcher.reset(env_info={"length": [2, 4]})
            >>> batcher.execute()
            >>> batcher.get()["_done"]
            tensor([[False,  True, False,  True, False,  True],
                    [False, False, False,  True, False, False]])
        """
        dispatcher = self._open()
        infos = as_infos(agent_info, env_info, self.n_lanes)
        check_rows(dispatcher.step, infos[1])
        if is_repeated(self._unconfirmed, "reset", infos):
            return
        tapes = WindowTapes(self.n_lanes) if dispatcher.records else None
        with InterruptsHeld():
            dispatcher.drop_pending()
            self._infos, self._tapes = infos, tapes
            self._is_first = self._is_reset = True
            self._n_resets += 1
            self._n_windows_before = self._n_windows
            self._queued = ()
            self._running = list(range(self.n_lanes))
            self._unconfirmed = "reset", infos

    @once
    def execute(self, agent_info: Info = None, env_info: Info = None) -> None:
        """Request the next window; returns at once.

        Args:
            agent_info: ``[n_lanes, ...]``, as for ``reset``: what the agent gets from this window
                on, in the episodes that are running, too. It replaces all that was given before,
                and may have other keys; an empty dict for none. ``None`` leaves it as it is.
            env_info: Likewise: what environments are reset with whose episodes begin in this window
                or later, for a curriculum, say. Those that are running go on undisturbed. The
                rows of ``info["env_info/..."]`` are those in force during the window.

        Raises:
            SpecError: As for ``reset``. Nothing has changed then, and running episodes go on.
            UsageError: Before ``reset``, and after an error.

        Example:
            >>> def create_endless_env(seed):
            ...     return GymEnvInf([CountingEnv(length=4) for _ in range(2)], seed)
            >>> batcher = Batcher(6, None, create_agent, {}, create_endless_env, n_workers=0)
            >>> batcher.reset()
            >>> batcher.execute()
            >>> batcher.execute()  # windows queue up: learn from one while the next is collected
            >>> batcher.get().n_timesteps(), batcher.get().n_timesteps()
            (6, 6)
        """
        dispatcher = self._open()
        if not self._is_reset:
            raise UsageError("the lanes have no episodes to go on with", fix="call reset() first")
        given = as_infos(agent_info, env_info, self.n_lanes)
        old_agent_info, old_env_info = self._infos
        infos = (
            old_agent_info if agent_info is None else given[0],
            old_env_info if env_info is None else given[1],
        )
        check_rows(dispatcher.step, infos[1])
        if is_repeated(self._unconfirmed, dispatcher.policy.version, infos):
            return
        with InterruptsHeld():
            self._infos = infos
            self._unconfirmed = dispatcher.policy.version, infos
            self._n_windows += 1
            if dispatcher.pending:
                # Which lanes run is known once the previous window is there; what they run with is
                # fixed now.
                self._queued += ((dispatcher.policy, infos),)
            elif self._running:
                self._submit(dispatcher, dispatcher.policy, infos)

    def _next_result(
        self,
        dispatcher: RequestQueue,
        blocking: bool,
        timeout: float | None,
        progress: ShowProgress | None,
    ) -> Request | None:
        """The oldest window, behind which the next one is sent; see ``get``."""
        if self._has_stopped(dispatcher):
            return None
        try:
            request = super()._next_result(dispatcher, blocking, timeout, progress)
        except UsageError:
            raise
        except RlpoolError:
            if not dispatcher.pending or dispatcher.pending[0].error is None:
                raise
            with InterruptsHeld():
                dispatcher.drop_pending(first=1)
                self._is_reset = False
                self._queued = ()
            raise
        if isinstance(request, WindowRequest) and request.number != self._followed:
            self._running = request.lanes_left
            if self._queued and self._running:
                with InterruptsHeld():
                    self._followed = request.number
                    (policy, infos), *queued = self._queued
                    self._queued = tuple(queued)
                    self._submit(dispatcher, policy, infos)
        return request

    def _submit(self, dispatcher: RequestQueue, policy: Policy, infos: Infos) -> None:
        dispatcher.submit(
            self._WINDOWS(
                number=dispatcher.next_number(),
                n_rows=len(self._running),
                lanes=list(self._running),
                infos=infos,
                policy=policy,
                n_lanes=dispatcher.n_lanes,
                n_resets=self._n_resets - 1,
                n_windows=self._n_windows_before,
                is_first=self._is_first,
                root=self._root,
                tapes=self._tapes,
                start=self._start(dispatcher),
            )
        )
        self._is_first = False
        if not dispatcher.records:
            self._tapes = None  # the worker in this process has them, and goes on with them

    def _start(self, dispatcher: RequestQueue) -> Callable[[], Mapping[int, Tape]]:
        """Makes the tapes of the lanes up to now."""
        return dispatcher.tapes if self._tapes is None else partial(dict, self._tapes.tapes)

    def _pending(self, dispatcher: RequestQueue) -> list[WindowRequest]:
        return [each for each in dispatcher.pending if isinstance(each, WindowRequest)]

    _COUNTERS = ("n_resets", "n_windows", "n_windows_before", "is_reset", "is_first")
    _KEYS = (*_COUNTERS, "agent_info", "env_info", "running", "tapes")

    def _state(self, dispatcher: RequestQueue) -> State:
        state: State = {name: getattr(self, f"_{name}") for name in self._COUNTERS}
        running, oldest = self._running, next(iter(self._pending(dispatcher)), None)
        if oldest is not None:  # it is as if it had not been sent
            running, state["is_first"], state["is_reset"] = oldest.lanes, oldest.is_first, True
        lanes = [] if state["is_first"] or not state["is_reset"] else list(running)
        tapes: Mapping[int, Tape] = {}
        if lanes:
            tapes = (self._start(dispatcher) if oldest is None else oldest.start)()
        why = why_lost(dispatcher.step, tapes, lanes)
        return {
            **state,
            **self._expected(dispatcher),
            **state_of_infos(self._infos),
            "running": list(running),
            "tapes": [] if why else state_of_tapes({lane: tapes[lane] for lane in lanes}),
            "why_lost": why,
        }

    def _expected(self, dispatcher: RequestQueue) -> Mapping[str, Any]:
        lanes = {"n_lanes": self.n_lanes, "lanes of each worker": dispatcher.n_lanes}
        return {"n_timesteps": self._n_timesteps, **lanes}

    def _loaded(self, dispatcher: RequestQueue, state: State) -> dict[str, Any]:
        refuse_other_agents(dispatcher.step, state["tapes"])
        infos, tapes = infos_of_state(state), WindowTapes(self.n_lanes)
        tapes.tapes = tapes_of_state(state["tapes"], infos[1])
        rest = {"_infos": infos, "_running": list(state["running"]), "_tapes": tapes}
        return {**{f"_{name}": state[name] for name in self._COUNTERS}, **rest}

    def _asked(self, dispatcher: RequestQueue) -> Sequence[Asked]:
        asked = [Asked(each.policy, each.infos) for each in self._pending(dispatcher)]
        return [*asked, *itertools.starmap(Asked, self._queued)] if asked else ()

    def _repeat(self, dispatcher: RequestQueue, asked: Sequence[Asked]) -> None:
        if self._tapes is not None and self._tapes.tapes:
            dispatcher.resume()
        self._queued = tuple((each.policy, each.infos) for each in asked[1:])
        if asked:
            self._submit(dispatcher, asked[0].policy, asked[0].infos)

    @classmethod
    def layout(
        cls, n_timesteps: int, n_slots: int | None, n_workers: int, specs: StepSpecs
    ) -> Layout:
        """See ``BatcherBase.layout``."""
        n_lanes = specs.n_lanes * n_workers
        layout = Layout(specs, n_lanes, n_timesteps, n_workers, specs.auto_reset)
        return layout.checked(("n_timesteps",))
