"""``Pool``: a replay store of transitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.dict_tensor_base import listed
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import check_choice, names_arguments, real_number, whole_number
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.one_thread import OneThread
from rlpool.memory.storage import Array, allocate
from rlpool.pool import ingest
from rlpool.pool.runner import EpisodeRunner
from rlpool.pool.saving import SavedPool
from rlpool.pool.schema import checked_frame_stack
from rlpool.pool.sub_pool import WindowRules
from rlpool.seeding import root_from
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, FailurePolicy
from rlpool.workers.stack_dumps import DumpsStacks


class Pool(SavedPool, DumpsStacks):
    """A bounded store of transitions: the most recent ones, to be sampled for learning.

    It is filled in three ways, which may be mixed as long as transitions have the same keys:
    ``extend(trajectories)`` takes what a batcher returned, ``store()`` runs an episode in each of
    its own environments, and ``pool(s, a, next_s, r, done)`` adds a single transition. Rewards are
    stored in float32, whichever way they come in.

    The pool is divided into ``processes`` sub-pools whose capacities add up to ``pool_size``. Each
    keeps its newest transitions: when one is added to a full one, the oldest goes, or with
    ``window_size`` all but the newest ``window_size``. Adding costs the same however full the pool
    is, and never moves what is there.

    Not for use by several threads at once. Other processes may read a pool with
    ``storage="shared"``: send it through a pipe, a queue or the arguments of a process, once it
    holds a transition, and what arrives is a ``PoolReader``. In a forked process it is the pool
    itself, which only reads there, and samples uniformly.

    Args:
        env: Environments for ``store()``, one per process; see ``store``.
        processes: Number of sub-pools, and of processes of ``store()``. By default as many as there
            are environments, or 1.
        pool_size: Transitions to hold in all.
        window_size: What a sub-pool keeps when it overflows, at most its capacity.
        clearing_freq: Whenever this many transitions were added to a sub-pool, drop its
            ``window_size_`` oldest.
        window_size_: See ``clearing_freq``; only together with it.
        random: Whether a transition of ``store()`` goes to a sub-pool at random, with probability
            proportional to 1 / (its length + 1); otherwise to that of its process. Where
            transitions of several processes mix, none is known to follow another, so that
            sequences and n-step returns have a single step.
        policy: For ``store()`` with Gymnasium environments: a function from state to action, called
            in the workers. By default the action space is sampled.
        seed: Root seed of sampling, of the choice of sub-pools and of ``store()``; ``None`` draws
            one.
        keys: Keys of trajectories to store, by default all.
        storage: ``"local"``, ``"shared"`` (for readers in other processes) or ``"memmap"`` (a file
            without a name, for pools beyond memory).
        directory: Directory of the file of ``"memmap"``, by default that of temporary files.
        priority_exponent: Sample in proportion to priorities to this power (alpha in the paper),
            see ``update_priorities``; by default uniformly.
        frame_stack: Observations are stacks of so many frames, of which each is stored once: a
            quarter of the memory for 4. Samples have whole stacks. A number means the keys that
            have so many frames along their first axis, or else their last one (vectors of so many
            numbers only if no key has more dimensions); ``{"frame": 4}`` or
            ``{"frame": (4, -1)}`` name keys, and the axis. The newest frame is the last one, and
            each step drops the oldest. Episodes may begin with any frames, repeated or zero. By
            default the stacks of Gymnasium's ``FrameStackObservation`` around the environments of
            ``store()``; ``{}`` for none.
        timeout: Seconds without a step after which a process of ``store()`` counts as hanging.
        start_method: How processes of ``store()`` are started, as for ``EpisodeBatcher``.

    Raises:
        SpecError: For sizes below 1, one of ``clearing_freq`` and ``window_size_`` without the
            other, another number of environments than of processes, or an unknown storage.

    Example:
        >>> pool = Pool(pool_size=1000, seed=0)
        >>> for step in range(20):
        ...     pool([step], 0, [step + 1], 1.0, step == 19)
        >>> len(pool), pool.sample(4)["_frame"].shape
        (20, torch.Size([4, 1]))
    """

    _is_unconfirmed = False  # to the caller of store(), in which a handler has raised

    @names_arguments
    def __init__(
        self,
        env: Sequence[Any] | None = None,
        processes: int | None = None,
        pool_size: int | None = None,
        window_size: int | None = None,
        clearing_freq: int | None = None,
        window_size_: int | None = None,
        random: bool = True,
        *,
        policy: Any = None,
        seed: int | None = None,
        keys: Sequence[str] | None = None,
        storage: str = "local",
        directory: str | Path | None = None,
        priority_exponent: float | None = None,
        frame_stack: int | Mapping[str, int | tuple[int, int]] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        start_method: str = "auto",
    ) -> None:
        if processes is None:
            processes = max(1, len(env)) if isinstance(env, Sequence) else 1
        processes = whole_number("processes", processes, 1)
        check_choice("random", random, (True, False))
        rules = WindowRules(window_size, clearing_freq, window_size_)
        seed = None if seed is None else whole_number("seed", seed, 0)
        keys = _checked_keys(keys)
        if priority_exponent is not None:
            limits = "from 0 on, and finite"
            priority_exponent = real_number("priority_exponent", priority_exponent, limits)
        allocate(storage, 1, directory=directory)  # checked now, whether they are used or not
        FailurePolicy(start_method=start_method)
        stacks = checked_frame_stack(frame_stack)
        arguments = {  # by the names that files use
            "pool_size": whole_number("pool_size", pool_size, processes),
            "processes": processes,
            **rules.arguments(),
            "random": bool(random),
            "priority_exponent": priority_exponent,
            "keys": keys,
        }
        self._runner = None
        if env is not None:
            self._runner = EpisodeRunner(env, processes, seed, policy, timeout, start_method)
        n_stacked = None if self._runner is None else self._runner.frame_stack
        super().__init__(arguments, rules, root_from(seed), storage, directory, stacks, n_stacked)
        self._one_thread = OneThread("hand_over")

    def store(self) -> None:
        """Run one episode in each environment, each in its own process, and add them.

        Returns when all episodes have ended. Environments follow one of two protocols. Those of
        Gymnasium: actions come from ``policy`` or the action space. Those that choose their own
        actions: ``reset() -> (state, action)`` and ``step(action) -> (action, next_state, reward,
        done)``, where the action stored is the one that ``step`` returns. The processes live until
        ``close``; environments keep what they remember, unless they are changed here.

        Raises:
            UsageError: Without environments, or after ``close``.
            EnvError, AgentError: If an environment or the policy fails; nothing of this run is
                added, and the next run starts anew.
            WorkerStartupError, WorkerDiedError, WorkerTimeoutError: If a process cannot start,
                dies or hangs; likewise.

        Example:
            >>> with Pool([CountingEnv(length=3), CountingEnv(length=4)], pool_size=100) as pool:
            ...     pool.store()  # an episode in each of them, in two processes
            ...     print(len(pool))
            7
        """
        runner = self._open_runner()
        if get_ident() != self._one_thread.thread:
            self._one_thread.hand_over()
        if not self._is_unconfirmed:
            every, lengths = runner.run()
            with InterruptsHeld():
                runner.n_runs += 1
                self._add_run(every, lengths)
                self._is_unconfirmed = True
        self._is_unconfirmed = False

    def _add_run(self, every: DictTensor, lengths: Sequence[int]) -> None:
        if not self._arguments["random"] or self._n_sub_pools == 1:
            for process, (length, stop) in enumerate(
                zip(lengths, accumulate(lengths), strict=True)
            ):
                self.extend(ingest.one_row(every.slice(stop - length, stop)), process)
            return
        order = ingest.order_in_time(lengths)
        store, incoming = self._taken_in(ingest.one_row(every))
        incoming.is_last[:] = True  # whatever follows it in its sub-pool does not continue it
        draws: list[int | float] = self._router.random(len(order)).tolist()
        if not self._has_stored:  # the first of each process goes into its own sub-pool
            draws[: len(lengths)] = range(len(lengths))
        self._distribute(store, incoming.part(order), np.ones(len(order), int), draws)
        self._store, self._has_stored = store, True

    def get_pool(self) -> tuple[Array, Array, Array, Array, Array]:
        """States, actions, next states, rewards and done flags of all transitions.

        Returns:
            Copies ``[N, *S]``, ``[N, *A]``, ``[N, *S]``, float32 ``[N]``, ``[N]``, sub-pool by
            sub-pool, the oldest of each first; empty arrays before the first transition.

        Raises:
            UsageError: If the transitions have no ``frame``, ``action``, ``_frame``, ``_reward``
                or ``_done``.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> s, a, next_s, r, done = pool.get_pool()
            >>> next_s.ravel(), done
            (array([1, 2, 3, 4]), array([False, False, False,  True]))
        """
        s, a, next_s, r, done = (np.zeros(0, kind) for kind in ["f4"] * 4 + ["?"])
        if len(self):
            if missing := [key for key in ingest.TRANSITION_KEYS if key not in self.specs]:
                raise UsageError(
                    f"the pool has no {missing}, it has {list(self.specs)}",
                    fix="use transitions(), which gives every key",
                )
            every = self.transitions(ingest.TRANSITION_KEYS)
            s, a, next_s, r, done = (every[key].numpy() for key in ingest.TRANSITION_KEYS)
        return s, a, next_s, r, done

    # Processes -------------------------------------------------------------------------------

    def _open_runner(self) -> EpisodeRunner:
        if self._runner is None:
            raise UsageError("the pool has no environments", fix="pass env=[...], or use extend()")
        if self._runner.closed:
            raise UsageError("the pool was closed", fix="make another one, close it later")
        return self._runner

    def _stacks(self) -> str:
        return self._open_runner().stacks()

    def close(self) -> None:
        """End the processes of ``store()``. What is stored stays. May be repeated.

        Example:
            >>> pool = Pool([CountingEnv()], pool_size=100)
            >>> pool.close()
        """
        if self._runner is not None:
            self._runner.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        holds = "nothing yet" if self._store is None else self._store.schema
        return f"Pool({len(self)} of {self.pool_size} transitions; {holds})"


def _checked_keys(keys: Sequence[str] | None) -> list[str] | None:
    if keys is None:
        return None
    keys = list(dict.fromkeys(listed(keys, str, "keys")))
    if not keys:
        raise SpecError("keys are empty", fix="leave keys out to store all")
    return keys
