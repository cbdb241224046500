"""The base class of ``DictTensor`` and ``TemporalDictTensor``, and the checks that both need."""

from __future__ import annotations

import contextlib
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
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from rlpool.data.rows import selected
from rlpool.errors import SpecError
from rlpool.machine.extras import import_extra

_T = TypeVar("_T")
BatchT = TypeVar("BatchT", bound="DictTensorBase")

# What selects rows: an int, a slice, an int tensor [N], or a bool mask [B].
Rows: TypeAlias = int | slice | Tensor

INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


class DictTensorBase:
    """Tensors by name that share their leading dimensions."""

    __slots__ = ("__weakref__", "_tensors")

    _tensors: dict[str, Tensor]

    def _with(self: BatchT, tensors: dict[str, Tensor]) -> BatchT:
        """Other tensors for the same rows, unchecked."""
        raise NotImplementedError

    def _map(self: BatchT, change: Callable[[Tensor], Tensor]) -> BatchT:
        """Apply a function to every tensor."""
        return self._with({key: change(tensor) for key, tensor in self._tensors.items()})

    def _n_rows(self) -> int:
        """Number of rows; SpecError if there is no batch dimension."""
        raise NotImplementedError

    def device(self) -> torch.device | None:
        """The device of all tensors, ``None`` without any."""
        raise NotImplementedError

    def keys(self) -> KeysView[str]:
        """Names of the tensors, in insertion order.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> list(batch.keys())
            ['frame', 'action']
        """
        return self._tensors.keys()

    def values(self) -> ValuesView[Tensor]:
        """The tensors.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> [tensor.shape for tensor in batch.values()]
            [torch.Size([3, 2]), torch.Size([3])]
        """
        return self._tensors.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Pairs of name and tensor.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> {key: tensor.dtype for key, tensor in batch.items()}
            {'frame': torch.float32, 'action': torch.int64}
        """
        return self._tensors.items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self._tensors

    @overload
    def __getitem__(self, key: str) -> Tensor: ...
    @overload
    def __getitem__(self: BatchT, key: Rows) -> BatchT: ...
    def __getitem__(self: BatchT, key: str | Rows) -> Tensor | BatchT:
        """The tensor of a key (``KeyError`` if there is none); anything else is ``index(key)``."""
        if not isinstance(key, str):
            return self.index(key)
        try:
            return self._tensors[key]
        except KeyError:
            raise KeyError(f"no key {key!r}, there are {list(self._tensors)}") from None

    def get(self: BatchT, keys: Iterable[str], clone: bool = False) -> BatchT:
        """Keep some keys.

        Args:
            keys: The keys to keep, in this order.
            clone: Whether to copy the tensors; otherwise they are shared.

        Raises:
            KeyError: If a key does not exist.
            SpecError: If ``keys`` is a single string, or contains anything but strings.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.get(["action"])
            DictTensor
              action  int64 [3]
        """
        kept = self._with({key: self[key] for key in listed(keys, str, "keys")})
        return kept.clone() if clone else kept

    def index(self: BatchT, rows: Rows) -> BatchT:
        """Select rows; the same as ``batch[rows]``.

        Args:
            rows: An int drops the batch dimension and a slice keeps it; both give views. An int
                tensor ``[N]`` or a bool mask ``[B]`` copies. Negative ints count from the end. Any
                selection from a ``DictTensor`` without keys is one.

        Raises:
            IndexError: If a row does not exist (a slice is clipped, as in Python).
            SpecError: If ``rows`` is of another kind, a mask does not have B entries, or there is
                no batch dimension: a tensor is 0-d, or this is a single trajectory.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.index(torch.tensor([2, 0]))["action"]
            tensor([2, 0])
            >>> batch.index(1)["action"]
            tensor(1)
        """
        if self.device() is None:
            return self._with({})
        found = resolve_rows(rows, self._n_rows())
        if not isinstance(found, Tensor):
            return self._map(itemgetter(found))
        on_device = found.to(self.device())
        return self._map(partial(selected, rows=on_device))

    def unfold(self: BatchT) -> list[BatchT]:
        """One batch of views ``[1, ...]`` per row.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> [row["action"] for row in batch.unfold()]
            [tensor([0]), tensor([1]), tensor([2])]
        """
        return [self._map(itemgetter(slice(i, i + 1))) for i in range(self._n_rows())]

    def to(self: BatchT, device: torch.device | str | int, non_blocking: bool = False) -> BatchT:
        """Move to a device; returns ``self`` if everything is there already.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.to("cpu") is batch
            True
        """
        try:
            where = torch.empty(0, device=device).device
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise SpecError(f"cannot move to {device!r:.40}: {error}", fix="try 'cpu'") from error
        if self.device() in (None, where):
            return self
        return self._map(lambda tensor: tensor.to(where, non_blocking=non_blocking))

    def clone(self: BatchT) -> BatchT:
        """Copy every tensor.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> copied = batch.clone()
            >>> copied["action"][0] = 7
            >>> batch["action"]
            tensor([0, 1, 2])
        """
        return self._map(Tensor.clone)

    def __copy__(self: BatchT) -> BatchT:
        return self._with(dict(self._tensors))


def check(tensors: Iterable[tuple[Any, Any]], n_dims: int = 1) -> None:
    """Refuse values that are no tensors, or differ in device or in their first dimensions.

    Args:
        tensors: Pairs of key and value.
        n_dims: How many dimensions: of a single one, which is that of rows, 0-d tensors have none.
    """
    every = list(tensors)
    for key, tensor in every:
        if not isinstance(tensor, Tensor) or not isinstance(key, str):
            raise SpecError(
                f"key {key!r:.40} is {kind(tensor)}",
                fix="name tensors with strings; convert with torch.as_tensor",
            )
    sized = [pair for pair in every if pair[1].ndim or n_dims > 1]
    for pairs, n in ((every, 0), (sized, n_dims)):
        for pair in pairs:
            one, first = pair[1], pairs[0][1]
            is_like = one.device == first.device and one.shape[:n] == first.shape[:n]
            if not is_like or one.ndim < n:
                raise _unlike(pair, pairs[0])


def _unlike(one: Any, other: Any) -> SpecError:
    """The error for two entries that do not belong to the same batch."""
    return SpecError(
        f"key {one[0]!r} is {kind(one[1])}, key {other[0]!r} is {kind(other[1])}",
        fix="all tensors need the same number of rows (and steps), and the same device",
    )


def check_alike(
    first: DictTensorBase, other: DictTensorBase, n_leading: int, name: str, *, subset: bool = False
) -> None:
    """Refuse other keys (with ``subset``, missing ones only), dtypes, devices, trailing shapes."""
    if first.keys() - other.keys() or (not subset and other.keys() - first.keys()):
        what = f"{name} has the keys {list(other)}, the first has {list(first)}"
        raise SpecError(what, fix="keep the common keys with get(keys)")
    for key, tensor in first.items():
        match = other[key]
        if _signature(match, n_leading) != _signature(tensor, n_leading):
            raise SpecError(
                f"key {key!r} is {kind(match)} in {name}, {kind(tensor)} in the first",
                fix="convert one of them, for example with Tensor.to or Tensor.reshape",
            )


def _signature(tensor: Tensor, n_leading: int) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.ndim, tensor.shape[n_leading:]


def instance(value: Any, wanted: type[_T], name: str, fix: str = "") -> _T:
    """An argument that has to be of a class."""
    if not isinstance(value, wanted):
        raise SpecError(f"{name} is {kind(value)}", fix=fix or f"pass a {wanted.__name__}")
    return value


def listed(values: Iterable[Any], wanted: type[_T], name: str) -> list[_T]:
    """A list of instances of a class, from an argument; a single string is refused."""
    try:
        found = None if isinstance(values, str) else list(values)
    except TypeError:
        found = None
    if found is None:
        raise SpecError(f"{name} is {kind(values)}", fix=f"pass a list: [{values!r:.40}]")
    return [instance(value, wanted, f"an element of {name}") for value in found]


# Rows ---------------------------------------------------------------------------------------------


def resolve_rows(rows: Any, n_elems: int) -> int | slice | Tensor:
    """Check a selection of rows; gives a forward slice, an int or an int64 ``[N]`` from 0."""
    if isinstance(rows, Tensor) and rows.ndim:
        return resolve_row_tensor(rows, n_elems)
    is_bool = isinstance(rows, bool) or getattr(rows, "dtype", None) is torch.bool
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # not made of ints
        if isinstance(rows, slice):
            start, stop, step = rows.indices(n_elems)
            if step > 0:
                return slice(start, stop, step)
        elif not is_bool:
            return from_start(operator.index(rows), n_elems)
    raise _no_selection(rows, n_elems)


def resolve_row_tensor(rows: Tensor, n_elems: int) -> Tensor:
    """Check an int tensor ``[N]`` or a bool mask ``[B]``; gives int64 ``[N]`` from 0."""
    if rows.dtype is torch.bool and rows.shape == (n_elems,):
        return rows.nonzero().squeeze(1)
    if rows.dtype not in INDEX_DTYPES or rows.ndim != 1:
        raise _no_selection(rows, n_elems)
    bounds = [int(bound) for bound in rows.aminmax()] if len(rows) else []
    is_from_start = bounds == [from_start(bound, n_elems) for bound in bounds]
    return rows.long() if is_from_start else rows.long() % n_elems


def from_start(row: int, n_elems: int) -> int:
    """The number of a row counted from 0; ``IndexError`` if it does not exist."""
    if -n_elems <= row < n_elems:
        return row % n_elems
    raise IndexError(f"row {row} does not exist, there are {n_elems}")


def _no_selection(rows: Any, n_elems: int) -> SpecError:
    return SpecError(
        f"cannot select from {n_elems} rows with {kind(rows)}",
        fix=f"use an int, a forward slice, an int64 tensor [N] or a bool mask [{n_elems}]",
    )


def row_pair(
    read: Tensor, write: Tensor, sizes: tuple[int, int], device: torch.device | None
) -> tuple[Tensor, Tensor]:
    """Check both sides of a copy of rows; gives int64 ``[N]`` from 0 for each."""
    source, destination = (
        resolve_row_tensor(instance(rows, Tensor, "a selection of rows"), n_elems).to(device)
        for rows, n_elems in zip((read, write), sizes, strict=True)
    )
    if source.shape != destination.shape:
        what = f"{len(source)} source rows for {len(destination)} destination rows"
        raise SpecError(what, fix="give one destination per source")
    return source, destination


# Messages and pickles -----------------------------------------------------------------------------


def kind(value: object) -> str:
    """Short description of a value for an error message."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value!r:.40}"
    device = "" if value.is_cpu else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{device}"


