"""Named tensors with a batch and a time dimension: trajectories of different lengths."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from copy import copy
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils import _pytree

from rlpool.data.dict_tensor import (
    INDEX_DTYPES,
    DictTensor,
    Rows,
    cat_named,
    check_alike,
    compact,
    copy_rows_,
    int_of,
    kind,
    listed,
    resolve_rows,
    row_pair,
    spec_error,
    table,
)


class TemporalDictTensor:
    """B trajectories of up to T steps: tensors ``[B, T, ...]`` by name, on one device.

    Row ``b`` has ``lengths[b]`` steps; what follows is padding. The methods pad with zeros, and
    pass on the padding that they were given. ``info`` holds what belongs to a trajectory rather
    than to a step; whatever selects, joins or copies rows takes it along. The dicts are copied,
    the tensors never are. Iterating gives keys.

    Args:
        tensors: Tensors ``[B, T, ...]`` of any dtype by name.
        lengths: int64 ``[B]``, each from 0 to T. By default every row has T steps.
        info: Tensors ``[B, ...]``. By default an empty ``DictTensor``.

    Raises:
        SpecError: If a value is no tensor, or shapes, devices, dtypes or lengths do not fit.

    Example:
        >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
        >>> batch.mask()
        tensor([[1., 1., 1.],
                [1., 0., 0.]])
        >>> batch.flatten()["reward"].shape
        torch.Size([4])
    """

    __slots__ = ("__weakref__", "_info", "_lengths", "_steps")

    _steps: DictTensor  # its batch dimension is B; the time is the dimension after that
    _lengths: Tensor
    _info: DictTensor

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | DictTensor,
        lengths: Tensor | None = None,
        info: Mapping[str, Tensor] | DictTensor | None = None,
    ) -> None:
        self._steps = DictTensor(tensors)
        for key, tensor in self._steps.items():
            _check_leading_shape(key, tensor, self._steps)
        first = next(iter(self._steps.values()), None)
        if lengths is None:
            n_elems, n_timesteps = (0, 0) if first is None else first.shape[:2]
            device = self._steps.device()
            lengths = torch.full((n_elems,), n_timesteps, dtype=torch.int64, device=device)
        else:
            _check_lengths(lengths, first)
        self._lengths = lengths
        self._info = DictTensor(info)
        for key, tensor in self._info.items():
            if tensor.shape[:1] != lengths.shape or tensor.device != lengths.device:
                raise spec_error(
                    f"info key {key!r} is {kind(tensor)}, lengths are {kind(lengths)}",
                    "info needs one row per trajectory, on the same device",
                )

    @staticmethod
    def _wrap(tensors: dict[str, Tensor], lengths: Tensor, info: DictTensor) -> TemporalDictTensor:
        """A ``TemporalDictTensor`` that keeps these very objects, unchecked."""
        return _from_parts(DictTensor._wrap(tensors), lengths, info)

    @classmethod
    def from_packed(
        cls,
        transitions: Mapping[str, Tensor] | DictTensor,
        lengths: Tensor,
        info: Mapping[str, Tensor] | DictTensor | None = None,
    ) -> TemporalDictTensor:
        """Trajectories from their steps one after the other: the inverse of ``flatten``.

        Args:
            transitions: Tensors ``[sum(lengths), ...]`` in row-then-time order.
            lengths: int64 ``[B]``, at least 0.
            info: Tensors ``[B, ...]``.

        Returns:
            Copies ``[B, max(lengths), ...]``, padded with zeros.

        Raises:
            SpecError: If the lengths do not add up to the number of transitions.
        """
        packed = DictTensor(transitions)
        _check_lengths(lengths, None)
        n_elems, n_timesteps, n_steps = len(lengths), _longest(lengths), int(lengths.sum())
        for key, tensor in packed.items():
            if tensor.shape[:1] != (n_steps,) or tensor.device != lengths.device:
                raise spec_error(
                    f"key {key!r} is {kind(tensor)}, lengths {kind(lengths)} add up to {n_steps}",
                    "give one row per step of every trajectory, all on one device",
                )
        places = _is_step(lengths, n_timesteps).view(-1).nonzero().squeeze(1)
        padded = {}
        for key, tensor in packed.items():
            rows = tensor.new_zeros((n_elems * n_timesteps, *tensor.shape[1:]))
            rows.index_copy_(0, places, tensor)
            padded[key] = rows.view(n_elems, n_timesteps, *tensor.shape[1:])
        return cls(padded, lengths, info)

    @property
    def lengths(self) -> Tensor:
        """Number of steps of every row, int64 ``[B]``."""
        return self._lengths

    @property
    def info(self) -> DictTensor:
        """What belongs to the rows: tensors ``[B, ...]``, empty if there is nothing."""
        return self._info

    def keys(self) -> KeysView[str]:
        """Names of the tensors, in the order in which they were put in."""
        return self._steps.keys()

    def values(self) -> ValuesView[Tensor]:
        """The tensors."""
        return self._steps.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Pairs of name and tensor."""
        return self._steps.items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __contains__(self, key: object) -> bool:
        return key in self._steps

    @overload
    def __getitem__(self, key: str) -> Tensor: ...
    @overload
    def __getitem__(self, key: Rows) -> TemporalDictTensor: ...
    def __getitem__(self, key: str | Rows) -> Tensor | TemporalDictTensor:
        """The tensor of a key (``KeyError`` if there is none); anything else is ``index(key)``."""
        return self._steps[key] if isinstance(key, str) else self.index(key)

    def n_elems(self) -> int:
        """Number of rows B; ``SpecError`` for the result of ``index(int)``, which has no rows."""
        if not self._lengths.ndim:
            raise spec_error(
                "a single trajectory, as index(int) gives it, has no batch dimension",
                "slice(i) keeps the batch dimension",
            )
        return self._lengths.shape[0]

    def n_timesteps(self) -> int:
        """Number of steps T that the tensors have room for; without keys, the largest length."""
        for tensor in self._steps.values():
            return tensor.shape[self._lengths.ndim]
        return _longest(self._lengths)

    def device(self) -> torch.device:
        """The device of all tensors and of the lengths."""
        return self._lengths.device

    def specs(self) -> dict[str, dict[str, Any]]:
        """Per key ``{"size": shape of one step, "dtype": dtype}``."""
        n_leading = self._lengths.ndim + 1
        return {k: {"size": t.shape[n_leading:], "dtype": t.dtype} for k, t in self.items()}

    def mask(self) -> Tensor:
        """float32 ``[B, T]``: 1 for steps, 0 for padding."""
        return _is_step(self._lengths, self.n_timesteps()).to(torch.float32)

    def full(self) -> bool:
        """True if every row has T steps."""
        return bool((self._lengths == self.n_timesteps()).all())

    def get(self, keys: Iterable[str], clone: bool = False) -> TemporalDictTensor:
        """Keep some keys, in the order wanted; copies if ``clone``, else views.

        Raises:
            KeyError: If a key does not exist.
            SpecError: If ``keys`` is a single string.
        """
        kept = self._same_rows(self._steps.get(keys))
        return kept.clone() if clone else kept

    def shorten(self) -> TemporalDictTensor:
        """Views of the first ``max(lengths)`` steps: no step that is padding in every row."""
        return self._same_rows(self._in_time(0, _longest(self._lengths)))

    def index(self, rows: Rows) -> TemporalDictTensor:
        """Select trajectories; the same as ``batch[rows]``.

        Args:
            rows: An int gives views without the batch dimension: tensors ``[T, ...]``, ``lengths``
                0-d, ``info`` one row. A slice keeps the dimension and gives views. An int tensor
                ``[N]`` or a bool mask ``[B]`` copies.

        Raises:
            IndexError: If a row does not exist (a slice is cut to what exists, as in Python).
            SpecError: If ``rows`` is of another kind, or a mask has not B entries.
        """
        rows = resolve_rows(rows, self.n_elems())
        return self._with_each_part(lambda part: part.index(rows))

    def slice(self, start: int, stop: int | None = None) -> TemporalDictTensor:
        """Views of rows ``start <= i < stop``, or of row ``start`` with B = 1."""
        if stop is not None:
            return self.index(slice(start, stop))
        n_elems, row = self.n_elems(), int_of("start", start)
        if not -n_elems <= row < n_elems:
            raise IndexError(f"row {row} does not exist, there are {n_elems}")
        return self.index(slice(row % n_elems, row % n_elems + 1))

    def unfold(self) -> list[TemporalDictTensor]:
        """One ``TemporalDictTensor`` of views ``[1, T, ...]`` per row."""
        n_elems = self.n_elems()
        steps = self._steps.unfold() or [DictTensor() for _ in range(n_elems)]
        info = self._info.unfold() or [DictTensor() for _ in range(n_elems)]
        lengths = self._lengths.unsqueeze(1).unbind(0)
        rows = zip(steps, lengths, info, strict=True)
        return [_from_parts(*row) for row in rows]

    def temporal_slice(self, start: int, stop: int) -> TemporalDictTensor:
        """Keep steps ``start <= t < stop`` of every trajectory.

        Args:
            start: First step kept, 0-based.
            stop: One past the last step kept.

        Returns:
            Views ``[B, stop - start, ...]``. ``lengths`` is new: clipped to ``[0, stop - start]``.

        Raises:
            SpecError: If not ``0 <= start <= stop <= T``.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.temporal_slice(1, 3).lengths
            tensor([2, 0])
        """
        start, stop = int_of("start", start), int_of("stop", stop)
        if not 0 <= start <= stop <= self.n_timesteps():
            raise spec_error(
                f"steps {start} to {stop} are not within 0 to {self.n_timesteps()}",
                "negative steps do not count from the end, where rows end at different steps",
            )
        lengths = (self._lengths - start).clamp(0, stop - start)
        return _from_parts(self._in_time(start, stop), lengths, copy(self._info))

    def temporal_index(self, step: int) -> DictTensor:
        """Views ``[B, ...]`` of one step, padding included; ``SpecError`` if not in 0 to T - 1."""
        step = self._checked_step(step)
        dim = self._lengths.ndim
        return DictTensor._wrap({key: t.select(dim, step) for key, t in self.items()})

    def temporal_multi_index(self, steps: Tensor) -> DictTensor:
        """Copy another step of every row.

        Args:
            steps: Int ``[B]``, each from 0 to T - 1.

        Returns:
            Tensors ``[B, ...]``: row ``b`` is step ``steps[b]``.

        Raises:
            SpecError: If there is not one step per row, or one is out of range.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.arange(6.0).view(2, 3)})
            >>> batch.temporal_multi_index(batch.lengths - 1)["reward"]
            tensor([2., 5.])
        """
        n_elems = self.n_elems()
        is_int = isinstance(steps, Tensor) and steps.dtype in INDEX_DTYPES
        if not is_int or steps.shape != (n_elems,):
            raise spec_error(f"steps are {kind(steps)}", f"use an int64 [{n_elems}]")
        for bound in steps.aminmax() if n_elems else ():
            self._checked_step(int(bound))
        rows, times = torch.arange(n_elems, device=self.device()), steps.to(self.device()).long()
        return DictTensor._wrap({key: _take(t, rows, times) for key, t in self.items()})

    def masked_temporal_index(self, step: int) -> tuple[DictTensor, Tensor]:
        """Copy one step of the rows that have it.

        Args:
            step: From 0 to T - 1.

        Returns:
            Tensors ``[N, ...]`` of the rows with ``step < length``, and the numbers of these rows,
            int64 ``[N]``, ascending.

        Raises:
            SpecError: If the step is out of range.
        """
        self.n_elems()  # refuses a single trajectory
        step = self._checked_step(step)
        rows = (self._lengths > step).nonzero().squeeze(1)
        return self.temporal_index(step).index(rows), rows

    def flatten(self, with_info: bool = False) -> DictTensor:
        """All steps of all trajectories, without the padding.

        Args:
            with_info: Whether to add the keys of ``info``, repeated for every step of a row.

        Returns:
            Copies ``[sum(lengths), ...]`` in row-then-time order.

        Raises:
            SpecError: If ``info`` has a key of the steps.
        """
        self.n_elems()  # refuses a single trajectory
        rows, times = _is_step(self._lengths, self.n_timesteps()).nonzero(as_tuple=True)
        flat = DictTensor._wrap({key: _take(t, rows, times) for key, t in self.items()})
        return flat + self._info.index(rows) if with_info else flat

    @staticmethod
    def cat(parts: Iterable[TemporalDictTensor]) -> TemporalDictTensor:
        """Concatenate trajectories, copying; T becomes the largest, the new steps are zeros.

        Args:
            parts: Batches with the same keys, dtypes, step shapes, info and device; none give an
                empty ``TemporalDictTensor``.

        Raises:
            SpecError: If the parts differ.
        """
        batches = listed(parts, TemporalDictTensor)
        if not batches:
            return TemporalDictTensor({})
        for part in batches:
            part.n_elems()  # refuses a single trajectory
        longest = max(part.n_timesteps() for part in batches)
        steps = [
            part._steps if part.n_timesteps() == longest else _grow(part._steps, 1, longest)
            for part in batches
        ]
        lengths = torch.cat([part._lengths for part in batches])
        info = cat_named([part._info for part in batches], "the info of part")
        return _from_parts(cat_named(steps, "part"), lengths, info)

    def expand(self, n_elems: int) -> TemporalDictTensor:
        """Add rows of zeros with length 0, copying; dtypes are kept.

        Args:
            n_elems: The new number of rows, at least the present one.

        Raises:
            SpecError: If it is smaller.
        """
        n_elems = int_of("n_elems", n_elems)
        if n_elems < self.n_elems():
            what = f"cannot expand {self.n_elems()} rows to {n_elems}"
            raise spec_error(what, f"slice(0, {n_elems}) takes rows away")
        return self._with_each_part(lambda part: _grow(part, 0, n_elems))

    def to(
        self, device: torch.device | str | int, non_blocking: bool = False
    ) -> TemporalDictTensor:
        """Move everything to a device; gives ``self`` if it is there already."""
        moved = self._with_each_part(lambda part: part.to(device, non_blocking))
        return self if moved._lengths is self._lengths else moved

    def clone(self) -> TemporalDictTensor:
        """Copy everything."""
        return self._with_each_part(DictTensor.clone)

    def set(self, key: str, tensor: Tensor) -> None:
        """Add or replace a tensor, in place; the tensor is not copied.

        Args:
            key: Its name.
            tensor: ``[B, T, ...]`` on the same device. If there are neither keys nor rows, it
                decides B and T, and every row is full.

        Raises:
            SpecError: If it is no tensor, or its first two dimensions or its device differ.
        """
        if not isinstance(key, str):
            raise spec_error(f"key {key!r:.40} is no string", "name tensors with strings")
        if not self.n_elems() and self._steps.empty():
            whole = TemporalDictTensor({key: tensor}, None, self._info)
            self._steps, self._lengths = whole._steps, whole._lengths
        elif self._steps.empty():
            self._steps = TemporalDictTensor({key: tensor}, self._lengths)._steps
        else:
            DictTensor({key: tensor})  # refuses what is no tensor
            _check_leading_shape(key, tensor, self._steps)
            self._steps.set(key, tensor)

    def __add__(self, other: TemporalDictTensor) -> TemporalDictTensor:
        """Union of the keys of the same trajectories, sharing tensors.

        ``SpecError`` for common keys, other lengths, or ``info`` that contradicts.
        """
        if not isinstance(other, TemporalDictTensor):
            return NotImplemented
        if not torch.equal(self._lengths, other._lengths):
            lengths = f"{self._lengths.tolist()} and {other._lengths.tolist()}"
            raise spec_error(f"the lengths differ: {lengths}", "add keys of the same rows")
        info = self._info
        for key in info:
            if key in other._info and not torch.equal(info[key], other._info[key]):
                raise spec_error(f"info key {key!r} differs", "add keys of the same rows")
        new_info = other._info.get([key for key in other._info if key not in info])
        steps = self._steps + other._steps
        return TemporalDictTensor(steps, self._lengths, info + new_info)

    def copy_(
        self, source: TemporalDictTensor, source_indexes: Tensor, destination_indexes: Tensor
    ) -> None:
        """Copy trajectories of ``source`` over those of ``self``; storage is kept.

        Lengths and ``info`` are copied too. T may differ: if that of ``source`` is smaller, the
        remaining steps become zeros.

        Args:
            source: Has at least the keys of ``self`` (of ``info`` too), with the same dtypes, step
                shapes and device.
            source_indexes: Rows to read, int ``[N]`` or a bool mask.
            destination_indexes: Rows to write, as many. If a row occurs twice, either may win.

        Raises:
            IndexError: If a row does not exist.
            SpecError: If batches or numbers of rows do not fit, or a trajectory is longer than T.
            In both cases nothing is written.
        """
        if not isinstance(source, TemporalDictTensor):
            raise spec_error(f"source is {kind(source)}", "use a TemporalDictTensor")
        sizes = source.n_elems(), self.n_elems()
        check_alike(self._steps, source._steps, 2, "source", subset=True)
        check_alike(self._info, source._info, 1, "the info of source", subset=True)
        read, write = row_pair(source_indexes, destination_indexes, sizes, self.device())
        lengths, n_timesteps = source._lengths[read], self.n_timesteps()
        if _longest(lengths) > n_timesteps:
            what = f"a trajectory of {_longest(lengths)} steps does not fit into {n_timesteps}"
            raise spec_error(what, "cut it with temporal_slice(0, T)")
        n_common = min(n_timesteps, source.n_timesteps())
        copy_rows_(self._in_time(0, n_common), source._in_time(0, n_common), read, write)
        for tensor in self.values():
            tensor[:, n_common:].index_fill_(0, write, 0)
        self._lengths.index_copy_(0, write, lengths)
        copy_rows_(self._info, source._info, read, write)

    def to_tensordict(self) -> Any:
        """The same tensors, not copied, as a ``tensordict.TensorDict`` (needs ``tensordict``).

        It has batch size ``[B]`` and the entries ``steps`` (a ``TensorDict`` ``[B, T]``),
        ``lengths`` and ``info`` (a ``TensorDict`` ``[B]``).
        """
        from rlpool.data.tensordict import temporal_dict_tensor_to_tensordict

        return temporal_dict_tensor_to_tensordict(self)

    @staticmethod
    def from_tensordict(tensordict: Any) -> TemporalDictTensor:
        """The tensors of a ``TensorDict`` as ``to_tensordict`` makes it, not copied."""
        from rlpool.data.tensordict import temporal_dict_tensor_from_tensordict

        return temporal_dict_tensor_from_tensordict(tensordict)

    def _same_rows(self, steps: DictTensor) -> TemporalDictTensor:
        return _from_parts(steps, self._lengths, copy(self._info))

    def _with_each_part(self, change: Callable[[DictTensor], DictTensor]) -> TemporalDictTensor:
        """Do the same with the steps, the lengths and the info."""
        lengths = change(DictTensor._wrap({"lengths": self._lengths}))["lengths"]
        return _from_parts(change(self._steps), lengths, change(self._info))

    def _in_time(self, start: int, stop: int) -> DictTensor:
        dim = self._lengths.ndim
        return DictTensor._wrap({k: t.narrow(dim, start, stop - start) for k, t in self.items()})

    def _checked_step(self, step: Any) -> int:
        number = int_of("step", step)
        if not 0 <= number < self.n_timesteps():
            raise spec_error(
                f"step {number} is not within 0 to {self.n_timesteps() - 1}",
                "temporal_multi_index(lengths - 1) gives the last step of every row",
            )
        return number

    def __copy__(self) -> TemporalDictTensor:
        return self._same_rows(copy(self._steps))

    def __reduce__(self) -> tuple[Callable[..., TemporalDictTensor], tuple[Any, ...]]:
        return _from_parts, (self._steps, compact(self._lengths), self._info)

    def __repr__(self) -> str:
        entries = [*self.items(), ("lengths", self._lengths)]
        entries += self._info.prepend_key("info/").items()
        return "\n".join(["TemporalDictTensor", *table(entries)])


