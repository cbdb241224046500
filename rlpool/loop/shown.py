"""What an agent is shown beside the observation: ``agent_info``, and the steps so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import row_specs
from rlpool.data.storage import NDArray, batch_array
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.slots.trajectories import Slice, trajectories_of


class InfoRows:
    """Each lane's row of ``agent_info``.

    Args:
        n_lanes: Number of lanes.

    Attributes:
        arrays: Key to array ``[n_lanes, ...]``, empty if the request has no ``agent_info``.
        tensors: The same as tensors, ``None`` if it is empty.
        shown: What an agent may change, ``None`` if it is empty.
        copies: Of each key, the rows and their copies in ``shown``.
    """

    def __init__(self, n_lanes: int) -> None:
        self.arrays: dict[str, NDArray] = {}
        self.tensors: DictTensor | None = None
        self.shown: DictTensor | None = None
        self.copies: list[tuple[NDArray, NDArray]] = []
        self._n_lanes = n_lanes

    def declare(self, agent_info: Mapping[str, NDArray]) -> None:
        """Have the keys that requests have from now on.

        Args:
            agent_info: ``[n, ...]`` by episode; may be empty.
        """
        specs = row_specs(agent_info)
        if specs != row_specs(self.arrays):
            self.arrays, copies = (
                {key: batch_array(spec, self._n_lanes) for key, spec in specs.items()}
                for _ in range(2)
            )
            self.tensors, self.shown = (
                DictTensor({k: torch.from_numpy(a) for k, a in each.items()}) if each else None
                for each in (self.arrays, copies)
            )
            self.copies = [(array, copies[key]) for key, array in self.arrays.items()]

    def show(self, agent_info: Mapping[str, NDArray], rows: Mapping[int, int]) -> None:
        """Give lanes the rows of their new episodes.

        Args:
            agent_info: ``[n, ...]`` by episode, of the declared keys.
            rows: Lane to row.
        """
        for key, array in self.arrays.items():
            array[list(rows)] = agent_info[key][list(rows.values())]


class History:
    """The steps of each lane's episode so far, across slots, in memory that grows.

    Args:
        step: The keys of a step.
    """

    _FIRST_CAPACITY = 64  # steps

    def __init__(self, step: StepSpecs) -> None:
        # Without restarts: the history begins with the episode.
        self._layout = Layout(step, n_slots=1, n_timesteps=1, n_workers=1)
        n_lanes = step.n_lanes
        self._lengths = np.zeros(n_lanes, np.int64)
        self._rows = {
            key: np.zeros((n_lanes, self._FIRST_CAPACITY, *spec.shape), spec.dtype)
            for key, spec in self._layout.rows.items()
        }

    def restart(self, lane: int) -> None:
        """Clear a lane's steps at the start of an episode."""
        for array in self._rows.values():
            array[lane, : self._lengths[lane]] = 0
        self._lengths[lane] = 0

    def so_far(self, current: Mapping[str, NDArray], lanes: NDArray) -> TemporalDictTensor:
        """The steps so far, ``[n_lanes, longest, ...]``, copies.

        Args:
            current: Key to array ``[n_lanes, ...]``, the values after the last step.
            lanes: The lane that each row shows.
        """
        lengths = self._lengths[lanes]
        longest = int(lengths.max())
        rows = {key: array[lanes, :longest] for key, array in self._rows.items()}
        finals = {key: current[key][lanes] for key in self._layout.finals}
        return trajectories_of(self._layout, Slice(rows, finals, lengths, np.ones_like(lengths)))

    def record(self, values: Mapping[str, NDArray], lanes: Sequence[int]) -> None:
        """Add one step.

        Args:
            values: Key to array ``[n_lanes, ...]``, for all keys of a row.
            lanes: The lanes that take this step.
        """
        rows = np.asarray(lanes)
        steps = self._lengths[rows]
        for key, array in self._rows.items():
            if steps.max() >= array.shape[1]:
                array = self._rows[key] = np.concatenate([array, np.zeros_like(array)], 1)
            array[rows, steps] = values[key][rows]
        self._lengths[rows] += 1
