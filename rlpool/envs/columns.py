"""Checks of the observations, rewards and flags of a batch of lanes, and one array per key.

An environment returns one value at a time. A ``Column`` writes the values of all lanes with a
constant number of NumPy calls if shapes and dtypes are as declared. Other values are converted one
by one, or refused with an error that names the lane, the key, and expected and actual value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpool.data.specs import (
    PADDING,
    Leaf,
    Structure,
    TensorSpec,
    fitted,
    fitted_rewards,
    flattener,
    is_action,
    leaves_of,
)
from rlpool.data.storage import NDArray, batch_array
from rlpool.errors import SpecError

Results = tuple[Any, Any, Any]
"""Rewards, terminated and truncated of the lanes that stepped: sequences or arrays."""

_ALL = slice(None)
_COUNTS = {2: "two", 4: "four", 5: "five"}
_FEW = 1000  # choices
_HUGE = 10**300  # Python ints can exceed any float
_LOG = logging.getLogger("rlpool")
_N_WATCHED = 64  # calls in which float64 values are checked: the first steps and resets
_N_LOST = 3  # lost changes before a warning: one may happen by chance
_ROUNDING = 1e-13  # relative; smaller changes are a few bits of float64
_ALIKE = (
    "float32 cannot distinguish successive values of %r, such as %r: keep_float64=[%r] keeps them "
    "in float64, and keep_float64=True those of all keys"
)
_NO_CHECK: AbstractContextManager[Any] = nullcontext()
_MOST_SQUARED = float(np.finfo(np.float32).max) ** 2


class BadValue(SpecError):
    """A lane's value is invalid.

    Attributes:
        lane: The lane.
    """

    def __init__(self, lane: int, message: str, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.lane = lane


class Choices(NamedTuple):
    """The valid values of a discrete action, ``size`` consecutive integers from ``first``.

    Attributes:
        key: The action's key.
        first: int64 ``[n_lanes, *shape]``, or one row for all lanes.
        size: uint64 of the same shape.
        allowed: All values, if they are few, scalar, and the same for all lanes; a lookup takes a
            quarter of the time of comparing arrays.
    """

    key: str
    first: NDArray
    size: NDArray
    allowed: frozenset[int]

    def refuse(self, actions: NDArray, lanes: Sequence[int]) -> None:
        """Raise ``BadValue`` if the action of one of the lanes is invalid."""
        for lane in lanes:
            row, action = lane % len(self.first), np.asarray(actions[lane]).astype(np.int64)
            first, count = self.first[row], self.size[row]
            if not ((action - first).view(np.uint64) < count).all():
                last = first + count.astype(np.int64) - 1
                got, begin, end = (array.tolist() for array in (action, first, last))
                message = f"the action {self.key!r} is {got}, outside {begin} to {end}"
                fix = "return actions of the space, or let the environment declare another"
                if first.any() and (action.view(np.uint64) < count).all():
                    fix = f"this space begins at {begin}: add `start` to the action"
                raise BadValue(lane, message, fix)


def choices_of(structures: Sequence[Structure]) -> list[Choices]:
    """Return the choices of discrete actions; environments check the bounds of a ``Box``.

    Args:
        structures: The structure of the actions of each lane, or one for all.
    """
    found, lanes = [], [leaves_of({"action": structure}, "") for structure in structures]
    for key, leaf in lanes[0].items():
        if leaf.choices is not None:
            like = np.zeros(leaf.spec.shape, np.int64)
            rows = [np.broadcast_arrays(*(leaves[key].choices or ()), like) for leaves in lanes]
            first, size, _ = np.stack(rows, 1)
            bounds = {*zip(first.flat, (first + size).flat, strict=True)}
            is_simple = not leaf.spec.shape and len(bounds) == 1 and size[0] <= _FEW
            allowed = frozenset(range(*bounds.pop()) if is_simple else ())
            found.append(Choices(key, first, size.view(np.uint64), allowed))
    return found


def checked_count(call: str, n_values: int, result: Any, fix: str = "") -> Any:
    """Return the result of ``reset`` or ``step``; SpecError unless a tuple of ``n_values``."""
    if isinstance(result, tuple) and len(result) == n_values:
        return result
    got = len(result) if isinstance(result, tuple) else type(result).__name__
    if n_values == 5 and got == 4:
        fix = 'return five values, or convert it: gym.make("GymV21Environment-v0", env=env)'
    raise SpecError(f"{call}() should return {_COUNTS[n_values]} values, got {got}", fix=fix)


def converted(value: Any, spec: TensorSpec, key: str) -> NDArray:
    """Convert a value to an array of a given shape and dtype.

    Numbers can be converted within their kind (see ``fitted``), or to a dtype that holds all
    numbers of theirs. Other dtypes are refused, regardless of the values.

    Args:
        value: The value.
        spec: The expected shape and dtype.
        key: Its name in errors.

    Raises:
        SpecError: Naming the key, and expected and actual value.
    """
    message, fix = f"{key!r} should have shape {list(spec.shape)}", f"if it varies: {PADDING}"
    try:
        array = as_array(value)
    except (ValueError, TypeError) as error:  # nested lists of different lengths, bfloat16
        fix = "return tensor.float()" if isinstance(value, torch.Tensor) else fix
        raise SpecError(f"{message}, got {value!r:.60}: {error}", fix=fix) from error
    if array.shape != spec.shape:
        is_ragged = bool(spec.shape) and array.ndim == len(spec.shape)
        fix = fix if is_ragged else "declare that shape in the space, including that of a wrapper"
        raise SpecError(f"{message}, got {list(array.shape)}", fix="" if is_action(key) else fix)
    source, target = array.dtype.kind, spec.dtype.kind
    # Python numbers do not have a dtype: any int can become a float.
    has_dtype = isinstance(value, np.ndarray | np.generic)
    if "f" in (source, target):
        is_like = target == "f" and (source == "f" or (source in "iub" and not has_dtype))
    else:
        is_like = not has_dtype or np.can_cast(array.dtype, spec.dtype, "same_kind")
    if is_like or np.can_cast(array.dtype, spec.dtype):
        return fitted(repr(key), array, spec.dtype)
    message = f"{key!r} should have dtype {spec.dtype}, got {array.dtype}"
    raise SpecError(
        message, fix=f"return .astype(np.{spec.dtype}), or declare {array.dtype} in its space"
    )


def as_array(value: Any) -> NDArray:
    """Convert a value to an array, even a tensor with gradients or on another device."""
    return np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)


def as_numbers(value: Any) -> NDArray:
    """Convert a value to an array, of objects if it does not consist of numbers."""
    with suppress(ValueError, TypeError, RuntimeError):  # parts of different shapes, tensors
        array = as_array(value)
        if array.dtype.kind in "fiub":
            return array
    return np.empty((), object)


def checked_results(lanes: Sequence[int], results: Results) -> Results:
    """Check the results of steps: rewards must be numbers that fit float32, flags bools.

    Raises:
        BadValue: For a reward that is not a number or overflows float32, and for a flag that is
            neither true nor false.
    """
    rewards, terminated, truncated = results
    if not _are_flags(terminated):
        terminated = _each(lanes, terminated, partial(flag_of, "terminated"))
    if not _are_flags(truncated):
        truncated = _each(lanes, truncated, partial(flag_of, "truncated"))
    values = as_numbers(rewards)
    # If the sum of squares is small enough, rewards cannot overflow float32. (vdot does not warn
    # if the sum itself overflows.)
    if values.ndim == 1 and (values.dtype.itemsize <= 4 or np.vdot(values, values) < _MOST_SQUARED):
        return values, terminated, truncated
    return _each(lanes, rewards, _reward_of), terminated, truncated


def _are_flags(flags: Any) -> bool:
    """Whether all flags are bools."""
    array = flags if isinstance(flags, np.ndarray) else as_numbers(flags)
    return array.ndim == 1 and array.dtype == np.bool_


def flag_of(key: str, flag: Any) -> bool:
    """Convert a flag to a bool; SpecError unless it is true or false, 0 or 1."""
    number = _number(flag)
    if number is None or number not in (0, 1):
        raise SpecError(f"{key!r} should be True or False, got {flag!r}", fix="return a bool")
    return bool(number)


def _reward_of(reward: Any) -> Any:
    number = _number(reward)
    if number is None:
        raise SpecError(f"'reward' should be a number, got {reward!r}")
    return fitted_rewards("'reward'", number)


def _number(value: Any) -> NDArray | None:
    """Convert a value to a 0-d array; ``None`` if it is not a single number.

    Arrays, tensors and lists of one element are single numbers.
    """
    if type(value) is int:
        value = float(max(-_HUGE, min(value, _HUGE)))
    array = as_numbers(value)
    return array.reshape(()) if array.size == 1 and array.dtype != object else None


def _each(lanes: Sequence[int], values: Sequence[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Convert the value of every lane.

    Raises:
        BadValue: If a conversion fails.
    """
    results: list[Any] = []
    try:
        for value in values:
            results.append(convert(value))  # noqa: PERF401  (its length shows which lane failed)
    except (ValueError, TypeError) as error:
        message, fix = (error.what, error.fix) if isinstance(error, SpecError) else (str(error), "")
        raise BadValue(lanes[len(results)], message, fix) from error
    return results


