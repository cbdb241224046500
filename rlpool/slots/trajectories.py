"""From slots to what the user gets: views on a block, or chunks glued in ordinary memory."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import FLAGS
from rlpool.errors import UsageError
from rlpool.memory.storage import Array
from rlpool.slots.blocks import Arrays, Layout, successor_key

Derivation = Callable[[], Tensor]


class DerivedTensors(dict[str, Tensor]):
    """Tensors by name, some of which are computed when they are first looked at.

    Args:
        known: Tensors that are there.
        derived: Functions without arguments that compute the others.
    """

    def __init__(self, known: Mapping[str, Tensor], derived: Mapping[str, Derivation]) -> None:
        super().__init__(known)
        for key, derive in derived.items():
            super().__setitem__(key, derive)  # type: ignore[assignment]

    def __getitem__(self, key: str) -> Tensor:
        value: Any = super().__getitem__(key)
        if not isinstance(value, Tensor):
            with torch.inference_mode(False):  # kept, and used elsewhere perhaps
                value = value()
            super().__setitem__(key, value)
        tensor: Tensor = value
        return tensor

    def derivation(self, key: str) -> Derivation | None:
        """What will compute a tensor that nobody has looked at yet."""
        value: Any = super().get(key)
        return None if value is None or isinstance(value, Tensor) else value

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

    def get(self, key: str, default: Any = None) -> Any:
        """The tensor of a key, or the default."""
        return self[key] if key in self else default  # noqa: SIM401  (that would be this)

    def copy(self) -> dict[str, Tensor]:
        """A plain dict of all tensors, computed."""
        return dict(self.items())

    def __reduce__(self) -> tuple[type[dict[str, Tensor]], tuple[dict[str, Tensor]]]:
        return dict, (self.copy(),)


@dataclass(frozen=True)
class Slice:
    """Rows and final values of some slots or of a whole request, as arrays or tensors.

    Attributes:
        rows: Key to ``[B, T, ...]``, zero from each row's length on.
        finals: Key to ``[B, ...]``: the value after the last step.
        lengths: int64 ``[B]``.
        starts: int64 ``[B]``, 1 where a row's first step starts an episode.
    """

    rows: Mapping[str, Array]
    finals: Mapping[str, Array]
    lengths: Array
    starts: Array


def slots_in_place(arrays: Arrays, n_rows: int) -> Slice:
    """The first ``n_rows`` slots of a block, as views cut to the longest; lengths are copied."""
    lengths = arrays.control["length"][:n_rows].copy()
    longest = int(lengths.max(initial=0))
    return Slice(
        {key: array[:n_rows, :longest] for key, array in arrays.rows.items()},
        {key: array[:n_rows] for key, array in arrays.finals.items()},
        lengths,
        arrays.control["starts"][:n_rows].copy(),
    )


def copied_slots(arrays: Arrays, slots: Array) -> Slice:
    """Some slots, copied out of a block and cut to the longest."""
    lengths = arrays.control["length"][slots]
    longest = int(lengths.max(initial=0))
    return Slice(
        {key: array[slots, :longest] for key, array in arrays.rows.items()},
        {key: array[slots] for key, array in arrays.finals.items()},
        lengths,
        arrays.control["starts"][slots],
    )


def _rows_of(part: Slice, rows: Array) -> Slice:
    return Slice(
        {key: array[rows] for key, array in part.rows.items()},
        {key: array[rows] for key, array in part.finals.items()},
        part.lengths[rows],
        part.starts[rows],
    )


class Glue:
    """Puts the chunks of a request together in ordinary memory.

    Args:
        layout: Layout of the block they come from.
        n_rows: Episodes of the request.
    """

    def __init__(self, layout: Layout, n_rows: int) -> None:
        self._layout = layout
        self._n_rows = n_rows
        self._parts: list[tuple[Array, int, Slice]] = []

    def add(self, episodes: Array, chunk: int, part: Slice) -> None:
        """Add chunk number ``chunk`` of some episodes."""
        self._parts.append((episodes, chunk * self._layout.n_timesteps, part))

    def drop(self, episodes: Array) -> None:
        """Forget the chunks of some episodes, which will be run again."""
        parts = []
        for others, offset, part in self._parts:
            kept = ~np.isin(others, episodes)
            if kept.any():
                parts.append((others[kept], offset, part if kept.all() else _rows_of(part, kept)))
        self._parts = parts

    def join(self) -> Slice:
        """All chunks in one: rows ``[n_rows, longest, ...]`` in new memory."""
        lengths = np.zeros(self._n_rows, np.int64)
        starts = np.zeros(self._n_rows, np.int64)
        for episodes, offset, part in self._parts:
            lengths[episodes] += part.lengths
            if offset == 0:
                starts[episodes] = part.starts
        longest = int(lengths.max(initial=0))
        rows = {
            key: np.zeros((self._n_rows, longest, *spec.shape), spec.dtype)
            for key, spec in self._layout.rows.items()
        }
        finals = {
            key: np.zeros((self._n_rows, *spec.shape), spec.dtype)
            for key, spec in self._layout.finals.items()
        }
        for episodes, offset, part in self._parts:
            is_last = lengths[episodes] == offset + part.lengths
            for key, array in part.rows.items():
                rows[key][episodes, offset : offset + array.shape[1]] = array
            for key, array in part.finals.items():
                finals[key][episodes[is_last]] = array[is_last]
        return Slice(rows, finals, lengths, starts)


def trajectories_of(
    layout: Layout, part: Slice, info: Mapping[str, Tensor] | None = None
) -> TemporalDictTensor:
    """Make the user's trajectories, without copying.

    Values after a step (``_frame`` and so on) and flags are computed when first looked at.

    Args:
        layout: Layout of the block the values come from.
        part: Rows and finals.
        info: Per-row information, each ``[B, ...]``.
    """
    lengths = torch.from_numpy(part.lengths)
    rows = {key: torch.from_numpy(array) for key, array in part.rows.items()}
    derived: dict[str, Derivation] = {}
    if not layout.restarts:
        n_rows, longest = part.lengths.shape[0], _longest(part)
        shape = (n_rows, longest)
        # Copies: the lengths that the user gets may be changed.
        starts, own_lengths = part.starts, part.lengths.copy()
        for key in FLAGS:
            derived[key] = _never(shape)
        derived["initial_state"] = _first(shape, starts, own_lengths)
        derived[successor_key("initial_state")] = _never(shape)
        for key, final in part.finals.items():
            if key in rows:
                derived[successor_key(key)] = Successor(key, rows[key], final, own_lengths)
            else:
                derived[successor_key(key)] = _last(shape, final, own_lengths)
    ordered = {key: derived.get(key) for key in layout.step.succeeded if key in derived}
    tensors = DerivedTensors(rows, {**ordered, **derived})  # type: ignore[dict-item]
    return TemporalDictTensor._wrap(tensors, lengths, DictTensor(info))


def _longest(part: Slice) -> int:
    return int(part.lengths.max(initial=0))


def _version(tensor: Tensor) -> int:
    """Counts the changes in place, as far as torch does."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _never(shape: tuple[int, int]) -> Derivation:
    return lambda: torch.from_numpy(np.zeros(shape, bool))


