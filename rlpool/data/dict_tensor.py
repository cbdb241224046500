"""Named tensors with one batch dimension.

A ``DictTensor`` is a thin shell around a dict, because the rollout loop builds several per step: it
checks what comes through its public door and trusts it afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor
from torch.utils import _pytree

from rlpool.errors import SpecError

# What selects rows: an int, a slice, an int tensor [N], or a bool mask [B].
Rows: TypeAlias = int | slice | Tensor

INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


class DictTensor:
    """Tensors by name, on one device, that share their first dimension: the batch.

    The dict is copied, the tensors never are. 0-d tensors are accepted, so that losses can be
    returned by name, but they have no rows: whatever works on rows refuses them. Iterating gives
    keys. There is no ``len``, which could mean keys or rows.

    Args:
        tensors: Tensors ``[B, ...]`` of any dtype by name; ``None`` gives an empty ``DictTensor``.

    Raises:
        SpecError: If a value is no tensor, or first dimensions or devices differ.

    Example:
        >>> batch = DictTensor({"frame": torch.zeros(8, 4), "action": torch.arange(8)})
        >>> batch["action"][2:4]
        tensor([2, 3])
        >>> batch[2:4].n_elems()
        2
    """

    __slots__ = ("__weakref__", "_tensors")

    _tensors: dict[str, Tensor]

    def __init__(self, tensors: Mapping[str, Tensor] | DictTensor | None = None) -> None:
        try:
            self._tensors = own = {} if tensors is None else dict(tensors)
        except (TypeError, ValueError, RuntimeError):
            raise spec_error(f"tensors are {kind(tensors)}", "pass a dict of tensors") from None
        device = n_elems = None
        for key, tensor in own.items():
            if not isinstance(tensor, Tensor) or not isinstance(key, str):
                raise _not_a_tensor(key, tensor)
            if device is None:
                device = tensor.device
            elif tensor.device != device:
                raise _unlike(key, tensor, own)
            shape = tensor.shape
            if shape:
                if n_elems is None:
                    n_elems = shape[0]
                elif shape[0] != n_elems:
                    raise _unlike(key, tensor, own)

    @staticmethod
    def _wrap(tensors: dict[str, Tensor]) -> DictTensor:
        """A ``DictTensor`` that keeps this very dict, unchecked: for the library's own loops."""
        wrapped = _new(DictTensor)
        wrapped._tensors = tensors
        return wrapped

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
    def __getitem__(self, key: Rows) -> DictTensor: ...
    def __getitem__(self, key: str | Rows) -> Tensor | DictTensor:
        """The tensor of a key (``KeyError`` if there is none); anything else is ``index(key)``."""
        if not isinstance(key, str):
            return self.index(key)
        try:
            return self._tensors[key]
        except KeyError:
            raise KeyError(f"no key {key!r}, there are {list(self._tensors)}") from None

    def n_elems(self) -> int:
        """Number of rows B; 0 without keys and where every tensor is 0-d.

        It has no meaning for the result of ``index(int)``, which has no batch dimension any more.
        """
        for tensor in self._tensors.values():
            if tensor.ndim:
                return tensor.shape[0]
        return 0

    def empty(self) -> bool:
        """True if there are no keys."""
        return not self._tensors

    def device(self) -> torch.device | None:
        """The device of all tensors, ``None`` without keys."""
        for tensor in self._tensors.values():
            return tensor.device
        return None

    def specs(self) -> dict[str, dict[str, Any]]:
        """Per key ``{"size": shape of one row, "dtype": dtype}``."""
        return {k: {"size": t.shape[1:], "dtype": t.dtype} for k, t in self._tensors.items()}

    def get(self, keys: Iterable[str], clone: bool = False) -> DictTensor:
        """Keep some keys.

        Args:
            keys: The keys to keep, in the order wanted.
            clone: Whether to copy the tensors; otherwise they are shared.

        Raises:
            KeyError: If a key does not exist.
            SpecError: If ``keys`` is a single string, or has what is none.
        """
        kept = DictTensor._wrap({key: self[key] for key in listed_keys(keys)})
        return kept.clone() if clone else kept

    def index(self, rows: Rows) -> DictTensor:
        """Select rows; the same as ``batch[rows]``.

        Args:
            rows: An int drops the batch dimension and a slice keeps it, both give views; an int
                tensor ``[N]`` or a bool mask ``[B]`` copies. Negative ints count from the end.
                Without keys, any selection gives an empty ``DictTensor``.

        Raises:
            IndexError: If a row does not exist (a slice is cut to what exists, as in Python).
            SpecError: If ``rows`` is of another kind, a mask has not B entries, or a tensor is 0-d.
        """
        if not self._tensors:
            return DictTensor()
        self._require_rows()
        rows = resolve_rows(rows, self.n_elems())
        if isinstance(rows, Tensor):
            return DictTensor._wrap({k: _select(t, rows) for k, t in self._tensors.items()})
        return DictTensor._wrap({k: t[rows] for k, t in self._tensors.items()})

    def slice(self, start: int, stop: int | None = None) -> DictTensor:
        """Views of rows ``start <= i < stop``, or of row ``start`` without its batch dimension."""
        return self.index(start if stop is None else slice(start, stop))

    def unfold(self) -> list[DictTensor]:
        """One ``DictTensor`` of views ``[1, ...]`` per row."""
        self._require_rows()
        rows = zip(*(t.unsqueeze(1).unbind(0) for t in self._tensors.values()), strict=True)
        return [DictTensor._wrap(dict(zip(self._tensors, row, strict=True))) for row in rows]

    @staticmethod
    def cat(parts: Iterable[DictTensor]) -> DictTensor:
        """Concatenate batches, copying.

        Args:
            parts: Batches with the same keys, dtypes, row shapes and device; none give an empty
                ``DictTensor``.

        Raises:
            SpecError: If the parts differ, or a tensor is 0-d.
        """
        return cat_named(listed(parts, DictTensor), "part")

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> DictTensor:
        """Move to a device; gives ``self`` if everything is there already."""
        try:
            moved = {k: t.to(device, non_blocking=non_blocking) for k, t in self._tensors.items()}
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            what, _, _ = str(error).partition("\n")
            raise spec_error(
                f"cannot move to the device {device!r:.40}: {what}", "use one that is there: 'cpu'"
            ) from error
        if all(moved[k] is t for k, t in self._tensors.items()):
            return self
        return DictTensor._wrap(moved)

    def clone(self) -> DictTensor:
        """Copy every tensor."""
        return DictTensor._wrap({key: tensor.clone() for key, tensor in self._tensors.items()})

    def set(self, key: str, tensor: Tensor) -> None:
        """Add or replace a tensor, in place; the tensor is not copied.

        Args:
            key: Its name.
            tensor: ``[B, ...]`` on the same device. Without keys, B can be any.

        Raises:
            SpecError: If it is no tensor, or its first dimension or device differs.
        """
        if not isinstance(tensor, Tensor) or not isinstance(key, str):
            raise _not_a_tensor(key, tensor)
        if self.device() not in (None, tensor.device):
            raise _unlike(key, tensor, self._tensors)
        first = next((other for other in self._tensors.values() if other.ndim), tensor)
        if tensor.ndim and tensor.shape[0] != first.shape[0]:
            raise _unlike(key, tensor, self._tensors)
        self._tensors[key] = tensor

    def prepend_key(self, prefix: str) -> DictTensor:
        """Put ``prefix`` before every key; the tensors are shared."""
        _check_prefix(prefix)
        return DictTensor._wrap({prefix + key: t for key, t in self._tensors.items()})

    def truncate_key(self, prefix: str) -> DictTensor:
        """Keep only keys that start with ``prefix``, and cut it off; the tensors are shared."""
        _check_prefix(prefix)
        cut, own = len(prefix), self._tensors
        return DictTensor._wrap({k[cut:]: t for k, t in own.items() if k.startswith(prefix)})

    def __add__(self, other: DictTensor) -> DictTensor:
        """Union of the keys, sharing tensors; ``SpecError`` for common keys or unlike batches."""
        if not isinstance(other, DictTensor):
            return NotImplemented
        common = [key for key in self._tensors if key in other._tensors]
        if common:
            raise spec_error(
                f"both sides have the keys {common}", "rename with prepend_key(prefix)"
            )
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
            SpecError: If the batches or the numbers of rows do not fit.
            In both cases nothing is written. Without keys nothing is done.
        """
        check_alike(self, source, 1, "source", subset=True)
        self._require_rows()
        if self._tensors:
            sizes = source.n_elems(), self.n_elems()
            rows = row_pair(source_indexes, destination_indexes, sizes, self.device())
            copy_rows_(self, source, *rows)

    def to_tensordict(self) -> Any:
        """The same tensors, not copied, as a ``tensordict.TensorDict`` (needs ``tensordict``).

        Its batch size is ``[B]``, or ``[]`` if a tensor is 0-d or first dimensions differ.
        """
        from rlpool.data.tensordict import dict_tensor_to_tensordict

        return dict_tensor_to_tensordict(self)

    @staticmethod
    def from_tensordict(tensordict: Any) -> DictTensor:
        """The tensors of a ``TensorDict``, not copied; nested keys are joined with ``/``."""
        from rlpool.data.tensordict import dict_tensor_from_tensordict

        return dict_tensor_from_tensordict(tensordict)

    def _require_rows(self) -> None:
        for key, tensor in self._tensors.items():
            if not tensor.ndim:
                raise spec_error(f"key {key!r} is 0-d: it has no rows", "leave it out: get(keys)")

    def __copy__(self) -> DictTensor:
        return DictTensor._wrap(dict(self._tensors))

    def __reduce__(self) -> tuple[Callable[..., DictTensor], tuple[Any, ...]]:
        return _rebuild, ({key: compact(tensor) for key, tensor in self._tensors.items()},)

    def __repr__(self) -> str:
        if not self._tensors:
            return "DictTensor(empty)"
        return "\n".join(["DictTensor", *table(self._tensors.items())])


_new = object.__new__


def _rebuild(tensors: dict[str, Tensor]) -> DictTensor:
    return DictTensor._wrap(tensors)


# For torch.load with weights_only=True, its default: this puts tensors together, and nothing else.
torch.serialization.add_safe_globals([_rebuild])

_pytree.register_pytree_node(
    DictTensor,
    lambda data: (list(data._tensors.values()), list(data._tensors)),
    lambda values, keys: DictTensor._wrap(dict(zip(keys, values, strict=True))),
    serialized_type_name="rlpool.DictTensor",
    flatten_with_keys_fn=lambda data: (
        [(_pytree.MappingKey(key), tensor) for key, tensor in data._tensors.items()],
        list(data._tensors),
    ),
)


def masked_tensor(tensor0: Tensor, tensor1: Tensor, mask: Tensor) -> Tensor:
    """Take each row from one of two tensors, exactly: no arithmetic is done on the values.

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
    """``masked_tensor`` for every key; ``SpecError`` unless both have the same keys."""
    check_alike(dicttensor0, dicttensor1, 0, "the second")
    tensors0, tensors1 = dicttensor0._tensors, dicttensor1._tensors
    dicttensor0._require_rows()
    if not isinstance(mask, Tensor) or (tensors0 and mask.shape != (dicttensor0.n_elems(),)):
        raise spec_error(f"the mask is {kind(mask)}", f"use a bool [{dicttensor0.n_elems()}]")
    if tensors0 and mask.device != dicttensor0.device():
        raise spec_error(f"the mask is {kind(mask)}", f"move it to {dicttensor0.device()}")
    takes_second = mask != 0
    if mask.dtype is not torch.bool and not bool((takes_second == mask).all()):
        raise spec_error("the mask holds values other than 0 and 1", "make it bool")
    chosen = {}
    for key, tensor0 in tensors0.items():
        row_mask = takes_second.view(-1, *[1] * (tensor0.ndim - 1))
        chosen[key] = torch.where(row_mask, tensors1[key], tensor0)
    return DictTensor._wrap(chosen)