def _from_parts(steps: DictTensor, lengths: Tensor, info: DictTensor) -> TemporalDictTensor:
    made = object.__new__(TemporalDictTensor)
    made._steps, made._lengths, made._info = steps, lengths, info
    return made


torch.serialization.add_safe_globals([_from_parts])  # as for DictTensor


def _flatten(data: TemporalDictTensor) -> tuple[list[Any], list[str]]:
    return [*data.values(), data._lengths, data._info], list(data.keys())


def _flatten_with_keys(data: TemporalDictTensor) -> tuple[list[tuple[Any, Any]], list[str]]:
    values, keys = _flatten(data)
    paths: list[Any] = [_pytree.MappingKey(key) for key in keys]
    paths += [_pytree.GetAttrKey(name) for name in ("lengths", "info")]
    return list(zip(paths, values, strict=True)), keys


def _unflatten(values: Iterable[Any], keys: Iterable[str]) -> TemporalDictTensor:
    *tensors, lengths, info = values
    return TemporalDictTensor._wrap(dict(zip(keys, tensors, strict=True)), lengths, info)


_pytree.register_pytree_node(
    TemporalDictTensor,
    _flatten,
    _unflatten,
    serialized_type_name="rlpool.TemporalDictTensor",
    flatten_with_keys_fn=_flatten_with_keys,
)


