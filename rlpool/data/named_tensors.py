"""What ``DictTensor`` and ``TemporalDictTensor`` have in common, and the checks that both need."""

from __future__ import annotations

import importlib
import operator
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from rlpool.errors import SpecError, compose

_T = TypeVar("_T")
_Named = TypeVar("_Named", bound="NamedTensors")

# What selects rows: an int, a slice, an int tensor [N], or a bool mask [B].
Rows: TypeAlias = int | slice | Tensor

INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


class NamedTensors:
    """Tensors by name that share their leading dimensions. Iterating gives keys."""

    __slots__ = ("__weakref__", "_tensors")

    _tensors: dict[str, Tensor]

    def _with(self: _Named, tensors: dict[str, Tensor]) -> _Named:
        """Other tensors of the same rows, unchecked."""
        raise NotImplementedError

    def _map(self: _Named, change: Callable[[Tensor], Tensor]) -> _Named:
        """Every tensor changed in the same way."""
        raise NotImplementedError

    def _n_rows(self) -> int:
        """Number of rows; SpecError if something has none."""
        raise NotImplementedError

    def device(self) -> torch.device | None:
        """The device of all tensors, ``None`` without any."""
        raise NotImplementedError

    def keys(self) -> KeysView[str]:
        """Names of the tensors, in the order in which they were put in."""
        return self._tensors.keys()

    def values(self) -> ValuesView[Tensor]:
        """The tensors."""
        return self._tensors.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Pairs of name and tensor."""
        return self._tensors.items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._tensors

    @overload
    def __getitem__(self, key: str) -> Tensor: ...
    @overload
    def __getitem__(self: _Named, key: Rows) -> _Named: ...
    def __getitem__(self: _Named, key: str | Rows) -> Tensor | _Named:
        """The tensor of a key (``KeyError`` if there is none); anything else is ``index(key)``."""
        if not isinstance(key, str):
            return self.index(key)
        try:
            return self._tensors[key]
        except KeyError:
            raise KeyError(f"no key {key!r}, there are {list(self._tensors)}") from None

    def get(self: _Named, keys: Iterable[str], clone: bool = False) -> _Named:
        """Keep some keys.

        Args:
            keys: The keys to keep, in the order wanted.
            clone: Whether to copy the tensors; otherwise they are shared.

        Raises:
            KeyError: If a key does not exist.
            SpecError: If ``keys`` is a single string, or contains anything but strings.
        """
        kept = self._with({key: self[key] for key in listed_keys(keys)})
        return kept.clone() if clone else kept

    def index(self: _Named, rows: Rows) -> _Named:
        """Select rows; the same as ``batch[rows]``.

        Args:
            rows: An int drops the batch dimension and a slice keeps it; both give views. An int
                tensor ``[N]`` or a bool mask ``[B]`` copies. Negative ints count from the end.

        Raises:
            IndexError: If a row does not exist (a slice is cut to what exists, as in Python).
            SpecError: If ``rows`` is of another kind, a mask does not have B entries, or there are
                no rows.
        """
        found = resolve_rows(rows, self._n_rows())
        if not isinstance(found, Tensor):
            return self._map(itemgetter(found))
        on_device = found.to(self.device())
        # Copies whole rows: many times faster than tensor[rows] where rows are wide.
        return self._map(lambda tensor: tensor.index_select(0, on_device))

    def unfold(self: _Named) -> list[_Named]:
        """One batch of views ``[1, ...]`` per row."""
        return [self._map(itemgetter(slice(i, i + 1))) for i in range(self._n_rows())]

    def to(self: _Named, device: torch.device | str | int, non_blocking: bool = False) -> _Named:
        """Move to a device; gives ``self`` if everything is there already."""
        try:
            where = torch.empty(0, device=device).device
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            what = f"cannot move to the device {device!r:.40}: {str(error).splitlines()[0]}"
            raise SpecError(what, fix="use one that is there: 'cpu'") from error
        if self.device() in (None, where):
            return self
        return self._map(lambda tensor: tensor.to(where, non_blocking=non_blocking))

    def clone(self: _Named) -> _Named:
        """Copy every tensor."""
        return self._map(Tensor.clone)

    def __copy__(self: _Named) -> _Named:
        return self._with(dict(self._tensors))


def check(
    tensors: Iterable[tuple[Any, Any]], n_leading: int, first: tuple[str, Tensor] | None = None
) -> None:
    """Refuse what is no tensor, or differs in device or leading dimensions.

    Args:
        tensors: Pairs of name and tensor.
        n_leading: How many dimensions they share. 0-d tensors are accepted where it is 1.
        first: What they have to agree with, by default the first of them.
    """
    name: Any = None
    like: Any = None
    device = n_rows = None
    if first is not None:
        name, like = first
        device, n_rows = like.device, like.shape[0] if like.ndim else None
    for key, tensor in tensors:
        if not isinstance(tensor, Tensor) or not isinstance(key, str):
            what = f"key {key!r:.40} is no string" if isinstance(tensor, Tensor) else ""
            raise SpecError(
                what or f"key {key!r} is {kind(tensor)}",
                fix="name tensors with strings; convert with torch.as_tensor",
            )
        if device is None:
            name, like, device = key, tensor, tensor.device
        elif tensor.device != device:
            break
        shape = tensor.shape
        if shape:
            if n_rows is None:
                name, like, n_rows = key, tensor, shape[0]
            elif shape[0] != n_rows:
                break
        if n_leading > 1 and (len(shape) < 2 or shape[:2] != like.shape[:2]):
            break
    else:
        return
    raise SpecError(
        f"key {key!r} is {kind(tensor)}, key {name!r} is {kind(like)}",
        fix="all tensors need the same number of rows (and steps), and the same device",
    )


def check_alike(
    first: NamedTensors, other: NamedTensors, n_leading: int, name: str, *, subset: bool = False
) -> None:
    """Refuse other keys (with ``subset``, missing ones only), dtypes, devices, trailing shapes."""
    lonely = [key for key in first if key not in other]
    if not subset:
        lonely += [key for key in other if key not in first]
    if lonely:
        what = f"key {lonely[0]!r}: {name} has {list(other)}, the first has {list(first)}"
        raise SpecError(what, fix="keep the common keys with get(keys)")
    for key, tensor in first.items():
        match = other[key]
        if (
            match.dtype is not tensor.dtype
            or match.device != tensor.device
            or match.ndim != tensor.ndim
            or match.shape[n_leading:] != tensor.shape[n_leading:]
        ):
            raise SpecError(
                f"key {key!r} is {kind(match)} in {name}, {kind(tensor)} in the first",
                fix="convert one of them, for example with Tensor.to or Tensor.reshape",
            )


def instance(value: Any, wanted: type[_T], name: str) -> _T:
    """An argument that has to be of a class."""
    if not isinstance(value, wanted):
        raise SpecError(f"{name} is {kind(value)}", fix=f"pass a {wanted.__name__}")
    return value


def listed(values: Iterable[Any], wanted: type[_T], name: str) -> list[_T]:
    """Several values of a class as a list."""
    try:
        found = list(values)
    except (TypeError, RuntimeError):
        found = [values]
    for value in found:
        if not isinstance(value, wanted):
            raise SpecError(f"{name} got {kind(value)}", fix=f"pass a list of {wanted.__name__}")
    return found


def listed_keys(keys: Any) -> list[str]:
    """Several keys as a list; refuses a single one, and what is no key."""
    if isinstance(keys, str):
        raise SpecError(f"keys is the string {keys!r}", fix=f"pass [{keys!r}]")
    found = listed(keys, object, "keys")
    for key in found:
        if not isinstance(key, str):
            raise SpecError(f"key {key!r:.40} is no string", fix="pass a list of keys")
    return found  # type: ignore[return-value]


# Rows ---------------------------------------------------------------------------------------------


def resolve_rows(rows: Rows, n_elems: int) -> int | slice | Tensor:
    """Check a selection of rows; gives an int, a slice or an int64 ``[N]``, from the start."""
    if isinstance(rows, Tensor) and rows.ndim:
        if rows.dtype is torch.bool and rows.shape == (n_elems,):
            return rows.nonzero().squeeze(1)
        if rows.dtype in INDEX_DTYPES and rows.ndim == 1:
            bounds = [int(bound) for bound in rows.aminmax()] if len(rows) else []
            from_start = [checked_row(bound, n_elems) for bound in bounds]
            return rows.long() if bounds == from_start else rows.long() % n_elems
    elif isinstance(rows, slice):
        try:
            start, stop, step = rows.indices(n_elems)
        except (TypeError, ValueError, RuntimeError):
            step = 0  # not made of ints
        if step > 0:
            return slice(start, stop, step)
    elif (number := _int_or_none(rows)) is not None:
        return checked_row(number, n_elems)
    raise SpecError(
        f"cannot select from {n_elems} rows with {kind(rows)}",
        fix=f"use an int, a forward slice, an int tensor [N] or a bool mask [{n_elems}]",
    )


def checked_row(row: int, n_elems: int) -> int:
    """The number of a row, counted from the start; ``IndexError`` if it does not exist."""
    if -n_elems <= row < n_elems:
        return row % n_elems
    raise IndexError(f"row {row} does not exist, there are {n_elems}")


def row_pair(
    read: Tensor, write: Tensor, sizes: tuple[int, int], device: torch.device | None
) -> tuple[Tensor, Tensor]:
    """Check both sides of a copy of rows; gives int64 ``[N]`` each, counted from the start."""
    pair = []
    for selection, n_elems in zip((read, write), sizes, strict=True):
        rows = resolve_rows(selection, n_elems)
        if not isinstance(rows, Tensor):
            raise SpecError(f"rows are given by {kind(selection)}", fix="use an int64 tensor [N]")
        pair.append(rows.to(device))
    if pair[0].shape != pair[1].shape:
        what = f"{len(pair[0])} source rows for {len(pair[1])} destination rows"
        raise SpecError(what, fix="give one destination per source")
    return pair[0], pair[1]


def _int_or_none(value: Any) -> int | None:
    """An int, or what stands for one; ``None`` for everything else, bools too."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype not in INDEX_DTYPES):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def int_of(name: str, value: Any) -> int:
    """An int from an argument; refuses what is none, or none that torch takes."""
    number = _int_or_none(value)
    if number is None or not -(2**63) <= number < 2**63:
        raise SpecError(f"{name} is {kind(value)}", fix="use an int")
    return number