def _first(shape: tuple[int, int], starts: Array, lengths: Array) -> Derivation:
    def derive() -> Tensor:
        flags = np.zeros(shape, bool)
        if shape[1]:
            flags[:, 0] = (starts > 0) & (lengths > 0)
        return torch.from_numpy(flags)

    return derive


def _last(shape: tuple[int, int], final: Array, lengths: Array) -> Derivation:
    def derive() -> Tensor:
        flags = np.zeros(shape, bool)
        filled = np.flatnonzero(lengths)
        flags[filled, lengths[filled] - 1] = final[filled]
        return torch.from_numpy(flags)

    return derive


class Successor:
    """Computes ``_x``, the values after each step, from ``x`` and the values after the last step.

    Args:
        key: The name of ``x``.
        values: ``x``: ``[B, T, ...]``, zero from each row's length on.
        finals: ``[B, ...]``: the value after each row's last step.
        lengths: int64 ``[B]``.

    Attributes:
        lengths: As given; ``finals`` belongs to these.
    """

    def __init__(self, key: str, values: Tensor, finals: Array, lengths: Array) -> None:
        self._key = key
        self._values = values
        self._finals = finals
        self.lengths = lengths
        self._version = _version(values)

    def finals(self) -> Array:
        """The values after each row's last step, no copy.

        Raises:
            UsageError: If ``x`` was changed in place, so that they do not follow it any more.
        """
        if _version(self._values) != self._version:
            after = successor_key(self._key)
            raise UsageError(
                f"{self._key!r} was changed in place before {after!r}, which is "
                "derived from it, was looked at",
                fix=f"look at {after!r} first, or change a clone",
            )
        return self._finals

    def __call__(self) -> Tensor:
        """The values after each step, zero from each row's length on; a copy."""
        finals = self.finals()
        source = self._values.numpy()
        shifted = np.empty_like(source, order="C")
        if shifted.shape[1]:
            shifted[:, :-1] = source[:, 1:]
            shifted[:, -1] = 0
            filled = np.flatnonzero(self.lengths)
            shifted[filled, self.lengths[filled] - 1] = finals[filled]
        return torch.from_numpy(shifted)
