"""Which keys of Gymnasium's ``info`` become keys of a step, and with which shapes and dtypes.

The user names them in ``info_keys``. What is not declared there is learned from infos that the
environment has shown. A key may lead into nested dicts: ``"episode/r"`` is ``info["episode"]["r"]``
unless there is an ``info["episode/r"]``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from rlpool.data.specs import (
    Leaf,
    TensorSpec,
    fitted,
    join_key,
    leaves_of,
    numpy_dtype,
    stored_dtype,
    structure_of_space,
)
from rlpool.data.storage import NDArray
from rlpool.envs.columns import BadValue, Column, as_array
from rlpool.errors import SpecError

InfoKeys = Mapping[str, Any] | Iterable[str] | None
"""What users give as ``info_keys``, see ``GymEnv``."""

Wanted = dict[str, TensorSpec | None]
"""Key to spec, ``None`` if it has to be learned."""

_EXAMPLE = 'such as info_keys={"success": bool, "cost": np.float32, "action_mask": (np.int8, 4)}'


def wanted_infos(info_keys: InfoKeys, *, keep_float64: bool) -> Wanted:
    """Read ``info_keys``, nested ones joined with ``/``.

    Args:
        info_keys: As users give it.
        keep_float64: Store ``float`` as float64, otherwise as float32.

    Raises:
        SpecError: For anything that is no name, dtype, shape or space.
    """
    if info_keys is None:
        return {}
    if isinstance(info_keys, Mapping):
        pairs = list(info_keys.items())
    elif isinstance(info_keys, Iterable) and not isinstance(info_keys, str | bytes):
        names = sorted(info_keys, key=str) if isinstance(info_keys, Set) else info_keys
        pairs = [(name, None) for name in names]
    else:
        raise SpecError(
            f"info_keys should be a dict or a list of names, got {info_keys!r:.60}",
            fix=f"pass keys of the info with their dtypes, {_EXAMPLE}",
        )
    wanted: Wanted = {}
    for name, value in pairs:
        for key, spec in _declared("", name, value, keep_float64):
            if key in wanted:
                raise SpecError(f"info_keys has {key!r} twice", fix="leave out one of them")
            wanted[key] = spec
    return wanted


def _declared(
    prefix: str, name: Any, value: Any, keep_float64: bool
) -> Iterator[tuple[str, TensorSpec | None]]:
    """The leaves of one entry of ``info_keys``."""
    if not isinstance(name, str) or not name:
        raise SpecError(
            f"a key in info_keys should be a name, got {name!r:.60}",
            fix=f"name keys of the info, {_EXAMPLE}",
        )
    key = join_key(prefix, name)
    if value is None:
        yield key, None
    elif isinstance(value, Mapping):
        for inner, part in value.items():
            yield from _declared(key, inner, part, keep_float64)
    elif callable(getattr(value, "sample", None)) and callable(getattr(value, "contains", None)):
        shown = f"info_keys[{key!r}]"
        structure = structure_of_space(value, keep_float64=True, name=shown)
        yield from ((leaf, each.spec) for leaf, each in leaves_of({key: structure}, "").items())
    else:
        yield key, _spec_of(key, value, keep_float64)


def _spec_of(key: str, value: Any, keep_float64: bool) -> TensorSpec:
    """The spec for a dtype, or for a dtype and a shape."""
    dtype: Any = value
    shape: Any = ()
    if isinstance(value, TensorSpec):
        dtype, shape = value.dtype, value.shape
    elif isinstance(value, tuple | list) and len(value) == 2:
        dtype, shape = value
    try:
        if isinstance(dtype, torch.dtype):
            dtype = numpy_dtype(dtype)
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
    if value is None:
        for head, rest in _splits(key):
            inner = info.get(head)
            if isinstance(inner, Mapping):
                value = value_of(inner, rest)
                if value is not None:
                    break
    return value


def batch_of(infos: Mapping[str, Any], key: str) -> tuple[Any, NDArray | None]:
    """What the infos of a vector environment hold under a key.

    Returns:
        Values ``[n_lanes, ...]`` (or a dict of them), ``None`` if there are none, and which lanes
        have one, bool ``[n_lanes]``: Gymnasium says so under ``_key``. ``None`` for all of them.
    """
    value = infos.get(key)
    if value is not None:
        return value, _mask(infos, key)
    for head, rest in _splits(key):
        inner = infos.get(head)
        if isinstance(inner, Mapping):
            value, mask = batch_of(inner, rest)
            if value is not None:
                outer = _mask(infos, head)
                both = mask if outer is None else outer if mask is None else mask & outer
                return value, both
    return None, None


def _splits(key: str) -> Iterator[tuple[str, str]]:
    """All ways to divide a key at a slash."""
    for place, letter in enumerate(key):
        if letter == "/":
            yield key[:place], key[place + 1 :]


def _mask(infos: Mapping[str, Any], key: str) -> NDArray | None:
    mask = infos.get(f"_{key}")
    if isinstance(mask, torch.Tensor):
        mask = as_array(mask)
    is_mask = isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.ndim == 1
    return mask if is_mask else None


def names_in(infos: Iterable[Any]) -> set[str]:
    """The keys of infos, nested ones joined with ``/``."""
    return {
        name
        for info in infos
        if isinstance(info, Mapping)
        for name, _ in _parts("", {key: info[key] for key in info if not _is_mask_of(key, info)})
    }


def _is_mask_of(key: Any, infos: Mapping[Any, Any]) -> bool:
    return isinstance(key, str) and key[:1] == "_" and key[1:] in infos


def _parts(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value that may be a dict."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            if not _is_mask_of(name, value):
                yield from _parts(join_key(key, str(name)), part)
    elif value is not None:
        yield key, value


class InfoLearner:
    """Finds out shapes and dtypes of keys from infos that environments have shown.

    Args:
        wanted: The keys.
        keep_float64: Store float64 as it is, otherwise as float32.
    """

    def __init__(self, wanted: Wanted, *, keep_float64: bool) -> None:
        self._wanted = wanted
        self._keep_float64 = keep_float64
        self._shown: list[Any] = []
        self._found: dict[str, dict[str, TensorSpec]] = {}
        self.unknown = [key for key, spec in wanted.items() if spec is None]

    def look_at(self, infos: Iterable[Any]) -> None:
        """Look at infos of single environments.

        Raises:
            SpecError: If a value is not made of numbers, or has another shape than before.
        """
        for info in infos:
            self._shown.append(info)
            for key in self.unknown if isinstance(info, Mapping) else ():
                self._take(key, _parts(key, value_of(info, key)))

    def look_at_batch(self, infos: Any) -> None:
        """Look at the infos of a vector environment: arrays ``[n_lanes, ...]``.

        Raises:
            SpecError: As ``look_at``.
        """
        if not isinstance(infos, Mapping):
            return self.look_at(infos if isinstance(infos, list | tuple) else ())
        self._shown.append(infos)
        for key in self.unknown:
            for name, values in _parts(key, batch_of(infos, key)[0]):
                rows = as_array(values)
                one_of_each = rows if rows.dtype == object else rows[:1]
                self._take(key, ((name, row) for row in one_of_each if row is not None))

    def _take(self, key: str, parts: Iterable[tuple[str, Any]]) -> None:
        for name, value in parts:
            spec = self._described(name, value)
            known = self._found.setdefault(key, {}).setdefault(name, spec)
            if known.shape != spec.shape:
                raise SpecError(
                    f"info {name!r} should keep its shape, got {list(known.shape)} and then "
                    f"{list(spec.shape)}",
                    fix="give it one shape in the environment, or leave it out of info_keys",
                )
            dtype = stored_dtype(np.result_type(known.dtype, spec.dtype), self._keep_float64)
            self._found[key][name] = TensorSpec(spec.shape, dtype)

    def _described(self, name: str, value: Any) -> TensorSpec:
        try:
            array = as_array(value)
            spec = TensorSpec(array.shape, stored_dtype(array.dtype, self._keep_float64))
            _ = spec.torch_dtype  # not all numbers of NumPy have one
        except (ValueError, TypeError, RuntimeError):
            array = np.empty((), object)
        if array.dtype.kind not in "fiub":
            raise SpecError(
                f"info {name!r} should be a number or an array of numbers, got {value!r:.60}",
                fix="leave it out of info_keys, or wrap the environment and turn it into numbers",
            )
        return spec

    @property
    def has_all(self) -> bool:
        """Whether nothing is left to learn, or nothing had to be."""
        return len(self._found) == len(self.unknown)

    def specs(self, why_no_step: str = "") -> dict[str, TensorSpec]:
        """The specs of all keys, in the order of ``wanted``.

        Args:
            why_no_step: Why only a reset has shown infos, for errors.

        Raises:
            SpecError: If nothing was shown under a key; it names those that there are.
        """
        specs: dict[str, TensorSpec] = {}
        for key, spec in self._wanted.items():
            specs |= self._found.get(key, {}) if spec is None else {key: spec}
        missing = [key for key in self.unknown if key not in self._found]
        if missing:
            there = ", ".join(map(repr, sorted(names_in(self._shown)))) or "no keys"
            shown = f"reset gave {there} ({why_no_step})"
            if not why_no_step:
                shown = f"a reset and a step gave {there}"
            declared = ", ".join(f"{key!r}: np.float32" for key in missing)
            raise SpecError(
                f"info has no {', '.join(map(repr, missing))}: {shown}",
                fix="correct the name; or, for a key that appears later, declare its dtype: "
                f"info_keys={{{declared}}}",
            )
        return specs


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