def table(title: str, entries: Iterable[tuple[str, Tensor]]) -> str:
    """Aligned lines of key, dtype and shape."""
    shapes = [(key, kind(tensor)) for key, tensor in entries]
    width = max(len(key) for key, _ in shapes)
    return "\n".join([title, *(f"  {key:{width}}  {shape}" for key, shape in shapes)])


def compact(value: Any) -> Any:
    """What to pickle instead: a copy of a view, without the rest of its storage."""
    if not isinstance(value, Tensor):
        return value  # tree_map can put anything in place of a tensor
    if value.untyped_storage().nbytes() == value.numel() * value.element_size():
        return value
    values = value.detach().clone(memory_format=torch.contiguous_format)
    return values.requires_grad_(value.requires_grad)


# TensorDict ---------------------------------------------------------------------------------------


def to_tensordict(
    values: Mapping[Any, Any],
    batch_size: Sequence[int],
    *,
    extra: str = "tensordict",
    **options: Any,
) -> Any:
    """A ``TensorDict`` of these values, not copied; a tuple as a key is a path.

    Args:
        values: The entries.
        batch_size: Its leading dimensions.
        extra: The extra to name if the package is missing.
        **options: Other arguments of ``TensorDict``.
    """
    tensordict = import_extra("tensordict", extra)
    return tensordict.TensorDict(dict(values), batch_size=list(batch_size), **options)


def from_tensordict(tensordict: Any) -> dict[str, Tensor]:
    """All tensors of a ``TensorDict``, not copied; nested keys are joined with ``/``."""
    try:
        items = dict(tensordict.items(include_nested=True, leaves_only=True)).items()
    except (AttributeError, TypeError):
        raise SpecError(f"got {type(tensordict).__name__}", fix="pass a TensorDict") from None
    return {key if isinstance(key, str) else "/".join(key): tensor for key, tensor in items}
