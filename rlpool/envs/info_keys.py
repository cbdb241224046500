"""Keys of Gymnasium's ``info`` as keys of a step, written to one array per key.

The user names them in ``info_keys``. A key may lead into nested dicts: ``"episode/r"`` is
``info["episode"]["r"]`` unless there is an ``info["episode/r"]``. A key that an info leaves out is
zero. Numbers may have any dtype, if they are the same in the declared one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import torch

from rlpool.data.specs import Leaf, TensorSpec, fitted, numpy_dtype, stored_dtype
from rlpool.data.storage import NDArray
from rlpool.envs.columns import BadValue, Column, as_array
from rlpool.errors import SpecError

InfoKeys = Mapping[str, Any] | Iterable[str] | None
"""What users give as ``info_keys``, see ``GymEnv``."""

_LOG = logging.getLogger("rlpool")
_ALL = slice(None)
_FLOATS = np.dtype(np.float32), np.dtype(np.float64)
_MOST_SQUARED = 2.0**48  # below its root, floats of both hold every integer
_DECLARE = "declare in info_keys what the environment gives, as a dtype or (dtype, shape)"
_EXAMPLE = 'such as info_keys={"success": bool, "cost": np.float32, "action_mask": (np.int8, 4)}'


def info_specs(
    info_keys: InfoKeys, *, keep_float64: bool | Collection[str]
) -> dict[str, TensorSpec]:
    """Read ``info_keys``.

    Args:
        info_keys: As users give it.
        keep_float64: True to store ``float`` as float64; otherwise it becomes float32.

    Raises:
        SpecError: For anything but names, and dtypes of numbers with or without a shape.
    """
    if isinstance(info_keys, Mapping):
        pairs = list(info_keys.items())
    elif isinstance(info_keys, Iterable) and not isinstance(info_keys, str | bytes):
        pairs = [(name, np.float32) for name in info_keys]
    elif info_keys is None:
        return {}
    else:
        raise SpecError(
            f"info_keys should be a dict or a list of names, got {info_keys!r:.60}",
            fix=f"pass keys of the info with their dtypes, {_EXAMPLE}",
        )
    specs: dict[str, TensorSpec] = {}
    for name, value in pairs:
        if not isinstance(name, str) or not name or name in specs:
            what = "is there twice" if name in specs else "is not a name"
            fix = f"name keys of the info once each, {_EXAMPLE}"
            raise SpecError(f"the key {name!r:.60} in info_keys {what}", fix=fix)
        specs[name] = _spec_of(name, value, keep_float64 is True)
    return specs


def _spec_of(key: str, value: Any, keep_float64: bool) -> TensorSpec:
    """The spec for a dtype, or for a dtype and a shape."""
    if isinstance(value, TensorSpec):
        return value
    dtype, shape = value if isinstance(value, tuple | list) and len(value) == 2 else (value, ())
    try:
        if isinstance(dtype, torch.dtype):
            dtype = numpy_dtype(dtype)
        elif dtype is None:
            raise TypeError("NumPy takes None for float64")
        sizes = tuple(map(int, shape)) if isinstance(shape, Sequence) else (int(shape),)
        is_kept = keep_float64 or dtype is not float  # which is no more than a number
        spec = TensorSpec(sizes, stored_dtype(np.dtype(dtype), is_kept))
        is_good = spec.dtype.kind in "fiub" and min(sizes, default=0) >= 0
        _ = spec.torch_dtype
    except (TypeError, ValueError):
        is_good = False
    if not is_good:
        raise SpecError(
            f"info_keys[{key!r}] should be a dtype of numbers, or (dtype, shape), "
            f"got {value!r:.60}",
            fix=f"declare what the info holds, {_EXAMPLE}",
        )
    return spec


def value_of(info: Mapping[str, Any], key: str) -> Any:
    """What an info holds under a key, ``None`` if it holds nothing."""
    value = info.get(key)
    if value is None and "/" in key:
        head, _, rest = key.partition("/")
        inner = info.get(head)
        return value_of(inner, rest) if isinstance(inner, Mapping) else None
    return value


def batch_of(infos: Mapping[str, Any], key: str) -> tuple[Any, NDArray | None]:
    """What the infos of a vector environment hold under a key.

    Returns:
        Values ``[n_lanes, ...]``, ``None`` if there are none, and which lanes have one, bool
        ``[n_lanes]``: Gymnasium says so under ``_key``. ``None`` for all of them.
    """
    value, mask = infos.get(key), _mask(infos, key)
    head, _, rest = key.partition("/")
    inner = infos.get(head)
    if value is None and rest and isinstance(inner, Mapping):
        outer = _mask(infos, head)
        value, mask = batch_of(inner, rest)
        if outer is not None:
            mask = outer if mask is None else mask & outer
    return value, mask


def _mask(infos: Mapping[str, Any], key: str) -> NDArray | None:
    mask = as_array(infos.get(f"_{key}"))
    return mask if mask.dtype == np.bool_ and mask.ndim == 1 else None


def _fitted(value: Any, spec: TensorSpec, key: str) -> NDArray:
    """Convert a value, see ``fitted``.

    Raises:
        SpecError: If it does not fit, naming the key and both sides.
    """
    try:
        array = as_array(value)
    except (ValueError, TypeError, RuntimeError):  # parts of different shapes
        array = np.empty((), object)
    if array.dtype.kind not in "fiub":
        got = f"got {value!r:.60}"
    elif array.shape != spec.shape:
        got = f"got {array.dtype}{list(array.shape)}"
    else:
        return fitted(f"info {key!r}", array, spec.dtype, _DECLARE)
    fix = f'name its parts, such as "{key}/..."' if isinstance(value, Mapping) else _DECLARE
    raise SpecError(f"info {key!r} should be {spec}, {got}", fix=fix)


class InfoColumn(Column):
    """One key of the infos.

    Args:
        key: Its name.
        spec: Shape and dtype of a value.
        n_lanes: Number of rows.

    Attributes:
        zero: What stands for a value that is left out.
    """

    def __init__(self, key: str, spec: TensorSpec, n_lanes: int) -> None:
        super().__init__(key, Leaf(spec, is_scalar=not spec.shape), n_lanes)
        zero = np.zeros(spec.shape, spec.dtype)
        self.zero: Any = zero if spec.shape else zero.item()
        self._is_nested = "/" in key

    def values(self, infos: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The values in infos, zero where they are left out."""
        key, zero = self.key, self.zero
        if self._is_nested:
            found = [value_of(info, key) for info in infos]
            return [zero if value is None else value for value in found]
        return [zero if (value := info.get(key)) is None else value for info in infos]

    def write_batch(
        self, lanes: Sequence[int], values: Any, has_value: NDArray | None = None
    ) -> None:
        """Write rows of an array of all lanes.

        Args:
            lanes: Ascending lane numbers, at least one.
            values: ``[n_lanes, *shape]``, also of objects, or ``None``.
            has_value: Which lanes have a value, ``None`` if all have.

        Raises:
            BadValue: If a value does not fit.
        """
        rows = list(lanes)
        if values is None:
            self.array[rows] = 0
            return
        try:
            array = as_array(values)
        except (ValueError, TypeError, RuntimeError):  # parts of different shapes
            array = np.empty((), object)
        if not array.ndim or len(array) != self._n_lanes:
            what = f"info {self.key!r} should have one row for each of {self._n_lanes} lanes"
            fix = f'name the parts of a dict, such as "{self.key}/..."'
            raise BadValue(lanes[0], f"{what}, got {array.dtype}{list(array.shape)}", fix)
        array = array[rows]  # a copy
        if has_value is not None and len(has_value) == self._n_lanes:
            array[~has_value[rows]] = None if array.dtype == object else 0
        spec = TensorSpec((len(rows), *self.spec.shape), self.spec.dtype)
        try:
            self.array[rows] = _fitted(array, spec, self.key)
        except SpecError:  # one by one, which tells the lane
            self.write(lanes, [self.zero if value is None else value for value in array])

    def _converted(self, value: Any) -> NDArray:
        return _fitted(value, self.spec, self.key)

    def _wrote_scalars(self, lanes: Sequence[int], values: Sequence[Any]) -> bool:
        """Write values that are all numbers; False if they are not, or may not fit."""
        wanted = self.spec.dtype
        try:
            array = np.array(values)
            if array.shape != (len(lanes),):
                return False
            if array.dtype.kind != "f":
                array = fitted(self.key, array, wanted)
            # Beside a float, integers have become floats: large ones may not be what they were.
            elif wanted not in _FLOATS or not np.vdot(array, array) < _MOST_SQUARED:
                return False
        except (ValueError, TypeError, RuntimeError, SpecError):
            return False
        self.array[_ALL if len(lanes) == self._n_lanes else lanes] = array
        return True


