"""What users write between brackets: reading an index and resolving its parts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import torch

from rlpool.errors import compose

Indices: TypeAlias = np.ndarray[Any, Any]

# The index of one dimension. Masks have become index arrays.
Part: TypeAlias = "int | slice | Indices"

EVERYTHING = slice(None)


def read_key(key: Any, shape: tuple[int, ...]) -> list[Part]:
    """One part for each dimension of a view.

    Raises:
        IndexError: If the key is no index for it.
    """
    entries = [_entry(entry) for entry in (key if isinstance(key, tuple) else (key,))]
    if not shape and len(entries) == 1 and isinstance(entries[0], slice):
        entries = [...] if entries[0] == EVERYTHING else entries  # [:] is all, of an element too
    n_named = sum(_n_dims(entry) for entry in entries if entry is not Ellipsis)
    n_ellipses = sum(entry is Ellipsis for entry in entries)
    if n_ellipses > 1:
        raise IndexError("an index can have only one ellipsis ('...')")
    if n_named > len(shape):
        raise IndexError(
            f"too many indices: the array has {len(shape)} dimensions, {n_named} were indexed"
        )
    if not n_ellipses:
        entries.append(Ellipsis)
    parts: list[Part] = []
    for entry in entries:
        if isinstance(entry, EllipsisType):
            parts.extend([EVERYTHING] * (len(shape) - n_named))
        elif isinstance(entry, np.ndarray) and entry.dtype == np.bool_:
            parts.extend(_selected(entry, shape[len(parts) : len(parts) + entry.ndim]))
        else:
            parts.append(entry)
    return parts


def _n_dims(entry: Part | EllipsisType) -> int:
    """How many dimensions an entry stands for."""
    return entry.ndim if isinstance(entry, np.ndarray) and entry.dtype == np.bool_ else 1


def _selected(mask: Indices, shape: tuple[int, ...]) -> tuple[Indices, ...]:
    if mask.shape != shape:
        raise IndexError(
            f"a mask of shape {mask.shape} cannot select from dimensions of shape {shape}"
        )
    return mask.nonzero()


def _entry(entry: Any) -> Part | EllipsisType:
    """An int, a slice of ints, an array of ints or bools, or an ellipsis."""
    if entry is None:
        raise IndexError(
            compose(
                "a view cannot get new dimensions (None, np.newaxis)",
                fix="index what to_ndarray() or to_tensor() returns",
            )
        )
    if isinstance(entry, EllipsisType):
        return entry
    if isinstance(entry, slice):
        start, stop, step = (_bound(bound) for bound in (entry.start, entry.stop, entry.step))
        if step == 0:
            raise ValueError("the step of a slice cannot be zero")
        return slice(start, stop, step)
    if isinstance(entry, torch.Tensor):
        try:
            entry = as_numpy(entry)
        except (TypeError, RuntimeError) as error:
            raise IndexError(f"NumPy cannot take this tensor: {error}") from error
    elif not isinstance(entry, bool | np.bool_) and not hasattr(entry, "__array__"):
        try:
            return operator.index(entry)
        except TypeError:
            pass
    return _index_array(entry)


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's values; TypeError or RuntimeError for a sparse tensor, or one without values."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    array: np.ndarray[Any, Any] = (
        values.float() if values.dtype == torch.bfloat16 else values
    ).numpy()
    return array


def _bound(bound: Any) -> int | None:
    try:
        return None if bound is None else operator.index(bound)
    except (TypeError, RuntimeError):
        raise IndexError(f"a slice needs ints or None, not {bound!r}") from None


def _index_array(entry: Any) -> int | Indices:
    try:
        array = np.asarray(entry)
    except ValueError:
        array = np.empty((), object)
    if not array.size and not hasattr(entry, "__array__"):
        array = array.astype(np.int64)  # an empty list is one of floats to NumPy
    if array.dtype.kind in "iu":
        return int(array) if not array.ndim else array.astype(np.int64, copy=False)
    if array.dtype == np.bool_ and array.ndim:
        return array
    raise IndexError(
        compose(
            f"{type(entry).__name__} {str(entry)[:60]!r} is no index",
            fix="index with ints, slices, '...', arrays of ints or masks, or a tuple of these",
        )
    )


# Resolving a part


def for_numpy(part: Part, offset: int = 0) -> Part:
    """A part as NumPy takes it, ``offset`` further on, where nothing counts from the end.

    Args:
        part: An int or an array, or a slice of three ints that ends before the first element with
            stop -1.
        offset: What is added to every index; none of the sums is negative.
    """
    if not isinstance(part, slice):
        return part + offset
    start, stop, step = part.start + offset, part.stop + offset, part.step
    if not range(start, stop, step):
        return slice(0, 0)
    return slice(start, stop if stop >= 0 else None, step)


def absolute(part: Part, reach: range, length: int) -> Part:
    """An index of the time: ints and arrays checked, slices clamped and with three ints."""
    if not isinstance(part, slice):
        _check(part, reach, length)
        return part
    step = 1 if part.step is None else part.step
    if step > 0:
        first, last, lowest, highest = 0, length, reach.start, reach.stop
    else:
        first, last, lowest, highest = length - 1, -1, reach.start - 1, reach.stop - 1
    start = first if part.start is None else min(max(part.start, lowest), highest)
    stop = last if part.stop is None else min(max(part.stop, lowest), highest)
    return slice(start, stop, step)


def from_end(part: int | Indices, length: int) -> int | Indices:
    """An index as NumPy means it: negative ones count from the end."""
    if isinstance(part, int):
        if -length <= part < length:
            return part % length
    elif not part.size or -length <= part.min() <= part.max() < length:
        return np.where(part < 0, part + length, part)
    outside = part if isinstance(part, int) else _outside(part, range(-length, length))
    raise IndexError(f"index {outside} is out of bounds for a dimension of size {length}")


def _check(part: int | Indices, reach: range, length: int) -> None:
    if isinstance(part, int):
        if part in reach:
            return
        outside = part
    else:
        if not part.size or (part.min() in reach and part.max() in reach):
            return
        outside = _outside(part, reach)
    there = f"rows {reach.start} to {reach.stop - 1} exist" if reach else "no row exists"
    raise IndexError(
        compose(
            f"row {outside} is outside of the array: counted from its first row, {there}",
            fix=f"{length} rows are visible; padding or a larger full_size give more around them",
        )
    )


def _outside(part: Indices, reach: range) -> int:
    return int(part[(part < reach.start) | (part >= reach.stop)].flat[0])


def broadcast_shape(arrays: Sequence[Indices]) -> tuple[int, ...]:
    """The common shape of index arrays; IndexError if they have none."""
    shape: tuple[int, ...] = arrays[0].shape
    if len(arrays) == 1:  # several times faster
        return shape
    try:
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
    except ValueError:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise IndexError(f"index arrays of the shapes {shapes} do not fit together") from None
    return shape
