"""Batchers of episodes: many environments, complete episodes as named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlpool.batch.batcher_base import BatcherBase
from rlpool.batch.checks import (
    LAST_NUMBER,
    CreateAgent,
    CreateEnv,
    Seeds,
    ShowProgress,
)
from rlpool.batch.dispatch import Dispatcher
from rlpool.batch.messages import Episodes
from rlpool.batch.requests import EpisodeRequest
from rlpool.data.infos import Info, Infos, as_infos
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import also_takes, whole_number
from rlpool.machine.calls import crash_only
from rlpool.record.tape import Tape
from rlpool.seeding import N_SEEDS, checked_seeds
from rlpool.slots.blocks import Layout, StepSpecs

InfoOf = Info | Callable[[int], Info]
"""``agent_info`` or ``env_info`` of all requests, or a function of the request number."""


class EpisodeBatcher(BatcherBase):
    """Collects complete episodes in worker processes.

    Row *i* of a result is episode *i* of its ``execute``, run with row *i* of ``agent_info`` and
    ``env_info``. With the same ``seeds`` and the same number of environments per worker, results
    are bitwise identical for any ``n_workers``. Use a batcher from one thread at a time.

    If a signal handler raises inside a call (Ctrl-C), the workers are ended, requests in flight are
    dropped, and the next ``execute`` starts new workers. docs/reliability.md lists the limits of
    these guarantees.

    Args:
        n_timesteps: Length of a slot in steps. Longer episodes continue in further slots.
        n_slots: Slots in flight, which bound the memory; at least one per worker, by default four
            for each environment of a worker. If a request has more episodes, or episodes are longer
            than a slot, full slots are copied out while ``get`` waits.
        create_agent: Called as ``create_agent(**agent_args)`` in every worker; returns an
            ``Agent``, a module or another callable. Lambdas, closures and classes defined in a
            script or notebook work.
        agent_args: Keyword arguments of ``create_agent``. Tensors in shared memory and other
            objects that ``torch.multiprocessing`` can share are shared with the workers, here as
            in ``env_args`` and closures; everything else is copied.
        create_env: Called as ``create_env(seed=..., **env_args)`` in every worker (with
            ``n_workers=0`` in this process), without ``seed`` if it does not accept one. Returns a
            ``VecEnv``: a ``GymEnv`` or, with ``n_workers=0``, a ``ParallelEnvManager``. Each worker
            resets its environments once before the first request, to learn keys, shapes and
            dtypes; a wrapper that counts or records episodes (``RecordVideo``) sees that reset as
            an episode without steps.
        env_args: Keyword arguments of ``create_env``. A ``seed`` among them replaces the default
            seed, which differs between workers.
        n_workers: Number of worker processes; 0 runs everything in this process while ``get``
            waits, with the same results, for debuggers and profilers.
        seeds: Also ``seed``. A non-negative int, or a list with one per worker, hashed into one
            root seed. ``None`` draws one and logs it. Environments and agents get seeds below
            2**31; the first 2**31 episodes of a batcher have distinct seeds.
        timeout: Seconds without a step of any environment after which a worker counts as
            hung, ``None`` for never. Must be longer than the slowest single ``reset``, ``step``
            or agent call.
        on_worker_failure: ``"restart"`` replaces a worker that died or hung while the others
            continue; its successor runs the unfinished episodes again, with the same result.
            ``"raise"`` reports the failure, after which the batcher is unusable.
        max_restarts: Maximum number of replacements; ``None`` for no limit. A worker that fails
            repeatedly without having done any work is not restarted in any case.
        on_env_error: ``"raise"`` reports an environment that raises. ``"restart"`` replaces its
            worker, which counts towards ``max_restarts``, and runs the episode again.
            ``"truncate"`` replaces it and ends the episode with the failed step, with reward 0;
            ``info["failed"]`` and ``failures`` report it.
        max_episode_restarts: An episode that fails this often at the same step, whether its
            environment raises or its worker dies or hangs, is not run again: it is truncated, or
            with ``on_env_error="raise"`` an error of its request. ``None`` for no limit.
        max_episodes_per_worker: Replace a worker after this many episodes; ``None`` for never.
            This does not count as a failure. A worker with more environments than this runs only
            this many of them at a time.
        start_method: ``"auto"`` forks workers from a template process where that is safe, which
            takes milliseconds, and spawns them elsewhere; ``"spawn"`` always spawns them. Results
            are the same, see docs/processes.md.
        agent_rows: Call the agent with exactly this many rows, whatever the number of lanes: in
            several calls if there are more lanes, padded with copies if there are fewer. Results
            are then also bitwise identical for any number of environments per worker, see
            docs/reproducibility.md. By default there is one row per environment of the worker.
        progress: Default of ``get(progress=)``.

    Raises:
        SpecError: For arguments of the wrong type or size, colliding keys, or more workers or
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
        ...     n_workers=2,
        ...     seeds=42,
        ... ) as batcher:
        ...     batcher.execute(n_episodes=32)
        ...     trajectories = batcher.get()
        >>> trajectories["frame"].shape
        torch.Size([32, 4, 1])
    """

    _LOWERABLE: tuple[str, ...] = ("n_slots", "n_timesteps")
    """Arguments to lower for smaller blocks."""

    _SLOTS_PER_LANE = 4  # of one worker, by default

    _NAME = "EpisodeBatcher"

    _counts_lanes = False  # whether ``n_episodes`` defaults to the number of lanes

    _next_episode = 0
    _last: tuple[int, Infos, list[int] | None] | None = None
    _tape: Tape | None = None  # episode that workers repeat in place of the next request

    @crash_only
    def execute(
        self,
        n_episodes: int | None = None,
        agent_info: Info = None,
        env_info: Info = None,
        *,
        episode_seeds: Sequence[int] | None = None,
    ) -> None:
        """Request episodes and return at once. Further requests queue up.

        Args:
            n_episodes: Any number from 1. For a ``MonoThreadEpisodeBatcher`` the default is the
                number of environments.
            agent_info: ``[n_episodes, ...]`` or empty: row *i* goes to the agent with episode *i*.
                A ``DictTensor``, or a dict of tensors, NumPy arrays, lists or numbers; a number
                applies to all episodes. It is copied.
            env_info: Likewise: row *i* reaches the environment of episode *i* as
                ``reset(options={...})``, or ``reset(env_info={...})`` if it takes that. Without
                ``env_info`` nothing is passed, so the environment's own default applies.
            episode_seeds: Seeds for the ``reset`` of each episode, ``n_episodes`` ints from 0 to
                2**31 - 1 as a sequence or a 1-d array, returned as ``info["seed"]``. Repeats are
                allowed. The agent's noise still derives from the episode's number. By default the
                seeds derive from ``seeds`` and are distinct.

        Raises:
            SpecError: If an info contains anything but numbers or has a wrong number of rows; if
                ``episode_seeds`` are not valid seeds or their number is wrong; or, for environments
                that can only be reset together (see ``VectorGymEnv``), if seeds are given, rows of
                ``env_info`` differ, or there are fewer slots than lanes.
            UsageError: If the batcher is closed.
            WorkerDiedError: If a worker has died.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.execute(3, env_info={"length": [1, 4, 2]})
            >>> batcher.get().lengths
            tensor([1, 4, 2])
            >>> batcher.execute(2, episode_seeds=[7, 3])
            >>> batcher.get().info["seed"]
            tensor([7, 3])
        """
        dispatcher = self._ready()
        if n_episodes is None and self._counts_lanes:
            n_episodes = self.n_lanes
        n_episodes = whole_number("n_episodes", n_episodes, 1, fix="say how many: execute(32)")
        if n_episodes > N_SEEDS:
            message = f"{n_episodes} episodes in one request, but only 2**31 seeds"
            raise SpecError(message, fix="ask for fewer at a time: stream()")
        infos = as_infos(agent_info, env_info, n_episodes)
        given = None if episode_seeds is None else checked_seeds(episode_seeds, n_episodes)
        self._submit(dispatcher, n_episodes, infos, given)

    def _submit(
        self, dispatcher: Dispatcher, n_episodes: int, infos: Infos, given_seeds: list[int] | None
    ) -> None:
        asked = Episodes(n_episodes, self._root, self._next_episode, given_seeds, self._tape)
        dispatcher.submit(EpisodeRequest(asked, infos, self._policy))
        self._next_episode += n_episodes
        self._last = n_episodes, infos, given_seeds

    @crash_only
    def reexecute(self) -> None:
        """Request new episodes with the arguments of the last ``execute``.

        Raises:
            UsageError: Before the first ``execute``.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.execute(3, env_info={"length": [1, 4, 2]})
            >>> batcher.reexecute()
            >>> first, second = batcher.get(), batcher.get()
            >>> second.lengths, bool((first.info["seed"] == second.info["seed"]).any())
            (tensor([1, 4, 2]), False)
        """
        dispatcher = self._ready()
        if self._last is None:
            raise UsageError("reexecute() repeats an execute()", fix="call execute() first")
        self._submit(dispatcher, *self._last)

    @property
    def next_episode(self) -> int:
        """Number of the next episode: episodes requested so far, or the number given to ``seek``.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.execute(3)
            >>> batcher.next_episode
            3
        """
        return self._next_episode

    @crash_only
    def seek(self, number: int) -> None:
        """Make the next ``execute`` begin with this episode of the batcher's life.

        An episode's seed, noise and row in the agent's batch depend only on its number, not on its
        request: two batchers that run episodes 0-7 and 8-15 together return the results of one that
        runs 16. Vector environments that are seeded per request are the exception, see
        ``VectorGymEnv``.

        Args:
            number: From 0. New batchers begin with 0; each request continues after the last.

        Raises:
            SpecError: For anything but a number from 0 to 2**62.
            UsageError: If results are pending, or the batcher is closed.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
            >>> batcher.execute(3)
            >>> all_seeds = batcher.get().info["seed"]
            >>> batcher.seek(1)
            >>> batcher.execute(2)
            >>> torch.equal(batcher.get().info["seed"], all_seeds[1:])
            True
        """
        number = whole_number("number", number, 0)
        if number > LAST_NUMBER:
            raise SpecError(f"number is {number}, the largest is 2**62", fix="begin at 0")
        self._refuse_pending("seek()")
        self._next_episode = number

    def stream(
        self,
        n_episodes: int,
        n_pending: int = 2,
        agent_info: InfoOf = None,
        env_info: InfoOf = None,
    ) -> Iterator[TemporalDictTensor]:
        """Yield results without end, collecting the next ones while you learn from one.

        The first ``n_pending`` requests are made at once, each further one when the next result is
        requested; an ``update`` between two results applies to the request made then. An episode's
        policy thus depends only on the order of calls, and results are the same for any number of
        workers. Requests in flight are dropped when the loop ends.

        Args:
            n_episodes: Episodes per request, from 1.
            n_pending: Requests in flight, from 1. With one, all episodes use the last update.
            agent_info: As for ``execute``, for every request; or a function that returns it, called
                with the number of the request, from 0.
            env_info: Likewise.

        Yields:
            Results as returned by ``get``, in order. ``info["policy_age"]`` is the number of
            updates by which the policy of each row is older than the latest: at most ``n_pending -
            1`` with one update per result.

        Raises:
            SpecError: If a number is out of range.
            UsageError: If the batcher is closed.
            RlpoolError: Errors of ``execute`` and ``get``, raised by the iterator.

        Example:
            >>> policy = torch.nn.Linear(4, 2)
            >>> batcher = EpisodeBatcher(8, 8, create_agent, {}, create_env, n_workers=0)
            >>> for number, episodes in enumerate(batcher.stream(n_episodes=2, n_pending=2)):
            ...     print(episodes.info["policy_version"], episodes.info["policy_age"])
            ...     batcher.update(policy.state_dict())
            ...     if number == 3:
            ...         break
            tensor([0, 0]) tensor([0, 0])
            tensor([0, 0]) tensor([1, 1])
            tensor([1, 1]) tensor([1, 1])
            tensor([2, 2]) tensor([1, 1])
        """
        n_episodes = whole_number("n_episodes", n_episodes, 1)
        n_pending = whole_number("n_pending", n_pending, 1)
        self._not_closed()
        return self._results(n_episodes, n_pending, agent_info, env_info)

    def _results(
        self, n_episodes: int, n_pending: int, agent_info: InfoOf, env_info: InfoOf
    ) -> Iterator[TemporalDictTensor]:
        number = 0
        try:
            while True:
                while self.n_pending < n_pending:
                    infos = (i(number) if callable(i) else i for i in (agent_info, env_info))
                    self.execute(n_episodes, *infos)
                    number += 1
                result = self.get()
                age = self.policy_version - result.info["policy_version"]
                result.info.set("policy_age", age)
                yield result
        finally:
            if not self.closed:
                self._drop_pending()

    @crash_only
    def _drop_pending(self) -> None:
        self._open().drop_pending()

    def _first_pending(self, dispatcher: Dispatcher) -> int:
        oldest: Any = next(iter(dispatcher.pending), None)
        return self._next_episode if oldest is None else oldest.asked.first

    def _go_to(self, number: int) -> None:
        self._next_episode = number

    @classmethod
    def layout(
        cls, n_timesteps: int, n_slots: int | None, n_workers: int, specs: StepSpecs
    ) -> Layout:
        """Implement ``BatcherBase.layout``."""
        n_slots = max(n_slots or cls._SLOTS_PER_LANE * specs.n_lanes, n_workers)
        return Layout(specs, n_slots, n_timesteps, n_workers).checked(cls._LOWERABLE)


class MonoThreadEpisodeBatcher(EpisodeBatcher):
    """An ``EpisodeBatcher`` in the calling process, without slots to choose.

    Everything runs while ``get`` waits.

    Args:
        create_agent: Called as ``create_agent(**agent_args)``.
        agent_args: Keyword arguments of ``create_agent``.
        create_env: Called as ``create_env(seed=..., **env_args)``, or without ``seed``.
        env_args: Keyword arguments of ``create_env``.
        seeds: Also ``seed``. A non-negative int; ``None`` draws one and logs it.
        agent_rows: Call the agent with this many rows; by default one per environment.
        progress: Default of ``get(progress=)``.

    Example:
        >>> with MonoThreadEpisodeBatcher(create_agent, {}, create_env) as batcher:
        ...     batcher.execute()
        ...     print(batcher.get().lengths)
        tensor([4, 4])
    """

    _N_TIMESTEPS = 128
    """Steps per slot; longer episodes are joined from several slots."""

    _LOWERABLE = ()

    _counts_lanes = True

    @also_takes(seed="seeds")
    def __init__(
        self,
        create_agent: CreateAgent | None = None,
        agent_args: Mapping[str, Any] | None = None,
        create_env: CreateEnv | None = None,
        env_args: Mapping[str, Any] | None = None,
        seeds: Seeds = None,
        *,
        seed: int | None = None,  # already renamed to seeds when the call arrives here
        agent_rows: int | None = None,
        progress: ShowProgress = False,
    ) -> None:
        factories = create_agent, agent_args, create_env, env_args
        options: Any = {"timeout": None, "agent_rows": agent_rows, "progress": progress}
        super().__init__(self._N_TIMESTEPS, None, *factories, 0, seeds, **options)
