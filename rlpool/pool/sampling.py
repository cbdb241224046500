"""Samples, n-step returns and sequences, drawn from the transitions of a store.

Transitions are drawn and read by their rows in the store. With a single sub-pool, rows past the end
wrap around to the beginning.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import NotEnoughDataError, SpecError, UsageError
from rlpool.machine.arguments import real_number, whole_number
from rlpool.pool.ingest import DONE_KEY, REWARD_KEY, TRUNCATED_KEY
from rlpool.pool.store import Store

INDEX_KEY, WEIGHT_KEY = "index", "weight"
RETURN_KEY, DISCOUNT_KEY = "n_step_return", "n_step_discount"
RESULT_KEYS = (INDEX_KEY, WEIGHT_KEY, RETURN_KEY, DISCOUNT_KEY)
_LOG = logging.getLogger("rlpool")
_TOO_SHORT = (
    "n_step is %d, but rows of %d steps in the pool end within an episode, and so do the returns: "
    "keep the info of a Batcher's windows, which joins them, or add longer rows"
)
_LONGEST = 2**31  # steps: longer than any episode, small enough for int64 row numbers


def sample(
    store: Store,
    generator: np.random.Generator,
    batch_size: int,
    n_step: int | None,
    discount: float,
    beta: float,
) -> DictTensor:
    """Draw transitions, for ``Pool.sample``."""
    whole_number("batch_size", batch_size, 1)
    if n_step is not None:
        n_step = whole_number("n_step", n_step, 1)
    rows = last = _draw(store, generator, batch_size)
    batch = store.take(rows)
    if n_step is not None:
        last = _look_ahead(store, batch, rows, n_step, discount)
        ahead = [key for key in store.columns if key.startswith("_") and key != REWARD_KEY]
        batch |= store.take(last, ahead)
    batch |= store.take_after(last)
    if store.tree is not None:
        batch |= _weights(store, rows, beta)
    return DictTensor._wrap({key: torch.from_numpy(array) for key, array in batch.items()})


def sample_sequences(
    store: Store, generator: np.random.Generator, batch_size: int, length: int, beta: float
) -> TemporalDictTensor:
    """Draw sequences, for ``Pool.sample_sequences``."""
    whole_number("batch_size", batch_size, 1)
    length = whole_number("length", length, 1)
    if length > _LONGEST:
        raise SpecError(f"length should be at most {_LONGEST}, got {length}")
    first = _draw(store, generator, batch_size)
    rows, lengths = _steps_from(store, first, length, "sequences")
    is_step = np.arange(length) < lengths[:, None]
    every = rows[is_step[:, : rows.shape[1]]]
    arrays = store.take(every) | store.take_after(every)
    starts = np.cumsum(lengths) - lengths
    info = {key: arrays.pop(key)[starts] for key in store.schema.infos}
    if store.tree is not None:
        info |= _weights(store, first, beta)
    return TemporalDictTensor(
        {key: _padded(array, is_step) for key, array in arrays.items()},
        torch.from_numpy(lengths),
        {key: torch.from_numpy(array) for key, array in info.items()},
    )


def _draw(store: Store, generator: np.random.Generator, n: int) -> NDArray:
    """Draw rows of transitions, int64 ``[n]``."""
    if len(store) < n:
        raise NotEnoughDataError(
            f"{n} transitions were requested, but there are {len(store)}",
            fix="add more before sampling, or request a smaller batch",
        )
    if store.tree is not None:
        if store.tree.total <= 0:
            raise UsageError(
                "cannot sample: all priorities are zero",
                fix="add a small constant to the priorities",
            )
        return generator.permutation(store.tree.draw(n, generator))
    lengths = store.sub_pools.lengths
    # Half the time of generator.integers, and uniform up to one part in 2**53 / len(store). The
    # product is always below the total.
    places = generator.random(n)
    places *= sum(lengths)
    rows = places.astype(np.int64)
    if len(lengths) == 1:
        sub_pool = store.sub_pools[0]
        rows += sub_pool.place(sub_pool.oldest)
        return rows
    ends = np.cumsum(lengths)
    index = np.searchsorted(ends, rows, side="right")
    numbers = rows - (ends - lengths)[index] + store.sub_pools.numbers[index, 0]
    return store.sub_pools.rows_of(index, numbers)


def _steps_from(store: Store, first: NDArray, most: int, name: str) -> tuple[NDArray, NDArray]:
    """Find consecutive steps of an episode.

    Args:
        store: The store.
        first: Rows of the first steps, int64 ``[n]``.
        most: Maximum number of steps, which may exceed the number of transitions.
        name: Name of the samples in errors.

    Returns:
        Rows ``[n, most]``, and the number of steps of one episode in each, at least 1.
    """
    if most > 1:
        missing = TRUNCATED_KEY if store.terminal_known else DONE_KEY
        _check_known(store.ends_known, name, missing)
    ahead = np.arange(min(most, len(store)))
    rows = store.sub_pools.ahead(first[:, None], ahead)
    # The newest transition is a last one, so this never leaves the stored rows.
    is_last = store.is_last.take(rows, mode="wrap")
    is_last[:, -1] = True
    lengths = is_last.argmax(axis=1) + 1
    joined = np.arange(len(first))
    while store.has_followers:
        joined = joined[lengths[joined] < len(ahead)]
        followers = store.followers(rows[joined, lengths[joined] - 1])
        joined, followers = joined[followers >= 0], followers[followers >= 0]
        if not joined.size:
            break
        n_ahead = ahead - lengths[joined, None]
        more = store.sub_pools.ahead(followers[:, None], n_ahead)
        rows[joined] = np.where(n_ahead >= 0, more, rows[joined])
        is_last = (n_ahead >= 0) & store.is_last.take(more, mode="wrap")
        is_last[:, -1] = True
        lengths[joined] = is_last.argmax(axis=1) + 1
    return rows, lengths


def _look_ahead(
    store: Store, batch: dict[str, NDArray], rows: NDArray, n_step: int, discount: float
) -> NDArray:
    """Add the n-step returns, and return the rows of the last steps."""
    spec = store.schema.columns.get(REWARD_KEY)
    if spec is None or np.prod(spec.shape) != 1:
        message = f"n_step needs one number per step, {REWARD_KEY!r} is {spec or 'missing'}"
        raise SpecError(message, fix="store it")
    _check_known(store.terminal_known, "n-step returns", DONE_KEY)
    if 0 < store.shortest_cut < n_step:
        _LOG.warning(_TOO_SHORT, n_step, store.shortest_cut)
        store.shortest_cut = 0
    discount = real_number("discount", discount, "from 0 to 1")
    every, n_steps = _steps_from(store, rows, n_step, "n-step returns")
    ahead = np.arange(every.shape[1])
    rewards = store.take(every.reshape(-1), [REWARD_KEY])[REWARD_KEY].reshape(every.shape)
    discounted = rewards * np.float64(discount) ** ahead
    returns = np.where(ahead < n_steps[:, None], discounted, 0).sum(axis=1)
    last: NDArray = every[np.arange(len(rows)), n_steps - 1]
    is_terminal = store.is_terminal.take(last, mode="wrap")
    discounts = np.where(is_terminal, 0, np.float64(discount) ** n_steps)
    batch[RETURN_KEY] = returns.astype(np.float32)
    batch[DISCOUNT_KEY] = discounts.astype(np.float32)
    return last


def _weights(store: Store, rows: NDArray, beta: float) -> dict[str, NDArray]:
    """Return index and importance weight of rows, relative to their largest weight."""
    tree: Any = store.tree
    beta = real_number("beta", beta, "from 0 on, and finite")
    index, numbers = store.sub_pools.transitions_at(rows)
    priorities = tree.leaves.take(rows)
    weights = (priorities.min() / priorities) ** beta
    return {
        INDEX_KEY: numbers * len(store.sub_pools) + index,
        WEIGHT_KEY: weights.astype(np.float32),
    }


def _check_known(is_known: bool, name: str, missing: str) -> None:
    """Refuse samples that need unknown ends or terminations of episodes."""
    if not is_known:
        raise SpecError(
            f"{name} need the ends of episodes, but some trajectories had no {missing!r}",
            fix=f"clear() the pool, and extend() it with trajectories that have {missing!r}",
        )


def _padded(values: NDArray, is_step: NDArray) -> torch.Tensor:
    """Scatter values of steps to ``[B, T, ...]``, zeros elsewhere."""
    padded = np.zeros((*is_step.shape, *values.shape[1:]), values.dtype)
    padded[is_step] = values
    return torch.from_numpy(padded)
