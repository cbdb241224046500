"""``Array``: storage for a batch of values over time, with rows before and behind what is visible.

An array never computes: it is where samples are written, by index, and where they are read as NumPy
arrays or tensors, without a copy. Views remember which elements of which allocation they show, so
that they can be asked for the time step after, and sent to other processes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from rlpool.data.allocation import Allocation, packed_region, plain, unpacked_region
from rlpool.data.array_index import Region, Span
from rlpool.errors import SpecError, UsageError, compose
from rlpool.storage import Memory

Values = np.ndarray[Any, Any]


class Array:
    """Zero-initialised storage of shape ``batch_shape + feature_shape``, time first.

    Indices count from the start of a view, and rows around it can be reached: ``array[-1]`` is the
    row before the first, ``array[array.last + 1]`` the one behind the last. Slices are clamped to
    the rows that there are; ``array[:]`` and ``array[...]`` are what is visible. In all other
    dimensions indices mean what they mean to NumPy. Indexing copies nothing and always gives an
    ``Array``, of single elements and after index arrays and masks too: writing to it writes here.

    Args:
        batch_shape: Sizes of the batch dimensions; the first one is the time, of which this many
            rows are visible.
        dtype: A number type or bool, of NumPy or of torch.
        feature_shape: Shape of one element of the batch.
        padding: Rows before the first and behind the last of all.
        full_size: Rows in all, a multiple of what is visible; ``rotate`` moves along them.
        storage: ``"local"`` memory of this process; ``"shared"`` memory, which other processes map
            when they unpickle the array or any view of it; ``"memmap"``, the same on a disk.
        directory: Where a ``"memmap"`` lies, by default where temporary files do.

    Attributes:
        dtype: The NumPy dtype.

    Raises:
        SpecError: If an argument is wrong, or there is not enough memory or disk.

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

    __slots__ = ("__weakref__", "_allocation", "_is_whole", "_region", "_sent_indices")

    _allocation: Allocation
    _region: Region
    _is_whole: bool
    _sent_indices: Memory | None

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
        self._allocation = allocation = Allocation.of_arguments(
            batch_shape, dtype, feature_shape, storage, padding, full_size, directory
        )
        self._region = allocation.rows(allocation.padding, allocation.window)
        self._is_whole = True
        self._sent_indices = None

    @classmethod
    def _of(cls, allocation: Allocation, region: Region, is_whole: bool = False) -> Array:
        array = cls.__new__(cls)
        array._allocation = allocation
        array._region = region
        array._is_whole = is_whole
        array._sent_indices = None
        return array

    # What it is ---------------------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype."""
        return self._allocation.dtype

    @property
    def storage(self) -> str:
        """Where the values are: ``"local"``, ``"shared"`` or ``"memmap"``."""
        return self._allocation.storage

    @property
    def padding(self) -> int:
        """Rows before the first and behind the last of ``full_size``."""
        return self._allocation.padding

    @property
    def full_size(self) -> int:
        """Rows in all, without padding."""
        return self._allocation.full_size

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the batch dimensions and of the features."""
        return self._region.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions, of the batch and of the features."""
        return len(self._region.shape)

    @property
    def n_batch_dims(self) -> int:
        """How many dimensions of the batch are left."""
        return self._region.n_dims_from(self._allocation.n_batch_dims)

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
        """Index of the last visible row; ``last + 1`` is the row behind it."""
        return self._length() - 1

    def __len__(self) -> int:
        return self._length()

    def _length(self) -> int:
        shape = self.shape
        if not shape:
            raise TypeError("a single element has no rows")
        return shape[0]

    # Views --------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Array:
        self._allocation.refuse_if_closed()
        return Array._of(self._allocation, self._region.index(key))

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(self._length()))

    @property
    def full(self) -> Array:
        """All rows but the padding, whichever part this array shows.

        Returns:
            A view of shape ``(full_size, *batch_shape[1:], *feature_shape)`` of the whole array.
        """
        allocation = self._allocation
        allocation.refuse_if_closed()
        return Array._of(allocation, allocation.rows(allocation.padding, allocation.full_size))

    @property
    def next(self) -> Array:
        """The same rows one time step later.

        Raises:
            IndexError: If one of them would be behind the last row that there is.
        """
        self._allocation.refuse_if_closed()
        return Array._of(self._allocation, self._region.shifted(1))

    @property
    def previous(self) -> Array:
        """The same rows one time step earlier.

        Raises:
            IndexError: If one of them would be before the first row that there is.
        """
        self._allocation.refuse_if_closed()
        return Array._of(self._allocation, self._region.shifted(-1))

    # The window ---------------------------------------------------------------------------------

    def rotate(self) -> None:
        """Move on to the next ``batch_shape[0]`` rows.

        At the end of ``full_size`` this goes back to its beginning and brings along the last
        ``padding`` rows and the rows behind them: what was written behind the window are its first
        rows then, and what was last is before them. Views that exist stay where they are.

        Raises:
            UsageError: On a view, on shared memory, or after ``close``.
        """
        start = self._window_start("rotate")
        allocation = self._allocation
        padding, full_size = allocation.padding, allocation.full_size
        start += allocation.window
        if start == padding + full_size:
            start = padding
            if padding:
                values = allocation.values
                values[: 2 * padding] = values[full_size:]
        self._region = allocation.rows(start, allocation.window)

    def reset(self) -> None:
        """Go to the end of ``full_size``, so that the next ``rotate`` goes to its beginning.

        For samplers that rotate before every batch, the first one included. No value changes.

        Raises:
            UsageError: On a view, on shared memory, or after ``close``.
        """
        self._window_start("reset")
        allocation = self._allocation
        last = allocation.padding + allocation.full_size - allocation.window
        self._region = allocation.rows(last, allocation.window)

    def _window_start(self, method: str) -> int:
        self._allocation.refuse_if_closed()
        time = self._region.dims[0]
        if not self._is_whole or not isinstance(time, Span):
            raise UsageError(
                compose(
                    f"{method}() moves the window of a whole array, and this is a view of one",
                    fix=f"call {method}() on the array that was not indexed, and index it again",
                )
            )
        if self.storage == "shared":
            raise UsageError(
                compose(
                    f'{method}() is not possible with storage="shared": other processes would not '
                    "learn that the window moved",
                    fix="index the rows of a larger array, or copy what is kept",
                )
            )
        return time.start

    # Values -------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any) -> None:
        values = self._allocation.values
        region = self._region.index(key)
        written = plain(value)
        try:
            region.write(values, written)
        except (ValueError, TypeError, OverflowError) as error:
            shape = getattr(written, "shape", None)
            what = type(value).__name__ if shape is None else f"values of shape {tuple(shape)}"
            raise SpecError(
                compose(
                    f"cannot write {what} to elements of shape {region.shape} and dtype "
                    f"{self.dtype}: {error}"
                )
            ) from error

    def to_ndarray(self) -> Values:
        """The values as a NumPy array.

        Returns:
            A view, which stays valid after ``close``; a copy if index arrays or masks selected what
            this array shows.

        Raises:
            UsageError: After ``close``.
        """
        return self._region.read(self._allocation.values)

    def to_tensor(self) -> torch.Tensor:
        """The values as a tensor on the CPU.

        Returns:
            A tensor on the same memory, which stays valid after ``close``; a copy if index arrays
            or masks selected what this array shows, or if it is reversed, since tensors have no
            negative strides.

        Raises:
            SpecError: If torch has no such dtype.
            UsageError: After ``close``.
        """
        values = self.to_ndarray()
        if any(stride < 0 for stride in values.strides):
            values = values.copy()
        try:
            return torch.from_numpy(values)
        except TypeError as error:
            raise SpecError(f"torch has no dtype for {self.dtype}: {error}") from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Values:
        values = self.to_ndarray()
        is_copy = self._region.is_gathered
        if dtype is not None and np.dtype(dtype) != values.dtype:
            values, is_copy = values.astype(dtype), True
        if copy is False and is_copy:
            raise ValueError(
                "these values cannot be had without a copy: index arrays selected them, or another "
                "dtype is wanted"
            )
        return values.copy() if copy and not is_copy else values

    def __dlpack__(self, **options: Any) -> Any:
        return self.to_tensor().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.to_tensor().__dlpack_device__()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Functions of torch take arrays for tensors, as those of NumPy take them for arrays."""
        args, kwargs = _pytree.tree_map_only(cls, cls.to_tensor, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __eq__(self, other: object) -> Any:
        return self.to_ndarray() == plain(other)

    def __ne__(self, other: object) -> Any:
        return self.to_ndarray() != plain(other)

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, value: object) -> bool:
        return value in self.to_ndarray()

    def __bool__(self) -> bool:
        return bool(self.to_ndarray())

    def __int__(self) -> int:
        return int(self.to_ndarray())

    def __float__(self) -> float:
        return float(self.to_ndarray())

    def __index__(self) -> int:
        return operator.index(self.to_ndarray())

    def __repr__(self) -> str:
        suffix = f", storage={self.storage}, dtype={self.dtype}, padding={self.padding})"
        if self._allocation.is_closed:
            return f"Array(closed, shape={self.shape}{suffix}"
        values = self.to_ndarray()
        return "Array(" + np.array2string(values, separator=",", prefix="Array(") + suffix

    # Lifetime -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the memory up in this process, for this array and all its views.

        Reading and writing raise ``UsageError`` from then on. NumPy arrays and tensors that were
        made before stay valid, and so do copies of the array that came out of a pickle, here and in
        other processes. Without ``close`` the memory is given up with its last view. Repeatable.
        """
        self._allocation.close()

    def __reduce__(self) -> tuple[Callable[..., Array], tuple[Any, ...]]:
        packed, self._sent_indices = packed_region(self._region, self._sent_indices)
        return _received, (self._allocation, packed, self._sent_indices, self._is_whole)

    def __copy__(self) -> Array:
        return Array._of(self._allocation, self._region)

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        number = id(self._allocation)
        if number not in memo:
            memo[number] = self._allocation.copied()
        return Array._of(memo[number], self._region, self._is_whole)


def _received(
    allocation: Allocation, packed: tuple[Any, ...], indices: Memory | None, is_whole: bool
) -> Array:
    return Array._of(allocation, unpacked_region(allocation.sizes, packed, indices), is_whole)
