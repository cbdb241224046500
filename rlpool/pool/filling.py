"""Adding transitions to a pool: streams and single ones, what decides their schema, priorities."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.rows import instance
from rlpool.data.specs import TensorSpec
from rlpool.data.storage import NDArray, allocate, carved_bytes
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import whole_number
from rlpool.machine.limits import check_size
from rlpool.pool import ingest
from rlpool.pool.priorities import checked_priorities
from rlpool.pool.sampling import RESULT_KEYS, Sampler
from rlpool.pool.schema import FrameStack, Schema, stacks_of
from rlpool.pool.stacks import Incoming
from rlpool.pool.store import Store
from rlpool.pool.sub_pool import WindowRules, routes
from rlpool.pool.transition import DONE_KEY, TRANSITION_KEYS, transition_of
from rlpool.slots.blocks import successor_key


class FilledPool(Sampler):
    """A pool that transitions are added to.

    Attributes:
        _arguments: Those of ``Pool`` that a saved pool must have been made with, by the names that
            files use.
        _rules: When sub-pools drop transitions.
        _info_keys: Which keys of the trajectories' ``info`` are kept.
        _frame_stack: Which keys are stacks, as the user says.
        _n_stacked: Frames that the environments are seen to stack, if the user does not say.
        _router: Chooses sub-pools.
        _open: Sub-pool to its ``next`` when its newest transition was one that may be continued.
        _has_stored: Whether ``store`` has added some: the first transitions of all processes.
    """

    _arguments: dict[str, Any]
    _rules: WindowRules
    _storage: str
    _directory: str | Path | None
    _info_keys: list[str]
    _frame_stack: FrameStack
    _n_stacked: int | None
    _router: np.random.Generator
    _open: dict[int, int]
    _max_priority = 1.0
    _has_stored = False

    @property
    def nbytes(self) -> int:
        """Bytes in use: rows that were written so far, bookkeeping and priorities included."""
        return self._store.nbytes

    @property
    def pool_size(self) -> int:
        """Transitions that fit in."""
        size: int = self._arguments["pool_size"]
        return size

    def extend(self, trajectories: TemporalDictTensor, index: int | None = None) -> None:
        """Add every step of some trajectories, in row-then-time order.

        Each row is a stream of its own, which may hold several episodes. Where they end is told by
        ``_done``, by ``_terminated`` and ``_truncated``, or by ``initial_state``, whether these are
        stored or not; without them n-step returns and sequences are refused until ``clear``. Rows
        of a single step need none. The windows of a ``Batcher`` are not joined: no n-step return
        and no sequence goes on from one window to the next, so with windows of one step they have
        one step.

        Values after a step that follow from the next step, such as ``_frame``, are not stored
        twice. The pool keeps no reference to the trajectories. Of their ``info`` it stores what
        ``info_keys`` names, with every transition; keys that earlier transitions did not have are
        not stored.

        Args:
            trajectories: ``[B, T, ...]`` with the keys of the pool, on any device.
            index: The sub-pool to add to. By default each trajectory goes to one that is drawn with
                probability proportional to 1 / (its length + 1).

        Raises:
            SpecError: If keys, shapes or dtypes are not those that the pool holds, what should be a
                stack of frames is none, or a disk or the memory is full. Nothing that was stored is
                lost.

        Example:
            >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
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
        store.tails[index] = incoming.tails()
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
        values = transition_of(s, a, next_s, r, done, terminated)
        keys = ingest.chosen(values, self._known_keys(), "the transition")
        specs = {key: TensorSpec(values[key].shape, values[key].dtype) for key in keys}
        store = self._store_for(specs, "the transition")
        incoming = ingest.from_single(values, store.schema, store.tails.get(source := index, {}))
        # In a sub-pool that was chosen here, the one before is of the same episode by chance.
        is_chosen = index is None and self._n_sub_pools > 1
        if index is None:
            index = int(np.argmin(store.sub_pools.lengths))
            if is_chosen and self._arguments["random"]:
                (index,) = routes(store.sub_pools, self._rules, [1], [self._router.random()])
        sub_pool = store.sub_pools[index]
        is_open = not is_chosen and self._open.get(index) == sub_pool.next
        joined = is_open and _ends_in(store, index, values)
        store.add(index, incoming, self._max_priority, joined=joined)
        store.tails[source] = incoming.tails()
        if not is_chosen and not values[DONE_KEY]:
            self._open[index] = sub_pool.next
        self._store = store

    __call__ = pool

    def get_pool(self) -> tuple[NDArray, NDArray, NDArray, NDArray, NDArray]:
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
            if missing := [key for key in TRANSITION_KEYS if key not in self.specs]:
                raise UsageError(
                    f"the pool has no {missing}, it has {list(self.specs)}",
                    fix="use transitions(), which gives every key",
                )
            every = self.transitions(TRANSITION_KEYS)
            s, a, next_s, r, done = (every[key].numpy() for key in TRANSITION_KEYS)
        return s, a, next_s, r, done

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
        store.refuse_others()
        if store.tree is None or not given.size:
            return
        numbers, sub_pools = np.divmod(given, self._n_sub_pools)
        with store.changing():
            oldest, after = store.sub_pools.numbers[sub_pools].T
            is_there = (oldest <= numbers) & (numbers < after)
            rows = store.sub_pools.rows_of(sub_pools[is_there], numbers[is_there])
            store.tree.set(rows, powers[is_there])
        self._max_priority = max(self._max_priority, float(powers[is_there].max(initial=0.0)))

    # Inside of adding ------------------------------------------------------------------------

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

    def _checked_index(self, index: Any) -> int | None:
        if index is not None and whole_number("index", index, 0) >= self._n_sub_pools:
            raise SpecError(
                f"index should be the number of a sub-pool, got {index!r}",
                fix=f"there are {self._n_sub_pools} (n_workers), counted from 0",
            )
        return None if index is None else operator.index(index)

    def _known_keys(self) -> Sequence[str] | None:
        keys: list[str] | None = self._arguments["keys"]
        return list(self.specs) if self._store.has_schema else keys

    def _taken_in(
        self, trajectories: TemporalDictTensor, index: int | None = None
    ) -> tuple[Store, Incoming]:
        known, schema = self._known_keys(), self._store.schema
        infos = ingest.infos_of(
            trajectories,
            schema.infos if self._store.has_schema else self._info_keys,
            are_exact=self._store.has_schema,
        )
        if known is not None:
            known = [key for key in known if key not in infos]
        specs = ingest.specs_of(trajectories, known)
        specs |= {key: ingest.spec_of(key, tensor) for key, tensor in infos.items()}
        store = self._store_for(specs, "the trajectories", tuple(infos))
        # Stacks that were only recognised may have been changed by another wrapper.
        is_strict = self._frame_stack is not None
        tails = store.tails.get(index, {})
        return store, ingest.from_trajectories(
            trajectories, store.schema, tails, infos, is_strict=is_strict
        )

    def _store_for(
        self, specs: Mapping[str, TensorSpec], what: str, infos: tuple[str, ...] = ()
    ) -> Store:
        """The store for transitions, a new one for the first ones: they decide what it holds."""
        if self._store.has_schema:
            self._store.schema.check(specs, what)
            return self._store
        taken = [key for key in RESULT_KEYS if key in specs]
        if taken:
            raise SpecError(f"{what} have the keys {taken}, which samples use", fix="rename them")
        schema = self._with_stacks(Schema.from_specs(specs))
        return self._new_store(replace(schema, infos=infos))

    def _with_stacks(self, schema: Schema) -> Schema:
        """The schema with those of its columns as stacks that are to be."""
        if self._frame_stack is not None:
            return replace(schema, stacks=stacks_of(self._frame_stack, schema))
        try:
            return replace(schema, stacks=stacks_of(self._n_stacked, schema))
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
        where, n_used = self._directory, sum(sizes.values())
        make_memory = partial(allocate, self._storage, directory=where, n_used=n_used)
        has_priorities = self._arguments["priority_exponent"] is not None
        return Store(schema, pool_size, n, make_memory, self._rules, with_priorities=has_priorities)

    def _distribute(
        self, store: Store, incoming: Incoming, sizes: NDArray, draws: Sequence[int | float]
    ) -> None:
        """Add pieces of these sizes to the sub-pools that ``routes`` draws."""
        each = np.repeat(routes(store.sub_pools, self._rules, sizes.tolist(), draws), sizes)
        for index in np.unique(each).tolist():
            part = incoming.part(np.flatnonzero(each == index))
            store.add(index, part, self._max_priority)


def _ends_in(store: Store, index: int, state: Mapping[str, NDArray]) -> bool:
    """Whether the newest transition of a sub-pool ended in a state.

    Args:
        store: The store.
        index: Number of the sub-pool.
        state: Values by key, others than those of the state among them.
    """
    newest = store.sub_pools.rows_of(np.array([index]), store.sub_pools.numbers[[index], 1] - 1)
    stored = store.take(newest) | store.take_after(newest)
    is_same = [
        stored[after].tobytes() == state[key].astype(stored[after].dtype).tobytes()
        for key in state.keys() & stored.keys()
        if (after := successor_key(key)) in stored
    ]
    return bool(is_same) and all(is_same)
