"""From slots to the user's tensors: views of a block, or chunks joined in ordinary memory."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.storage import NDArray, batch_array
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import UsageError
from rlpool.slots.blocks import Arrays, Layout

Derivation = Callable[[], Tensor]


class DerivedTensors(dict[str, Tensor]):
    """Tensors by name, each made on first access.

    Args:
        derived: Functions without arguments that make the tensors.
    """

    def __init__(self, derived: Mapping[str, Derivation]) -> None:
        super().__init__(derived)  # type: ignore[arg-type]

    def _made(self, key: str) -> Tensor:
        derive: Any = super().__getitem__(key)
        tensor: Tensor = derive()
        return tensor

    def __getitem__(self, key: str) -> Tensor:
        found: Any = super().__getitem__(key)
        if not isinstance(found, Tensor):
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):  # it is cached, and may be used in autograd
                    return self[key]
            found = self._made(key)
            super().__setitem__(key, found)
        tensor: Tensor = found
        return tensor

    # Copies such as dict(...) and {**...} take the fast path around __getitem__ unless __iter__
    # is overridden.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def values(self) -> ValuesView[Tensor]:  # type: ignore[override]
        """The tensors, all of them computed."""
        return ValuesView(self)

    def items(self) -> ItemsView[str, Tensor]:  # type: ignore[override]
        """Pairs of key and tensor, all of them computed."""
        return ItemsView(self)

    def __reduce__(self) -> tuple[type[dict[str, Tensor]], tuple[dict[str, Tensor]]]:
        return dict, (dict(self.items()),)


class Slice(NamedTuple):
    """Rows and final values of some slots or of a whole request, as arrays or tensors.

    Attributes:
        rows: Key to ``[B, T, ...]``, zero from each row's length on.
        finals: Key to ``[B, ...]``: the value after the last step.
        lengths: int64 ``[B]``.
        starts: int64 ``[B]``, 1 where a row's first step starts an episode.
    """

    rows: Mapping[str, NDArray]
    finals: Mapping[str, NDArray]
    lengths: NDArray
    starts: NDArray

    def part(self, index: slice | NDArray) -> Slice:
        """Some rows, cut to the longest: views for a slice, copies for numbers or a mask."""
        lengths = np.array(self.lengths[index])
        longest = int(np.maximum.reduce(lengths, initial=0))
        return Slice(
            {key: array[index, :longest] for key, array in self.rows.items()},
            {key: array[index] for key, array in self.finals.items()},
            lengths,
            np.array(self.starts[index]),
        )


def slots_of(arrays: Arrays, slots: slice | NDArray) -> Slice:
    """Select slots of a block, see ``Slice.part``; the lengths are always copied."""
    control = arrays.control
    all_slots = Slice(arrays.rows, arrays.finals, control["length"], control["starts"])
    part = all_slots.part(slots)
    if isinstance(slots, slice):  # views, which the user may change
        dirty = control["dirty"][slots]
        np.maximum(dirty, part.lengths.max(initial=0), out=dirty)
    return part


class Glue:
    """Joins the chunks of a request in ordinary memory.

    Args:
        layout: Layout of the block they come from.
        n_rows: Episodes of the request.
    """

    _N_PARTS = 16
    """Number of parts in which a block is copied: each is held twice for a moment."""

    def __init__(self, layout: Layout, n_rows: int) -> None:
        self._layout = layout
        self._n_rows = n_rows
        self._has_begun = np.zeros(n_rows, bool)
        self._parts: list[tuple[NDArray, int, Slice]] = []

    def add(self, episodes: NDArray, chunk: int, part: Slice) -> None:
        """Add chunk number ``chunk`` of some episodes; number 0 replaces all earlier ones."""
        if chunk == 0:
            # Never mix two runs of an environment that is not deterministic.
            if self._has_begun[episodes].any():
                self.drop(episodes)
            self._has_begun[episodes] = True
        self._parts.append((episodes, chunk * self._layout.n_timesteps, part))

    def drop(self, episodes: NDArray) -> None:
        """Drop the chunks of some episodes."""
        kept = [~np.isin(others, episodes) for others, _, _ in self._parts]
        self._parts = [
            (others[rows], offset, part if rows.all() else part.part(rows))
            for rows, (others, offset, part) in zip(kept, self._parts, strict=True)
        ]

    def chunks_of(self, episode: int, keys: Sequence[str]) -> list[dict[str, NDArray]]:
        """Return the known values of some keys of an episode, by chunk."""
        found: dict[int, dict[str, NDArray]] = {}
        for episodes, offset, part in self._parts:
            for row in np.flatnonzero(episodes == episode):
                found[offset] = {key: part.rows[key][row, : part.lengths[row]] for key in keys}
        return [found[offset] for offset in sorted(found)]

    def join(self, arrays: Arrays, at_home: NDArray) -> Slice:
        """Join complete episodes into rows ``[n_rows, longest, ...]`` of new memory.

        Copied chunks are dropped at once, and episodes still in the block are copied in parts, so
        that little memory is held twice.

        Args:
            arrays: The block.
            at_home: Episodes that were never copied out of the block; each is in the slot of its
                number.
        """
        joined = self._empty(arrays, at_home)
        while self._parts:
            self._copy(joined, *self._parts.pop())
        for episodes in np.array_split(at_home, self._N_PARTS):
            self._copy(joined, episodes, 0, slots_of(arrays, episodes))
        return joined

    def _copy(self, joined: Slice, episodes: NDArray, offset: int, part: Slice) -> None:
        is_last = joined.lengths[episodes] == offset + part.lengths
        for key, array in part.rows.items():
            joined.rows[key][episodes, offset : offset + array.shape[1]] = array
        for key, array in part.finals.items():
            joined.finals[key][episodes[is_last]] = array[is_last]

    def _empty(self, arrays: Arrays, at_home: NDArray) -> Slice:
        """Allocate memory for complete episodes, with their lengths and starts."""
        lengths = np.zeros(self._n_rows, np.int64)
        starts = np.zeros(self._n_rows, np.int64)
        lengths[at_home] = arrays.control["length"][at_home]
        starts[at_home] = arrays.control["starts"][at_home]
        for episodes, offset, part in self._parts:
            lengths[episodes] += part.lengths
            if offset == 0:
                starts[episodes] = part.starts
        shape = self._n_rows, int(lengths.max(initial=0))
        specs, finals = self._layout.rows.items(), self._layout.finals.items()
        return Slice(
            {key: np.zeros((*shape, *spec.shape), spec.dtype) for key, spec in specs},
            {key: batch_array(spec, self._n_rows) for key, spec in finals},
            lengths,
            starts,
        )


class StepTensors(DerivedTensors):
    """Tensors of trajectories, ``[B, T, ...]``: views of rows, and values derived from them.

    Args:
        keys: Names of rows, of flags, and, prefixed with ``_``, of values after each step.
        part: Returns rows and finals.
    """

    def __init__(self, keys: Sequence[str], part: Callable[[], Slice]) -> None:
        super().__init__(dict.fromkeys(keys))  # type: ignore[arg-type]
        self._part = part
        self._views: dict[str, Tensor] = {}  # of rows

    @cached_property
    def part(self) -> Slice:
        """Rows and finals."""
        return self._part()

    def _made(self, key: str) -> Tensor:
        part, before = self.part, key.removeprefix("_")
        if key in part.rows:
            view = self._views[key] = torch.from_numpy(part.rows[key])
            return view
        if (finals := self.finals_of(key)) is not None:
            return _after(part.rows[before], finals, part.lengths)
        steps, values = np.zeros_like(part.lengths), np.zeros_like(part.lengths)
        if key == "initial_state":
            values = part.starts
        elif key != before and before in part.finals:
            steps, values = part.lengths - 1, part.finals[before]
        return _flags(part.lengths, steps, values)

    def finals_of(self, key: str) -> NDArray | None:
        """Return the values after each row's last step, if ``key`` names values after each step.

        ``None`` for other keys, for flags, and for keys accessed before, which may have been
        changed.

        Raises:
            UsageError: If the values before the steps were modified in place, so that the final
                values no longer belong to them.
        """
        before, part = key.removeprefix("_"), self.part
        is_made = isinstance(self.get(key), Tensor)
        if is_made or key == before or key in part.rows or before not in part.rows:
            return None
        view = self._views.get(before)
        if view is not None and view._version:  # torch counts in-place changes
            raise UsageError(
                f"{before!r} was modified in place before {key!r}, which is derived from it, "
                "was accessed",
                fix=f"access {key!r} first, or modify a clone",
            )
        return part.finals.get(before)


def trajectories_of(
    layout: Layout,
    lengths: NDArray,
    part: Callable[[], Slice],
    info: Mapping[str, Derivation] | None = None,
) -> TemporalDictTensor:
    """Make the user's trajectories without copying.

    Args:
        layout: Layout of the block.
        lengths: int64 ``[B]``, copied because the user may change them.
        part: Returns rows and finals, on first access.
        info: Functions that compute the per-row information, each ``[B, ...]``.
    """
    tensors = StepTensors(layout.keys, part)
    if torch.is_inference_mode_enabled():  # a history for an agent; changes are not counted
        rows = tensors.part.rows
        tensors.update((key, torch.from_numpy(rows[key])) for key in layout.finals if key in rows)
    infos = DictTensor._wrap(DerivedTensors(info or {}))
    return TemporalDictTensor._wrap(tensors, torch.from_numpy(np.array(lengths)), infos)


@dataclass(frozen=True)
class Unpadded:
    """Complete episodes for sending, without padding and derived values.

    Attributes:
        rows: Key to ``[sum(lengths), ...]``, row after row.
        finals: Key to ``[B, ...]``: the value after the last step.
        lengths: int64 ``[B]``.
    """

    rows: dict[str, NDArray]
    finals: dict[str, NDArray]
    lengths: NDArray

    @classmethod
    def of(cls, part: Slice) -> Unpadded:
        """Copy some episodes."""
        is_step = _steps_in(part.lengths)
        rows = {key: array[is_step] for key, array in part.rows.items()}
        return cls(rows, {key: np.array(array) for key, array in part.finals.items()}, part.lengths)

    def copy(self) -> Unpadded:
        """Copy into memory of its own."""
        rows, finals = (
            {key: np.array(array) for key, array in arrays.items()}
            for arrays in (self.rows, self.finals)
        )
        return Unpadded(rows, finals, np.array(self.lengths))

    @staticmethod
    def joined(parts: Sequence[Unpadded]) -> Slice:
        """Join the rows of all parts, one after the other, in new memory."""
        lengths = np.concatenate([part.lengths for part in parts])
        shape = len(lengths), int(lengths.max())
        like = parts[0]
        rows = {key: np.zeros((*shape, *a.shape[1:]), a.dtype) for key, a in like.rows.items()}
        first = 0
        for part in parts:
            is_step = _steps_in(part.lengths)
            stop = first + len(is_step)
            for key, array in part.rows.items():
                rows[key][first:stop, : is_step.shape[1]][is_step] = array
            first = stop
        finals = {key: np.concatenate([part.finals[key] for part in parts]) for key in like.finals}
        return Slice(rows, finals, lengths, np.ones_like(lengths))


def _steps_in(lengths: NDArray) -> NDArray:
    """Where rows have steps: bool ``[B, longest]``."""
    is_step: NDArray = np.arange(lengths.max(initial=0)) < lengths[:, None]
    return is_step


def _flags(lengths: NDArray, steps: NDArray, values: NDArray) -> Tensor:
    """Make flags that can be True at one step per row only: ``values`` at ``steps``."""
    flags = np.zeros((len(lengths), lengths.max(initial=0)), bool)
    rows = np.flatnonzero((lengths > 0) & (values > 0))
    flags[rows, steps[rows]] = True
    return torch.from_numpy(flags)


def _after(source: NDArray, finals: NDArray, lengths: NDArray) -> Tensor:
    """Copy the values after each step, zero from each row's length on."""
    shifted = np.empty_like(source, order="C")
    if shifted.shape[1]:
        shifted[:, :-1] = source[:, 1:]
        shifted[:, -1] = 0
        filled = np.flatnonzero(lengths)
        shifted[filled, lengths[filled] - 1] = finals[filled]
    return torch.from_numpy(shifted)
