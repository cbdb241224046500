"""Calls an agent on the batch of a worker's lanes, with their states, infos and history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpool.agents.agent import Agent, agent_step
from rlpool.data.array_view import as_numpy
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import TensorSpec, fitted, is_action, row_specs
from rlpool.data.storage import NDArray, batch_array
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import LaneError
from rlpool.errors import SpecError
from rlpool.loop.plan import Lane
from rlpool.machine.interrupts import ctrl_c

HistoryOf = Callable[[NDArray, Sequence[int]], TemporalDictTensor]
"""The history of some lanes, one per row, as wide as the longest history of some lanes."""


class AgentFailure(LaneError):
    """The agent failed; ``__cause__`` is its exception, ``call`` "agent" or "initial_state".

    Attributes:
        lanes: The lanes of the failed call.
    """

    def __init__(self, lanes: Sequence[int], call: str) -> None:
        super().__init__(lanes[0], call)
        self.lanes = list(lanes)


Part = dict[str, NDArray]


class _Call(NamedTuple):
    """One call of the agent.

    Attributes:
        lanes: Its lanes.
        rows: Their rows: int64 like ``lanes``.
        lane_of_row: The lane of each row: int64 ``[n_rows]``.
        has_all_lanes: Whether each row has its own lane.
    """

    lanes: list[int]
    rows: NDArray
    lane_of_row: NDArray
    has_all_lanes: bool


class AgentDriver:
    """Runs one agent over the rows of one batch.

    The agent always gets the same number of rows. By default, these are the whole batch, each lane
    in its own row. If the number is given, episode number *i* has row ``i % n_rows``. Lanes whose
    episodes share a row are then in different calls, and so are, for an agent with a history, lanes
    whose episodes have different numbers of steps, since the history of a call is as long as its
    longest. Rows without a lane in a call are copies of another row.

    Rows that start an episode get separate calls with ``state=None``, unless the agent makes its
    initial states itself or keeps no state.

    Args:
        agent: The agent.
        n_lanes: Rows of the batch.
        n_rows: Rows of each call, ``None`` for one per lane.

    Attributes:
        n_rows: Rows of each call.
        output_specs: The agent's outputs, ``None`` before the first call.
        state: Key to array ``[n_lanes, ...]``: each lane's state, rewritten in place.
        starting: Lanes whose state at this step is only known after ``act``.
        converted_actions: Action key to the environments' dtype, where it differs from the
            agent's.
    """

    def __init__(self, agent: Agent, n_lanes: int, n_rows: int | None = None) -> None:
        self.agent = agent
        self.n_lanes = n_lanes
        self.n_rows = n_rows or n_lanes
        self._shares_rows = n_rows is not None
        self._row_of = [lane % self.n_rows for lane in range(n_lanes)]
        self._last: tuple[list[int], list[_Call]] = [], []  # of lanes, while their rows stay
        self._gathered: dict[str, Part] = {}  # rewritten by each call
        self._no_state = DictTensor({})
        self.state: dict[str, NDArray] = {}
        self.converted_actions: dict[str, np.dtype[Any]] = {}
        self._makes_initial_states = agent.makes_initial_states()
        self.forget()

    def forget(self) -> None:
        """Forget the keys, shapes and dtypes of the first call."""
        self.output_specs: dict[str, TensorSpec] | None = None
        self.starting: list[int] = []
        self.state.clear()
        self._new_state: Part = {}
        # "output" or "state" -> key -> batch shape and dtype that the agent has to return
        self._expected: dict[str, dict[str, tuple[tuple[int, ...], np.dtype[Any]]]] = {}

    def start(
        self,
        lanes: Sequence[int],
        agent_info: Mapping[str, NDArray],
        running: Sequence[Lane] = (),
    ) -> None:
        """Mark lanes that start an episode with the next call.

        Args:
            lanes: Lane numbers.
            agent_info: The batch's ``agent_info``, including the new rows of these lanes.
            running: The lanes with their episodes, none in a probe.

        Raises:
            AgentFailure: If the agent's ``initial_state`` fails.
        """
        for lane in running if self._shares_rows else ():
            row = lane.episode % self.n_rows
            if row != self._row_of[lane.number]:
                self._row_of[lane.number], self._last = row, ([], [])
        if self._makes_initial_states:
            try:
                for call in self._calls(sorted(lanes), None):
                    info = self._gather("agent_info", agent_info, call) if agent_info else None
                    state = self._read("state", self.agent.initial_state(info, self.n_rows))
                    for key, array in state.items():
                        self.state[key][call.lanes] = array[call.rows]
            except ctrl_c():
                raise
            except BaseException as error:
                raise AgentFailure(lanes, "initial_state") from error
        elif self.state or self.output_specs is None:
            self.starting = sorted({*self.starting, *lanes})

    def resume(self, lane: int, state: Mapping[str, NDArray]) -> None:
        """Continue in a started lane an episode that was begun elsewhere.

        Args:
            lane: The lane.
            state: The agent's current state in the episode.
        """
        self.starting = [other for other in self.starting if other != lane]
        for key, value in state.items():
            self.state[key][lane] = value

    def act(
        self,
        lanes: Sequence[int],
        observation: Mapping[str, NDArray],
        agent_info: Mapping[str, NDArray],
        history: HistoryOf | None = None,
        n_steps: Sequence[int] | None = None,
        full_batch: dict[str, torch.Tensor] | None = None,
    ) -> Part:
        """Call the agent; ``commit`` makes the new state current.

        Args:
            lanes: The lanes that take this step; all other rows are copies of some of these.
            observation: ``[n_lanes, ...]``; the agent gets copies.
            agent_info: Likewise; may be empty.
            history: Makes the history, if the agent needs one.
            n_steps: Steps of each lane's history, unless none has any.
            full_batch: The observation itself, given to the agent without a copy if each row has
                its own lane.

        Returns:
            The outputs, ``[n_lanes, ...]``. ``state`` then holds the states before this step.

        Raises:
            AgentFailure: If the agent raises or returns a wrong key, shape or dtype.
        """
        starting, others = self.starting, lanes
        first: Part = {}
        outputs: Part = {}
        self._new_state = {}
        try:
            if starting:
                # Without those of a request that was dropped before its first step.
                starting = [lane for lane in starting if lane in lanes]
                others = [lane for lane in lanes if lane not in starting]
            if self._no_state._tensors:  # the agent has written to it
                self._no_state = DictTensor({})
            known, calls = self._last
            if starting or n_steps or lanes != known:
                calls = self._calls(starting, n_steps) if starting else []
                calls += self._calls(others, n_steps) if others else []
                self._last = ([], []) if starting or n_steps else (list(lanes), calls)
            for call in calls:
                state: DictTensor | None = self._no_state
                if call.lanes[0] in starting:
                    state = None
                elif self.state:
                    state = self._gather("state", self.state, call)
                if full_batch and call.has_all_lanes:
                    observed = DictTensor._wrap(dict(full_batch))
                else:
                    observed = self._gather("observation", observation, call)
                info = self._gather("agent_info", agent_info, call) if agent_info else None
                mine = call.lanes if self._shares_rows else lanes
                before = history and history(call.lane_of_row, mine)
                found = self._call(state, observed, info, before)
                if len(call.lanes) == len(lanes) and not self._shares_rows:
                    first, outputs, self._new_state = found
                    break
                for part, of_all in zip(found, (first, outputs, self._new_state), strict=True):
                    self._scatter(part, of_all, call)
        except ctrl_c():
            raise
        except BaseException as error:
            raise AgentFailure(lanes, "agent") from error
        for key, array in first.items():
            self.state[key][starting] = array[starting]
        self.starting = []
        return outputs

    def commit(self, lanes: Sequence[int] | None = None) -> None:
        """Make the new state of the last call current.

        Args:
            lanes: The lanes that take this step, all by default.
        """
        rows: Any = slice(None) if lanes is None else lanes
        for key, array in self._new_state.items():
            self.state[key][rows] = array[rows]

    def _calls(self, lanes: Sequence[int], n_steps: Sequence[int] | None) -> list[_Call]:
        """Divide lanes into calls of the agent."""
        groups: dict[tuple[int, int], list[int]] = {}
        if not self._shares_rows:
            groups[0, 0] = list(lanes)
        n_calls: dict[tuple[int, int], int] = {}  # calls that use a row, by steps of the history
        for lane in lanes if self._shares_rows else ():
            place = n_steps[lane] if n_steps else 0, self._row_of[lane]
            number = n_calls.get(place, 0)
            n_calls[place] = number + 1
            groups.setdefault((place[0], number), []).append(lane)
        calls = []
        for group in groups.values():
            rows = np.array(list(map(self._row_of.__getitem__, group)))
            lane_of_row = np.full(self.n_rows, group[0])
            lane_of_row[rows] = group
            has_all_lanes = not self._shares_rows and len(group) == self.n_lanes
            calls.append(_Call(group, rows, lane_of_row, has_all_lanes))
        return calls

    def _gather(self, name: str, values: Mapping[str, NDArray], call: _Call) -> DictTensor:
        """Copy the inputs of a call, always to the same memory: bits may depend on its alignment.

        The agent may change the copies, or return parts of them as its new state.
        """
        kept = self._gathered.setdefault(name, {})
        tensors = {}
        for key, array in values.items():
            copy = kept.get(key)
            if copy is None or copy.dtype != array.dtype or copy.shape[1:] != array.shape[1:]:
                spec = TensorSpec(array.shape[1:], array.dtype)
                copy = kept[key] = batch_array(spec, self.n_rows)
            if call.has_all_lanes:
                np.copyto(copy, array)
            else:
                array.take(call.lane_of_row, 0, copy, "clip")
            tensors[key] = torch.from_numpy(copy)
        return DictTensor._wrap(tensors)

    def _scatter(self, part: Part, of_all: Part, call: _Call) -> None:
        """Copy the rows of a call to their lanes."""
        for key, array in part.items():
            if key not in of_all:
                of_all[key] = np.zeros((self.n_lanes, *array.shape[1:]), array.dtype)
            of_all[key][call.lanes] = array[call.rows]

    def _call(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None,
        history: TemporalDictTensor | None,
    ) -> tuple[Part, Part, Part]:
        """Call the agent; returns its initial state if ``state`` is None, outputs, new state."""
        result: Any = self.agent(state, observation, agent_info, history)
        has_no_state = self._expected.get("state") == {}
        if has_no_state and type(result) in (dict, DictTensor):
            first, outputs, after = None, result, None
        elif type(result) is tuple and len(result) == 3:
            first, outputs, after = result
        else:
            first, outputs, after = agent_step(result, state)
        output = self._read("output", outputs)
        for key, dtype in self.converted_actions.items():
            fitted(f"the action {key!r}", output[key], dtype)
        before = self._read("state", first) if state is None else {}
        if has_no_state and (after is None or (type(after) is DictTensor and not after._tensors)):
            return before, output, {}
        return before, output, self._read("state", after)

    def _read(self, name: str, value: Any) -> dict[str, NDArray]:
        """Convert a result of the agent to arrays and check keys and specs.

        They are not copied, unless their dtype is a half precision that is stored as float32. This
        runs twice per step: the first part is the fast path for results in the dtypes stored.
        """
        expected = self._expected.get(name)
        tensors = value._tensors if type(value) is DictTensor else value
        if expected is not None and type(tensors) is dict and len(tensors) == len(expected):
            arrays = {}
            try:
                for key, (shape, dtype) in expected.items():
                    array = arrays[key] = tensors[key].numpy()
                    if array.dtype is not dtype or array.shape != shape:
                        break
                else:
                    return arrays
            except (AttributeError, KeyError, RuntimeError, TypeError):
                pass  # converted or refused below
        arrays = _as_arrays(value, name, self.n_rows)
        if expected is None:
            self._learn(name, arrays)
            return arrays
        first = {key: TensorSpec(shape[1:], dtype) for key, (shape, dtype) in expected.items()}
        for key, array in arrays.items():
            # A state that starts in float32 may continue in float16 under autocast.
            if array.dtype == np.float16 and key in first and first[key].dtype == np.float32:
                arrays[key] = array.astype(np.float32)
        now = row_specs(arrays)
        for key in sorted(now.keys() | first.keys()):
            if now.get(key) != first.get(key):
                raise SpecError(
                    f"{key!r} in the agent's {name} is {now.get(key, 'missing')}, "
                    f"at first it was {first.get(key, 'missing')} (shapes per row)",
                    fix="return the same keys, shapes and dtypes in every call",
                )
        return arrays

    def _learn(self, name: str, arrays: Mapping[str, NDArray]) -> None:
        """Learn keys, shapes and dtypes from the first result."""
        specs = row_specs(arrays)
        if name == "state":
            self.state.update({k: batch_array(spec, self.n_lanes) for k, spec in specs.items()})
        elif not any(map(is_action, arrays)):
            raise SpecError(
                f"the agent's output has the keys {sorted(arrays)}, but no 'action'",
                fix="put the actions under 'action' ('action/...' for nested spaces)",
            )
        else:
            self.output_specs = specs
        self._expected[name] = {key: (array.shape, array.dtype) for key, array in arrays.items()}


def _as_arrays(value: Any, name: str, n_lanes: int) -> dict[str, NDArray]:
    """Convert a result of the agent to arrays of ``n_lanes`` rows."""
    if value is None:
        return {}
    if not isinstance(value, DictTensor | Mapping):
        example = '{"action": actions}' if name == "output" else '{"hidden": hidden}'
        raise SpecError(
            f"the agent's {name} should be a dict of tensors, got {type(value).__name__}",
            fix=f"give each tensor a name: {example}",
        )
    return {
        key: _as_array(tensor, f"{key!r} in the agent's {name}", n_lanes)
        for key, tensor in value.items()
    }


def _as_array(tensor: Any, name: str, n_lanes: int) -> NDArray:
    if not isinstance(tensor, torch.Tensor):
        raise SpecError(
            f"{name} should be a tensor, got {type(tensor).__name__}",
            fix="convert it: torch.as_tensor",
        )
    try:
        array: NDArray = as_numpy(tensor)
    except (RuntimeError, TypeError):
        raise SpecError(
            f"{name} has dtype {tensor.dtype}, which NumPy does not have",
            fix="return it as tensor.float()",
        ) from None
    if array.shape[:1] != (n_lanes,):
        raise SpecError(
            f"{name} should have {n_lanes} rows, got shape {list(array.shape)}",
            fix=f"return one row for each lane, {n_lanes}",
        )
    return array