def _is_step(lengths: Tensor, n_timesteps: int) -> Tensor:
    """Bool ``[B, T]``: whether it is a step, not padding (``[T]`` for a single trajectory)."""
    return torch.arange(n_timesteps, device=lengths.device) < lengths.unsqueeze(-1)


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _grow(tensors: DictTensor, dim: int, size: int) -> DictTensor:
    """Copies with zeros behind, so that dimension ``dim`` has ``size`` entries."""
    grown = {}
    for key, tensor in tensors.items():
        shape = list(tensor.shape)
        shape[dim] = size - shape[dim]
        grown[key] = torch.cat([tensor, tensor.new_zeros(shape)], dim)
    return DictTensor._wrap(grown)


def _take(tensor: Tensor, rows: Tensor, times: Tensor) -> Tensor:
    """``tensor[rows, times]``, faster."""
    row_stride, step_stride = tensor.stride()[:2]
    if tensor.requires_grad or not tensor.numel() or not step_stride or row_stride % step_stride:
        return tensor[rows, times]
    # Step t of row b is entry b * pitch + t of the steps as they lie in memory, whether or not
    # there is room between rows, and index_select copies whole steps: up to 20 times faster.
    pitch = row_stride // step_stride
    n_entries = (tensor.shape[0] - 1) * pitch + tensor.shape[1]
    entries = tensor.as_strided((n_entries, *tensor.shape[2:]), (step_stride, *tensor.stride()[2:]))
    return entries.index_select(0, rows * pitch + times)


