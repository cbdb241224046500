"""Named tensors with one batch dimension.

A ``DictTensor`` is a thin shell around a dict, because the rollout loop builds several per step.
Its constructor checks the tensors; its methods trust them.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.utils import _pytree

from rlpool.data import rows as base
from rlpool.data.rows import Rows, instance, kind, resolve_rows, selected, write_rows_
from rlpool.errors import SpecError, UsageError
from rlpool.machine.imports import import_extra

BatchT = TypeVar("BatchT", bound="DictTensorBase")


class DictTensorBase:
    """Named tensors that share their leading dimensions."""

    __slots__ = ("__weakref__", "_tensors")

    _tensors: dict[str, Tensor]

    def _with(self: BatchT, tensors: dict[str, Tensor]) -> BatchT:
        """Return a batch with other tensors for the same rows, unchecked."""
        raise NotImplementedError

    def _map(self: BatchT, change: Callable[[Tensor], Tensor]) -> BatchT:
        """Apply a function to every tensor."""
        return self._with({key: change(tensor) for key, tensor in self._tensors.items()})

    def _n_rows(self) -> int:
        """Return the number of rows; SpecError without a batch dimension."""
        raise NotImplementedError

    def device(self) -> torch.device | None:
        """Return the device of all tensors, ``None`` if there are none."""
        raise NotImplementedError

    def keys(self) -> KeysView[str]:
        """Return the names of the tensors, in insertion order.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> list(batch.keys())
            ['frame', 'action']
        """
        return self._tensors.keys()

    def values(self) -> ValuesView[Tensor]:
        """Return the tensors.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> [tensor.shape for tensor in batch.values()]
            [torch.Size([3, 2]), torch.Size([3])]
        """
        return self._tensors.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Return pairs of name and tensor.

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
        """Return the tensor of a key (``KeyError`` if missing), or ``index(key)`` of rows."""
        if not isinstance(key, str):
            return self.index(key)
        try:
            return self._tensors[key]
        except KeyError:
            raise KeyError(f"no key {key!r}, there are {list(self._tensors)}") from None

    def __setitem__(self, key: Any, value: Any) -> None:
        """Refuse assignment: ``set`` replaces tensors, and ``copy_`` rows."""
        message = f"a {type(self).__name__} does not support assignment to {key!r:.40}"
        fix = f'replace the tensor: e.set("{key}", e["{key}"] / 2), or copy_ for rows'
        raise UsageError(message, fix=fix)

    def __delitem__(self, key: Any) -> None:
        raise UsageError(f"cannot delete {key!r:.40}", fix="keep the other keys: get(keys)")

    def get(self: BatchT, keys: Iterable[str], clone: bool = False) -> BatchT:
        """Keep some keys.

        Args:
            keys: The keys to keep, in this order.
            clone: Whether to copy the tensors; otherwise they are shared.

        Raises:
            KeyError: If a key does not exist.
            SpecError: If ``keys`` is a single string, or not all of them are strings.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.get(["action"])
            DictTensor
              action  int64 [3]
        """
        kept = self._with({key: self[key] for key in base.listed(keys, str, "keys")})
        return kept.clone() if clone else kept

    def index(self: BatchT, rows: Rows) -> BatchT:
        """Select rows; the same as ``batch[rows]``.

        Args:
            rows: An int drops the batch dimension and a slice keeps it; both give views. An int
                tensor ``[N]`` or a bool mask ``[B]`` copies. Negative ints count from the end. Any
                selection from a ``DictTensor`` without keys is an empty one.

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
        """Split into one batch of views ``[1, ...]`` per row.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> [row["action"] for row in batch.unfold()]
            [tensor([0]), tensor([1]), tensor([2])]
        """
        return [self._map(itemgetter(slice(i, i + 1))) for i in range(self._n_rows())]

    def to(self: BatchT, device: torch.device | str | int, non_blocking: bool = False) -> BatchT:
        """Move to a device; returns ``self`` if all tensors are already there.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.to("cpu") is batch
            True
        """
        where = base.checked_device(device)
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