def fitted_rows(name: str, values: NDArray, lanes: Sequence[int], dtype: np.dtype[Any]) -> NDArray:
    """Convert the rows of some lanes to another dtype with ``fitted``.

    Raises:
        BadValue: If a row does not fit.
    """
    rows = values[np.asarray(lanes)]
    try:
        return fitted(name, rows, dtype)
    except SpecError:
        return np.array(_each(lanes, rows, lambda row: fitted(name, row, dtype)))


class Column:
    """One key of a batch of lanes.

    Args:
        key: Its name in errors.
        leaf: Shape and dtype of a value.
        n_lanes: Number of rows.

    Attributes:
        leaf: Shape and dtype of a value.
        array: ``[n_lanes, *shape]``.
    """

    def __init__(self, key: str, leaf: Leaf, n_lanes: int) -> None:
        self.key = key
        self.leaf = leaf
        self.spec = leaf.spec
        self._n_lanes = n_lanes
        self.watch: Float32Watch | None = None
        # Most float32 values arrive as float64, which are also written directly.
        wider = np.float64 if leaf.spec.dtype == np.float32 else leaf.spec.dtype
        self._dtypes = leaf.spec.dtype, np.dtype(wider)
        is_float = leaf.spec.dtype.kind == "f"
        # Floats hold every integer below its square root.
        self._most_exact = np.float64(4) ** np.finfo(leaf.spec.dtype if is_float else float).nmant
        self.place(batch_array(leaf.spec, n_lanes))

    def place(self, array: NDArray) -> None:
        """Use another array ``[n_lanes, *shape]`` from now on."""
        self.array = array
        self._rows = list(array)  # views, except of scalars
        shape = self.spec.shape
        self._joined = array.reshape(len(array) * shape[0], *shape[1:]) if shape else None

    def write(self, lanes: Sequence[int], values: Sequence[Any]) -> None:
        """Write one value per lane.

        Args:
            lanes: Ascending lane numbers.
            values: One value per lane.

        Raises:
            BadValue: If a value does not fit.
        """
        if self.watch is not None:
            self.watch = self.watch.look(lanes, values)
        if self._joined is None:
            array = as_numbers(values)
            # NumPy converts integers next to a float to floats, which may change large ones.
            is_exact = array.dtype.kind != "f" or np.vdot(array, array) < self._most_exact
            if not (is_exact and self._wrote(lanes, array)):
                self._write_each(lanes, values)
            return
        shape, (dtype, wider), is_wider = self.spec.shape, self._dtypes, False
        try:
            for value in values:
                if value.dtype is not dtype:
                    if value.dtype is not wider:
                        break
                    is_wider = True
                if value.shape != shape:
                    break
            else:
                with np.errstate(over="raise") if is_wider else _NO_CHECK:
                    if len(values) == self._n_lanes:
                        np.concatenate(values, out=self._joined)
                    else:
                        for lane, value in zip(lanes, values, strict=True):
                            self._rows[lane][...] = value
                return
        except (AttributeError, FloatingPointError):
            pass  # not an array, or out of the range of float32: converted or refused below
        self._write_each(lanes, values)

    def write_batch(self, lanes: Sequence[int], values: Any) -> None:
        """Write rows of an array of all lanes.

        Args:
            lanes: Ascending lane numbers, at least one.
            values: ``[n_lanes, *shape]``; only the rows of ``lanes`` are read.

        Raises:
            BadValue: If they do not fit.
        """
        values = self._rows_of(lanes, values)
        if self.watch is not None:
            self.watch = self.watch.look(lanes, values)
        if not self._wrote(lanes, values):
            self._write_each(lanes, values)

    def _rows_of(self, lanes: Sequence[int], values: Any) -> NDArray:
        """Return the rows of some lanes; other rows are ignored."""
        array = values if isinstance(values, np.ndarray) else as_numbers(values)
        if array.shape[:1] != (self._n_lanes,):
            raise BadValue(
                lanes[0],
                f"{self.key!r} should have one row for each of {self._n_lanes} lanes, got "
                f"{array.dtype}{list(array.shape)}",
                fix="return arrays of all lanes, and name the parts of a dict",
            )
        return array[_ALL if len(lanes) == self._n_lanes else list(lanes)]

    def _wrote(self, lanes: Sequence[int], rows: NDArray) -> bool:
        """Write an array of rows; returns False if they have to be converted one by one."""
        try:
            if rows.dtype not in self._dtypes or rows.shape[1:] != self.spec.shape:
                batch_spec = TensorSpec((len(lanes), *self.spec.shape), self.spec.dtype)
                rows = self._converted(rows, batch_spec)
            with np.errstate(over="raise"):
                self.array[_ALL if len(lanes) == self._n_lanes else list(lanes)] = rows
        except (SpecError, FloatingPointError):
            return False
        return True

    def _write_each(self, lanes: Sequence[int], values: Sequence[Any]) -> None:
        """Convert the values one by one, so that an error names the lane."""
        rows = _each(lanes, values, lambda value: self._converted(value, self.spec))
        for lane, row in zip(lanes, rows, strict=True):
            self.array[lane] = row

    def _converted(self, value: Any, spec: TensorSpec) -> NDArray:
        return converted(value, spec, self.key)


