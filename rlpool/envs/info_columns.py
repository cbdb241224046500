"""Keys of Gymnasium's ``info`` of a batch of lanes, written to one array per key.

An info may leave out a key, which then is zero, and may give numbers of any dtype, if they are the
same in the declared one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlpool.data.specs import Leaf, TensorSpec, fitted
from rlpool.data.storage import NDArray
from rlpool.envs.columns import BadValue, Column, as_array
from rlpool.envs.info_keys import batch_of, names_in, value_of
from rlpool.errors import SpecError

_LOG = logging.getLogger("rlpool")
_ALL = slice(None)
_FLOATS = np.dtype(np.float32), np.dtype(np.float64)
_MOST_SQUARED = 2.0**48  # below its root, floats of both hold every integer
_DECLARE = "declare in info_keys what the environment gives, as a dtype or (dtype, shape)"


def _what_parts(key: str, value: Mapping[str, Any]) -> tuple[str, str]:
    """What is wrong about a dict where numbers should be, and the fix."""
    parts = sorted(names_in([{key: value}]))
    what = f"info {key!r} should be numbers, got a dict of {', '.join(map(repr, parts))}"
    return what, "name its parts in info_keys, or None for all of it"


def _fitted(value: Any, spec: TensorSpec, key: str) -> NDArray:
    """Convert a value, see ``fitted``.

    Raises:
        SpecError: If it does not fit, naming the key and both sides.
    """
    if isinstance(value, Mapping):
        what, fix = _what_parts(key, value)
        raise SpecError(what, fix=fix)
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
    raise SpecError(f"info {key!r} should be {spec}, {got}", fix=_DECLARE)


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

    def write_batch(self, lanes: Sequence[int], values: Any) -> None:
        """See ``Column.write_batch``; values may be an array of objects, or ``None``."""
        self.write_some(lanes, values, None)

    def write_some(self, lanes: Sequence[int], values: Any, has_value: NDArray | None) -> None:
        """Write rows of an array of all lanes.

        Args:
            lanes: Ascending lane numbers, at least one.
            values: ``[n_lanes, *shape]``, or ``None``.
            has_value: Which lanes have a value, ``None`` if all have.

        Raises:
            BadValue: If a value does not fit.
        """
        rows = list(lanes)
        if values is None:
            self.array[rows] = 0
            return
        if isinstance(values, Mapping):
            raise BadValue(lanes[0], *_what_parts(self.key, values))
        try:
            array = as_array(values)
        except (ValueError, TypeError, RuntimeError):  # parts of different shapes
            array = np.empty((), object)
        if not array.ndim or len(array) != self._n_lanes:
            what = f"info {self.key!r} should have one row for each of {self._n_lanes} lanes"
            raise BadValue(lanes[0], f"{what}, got {array.dtype}{list(array.shape)}")
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
    """

    def __init__(self, specs: Mapping[str, TensorSpec], n_lanes: int) -> None:
        self.columns = [InfoColumn(key, spec, n_lanes) for key, spec in specs.items()]
        self._unseen = set(specs)  # until the first episode has ended
        self._others: set[str] = set()  # keys that appeared until then

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
        if self._unseen:
            self._note(infos, lambda info, key: value_of(info, key) is not None)

    def write_batch(self, lanes: Sequence[int], infos: Any, left_out: Collection[str] = ()) -> None:
        """Write what the infos of a vector environment hold.

        Args:
            lanes: Ascending lane numbers, at least one.
            infos: Key to array ``[n_lanes, ...]``, with masks as Gymnasium's; or one info per lane.
            left_out: Keys (those above them if they are nested) that do not belong to these lanes.

        Raises:
            BadValue: If a value does not fit.
        """
        if not isinstance(infos, Mapping):
            rows = [infos[lane] for lane in lanes]
            if left_out:
                rows = [{key: row[key] for key in row if key not in left_out} for row in rows]
            self.write(lanes, rows)
            return
        for column in self.columns:
            is_out = column.key.partition("/")[0] in left_out
            found = (None, None) if is_out else batch_of(infos, column.key)
            column.write_some(lanes, *found)
        if self._unseen:
            self._note([infos], lambda infos, key: batch_of(infos, key)[0] is not None)

    def write_final(
        self, ended: Sequence[int], infos: Any, of_vector: Collection[str] = ()
    ) -> None:
        """Write the infos of steps that ended an episode, where the lanes have restarted since.

        Args:
            ended: Ascending lane numbers, at least one.
            infos: The infos of the vector environment, with ``final_info``; without it, they
                are those of the step.
            of_vector: Keys that are beside ``final_info``, since the vector environment's wrappers
                give them.
        """
        if not isinstance(infos, Mapping):
            rows = [infos[lane] for lane in ended]
            own = [{key: row[key] for key in of_vector if key in row} for row in rows]
            finals = [row.get("final_info", row) for row in rows]
            self.write(ended, [{**final, **more} for final, more in zip(finals, own, strict=True)])
            return
        final = infos.get("final_info")
        if final is None:
            self.write_batch(ended, infos)
            return
        self.write_batch(ended, final)
        for column in self.columns:
            if column.key.partition("/")[0] in of_vector:
                column.write_some(ended, *batch_of(infos, column.key))

    def _note(self, infos: Iterable[Any], holds: Any) -> None:
        """Note which keys have appeared, and which others."""
        for info in infos:
            self._unseen = {key for key in self._unseen if not holds(info, key)}
            self._others |= names_in([info])

    def note_end(self) -> None:
        """Warn, once, of keys that did not appear in the first episode that has ended."""
        if self._unseen:
            unseen = " or ".join(map(repr, sorted(self._unseen)))
            _LOG.warning(
                "no %s in any info of a whole episode, which had %s: zero is stored (info_keys)",
                unseen,
                ", ".join(map(repr, sorted(self._others))) or "no keys",
                extra={"once": f"info_keys {unseen}"},  # not from every worker
            )
        self._unseen = set()
        self._others.clear()
