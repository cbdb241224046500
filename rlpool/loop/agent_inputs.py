"""What an agent is shown beside the observation: its rows of ``agent_info``, and the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.memory.storage import Array, batch_array
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.slots.trajectories import Slice, trajectories_of
from rlpool.specs import row_specs


class InfoRows:
    """The row of ``agent_info`` of each lane's episode.

    Args:
        n_lanes: Number of lanes.

    Attributes:
        arrays: Key to array ``[n_lanes, ...]``, empty if the request has no ``agent_info``.
        tensors: The same as the agent gets it, ``None`` if there is none.
    """

    def __init__(self, n_lanes: int) -> None:
        self.arrays: dict[str, Array] = {}
        self.tensors: DictTensor | None = None
        self._n_lanes = n_lanes

    def show(self, agent_info: Mapping[str, Array], rows: Mapping[int, int]) -> None:
        """Show lanes other rows.

        Args:
            agent_info: ``[n, ...]`` by episode, empty if there is none.
            rows: Lane to row.
        """
        specs = row_specs(agent_info)
        if specs != row_specs(self.arrays):
            self.arrays = {key: batch_array(spec, self._n_lanes) for key, spec in specs.items()}
            for key, array in self.arrays.items():
                # Idle lanes have a row that is valid, whatever its values mean to the agent.
                array[:] = agent_info[key][next(iter(rows.values()))]
            tensors = {key: torch.from_numpy(array) for key, array in self.arrays.items()}
            self.tensors = DictTensor(tensors) if tensors else None
        for key, array in self.arrays.items():
            array[list(rows)] = agent_info[key][list(rows.values())]


class History:
    """The steps of each lane's episode so far, across slots, in memory that grows with them.

    Args:
        step: Says which keys there are.
    """

    _FIRST_CAPACITY = 64  # steps

    def __init__(self, step: StepSpecs) -> None:
        # A layout without restarts: an episode's history begins with the episode.
        self._layout = Layout(step, n_slots=1, n_timesteps=1, n_workers=1)
        n_lanes = step.n_lanes
        self._lengths = np.zeros(n_lanes, np.int64)
        self._rows = {
            key: np.zeros((n_lanes, self._FIRST_CAPACITY, *spec.shape), spec.dtype)
            for key, spec in self._layout.rows.items()
        }

    def restart(self, lane: int) -> None:
        """Forget a lane's steps: its next one starts an episode."""
        for array in self._rows.values():
            array[lane, : self._lengths[lane]] = 0
        self._lengths[lane] = 0

    def view(self, current: Mapping[str, Array]) -> TemporalDictTensor:
        """All lanes' steps so far, ``[n_lanes, longest, ...]``, as views.

        Args:
            current: Key to array ``[n_lanes, ...]``: the values after the last step.
        """
        longest = int(self._lengths.max())
        rows = {key: array[:, :longest] for key, array in self._rows.items()}
        finals = {key: np.array(current[key]) for key in self._layout.finals}
        starts = np.ones_like(self._lengths)
        return trajectories_of(self._layout, Slice(rows, finals, self._lengths.copy(), starts))

    def record(self, values: Mapping[str, Array], lanes: Sequence[int]) -> None:
        """Add one step.

        Args:
            values: Key to array ``[n_lanes, ...]``, for every key of a row.
            lanes: The lanes that take this step.
        """
        rows = np.asarray(lanes)
        steps = self._lengths[rows]
        for key, array in self._rows.items():
            if steps.max() >= array.shape[1]:
                array = self._rows[key] = np.concatenate([array, np.zeros_like(array)], 1)
            array[rows, steps] = values[key][rows]
        self._lengths[rows] += 1