class InfoColumns:
    """All keys of the infos of a batch of lanes.

    Args:
        specs: Key to spec.
        n_lanes: Number of rows.

    Attributes:
        columns: The columns.
        unseen: Keys that no info has had; until the first episode has ended.
        is_watching: Whether it has still to be reported which keys infos have.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], n_lanes: int) -> None:
        self.columns = [InfoColumn(key, spec, n_lanes) for key, spec in specs.items()]
        self.unseen = set(specs)
        self.is_watching = self._warns = True
        self._others: set[str] = set()  # keys that infos had until then

    def write(self, lanes: Sequence[int], infos: Sequence[Any]) -> None:
        """Write what one info per lane holds.

        Raises:
            BadValue: If a value does not fit, or an info is not a dict.
        """
        try:
            for column in self.columns:
                column.write(lanes, column.values(infos))
        except AttributeError:
            for lane, info in zip(lanes, infos, strict=True):
                if not isinstance(info, Mapping):
                    what = f"the info should be a dict, got {info!r:.60}"
                    raise BadValue(lane, what, "return a dict, which may be empty") from None
            raise
        for info in infos if self.unseen else ():
            self.unseen = {key for key in self.unseen if value_of(info, key) is None}
            self._others.update(info)

    def write_batch(self, lanes: Sequence[int], infos: Any) -> None:
        """Write what the infos of a vector environment hold.

        Args:
            lanes: Ascending lane numbers, at least one.
            infos: Key to array ``[n_lanes, ...]``, with masks as Gymnasium's.

        Raises:
            BadValue: If a value does not fit.
        """
        if not isinstance(infos, Mapping):
            what = f"the infos should be a dict of arrays, got {infos!r:.60}"
            raise BadValue(lanes[0], what, "leave out the wrapper that makes a list of them")
        for column in self.columns:
            column.write_batch(lanes, *batch_of(infos, column.key))
        if self.unseen:
            self.unseen = {key for key in self.unseen if batch_of(infos, key)[0] is None}
            self._others.update(infos)

    def report_seen(self, seen: MutableSequence[int] | memoryview | None) -> None:
        """Report which keys infos had, when an episode has ended; at first with a warning.

        Args:
            seen: One element, for a bit per key (those after the 62nd share one). ``None`` if the
                warning of keys that were in no info is enough.
        """
        if self.unseen and self._warns:
            unseen = " or ".join(map(repr, sorted(self.unseen)))
            others = ", ".join(sorted(map(repr, self._others))) or "no keys"
            _LOG.warning(
                "no %s in any info of a whole episode, which had %s (info_keys): zero is stored",
                unseen,
                others,
                extra={"once": f"info_keys {unseen}"},  # not from every worker
            )
        self._warns = False
        if seen is None:
            self.unseen = set()
        else:
            is_seen = [column.key not in self.unseen for column in self.columns]
            for number in np.flatnonzero(is_seen).tolist():
                seen[0] |= 1 << min(number, 62)
        self.is_watching = bool(self.unseen)
