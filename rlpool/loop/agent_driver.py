"""Calls an agent on the batch of a worker's lanes and keeps the lanes' agent states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlpool.agents.agent import Agent
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.memory.storage import Array, batch_array
from rlpool.record.tape import is_action
from rlpool.specs import TensorSpec, row_specs

Expectation = list[tuple[str, tuple[int, ...], np.dtype[Any]]]
"""Key, shape of the batch and dtype of what the agent has to return."""

Observed = tuple[Mapping[str, torch.Tensor], DictTensor | None, TemporalDictTensor | None]
"""Observation, ``agent_info`` and history."""


class AgentDriver:
    """One agent over the rows of one batch.

    The agent always gets the whole batch, each lane in its own row. Rows that start an episode
    get a call of their own with ``state=None``, in which every other row is a copy of one of
    them, unless the agent makes its initial states itself or keeps none.

    Args:
        agent: The agent.
        n_lanes: Rows of the batch.

    Attributes:
        output_specs: Keys of the agent's outputs, ``None`` before the first call.
        state: Key to array ``[n_lanes, ...]``: each lane's state, rewritten in place.
        starting: Lanes whose state at this step is known only after ``act``.
    """

    def __init__(self, agent: Agent, n_lanes: int) -> None:
        self.agent = agent
        self.n_lanes = n_lanes
        self.state: dict[str, Array] = {}
        self._state_tensors: dict[str, torch.Tensor] = {}
        self._makes_initial_states = agent.makes_initial_states()
        self.forget()

    def forget(self) -> None:
        """Forget what the first call taught about keys, shapes and dtypes."""
        self.output_specs: dict[str, TensorSpec] | None = None
        self.starting: list[int] = []
        self._new_state: dict[str, Array] = {}
        self.state.clear()
        self._state_tensors.clear()
        self._expected_state: Expectation = []
        self._expected_output: Expectation = []

    def start(self, lanes: Sequence[int], agent_info: DictTensor | None) -> None:
        """Let the next call treat these lanes as starting an episode.

        Args:
            lanes: Lane numbers.
            agent_info: The whole batch's ``agent_info``, with these lanes' new rows in it.
        """
        if self._makes_initial_states:
            rows = _rows_repeating(sorted(lanes), self.n_lanes)
            info = None if agent_info is None else agent_info.index(rows)
            state = self.agent.initial_state(info, self.n_lanes)
            if not self.state:
                self._learn_state(state)
            self._put_state(self._read(state, self._expected_state, "initial_state"), list(lanes))
        elif self.state or self.output_specs is None:
            self.starting = sorted({*self.starting, *lanes})

    def act(
        self,
        observation: dict[str, torch.Tensor],
        agent_info: DictTensor | None,
        history: TemporalDictTensor | None,
    ) -> dict[str, Array]:
        """Call the agent; the state moves on with ``commit``.

        Returns:
            The outputs, ``[n_lanes, ...]``. After it, ``state`` holds what the step started from.

        Raises:
            SpecError: If a key, shape or dtype of a result is wrong.
        """
        seen = observation, agent_info, history
        if self.starting:
            outputs, self._new_state = self._act_with_starts(seen)
        else:
            # A copy: the agent may change it, or return parts of it as its new state.
            state = {key: tensor.clone() for key, tensor in self._state_tensors.items()}
            _, outputs, self._new_state = self._call(DictTensor._wrap(state), seen)
        return outputs

    def commit(self, lanes: Sequence[int] | None = None) -> None:
        """Make the new state of the last call the state.

        Args:
            lanes: Those that take this step, all by default.
        """
        if lanes is None:
            for key, array in self._new_state.items():
                np.copyto(self.state[key], array)
        else:
            self._put_state(self._new_state, lanes)

    def _act_with_starts(self, seen: Observed) -> tuple[dict[str, Array], dict[str, Array]]:
        starting, self.starting = self.starting, []
        others = [lane for lane in range(self.n_lanes) if lane not in set(starting)]
        rows = _rows_repeating(starting, self.n_lanes)
        before, outputs, new = self._call(None, _at(rows, seen) if others else seen)
        first = self._read(before, self._expected_state, "state")
        if others:
            # Copies: the agent may return the same buffers from its next call.
            first, outputs, new = map(_copied, (first, outputs, new))
            rows = _rows_repeating(others, self.n_lanes)
            kept = DictTensor._wrap({key: t[rows] for key, t in self._state_tensors.items()})
            _, others_outputs, others_new = self._call(kept, _at(rows, seen))
            outputs = _merged(others_outputs, outputs, starting)
            new = _merged(others_new, new, starting)
        self._put_state(first, starting)
        return outputs, new

    def _call(
        self, state: DictTensor | None, seen: Observed
    ) -> tuple[Any, dict[str, Array], dict[str, Array]]:
        """Call the agent; returns the state before as it is, outputs and new state as arrays."""
        observation, agent_info, history = seen
        result: Any = self.agent(state, DictTensor._wrap(dict(observation)), agent_info, history)
        if not isinstance(result, tuple | list) or len(result) != 3:
            n_values = f" of {len(result)}" if isinstance(result, tuple | list) else ""
            raise SpecError(
                f"the agent returned {type(result).__name__}{n_values}, not three values",
                fix='with output = DictTensor({"action": actions}): '
                "return (state, output, new_state)",
            )
        before, output, after = result
        if self.output_specs is None:
            self._learn_outputs(output)
            if state is None:
                self._learn_state(before)
        new_state = self._read(after, self._expected_state, "state")
        return before, self._read(output, self._expected_output, "output"), new_state

    def _put_state(self, arrays: Mapping[str, Array], lanes: Sequence[int]) -> None:
        for key, array in arrays.items():
            self.state[key][lanes] = array[lanes]

    def _learn_outputs(self, output: Any) -> None:
        """Take keys, shapes and dtypes of the outputs from the first call."""
        arrays = _as_arrays(output, "output", self.n_lanes)
        if not any(map(is_action, arrays)):
            raise SpecError(
                f"the agent's output has the keys {sorted(arrays)}, but no 'action'",
                fix="put the actions under 'action' ('action/...' for nested spaces)",
            )
        self.output_specs = row_specs(arrays)
        self._expected_output = [(key, a.shape, a.dtype) for key, a in arrays.items()]

    def _learn_state(self, state: Any) -> None:
        """Take keys, shapes and dtypes of the state from the first one."""
        arrays = _as_arrays(state, "state", self.n_lanes)
        self._expected_state = [(key, a.shape, a.dtype) for key, a in arrays.items()]
        for key, spec in row_specs(arrays).items():
            self.state[key] = batch_array(spec, self.n_lanes)
            self._state_tensors[key] = torch.from_numpy(self.state[key])

    def _read(self, value: Any, expected: Expectation, name: str) -> dict[str, Array]:
        """What the agent returned as arrays that share its memory, exactly as expected.

        Twice per step, therefore as short as it can be as long as nothing is wrong.
        """
        arrays = {}
        if type(value) is DictTensor and len(value.keys()) == len(expected):
            try:
                for key, shape, dtype in expected:
                    array = arrays[key] = value[key].numpy()
                    if array.dtype is not dtype or array.shape != shape:
                        break
                else:
                    return arrays
            except (KeyError, RuntimeError, TypeError):
                pass  # read below, or refused with a reason
        arrays = _as_arrays(value, name, self.n_lanes)
        specs = {key: TensorSpec(shape[1:], dtype) for key, shape, dtype in expected}
        _refuse_changes(arrays, specs, name)
        return arrays


def _as_arrays(value: Any, name: str, n_lanes: int) -> dict[str, Array]:
    """What the agent returned as arrays that share its memory, with ``n_lanes`` rows each."""
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


def _as_array(tensor: Any, name: str, n_lanes: int) -> Array:
    if not isinstance(tensor, torch.Tensor):
        raise SpecError(
            f"{name} should be a tensor, got {type(tensor).__name__}",
            fix="convert it: torch.as_tensor",
        )
    try:
        array: Array = tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
    except (RuntimeError, TypeError):
        raise SpecError(
            f"{name} has dtype {tensor.dtype}, which NumPy lacks",
            fix="convert it, for instance to float32",
        ) from None
    if array.shape[:1] != (n_lanes,):
        raise SpecError(
            f"{name} should have {n_lanes} rows, got shape {list(array.shape)}",
            fix="return one row for each row of the observation",
        )
    return array


def _refuse_changes(
    arrays: Mapping[str, Array], expected: Mapping[str, TensorSpec], name: str
) -> None:
    """Refuse other keys, shapes or dtypes than those of the first call."""
    got = row_specs(arrays)
    for key in sorted(got.keys() | expected.keys()):
        if got.get(key) != expected.get(key):
            now, first = got.get(key, "missing"), expected.get(key, "missing")
            raise SpecError(
                f"{key!r} in the agent's {name} is {now} per row, at first it was {first}",
                fix="return the same keys, shapes and dtypes in every call",
            )


def _rows_repeating(lanes: Sequence[int], n_lanes: int) -> torch.Tensor:
    """Row numbers that keep ``lanes`` in their places and fill the others with the first."""
    rows = np.full(n_lanes, lanes[0])
    rows[list(lanes)] = list(lanes)
    return torch.from_numpy(rows)


def _at(rows: torch.Tensor, seen: Observed) -> Observed:
    observation, agent_info, history = seen
    return (
        {key: tensor[rows] for key, tensor in observation.items()},
        None if agent_info is None else agent_info.index(rows),
        None if history is None else history.index(rows),
    )


def _copied(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {key: np.array(array) for key, array in arrays.items()}


def _merged(
    arrays: Mapping[str, Array], over: Mapping[str, Array], lanes: Sequence[int]
) -> dict[str, Array]:
    """``arrays`` with some lanes' rows taken from ``over``."""
    merged = _copied(arrays)
    for key, array in over.items():
        merged[key][lanes] = array[lanes]
    return merged