def check_alike(
    first: DictTensorBase,
    other: DictTensorBase,
    n_leading: int,
    name: str,
    *,
    subset: bool = False,
) -> None:
    """Refuse differing keys (with ``subset``, missing ones), dtypes, devices, trailing shapes."""
    if first.keys() - other.keys() or (not subset and other.keys() - first.keys()):
        message = f"{name} has the keys {list(other)}, the first has {list(first)}"
        raise SpecError(message, fix="keep the common keys with get(keys)")
    for key, tensor in first.items():
        match = other[key]
        if _signature(match, n_leading) != _signature(tensor, n_leading):
            raise SpecError(
                f"key {key!r} is {kind(match)} in {name}, {kind(tensor)} in the first",
                fix="convert one of them, for example with Tensor.to or Tensor.reshape",
            )


def _signature(tensor: Tensor, n_leading: int) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.ndim, tensor.shape[n_leading:]


class DictTensor(DictTensorBase):
    """Named tensors on one device that share their first dimension, the batch.

    The dict is copied, the tensors are not. 0-d tensors are accepted, so that losses can be
    returned by name, but methods that work on rows refuse them. Iteration yields keys. ``len`` is
    not defined: it could mean keys or rows.

    Args:
        tensors: Tensors ``[B, ...]`` of any dtype by name; ``None`` gives an empty ``DictTensor``.

    Raises:
        SpecError: If a value is not a tensor, or first dimensions or devices differ.

    Example:
        >>> batch = DictTensor({"frame": torch.zeros(8, 4), "action": torch.arange(8)})
        >>> batch["action"][2:4]
        tensor([2, 3])
        >>> batch[2:4].n_elems()
        2
    """

    __slots__ = ()

    def __init__(self, tensors: Mapping[str, Tensor] | DictTensor | None = None) -> None:
        try:
            own: dict[Any, Any] = {} if tensors is None else dict(tensors)
        except (TypeError, ValueError, RuntimeError):
            raise SpecError(f"tensors are {kind(tensors)}", fix="pass a dict of tensors") from None
        self._tensors = own
        # One pass over valid tensors, the fast path of every step; ``check`` finds the error.
        device, n_rows = None, None
        for key, tensor in own.items():
            if not isinstance(tensor, Tensor) or not isinstance(key, str):
                break
            shape = tensor.shape
            if device is None:
                device = tensor.device
            if n_rows is None and shape:
                n_rows = shape[0]
            if tensor.device != device or (shape and shape[0] != n_rows):
                break
        else:
            return
        base.check(own.items())

    @staticmethod
    def _wrap(tensors: dict[str, Tensor]) -> DictTensor:
        """Wrap a dict without copying or checking it, for the library's own loops."""
        wrapped = _new(DictTensor)
        wrapped._tensors = tensors
        return wrapped

    def _with(self, tensors: dict[str, Tensor]) -> DictTensor:
        return DictTensor._wrap(tensors)

    def _n_rows(self) -> int:
        for key, tensor in self._tensors.items():
            if not tensor.ndim:
                raise SpecError(f"key {key!r} is 0-d: it has no rows", fix="omit it: get(keys)")
        return self.n_elems()

    def n_elems(self) -> int:
        """Return the number of rows B; 0 without keys or if every tensor is 0-d.

        It is meaningless for the result of ``index(int)``, which has no batch dimension.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.n_elems()
            3
        """
        return next((tensor.shape[0] for tensor in self._tensors.values() if tensor.ndim), 0)

    def empty(self) -> bool:
        """Whether there are no keys.

        Example:
            >>> DictTensor().empty()
            True
        """
        return not self._tensors

    def device(self) -> torch.device | None:
        """Return the device of all tensors, ``None`` without keys.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.device()
            device(type='cpu')
        """
        return next((tensor.device for tensor in self._tensors.values()), None)

    def specs(self) -> dict[str, dict[str, Any]]:
        """Return ``{"size": shape of one row, "dtype": dtype}`` per key.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.specs()["frame"]
            {'size': torch.Size([2]), 'dtype': torch.float32}
        """
        return {k: {"size": t.shape[1:], "dtype": t.dtype} for k, t in self._tensors.items()}

    def slice(self, start: int, stop: int | None = None) -> DictTensor:
        """Return views of rows ``start <= i < stop``, or row ``start`` without batch dimension.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.slice(1, 3)["action"]
            tensor([1, 2])
        """
        return self.index(start if stop is None else slice(start, stop))

    @staticmethod
    def cat(parts: Iterable[DictTensor]) -> DictTensor:
        """Concatenate batches, copying.

        Args:
            parts: Batches with the same keys, dtypes, row shapes and device. An empty list gives
                an empty ``DictTensor``.

        Raises:
            SpecError: If the parts differ, or a tensor is 0-d.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> DictTensor.cat([batch, batch])["action"]
            tensor([0, 1, 2, 0, 1, 2])
        """
        return cat_named(base.listed(parts, DictTensor, "cat"), "part")

    def set(self, key: str, tensor: Tensor) -> None:
        """Add or replace a tensor, in place; the tensor is not copied.

        Args:
            key: Its name.
            tensor: ``[B, ...]`` on the same device. Without keys, B can be any.

        Raises:
            SpecError: If it is not a tensor, or its first dimension or device differs.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.set("reward", torch.ones(3))
            >>> list(batch)
            ['frame', 'action', 'reward']
        """
        base.check([*self._tensors.items(), (key, tensor)])
        self._tensors[key] = tensor

    def prepend_key(self, prefix: str) -> DictTensor:
        """Prepend ``prefix`` to every key; the tensors are shared.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> list(batch.prepend_key("old/"))
            ['old/frame', 'old/action']
        """
        instance(prefix, str, "the prefix")
        return DictTensor._wrap({prefix + key: t for key, t in self._tensors.items()})

    def truncate_key(self, prefix: str) -> DictTensor:
        """Keep the keys that start with ``prefix``, and remove it; the tensors are shared.

        Example:
            >>> batch = DictTensor({"info/goal": torch.zeros(3, 2), "frame": torch.zeros(3, 4)})
            >>> list(batch.truncate_key("info/"))
            ['goal']
        """
        cut, own = len(instance(prefix, str, "the prefix")), self._tensors
        return DictTensor._wrap({k[cut:]: t for k, t in own.items() if k.startswith(prefix)})

    def __add__(self, other: DictTensor) -> DictTensor:
        """Return the union of the keys, sharing tensors; ``SpecError`` if keys or rows clash."""
        if not isinstance(other, DictTensor):
            return NotImplemented
        common = [key for key in self._tensors if key in other._tensors]
        if common:
            message = f"both sides have the keys {common}"
            raise SpecError(message, fix="rename with prepend_key(prefix)")
        return DictTensor({**self._tensors, **other._tensors})

    def copy_(
        self, source: DictTensor, source_indexes: Tensor, destination_indexes: Tensor
    ) -> None:
        """Copy rows of ``source`` over rows of ``self``; storage is kept.

        Args:
            source: Has at least the keys of ``self``, with the same dtypes, row shapes and device.
            source_indexes: Rows to read, int ``[N]`` or a bool mask.
            destination_indexes: Rows to write, as many. If a row occurs twice, either may win.

        Raises:
            IndexError: If a row does not exist.
            SpecError: If the batches or the numbers of rows do not match, or a tensor of ``self``
                cannot be written in place.

        If it raises, nothing has been written. Without keys, it does nothing.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.copy_(batch.clone(), torch.tensor([2]), torch.tensor([0]))
            >>> batch["action"]
            tensor([2, 1, 2])
        """
        check_alike(self, instance(source, DictTensor, "source"), 1, "source", subset=True)
        if self._tensors:
            sizes = source.n_elems(), self._n_rows()
            read, write = base.row_pair(source_indexes, destination_indexes, sizes, self.device())
            changes = ((k, t, selected(source[k], read)) for k, t in self.items())
            write_rows_(changes, write)

    def to_tensordict(self) -> Any:
        """Convert to a ``tensordict.TensorDict`` without copying (needs ``tensordict``).

        Its batch size is ``[B]``, or ``[]`` if a tensor is 0-d or first dimensions differ.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> batch.to_tensordict().batch_size
            torch.Size([3])
        """
        sizes = {tensor.shape[:1] for tensor in self._tensors.values()} or {torch.Size([0])}
        size = sizes.pop() if len(sizes) == 1 else []
        return import_extra("tensordict", "tensordict").TensorDict(self._tensors, list(size))

    @staticmethod
    def from_tensordict(tensordict: Any) -> DictTensor:
        """Convert a ``TensorDict`` without copying; nested keys are joined with ``/``.

        Example:
            >>> batch = DictTensor({"frame": torch.zeros(3, 2), "action": torch.arange(3)})
            >>> list(DictTensor.from_tensordict(batch.to_tensordict()))
            ['frame', 'action']
        """
        return DictTensor(base.of_tensordict(tensordict))

    def __reduce__(self) -> tuple[Callable[..., DictTensor], tuple[Any, ...]]:
        return _rebuild, ({key: base.compact(tensor) for key, tensor in self._tensors.items()},)

    def __repr__(self) -> str:
        if not self._tensors:
            return "DictTensor(empty)"
        return base.table("DictTensor", self._tensors.items())