# Words, pickles ----------------------------------------------------------------------------------


def kind(value: object) -> str:
    """Words for a value in an error message."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value!r:.40}"
    device = "" if value.is_cpu else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{device}"


def table(title: str, entries: Iterable[tuple[str, Tensor]]) -> str:
    """Aligned lines of key, shape and dtype."""
    rows = [("key", "shape", "dtype")]
    for key, tensor in entries:
        dtype, _, shape = kind(tensor).partition(" ")
        rows.append((key, shape, dtype))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join([title, *lines])


def compact(value: Any) -> Any:
    """What to pickle: a view is copied, so that the storage it looks into is not written out."""
    if not isinstance(value, Tensor):
        return value  # tree_map can put anything in place of a tensor
    if value.untyped_storage().nbytes() == value.numel() * value.element_size():
        return value
    values = value.detach().clone(memory_format=torch.contiguous_format)
    return values.requires_grad_(value.requires_grad)


# TensorDict ---------------------------------------------------------------------------------------


def to_tensordict(values: Mapping[str, Any], batch_size: Sequence[int]) -> Any:
    """A ``TensorDict`` of these values, not copied."""
    try:
        tensordict = importlib.import_module("tensordict")
    except ImportError as error:
        raise ImportError(
            compose("tensordict is not installed", fix="pip install 'rlpool[tensordict]'")
        ) from error
    return tensordict.TensorDict(dict(values), batch_size=list(batch_size))


def from_tensordict(tensordict: Any) -> dict[str, Tensor]:
    """All tensors of a ``TensorDict``, not copied; nested keys are joined with ``/``."""
    try:
        items = dict(tensordict.items(include_nested=True, leaves_only=True)).items()
    except (AttributeError, TypeError):
        raise SpecError(f"got {type(tensordict).__name__}", fix="pass a TensorDict") from None
    return {key if isinstance(key, str) else "/".join(key): tensor for key, tensor in items}
