"""Calls an agent on the batch of a worker's lanes and keeps the lanes' agent states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlpool.agents.agent import Agent
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.vec_env import LaneError
from rlpool.errors import SpecError
from rlpool.memory.storage import Array, batch_array
from rlpool.record.tape import is_action
from rlpool.specs import TensorSpec, row_specs

Observed = tuple[Mapping[str, torch.Tensor], DictTensor | None, TemporalDictTensor | None]
"""Observation, ``agent_info`` and history."""


class AgentFailure(LaneError):
    """The agent failed; ``__cause__`` is its exception, ``call`` "agent" or "initial_state"."""


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
        self._makes_initial_states = agent.makes_initial_states()
        self.forget()

    def forget(self) -> None:
        """Forget what the first call taught about keys, shapes and dtypes."""
        self.output_specs: dict[str, TensorSpec] | None = None
        self.starting: list[int] = []
        self.state.clear()
        self._new_state: dict[str, Array] = {}
        # "output" or "state": key to shape of the batch and dtype of what the agent has to return.
        self._expected: dict[str, dict[str, tuple[tuple[int, ...], np.dtype[Any]]]] = {}

    def start(self, lanes: Sequence[int], agent_info: DictTensor | None) -> None:
        """Let the next call treat these lanes as starting an episode.

        Args:
            lanes: Lane numbers.
            agent_info: The whole batch's ``agent_info``, with these lanes' new rows in it.

        Raises:
            AgentFailure: If the agent's ``initial_state`` fails.
        """
        if self._makes_initial_states:
            rows = _rows_repeating(sorted(lanes), self.n_lanes)
            info = None if agent_info is None else agent_info.index(rows)
            try:
                state = self._read("state", self.agent.initial_state(info, self.n_lanes))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise AgentFailure(lanes[0], "initial_state") from error
            self._put_state(state, list(lanes))
        elif self.state or self.output_specs is None:
            self.starting = sorted({*self.starting, *lanes})

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
            AgentFailure: If the agent raises, or a key, shape or dtype of a result is wrong.
        """
        seen = observation, agent_info, history
        try:
            if self.starting:
                return self._act_with_starts(seen)
            # A copy: the agent may change it, or return parts of it as its new state.
            state = DictTensor._wrap({k: torch.from_numpy(a.copy()) for k, a in self.state.items()})
            _, outputs, self._new_state = self._call(state, seen)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise AgentFailure(0, "agent") from error
        return outputs

    def commit(self, lanes: Sequence[int] | None = None) -> None:
        """Make the new state of the last call the state.

        Args:
            lanes: Those that take this step, all by default.
        """
        self._put_state(self._new_state, slice(None) if lanes is None else lanes)

    def _act_with_starts(self, seen: Observed) -> dict[str, Array]:
        starting, self.starting = self.starting, []
        others = [lane for lane in range(self.n_lanes) if lane not in set(starting)]
        rows = _rows_repeating(starting, self.n_lanes)
        first, outputs, new = self._call(None, _at(rows, seen) if others else seen)
        if others:
            # Copies: the agent may return the same buffers from its next call.
            first, outputs, new = (
                {key: np.array(array) for key, array in part.items()}
                for part in (first, outputs, new)
            )
            rows = _rows_repeating(others, self.n_lanes)
            kept = {key: torch.from_numpy(array)[rows] for key, array in self.state.items()}
            _, *theirs = self._call(DictTensor._wrap(kept), _at(rows, seen))
            for whole, part in zip((outputs, new), theirs, strict=True):
                for key, array in part.items():
                    whole[key][others] = array[others]
        self._put_state(first, starting)
        self._new_state = new
        return outputs

    def _call(
        self, state: DictTensor | None, seen: Observed
    ) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """Call the agent; returns the state before if it was not given, outputs and new state."""
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
        before = self._read("state", result[0]) if state is None else {}
        return before, output, self._read("state", result[2])

    def _put_state(self, arrays: Mapping[str, Array], lanes: Any) -> None:
        for key, array in arrays.items():
            self.state[key][lanes] = array[lanes]

    def _read(self, name: str, value: Any) -> dict[str, Array]:
        """What the agent returned as arrays that share its memory, the same as at first.

        Twice per step, therefore as short as it can be as long as nothing is wrong.
        """
        expected = self._expected.get(name)
        if (
            expected is not None
            and type(value) is DictTensor
            and len(value.keys()) == len(expected)
        ):
            arrays = {}
            try:
                for key, (shape, dtype) in expected.items():
                    array = arrays[key] = value[key].numpy()
                    if array.dtype is not dtype or array.shape != shape:
                        break
                else:
                    return arrays
            except (KeyError, RuntimeError, TypeError):
                pass  # read below, or refused with a reason
        arrays = _as_arrays(value, name, self.n_lanes)
        if expected is None:
            self._learn(name, arrays)
            return arrays
        first = {key: TensorSpec(shape[1:], dtype) for key, (shape, dtype) in expected.items()}
        now = row_specs(arrays)
        for key in sorted(now.keys() | first.keys()):
            if now.get(key) != first.get(key):
                raise SpecError(
                    f"{key!r} in the agent's {name} is {now.get(key, 'missing')}, "
                    f"at first it was {first.get(key, 'missing')} (shapes per row)",
                    fix="return the same keys, shapes and dtypes in every call",
                )
        return arrays

    def _learn(self, name: str, arrays: Mapping[str, Array]) -> None:
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