_new = object.__new__


def _rebuild(tensors: dict[str, Tensor]) -> DictTensor:
    return DictTensor._wrap(tensors)


# Allows torch.load with weights_only=True, the default.
torch.serialization.add_safe_globals([_rebuild])

_pytree.register_pytree_node(
    DictTensor,
    lambda data: (list(data._tensors.values()), list(data._tensors)),
    lambda values, keys: DictTensor._wrap(dict(zip(keys, values, strict=True))),
)


def masked_tensor(tensor0: Tensor, tensor1: Tensor, mask: Tensor) -> Tensor:
    """Select each row from one of two tensors, bit for bit.

    Args:
        tensor0: ``[B, ...]``, any dtype and any number of dimensions.
        tensor1: The same shape, dtype and device.
        mask: ``[B]``, bool, or 0 and 1 in any dtype.

    Returns:
        A new tensor: the rows of ``tensor1`` where ``mask`` is true, else those of ``tensor0``.

    Raises:
        SpecError: If shapes, dtypes or devices differ, or the mask holds other values.

    Example:
        >>> masked_tensor(torch.zeros(3), torch.ones(3), torch.tensor([True, False, True]))
        tensor([1., 0., 1.])
    """
    pair = DictTensor({"tensor": tensor0}), DictTensor({"tensor": tensor1})
    return masked_dicttensor(*pair, mask)["tensor"]


