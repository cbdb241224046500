"""Observations of many lanes into one array per key.

An environment hands out one value at a time; a ``Column`` collects the values of a batch of lanes
into its array with a constant number of NumPy calls where shapes and dtypes are as declared, and
with a clear error where they are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlpool.errors import SpecError
from rlpool.memory.storage import Array, batch_array
from rlpool.specs import Leaf, Structure, TensorSpec, flattener, leaves_of


def converted(value: Any, spec: TensorSpec, key: str) -> Array:
    """A value as an array of the wanted shape and dtype.

    Wider numbers are narrowed within their kind (float64 to float32); what would change the kind
    or lose values is refused.

    Raises:
        SpecError: Naming the key and both sides.
    """
    array = np.asarray(value)
    if array.shape != spec.shape:
        raise SpecError(f"{key!r} should have shape {list(spec.shape)}, got {list(array.shape)}")
    if array.dtype == spec.dtype:
        return array
    is_float, wants_float = array.dtype.kind == "f", spec.dtype.kind == "f"
    # Python numbers have no dtype of their own: any int may stand for a float.
    has_dtype = isinstance(value, np.ndarray | np.generic)
    if wants_float and (is_float or (not has_dtype and array.dtype.kind in "iub")):
        return array.astype(spec.dtype)
    if (
        not is_float
        and not wants_float
        and (not has_dtype or np.can_cast(array.dtype, spec.dtype, "same_kind"))
    ):
        narrowed = array.astype(spec.dtype)
        if np.array_equal(narrowed, array):
            return narrowed
    raise SpecError(f"{key!r} should have dtype {spec.dtype}, got {array.dtype}")


class Column:
    """One key of a batch of lanes.

    Args:
        key: Name, for messages.
        leaf: What the values are.
        n_lanes: Number of rows.

    Attributes:
        array: ``[n_lanes, *shape]``.
    """

    def __init__(self, key: str, leaf: Leaf, n_lanes: int) -> None:
        self.key = key
        self.spec = leaf.spec
        self._n_lanes = n_lanes
        # Written without a detour: what float32 is most often narrowed from.
        is_float32 = leaf.spec.dtype == np.float32
        self._wider = np.dtype(np.float64) if is_float32 else leaf.spec.dtype
        self.place(batch_array(leaf.spec, n_lanes))

    def place(self, array: Array) -> None:
        """Keep the values in another array ``[n_lanes, *shape]`` from now on."""
        self.array = array
        self._rows = list(array)  # views, except of scalars, which write_scalars serves
        shape = self.spec.shape
        self._joined = array.reshape(-1, *shape[1:]) if shape else None

    def write(self, lanes: Sequence[int], values: Sequence[Any]) -> None:
        """Write one value per lane.

        Args:
            lanes: Ascending lane numbers.
            values: As many values.

        Raises:
            BadValue: If a value does not fit; rows of other lanes may have been written.
        """
        if self._joined is None:
            self._write_scalars(lanes, values)
            return
        shape, dtype, wider = self.spec.shape, self.spec.dtype, self._wider
        try:
            for value in values:
                if value.shape != shape or (value.dtype is not dtype and value.dtype is not wider):
                    break
            else:
                if len(values) == self._n_lanes:
                    np.concatenate(values, out=self._joined)
                else:
                    for lane, value in zip(lanes, values, strict=True):
                        self._rows[lane][...] = value
                return
        except AttributeError:
            pass  # not an array: converted, or refused, one by one
        for lane, value in zip(lanes, values, strict=True):
            self.write_one(lane, value)

    def write_one(self, lane: int, value: Any) -> None:
        """Write the value of one lane, converting it if need be."""
        try:
            self.array[lane] = converted(value, self.spec, self.key)
        except (SpecError, ValueError, TypeError) as error:
            raise BadValue(lane, str(error)) from error

    def _write_scalars(self, lanes: Sequence[int], values: Sequence[Any]) -> None:
        try:
            array = np.array(values)
        except ValueError:  # ragged: one of them is not a scalar
            array = np.empty(0)
        if array.shape == (len(lanes),) and array.dtype == self.spec.dtype:
            if len(lanes) == self._n_lanes:
                self.array[:] = array
            else:
                self.array[lanes] = array
            return
        for lane, value in zip(lanes, values, strict=True):
            self.write_one(lane, value)


class BadValue(SpecError):
    """A lane's value does not fit its column.

    Attributes:
        lane: The lane.
    """

    def __init__(self, lane: int, message: str) -> None:
        super().__init__(message)
        self.lane = lane


class Columns:
    """All keys of the observations of a batch of lanes.

    Args:
        structure: How an observation falls into keys.
        default_key: Key of an observation that is not a dict.
        n_lanes: Number of rows.

    Attributes:
        structure: How an observation falls into keys.
        leaves: Key to leaf, in the order of the structure.
        arrays: Key to array ``[n_lanes, *shape]``, rewritten in place.
    """

    def __init__(self, structure: Structure, default_key: str, n_lanes: int) -> None:
        self.structure = structure
        self.leaves = leaves_of(structure, default_key)
        self._columns = [Column(key, leaf, n_lanes) for key, leaf in self.leaves.items()]
        self.arrays: dict[str, Array] = {column.key: column.array for column in self._columns}
        self._flatten = flattener(structure, "observation")
        if isinstance(structure, Leaf):
            self.write = self._columns[0].write  # type: ignore[method-assign, assignment]

    def place(self, arrays: Mapping[str, Array]) -> None:
        """Keep the values in other arrays from now on, by key; others than its own are ignored."""
        for column in self._columns:
            column.place(arrays[column.key])
            self.arrays[column.key] = column.array

    def write(self, lanes: Sequence[int], observations: Sequence[Any]) -> None:
        """Write one observation per lane.

        Raises:
            BadValue: If one does not fit, naming its key and both sides.
        """
        rows = []
        for lane, observation in zip(lanes, observations, strict=True):
            try:
                rows.append(self._flatten(observation))
            except SpecError as error:
                raise BadValue(lane, str(error)) from error
        for column, values in zip(self._columns, zip(*rows, strict=True), strict=True):
            column.write(lanes, values)
