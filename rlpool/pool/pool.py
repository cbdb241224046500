"""``Pool``: a replay store of transitions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np

from rlpool.data.rows import listed
from rlpool.data.storage import NDArray, allocate
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import also_takes, check_choice, whole_number
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.one_thread import OneThread
from rlpool.pool import checkpoint, ingest
from rlpool.pool.filling import FilledPool
from rlpool.pool.priorities import checked_exponent
from rlpool.pool.reader import PoolReader
from rlpool.pool.runner import EpisodeRunner, infos_of_steps
from rlpool.pool.schema import Schema, checked_frame_stack, checked_keys
from rlpool.pool.store import Store
from rlpool.pool.sub_pool import WindowRules
from rlpool.seeding import root_from
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, FailurePolicy

_SAMPLING, _ROUTING = 1, 2  # what a generator's seed is for


class Pool(FilledPool):
    """A bounded store of transitions: the most recent ones, to be sampled for learning.

    It is filled in three ways, which may be mixed as long as transitions have the same keys:
    ``extend(trajectories)`` takes what a batcher returned, ``store()`` runs an episode in each of
    its own environments, and ``pool(s, a, next_s, r, done)`` adds a single transition. Rewards are
    stored in float32, whichever way they come in.

    The pool is divided into ``n_workers`` sub-pools whose capacities add up to ``pool_size``. Each
    keeps its newest transitions: when one is added to a full one, the oldest goes, or with
    ``window_size`` all but the newest ``window_size``. Adding costs the same however full the pool
    is, and never moves what is there.

    Not for use by several threads at once. Other processes may read a pool with
    ``storage="shared"``: send it through a pipe, a queue or the arguments of a process, once it
    holds a transition, and what arrives is a ``PoolReader``. In a forked process it is the pool
    itself, which only reads there, and samples uniformly.

    Args:
        env: Environments for ``store()``, one per process; see ``store``.
        n_workers: Number of sub-pools, and of processes of ``store()``. By default as many as there
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
        info_keys: Keys of the trajectories' ``info`` to store with every transition, such as
            ``"env_info/task"`` or ``"seed"``; ``"agent_info"`` stands for all that begin with it
            and a slash. Samples have them among their keys, sequences in their ``info``, where
            ``replay_agent`` takes ``agent_info`` from. For ``store()`` they are keys of the
            environments' ``info``, whose values before and after each step are kept, ``"cost"``
            and ``"_cost"``: float32 numbers, or as declared, ``{"cost": np.float64}``.
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

    @also_takes(processes="n_workers")
    def __init__(
        self,
        env: Sequence[Any] | None = None,
        n_workers: int | None = None,
        pool_size: int | None = None,
        window_size: int | None = None,
        clearing_freq: int | None = None,
        window_size_: int | None = None,
        random: bool = True,
        *,
        policy: Any = None,
        seed: int | None = None,
        keys: Sequence[str] | None = None,
        info_keys: Sequence[str] | Mapping[str, Any] | None = None,
        storage: str = "local",
        directory: str | Path | None = None,
        priority_exponent: float | None = None,
        frame_stack: int | Mapping[str, int | tuple[int, int]] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        start_method: str = "auto",
    ) -> None:
        if n_workers is None:
            n_workers = max(1, len(env)) if isinstance(env, Sequence) else 1
        n_workers = whole_number("n_workers", n_workers, 1)
        check_choice("random", random, (True, False))
        self._rules = WindowRules(window_size, clearing_freq, window_size_)
        seed = None if seed is None else whole_number("seed", seed, 0)
        self._info_keys = list(dict.fromkeys(listed(info_keys or (), str, "info_keys")))
        self._frame_stack = checked_frame_stack(frame_stack)
        allocate(storage, 1, directory=directory)  # checked now, whether they are used or not
        self._storage, self._directory = storage, directory
        FailurePolicy(start_method=start_method)
        self._arguments = {
            "pool_size": whole_number("pool_size", pool_size, n_workers),
            "processes": n_workers,
            **self._rules.arguments(),
            "random": bool(random),
            "priority_exponent": checked_exponent(priority_exponent),
            "keys": checked_keys(keys),
        }
        root, self._open = root_from(seed), {}
        super().__init__(Store.of_nothing(n_workers), [_SAMPLING, root])
        self._router = np.random.Generator(np.random.PCG64([_ROUTING, root]))
        self._one_thread = OneThread("hand_over")
        self._runner = self._n_stacked = None
        if env is not None:
            infos = infos_of_steps(self._info_keys, info_keys)
            self._runner = EpisodeRunner(env, n_workers, seed, policy, timeout, start_method, infos)
            self._n_stacked = self._runner.frame_stack

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
                added, and the next run starts over.
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

    # Saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next samples depend on, except what environments remember.

        Returns:
            Tensors and a text, which ``torch.save`` writes and ``torch.load(weights_only=True)``
            reads. The tensors are views: save them, or copy them, before the pool is changed.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> torch.save(pool.state_dict(), "pool.pt")
            >>> other = Pool(pool_size=1000)
            >>> other.load_state_dict(torch.load("pool.pt"))
            >>> len(other)
            4
        """
        return checkpoint.to_tensors(*self._state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what another pool was; from here on both give the same samples.

        Args:
            state: What its ``state_dict`` returned; copied.

        Raises:
            SpecError: If the saved pool was made with other sizes, rules, keys or another
                ``priority_exponent``, or holds other keys than this one, which keeps what it has.
                ``seed`` and ``storage`` may differ.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> other = Pool(pool_size=1000)
            >>> other.load_state_dict(pool.state_dict())
            >>> torch.equal(pool.sample(3)["frame"], other.sample(3)["frame"])
            True
        """
        with checkpoint.loading("the state"):
            self._restore(checkpoint.from_tensors(state))

    def save(self, path: str | Path) -> None:
        """Write the pool to a file, without needing memory for that.

        The file is in the safetensors format and holds no code. What was at the path stays until
        all is written.

        Args:
            path: The file.

        Raises:
            SpecError: If the disk is full or the path cannot be written.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> pool([0], 0, [1], 1.0, True)
            >>> pool.save("pool.safetensors")
            >>> pool.load("pool.safetensors")
        """
        checkpoint.write_file(path, *self._state())

    def load(self, path: str | Path) -> None:
        """Become what a saved pool was; from here on both give the same samples.

        Args:
            path: A file that ``save`` wrote. If this pool is not empty, memory must have room for
                both what it holds and what the file holds.

        Raises:
            SpecError: If the file cannot be read or is damaged, or for the reasons of
                ``load_state_dict``. This pool keeps what it has.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> pool.save("pool.safetensors")
            >>> pool.clear()
            >>> pool.load("pool.safetensors")
            >>> len(pool)
            4
        """
        with checkpoint.opened_file(path) as saved:
            self._restore(saved)

    def _state(self) -> tuple[str, dict[str, NDArray]]:
        """A JSON text and arrays by name, which are views."""
        store = self._store
        state = {
            "format": checkpoint.FORMAT,
            **self._arguments,
            **store.counts,
            "schema": store.schema.plain() if store.has_schema else None,
            "fed": [self._has_stored] * self._n_sub_pools,
            "open_rows": {str(i): 0 for i, n in self._open.items() if n == store.sub_pools[i].next},
            "max_priority": self._max_priority,
            "sampling": self._generator.bit_generator.state,
            "routing": self._router.bit_generator.state,
            "runner": None if self._runner is None else self._runner.state_dict(),
        }
        return json.dumps(state), store.arrays_in_use()

    def _restore(self, saved: checkpoint.Saved) -> None:
        store = self._store
        store.refuse_others()
        # Without keys of its own, a pool takes what comes.
        any_keys = self._arguments["keys"] is None
        header = saved.header(
            {k: v for k, v in self._arguments.items() if k != "keys" or not any_keys}
        )
        is_open = {int(i): header["rings"][int(i)][1] for i in header["open_rows"]}
        has_stored, max_priority = any(header["fed"]), float(header["max_priority"])
        generators = np.random.PCG64(), np.random.PCG64()
        for bits, name in zip(generators, ("sampling", "routing"), strict=True):
            bits.state = header[name]
        fresh = self._loaded(saved, header)
        if not store.has_schema or self._storage == "local":
            self._store = fresh
        else:  # others may look at its memory
            checkpoint.take_over(store, fresh)
        self._open, self._has_stored, self._max_priority = is_open, has_stored, max_priority
        self._generator, self._router = map(np.random.Generator, generators)
        if self._runner is not None and header["runner"]:
            self._runner.load_state_dict(header["runner"])

    def _loaded(self, saved: checkpoint.Saved, header: Mapping[str, Any]) -> Store:
        """A new store of what was saved."""
        own = self._store.schema if self._store.has_schema else None
        if header["schema"] is None:  # there never was a transition
            return Store.of_nothing(self._n_sub_pools) if own is None else self._new_store(own)
        schema = Schema.from_plain(header["schema"])
        if own is not None and own != schema:
            raise SpecError(
                f"the saved pool holds {schema}; this one has {own}",
                fix="load it into a pool that holds the same, or nothing yet",
            )
        if self._frame_stack is not None and self._with_stacks(schema) != schema:
            raise SpecError(
                f"the saved pool holds {schema}; this one has frame_stack={self._frame_stack}",
                fix="load it into a pool with the same frame_stack, or without any: that one takes "
                "what is saved",
            )
        missing = [n for n in self._info_keys if not ingest.matching(n, schema.infos)]
        if missing:
            raise SpecError(
                f"the saved pool holds no {missing}, which info_keys of this one name",
                fix="load it into a pool without info_keys: that one takes what is saved",
            )
        store = self._new_store(schema)
        saved.fill(store, header)
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        store = self._store
        if not store.has_schema or self._storage == "local":
            raise UsageError(
                "the pool cannot be sent before it has a transition, nor with local memory",
                fix='make it with storage="shared", add the first transitions, then send it',
            )
        return PoolReader, (store.schema, store.pool_size, self._n_sub_pools, store.memory)

    # Processes -------------------------------------------------------------------------------

    def _open_runner(self) -> EpisodeRunner:
        if self._runner is None:
            raise UsageError("the pool has no environments", fix="pass env=[...], or use extend()")
        if self._runner.closed:
            raise UsageError("the pool was closed", fix="make another one, close it later")
        return self._runner

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
        holds = self._store.schema if self._store.has_schema else "nothing yet"
        return f"Pool({len(self)} of {self.pool_size} transitions; {holds})"