def masked_dicttensor(dicttensor0: DictTensor, dicttensor1: DictTensor, mask: Tensor) -> DictTensor:
    """Apply ``masked_tensor`` to every key; ``SpecError`` unless both have the same keys.

    Example:
        >>> old, new = DictTensor({"x": torch.zeros(3)}), DictTensor({"x": torch.ones(3)})
        >>> masked_dicttensor(old, new, torch.tensor([True, False, True]))["x"]
        tensor([1., 0., 1.])
    """
    first = instance(dicttensor0, DictTensor, "the first")
    second = instance(dicttensor1, DictTensor, "the second")
    check_alike(first, second, 0, "the second")
    if first.empty():
        return DictTensor()
    n_elems, device = first._n_rows(), first.device()
    if not isinstance(mask, Tensor) or mask.shape != (n_elems,) or mask.device != device:
        raise SpecError(f"the mask is {kind(mask)}", fix=f"use a bool [{n_elems}] on {device}")
    takes_second = mask != 0
    if mask.dtype is not torch.bool and not bool((takes_second == mask).all()):
        raise SpecError("the mask has values other than 0 and 1", fix="make it bool")
    chosen = {
        key: torch.where(takes_second.view(-1, *[1] * (tensor.ndim - 1)), second[key], tensor)
        for key, tensor in first.items()
    }
    return DictTensor._wrap(chosen)


def cat_named(batches: list[DictTensor], name: str) -> DictTensor:
    """Concatenate; ``name`` is the name of a part in errors."""
    if not batches:
        return DictTensor()
    first = batches[0]
    first._n_rows()
    for number, part in enumerate(batches):
        check_alike(first, part, 1, f"{name} {number}")
    tensors = {key: torch.cat([part._tensors[key] for part in batches]) for key in first}
    return DictTensor._wrap(tensors)
