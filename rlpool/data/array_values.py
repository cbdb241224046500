"""The values of an ``Array``, as NumPy and torch take them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from rlpool.data.allocation import Allocation
from rlpool.data.array_view import Values, View, as_numpy
from rlpool.errors import SpecError


class ArrayValues:
    """What reads the values of an array, or converts them."""

    __slots__ = ("__weakref__", "_allocation", "_bound")

    _allocation: Allocation
    # What a view shows; None for the whole array, which shows the window.
    _bound: View | None

    @property
    def _region(self) -> View:
        return self._allocation.visible if self._bound is None else self._bound

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype."""
        return np.dtype(self._allocation.layout.dtype)

    def to_ndarray(self) -> Values:
        """The values as a NumPy array.

        Returns:
            A view, which stays valid after ``close``; a copy if index arrays or masks selected what
            this array shows.

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
        """Apply a function to the values while no process rotates; it may run repeatedly."""

        def look_at_elements() -> Any:
            target, place = self._region.place(self._allocation.values)
            return look(target[place])

        return self._allocation.unrotated(look_at_elements)

    def to_tensor(self) -> torch.Tensor:
        """The values as a tensor on the CPU.

        Returns:
            A tensor on the same memory, which stays valid after ``close``; a copy if index arrays
            or masks selected what this array shows, or if it is reversed, since tensors have no
            negative strides.

        Raises:
            SpecError: If torch has no such dtype.
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
        try:
            return torch.from_numpy(values)
        except (TypeError, ValueError) as error:
            raise SpecError(f"torch has no dtype for {self.dtype}: {error}") from error

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Values:
        is_other = dtype is not None and np.dtype(dtype) != self.dtype
        if copy is False and (is_other or self._region.axes):
            raise ValueError("index arrays selected these values, or the dtype differs: copy them")
        convert = np.array if copy else np.asarray
        values: Values = self._read(lambda values: convert(values, dtype))
        return values

    def __dlpack__(self, **options: Any) -> Any:
        return self.to_tensor().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.to_tensor().__dlpack_device__()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Lets functions of torch accept arrays as tensors."""
        args, kwargs = _pytree.tree_map_only(cls, cls.to_tensor, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __eq__(self, other: object) -> Any:
        return self._read(lambda values: values == plain(other))

    def __ne__(self, other: object) -> Any:
        return self._read(lambda values: values != plain(other))

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, value: object) -> bool:
        return bool(self._read(lambda values: value in values))

    def __bool__(self) -> bool:
        return bool(self._read(bool))

    def __int__(self) -> int:
        return int(self._read(int))

    def __float__(self) -> float:
        return float(self._read(float))

    def __index__(self) -> int:
        return int(self._read(operator.index))


def plain(value: Any) -> Any:
    """A value to write or compare, in a form that NumPy accepts."""
    return as_numpy(value) if isinstance(value, torch.Tensor) else value
