"""Keys of Gymnasium's ``info`` as keys of a step, written to one array per key.

The user lists them in ``info_keys``. A key can refer to nested dicts: ``"episode/r"`` is
``info["episode"]["r"]`` unless ``info["episode/r"]`` exists. A key that is missing from an info is
zero. Numbers may have any dtype if the conversion to the declared one is exact.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import torch

from rlpool.data.specs import Leaf, TensorSpec, fitted, numpy_dtype, stored_dtype
from rlpool.data.storage import NDArray
from rlpool.envs.columns import BadValue, Column, as_array, as_numbers
from rlpool.errors import SpecError

InfoKeys = Mapping[str, Any] | Iterable[str] | None
"""The argument ``info_keys`` of ``GymEnv``."""

_LOG = logging.getLogger("rlpool")
_DECLARE = (
    "declare the environment's values in info_keys by dtype or (dtype, shape); name the parts of "
    'a dict, such as "episode/r"'
)
_EXAMPLE = 'such as info_keys={"success": bool, "cost": np.float32, "action_mask": (np.int8, 4)}'


def info_specs(
    info_keys: InfoKeys, *, keep_float64: bool | Collection[str]
) -> dict[str, TensorSpec]:
    """Read ``info_keys``.

    Args:
        info_keys: The user's argument.
        keep_float64: True to store ``float`` as float64; otherwise it becomes float32.

    Raises:
        SpecError: For anything but names, and numeric dtypes with or without a shape.
    """
    if info_keys is None:
        return {}
    if isinstance(info_keys, Mapping):
        pairs = list(info_keys.items())
    elif isinstance(info_keys, Iterable) and not isinstance(info_keys, str | bytes):
        pairs = [(name, np.float32) for name in info_keys]
    else:
        raise _refused(f"info_keys should be a dict or a list of names, got {info_keys!r:.60}")
    names = [name for name, _ in pairs]
    for name in names:
        if not isinstance(name, str) or not name or names.count(name) > 1:
            raise _refused(f"info_keys should have distinct names, got {name!r:.60}")
    return {name: _spec_of(name, value, keep_float64 is True) for name, value in pairs}


def _spec_of(key: str, value: Any, keep_float64: bool) -> TensorSpec:
    """Return the spec of a dtype, or of a dtype and a shape."""
    if isinstance(value, TensorSpec):
        return value
    dtype, shape = value if isinstance(value, tuple | list) and len(value) == 2 else (value, ())
    try:
        if isinstance(dtype, torch.dtype):
            dtype = numpy_dtype(dtype)
        sizes = tuple(map(int, shape)) if isinstance(shape, Sequence) else (int(shape),)
        is_kept = keep_float64 or dtype is not float  # Python's float does not imply float64
        spec = TensorSpec(sizes, stored_dtype(np.dtype(dtype), is_kept))
        is_number = spec.dtype.kind in "fiub" and dtype is not None  # NumPy reads None as float64
        if is_number and spec.torch_dtype.itemsize and min(sizes, default=0) >= 0:
            return spec
    except (TypeError, ValueError):
        pass
    message = f"info_keys[{key!r}] should be a numeric dtype or (dtype, shape), got {value!r:.60}"
    raise _refused(message)


def _refused(message: str) -> SpecError:
    return SpecError(message, fix=f"list keys of the info with their dtypes, {_EXAMPLE}")


def value_of(info: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key of an info, ``None`` if it is missing."""
    value = info.get(key)
    if value is None and "/" in key:
        head, _, rest = key.partition("/")
        inner = info.get(head)
        return value_of(inner, rest) if isinstance(inner, Mapping) else None
    return value


def rows_of(infos: Mapping[str, Any], key: str) -> Any:
    """Return the values of a key of a vector environment's infos, ``None`` if it is missing.

    Returns:
        Values ``[n_lanes, ...]``: lanes without a value, as marked by Gymnasium's ``_key``, have 0,
        or ``None`` for objects.
    """
    rows, mask = infos.get(key), infos.get(f"_{key}")
    head, _, rest = key.partition("/")
    if rows is None and rest and isinstance(infos.get(head), Mapping):
        rows, mask = rows_of(infos[head], rest), infos.get(f"_{head}")
    has_value = as_array(mask)
    if rows is None or has_value.dtype != np.bool_ or has_value.ndim != 1:
        return rows
    rows = np.array(as_array(rows))
    rows[~has_value] = None if rows.dtype.kind == "O" else 0
    return rows


