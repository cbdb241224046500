"""``Array``: storage for a batch of values over time, padded at either end.

An array does not compute: samples are written by index, and read as NumPy arrays or tensors without
a copy. Views record the position of their elements in memory, so they can be shifted in time and
sent to other processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpool.data.allocation import Allocation, layout_of
from rlpool.data.array_view import Values, View, as_numpy
from rlpool.errors import SpecError, UsageError

MAX_INDEX_BYTES = 256
"""Larger index arrays are sent in shared memory, to keep pickles of views small."""

_MAX_SENT = 32  # number of the latest of these kept alive for views in transit


class Array:
    """Zero-initialised storage of shape ``batch_shape + feature_shape``, time first.

    Indices count from the start of a view and reach the rows around it: ``array[-1]`` is the row
    before the first, ``array[array.last + 1]`` the one after the last. Slices are clipped to the
    existing rows; ``array[:]`` and ``array[...]`` are the visible rows. In all other dimensions
    indices work as in NumPy. Indexing never copies and always returns an ``Array``, also for single
    elements, index arrays and masks: writing to it writes to this array. ``copy.copy`` returns a
    view, like ``array[...]``; ``copy.deepcopy`` copies the values to new memory of the same kind
    (the file of a memmap is created in the directory of temporary files). Writing converts as
    NumPy's assignment does: a float written to an int array is truncated.

    Args:
        batch_shape: Sizes of the batch dimensions. The first one is time: its size is the number of
            visible rows.
        dtype: A numeric or bool dtype of NumPy or torch.
        feature_shape: Shape of one element of the batch.
        padding: Extra rows before the first and after the last row of ``full_size``.
        full_size: Number of rows without padding, a multiple of the visible ones; ``rotate`` moves
            along them.
        storage: ``"local"`` memory of this process; ``"shared"`` memory, which other processes map
            when they unpickle the array or a view of it; or ``"memmap"``, the same in a file. The
            sender has to keep the array until the other process has unpickled it.
        directory: Directory of the file of a ``"memmap"``, by default that of temporary files.

    Attributes:
        dtype: The NumPy dtype.

    Raises:
        SpecError: If an argument is wrong, or there is not enough memory or disk space.

    Example:
        >>> array = Array((3,), "int64", padding=1)
        >>> array[...] = [1, 2, 3]
        >>> array[array.last + 1] = 4
        >>> array.next
        Array([2,3,4], storage=local, dtype=int64, padding=1)
        >>> array.rotate()
        >>> array[0]
        Array(4, storage=local, dtype=int64, padding=1)
    """

    __slots__ = ("__weakref__", "_allocation", "_bound")

    _allocation: Allocation
    # The region of a view; None for the whole array, which shows the window.
    _bound: View | None

    def __init__(
        self,
        batch_shape: Sequence[int] | int,
        dtype: Any,
        feature_shape: Sequence[int] | int = (),
        padding: int = 0,
        full_size: int | None = None,
        storage: str = "local",
        directory: str | Path | None = None,
    ) -> None:
        layout = layout_of(batch_shape, dtype, feature_shape, padding, full_size)
        self._allocation = Allocation.new(storage, layout, directory)
        self._bound = None

    @property
    def _region(self) -> View:
        return self._allocation.visible if self._bound is None else self._bound

    # Properties ---------------------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype."""
        return self._allocation.layout.spec.dtype

    @property
    def storage(self) -> str:
        """Kind of memory: ``"local"``, ``"shared"`` or ``"memmap"``."""
        return self._allocation.storage

    @property
    def padding(self) -> int:
        """Number of extra rows at either end of the memory."""
        return self._allocation.layout.padding

    @property
    def full_size(self) -> int:
        """Number of rows without padding."""
        return self._allocation.layout.full_size

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the batch dimensions and of the features."""
        return self._region.shape

    @property
    def ndim(self) -> int:
        """Number of batch and feature dimensions."""
        return len(self._region.shape)

    @property
    def n_batch_dims(self) -> int:
        """Number of remaining batch dimensions."""
        n_dims = self._allocation.layout.n_batch_dims
        from_batch = [at for at, origin in enumerate(self._region.origins) if origin < n_dims]
        return from_batch[-1] + 1 if from_batch else 0

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Sizes of the batch dimensions."""
        return self.shape[: self.n_batch_dims]

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """Shape of one element of the batch."""
        return self.shape[self.n_batch_dims :]

    @property
    def first(self) -> int:
        """Index of the first visible row: 0."""
        return 0

    @property
    def last(self) -> int:
        """Index of the last visible row; ``last + 1`` is the row after it."""
        return len(self) - 1

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a single element has no rows")
        return self.shape[0]

    # Views --------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Array:
        """Return a view of some elements. Writes to it are writes to this array.

        Args:
            key: An int, a slice, ``...``, an array of ints or a mask, or a tuple of these, one for
                each dimension of ``shape`` from the first on. Along the first dimension ints count
                from the first row of the view: -1 is the row before it. Slices are clipped there.
                In all other dimensions indices work as in NumPy.

        Returns:
            An ``Array`` of the same dtype and memory, in the shape that NumPy would give. A single
            element is also an ``Array``, of shape ``()``.

        Raises:
            IndexError: If a row or element does not exist, or ``key`` is not a valid index.
            UsageError: After ``close``.

        Example:
            >>> array = Array((2, 3), "int64", padding=1)
            >>> array[-1] = 7
            >>> array[:, 0].shape, array[-1].to_ndarray()
            ((2,), array([7, 7, 7]))
        """
        return self._view(self._region.index(key))

    def _view(self, region: View) -> Array:
        """Return another view of the same memory; UsageError after ``close``."""
        self._allocation.open_memory()
        return _array(self._allocation, region)

    def __iter__(self) -> Iterator[Array]:
        view = self[...]  # fixed now, since the window may move
        return (view[row] for row in range(len(view)))

    @property
    def full(self) -> Array:
        """All rows without padding, even on a view of some of them.

        Returns:
            A view of shape ``(full_size, *batch_shape[1:], *feature_shape)`` of the whole array.
        """
        return self._view(self._allocation.layout.rows(0, self.full_size))

    @property
    def next(self) -> Array:
        """The same rows one time step later.

        Raises:
            IndexError: If one of them would be after the last row that exists.
        """
        return self._view(self._region.shifted(1))

    @property
    def previous(self) -> Array:
        """The same rows one time step earlier.

        Raises:
            IndexError: If one of them would be before the first row that exists.
        """
        return self._view(self._region.shifted(-1))

    # The window ---------------------------------------------------------------------------------

    def rotate(self) -> None:
        """Move the window to the next ``batch_shape[0]`` rows.

        At the end of ``full_size`` the window returns to the front, and the last ``padding`` rows
        and the padding after them are copied there: rows written after the window become its first
        rows, and its last rows become the padding before it. Existing views do not move.

        The position of the window is stored with the values: with ``storage="shared"`` and
        ``"memmap"`` it moves in every process that has the whole array. Any process may rotate,
        while others wait; threads of one process need their own lock. The rows are copied before
        the window moves, so readers see either the old or the new window. Operations that copy
        values (``copy=True``, comparing, printing, index arrays) never see a mixture of both. A
        NumPy view or a tensor sees its rows overwritten, as with any other write.

        Raises:
            UsageError: On a view, or after ``close``.

        Example:
            >>> array = Array((2,), "int64", full_size=4)
            >>> array[...] = [1, 2]
            >>> array.rotate()
            >>> array[...] = [3, 4]
            >>> array.full
            Array([1,2,3,4], storage=local, dtype=int64, padding=0)
        """
        self._refuse_if_view("rotate")
        self._allocation.rotate()

    def reset(self) -> None:
        """Move the window to the end of ``full_size``; the next ``rotate`` goes to the front.

        For samplers that rotate before every batch, including the first. Values do not change.

        Raises:
            UsageError: On a view, or after ``close``.

        Example:
            >>> array = Array((2,), "int64", full_size=4)
            >>> array.full[...] = [1, 2, 3, 4]
            >>> array.reset()
            >>> for _ in range(2):
            ...     array.rotate()
            ...     print(array)
            Array([1,2], storage=local, dtype=int64, padding=0)
            Array([3,4], storage=local, dtype=int64, padding=0)
        """
        self._refuse_if_view("reset")
        self._allocation.go_to_end()

    def _refuse_if_view(self, method: str) -> None:
        if self._bound is not None:
            raise UsageError(
                f"{method}() moves the window of a whole array, but this is a view",
                fix=f"call {method}() on the whole array, then index it again",
            )

    # Values -------------------------------------------------------------------------------------

    def to_ndarray(self) -> Values:
        """Return the values as a NumPy array.

        Returns:
            A view, which stays valid after ``close``; a copy if this array was selected by index
            arrays or masks.

        Raises:
            UsageError: After ``close``.

        Example:
            >>> array = Array((3,), "int64", padding=1)
            >>> array[...] = [1, 2, 3]
            >>> values = array.to_ndarray()
            >>> values[0] = 7  # the same memory
            >>> array[0]
            Array(7, storage=local, dtype=int64, padding=1)
        """
        values, place = self._region.place(self._allocation.values)
        if place is not ...:
            values = self._read(lambda copied: copied)
        return values

    def _read(self, look: Callable[[Values], Any]) -> Any:
        """Apply a function to the values while no other process rotates."""
        with self._allocation.locked():
            target, place = self._region.place(self._allocation.values)
            return look(target[place])

    def to_tensor(self) -> torch.Tensor:
        """Return the values as a tensor on the CPU.

        Returns:
            A tensor on the same memory, which stays valid after ``close``; a copy if this array was
            selected by index arrays or masks, or is reversed, since tensors cannot have negative
            strides.

        Raises:
            TypeError: If torch has no such dtype.
            UsageError: After ``close``.

        Example:
            >>> array = Array((3,), "int64", padding=1)
            >>> array[...] = [1, 2, 3]
            >>> array.to_tensor()
            tensor([1, 2, 3])
        """
        values = self.to_ndarray()
        if any(stride < 0 for stride in values.strides):
            values = self._read(np.copy)
        return torch.from_numpy(values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Values:
        is_other = dtype is not None and np.dtype(dtype) != self.dtype
        if copy is False and (is_other or self._region.axes):
            raise ValueError("index arrays selected these values, or the dtype differs: copy them")
        convert = np.array if copy else np.asarray
        values: Values = self._read(lambda values: convert(values, dtype))
        return values

    def __eq__(self, other: object) -> Any:
        other = plain(other)
        return self._read(lambda values: values == other)

    def __ne__(self, other: object) -> Any:
        other = plain(other)
        return self._read(lambda values: values != other)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self._read(bool))

    def __setitem__(self, key: Any, value: Any) -> None:
        values = self._allocation.values  # first, to report a closed array
        region = self._region.index(key)
        target, place = region.place(values)
        try:
            written = plain(value)
            is_array = place is not ... and isinstance(written, np.ndarray)
            if is_array and np.may_share_memory(target, written):
                written = np.array(written)  # older NumPy reads elements it has overwritten
            target[place] = written
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
            raise SpecError(
                f"cannot write {type(value).__name__}{shape} to elements of shape "
                f"{list(region.shape)} and dtype {self.dtype}: {error}",
                fix="write values that fit, or make an array of another shape or dtype",
            ) from error

    def __repr__(self) -> str:
        suffix = f", storage={self.storage}, dtype={self.dtype}, padding={self.padding})"
        if self._allocation.memory is None:
            return f"Array(closed, shape={self.shape}{suffix}"
        values = np.array(self)
        return "Array(" + np.array2string(values, separator=",", prefix="Array(") + suffix

    # Lifetime -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the memory in this process, for this array and all its views; repeatable.

        Reading and writing then raise ``UsageError``. Existing NumPy arrays and tensors stay valid,
        as do unpickled copies of the array, here and in other processes. Without ``close`` the
        memory is released with its last view.

        Example:
            >>> array = Array((3,), "int64", storage="shared")
            >>> array.close()
            >>> array
            Array(closed, shape=(3,), storage=shared, dtype=int64, padding=0)
        """
        self._allocation.close()

    def __reduce__(self) -> tuple[Callable[..., Array], tuple[Any, ...]]:
        bound = self._bound
        if bound is None:
            return _array, (self._allocation, None)
        dims = tuple(map(_sendable, bound.dims))
        return _received, (self._allocation, bound.sizes, dims, bound.axes)

    def __copy__(self) -> Array:
        return _array(self._allocation, self._region)

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        number = id(self._allocation)
        if number not in memo:
            memo[number] = self._allocation.copied()
        return _array(memo[number], self._bound)


def plain(value: Any) -> Any:
    """Convert a value to write or compare to a form that NumPy accepts."""
    if isinstance(value, Array):
        return np.asarray(value)
    return as_numpy(value) if isinstance(value, torch.Tensor) else value


_new = object.__new__


def _array(allocation: Allocation, bound: View | None) -> Array:
    array = _new(Array)
    array._allocation = allocation
    array._bound = bound
    return array


def _sendable(dim: Any) -> Any:
    if not isinstance(dim, np.ndarray) or dim.nbytes <= MAX_INDEX_BYTES:
        return dim
    shared = Array(dim.shape, np.int64, storage="shared")
    shared[...] = dim
    _sent.append(shared)
    return shared


_sent: deque[Array] = deque(maxlen=_MAX_SENT)


def _received(
    allocation: Allocation, sizes: tuple[int, ...], dims: tuple[Any, ...], axes: tuple[int, ...]
) -> Array:
    own = tuple(np.array(dim) if isinstance(dim, Array) else dim for dim in dims)
    return _array(allocation, View(sizes, own, axes))
