"""Calls an agent on the batch of a worker's lanes and keeps the lanes' agent states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlpool.agent import Agent, overrides_initial_state
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, compose
from rlpool.specs import TensorSpec, row_specs
from rlpool.storage import Array, batch_array


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
        self._state_tensors: dict[str, torch.Tensor] = {}
        self._makes_initial_states = overrides_initial_state(agent)
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
        else:
            self._starting = sorted({*self._starting, *lanes})

    @property
    def starting(self) -> list[int]:
        """Lanes whose state at this step is known only after ``act``."""
        return self._starting

    def act(
        self,
        observation: Mapping[str, torch.Tensor],
        agent_info: DictTensor | None,
        history: TemporalDictTensor | None,
    ) -> dict[str, Array]:
        """Call the agent; the state moves on with ``commit``.

        Returns:
            The outputs, ``[n_lanes, ...]``. After it, ``state`` holds what the step started from.

        Raises:
            SpecError: If a key, shape or dtype of a result is wrong.
        """
        if self._starting and (self.state or self.output_specs is None):
            return self._act_with_starts(observation, agent_info, history)
        self._starting = []
        state = DictTensor._wrap(dict(self._state_tensors))
        _, output, new_state = self._call(state, observation, agent_info, history)
        self._new_state = self._checked(new_state, self.state, "state")
        return self._checked_output(output)

    def commit(self) -> None:
        """Make the new state of the last call the state."""
        for key, array in self._new_state.items():
            np.copyto(self.state[key], array)

    def _act_with_starts(
        self,
        observation: Mapping[str, torch.Tensor],
        agent_info: DictTensor | None,
        history: TemporalDictTensor | None,
    ) -> dict[str, Array]:
        starting, self._starting = self._starting, []
        others = [lane for lane in range(self.n_lanes) if lane not in set(starting)]
        rows = _rows_repeating(starting, self.n_lanes)
        state, output, new_state = self._call(None, *_at(rows, observation, agent_info, history))
        if self.output_specs is None:
            self._learn(output, state)
        first = self._checked(state, self.state, "state")
        outputs = self._checked_output(output)
        self._new_state = self._checked(new_state, self.state, "state")
        if others:
            rows = _rows_repeating(others, self.n_lanes)
            kept = DictTensor._wrap({key: t[rows] for key, t in self._state_tensors.items()})
            _, output, new_state = self._call(kept, *_at(rows, observation, agent_info, history))
            outputs = _merged(self._checked_output(output), outputs, starting)
            new = self._checked(new_state, self.state, "state")
            self._new_state = _merged(new, self._new_state, starting)
        for key, array in first.items():
            self.state[key][starting] = array[starting]
        return outputs

    def _put_initial_states(self, lanes: Sequence[int], agent_info: DictTensor | None) -> None:
        rows = _rows_repeating(sorted(lanes), self.n_lanes)
        info = None if agent_info is None else agent_info.index(rows)
        state = self.agent.initial_state(info, self.n_lanes)
        arrays = _as_arrays(state, "initial_state", self.n_lanes)
        if not self.state:
            self._make_state(arrays)
        arrays = _fitting(arrays, self.state, "initial_state")
        for key, array in arrays.items():
            self.state[key][list(lanes)] = array[list(lanes)]

    def _call(
        self,
        state: DictTensor | None,
        observation: Mapping[str, torch.Tensor],
        agent_info: DictTensor | None,
        history: TemporalDictTensor | None,
    ) -> tuple[Any, Any, Any]:
        with torch.inference_mode():
            result = self.agent(state, DictTensor._wrap(dict(observation)), agent_info, history)
        try:
            before, output, after = result
        except (TypeError, ValueError):
            raise SpecError(
                compose(
                    f"the agent returned {type(result).__name__}, not three values",
                    fix="return (state, output, new_state)",
                )
            ) from None
        return before, output, after

    def _learn(self, output: Any, state: Any) -> None:
        """Take keys, shapes and dtypes from the first call's results."""
        arrays = _as_arrays(output, "output", self.n_lanes)
        if not any(key == "action" or key.startswith("action/") for key in arrays):
            raise SpecError(
                compose(
                    f"the agent's output has the keys {sorted(arrays)}, but no 'action'",
                    fix="put the actions under 'action' ('action/...' for nested spaces)",
                )
            )
        self.output_specs = row_specs(arrays)
        if not self.state:
            self._make_state(_as_arrays(state, "state", self.n_lanes))

    def _make_state(self, arrays: Mapping[str, Array]) -> None:
        for key, spec in row_specs(arrays).items():
            self.state[key] = batch_array(spec, self.n_lanes)
            self._state_tensors[key] = torch.from_numpy(self.state[key])

    def _checked_output(self, output: Any) -> dict[str, Array]:
        if self.output_specs is None:
            self._learn(output, {})
        arrays = _as_arrays(output, "output", self.n_lanes)
        expected = self.output_specs
        if expected is not None and arrays.keys() != expected.keys():
            raise _other_keys("output", arrays, expected)
        for key, array in arrays.items():
            spec = expected[key] if expected is not None else None
            if spec is not None and (array.dtype != spec.dtype or array.shape[1:] != spec.shape):
                raise _changed("output", key, array, spec)
        return arrays

    def _checked(self, value: Any, known: Mapping[str, Array], name: str) -> dict[str, Array]:
        return _fitting(_as_arrays(value, name, self.n_lanes), known, name)


