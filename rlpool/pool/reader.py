"""What can be drawn from the transitions that are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from rlpool.batch.batcher_base import check_count
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.named_tensors import listed_keys
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import NotEnoughDataError, SpecError, UsageError
from rlpool.memory.storage import Array
from rlpool.pool.intake import Schema
from rlpool.pool.priorities import PriorityTree
from rlpool.pool.ring import Ring
from rlpool.pool.row_store import RowStore
from rlpool.slots.blocks import successor_key
from rlpool.specs import TensorSpec

INDEX_KEY = "index"
WEIGHT_KEY = "weight"
RETURN_KEY = "n_step_return"
DISCOUNT_KEY = "n_step_discount"
RESULT_KEYS = (INDEX_KEY, WEIGHT_KEY, RETURN_KEY, DISCOUNT_KEY)
_LONGEST = 2**31  # steps: more than any pool's episode has, small enough for int64 row numbers
_MOST = float(np.finfo(np.float64).max)
_REWARD, _DONE = "_reward", "_done"
_TERMINATED, _TRUNCATED = "_terminated", "_truncated"

_T = TypeVar("_T")


class TransitionReader(ABC):
    """Draws transitions and sequences; changes nothing but its random generator.

    Not for use by several threads at once.

    Transitions are drawn and read by their rows in the store. Where there is only one sub-pool,
    rows past the end stand for those at the beginning: the store's business, and cheaper there.
    """

    def __init__(self, rings: Sequence[Ring], seed: int | Sequence[int]) -> None:
        self._rings = list(rings)
        self._offsets = np.array([ring.offset for ring in rings], np.int64)
        self._capacities = np.array([ring.capacity for ring in rings], np.int64)
        self._schema: Schema | None = None
        self._store: RowStore | None = None
        self._tree: PriorityTree | None = None
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def __copy__(self) -> NoReturn:
        raise UsageError(
            f"a {type(self).__name__} is not copied: it would read the same memory, or need as "
            "much again",
            fix="transitions() copies what it holds; Pool(...).load_state_dict("
            "pool.state_dict()) makes another pool of it",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__copy__()

    # What there is ---------------------------------------------------------------------------

    def __len__(self) -> int:
        """Transitions that are held."""
        return sum(map(len, self._rings))

    @property
    def lengths(self) -> list[int]:
        """Transitions that each sub-pool holds."""
        return [len(ring) for ring in self._rings]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Key to shape and dtype of a transition; empty before the first one was added."""
        return {} if self._schema is None else self._schema.specs

    def transitions(self, keys: Sequence[str] | None = None) -> DictTensor:
        """All transitions, sub-pool by sub-pool, the oldest of each first.

        Args:
            keys: Which keys, by default all.

        Returns:
            ``[len(pool), ...]``, copies.

        Raises:
            SpecError: For a key that is not stored.
        """
        return self._unchanged(lambda: self._transitions(keys))

    def _transitions(self, keys: Sequence[str] | None) -> DictTensor:
        if self._store is None:
            return DictTensor()
        keys = None if keys is None else listed_keys(keys)
        store, known = self._store, self.specs
        unknown = [key for key in keys or () if key not in known]
        if unknown:
            raise SpecError(f"the pool has no {unknown}, it has {list(known)}")
        parts = [ring.rows(np.arange(ring.oldest, ring.next)) for ring in self._rings]
        rows = np.concatenate(parts)
        wanted = list(known if keys is None else keys)
        paired = [key for key in store.paired if successor_key(key) in wanted]
        arrays = store.take_after(paired, rows, self._ahead(rows, 1))
        arrays |= {key: store.take(key, rows) for key in wanted if key in store.specs}
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
                ends before. Keys with a leading ``_`` then have their value after the last of these
                steps, but for ``_reward``; and there are ``n_step_return``, the discounted sum of
                the rewards of these steps, and ``n_step_discount``, the factor for the value of
                what comes after, both float32 ``[batch_size]``. The factor is
                ``discount ** steps``, or 0 after a termination (``_terminated``, or where that is
                not stored ``_done`` without ``_truncated``); after a truncation, which is none,
                the value of the last observation counts.
            discount: Discount per step, for ``n_step``.
            beta: Exponent of the importance weights, for a pool with priorities: 1 corrects
                the bias of sampling by priority in full.

        Returns:
            Every key of a transition ``[batch_size, ...]``, copies. With priorities also ``index``,
            int64, for ``update_priorities``, and ``weight``, float32, at most 1.

        Raises:
            NotEnoughDataError: If there are fewer transitions.
            SpecError: If ``n_step`` is asked for and no ``_reward`` is stored.

        Reference:
            Sutton, 1988, for n-step returns; Pardo et al., "Time Limits in Reinforcement Learning",
            ICML 2018, for truncation; Schaul et al., 2016, section 3.4 for the weights.
        """
        check_count("batch_size", batch_size, 1)
        if n_step is not None:
            check_count("n_step", n_step, 1)
            n_step = int(n_step)
        return self._unchanged(lambda: self._sample(batch_size, n_step, discount, beta))

    def _sample(
        self, batch_size: int, n_step: int | None, discount: float, beta: float
    ) -> DictTensor:
        store = self._ready(batch_size)
        rows = last = self._draw(batch_size)
        batch = store.take_all(rows)
        if n_step is not None:
            last = self._look_ahead(batch, rows, n_step, discount)
            for key in store.specs:
                if key.startswith("_") and key != _REWARD:
                    batch[key] = store.take(key, last)
        if store.paired:
            batch |= store.take_after(store.paired, last, self._ahead(last, 1))
        if self._tree is not None:
            batch[INDEX_KEY], batch[WEIGHT_KEY] = self._weights(self._tree, rows, beta)
        return DictTensor._wrap({key: torch.from_numpy(array) for key, array in batch.items()})

    def sample_sequences(
        self, batch_size: int, length: int, *, beta: float = 0.4
    ) -> TemporalDictTensor:
        """Draw sequences of steps that followed each other in one episode, for recurrent learners.

        A sequence starts at a transition that is drawn as by ``sample``, and ends after ``length``
        steps, or earlier where its episode, or what is stored of it, ends.

        Args:
            batch_size: How many, at most as many as there are transitions.
            length: Steps of the longest.
            beta: Exponent of the importance weights, for a pool with priorities.

        Returns:
            Every key ``[batch_size, length, ...]``, copies, zero past the ``lengths`` of which
            ``mask()`` tells. The agent's state that a sequence starts from is the first step of the
            state's keys. With priorities ``info`` has ``index`` and ``weight`` of the first steps.

        Raises:
            NotEnoughDataError: If there are fewer transitions.

        Reference:
            Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning",
            ICLR 2019, for replaying from stored states.
        """
        check_count("batch_size", batch_size, 1)
        check_count("length", length, 1)
        if length > _LONGEST:
            raise SpecError(f"length should be at most {_LONGEST}, got {length}")
        return self._unchanged(lambda: self._sample_sequences(batch_size, int(length), beta))

    def _sample_sequences(self, batch_size: int, length: int, beta: float) -> TemporalDictTensor:
        store = self._ready(batch_size)
        first = self._draw(batch_size)
        n_steps = min(length, max(self.lengths))  # there are no more
        rows = self._ahead(first[:, None], np.arange(n_steps))
        lengths = self._steps_that_follow(rows)
        is_step = np.arange(length) < lengths[:, None]
        every = rows[is_step[:, :n_steps]]
        arrays = store.take_all(every)
        if store.paired:
            arrays |= store.take_after(store.paired, every, self._ahead(every, 1))
        tensors = {key: _padded(array, is_step) for key, array in arrays.items()}
        info = {}
        if self._tree is not None:
            index, weight = self._weights(self._tree, first, beta)
            info = {INDEX_KEY: torch.from_numpy(index), WEIGHT_KEY: torch.from_numpy(weight)}
        return TemporalDictTensor(tensors, torch.from_numpy(lengths), info)

    def batches(
        self, batch_size: int, n_batches: int | None = None, **options: Any
    ) -> Iterator[DictTensor]:
        """Batches one after the other, each drawn when it is asked for.

        Args:
            batch_size: Transitions per batch.
            n_batches: How many batches, ``None`` for no end.
            **options: As for ``sample``.
        """
        if n_batches is not None:
            check_count("n_batches", n_batches, 0)
        n_given = 0
        while n_batches is None or n_given < n_batches:
            yield self.sample(batch_size, **options)
            n_given += 1

    @abstractmethod
    def _unchanged(self, look: Callable[[], _T]) -> _T:
        """The result of looking at transitions while none of them changes."""

    # Where transitions are -------------------------------------------------------------------

    def _ready(self, batch_size: int) -> RowStore:
        if self._store is None or len(self) < batch_size:
            raise NotEnoughDataError(
                f"{batch_size} transitions were asked for, but there are {len(self)}",
                fix="add more before sampling, or ask for a smaller batch",
            )
        return self._store

    def _draw(self, n: int) -> Array:
        """Rows of transitions, int64 ``[n]``."""
        if self._tree is not None:
            return self._draw_by_priority(self._tree, n)
        if len(self._rings) == 1:
            ring = self._rings[0]
            n_held = len(ring)
            rows = self._places(n, n_held)
            if n_held < ring.capacity:  # otherwise any row will do
                rows += ring.oldest % ring.capacity
            return rows
        ends = np.cumsum(self.lengths)
        places = self._places(n, int(ends[-1]))
        rings = np.searchsorted(ends, places, side="right")
        oldest = np.array([ring.oldest for ring in self._rings])
        shifts = oldest - (ends - self.lengths)  # from places to numbers within a sub-pool
        rows = self._offsets[rings] + (places + shifts[rings]) % self._capacities[rings]
        return rows

    def _places(self, n: int, stop: int) -> Array:
        """Numbers from 0 to ``stop - 1``, int64 ``[n]``."""
        # Half the time of generator.integers. What is not quite uniform about it is one part in
        # 2**53 / stop, and the product is always below stop.
        places = self._generator.random(n)
        places *= stop
        return places.astype(np.int64)

    def _draw_by_priority(self, tree: PriorityTree, n: int) -> Array:
        if tree.total <= 0:
            raise UsageError(
                "all priorities are zero, so that nothing can be drawn",
                fix="add a small constant to the priorities",
            )
        return tree.draw(n, self._generator)

    def _ahead(self, rows: Array, n_steps: int | Array) -> Array:
        """Rows so many places behind others, of the same sub-pool."""
        if len(self._rings) == 1:
            return rows + n_steps
        rings = self._rings_of(rows)
        offsets = self._offsets[rings]
        ahead: Array = offsets + (rows - offsets + n_steps) % self._capacities[rings]
        return ahead

    def _rings_of(self, rows: Array) -> Array | int:
        """The sub-pool of each row."""
        if len(self._rings) == 1:
            return 0
        rings: Array = np.searchsorted(self._offsets, rows, side="right") - 1
        return rings

    def _steps_that_follow(self, rows: Array) -> Array:
        """How many of the rows ``[n, most]`` are steps of one episode, int64 ``[n]``, at least 1.

        Args:
            rows: Rows behind each other. Those past the newest transition mean nothing.
        """
        # The newest transition is a last one, so this never leaves what is stored.
        is_last = self._ready(1).is_last.take(rows, mode="wrap")
        is_last[:, -1] = True
        lengths: Array = is_last.argmax(axis=1) + 1
        return lengths

    # n steps ---------------------------------------------------------------------------------

    def _look_ahead(
        self, batch: dict[str, Array], rows: Array, n_step: int, discount: float
    ) -> Array:
        """Add the returns of some steps; gives the rows of the last of these steps."""
        store = self._ready(1)
        end = _TERMINATED if _TERMINATED in store.specs else _DONE
        for key in (_REWARD, end):
            if key not in store.specs:
                raise SpecError(
                    f"n_step needs the key {key!r}, which is not stored", fix="store it"
                )
            if np.prod(store.specs[key].shape) != 1:
                raise SpecError(
                    f"n_step needs one number per step, {key!r} is {store.specs[key]}",
                    fix="store one number",
                )
        check_number("discount", discount, 1)
        n_step = min(n_step, max(self.lengths))  # there are no more
        every = self._ahead(rows[:, None], np.arange(n_step))
        n_steps = self._steps_that_follow(every)
        factors = np.float64(discount) ** np.arange(n_step)
        rewards = store.take(_REWARD, every.reshape(-1)).reshape(every.shape)
        is_step = np.arange(n_step) < n_steps[:, None]
        batch[RETURN_KEY] = np.where(is_step, rewards * factors, 0).sum(axis=1).astype(np.float32)
        last: Array = every[np.arange(len(rows)), n_steps - 1]
        is_end = store.take(end, last).astype(bool).reshape(-1)
        if end == _DONE and _TRUNCATED in store.specs:
            is_end &= ~store.take(_TRUNCATED, last).astype(bool).reshape(-1)
        batch[DISCOUNT_KEY] = np.where(is_end, 0, np.float64(discount) ** n_steps).astype(
            np.float32
        )
        return last

    # Priorities ------------------------------------------------------------------------------

    def _weights(self, tree: PriorityTree, rows: Array, beta: float) -> tuple[Array, Array]:
        """Index and importance weight of rows, relative to the largest weight among them."""
        check_number("beta", beta, np.inf)
        rings = self._rings_of(rows)
        # The number of a row: the one that lies there, at most a capacity before the next one.
        newest = np.array([ring.next for ring in self._rings])[rings] - 1
        numbers = newest - (newest - (rows - self._offsets[rings])) % self._capacities[rings]
        priorities = tree.leaves.take(rows)
        weights = (priorities.min() / priorities) ** beta
        return numbers * len(self._rings) + rings, weights.astype(np.float32)


def check_number(name: str, value: Any, most: float) -> None:
    """Refuse what is not a finite number from 0 to ``most``."""
    if not isinstance(value, Real) or not 0 <= float(value) <= min(most, _MOST):
        limits = "of at least 0" if most == np.inf else f"from 0 to {most:g}"
        raise SpecError(f"{name} should be a finite number {limits}, got {value!r}")


def _padded(values: Array, is_step: Array) -> torch.Tensor:
    """Values of steps at their places ``[B, T, ...]``, zeros elsewhere."""
    padded = np.zeros((*is_step.shape, *values.shape[1:]), values.dtype)
    padded[is_step] = values
    return torch.from_numpy(padded)