def resolve_rows(rows: Rows, n_elems: int) -> Rows:
    """Check a selection of rows; gives an int, a slice or an int64 tensor ``[N]``."""
    if isinstance(rows, Tensor):
        if rows.dtype is torch.bool and rows.shape == (n_elems,):
            return rows.nonzero().squeeze(1)
        if rows.dtype in INDEX_DTYPES and rows.ndim == 1:
            return rows.long()
        if rows.dtype in INDEX_DTYPES and (number := _int_of(rows)) is not None:
            return resolve_rows(number, n_elems)
    elif isinstance(rows, slice):
        try:
            start, stop, step = rows.indices(n_elems)
        except (TypeError, ValueError, RuntimeError):
            step = 0  # not made of ints
        if step > 0:
            return slice(start, stop, step)
    elif (number := _int_of(rows)) is not None:
        if -n_elems <= number < n_elems:
            return number
        raise IndexError(f"row {number} does not exist, there are {n_elems}")
    raise spec_error(
        f"cannot select from {n_elems} rows with {kind(rows)}",
        f"use an int, a forward slice, an int tensor [N] or a bool mask [{n_elems}]",
    )


def _int_of(value: Any) -> int | None:
    """An int, or a number or tensor that stands for one; ``None`` for everything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def int_of(name: str, value: Any) -> int:
    """An int from an argument; refuses what is none, or none that torch takes."""
    number = _int_of(value)
    if number is None or not -(2**63) <= number < 2**63:
        raise spec_error(f"{name} is {kind(value)}", "use an int")
    return number


def listed_keys(keys: Any) -> list[str]:
    """Several keys as a list; refuses a single one, and what is no key."""
    if isinstance(keys, str):
        raise spec_error(f"keys is the string {keys!r}", f"pass [{keys!r}]")
    try:
        found = list(keys)
    except (TypeError, RuntimeError):
        raise spec_error(f"keys are {kind(keys)}", "pass a list of keys") from None
    for key in found:
        if not isinstance(key, str):
            raise spec_error(f"key {key!r:.40} is no string", "pass a list of keys")
    return found


def _check_prefix(prefix: Any) -> None:
    if not isinstance(prefix, str):
        raise spec_error(f"the prefix is {kind(prefix)}", "use a string")


def row_pair(
    read: Tensor, write: Tensor, sizes: tuple[int, int], device: torch.device | None
) -> tuple[Tensor, Tensor]:
    """Check both sides of a copy of rows; gives int64 ``[N]`` each, counted from the start."""
    pair = []
    for selection, n_elems in zip((read, write), sizes, strict=True):
        rows = resolve_rows(selection, n_elems)
        if not isinstance(rows, Tensor):
            raise spec_error(f"rows are given by {kind(selection)}", "use an int64 tensor [N]")
        pair.append(_from_start(rows, n_elems).to(device))
    if pair[0].shape != pair[1].shape:
        what = f"{len(pair[0])} source rows for {len(pair[1])} destination rows"
        raise spec_error(what, "give one destination per source")
    return pair[0], pair[1]


def _from_start(rows: Tensor, n_elems: int) -> Tensor:
    """Turn negative row numbers into positive ones; ``IndexError`` for rows that do not exist."""
    if not rows.numel():
        return rows
    low, high = (int(bound) for bound in rows.aminmax())
    if low < -n_elems or high >= n_elems:
        wrong = high if high >= n_elems else low
        raise IndexError(f"row {wrong} does not exist, there are {n_elems}")
    return rows.remainder(n_elems)


def copy_rows_(target: DictTensor, source: DictTensor, read: Tensor, write: Tensor) -> None:
    """Copy rows in place, all checked before; ``source`` may be ``target``."""
    for key, tensor in target.items():
        tensor.index_copy_(0, write, source._tensors[key].index_select(0, read))


def cat_named(batches: list[DictTensor], name: str) -> DictTensor:
    """Concatenate; ``name`` is what messages call a part."""
    if not batches:
        return DictTensor()
    batches[0]._require_rows()
    try:
        return DictTensor._wrap(_cat_columns([part._tensors for part in batches]))
    except (KeyError, RuntimeError):
        for number, part in enumerate(batches):
            check_alike(batches[0], part, 1, f"{name} {number}")
        raise


def _cat_columns(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate, raising any ``KeyError`` or ``RuntimeError`` if the parts are not alike.

    Naming the difference is left to ``check_alike``, which takes several times as long as this.
    """
    if any(len(part) != len(parts[0]) for part in parts):
        raise KeyError
    joined = {}
    for key in parts[0]:
        column = [part[key] for part in parts]
        # torch.cat refuses other row shapes; these it would convert or skip.
        if len({(tensor.dtype, tensor.device, tensor.ndim) for tensor in column}) > 1:
            raise RuntimeError
        joined[key] = torch.cat(column)
    return joined


