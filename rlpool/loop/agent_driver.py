"""Calls an agent on the batch of a worker's lanes, with their states, infos and history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpool.agents.agent import Agent
from rlpool.data.array_view import as_numpy
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import TensorSpec, fitted, is_action, row_specs
from rlpool.data.storage import NDArray, batch_array
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import LaneError
from rlpool.errors import SpecError
from rlpool.loop.plan import Lane
from rlpool.machine.interrupts import ctrl_c

Observed = tuple[Mapping[str, torch.Tensor], DictTensor | None, TemporalDictTensor | None]
"""Observation, ``agent_info`` and history."""


class AgentFailure(LaneError):
    """The agent failed; ``__cause__`` is its exception, ``call`` "agent" or "initial_state".

    Attributes:
        lanes: The lanes that the call was made for.
    """

    def __init__(self, lanes: Sequence[int], call: str) -> None:
        super().__init__(lanes[0], call)
        self.lanes = list(lanes)


Part = dict[str, NDArray]


class _Call(NamedTuple):
    """One call of the agent.

    Attributes:
        lanes: The lanes that it is made for.
        rows: Their rows: int64 like ``lanes``.
        shown: The lane that each row shows: int64 ``[n_rows]``.
    """

    lanes: list[int]
    rows: NDArray
    shown: NDArray


class AgentDriver:
    """One agent over the rows of one batch.

    The agent always gets the same number of rows. By default, these are the whole batch, each lane
    in its own row. If their number is given, episode number *i* has row ``i % n_rows``: lanes whose
    episodes share a row are in different calls; so are, for an agent with a history, lanes whose
    episodes have taken different numbers of steps, since the history of a call is as long as its
    longest. Rows that no lane has in a call are copies of another one.

    Rows that start an episode get separate calls with ``state=None``. Agents that make their
    initial states themselves, or keep no state, need none.

    Args:
        agent: The agent.
        n_lanes: Rows of the batch.
        n_rows: Rows of each call, ``None`` for one per lane.

    Attributes:
        n_rows: Rows that the agent is called with.
        output_specs: The agent's outputs, ``None`` before the first call.
        state: Key to array ``[n_lanes, ...]``: each lane's state, rewritten in place.
        starting: Lanes whose state at this step is only known after ``act``.
        converted_actions: Action key to the dtype in which the environments take it, where that
            is not the agent's.
    """

    def __init__(self, agent: Agent, n_lanes: int, n_rows: int | None = None) -> None:
        self.agent = agent
        self.n_lanes = n_lanes
        self.n_rows = n_rows or n_lanes
        self._shares_rows = n_rows is not None
        self._row_of = [lane % self.n_rows for lane in range(n_lanes)]
        self._last: tuple[list[int], list[_Call]] = [], []  # of lanes, while their rows stay
        self._gathered: dict[str, dict[str, torch.Tensor]] = {}  # rewritten by each call
        self._no_state = DictTensor({})
        self.state: dict[str, NDArray] = {}
        self.converted_actions: dict[str, np.dtype[Any]] = {}
        self._makes_initial_states = agent.makes_initial_states()
        self.forget()

    def forget(self) -> None:
        """Forget the keys, shapes and dtypes that the first call has shown."""
        self.output_specs: dict[str, TensorSpec] | None = None
        self.starting: list[int] = []
        self.state.clear()
        self._new_state: dict[str, NDArray] = {}
        # "output" or "state" -> key -> shape of the batch and dtype that the agent has to return
        self._expected: dict[str, dict[str, tuple[tuple[int, ...], np.dtype[Any]]]] = {}

    def start(
        self,
        lanes: Sequence[int],
        agent_info: DictTensor | None,
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
                state = self._initial_states(sorted(lanes), agent_info)
            except ctrl_c():
                raise
            except BaseException as error:
                raise AgentFailure(lanes, "initial_state") from error
            self._put_state(state, list(lanes))
        elif self.state or self.output_specs is None:
            self.starting = sorted({*self.starting, *lanes})

    def resume(self, lane: int, state: Mapping[str, NDArray]) -> None:
        """Let a lane, once it is started, go on with an episode that was begun elsewhere.

        Args:
            lane: The lane.
            state: The state that it had there.
        """
        self.starting = [other for other in self.starting if other != lane]
        for key, value in state.items():
            self.state[key][lane] = value

    def _initial_states(self, lanes: Sequence[int], agent_info: DictTensor | None) -> Part:
        if not self._shares_rows:
            info = None
            if agent_info is not None:
                info = self._info_at(agent_info, rows_repeating(lanes, self.n_lanes))
            return self._read("state", self.agent.initial_state(info, self.n_rows))
        states: Part = {}
        for call in self._calls(lanes, None):
            info = self._info_at(agent_info, call.shown)
            state = self._read("state", self.agent.initial_state(info, self.n_rows))
            self._scatter(state, states, call)
        return states

    def act(
        self,
        observation: Mapping[str, torch.Tensor],
        agent_info: DictTensor | None,
        history: TemporalDictTensor | None,
        lanes: Sequence[int],
    ) -> dict[str, NDArray]:
        """Call the agent; ``commit`` makes the new state current.

        Args:
            observation: ``[n_lanes, ...]``.
            agent_info: ``[n_lanes, ...]`` or ``None``.
            history: ``[n_lanes, ...]`` or ``None``.
            lanes: The lanes that take this step; all other rows are copies of the first of these.

        Returns:
            The outputs, ``[n_lanes, ...]``. ``state`` then holds the states before this step.

        Raises:
            AgentFailure: If the agent raises or returns a wrong key, shape or dtype.
        """
        seen = observation, agent_info, history
        try:
            if self.starting:
                # None of a request that was given up before its first step.
                self.starting = [lane for lane in self.starting if lane in lanes]
            if self.starting or self._shares_rows:
                return self._act_in_parts(seen, lanes)
            state = self._no_state
            if self.state or state._tensors:  # or the agent has put something into it
                # A copy: the agent may change it in place, or return parts of it as its new state.
                all_step = len(lanes) == self.n_lanes
                rows = None if all_step else rows_repeating(lanes, self.n_lanes)
                state = DictTensor({})
                for key, array in self.state.items():
                    copied = array.copy() if rows is None else array[rows]
                    state._tensors[key] = torch.from_numpy(copied)
            _, outputs, self._new_state = self._call(state, seen, lanes)
        except ctrl_c():
            raise
        except BaseException as error:
            raise AgentFailure(lanes, "agent") from error
        return outputs

    def commit(self, lanes: Sequence[int] | None = None) -> None:
        """Make the new state of the last call current.

        Args:
            lanes: The lanes that take this step, all by default.
        """
        self._put_state(self._new_state, slice(None) if lanes is None else lanes)

    def _act_in_parts(self, seen: Observed, lanes: Sequence[int]) -> Part:
        """Call the agent for lanes that start, and for all others."""
        starting, (observation, agent_info, history) = self.starting, seen
        parts: tuple[Part, Part, Part] = {}, {}, {}
        for some in (starting, [lane for lane in lanes if lane not in starting]):
            for call in self._calls(some, history) if some else ():
                shown = call.shown
                state = None if some is starting else self._gather("state", self.state, shown)
                gathered = (
                    self._gather("observation", observation, shown)._tensors,
                    self._info_at(agent_info, shown),
                    self._history_at(history, call),
                )
                found = self._call(state, gathered, call.lanes)
                for part, of_all in zip(found, parts, strict=True):
                    self._scatter(part, of_all, call)
        first, outputs, self._new_state = parts
        self._put_state(first, starting)
        self.starting = []
        return outputs

    def _calls(self, lanes: Sequence[int], history: TemporalDictTensor | None) -> list[_Call]:
        """How often the agent is called, and for which lanes."""
        if not self._shares_rows:
            return [_Call(list(lanes), np.asarray(lanes), rows_repeating(lanes, self.n_lanes))]
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
        return _Call(lanes, rows, shown)

    def _info_at(self, info: DictTensor | None, shown: NDArray) -> DictTensor | None:
        return None if info is None else self._gather("agent_info", info._tensors, shown)

    def _history_at(self, history: TemporalDictTensor | None, call: _Call) -> Any:
        if history is None or (self.n_rows == self.n_lanes and not history.lengths.any()):
            return history  # without steps; that of a probe gives any key that is asked for
        shown = history.index(torch.from_numpy(call.shown))
        if not self._shares_rows:
            return shown
        return shown.temporal_slice(0, int(history.lengths[call.lanes[0]]))

    def _gather(
        self, name: str, values: Mapping[str, torch.Tensor | NDArray], shown: NDArray
    ) -> DictTensor:
        """Copy rows of some lanes, where bits matter to the same place: memory may be aligned."""
        kept = self._gathered.setdefault(name, {}) if self._shares_rows else {}
        for key, value in values.items():
            tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
            copy = kept.get(key)
            if copy is None or copy.dtype is not tensor.dtype or copy.shape[1:] != tensor.shape[1:]:
                shape = self.n_rows, *tensor.shape[1:]
                copy = kept[key] = torch.empty(shape, dtype=tensor.dtype, device="cpu")
            tensor.numpy().take(shown, 0, copy.numpy(), "clip")
        return DictTensor._wrap({key: kept[key] for key in values})

    def _scatter(self, part: Part, of_all: Part, call: _Call) -> None:
        """Copy the rows of a call to the lanes that have them."""
        for key, array in part.items():
            if key not in of_all:
                of_all[key] = np.zeros((self.n_lanes, *array.shape[1:]), array.dtype)
            of_all[key][call.lanes] = array[call.rows]

    def _call(
        self, state: DictTensor | None, seen: Observed, lanes: Sequence[int]
    ) -> tuple[dict[str, NDArray], dict[str, NDArray], dict[str, NDArray]]:
        """Call the agent; returns its initial state if ``state`` is None, outputs, new state."""
        observation, agent_info, history = seen
        result: Any = self.agent(state, DictTensor._wrap(dict(observation)), agent_info, history)
        if not isinstance(result, tuple | list) or len(result) != 3:
            n_values = f" of {len(result)}" if isinstance(result, tuple | list) else ""
            raise SpecError(
                f"the agent returned {type(result).__name__}{n_values}, not three values",
                fix='with output = DictTensor({"action": actions}): '
                "return (state, output, new_state)",
            )
        output = self._read("output", result[1])
        for key, dtype in self.converted_actions.items():
            fitted(f"the action {key!r}", output[key], dtype)
        before = self._read("state", result[0]) if state is None else {}
        after = result[2]
        has_no_state = self._expected.get("state") == {} and type(after) is DictTensor
        if has_no_state and not after._tensors:
            return before, output, {}
        return before, output, self._read("state", after)

    def _put_state(self, arrays: Mapping[str, NDArray], lanes: Any) -> None:
        for key, array in arrays.items():
            self.state[key][lanes] = array[lanes]

    def _read(self, name: str, value: Any) -> dict[str, NDArray]:
        """Convert a result of the agent to arrays and check keys and specs.

        They are not copied, unless their dtype is a half precision that is stored as float32. This
        runs twice per step: the first part is the fast path for results in the dtypes stored.
        """
        expected = self._expected.get(name)
        if (
            expected is not None
            and type(value) is DictTensor
            and len(value._tensors) == len(expected)
        ):
            arrays, tensors = {}, value._tensors
            try:
                for key, (shape, dtype) in expected.items():
                    array = arrays[key] = tensors[key].numpy()
                    if array.dtype is not dtype or array.shape != shape:
                        break
                else:
                    return arrays
            except (KeyError, RuntimeError, TypeError):
                pass  # converted or refused below
        arrays = _as_arrays(value, name, self.n_rows)
        if expected is None:
            self._learn(name, arrays)
            return arrays
        first = {key: TensorSpec(shape[1:], dtype) for key, (shape, dtype) in expected.items()}
        for key, array in arrays.items():
            # A state that starts in float32 goes on in float16 under autocast.
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
        """Take keys, shapes and dtypes from the first result."""
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
        raise SpecError(
            f"the agent's {name} should be a DictTensor, got {type(value).__name__}",
            fix='return (state, DictTensor({"action": actions}), new_state)',
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
            fix="return one row for each row of the observation",
        )
    return array


def rows_repeating(lanes: Sequence[int], n_lanes: int) -> NDArray:
    """Row numbers that keep ``lanes`` in place and replace all other rows by the first of them."""
    rows: NDArray = np.full(n_lanes, lanes[0])
    rows[list(lanes)] = list(lanes)
    return rows
