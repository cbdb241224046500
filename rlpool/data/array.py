"""``Array``: storage for a batch of values over time, with rows before and after what is visible.

An array never computes: it is where samples are written, by index, and where they are read as NumPy
arrays or tensors, without a copy. Views remember which elements of which allocation they show, so
that they can be asked for the time step after, and sent to other processes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from rlpool.data.allocation import Allocation, layout_of
from rlpool.data.array_index import Region, Selection, Values, as_numpy
from rlpool.errors import SpecError, UsageError

MAX_INDEX_BYTES = 256
"""Larger index arrays travel in shared memory of their own: every pickle of a view is small."""


class Array:
    """Zero-initialised storage of shape ``batch_shape + feature_shape``, time first.

    Indices count from the start of a view and reach the rows around it: ``array[-1]`` is the
    row before the first, ``array[array.last + 1]`` the one after the last. Slices are clamped to
    the rows that there are; ``array[:]`` and ``array[...]`` are what is visible. In all other
    dimensions indices mean what they mean to NumPy. Indexing copies nothing and always gives an
    ``Array``, of single elements and after index arrays and masks too: writing to it writes here.
    ``copy.copy`` gives a view as ``array[...]`` does; ``copy.deepcopy`` copies the values into
    memory of the same kind, of which other processes know nothing.

    Args:
        batch_shape: Sizes of the batch dimensions; the first one is the time, of which this many
            rows are visible.
        dtype: A number type or bool, of NumPy or of torch.
        feature_shape: Shape of one element of the batch.
        padding: Extra rows before the first and after the last row of ``full_size``.
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

    __slots__ = ("__weakref__", "_allocation", "_bound")

    _allocation: Allocation
    # What a view shows; None for the whole array, which follows the window.
    _bound: Region | Selection | None

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
    def _region(self) -> Region | Selection:
        return self._allocation.visible if self._bound is None else self._bound

    # What it is ---------------------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype."""
        return np.dtype(self._allocation.layout.dtype)

    @property
    def storage(self) -> str:
        """Where the values are: ``"local"``, ``"shared"`` or ``"memmap"``."""
        return self._allocation.storage

    @property
    def padding(self) -> int:
        """Extra rows before the first and after the last row of ``full_size``."""
        return self._allocation.layout.padding

    @property
    def full_size(self) -> int:
        """Rows in all, without padding."""
        return self._allocation.layout.full_size

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
        return self._view(self._region.index(key))

    def _view(self, region: Region | Selection) -> Array:
        """A view of these values; UsageError after ``close``."""
        self._allocation.open_memory()
        return _of(self._allocation, region)

    def __iter__(self) -> Iterator[Array]:
        view = self[...]  # bound now: the window may move meanwhile
        return (view[row] for row in range(len(view)))

    @property
    def full(self) -> Array:
        """All rows but the padding, whichever part this array shows.

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
        """Move on to the next ``batch_shape[0]`` rows.

        At the end of ``full_size`` the window returns to the front and brings along the last
        ``padding`` rows and the rows after them: what was written after the window becomes its
        first rows, and its last rows come before them. Existing views stay where they are.

        The position of the window is stored with the values: with ``storage="shared"`` and
        ``"memmap"`` it moves in every process that has the whole array. Any of them may rotate; a
        process waits while another one rotates (threads of one process have to coordinate
        themselves). The rows that are brought along are in place before the window moves, so that
        readers see the old window or the new one. Whatever copies values (``copy=True``, comparing,
        printing, index arrays) never sees a mixture of both. A NumPy view or a tensor sees its rows
        being overwritten, like any other write.

        Raises:
            UsageError: On a view, or after ``close``.
        """
        self._refuse_if_view("rotate")
        self._allocation.rotate()

    def reset(self) -> None:
        """Go to the end of ``full_size``, so that the next ``rotate`` goes to its beginning.

        For samplers that rotate before every batch, the first one included. No value changes.

        Raises:
            UsageError: On a view, or after ``close``.
        """
        self._refuse_if_view("reset")
        self._allocation.go_to_end()

    def _refuse_if_view(self, method: str) -> None:
        if self._bound is not None:
            raise UsageError(
                f"{method}() moves the window of a whole array, and this is a view of one",
                fix=f"call {method}() on the array that was not indexed, and index it again",
            )

    # Values -------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any) -> None:
        values = self._allocation.values
        region = self._region.index(key)
        written = _plain(value)
        try:
            if getattr(written, "dtype", self.dtype).kind == "c" != self.dtype.kind:
                raise TypeError("they are complex")  # NumPy would drop a part of them
            target, place = region.place(values)
            target[place] = written
        except (ValueError, TypeError, OverflowError) as error:
            shape = getattr(written, "shape", None)
            what = type(value).__name__ if shape is None else f"values of shape {tuple(shape)}"
            raise SpecError(
                f"cannot write {what} to elements of shape {region.shape} and dtype "
                f"{self.dtype}: {error}"
            ) from error

    def to_ndarray(self) -> Values:
        """The values as a NumPy array.

        Returns:
            A view, which stays valid after ``close``; a copy if index arrays or masks selected what
            this array shows.

        Raises:
            UsageError: After ``close``.
        """
        if isinstance(self._bound, Selection):
            selected: Values = self._looked_at(lambda values: values)
            return selected
        return self._elements()

    def _elements(self) -> Values:
        """A view, or a copy if index arrays selected them."""
        target, key = self._region.place(self._allocation.values)
        elements: Values = target[key]
        return elements

    def _looked_at(self, look: Callable[[Values], Any]) -> Any:
        """What somebody finds in the values, none of them moved by a rotation meanwhile."""
        return self._allocation.unrotated(lambda: look(self._elements()))

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
            values = self._looked_at(np.copy)
        try:
            return torch.from_numpy(values)
        except TypeError as error:
            raise SpecError(f"torch has no dtype for {self.dtype}: {error}") from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Values:
        is_other = dtype is not None and np.dtype(dtype) != self.dtype
        if copy is False and (is_other or isinstance(self._bound, Selection)):
            raise ValueError(
                "these values cannot be had without a copy: index arrays selected them, or another "
                "dtype is wanted"
            )
        if copy or is_other:
            copied: Values = self._looked_at(lambda values: np.array(values, dtype))
            return copied
        return self.to_ndarray()

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
        return self._looked_at(lambda values: values == _plain(other))

    def __ne__(self, other: object) -> Any:
        return self._looked_at(lambda values: values != _plain(other))

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, value: object) -> bool:
        return bool(self._looked_at(lambda values: value in values))

    def __bool__(self) -> bool:
        return bool(self._looked_at(bool))

    def __int__(self) -> int:
        return int(self._looked_at(int))

    def __float__(self) -> float:
        return float(self._looked_at(float))

    def __index__(self) -> int:
        return int(self._looked_at(operator.index))

    def __repr__(self) -> str:
        suffix = f", storage={self.storage}, dtype={self.dtype}, padding={self.padding})"
        if self._allocation.memory is None:
            return f"Array(closed, shape={self.shape}{suffix}"
        values = np.array(self)
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
        bound = self._bound
        if isinstance(bound, Selection) and bound.numbers.nbytes > MAX_INDEX_BYTES:
            if bound.sent is None:  # kept until it was received
                bound.sent = Array(bound.numbers.shape, np.int64, storage="shared")
                bound.sent[...] = bound.numbers
            rest = replace(bound, numbers=bound.numbers[:0], sent=None)
            return _received, (self._allocation, rest, bound.sent)
        return _of, (self._allocation, bound)

    def __copy__(self) -> Array:
        return _of(self._allocation, self._region)

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        number = id(self._allocation)
        if number not in memo:
            memo[number] = self._allocation.copied()
        return _of(memo[number], self._bound)


_new = object.__new__


def _of(allocation: Allocation, bound: Region | Selection | None) -> Array:
    array = _new(Array)
    array._allocation = allocation
    array._bound = bound
    return array


def _received(allocation: Allocation, bound: Selection, numbers: Array) -> Array:
    return _of(allocation, replace(bound, numbers=np.array(numbers)))


def _plain(value: Any) -> Any:
    """A value to be written or compared, as NumPy takes it."""
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return as_numpy(value)
    except (TypeError, RuntimeError) as error:
        raise SpecError(f"NumPy cannot take this tensor: {error}") from error