class Float32Watch:
    """Warns in the first steps if float32 cannot distinguish successive float64 values.

    Args:
        key: The key of the values.
        shape: Their shape, ``[n_lanes, ...]``.
    """

    def __init__(self, key: str, shape: tuple[int, ...]) -> None:
        self._key, self._last, self._n_looks = key, np.full(shape, np.nan), 0
        self._n_changed, self._n_lost = np.zeros((2, *shape[1:]), np.int64)

    def look(self, lanes: Sequence[int], values: Any) -> Float32Watch | None:
        """Compare values with the lanes' previous ones; returns itself, ``None`` when done."""
        new, rows = as_numbers(values), list(lanes)
        if new.dtype != np.float64 or new.shape != self._last[rows].shape:
            return None  # the column refuses invalid values
        old, self._last[rows] = self._last[rows], new
        with np.errstate(all="ignore"):
            has_changed = np.abs(new - old) > _ROUNDING * np.abs(new)
            is_lost = has_changed & (new.astype(np.float32) == old.astype(np.float32))
        self._n_looks += 1
        self._n_changed += has_changed.sum(0)
        self._n_lost += is_lost.sum(0)
        is_alike = (self._n_lost >= _N_LOST) & (2 * self._n_lost >= self._n_changed)
        if is_alike.any():
            key, value = self._key, new[0][is_alike].tolist()[0]
            _LOG.warning(_ALIKE, key, value, key, extra={"once": f"float64 {key}"})
            return None
        return self if self._n_looks < _N_WATCHED else None