def check_alike(
    first: DictTensor, other: DictTensor, n_leading: int, other_name: str, *, subset: bool = False
) -> None:
    """Refuse other keys (with ``subset``, missing ones only), dtypes, devices, trailing shapes."""
    for name, batch in (("the first", first), (other_name, other)):
        if not isinstance(batch, DictTensor):
            raise spec_error(f"{name} is {kind(batch)}", "use a DictTensor")
    lonely = [key for key in first if key not in other]
    if not subset:
        lonely += [key for key in other if key not in first]
    if lonely:
        sides = f"{other_name} has {list(other)}, the first has {list(first)}"
        raise spec_error(f"key {lonely[0]!r}: {sides}", "keep the common keys with get(keys)")
    for key, tensor in first.items():
        match = other._tensors[key]
        if (
            match.dtype is not tensor.dtype
            or match.device != tensor.device
            or match.ndim != tensor.ndim
            or match.shape[n_leading:] != tensor.shape[n_leading:]
        ):
            raise spec_error(
                f"key {key!r} is {kind(match)} in {other_name}, {kind(tensor)} in the first",
                "convert one of them, for example with Tensor.to or Tensor.reshape",
            )


def listed(parts: Iterable[Any], kind_of_part: type) -> list[Any]:
    """The parts of a ``cat`` as a list; refuses anything else than ``kind_of_part``."""
    try:
        parts = list(parts)
    except (TypeError, RuntimeError):
        parts = [parts]
    for part in parts:
        if not isinstance(part, kind_of_part):
            raise spec_error(f"cat got {kind(part)}", f"pass a list of {kind_of_part.__name__}")
    return parts


