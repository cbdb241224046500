"""Calls an agent with the same number of rows, whatever the number of lanes.

The last bits of a matrix product depend on the number of its rows, and on the place of a row among
them. So an episode gets a row of its own number, in calls that always have as many rows: what it
computes then depends neither on how many others run beside it nor on which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpool.agents.agent import Agent
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.loop.agent_driver import AgentDriver, Observed
from rlpool.loop.plan import Episode

Part = dict[str, NDArray]


class _Call(NamedTuple):
    """One call of the agent.

    Attributes:
        lanes: The lanes that it is made for.
        rows: Their rows: int64 like ``lanes``.
        shown: The lane that each row shows: int64 ``[n_rows]``.
        is_all: Whether the rows are those of all lanes, each in its place.
    """

    lanes: list[int]
    rows: NDArray
    shown: NDArray
    is_all: bool


class FixedRowsDriver(AgentDriver):
    """An ``AgentDriver`` whose agent is always called with ``n_rows`` rows.

    Episode number *i* has row ``i % n_rows``. Lanes whose episodes share a row are in different
    calls; so are, for an agent with a history, lanes whose episodes have taken different numbers
    of steps, since the history of a call is as long as its longest. Rows that no lane has in a
    call are copies of another one.

    Args:
        agent: The agent.
        n_lanes: Number of lanes.
        n_rows: Rows of each call.
    """

    def __init__(self, agent: Agent, n_lanes: int, n_rows: int) -> None:
        super().__init__(agent, n_lanes)
        self.n_rows = n_rows
        self._row_of = [lane % n_rows for lane in range(n_lanes)]
        self._last: tuple[list[int], list[_Call]] = [], []  # of lanes, while their rows stay
        self._gathered: dict[str, dict[str, torch.Tensor]] = {}  # written anew for each call

    def start(
        self,
        lanes: Sequence[int],
        agent_info: DictTensor | None,
        episodes: Sequence[Episode] = (),
    ) -> None:
        """See ``AgentDriver.start``; the lanes get the rows of their episodes."""
        for lane, episode in zip(lanes, episodes, strict=False):
            self._place(lane, episode)
        super().start(lanes, agent_info, episodes)

    def resume(self, lane: int, state: Mapping[str, NDArray], episode: Episode) -> None:
        """See ``AgentDriver.resume``."""
        self._place(lane, episode)
        super().resume(lane, state, episode)

    def _place(self, lane: int, episode: Episode) -> None:
        """Give a lane the row of its episode."""
        row = episode.running_number % self.n_rows
        if row != self._row_of[lane]:
            self._row_of[lane], self._last = row, ([], [])

    def _initial_states(self, lanes: Sequence[int], agent_info: DictTensor | None) -> Part:
        states: Part = {}
        for call in self._calls(lanes, None):
            info = self._at("agent_info", agent_info, call.shown)
            state = self._read("state", self.agent.initial_state(info, self.n_rows))
            self._scatter(state, states, call)
        return states

    def _call(
        self, state: DictTensor | None, seen: Observed, lanes: Sequence[int]
    ) -> tuple[Part, Part, Part]:
        observation, agent_info, history = seen
        whole: tuple[Part, Part, Part] = {}, {}, {}
        for call in self._calls(lanes, history):
            shown = call.shown
            some = (
                self._gather("observation", observation, shown),
                self._at("agent_info", agent_info, shown),
                None if history is None else _so_far(history, shown, call.lanes[0]),
            )
            parts = super()._call(self._at("state", state, shown), some, call.lanes)
            if call.is_all:
                return parts
            for part, all_lanes in zip(parts, whole, strict=True):
                self._scatter(part, all_lanes, call)
        return whole

    def _calls(self, lanes: Sequence[int], history: TemporalDictTensor | None) -> list[_Call]:
        """How often the agent is called, and for which lanes."""
        if history is None and lanes == self._last[0]:
            return self._last[1]
        lengths = None if history is None else history.lengths.tolist()
        groups: dict[tuple[int, int], list[int]] = {}
        n_calls: dict[tuple[int, int], int] = {}  # that a row has in use, by steps of the history
        for lane in lanes:
            n_steps = 0 if lengths is None else lengths[lane]
            place = n_steps, self._row_of[lane]
            number = n_calls.get(place, 0)
            n_calls[place] = number + 1
            groups.setdefault((n_steps, number), []).append(lane)
        calls = [self._call_for(group) for group in groups.values()]
        if history is None:
            self._last = list(lanes), calls
        return calls

    def _call_for(self, lanes: list[int]) -> _Call:
        rows = np.array([self._row_of[lane] for lane in lanes])
        shown = np.full(self.n_rows, lanes[0])
        shown[rows] = lanes
        is_all = self.n_rows == self.n_lanes and rows.tolist() == list(range(self.n_lanes)) == lanes
        return _Call(lanes, rows, shown, is_all)

    def _at(self, name: str, data: DictTensor | None, shown: NDArray) -> DictTensor | None:
        return None if data is None else DictTensor._wrap(self._gather(name, data._tensors, shown))

    def _gather(
        self, name: str, tensors: Mapping[str, torch.Tensor], shown: NDArray
    ) -> dict[str, torch.Tensor]:
        """Copy rows of some lanes to where they always are: memory may be aligned elsewhere."""
        kept = self._gathered.setdefault(name, {})
        for key, tensor in tensors.items():
            copy = kept.get(key)
            if copy is None or copy.dtype is not tensor.dtype or copy.shape[1:] != tensor.shape[1:]:
                shape = self.n_rows, *tensor.shape[1:]
                copy = kept[key] = torch.empty(shape, dtype=tensor.dtype, device="cpu")
            tensor.numpy().take(shown, 0, copy.numpy(), "clip")
        return {key: kept[key] for key in tensors}

    def _scatter(self, part: Part, all_lanes: Part, call: _Call) -> None:
        """Copy the rows of a call to the lanes that have them."""
        for key, array in part.items():
            if key not in all_lanes:
                all_lanes[key] = np.zeros((self.n_lanes, *array.shape[1:]), array.dtype)
            all_lanes[key][call.lanes] = array[call.rows]


def driver_of(agent: Agent, n_lanes: int, n_rows: int | None) -> AgentDriver:
    """What calls an agent, with a fixed number of rows or one per lane."""
    if n_rows is None:
        return AgentDriver(agent, n_lanes)
    return FixedRowsDriver(agent, n_lanes, n_rows)


def _so_far(history: TemporalDictTensor, shown: NDArray, lane: int) -> Any:
    """The history of lanes that have taken as many steps as one of them."""
    n_steps = int(history.lengths[lane])
    return history.index(torch.from_numpy(shown)).temporal_slice(0, n_steps)