class Columns:
    """All keys of the observations of a batch of lanes, and further columns.

    Args:
        structure: Structure of an observation.
        key: Key of an observation that is not a dict; if it ends in a slash, prefix of the parts of
            any observation.
        n_lanes: Number of rows.
        others: Columns of other keys, written elsewhere.

    Attributes:
        structure: Structure of an observation.
        observed: Leaves of an observation by key, in the order of the structure.
        leaves: The same with the other keys.
        arrays: Arrays ``[n_lanes, *shape]`` by key, overwritten in place.
    """

    def __init__(
        self,
        structure: Structure,
        key: str,
        n_lanes: int,
        others: Sequence[Column] = (),
    ) -> None:
        self.structure = structure
        self.observed = leaves_of({key[:-1]: structure} if key.endswith("/") else structure, key)
        self.leaves = self.observed | {column.key: column.leaf for column in others}
        self._columns = [Column(key, leaf, n_lanes) for key, leaf in self.observed.items()]
        for column in self._columns:
            if column.spec.dtype == np.float32:
                column.watch = Float32Watch(column.key, (n_lanes, *column.spec.shape))
        self._all = [*self._columns, *others]
        self.arrays: dict[str, NDArray] = {column.key: column.array for column in self._all}
        self._flatten = flattener(structure, "observation")
        if isinstance(structure, Leaf):
            self.write = self._columns[0].write  # type: ignore[method-assign, assignment]
            self.write_batch = self._columns[0].write_batch  # type: ignore[method-assign, assignment]

    def place(self, arrays: Mapping[str, NDArray]) -> None:
        """Use other arrays from now on; unknown keys are ignored."""
        for column in self._all:
            column.place(arrays[column.key])
            self.arrays[column.key] = column.array

    def write(self, lanes: Sequence[int], observations: Sequence[Any]) -> None:
        """Write one observation per lane.

        Raises:
            BadValue: If one is invalid, naming its key, and expected and actual value.
        """
        rows = _each(lanes, observations, self._flatten)
        for column, values in zip(self._columns, zip(*rows, strict=True), strict=True):
            column.write(lanes, values)

    def write_batch(self, lanes: Sequence[int], observations: Any) -> None:
        """Write rows of an observation of all lanes, batched like Gymnasium's vector spaces.

        Args:
            lanes: Ascending lane numbers, at least one.
            observations: The structure of an observation, with arrays ``[n_lanes, ...]``.

        Raises:
            BadValue: If it is invalid, naming its key, and expected and actual value.
        """
        (parts,) = _each(lanes[:1], [observations], self._flatten)
        for column, values in zip(self._columns, parts, strict=True):
            column.write_batch(lanes, values)
