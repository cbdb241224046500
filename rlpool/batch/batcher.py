"""Batchers: many agents on many environments, episodes or windows as named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlpool.batch.batcher_base import BatcherBase, CreateAgent, CreateEnv, Seeds
from rlpool.batch.messages import Infos
from rlpool.batch.progress import Meter, ShowProgress, checked_progress
from rlpool.batch.request_queue import RequestQueue
from rlpool.batch.requests import EpisodeRequest, Policy, WindowRequest, as_infos
from rlpool.batch.resuming import (
    State,
    infos_of_state,
    refuse_other_agents,
    state_of_infos,
    state_of_tapes,
    tapes_of_state,
    why_lost,
    why_unseeded,
)
from rlpool.data.infos import Info
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import RlpoolError, SpecError, UsageError
from rlpool.machine.arguments import names_arguments, whole_number
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.record.capsule_files import CrashDir
from rlpool.record.tape import WindowTapes
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.workers.failure_policy import (
    DEFAULT_TIMEOUT_S,
    FailurePolicy,
    PolicyOptions,
    takes_policy,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EpisodeBatcher(BatcherBase):
    """Collects complete episodes in worker processes.

    Row *i* of a result is episode *i* of its ``execute``: it ran with row *i* of ``agent_info``
    and of ``env_info``. With the same ``seeds`` and the same number of environments per worker,
    results are bitwise the same for any ``n_threads``. Use a batcher from one thread at a time.

    Args:
        n_timesteps: Length of a slot in steps. Longer episodes go on in further slots.
        n_slots: Slots in flight, which bound the memory. If a request has more episodes, or
            episodes are longer than a slot, full slots are copied out while ``get`` waits.
        create_agent: Called as ``create_agent(**agent_args)`` in every worker. Lambdas, closures
            and classes defined in a script or notebook are fine.
        agent_args: Keyword arguments of ``create_agent``.
        create_env: Called as ``create_env(seed=..., **env_args)`` in every worker (with
            ``n_threads=0`` in this process), without ``seed`` if it takes none. Returns a
            ``VecEnv``: a ``GymEnv`` or, with ``n_threads=0``, a ``ParallelEnvManager``. Each worker
            resets its environments once before the first request, to learn keys, shapes and
            dtypes; a wrapper that counts or records episodes (``RecordVideo``) sees that reset as
            an episode without steps.
        env_args: Keyword arguments of ``create_env``. A ``seed`` among them replaces the one that
            differs from worker to worker.
        n_threads: Number of worker processes; 0 runs everything in this process while ``get``
            waits: for debuggers and profilers, with the same results.
        seeds: A non-negative int, or a list with one per worker; hashed into one root seed.
            ``None`` draws one and logs it. Environments and agents get seeds below 2**31; the first
            2**31 episodes of a batcher have different ones.
        timeout: Seconds without a step of any environment after which a worker counts as
            hanging, ``None`` for never. Must be longer than the slowest single ``reset``, ``step``
            or call of the agent.
        on_worker_failure: ``"restart"`` replaces a worker that died or hangs while the others go
            on, and its successor runs the unfinished episodes again, with the same result;
            ``"raise"`` reports it, and the batcher is of no further use.
        max_restarts: The most replacements in all; ``None`` for no limit. Workers that fail again
            and again before they are ready are given up in any case.
        on_env_error: ``"raise"`` reports an environment that raises; ``"restart"`` replaces its
            worker, which counts as one of ``max_restarts``.
        max_episodes_per_worker: Replace a worker after this many episodes; ``None`` for never.
            Neither this nor the next counts as a failure. A worker with more environments than
            this runs only this many of them at a time.
        max_rss_bytes: Replace a worker, between episodes, once its resident memory without shared
            blocks is larger; ``None`` for never.
        start_method: ``"auto"`` forks workers from a template process where that is safe, which
            takes milliseconds, and spawns them elsewhere; ``"spawn"`` always spawns them. The
            results are the same, see docs/start_methods.md.
        crash_dir: A directory, created if it is missing. If an environment or an agent fails,
            what ``rlpool.replay_crash`` needs is written to a file there; the error names it.
        progress: What ``get`` shows while it waits, unless told otherwise.

    Raises:
        SpecError: For arguments of the wrong kind or size, keys that collide, or more workers or
            memory than this machine allows.
        WorkerStartupError: If ``create_env`` or ``create_agent`` raises or cannot be pickled.
        WorkerDiedError: If a worker dies before it is ready.
        UsageError: If the script lacks its ``if __name__ == "__main__":`` guard.

    Example:
        >>> with EpisodeBatcher(
        ...     n_timesteps=100,
        ...     n_slots=128,
        ...     create_agent=create_agent,
        ...     create_env=create_env,
        ...     n_threads=2,
        ...     seeds=42,
        ... ) as batcher:
        ...     batcher.execute(n_episodes=32)
        ...     trajectories = batcher.get()
        >>> trajectories["frame"].shape
        torch.Size([32, 4, 1])
    """

    _LOWERABLE: tuple[str, ...] = ("n_slots", "n_timesteps")
    """Arguments that make blocks smaller."""

    _EPISODES = EpisodeRequest

    _progress: ShowProgress = False
    _n_executions = 0
    _n_episodes = 0
    _last: tuple[int, Any, Any] | None = None

    @names_arguments
    @takes_policy
    def __init__(
        self,
        n_timesteps: int,
        n_slots: int,
        create_agent: CreateAgent | None = None,
        agent_args: Mapping[str, Any] | None = None,
        create_env: CreateEnv | None = None,
        env_args: Mapping[str, Any] | None = None,
        n_threads: int = 1,
        seeds: Seeds = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        crash_dir: CrashDir = None,
        progress: ShowProgress = False,
        **policy: Unpack[PolicyOptions],
    ) -> None:
        self._progress = checked_progress(progress)
        factories = create_agent, agent_args, create_env, env_args
        failing = timeout, FailurePolicy(**policy), crash_dir
        super().__init__(n_timesteps, n_slots, *factories, n_threads, seeds, *failing)

    @cached_property
    def _meter(self) -> Meter:
        return Meter()

    @names_arguments
    def execute(
        self,
        n_episodes: int,
        agent_info: Info = None,
        env_info: Info = None,
    ) -> None:
        """Request episodes; returns at once. Further requests queue up.

        Args:
            n_episodes: Any number from 1.
            agent_info: ``[n_episodes, ...]`` or empty: row *i* goes to the agent with episode *i*.
                A ``DictTensor``, or a dict of tensors, NumPy arrays, lists or numbers; a number
                holds for all episodes. It is copied.
            env_info: Likewise: row *i* reaches the environment of episode *i* as
                ``reset(options={...})``, or ``reset(env_info={...})`` where it takes that. Without
                ``env_info`` nothing is passed, so that the environment's own default applies.

        Raises:
            SpecError: If an info holds anything but numbers, or has another number of rows; or if
                rows of ``env_info`` differ, or there are fewer slots than lanes, for environments
                that can only be reset together (see ``VectorGymEnv``).
            UsageError: If the batcher is closed.
            WorkerDiedError: If a worker died meanwhile.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_threads=0)
            >>> batcher.execute(3, env_info={"length": [1, 4, 2]})
            >>> batcher.get().lengths
            tensor([1, 4, 2])
        """
        dispatcher = self._open()
        whole_number("n_episodes", n_episodes, 1)
        n_episodes = int(n_episodes)
        infos = as_infos(agent_info, env_info, n_episodes)
        with InterruptsHeld():
            request = self._EPISODES(
                number=dispatcher.next_number(),
                n_rows=n_episodes,
                infos=infos,
                policy=dispatcher.policy,
                execution=self._n_executions,
                first=self._n_episodes,
                root=self._root,
            )
            dispatcher.check(request)
            self._n_executions += 1
            self._n_episodes += n_episodes
            self._last = (n_episodes, *infos)
            dispatcher.submit(request)

    def reexecute(self) -> None:
        """Request new episodes with the arguments of the last ``execute``.

        Raises:
            UsageError: Before the first ``execute``.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_threads=0)
            >>> batcher.execute(3, env_info={"length": [1, 4, 2]})
            >>> batcher.reexecute()
            >>> first, second = batcher.get(), batcher.get()
            >>> second.lengths, bool((first.info["seed"] == second.info["seed"]).any())
            (tensor([1, 4, 2]), False)
        """
        self._open()
        if self._last is None:
            raise UsageError("reexecute() repeats an execute()", fix="call execute() first")
        EpisodeBatcher.execute(self, *self._last)

    @names_arguments
    def get(
        self, blocking: bool = True, *, progress: ShowProgress | None = None
    ) -> TemporalDictTensor | None:
        """Take the result of the oldest request.

        Args:
            blocking: Wait for it; otherwise return ``None`` until all of it is there.
            progress: ``True`` shows a bar of episodes, with steps per second, until all of it is
                there: one of tqdm if that is installed, otherwise a line on stderr. A function is
                called instead with a ``Progress``, a few times a second and at the end; with
                ``n_threads=0``, it is called when an episode ends. It may look at the batcher's
                ``progress``, but not call ``get``. By default as the batcher was told.

        Returns:
            Tensors ``[n_episodes, T, ...]``, T being the length of the longest episode, zero past
            each row's length: the environments' keys, ``reward``, ``terminated``, ``truncated``,
            ``done``, ``initial_state``, ``last_action``, the agent's outputs and state, and with
            a leading ``_`` the environment's keys and the state after the step (computed on first
            access). ``info`` has per row ``episode``, ``seed``, ``policy_version``,
            ``agent_info/...`` and ``env_info/...``. They are views of memory that is yours until
            you drop the last of them, and is reused afterwards.

        Raises:
            UsageError: If nothing is pending or the batcher is closed.
            EnvError, AgentError: If the user's code failed. The request is lost, the batcher
                still works.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
            Exception: What a function given as ``progress`` raises. Episodes of workers go on, and
                ``get`` can be called again; with ``n_threads=0`` the request is lost.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_threads=0)
            >>> batcher.execute(2, env_info={"length": [2, 3]})
            >>> trajectories = batcher.get()
            >>> trajectories["_reward"]
            tensor([[1., 2., 0.],
                    [1., 2., 3.]])
            >>> trajectories["frame"].shape, trajectories.lengths
            (torch.Size([2, 3, 1]), tensor([2, 3]))
        """
        dispatcher = self._open()
        progress = self._progress if progress is None else checked_progress(progress)
        with self._meter.shown(progress, dispatcher.so_far) as look:
            if dispatcher.wait(blocking=blocking, look=look) is None:
                return None
        return dispatcher.hand_out()

    def close(self) -> None:
        """See ``BatcherBase.close``."""
        super().close()
        self._meter.close()

    @property
    def progress(self) -> tuple[int, int]:
        """Episodes finished and requested, of the oldest request that was not handed out.

        Raises:
            RlpoolError: If that request failed, or a worker died or hangs for good; ``get`` raises
                the same.
        """
        return self._open().finished_episodes()

    _KIND = "EpisodeBatcher"

    def _state(self, dispatcher: RequestQueue) -> State:
        last = None
        if self._last is not None:
            n_episodes, *infos = self._last
            last = {"n_episodes": n_episodes, **state_of_infos((infos[0], infos[1]))}
        return {
            "n_executions": self._n_executions,
            "n_episodes": self._n_episodes,
            "last": last,
            "why_lost": why_unseeded(dispatcher.step),
        }

    def _load(self, dispatcher: RequestQueue, state: State) -> None:
        last = state["last"]
        self._last = last and (last["n_episodes"], *infos_of_state(last))
        self._n_executions, self._n_episodes = state["n_executions"], state["n_episodes"]

    @classmethod
    def layout(
        cls, n_timesteps: int, n_slots: int | None, n_workers: int, specs: StepSpecs
    ) -> Layout:
        """See ``BatcherBase.layout``."""
        layout = Layout(specs, n_slots or 4 * specs.n_lanes, n_timesteps, n_workers)
        return layout.checked(cls._LOWERABLE)


class MonoThreadEpisodeBatcher(EpisodeBatcher):
    """An ``EpisodeBatcher`` in the calling process, which needs no slots to be chosen.

    Everything runs while ``get`` waits.

    Args:
        create_agent: Called as ``create_agent(**agent_args)``.
        agent_args: Keyword arguments of ``create_agent``.
        create_env: Called as ``create_env(seed=..., **env_args)``, or without ``seed``.
        env_args: Keyword arguments of ``create_env``.
        seeds: As for ``EpisodeBatcher``.
        progress: As for ``EpisodeBatcher``.

    Example:
        >>> with MonoThreadEpisodeBatcher(create_agent, {}, create_env) as batcher:
        ...     batcher.execute()
        ...     print(batcher.get().lengths)
        tensor([4, 4])
    """

    _N_TIMESTEPS = 128
    """Steps per slot; longer episodes are joined from several."""

    _LOWERABLE = ()

    @names_arguments
    def __init__(
        self,
        create_agent: CreateAgent | None = None,
        agent_args: Mapping[str, Any] | None = None,
        create_env: CreateEnv | None = None,
        env_args: Mapping[str, Any] | None = None,
        seeds: Seeds = None,
        *,
        progress: ShowProgress = False,
    ) -> None:
        self._progress = checked_progress(progress)
        factories = create_agent, agent_args, create_env, env_args
        failing = None, FailurePolicy()
        BatcherBase.__init__(self, self._N_TIMESTEPS, None, *factories, 0, seeds, *failing)

    @names_arguments
    def execute(
        self,
        n_episodes: int | None = None,
        agent_info: Info = None,
        env_info: Info = None,
    ) -> None:
        """Request episodes; by default as many as there are environments.

        See ``EpisodeBatcher.execute``.
        """
        super().execute(
            self._open().n_lanes if n_episodes is None else n_episodes, agent_info, env_info
        )


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
        n_threads: As for ``EpisodeBatcher``.
        seeds: As for ``EpisodeBatcher``, but lanes that restart on their own share no seed for
            2**30 steps of all lanes together, resets included.
        timeout: As for ``EpisodeBatcher``.
        crash_dir: As for ``EpisodeBatcher``.
        **policy: As for ``EpisodeBatcher``. The successor of a worker restores every running
            episode by repeating its recorded actions; if that does not lead to the same
            observation, ``get`` raises ``EnvError``. If the agent requires a history, the failure
            is reported, and ``reset`` goes on with new workers.

    Example:
        >>> def create_endless_env(seed):
        ...     return GymEnvInf([CountingEnv(length=4) for _ in range(2)], seed)
        >>> batcher = Batcher(6, None, create_agent, {}, create_endless_env, n_threads=0)
        >>> batcher.reset()
        >>> for _ in range(2):
        ...     batcher.execute()
        ...     print(batcher.get()["_reward"][0])
        tensor([1., 2., 3., 4., 1., 2.])
        tensor([3., 4., 1., 2., 3., 4.])
    """

    _WINDOWS = WindowRequest

    _n_resets = _n_windows = 0
    _n_windows_before = 0  # those before the last reset
    _infos: Infos = ({}, {})
    _running: Sequence[int] = ()
    _tapes: WindowTapes | None = None  # if the caller records, and after load_state_dict()
    _is_first = False
    _last_window = 0  # number of the last request whose lanes_left was taken over
    _is_reset = False  # False again after an error, which ends all episodes
    # What windows run with that wait for the previous one.
    _queued: tuple[tuple[Policy, Infos], ...] = ()

    @names_arguments
    @takes_policy
    def __init__(
        self,
        n_timesteps: int,
        n_slots: int | None = None,
        create_agent: CreateAgent | None = None,
        agent_args: Mapping[str, Any] | None = None,
        create_env: CreateEnv | None = None,
        env_args: Mapping[str, Any] | None = None,
        n_threads: int = 1,
        seeds: Seeds = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        crash_dir: CrashDir = None,
        **policy: Unpack[PolicyOptions],
    ) -> None:
        factories = create_agent, agent_args, create_env, env_args
        failing = timeout, FailurePolicy(**policy), crash_dir
        super().__init__(n_timesteps, n_slots, *factories, n_threads, seeds, *failing)

    @property
    def n_lanes(self) -> int:
        """Lanes of all workers."""
        return self._open().n_lanes * self._n_workers

    @property
    def all_stopped(self) -> bool:
        """Whether every lane has ended, so that ``get`` returns ``None``."""
        n_pending = self._open().n_pending
        return self._is_reset and not self._running and not n_pending

    @names_arguments
    def reset(self, agent_info: Info = None, env_info: Info = None) -> None:
        """Restart every lane with the next window; pending windows are dropped.

        Args:
            agent_info: ``[n_lanes, ...]`` or empty, as for ``EpisodeBatcher.execute``.
            env_info: Likewise; its rows are passed to the environments at every reset.

        Raises:
            SpecError: If an info holds anything but numbers, or has another number of rows.

        Example:
            >>> def create_endless_env(seed):
            ...     return GymEnvInf([CountingEnv(length=4) for _ in range(2)], seed)
            >>> batcher = Batcher(6, None, create_agent, {}, create_endless_env, n_threads=0)
            >>> batcher.reset(env_info={"length": [2, 4]})
            >>> batcher.execute()
            >>> batcher.get()["_done"]
            tensor([[False,  True, False,  True, False,  True],
                    [False, False, False,  True, False, False]])
        """
        dispatcher = self._open()
        infos = as_infos(agent_info, env_info, self.n_lanes)
        dispatcher.drop_pending()
        self._infos = infos
        self._is_first = self._is_reset = True
        self._n_resets += 1
        self._n_windows_before = self._n_windows
        self._tapes = WindowTapes(self.n_lanes) if dispatcher.records else None
        self._queued = ()
        self._running = list(range(self.n_lanes))

    @names_arguments
    def execute(self, agent_info: Info = None) -> None:
        """Request the next window; returns at once.

        Args:
            agent_info: ``[n_lanes, ...]``, as for ``reset``: what the agent gets from this window
                on, in the episodes that are running, too. It replaces all that was given before,
                and may have other keys; an empty dict for none. ``None`` leaves it as it is.

        Raises:
            SpecError: If ``agent_info`` holds anything but numbers, or has another number of rows.
            UsageError: Before ``reset``, and after an error.

        Example:
            >>> def create_endless_env(seed):
            ...     return GymEnvInf([CountingEnv(length=4) for _ in range(2)], seed)
            >>> batcher = Batcher(6, None, create_agent, {}, create_endless_env, n_threads=0)
            >>> batcher.reset()
            >>> batcher.execute()
            >>> batcher.execute()  # windows queue up: learn from one while the next is collected
            >>> batcher.get().n_timesteps(), batcher.get().n_timesteps()
            (6, 6)
        """
        dispatcher = self._open()
        if not self._is_reset:
            raise UsageError("the lanes have no episodes to go on with", fix="call reset() first")
        infos = self._infos
        if agent_info is not None:
            infos = as_infos(agent_info, None, self.n_lanes)[0], infos[1]
        with InterruptsHeld():
            self._infos = infos
            self._n_windows += 1
            if dispatcher.n_pending:
                # Which lanes run is known once the previous window is there; what they run with is
                # fixed now.
                self._queued += ((dispatcher.policy, infos),)
            elif self._running:
                self._submit(dispatcher, dispatcher.policy, infos)

    @names_arguments
    def get(self, blocking: bool = True) -> TemporalDictTensor | None:
        """Take the oldest window.

        Args:
            blocking: Wait for it; otherwise return ``None`` until it is there.

        Returns:
            Tensors ``[lanes that ran, T, ...]`` as from ``EpisodeBatcher.get``, lengths from 1 to
            ``n_timesteps`` (from 0 where lanes cannot be reset one by one: the steps in which they
            restart are missing); ``None`` once all lanes have stopped (see ``all_stopped``).

        Raises:
            UsageError: If nothing was requested.
            EnvError, AgentError: If the user's code failed; call ``reset`` to go on.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.

        Example:
            >>> def create_endless_env(seed):
            ...     return GymEnvInf([CountingEnv(length=4) for _ in range(2)], seed)
            >>> batcher = Batcher(6, None, create_agent, {}, create_endless_env, n_threads=0)
            >>> batcher.reset()
            >>> batcher.execute()
            >>> window = batcher.get()
            >>> window["frame"].shape, window["_frame"].shape
            (torch.Size([2, 6, 1]), torch.Size([2, 6, 1]))
        """
        dispatcher = self._open()
        if self.all_stopped:
            return None
        try:
            request = dispatcher.wait(blocking=blocking)
        except UsageError:
            raise
        except RlpoolError:
            dispatcher.drop_pending()
            self._is_reset = False
            self._queued = ()
            raise
        if request is None:
            return None
        if isinstance(request, WindowRequest) and request.number != self._last_window:
            with InterruptsHeld():
                self._last_window = request.number
                self._running = request.lanes_left
                if self._queued and self._running:
                    (policy, infos), *queued = self._queued
                    self._queued = tuple(queued)
                    self._submit(dispatcher, policy, infos)
        return dispatcher.hand_out()

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
            )
        )
        self._is_first = False
        if not dispatcher.records:
            self._tapes = None  # the worker in this process has them, and goes on with them

    _KIND = "Batcher"
    _COUNTERS = ("n_resets", "n_windows", "n_windows_before", "is_reset", "is_first")

    def _state(self, dispatcher: RequestQueue) -> State:
        lanes = [] if self._is_first or not self._is_reset else list(self._running)
        tapes = self._tapes.tapes if self._tapes is not None else {}
        if lanes and self._tapes is None:
            tapes = dispatcher.tapes()
        why = why_lost(dispatcher.step, tapes, lanes)
        return {
            **{name: getattr(self, f"_{name}") for name in self._COUNTERS},
            **self._expected(dispatcher),
            **state_of_infos(self._infos),
            "running": list(self._running),
            "tapes": [] if why else state_of_tapes({lane: tapes[lane] for lane in lanes}),
            "why_lost": why,
        }

    def _expected(self, dispatcher: RequestQueue) -> Mapping[str, Any]:
        lanes = {"n_lanes": self.n_lanes, "lanes of each worker": dispatcher.n_lanes}
        return {"n_timesteps": self._n_timesteps, **lanes}

    def _load(self, dispatcher: RequestQueue, state: State) -> None:
        refuse_other_agents(dispatcher.step, state["tapes"])
        for name in self._COUNTERS:
            setattr(self, f"_{name}", state[name])
        self._infos, self._running = infos_of_state(state), list(state["running"])
        self._queued = ()
        self._tapes = WindowTapes(self.n_lanes)
        self._tapes.tapes = tapes_of_state(state["tapes"])
        if self._tapes.tapes:
            dispatcher.resume()

    @classmethod
    def layout(
        cls, n_timesteps: int, n_slots: int | None, n_workers: int, specs: StepSpecs
    ) -> Layout:
        """See ``BatcherBase.layout``."""
        if specs.depends_on_timing:
            raise SpecError(
                "windows need lanes that step together, not those of an asynchronous EnvPool",
                fix="make the pool without batch_size, or use EpisodeBatcher",
            )
        n_lanes = specs.n_lanes * n_workers
        layout = Layout(specs, n_lanes, n_timesteps, n_workers, specs.auto_reset)
        return layout.checked(("n_timesteps",))
