"""Writes steps of a batch of lanes into a block of slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlpool.data.storage import NDArray
from rlpool.slots.blocks import Arrays, Layout, flat, successor_key

_OF_SLOTS = ("length", "starts", "dirty")

Pair = tuple[NDArray, NDArray]
"""A target in the block and its source, flattened so that one index selects a row."""

Output = tuple[str, NDArray, NDArray | None, NDArray | None]
"""A key of the agent's output, its target, and where it is copied first if a row has a shape: to a
buffer, and from there by its flattened rows."""


class SlotWriter:
    """The views through which one rollout writes into one block.

    Rows are numbered through all slots: ``slot * n_timesteps + step``.

    Args:
        layout: The block's layout.
        arrays: The block.
        current: Key to array ``[n_lanes, ...]``: the environments' buffers and the noise.
        state: Key to array ``[n_lanes, ...]``: the agent's state.

    Attributes:
        before: What the step starts from: ``target[rows] = source`` writes one row per lane.
        outputs: What the agent returns.
        after: What the step led to, if the layout stores that.
        finals: What the block stores about the end of a slot: ``target[slot] = source[lane]``.
        rows: ``[n_slots + 1, T, ...]``: all rows of the block.
        length, starts, dirty: One int64 per slot, see ``Layout.control``.
        spare_rows: int64 ``[n_lanes]``: rows of the spare slot, for lanes that write into no other.
    """

    def __init__(
        self,
        layout: Layout,
        arrays: Arrays,
        current: Mapping[str, NDArray],
        state: Mapping[str, NDArray],
    ) -> None:
        n_lanes = layout.step.n_lanes
        sources = {**current, **state}
        targets = {key: flat(array, 2) for key, array in arrays.rows.items()}
        self.rows = list(arrays.rows.values())
        self._states: list[Pair] = [(targets[key], flat(array, 1)) for key, array in state.items()]
        self.before: list[Pair] = [
            (targets[key], flat(array, 1)) for key, array in sources.items() if key in targets
        ]
        self.after: list[Pair] = [
            (targets[successor_key(key)], flat(array, 1))
            for key, array in sources.items()
            if successor_key(key) in targets
        ]
        self.outputs: list[Output] = []
        for key, spec in layout.step.output.items():
            buffer = np.zeros((n_lanes, *spec.shape), spec.dtype) if spec.shape else None
            as_rows = None if buffer is None else flat(buffer, 1)
            self.outputs.append((key, targets[key], buffer, as_rows))
        self.finals = [(array, sources[key]) for key, array in arrays.finals.items()]
        # As memoryviews: single numbers are read and written faster that way.
        numbers: tuple[Any, ...] = tuple(arrays.control[k].data for k in _OF_SLOTS)
        self.length, self.starts, self.dirty = numbers
        self._n_timesteps = layout.n_timesteps
        spare = layout.n_slots * layout.n_timesteps
        self.spare_rows: NDArray = spare + np.arange(n_lanes) % layout.n_timesteps

    def write_state(self, row: int, lane: int) -> None:
        """Write one lane's agent state, which became known only in the agent's call."""
        for target, source in self._states:
            target[row] = source[lane]

    def abandon(self, slot: int, length: int) -> None:
        """Record how far a slot that will not be finished was written."""
        self.dirty[slot] = max(self.dirty[slot], min(length + 1, self._n_timesteps))
