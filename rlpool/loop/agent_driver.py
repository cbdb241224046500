"""Calls an agent on the batch of a worker's lanes, with their states, infos and history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlpool.agents.agent import Agent
from rlpool.data.array_view import as_numpy
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.rows import selected
from rlpool.data.specs import TensorSpec, fitted, is_action, row_specs
from rlpool.data.storage import NDArray, batch_array
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import LaneError
from rlpool.errors import SpecError
from rlpool.loop.plan import Episode
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


class AgentDriver:
    """One agent over the rows of one batch.

    The agent always gets the whole batch, each lane in its own row. Rows that start an episode get
    a separate call with ``state=None``, in which the other rows are copies of one of them. Agents
    that make their initial states themselves, or keep no state, need no separate call.

    Args:
        agent: The agent.
        n_lanes: Rows of the batch.

    Attributes:
        n_rows: Rows that the agent is called with.
        output_specs: The agent's outputs, ``None`` before the first call.
        state: Key to array ``[n_lanes, ...]``: each lane's state, rewritten in place.
        starting: Lanes whose state at this step is only known after ``act``.
        converted_actions: Action key to the dtype in which the environments take it, where that
            is not the agent's.
    """

    def __init__(self, agent: Agent, n_lanes: int) -> None:
        self.agent = agent
        self.n_lanes = self.n_rows = n_lanes
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
        episodes: Sequence[Episode] = (),
    ) -> None:
        """Mark lanes that start an episode with the next call.

        Args:
            lanes: Lane numbers.
            agent_info: The batch's ``agent_info``, including the new rows of these lanes.
            episodes: Their episodes, none in a probe.

        Raises:
            AgentFailure: If the agent's ``initial_state`` fails.
        """
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

    def _initial_states(
        self, lanes: Sequence[int], agent_info: DictTensor | None
    ) -> dict[str, NDArray]:
        rows = rows_repeating(lanes, self.n_lanes)
        info = None if agent_info is None else _rows_of(agent_info, torch.from_numpy(rows))
        return self._read("state", self.agent.initial_state(info, self.n_lanes))

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
            if self.starting:
                return self._act_with_starts(seen, lanes)
            kept: dict[str, torch.Tensor] = {}
            # A copy: the agent may change it in place, or return parts of it as its new state.
            if len(lanes) == self.n_lanes or not self.state:
                for key, array in self.state.items():
                    kept[key] = torch.from_numpy(array.copy())
            else:
                kept = self._states_of(lanes)
            _, outputs, self._new_state = self._call(DictTensor._wrap(kept), seen, lanes)
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

    def _act_with_starts(self, seen: Observed, lanes: Sequence[int]) -> dict[str, NDArray]:
        starting = self.starting
        others = [lane for lane in lanes if lane not in starting]
        rows = rows_repeating(starting, self.n_lanes)
        first, outputs, new = self._call(None, _at(rows, seen) if others else seen, starting)
        if others:
            for part in (first, outputs, new):
                for key, array in part.items():
                    part[key] = np.array(array)  # the next call may return the same buffers
            kept = self._states_of(others)
            rows = rows_repeating(others, self.n_lanes)
            _, *theirs = self._call(DictTensor._wrap(kept), _at(rows, seen), others)
            for whole, part in zip((outputs, new), theirs, strict=True):
                for key, array in part.items():
                    whole[key][others] = array[others]
        self._put_state(first, starting)
        self._new_state, self.starting = new, []
        return outputs

    def _states_of(self, lanes: Sequence[int]) -> dict[str, torch.Tensor]:
        """A copy of the lanes' states, in all other rows that of the first of them."""
        rows = torch.from_numpy(rows_repeating(lanes, self.n_lanes))
        return {key: torch.from_numpy(array)[rows] for key, array in self.state.items()}

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
            fix="convert it, for example to float32",
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


def _at(rows: NDArray, seen: Observed) -> Observed:
    observation, agent_info, history = seen
    numbers = torch.from_numpy(rows)
    return (
        {key: tensor[numbers] for key, tensor in observation.items()},
        None if agent_info is None else _rows_of(agent_info, numbers),
        None if history is None else history.index(numbers),
    )


def _rows_of(data: DictTensor, numbers: torch.Tensor) -> DictTensor:
    """Copies of rows that are known to exist, see ``DictTensor.index``."""
    return DictTensor._wrap({key: selected(t, numbers) for key, t in data._tensors.items()})


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
        self._gathered: dict[str, dict[str, torch.Tensor]] = {}  # rewritten by each call

    def start(
        self,
        lanes: Sequence[int],
        agent_info: DictTensor | None,
        episodes: Sequence[Episode] = (),
    ) -> None:
        """See ``AgentDriver.start``; the lanes get the rows of their episodes."""
        for lane, episode in zip(lanes, episodes, strict=False):
            row = episode.running_number % self.n_rows
            if row != self._row_of[lane]:
                self._row_of[lane], self._last = row, ([], [])
        super().start(lanes, agent_info, episodes)

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


def _so_far(history: TemporalDictTensor, shown: NDArray, lane: int) -> Any:
    """The history of lanes that have taken as many steps as one of them."""
    n_steps = int(history.lengths[lane])
    return history.index(torch.from_numpy(shown)).temporal_slice(0, n_steps)