def compact(value: Any) -> Any:
    """What to pickle: a view is copied, so that the storage it looks into is not written out."""
    if not isinstance(value, Tensor):
        return value  # tree_map can put anything in place of a tensor
    if value.untyped_storage().nbytes() == value.numel() * value.element_size():
        return value
    values = value.detach().clone(memory_format=torch.contiguous_format)
    return values.requires_grad_(value.requires_grad)


def kind(value: object) -> str:
    """Words for a value in an error message."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value!r:.40}"
    device = "" if value.is_cpu else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{device}"


def table(entries: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Aligned lines of key, shape and dtype."""
    rows = [("key", "shape", "dtype")]
    for key, tensor in entries:
        dtype, _, shape = kind(tensor).partition(" ")
        rows.append((key, shape, dtype))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def spec_error(what: str, fix: str) -> SpecError:
    """A ``SpecError`` of two lines."""
    return SpecError(what, fix=fix)


def _not_a_tensor(key: object, value: object) -> SpecError:
    if not isinstance(key, str):
        return spec_error(f"key {key!r} is no string", "name tensors with strings")
    return spec_error(f"key {key!r} is {kind(value)}, not a tensor", "convert: torch.as_tensor")


def _unlike(key: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> SpecError:
    """The error for a tensor whose device or first dimension is not that of the others."""
    other, reference = next(
        (name, match)
        for name, match in tensors.items()
        if match.device != tensor.device or (match.ndim and match.shape[:1] != tensor.shape[:1])
    )
    return spec_error(
        f"key {key!r} is {kind(tensor)}, key {other!r} is {kind(reference)}",
        "all tensors need the same number of rows (first dimension) and the same device",
    )


def _select(tensor: Tensor, rows: Tensor) -> Tensor:
    if not tensor.is_cpu:
        return tensor[rows]
    # index_select copies whole rows: many times faster than tensor[rows] where rows are wide.
    try:
        return tensor.index_select(0, rows)
    except (IndexError, RuntimeError):  # rows that do not exist, or negative ones
        return tensor.index_select(0, _from_start(rows, tensor.shape[0]))
