"""Samples, n-step returns and sequences, drawn from the transitions that are stored."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.rows import listed
from rlpool.data.specs import TensorSpec, refuse_missing
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import NotEnoughDataError, SpecError, UsageError
from rlpool.machine.arguments import real_number, whole_number
from rlpool.pool.priorities import PriorityTree
from rlpool.pool.store import Store
from rlpool.pool.transition import DONE_KEY, REWARD_KEY, TERMINATED_KEY, TRUNCATED_KEY

INDEX_KEY, WEIGHT_KEY = "index", "weight"
RETURN_KEY, DISCOUNT_KEY = "n_step_return", "n_step_discount"
RESULT_KEYS = (INDEX_KEY, WEIGHT_KEY, RETURN_KEY, DISCOUNT_KEY)
_LONGEST = 2**31  # steps: more than any episode has, small enough for int64 row numbers

_T = TypeVar("_T")


class Sampler:
    """Draws transitions and sequences from a store; changes nothing but its random generator.

    Transitions are drawn and read by their rows in the store. Where there is only one sub-pool,
    rows past the end stand for those at the beginning, which costs nothing.

    Args:
        store: The store.
        seed: Seed of the generator, ``None`` for fresh entropy.
    """

    def __init__(self, store: Store, seed: int | Sequence[int] | None) -> None:
        self._store = store
        self._n_sub_pools = len(store.sub_pools)
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._pid = os.getpid()

    def __copy__(self, *_: Any) -> NoReturn:
        raise UsageError(
            "a pool is not copied: its copy would read the same memory, or need as much again",
            fix="transitions() copies what it holds, load_state_dict(other.state_dict()) all of it",
        )

    __deepcopy__ = __copy__

    # What there is ---------------------------------------------------------------------------

    def __len__(self) -> int:
        """Transitions that there are."""
        return len(self._store)

    @property
    def lengths(self) -> list[int]:
        """Transitions that each sub-pool holds."""
        return self._store.sub_pools.lengths

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Key to shape and dtype of a transition; empty before the first one was added."""
        return self._store.schema.specs

    def transitions(self, keys: Sequence[str] | None = None) -> DictTensor:
        """All transitions, sub-pool by sub-pool, the oldest of each first.

        Args:
            keys: Which keys, by default all.

        Returns:
            ``[len(pool), ...]``, copies.

        Raises:
            SpecError: For a key that is not stored.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> pool.transitions(["frame", "_done"])["_done"]
            tensor([False, False, False,  True])
        """
        if not self._store.has_schema:
            return DictTensor()
        known, store = self.specs, self._store
        wanted = list(known) if keys is None else listed(keys, str, "keys")
        refuse_missing("the pool", known, wanted, "choose among its keys")

        def look() -> dict[str, NDArray]:
            rows = store.sub_pools.rows()
            return store.take(rows, wanted) | store.take_after(rows, wanted)

        arrays = self._unchanged(look)
        return DictTensor({key: torch.from_numpy(arrays[key]) for key in wanted})

    # Drawing ---------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int,
        *,
        n_step: int | None = None,
        discount: float = 0.99,
        beta: float = 0.4,
    ) -> DictTensor:
        """Draw transitions with replacement, uniformly or in proportion to their priorities.

        Args:
            batch_size: How many, at most as many as there are.
            n_step: Look so many steps ahead, or fewer where an episode, or what is stored of it,
                ends before: at the edge of a window, too, since windows are not joined. Keys with a
                leading ``_`` then have their value after the last of these steps, except
                ``_reward``. The result also has ``n_step_return``, the discounted sum of the
                rewards of these steps, and ``n_step_discount``, the factor for the value of what
                comes after, both float32 ``[batch_size]``. The factor is
                ``discount ** steps``, or 0 after a termination (``_terminated``, or where that is
                not stored ``_done`` without ``_truncated``). After a truncation, which is no
                termination, the value of the last observation counts.
            discount: Discount per step, for ``n_step``.
            beta: Exponent of the importance weights, for a pool with priorities: 1 corrects
                the bias of sampling by priority in full.

        Returns:
            Every key of a transition ``[batch_size, ...]``, copies. With priorities also ``index``,
            int64, for ``update_priorities``, and ``weight``, float32, at most 1.

        Raises:
            NotEnoughDataError: If there are fewer transitions.
            SpecError: If ``n_step`` is given and no ``_reward`` is stored, or ``n_step`` is above 1
                and the ends of some episodes are not known, see ``Pool.extend``.

        Reference:
            Sutton, 1988, for n-step returns; Pardo et al., "Time Limits in Reinforcement Learning",
            ICML 2018, for truncation; Schaul et al., 2016, section 3.4 for the weights.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> batch = pool.sample(2, n_step=3, discount=0.5)
            >>> batch["frame"].shape, batch["n_step_return"].shape
            (torch.Size([2, 1]), torch.Size([2]))
        """
        whole_number("batch_size", batch_size, 1)
        if n_step is not None:
            n_step = whole_number("n_step", n_step, 1)

        def look() -> dict[str, NDArray]:
            store = self._store
            rows = last = self._draw(batch_size)
            batch = store.take(rows)
            if n_step is not None:
                last = self._look_ahead(batch, rows, n_step, discount)
                ahead = [key for key in store.columns if key.startswith("_") and key != REWARD_KEY]
                batch |= store.take(last, ahead)
            batch |= store.take_after(last)
            if store.tree is not None:
                batch[INDEX_KEY], batch[WEIGHT_KEY] = self._weights(store.tree, rows, beta)
            return batch

        batch = self._unchanged(look)
        return DictTensor._wrap({key: torch.from_numpy(array) for key, array in batch.items()})

    def sample_sequences(
        self, batch_size: int, length: int, *, beta: float = 0.4
    ) -> TemporalDictTensor:
        """Draw sequences of steps that followed each other in one episode, for recurrent learners.

        A sequence starts at a transition that is drawn as by ``sample``, and ends after ``length``
        steps, or earlier where its episode, or what is stored of it, ends. It never goes on in the
        next window, see ``extend``.

        Args:
            batch_size: How many, at most as many as there are transitions.
            length: Steps of the longest.
            beta: Exponent of the importance weights, for a pool with priorities.

        Returns:
            Every key ``[batch_size, length, ...]``, copies, zero-padded past ``lengths``; see
            ``mask()``. The agent's state that a sequence starts from is the first step of the
            state's keys. ``info`` has what ``info_keys`` of the pool names; with priorities also
            ``index`` and ``weight`` of the first steps.

        Raises:
            NotEnoughDataError: If there are fewer transitions.
            SpecError: If the ends of some episodes are not known, see ``Pool.extend``.

        Reference:
            Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning",
            ICLR 2019, for replaying from stored states.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> pool.sample_sequences(2, length=3)["frame"].shape
            torch.Size([2, 3, 1])
        """
        whole_number("batch_size", batch_size, 1)
        length = whole_number("length", length, 1)
        if length > _LONGEST:
            raise SpecError(f"length should be at most {_LONGEST}, got {length}")

        def look() -> tuple[dict[str, NDArray], NDArray, dict[str, NDArray]]:
            store = self._store
            first = self._draw(batch_size)
            rows, lengths = self._steps_from(first, length, "sequences")
            every = rows[np.arange(rows.shape[1]) < lengths[:, None]]
            arrays = store.take(every) | store.take_after(every)
            starts = np.cumsum(lengths) - lengths
            info = {key: arrays.pop(key)[starts] for key in store.schema.infos}
            if store.tree is not None:
                info[INDEX_KEY], info[WEIGHT_KEY] = self._weights(store.tree, first, beta)
            return arrays, lengths, info

        arrays, lengths, info = self._unchanged(look)
        is_step = np.arange(length) < lengths[:, None]
        return TemporalDictTensor(
            {key: _padded(array, is_step) for key, array in arrays.items()},
            torch.from_numpy(lengths),
            {key: torch.from_numpy(array) for key, array in info.items()},
        )

    def batches(
        self, batch_size: int, n_batches: int | None = None, **options: Any
    ) -> Iterator[DictTensor]:
        """An iterator over batches, each drawn on demand.

        Args:
            batch_size: Transitions per batch.
            n_batches: How many batches, ``None`` for no end.
            **options: As for ``sample``.

        Example:
            >>> pool = Pool(pool_size=1000, seed=0)
            >>> for step in range(4):
            ...     pool([step], 0, [step + 1], 1.0, step == 3)
            >>> [batch["frame"].shape for batch in pool.batches(3, n_batches=2)]
            [torch.Size([3, 1]), torch.Size([3, 1])]
        """
        if n_batches is not None:
            whole_number("n_batches", n_batches, 0)
        for _ in itertools.count() if n_batches is None else range(n_batches):
            yield self.sample(batch_size, **options)

    # Rows ------------------------------------------------------------------------------------

    def _unchanged(self, look: Callable[[], _T]) -> _T:
        """The result of ``look``, during which no transition changes; may call it again."""
        if self._store.is_writer:
            return look()
        if self._pid != os.getpid():  # forked: not the draws of its siblings and its parent
            self._pid = os.getpid()
            self._generator = np.random.Generator(np.random.PCG64())
        return self._store.version.read(look)

    def _draw(self, n: int) -> NDArray:
        """Rows of transitions, int64 ``[n]``."""
        store = self._store
        if len(store) < n:
            raise NotEnoughDataError(
                f"{n} transitions were asked for, but there are {len(store)}",
                fix="add more before sampling, or ask for a smaller batch",
            )
        if store.tree is not None:
            if store.tree.total <= 0:
                raise UsageError(
                    "all priorities are zero, so that nothing can be drawn",
                    fix="add a small constant to the priorities",
                )
            return store.tree.draw(n, self._generator)
        lengths = self.lengths
        # Half the time of generator.integers, and uniform up to one part in 2**53 / len(store).
        # The product is always below the total.
        places = self._generator.random(n)
        places *= sum(lengths)
        rows = places.astype(np.int64)
        if len(lengths) == 1:
            sub_pool = store.sub_pools[0]
            if lengths[0] < sub_pool.capacity:  # otherwise any row will do
                rows += sub_pool.place(sub_pool.oldest)
            return rows
        ends = np.cumsum(lengths)
        index = np.searchsorted(ends, rows, side="right")
        numbers = rows - (ends - lengths)[index] + store.sub_pools.numbers[index, 0]
        return store.sub_pools.rows_of(index, numbers)

    def _steps_from(self, first: NDArray, most: int, what: str) -> tuple[NDArray, NDArray]:
        """Steps that follow each other in an episode.

        Args:
            first: Rows of the first ones, int64 ``[n]``.
            most: The most steps to look at; there may be fewer transitions.
            what: What errors call them.

        Returns:
            Rows ``[n, most]``, and how many of each are steps of one episode, at least 1.
        """
        if most > 1:
            _refuse_untold(self._store, what)
        rows = self._store.sub_pools.ahead(first[:, None], np.arange(min(most, max(self.lengths))))
        # The newest transition is a last one, so this never leaves what is stored.
        is_last = self._store.is_last.take(rows, mode="wrap")
        is_last[:, -1] = True
        return rows, is_last.argmax(axis=1) + 1

    def _look_ahead(
        self, batch: dict[str, NDArray], rows: NDArray, n_step: int, discount: float
    ) -> NDArray:
        """Add the returns of some steps; gives the rows of the last of these steps."""
        store = self._store
        end = TERMINATED_KEY if TERMINATED_KEY in store.columns else DONE_KEY
        for key in (REWARD_KEY, end):
            if key not in store.columns or np.prod(store.schema.columns[key].shape) != 1:
                raise SpecError(
                    f"n_step needs one number per step under {key!r}, "
                    f"{key!r} is {store.schema.columns.get(key, 'missing')}",
                    fix="store it",
                )
        discount = real_number("discount", discount, "from 0 to 1")
        every, n_steps = self._steps_from(rows, n_step, "n-step returns")
        ahead = np.arange(every.shape[1])
        rewards = store.take(every.reshape(-1), [REWARD_KEY])[REWARD_KEY].reshape(every.shape)
        discounted = rewards * np.float64(discount) ** ahead
        returns = np.where(ahead < n_steps[:, None], discounted, 0).sum(axis=1)
        last: NDArray = every[np.arange(len(rows)), n_steps - 1]
        flags = store.take(last, [end, TRUNCATED_KEY])
        is_end = flags[end].astype(bool).reshape(-1)
        if end == DONE_KEY and TRUNCATED_KEY in flags:
            is_end &= ~flags[TRUNCATED_KEY].astype(bool).reshape(-1)
        discounts = np.where(is_end, 0, np.float64(discount) ** n_steps)
        batch[RETURN_KEY] = returns.astype(np.float32)
        batch[DISCOUNT_KEY] = discounts.astype(np.float32)
        return last

    def _weights(self, tree: PriorityTree, rows: NDArray, beta: float) -> tuple[NDArray, NDArray]:
        """Index and importance weight of rows, relative to the largest weight among them."""
        store = self._store
        beta = real_number("beta", beta, "from 0 on, and finite")
        index, numbers = store.sub_pools.transitions_at(rows)
        priorities = tree.leaves.take(rows)
        weights = (priorities.min() / priorities) ** beta
        return numbers * self._n_sub_pools + index, weights.astype(np.float32)


def _refuse_untold(store: Store, what: str) -> None:
    """Refuse what would cross from one episode into another."""
    if store.is_untold[0]:
        has_half = TERMINATED_KEY in store.columns
        missing = TRUNCATED_KEY if has_half else DONE_KEY
        raise SpecError(
            f"{what} need to know where episodes end, and some trajectories did not tell where "
            f"they end within a row: they had no {missing!r}",
            fix=f"clear() the pool, and extend() it with trajectories that have {missing!r}"
            + (f" next to {TERMINATED_KEY!r}" if has_half else ""),
        )


def _padded(values: NDArray, is_step: NDArray) -> torch.Tensor:
    """Values of steps at their places ``[B, T, ...]``, zeros elsewhere."""
    # In the order of the axes in memory, which is another one where stacks were put together.
    order = [0, *sorted(range(1, values.ndim), key=lambda axis: -values.strides[axis])]
    lying = values.transpose(order)
    padded = np.zeros((*is_step.shape, *lying.shape[1:]), values.dtype)
    padded[is_step] = lying
    back = [0, 1, *(order.index(axis) + 1 for axis in range(1, values.ndim))]
    return torch.from_numpy(padded.transpose(back))
