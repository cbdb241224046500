"""The row of ``agent_info`` of each lane's episode, as the batch that the agent is shown."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlpool.data.dict_tensor import DictTensor
from rlpool.memory.storage import Array, batch_array
from rlpool.specs import row_specs


class InfoRows:
    """The rows of all lanes.

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

    def show(self, agent_info: Mapping[str, Array] | None, rows: Mapping[int, int]) -> None:
        """Show lanes other rows.

        Args:
            agent_info: ``[n, ...]`` by episode, or ``None``.
            rows: Lane to row.
        """
        specs = row_specs(agent_info or {})
        if specs != row_specs(self.arrays):
            self.arrays = {key: batch_array(spec, self._n_lanes) for key, spec in specs.items()}
            for key, array in self.arrays.items():
                # Idle lanes have a row that is valid, whatever its values mean to the agent.
                array[:] = (agent_info or {})[key][next(iter(rows.values()))]
            tensors = {key: torch.from_numpy(array) for key, array in self.arrays.items()}
            self.tensors = DictTensor(tensors) if tensors else None
        for key, array in self.arrays.items():
            array[list(rows)] = (agent_info or {})[key][list(rows.values())]
