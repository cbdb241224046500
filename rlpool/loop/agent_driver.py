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
from rlpool.specs import TensorSpec, row_specs

Expectation = list[tuple[str, tuple[int, ...], np.dtype[Any]]]
"""Key, shape of the batch and dtype of what the agent has to return."""


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
    """

    def __init__(self, agent: Agent, n_lanes: int) -> None:
        self.agent = agent
        self.n_lanes = n_lanes
        self.output_specs: dict[str, TensorSpec] | None = None
        self.state: dict[str, Array] = {}
        self._expected_state: Expectation = []
        self._expected_output: Expectation = []
        self._state_tensors: dict[str, torch.Tensor] = {}
        self._makes_initial_states = agent.makes_initial_states()
        self._new_state: dict[str, Array] = {}
        self._starting: list[int] = []

    def start(self, lanes: Sequence[int], agent_info: DictTensor | None) -> None:
        """Let the next call treat these lanes as starting an episode.

        Args:
            lanes: Lane numbers.
            agent_info: The whole batch's ``agent_info``, with these lanes' new rows in it.
        """
        if self._makes_initial_states:
            self._put_initial_states(lanes, agent_info)
        elif self.state or self.output_specs is None:
            self._starting = sorted({*self._starting, *lanes})

    def forget(self) -> None:
        """Forget what the first call taught about keys, shapes and dtypes."""
        self.output_specs = None
        self._starting = []
        self._new_state = {}
        self.state.clear()
        self._state_tensors.clear()
        self._expected_state, self._expected_output = [], []

    @property
    def starting(self) -> list[int]:
        """Lanes whose state at this step is known only after ``act``."""
        return self._starting

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
        if self._starting:
            return self._act_with_starts(observation, agent_info, history)
        # A copy: the agent may change it, or return parts of it as its new state.
        state = DictTensor._wrap({key: t.clone() for key, t in self._state_tensors.items()})
        observed = DictTensor._wrap(observation.copy())
        result = self.agent(state, observed, agent_info, history)
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise _not_three(result)
        _, output, new_state = result
        if self.output_specs is None:
            self._learn_outputs(output)
        self._new_state = self._read(new_state, self._expected_state, "state")
        return self._read(output, self._expected_output, "output")

    def commit(self, lanes: Sequence[int] | None = None) -> None:
        """Make the new state of the last call the state.

        Args:
            lanes: Those that take this step, all by default.
        """
        for key, array in self._new_state.items():
            if lanes is None:
                np.copyto(self.state[key], array)
            else:
                self.state[key][lanes] = array[lanes]

    def _act_with_starts(
        self,
        observation: Mapping[str, torch.Tensor],
        agent_info: DictTensor | None,
        history: TemporalDictTensor | None,
    ) -> dict[str, Array]:
        starting, self._starting = self._starting, []
        others = [lane for lane in range(self.n_lanes) if lane not in set(starting)]
        seen = (observation, agent_info, history)
        if others:
            seen = _at(_rows_repeating(starting, self.n_lanes), *seen)
        state, output, new_state = self._call(None, *seen)
        if self.output_specs is None:
            self._learn_outputs(output)
            self._learn_state(state)
        first = self._read(state, self._expected_state, "state")
        outputs = self._read(output, self._expected_output, "output")
        self._new_state = self._read(new_state, self._expected_state, "state")
        if others:
            # Copies: the agent may return the same buffers from its next call.
            first, outputs, self._new_state = map(_copied, (first, outputs, self._new_state))
            rows = _rows_repeating(others, self.n_lanes)
            kept = DictTensor._wrap({key: t[rows] for key, t in self._state_tensors.items()})
            _, output, new_state = self._call(kept, *_at(rows, observation, agent_info, history))
            new_outputs = self._read(output, self._expected_output, "output")
            new = self._read(new_state, self._expected_state, "state")
            outputs = _merged(new_outputs, outputs, starting)
            self._new_state = _merged(new, self._new_state, starting)
        for key, array in first.items():
            self.state[key][starting] = array[starting]
        return outputs

    def _put_initial_states(self, lanes: Sequence[int], agent_info: DictTensor | None) -> None:
        rows = _rows_repeating(sorted(lanes), self.n_lanes)
        info = None if agent_info is None else agent_info.index(rows)
        state = self.agent.initial_state(info, self.n_lanes)
        if not self.state:
            self._learn_state(state)
        arrays = self._read(state, self._expected_state, "initial_state")
        for key, array in arrays.items():
            self.state[key][list(lanes)] = array[list(lanes)]

    def _call(
        self,
        state: DictTensor | None,
        observation: Mapping[str, torch.Tensor],
        agent_info: DictTensor | None,
        history: TemporalDictTensor | None,
    ) -> tuple[Any, Any, Any]:
        result = self.agent(state, DictTensor._wrap(dict(observation)), agent_info, history)
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise _not_three(result)
        before, output, after = result
        return before, output, after

    def _learn_outputs(self, output: Any) -> None:
        """Take keys, shapes and dtypes of the outputs from the first call."""
        arrays = _as_arrays(output, "output", self.n_lanes)
        if not any(key == "action" or key.startswith("action/") for key in arrays):
            raise SpecError(
                f"the agent's output has the keys {sorted(arrays)}, but no 'action'",
                fix="put the actions under 'action' ('action/...' for nested spaces)",
            )
        self.output_specs = row_specs(arrays)
        self._expected_output = _expectation(arrays)

    def _learn_state(self, state: Any) -> None:
        """Take keys, shapes and dtypes of the state from the first one."""
        arrays = _as_arrays(state, "state", self.n_lanes)
        self._expected_state = _expectation(arrays)
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
        _refuse_changes(arrays, expected, name)
        return arrays


def _as_arrays(value: Any, name: str, n_lanes: int) -> dict[str, Array]:
    """What the agent returned as arrays that share its memory, with ``n_lanes`` rows each."""
    arrays: dict[str, Array] = {}
    if value is None:
        return arrays
    if not isinstance(value, DictTensor | Mapping):
        raise SpecError(
            f"the agent's {name} should be a DictTensor, got {type(value).__name__}",
            fix='return (state, DictTensor({"action": actions}), new_state)',
        )
    for key, tensor in value.items():
        try:
            array = tensor.numpy()
        except (RuntimeError, TypeError, AttributeError):
            array = _detached(tensor, name, key)
        if array.shape[:1] != (n_lanes,):
            raise SpecError(
                f"{key!r} in the agent's {name} should have {n_lanes} rows, "
                f"got shape {list(array.shape)}",
                fix="return one row for each row of the observation",
            )
        arrays[key] = array
    return arrays


def _detached(tensor: Any, name: str, key: str) -> Array:
    if not isinstance(tensor, torch.Tensor):
        raise SpecError(
            f"{key!r} in the agent's {name} should be a tensor, got {type(tensor).__name__}",
            fix="convert it: torch.as_tensor",
        )
    try:
        array: Array = tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
    except (RuntimeError, TypeError):
        raise SpecError(
            f"{key!r} in the agent's {name} has dtype {tensor.dtype}, which NumPy lacks",
            fix="convert it, for instance to float32",
        ) from None
    return array


def _not_three(result: Any) -> SpecError:
    what = type(result).__name__
    if isinstance(result, tuple | list):
        what = f"{len(result)} value{'s'[: len(result) != 1]}"
    return SpecError(
        f"the agent returned {what}, not three values",
        fix='with output = DictTensor({"action": actions}): return (state, output, new_state)',
    )


def _expectation(arrays: Mapping[str, Array]) -> Expectation:
    return [(key, array.shape, array.dtype) for key, array in arrays.items()]


def _refuse_changes(arrays: Mapping[str, Array], expected: Expectation, name: str) -> None:
    """Refuse other keys, shapes or dtypes than those of the first call."""
    keys = [key for key, _, _ in expected]
    if sorted(arrays) != sorted(keys):
        raise SpecError(
            f"the agent's {name} has the keys {sorted(arrays)}, its first had {sorted(keys)}",
            fix="return the same keys in every call",
        )
    for key, shape, dtype in expected:
        array = arrays[key]
        if array.dtype != dtype or array.shape != shape:
            got, first = TensorSpec(array.shape[1:], array.dtype), TensorSpec(shape[1:], dtype)
            raise SpecError(
                f"{key!r} in the agent's {name} is {got} per row, at first it was {first}",
                fix="return the same shape and dtype in every call",
            )


def _rows_repeating(lanes: Sequence[int], n_lanes: int) -> torch.Tensor:
    """Row numbers that keep ``lanes`` in their places and fill the others with the first."""
    rows = np.full(n_lanes, lanes[0])
    rows[list(lanes)] = list(lanes)
    return torch.from_numpy(rows)


def _at(
    rows: torch.Tensor,
    observation: Mapping[str, torch.Tensor],
    agent_info: DictTensor | None,
    history: TemporalDictTensor | None,
) -> tuple[dict[str, torch.Tensor], DictTensor | None, TemporalDictTensor | None]:
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
        merged[key][list(lanes)] = array[list(lanes)]
    return merged
