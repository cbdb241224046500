"""``Pool``: a replay store of transitions."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.dict_tensor_base import instance, listed
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import check_choice, names_arguments, real_number, whole_number
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.limits import check_size
from rlpool.machine.one_thread import OneThread
from rlpool.memory.storage import Array, allocate, carved_bytes
from rlpool.pool import checkpoint, ingest
from rlpool.pool.incoming import Incoming
from rlpool.pool.layout import layout_of, n_bytes_of
from rlpool.pool.priorities import checked_priorities
from rlpool.pool.reader import PoolReader
from rlpool.pool.runner import EpisodeRunner
from rlpool.pool.sampling import RESULT_KEYS, Sampler
from rlpool.pool.schema import Schema, checked_frame_stack, stacks_of
from rlpool.pool.store import Store
from rlpool.pool.sub_pool import WindowRules
from rlpool.seeding import root_from
from rlpool.specs import TensorSpec
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, FailurePolicy
from rlpool.workers.stack_dumps import DumpsStacks

_SAMPLING, _ROUTING = 1, 2  # what a generator's seed is for


class Pool(Sampler, DumpsStacks):
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
        if seed is not None:
            seed = whole_number("seed", seed, 0)
        if keys is not None:
            keys = list(dict.fromkeys(listed(keys, str, "keys")))
            if not keys:
                raise SpecError("keys are empty", fix="leave keys out to store all")
        if priority_exponent is not None:
            limits = "from 0 on, and finite"
            priority_exponent = real_number("priority_exponent", priority_exponent, limits)
        self._frame_stack = checked_frame_stack(frame_stack)
        allocate(storage, 1, directory=directory)  # checked now, whether they are used or not
        FailurePolicy(start_method=start_method)
        root = root_from(seed)
        super().__init__(None, processes, [_SAMPLING, root])
        # What a saved pool must have been made with, by the names that files use.
        self._arguments: dict[str, Any] = {
            "pool_size": whole_number("pool_size", pool_size, processes),
            "processes": processes,
            **rules.arguments(),
            "random": bool(random),
            "priority_exponent": priority_exponent,
            "keys": keys,
        }
        self._rules, self._storage, self._directory = rules, storage, directory
        self._router = np.random.Generator(np.random.PCG64([_ROUTING, root]))
        # Sub-pool to its ``next`` when its newest transition was one that may be continued.
        self._open: dict[int, int] = {}
        self._has_stored = False  # the first transitions of all processes
        self._one_thread = OneThread("hand_over")
        self._max_priority = 1.0
        self._runner = None
        if env is not None:
            self._runner = EpisodeRunner(env, processes, seed, policy, timeout, start_method)

    # Adding ----------------------------------------------------------------------------------

    def extend(self, trajectories: TemporalDictTensor, index: int | None = None) -> None:
        """Add every step of some trajectories, in row-then-time order.

        Each row is a stream of its own, which may hold several episodes. Where they end is told by
        ``_done``, by ``_terminated`` and ``_truncated``, or by ``initial_state``, whether these are
        stored or not; without them n-step returns and sequences are refused until ``clear``. Rows
        of a single step need none. The windows of a ``Batcher`` are not joined: no n-step return
        and no sequence goes on from one window to the next, so with windows of one step they have
        one step.

        Values after a step that follow from the next step, such as ``_frame``, are not stored
        twice. The pool keeps no reference to the trajectories. Their ``info`` is not stored, nor
        are keys that earlier transitions did not have.

        Args:
            trajectories: ``[B, T, ...]`` with the keys of the pool, on any device.
            index: The sub-pool to add to. By default each trajectory goes to one that is drawn with
                probability proportional to 1 / (its length + 1).

        Raises:
            SpecError: If keys, shapes or dtypes are not those that the pool holds, what should be a
                stack of frames is none, or a disk or the memory is full. Nothing that was stored is
                lost.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_threads=0)
            >>> batcher.execute(3)
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> pool.extend(batcher.get())
            >>> len(pool), pool.sample(8)["frame"].shape
            (12, torch.Size([8, 1]))
        """
        fix = "TemporalDictTensor.from_packed(transitions, lengths) makes one of transitions"
        instance(trajectories, TemporalDictTensor, "what extend() gets", fix)
        index = self._checked_index(index)
        if not trajectories.n_elems() or not int(trajectories.lengths.sum()):
            return
        store, incoming = self._taken_in(trajectories, index)
        if index is None and self._n_sub_pools > 1:
            sizes = trajectories.lengths.cpu().numpy()
            sizes = sizes[sizes > 0]
            self._distribute(store, incoming, sizes, self._router.random(len(sizes)).tolist())
        else:
            store.add(index or 0, incoming, self._max_priority)
        store.remember(index, incoming)
        self._store = store

    def pool(
        self,
        s: Any,
        a: Any,
        next_s: Any,
        r: Any,
        done: Any,
        index: int | None = None,
        *,
        terminated: Any = None,
    ) -> None:
        """Add a single transition; calling the pool does the same.

        The transitions that are added to a sub-pool are one stream, as of one environment: one that
        starts where the one before it ended, which was not ``done``, continues its episode, and
        the state between them is stored once. So give each of several environments an ``index`` of
        its own. Without an index, none continues another unless there is a single sub-pool.

        Args:
            s: The state ``[*S]``, an array, tensor or number; copied.
            a: The action ``[*A]``.
            next_s: The state after it ``[*S]``.
            r: The reward, a number; stored in float32.
            done: Whether the episode ended, by itself or cut off.
            terminated: Whether it ended by itself, and was not cut off; by default ``done``.
            index: The sub-pool to add to. By default one at random, or the emptiest one with
                ``random=False``.

        Raises:
            SpecError: If something does not fit what the pool holds.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> pool.pool(s=[0.0], a=1, next_s=[1.0], r=0.5, done=False)
            >>> pool([1.0], 0, [2.0], 0.5, done=True)  # the same, shorter
            >>> len(pool)
            2
        """
        index = self._checked_index(index)
        values = ingest.transition_of(s, a, next_s, r, done, terminated)
        keys = ingest.chosen(values, self._known_keys(), "the transition")
        specs = {key: TensorSpec(values[key].shape, values[key].dtype) for key in keys}
        store = self._store_for(specs, "the transition")
        incoming = ingest.from_single(values, store.schema, store.tails(source := index))
        # In a sub-pool that was chosen here, the one before is of the same episode by chance.
        is_chosen = index is None and self._n_sub_pools > 1
        if index is None:
            index = store.lengths.index(min(store.lengths))
            if is_chosen and self._arguments["random"]:
                (index,) = store.routes([1], [self._router.random()])
        sub_pool = store.sub_pools[index]
        is_open = not is_chosen and self._open.get(index) == sub_pool.next
        joined = is_open and store.ends_in(index, values)
        store.add(index, incoming, self._max_priority, joined=joined)
        store.remember(source, incoming)
        if not is_chosen and not values[ingest.DONE_KEY]:
            self._open[index] = sub_pool.next
        self._store = store

    __call__ = pool

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

    def clear(self) -> None:
        """Drop all transitions; their keys stay fixed.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> pool.clear()
            >>> len(pool)
            0
        """
        if self._store is not None:
            self._store.clear()

    def update_priorities(self, index: Any, priorities: Any) -> None:
        """Set the priorities of transitions, usually their absolute errors plus a small constant.

        New transitions have the largest priority so far, so that each is soon seen.

        Args:
            index: int64 ``[n]``, as ``sample`` gave it. Transitions that are gone are left out.
            priorities: ``[n]``, finite and not negative.

        Raises:
            UsageError: If the pool samples uniformly.
            SpecError: For other shapes or values.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0, priority_exponent=1.0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> batch = pool.sample(4)
            >>> errors = torch.rand(4)  # how wrong the learner's prediction was
            >>> pool.update_priorities(batch["index"], errors + 1e-6)
        """
        alpha = self._arguments["priority_exponent"]
        if alpha is None:
            raise UsageError(
                "the pool samples uniformly and has no priorities",
                fix="make it with priority_exponent=0.6, for instance",
            )
        given, powers = checked_priorities(index, priorities, alpha)
        store = self._store
        if store is not None:
            store.refuse_others()
        if store is None or store.tree is None or not given.size:
            return
        numbers, sub_pools = np.divmod(given, self._n_sub_pools)
        with store.changing():
            oldest, after = store.numbers[sub_pools].T
            is_held = (oldest <= numbers) & (numbers < after)
            rows = store.rows_of(sub_pools[is_held], numbers[is_held])
            store.tree.set(rows, powers[is_held])
        self._max_priority = max(self._max_priority, float(powers[is_held].max(initial=0.0)))

    # Inside of adding ------------------------------------------------------------------------

    def _checked_index(self, index: Any) -> int | None:
        if index is not None and whole_number("index", index, 0) >= self._n_sub_pools:
            raise SpecError(
                f"index should be the number of a sub-pool, got {index!r}",
                fix=f"there are {self._n_sub_pools} (processes), counted from 0",
            )
        return None if index is None else operator.index(index)

    def _known_keys(self) -> Sequence[str] | None:
        keys: list[str] | None = self._arguments["keys"]
        return keys if self._store is None else list(self.specs)

    def _taken_in(
        self, trajectories: TemporalDictTensor, index: int | None = None
    ) -> tuple[Store, Incoming]:
        specs = ingest.specs_of(trajectories, self._known_keys())
        store = self._store_for(specs, "the trajectories")
        # Stacks that were only recognised may have been changed by another wrapper.
        is_strict = self._frame_stack is not None
        tails = store.tails(index)
        return store, ingest.from_trajectories(
            trajectories, store.schema, tails, is_strict=is_strict
        )

    def _store_for(self, specs: Mapping[str, TensorSpec], what: str) -> Store:
        """The store for transitions, a new one for the first ones: they decide what it holds."""
        if self._store is not None:
            self._store.schema.check(specs, what)
            return self._store
        taken = [key for key in RESULT_KEYS if key in specs]
        if taken:
            raise SpecError(f"{what} have the keys {taken}, which samples use", fix="rename them")
        return self._new_store(self._with_stacks(Schema.of(specs)))

    def _with_stacks(self, schema: Schema) -> Schema:
        """The schema with those of its columns as stacks that are to be."""
        if self._frame_stack is not None:
            return replace(schema, stacks=stacks_of(self._frame_stack, schema))
        n_frames = None if self._runner is None else self._runner.frame_stack
        try:
            return replace(schema, stacks=stacks_of(n_frames, schema))
        except SpecError:  # another wrapper has given them another shape
            return schema

    def _new_store(self, schema: Schema) -> Store:
        pool_size, n = self.pool_size, self._n_sub_pools
        sizes = carved_bytes({**schema.rows, **schema.frames}, pool_size)

        def advice(n_free: int) -> str:
            fits = pool_size * n_free // sum(sizes.values())
            number = f" ({fits} would fit)" if fits else ""
            return f'lower pool_size{number}, or use storage="memmap"'

        if self._storage != "memmap":
            check_size(sizes, advice, f"a pool of {pool_size} transitions")
        n_bytes = n_bytes_of(layout_of(schema, pool_size, n))
        where = self._directory
        memory = allocate(self._storage, n_bytes, directory=where, n_used=sum(sizes.values()))
        has_priorities = self._arguments["priority_exponent"] is not None
        return Store(schema, pool_size, n, memory, self._rules, with_priorities=has_priorities)

    def _distribute(
        self, store: Store, incoming: Incoming, sizes: Array, draws: Sequence[int | float]
    ) -> None:
        """Add pieces of these sizes to the sub-pools that ``routes`` draws."""
        routes = np.repeat(store.routes(sizes.tolist(), draws), sizes)
        for index in np.unique(routes).tolist():
            part = incoming.part(np.flatnonzero(routes == index))
            store.add(index, part, self._max_priority)

    # What there is ---------------------------------------------------------------------------

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

    @property
    def nbytes(self) -> int:
        """Bytes in use: rows that were written so far, bookkeeping and priorities included."""
        return 0 if self._store is None else self._store.nbytes

    @property
    def pool_size(self) -> int:
        """Transitions that fit in."""
        size: int = self._arguments["pool_size"]
        return size

    # Keeping it ------------------------------------------------------------------------------

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

    def _state(self) -> tuple[str, dict[str, Array]]:
        """A JSON text and arrays by name, which are views."""
        store = self._store
        in_use = checkpoint.in_use(store, self._n_sub_pools)
        spans = in_use["rings"]
        state = {
            "format": checkpoint.FORMAT,
            **self._arguments,
            **in_use,
            "is_untold": store is not None and bool(store.is_untold[0]),
            "fed": [self._has_stored] * self._n_sub_pools,
            "open_rows": {str(i): 0 for i, n in self._open.items() if n == spans[i][1]},
            "max_priority": self._max_priority,
            "sampling": self._generator.bit_generator.state,
            "routing": self._router.bit_generator.state,
            "runner": None if self._runner is None else self._runner.state_dict(),
        }
        return json.dumps(state), {} if store is None else store.arrays()

    def _restore(self, saved: checkpoint.Saved) -> None:
        store = self._store
        if store is not None:
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
        if store is None or fresh is None or self._storage == "local":
            self._store = fresh
        else:  # others may look at its memory
            store.take_over(fresh)
        self._open, self._has_stored, self._max_priority = is_open, has_stored, max_priority
        self._generator, self._router = map(np.random.Generator, generators)
        if self._runner is not None and header["runner"]:
            self._runner.load_state_dict(header["runner"])

    def _loaded(self, saved: checkpoint.Saved, header: Mapping[str, Any]) -> Store | None:
        """A new store of what was saved, ``None`` if there never was a transition anywhere."""
        own = None if self._store is None else self._store.schema
        schema = checkpoint.schema_of(header)
        if schema is None:
            return None if own is None else self._new_store(own)
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
        store = self._new_store(schema)
        saved.fill(store, header)
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        store = self._store
        if store is None or self._storage == "local":
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
