"""Batcher of windows: the next steps of every lane as named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpool.batch.batcher_base import BatcherBase
from rlpool.batch.checks import CreateAgent, CreateEnv, Seeds
from rlpool.batch.dispatch import Dispatcher
from rlpool.batch.requests import Policy, Request, WindowRequest
from rlpool.data.infos import Info, Infos, as_infos
from rlpool.errors import RlpoolError, SpecError, UsageError
from rlpool.machine.arguments import also_takes
from rlpool.machine.calls import whole
from rlpool.record.tape import WindowTapes
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, BatcherOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Batcher(BatcherBase):
    """Collects windows: the next ``n_timesteps`` steps of every lane, in lane order.

    A lane is one environment of one worker; lanes of worker 0 come first. With environments that
    restart on their own (``GymEnvInf``) lanes never end.

    The ``info`` of a window says where each row begins: ``batcher`` (a number that follows from
    ``seeds``), ``lane``, ``episode`` (the number of the lane's episode) and ``first_step`` (the
    step's number in it). A ``Pool`` joins windows by them.

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

    _n_resets = _n_windows = 0
    _n_windows_before = 0  # those before the last reset
    _infos: Infos = ({}, {})
    _running: Sequence[int] = ()
    _tapes: WindowTapes | None = None  # if what lanes do may have to be repeated
    _is_first = False
    _is_reset = False  # False again after an error or an interrupt, which ends all episodes
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
        failing = timeout, policy
        super().__init__(n_timesteps, n_slots, *factories, n_workers, seeds, *failing, agent_rows)
        self._positions = np.zeros((2, self.n_lanes), np.int64)  # see WindowRequest

    @property
    def all_stopped(self) -> bool:
        """Whether every lane has ended, so that ``get`` returns ``None``."""
        return self._has_stopped(self._not_closed())

    def _n_pending(self, dispatcher: Dispatcher) -> int:
        return len(dispatcher.pending) and len(dispatcher.pending) + len(self._queued)

    def _has_stopped(self, dispatcher: Dispatcher) -> bool:
        has_ended = self._is_reset and not self._running and not dispatcher.pending
        return has_ended and not self.is_interrupted

    @whole
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
        dispatcher.check(infos, self.n_lanes)
        self._n_resets += 1
        self._n_windows_before = self._n_windows
        dispatcher = self._ready()
        dispatcher.drop_pending()
        self._infos, self._queued = infos, ()
        self._positions[0] += self._positions[1] > 0
        self._positions[1] = 0
        self._tapes = WindowTapes(self.n_lanes) if dispatcher.records else None
        self._running = list(range(self.n_lanes))
        self._is_first = self._is_reset = True
        self._has_said_stopped = False

    @whole
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
        if hasattr(agent_info, "__index__"):
            what = f"execute() got {agent_info!r:.40}, and a Batcher counts no episodes"
            fix = "call execute() for the next window of all lanes, or use an EpisodeBatcher"
            raise SpecError(what, fix=fix)
        if not self._is_reset or self.is_interrupted:
            raise UsageError("the lanes have no episodes to go on with", fix="call reset() first")
        given = as_infos(agent_info, env_info, self.n_lanes)
        old_agent_info, old_env_info = self._infos
        infos = (
            old_agent_info if agent_info is None else given[0],
            old_env_info if env_info is None else given[1],
        )
        dispatcher.check(infos, self.n_lanes)
        self._infos = infos
        self._n_windows += 1
        if dispatcher.pending:
            # Which lanes run is known once the previous window is there; what they run with is
            # fixed now.
            self._queued += ((self._policy, infos),)
        elif self._running:
            self._submit(dispatcher, self._policy, infos)

    def _hand_out(self, dispatcher: Dispatcher) -> Request:
        """The oldest window, behind which the next one is sent."""
        try:
            request = dispatcher.hand_out()
        except RlpoolError:
            self._is_reset, self._queued = False, ()
            raise
        if isinstance(request, WindowRequest):
            self._running = request.lanes_left
        if self._queued and self._running:
            (policy, infos), *queued = self._queued
            self._queued = tuple(queued)
            self._submit(dispatcher, policy, infos)
        return request

    def _submit(self, dispatcher: Dispatcher, policy: Policy, infos: Infos) -> None:
        is_first, self._is_first = self._is_first, False
        dispatcher.submit(
            WindowRequest(
                number=dispatcher.next_number(),
                n_rows=len(self._running),
                lanes=list(self._running),
                infos=infos,
                policy=policy,
                n_lanes=dispatcher.n_lanes,
                n_resets=self._n_resets - 1,
                n_windows=self._n_windows_before,
                is_first=is_first,
                positions=self._positions,
                root=self._root,
                tapes=self._tapes,
            )
        )

    def _first_pending(self, dispatcher: Dispatcher) -> int:
        # Beyond what any lane has begun, see ``lane_seeds``.
        return self._n_resets + self._n_windows * self._n_timesteps

    def _go_to(self, number: int) -> None:
        self._n_resets, self._n_windows, self._is_reset = number, 0, False
        self._positions[:] = [[number], [0]]

    @classmethod
    def layout(
        cls, n_timesteps: int, n_slots: int | None, n_workers: int, specs: StepSpecs
    ) -> Layout:
        """See ``BatcherBase.layout``."""
        n_lanes = specs.n_lanes * n_workers
        layout = Layout(specs, n_lanes, n_timesteps, n_workers, specs.auto_reset)
        return layout.checked(("n_timesteps",))
