"""The steps of trajectories: how many there are, and looks at some of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlpool.data import dict_tensor_base as base
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.dict_tensor_base import DictTensorBase, kind
from rlpool.data.rows import taken
from rlpool.errors import SpecError
from rlpool.machine.arguments import whole_number

_StepsT = TypeVar("_StepsT", bound="Steps")


class Steps(DictTensorBase):
    """Tensors ``[B, T, ...]`` by name, how many steps of each row there are, and its ``info``."""

    __slots__ = ("_info", "_lengths")

    _lengths: Tensor
    _info: DictTensor

    @classmethod
    def _wrap(
        cls: type[_StepsT], tensors: dict[str, Tensor], lengths: Tensor, info: DictTensor
    ) -> _StepsT:
        """Trajectories that keep these objects themselves, unchecked: for the library's own."""
        made = object.__new__(cls)
        made._tensors, made._lengths, made._info = tensors, lengths, info
        return made

    def _with(self: _StepsT, tensors: dict[str, Tensor]) -> _StepsT:
        return self._wrap(tensors, self._lengths, copy(self._info))

    def _map(self: _StepsT, change: Callable[[Tensor], Tensor]) -> _StepsT:
        tensors = {key: change(tensor) for key, tensor in self._tensors.items()}
        return self._wrap(tensors, change(self._lengths), self._info._map(change))

    def _n_rows(self) -> int:
        return self.n_elems()

    @property
    def _steps(self) -> DictTensor:
        return DictTensor._wrap(self._tensors)

    @property
    def lengths(self) -> Tensor:
        """Number of steps of every row, int64 ``[B]``."""
        return self._lengths

    @property
    def info(self) -> DictTensor:
        """Values per trajectory: tensors ``[B, ...]``."""
        return self._info

    def n_elems(self) -> int:
        """Number of rows B; ``SpecError`` for the result of ``index(int)``, which has no rows.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.n_elems()
            2
        """
        if not self._lengths.ndim:
            raise SpecError(
                "a single trajectory, as index(int) gives it, has no batch dimension",
                fix="slice(i) keeps the batch dimension",
            )
        return self._lengths.shape[0]

    def __len__(self) -> int:
        """Number of rows, as ``n_elems``; ``TypeError`` for the result of ``index(int)``."""
        if not self._lengths.ndim:
            raise TypeError("a single trajectory, as index(int) gives it, has no len()")
        return self.n_elems()

    def __bool__(self) -> bool:
        """True, also without rows: ``None`` is what ``get`` returns for nothing."""
        return True

    def n_timesteps(self) -> int:
        """Size T of the time dimension; without keys, the largest length.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.n_timesteps()
            3
        """
        for tensor in self._tensors.values():
            return tensor.shape[self._lengths.ndim]
        return longest(self._lengths)

    def device(self) -> torch.device:
        """The device of all tensors and of the lengths.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.device()
            device(type='cpu')
        """
        return self._lengths.device

    def specs(self) -> dict[str, dict[str, Any]]:
        """Per key ``{"size": shape of one step, "dtype": dtype}``.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.specs()
            {'reward': {'size': torch.Size([]), 'dtype': torch.float32}}
        """
        n_leading = self._lengths.ndim + 1
        return {k: {"size": t.shape[n_leading:], "dtype": t.dtype} for k, t in self.items()}

    def mask(self) -> Tensor:
        """float32 ``[B, T]``: 1 for steps, 0 for padding.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.mask()
            tensor([[1., 1., 1.],
                    [1., 0., 0.]])
        """
        return steps_within(self._lengths, self.n_timesteps()).to(torch.float32)

    def full(self) -> bool:
        """True if every row has T steps.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.full(), batch.slice(0).full()
            (False, True)
        """
        return bool((self._lengths == self.n_timesteps()).all())

    def shorten(self: _StepsT) -> _StepsT:
        """Views of the first ``max(lengths)`` steps: drops steps that are padding in every row.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.slice(1).shorten()["reward"]
            tensor([[1.]])
        """
        return self._with(self._in_time(0, longest(self._lengths)))

    def expand(self: _StepsT, n_elems: int) -> _StepsT:
        """Add rows of zeros with length 0, copying; dtypes are kept.

        Args:
            n_elems: The new number of rows, at least the current one.

        Raises:
            SpecError: If it is smaller.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.expand(3).lengths
            tensor([3, 1, 0])
        """
        fix = "slice(0, n) takes rows away"
        n_elems = whole_number("n_elems", n_elems, self.n_elems(), fix=fix)
        try:
            return self._map(padded(0, n_elems))
        except (TypeError, RuntimeError) as error:
            raise SpecError(f"cannot expand to {n_elems} rows: {error}", fix=fix) from error

    def temporal_slice(self: _StepsT, start: int, stop: int) -> _StepsT:
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
        start = whole_number("start", start, 0)
        stop = whole_number("stop", stop, start)
        if stop > self.n_timesteps():
            raise SpecError(
                f"steps {start} to {stop} are not within 0 to {self.n_timesteps()}",
                fix="count steps from the start: rows end at different steps",
            )
        lengths = (self._lengths - start).clamp(0, stop - start)
        return self._wrap(self._in_time(start, stop), lengths, copy(self._info))

    def temporal_index(self, step: int) -> DictTensor:
        """Views ``[B, ...]`` of one step, padding included; ``SpecError`` if not in 0 to T - 1.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.temporal_index(0)["reward"]
            tensor([1., 1.])
        """
        step, dim = self._checked_step(step), self._lengths.ndim
        return self._steps._map(lambda tensor: tensor.select(dim, step))

    def temporal_multi_index(self, steps: Tensor) -> DictTensor:
        """Copy one step of every row, a different one for each.

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
        is_int = isinstance(steps, Tensor) and steps.dtype in base.INDEX_DTYPES
        if not is_int or steps.shape != (n_elems,):
            raise SpecError(f"steps are {kind(steps)}", fix=f"use an int64 [{n_elems}]")
        for bound in steps.aminmax() if n_elems else ():
            self._checked_step(int(bound))
        rows, times = torch.arange(n_elems, device=self.device()), steps.to(self.device()).long()
        return self._steps._map(lambda tensor: taken(tensor, rows, times))

    def masked_temporal_index(self, step: int) -> tuple[DictTensor, Tensor]:
        """Copy one step of the rows that have it.

        Args:
            step: From 0 to T - 1.

        Returns:
            Tensors ``[N, ...]`` of the rows with ``step < length``, and the numbers of these rows,
            int64 ``[N]``, ascending.

        Raises:
            SpecError: If the step is out of range.

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> steps, rows = batch.masked_temporal_index(2)
            >>> steps["reward"], rows
            (tensor([1.]), tensor([0]))
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

        Example:
            >>> batch = TemporalDictTensor({"reward": torch.ones(2, 3)}, torch.tensor([3, 1]))
            >>> batch.flatten()["reward"]
            tensor([1., 1., 1., 1.])
        """
        self.n_elems()  # refuses a single trajectory
        rows, times = steps_within(self._lengths, self.n_timesteps()).nonzero(as_tuple=True)
        flat = self._steps._map(lambda tensor: taken(tensor, rows, times))
        return flat + self._info.index(rows) if with_info else flat

    def _in_time(self, start: int, stop: int) -> dict[str, Tensor]:
        dim = self._lengths.ndim
        return {key: t.narrow(dim, start, stop - start) for key, t in self.items()}

    def _checked_step(self, step: Any) -> int:
        fix = "temporal_multi_index(lengths - 1) gives the last step of every row"
        number = whole_number("step", step, 0, fix=fix)
        if number >= self.n_timesteps():
            raise SpecError(f"step {number} of {self.n_timesteps()} steps", fix=fix)
        return number


def steps_within(lengths: Tensor, n_timesteps: int) -> Tensor:
    """Bool ``[B, T]``: true for steps, false for padding (``[T]`` for a single trajectory)."""
    return torch.arange(n_timesteps, device=lengths.device) < lengths.unsqueeze(-1)


def longest(lengths: Tensor) -> int:
    """The largest of some lengths, 0 if there are none."""
    return int(lengths.max()) if lengths.numel() else 0


def padded(dim: int, size: int) -> Callable[[Tensor], Tensor]:
    """A function that copies a tensor, padded with zeros to ``size`` entries in one dimension."""

    def pad(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = size - shape[dim]
        return torch.cat([tensor, tensor.new_zeros(shape)], dim)

    return pad