class InfoColumn(Column):
    """One key of the infos.

    Args:
        key: Its name.
        spec: Shape and dtype of a value.
        n_lanes: Number of rows.

    Attributes:
        zero: The value of a missing key.
    """

    def __init__(self, key: str, spec: TensorSpec, n_lanes: int) -> None:
        super().__init__(key, Leaf(spec, is_scalar=not spec.shape), n_lanes)
        self.zero = np.zeros(spec.shape, spec.dtype)[()]
        self._is_nested = "/" in key

    def values(self, infos: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the values of infos, zero where they are missing."""
        key, zero = self.key, self.zero
        if self._is_nested:
            found = [value_of(info, key) for info in infos]
            return [zero if value is None else value for value in found]
        return [zero if (value := info.get(key)) is None else value for info in infos]

    def write_batch(self, lanes: Sequence[int], values: Any) -> None:
        """Write rows of an array of all lanes as ``Column`` does, zeros if it is ``None``."""
        if values is None:
            self.array[list(lanes)] = 0
            return
        array = self._rows_of(lanes, values)
        if array.dtype.kind == "O":
            self.write(lanes, [self.zero if value is None else value for value in array])
        else:
            super().write_batch(lanes, values)

    def _converted(self, value: Any, spec: TensorSpec) -> NDArray:
        array = as_numbers(value)
        if array.dtype.kind != "O" and array.shape == spec.shape:
            return fitted(f"info {self.key!r}", array, spec.dtype, _DECLARE)
        got = f"{value!r:.60}" if array.dtype.kind == "O" else f"{array.dtype}{list(array.shape)}"
        raise SpecError(f"info {self.key!r} should be {spec}, got {got}", fix=_DECLARE)


class InfoColumns:
    """All keys of the infos of a batch of lanes.

    Args:
        specs: Specs by key.
        n_lanes: Number of rows.

    Attributes:
        columns: The columns.
        unseen: Keys that have not occurred in an info; until the end of the first episode.
        is_watching: Whether the seen keys have not been reported yet.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], n_lanes: int) -> None:
        self.columns = [InfoColumn(key, spec, n_lanes) for key, spec in specs.items()]
        self.unseen = set(specs)
        self.is_watching = self._warns = True
        self._others: set[str] = set()  # keys of infos until then

    def write(self, lanes: Sequence[int], infos: Sequence[Any]) -> None:
        """Write the values of one info per lane.

        Raises:
            BadValue: If a value is invalid, or an info is not a dict.
        """
        try:
            for column in self.columns:
                column.write(lanes, column.values(infos))
        except AttributeError:
            for lane, info in zip(lanes, infos, strict=True):
                if not isinstance(info, Mapping):
                    message = f"the info should be a dict, got {info!r:.60}"
                    raise BadValue(lane, message, "return a dict, which may be empty") from None
            raise
        for info in infos if self.unseen else ():
            self.unseen = {key for key in self.unseen if value_of(info, key) is None}
            self._others.update(info)

    def write_batch(self, lanes: Sequence[int], infos: Any) -> None:
        """Write the infos of a vector environment.

        Args:
            lanes: Ascending lane numbers, at least one.
            infos: Arrays ``[n_lanes, ...]`` by key, with masks as in Gymnasium.

        Raises:
            BadValue: If a value is invalid.
        """
        if not isinstance(infos, Mapping):
            message = f"the infos should be a dict of arrays, got {infos!r:.60}"
            raise BadValue(lanes[0], message, "omit the wrapper that makes a list of them")
        for column in self.columns:
            column.write_batch(lanes, rows_of(infos, column.key))
        if self.unseen:
            self.unseen = {key for key in self.unseen if rows_of(infos, key) is None}
            self._others.update(infos)

    def report_seen(self, seen: MutableSequence[int] | memoryview) -> None:
        """Report the keys of infos after an episode; the first time, warn about missing ones.

        Args:
            seen: One element, with a bit per key (those after the 62nd share one).
        """
        if self.unseen and self._warns:
            unseen = " or ".join(map(repr, sorted(self.unseen)))
            others = ", ".join(sorted(map(repr, self._others))) or "no keys"
            _LOG.warning(
                "no info of a whole episode had %s; found %s (info_keys): zero is stored",
                unseen,
                others,
                extra={"once": f"info_keys {unseen}"},  # from one worker only
            )
        self._warns = False
        for number, column in enumerate(self.columns):
            if column.key not in self.unseen:
                seen[0] |= 1 << min(number, 62)
        self.is_watching = bool(self.unseen)