def _as_arrays(value: Any, name: str, n_lanes: int) -> dict[str, Array]:
    """What the agent returned as arrays that share its memory, with ``n_lanes`` rows each."""
    arrays: dict[str, Array] = {}
    if value is None:
        return arrays
    if not isinstance(value, DictTensor | Mapping):
        raise SpecError(f"the agent's {name} should be a DictTensor, got {type(value).__name__}")
    for key, tensor in value.items():
        try:
            array = tensor.numpy()
        except (RuntimeError, TypeError, AttributeError):
            array = _detached(tensor, name, key)
        if array.shape[:1] != (n_lanes,):
            raise SpecError(
                compose(
                    f"{key!r} in the agent's {name} should have {n_lanes} rows, "
                    f"got shape {list(array.shape)}",
                    fix="return one row for each row of the observation",
                )
            )
        arrays[key] = array
    return arrays


def _detached(tensor: Any, name: str, key: str) -> Array:
    if not isinstance(tensor, torch.Tensor):
        raise SpecError(
            f"{key!r} in the agent's {name} should be a tensor, got {type(tensor).__name__}"
        )
    try:
        array: Array = tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
    except (RuntimeError, TypeError):
        raise SpecError(
            compose(
                f"{key!r} in the agent's {name} has dtype {tensor.dtype}, which NumPy lacks",
                fix="convert it, for instance to float32",
            )
        ) from None
    return array


def _fitting(arrays: dict[str, Array], known: Mapping[str, Array], name: str) -> dict[str, Array]:
    """Refuse keys, shapes and dtypes that are not those of the state buffers."""
    if arrays.keys() != known.keys():
        raise _other_keys(name, arrays, known)
    for key, array in arrays.items():
        buffer = known[key]
        if array.dtype != buffer.dtype or array.shape != buffer.shape:
            raise _changed(name, key, array, TensorSpec(buffer.shape[1:], buffer.dtype))
    return arrays


def _other_keys(name: str, got: Mapping[str, Any], expected: Mapping[str, Any]) -> SpecError:
    return SpecError(
        compose(
            f"the agent's {name} has the keys {sorted(got)}, its first had {sorted(expected)}",
            fix="return the same keys in every call",
        )
    )


def _changed(name: str, key: str, array: Array, spec: TensorSpec) -> SpecError:
    return SpecError(
        compose(
            f"{key!r} in the agent's {name} is {TensorSpec(array.shape[1:], array.dtype)} per row, "
            f"at first it was {spec}",
            fix="return the same shape and dtype in every call",
        )
    )


def _rows_repeating(lanes: Sequence[int], n_lanes: int) -> torch.Tensor:
    """Row numbers that keep ``lanes`` in their places and fill the others with the first."""
    rows = torch.full((n_lanes,), lanes[0])
    rows[list(lanes)] = torch.tensor(list(lanes))
    return rows


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


def _merged(
    arrays: Mapping[str, Array], over: Mapping[str, Array], lanes: Sequence[int]
) -> dict[str, Array]:
    """``arrays`` with some lanes' rows taken from ``over``."""
    merged = {key: np.array(array) for key, array in arrays.items()}
    for key, array in over.items():
        merged[key][list(lanes)] = array[list(lanes)]
    return merged
