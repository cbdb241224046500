"""Batcher of windows: the next steps of every lane as named tensors."""

from __future__ import annotations

import numpy as np

from rlpool.batch.batcher_base import BatcherBase
from rlpool.batch.dispatch import Dispatcher
from rlpool.batch.requests import RunningLanes, WindowRequest
from rlpool.data.infos import Info, Infos, as_infos
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import RlpoolError, SpecError, UsageError
from rlpool.machine.calls import crash_only
from rlpool.record.tape import WindowTapes
from rlpool.slots.blocks import Layout, StepSpecs


class Batcher(BatcherBase):
    """Collects windows: the next ``n_timesteps`` steps of every lane, in lane order.

    A lane is one environment of one worker; lanes of worker 0 come first. With environments that
    restart on their own (``GymEnvInf``) lanes never end.

    The ``info`` of a window reports where each row begins: ``batcher`` (a number derived from
    ``seeds``), ``lane``, ``episode`` (the lane's episode number) and ``first_step`` (the step
    number in that episode). A ``Pool`` uses them to join windows.

    Args:
        n_timesteps: Steps per window.
        n_slots: Ignored; accepted because ``EpisodeBatcher`` takes it.
        create_agent: Called as ``create_agent(**agent_args)`` in every worker; returns an
            ``Agent``, a module or another callable.
        agent_args: Keyword arguments of ``create_agent``.
        create_env: Called as ``create_env(seed=..., **env_args)`` in every worker, without ``seed``
            if it does not accept one; returns a ``GymEnvInf`` or another ``VecEnv``.
        env_args: Keyword arguments of ``create_env``.
        n_workers: Number of worker processes; 0 runs everything in this process while ``get``
            waits, with the same results.
        seeds: Also ``seed``. A non-negative int, or a list with one per worker; ``None`` draws one
            and logs it. Lanes that restart on their own neither share nor repeat a seed within
            2**30 steps of all lanes together, including resets.
        timeout: Seconds without a step of any environment after which a worker counts as hung;
            ``None`` for never.
        agent_rows: Call the agent with this many rows, so that results are the same for any number
            of environments per worker; by default one row per environment.
        progress: Default of ``get(progress=)``.
        **policy: Failure handling, with the names and defaults of ``EpisodeBatcher``:
            ``on_worker_failure``, ``max_restarts``, ``on_env_error``, ``max_episode_restarts``,
            ``max_episodes_per_worker``, ``start_method``. The successor of a worker restores every
            running episode by repeating its recorded actions; if that does not lead to the same
            observation, ``get`` raises ``EnvError``. If the agent needs a history, the failure is
            reported, and ``reset`` continues with new workers.

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
    _infos: Infos = ({}, {})
    _lanes: RunningLanes | None = None  # None also after an error, which ends all episodes
    _positions: NDArray = np.zeros((2, 1), np.int64)  # see RunningLanes
    _has_said_stopped = False  # whether ``get`` has returned None since the last reset

    @property
    def all_stopped(self) -> bool:
        """Whether every lane has ended; ``get`` then returns ``None``."""
        is_idle = not self._not_closed().pending and not self.is_interrupted
        return is_idle and self._lanes is not None and not self._lanes.running

    def _has_stopped(self) -> bool:
        if self.all_stopped and self._has_said_stopped:
            message = "all lanes have ended, and get() has returned None already"
            fix = "call reset(), or use environments that restart on their own (GymEnvInf)"
            raise UsageError(message, fix=fix)
        self._has_said_stopped = self.all_stopped
        return self.all_stopped

    @crash_only
    def reset(self, agent_info: Info = None, env_info: Info = None) -> None:
        """Restart every lane with the next window; pending windows are dropped.

        Args:
            agent_info: ``[n_lanes, ...]`` or empty, as for ``EpisodeBatcher.execute``.
            env_info: Likewise; its rows are passed to the environments at every reset.

        Raises:
            SpecError: If an info contains anything but numbers or has a wrong number of rows; or,
                for environments that can only be reset together (see ``VectorGymEnv``), if rows of
                ``env_info`` differ. Nothing has changed then.

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
        dispatcher = self._ready()
        dispatcher.drop_pending()
        n_lanes, (episodes, steps) = self.n_lanes, self._positions
        self._positions = np.zeros((2, n_lanes), np.int64)
        self._positions[0] = episodes + (steps > 0)
        self._infos = infos
        self._lanes = RunningLanes(
            root=self._root,
            n_resets=self._n_resets - 1,
            n_windows=self._n_windows,
            running=list(range(n_lanes)),
            positions=self._positions,
            tapes=WindowTapes(n_lanes) if self._repeats else None,
        )
        self._has_said_stopped = False

    @crash_only
    def execute(self, agent_info: Info = None, env_info: Info = None) -> None:
        """Request the next window and return at once.

        Args:
            agent_info: ``[n_lanes, ...]``, as for ``reset``; passed to the agent from this window
                on, also in running episodes. It replaces all earlier values and may have other
                keys; an empty dict passes none. ``None`` keeps the earlier values.
            env_info: Likewise, for the reset of episodes that begin in this window or later, for
                example for a curriculum. Running episodes are not affected. The rows of
                ``info["env_info/..."]`` are those in force during the window.

        Raises:
            SpecError: As for ``reset``. Nothing has changed then, and running episodes continue.
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
            message = f"execute() got {agent_info!r:.40}, but a Batcher does not count episodes"
            fix = "call execute() for the next window of all lanes, or use an EpisodeBatcher"
            raise SpecError(message, fix=fix)
        lanes = self._lanes
        if lanes is None or self.is_interrupted:
            raise UsageError("the lanes have no episodes to continue", fix="call reset() first")
        given = as_infos(agent_info, env_info, self.n_lanes)
        old_agent_info, old_env_info = self._infos
        infos = (
            old_agent_info if agent_info is None else given[0],
            old_env_info if env_info is None else given[1],
        )
        if not self.all_stopped:
            dispatcher.submit(WindowRequest(lanes, infos, self._policy))
        self._infos = infos
        self._n_windows += 1

    def _hand_out(self, dispatcher: Dispatcher) -> TemporalDictTensor:
        """Return the result; no window follows one in which all lanes end."""
        try:
            result = super()._hand_out(dispatcher)
        except RlpoolError:
            self._lanes = None
            dispatcher.drop_pending()
            raise
        if self._lanes is not None and not self._lanes.running:
            dispatcher.drop_pending()
        return result

    def _first_pending(self, dispatcher: Dispatcher) -> int:
        # Beyond what any lane has begun, see ``lane_seeds``.
        return self._n_resets + self._n_windows * self._n_timesteps

    def _go_to(self, number: int) -> None:
        self._n_resets, self._n_windows, self._lanes = number, 0, None
        self._positions = np.array([[number], [0]])

    @classmethod
    def layout(
        cls, n_timesteps: int, n_slots: int | None, n_workers: int, specs: StepSpecs
    ) -> Layout:
        """Implement ``BatcherBase.layout``."""
        n_lanes = specs.n_lanes * n_workers
        layout = Layout(specs, n_lanes, n_timesteps, n_workers, specs.auto_reset)
        return layout.checked(("n_timesteps",))
