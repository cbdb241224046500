"""What an agent that wants ``history`` sees: all previous steps of the running episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.memory.storage import Array
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.slots.trajectories import Slice, trajectories_of


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
        self._lanes = np.arange(n_lanes)
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
        if int(steps.max()) >= next(iter(self._rows.values())).shape[1]:
            self._grow()
        for key, array in self._rows.items():
            array[rows, steps] = values[key][rows]
        self._lengths[rows] += 1

    def _grow(self) -> None:
        self._rows = {
            key: np.concatenate([array, np.zeros_like(array)], 1)
            for key, array in self._rows.items()
        }