def _check_leading_shape(key: str, tensor: Tensor, tensors: DictTensor) -> None:
    """Refuse a tensor without time, or with another B or T than the first of ``tensors``."""
    first_key, first = next(iter(tensors.items()))
    if tensor.ndim < 2 or tensor.shape[:2] != first.shape[:2]:
        raise spec_error(
            f"key {key!r} is {kind(tensor)}, key {first_key!r} is {kind(first)}",
            "every tensor needs the dimensions [B, T, ...]; per-row values go into info",
        )


def _check_lengths(lengths: Tensor, first: Tensor | None) -> None:
    """Refuse lengths that are not int64 ``[B]`` within 0 and T, ``first`` being ``[B, T, ...]``."""
    fix = "lengths are int64 [B], each from 0 to T, on the device of the tensors"
    if not isinstance(lengths, Tensor) or lengths.dtype is not torch.int64 or lengths.ndim != 1:
        raise spec_error(f"lengths are {kind(lengths)}", fix)
    if first is not None and (len(first) != len(lengths) or first.device != lengths.device):
        raise spec_error(f"lengths are {kind(lengths)} for {kind(first)}", fix)
    low, high = (int(bound) for bound in lengths.aminmax()) if len(lengths) else (0, 0)
    if low < 0 or (first is not None and high > first.shape[1]):
        size = "" if first is None else f", T is {first.shape[1]}"
        raise spec_error(f"lengths go from {low} to {high}{size}", fix)
