"""Recomputation of an agent's outputs on collected trajectories, with gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from rlpool.agents.agent import Agent, agent_step, as_agent
from rlpool.data.dict_tensor import DictTensor, masked_dicttensor
from rlpool.data.rows import as_signed, instance, kind, taken
from rlpool.data.specs import join_key
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.machine.arguments import check_choice

StateSource: TypeAlias = Literal["recompute", "stored"]

_AGENT_INFO = join_key("agent_info", "")


def replay_agent(
    agent: Any, trajectories: TemporalDictTensor, *, state: StateSource = "recompute"
) -> TemporalDictTensor:
    """Call an agent again on every step of collected trajectories, with gradients.

    With the parameters of the collection, the outputs equal the collected ones up to rounding,
    since batch sizes differ. (Rounding can change a sampled action: for log-probabilities, use the
    collected actions.) The agent gets the same inputs as in collection: the observation's keys,
    ``noise`` if it has ``n_noise``, ``agent_info`` if the trajectories' ``info`` has it (a pool
    needs ``info_keys=["agent_info"]``, else it is ``None``), and ``history`` if it is required. A
    row that has ended repeats its last step, so the agent never sees padding.

    Rows that start an episode, at the first step or inside the window of a ``Batcher``, start as
    in collection: from ``agent.initial_state`` if the agent overrides it, else by a call with
    ``state=None``. A row that continues an episode starts from its stored state, as a constant.

    Args:
        agent: An agent with the same outputs and states as in collection. An agent that keeps a
            state without overriding ``initial_state`` is also called with ``state=None``: once
            without gradients, to learn the keys of its state, and where episodes start.
        trajectories: ``[B, T]`` from ``get()``, or some of its rows or steps, with all its keys;
            additional keys are ignored.
        state: Source of the recurrent state. ``"recompute"`` calls the agent step by step from the
            start of each row: backpropagation through time. ``"stored"`` takes the collected state
            of every step as a constant and computes all steps in one call (step by step if the
            agent requires ``history``). This is faster, exact for agents without state, and
            truncates backpropagation to one step for the others: initial states get no gradient.

    Returns:
        The agent's outputs ``[B, T, ...]``, zero-padded past the lengths, with the same
        ``lengths`` and ``info``. No gradient flows through padding. States are not included; an
        agent can return them as outputs under another name.

    Raises:
        SpecError: If the trajectories have no steps, or ``state`` is another word.
        KeyError: If the trajectories lack the agent's state or noise.

    Note:
        ``history`` holds the collected steps as constants. It starts at the row's first step at
        the earliest: steps before a window are not available.

    Example:
        >>> class Linear(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = torch.nn.Linear(1, 2)
        ...
        ...     def forward(self, observation):
        ...         logits = self.net(observation["frame"])
        ...         return {"action": logits.argmax(1), "logits": logits}
        >>> batcher = EpisodeBatcher(8, 4, Linear, {}, create_env, n_workers=0, seeds=0)
        >>> batcher.execute(2)
        >>> logits = replay_agent(Linear(), batcher.get())["logits"]
        >>> logits.shape, logits.requires_grad
        (torch.Size([2, 4, 2]), True)
    """
    check_choice("state", state, ("recompute", "stored"))
    agent = as_agent(agent)
    if not instance(trajectories, TemporalDictTensor, "trajectories").lengths.any():
        raise SpecError("the trajectories have no steps", fix="omit empty trajectories")
    replay = _Replay(agent, trajectories)
    if state == "stored" and not agent.require_history():
        return replay.at_once()
    return replay.step_by_step(stored=state == "stored")


class _Replay:
    """Calls of an agent on the steps of trajectories."""

    def __init__(self, agent: Agent, trajectories: TemporalDictTensor) -> None:
        self._agent = agent
        self._trajectories = trajectories
        agent_info = trajectories.info.truncate_key(_AGENT_INFO)
        self._agent_info = None if agent_info.empty() else agent_info
        self._n_rows = trajectories.n_elems()
        is_step = trajectories.mask().bool()
        starts = trajectories["initial_state"]
        if starts.shape != is_step.shape:
            fix = f"pass it as collected: bool {list(is_step.shape)}"
            raise SpecError(f"'initial_state' is {kind(starts)}", fix=fix)
        self._is_first = starts & is_step
        self._places = is_step.nonzero(as_tuple=True)
        # A row without steps gets the steps of another row.
        lengths = trajectories.lengths
        own = torch.arange(self._n_rows, device=lengths.device)
        self._rows = torch.where(lengths > 0, own, lengths.argmax())
        self._last = lengths[self._rows] - 1
        # Unlike outputs, keys of the environment and the state also have a value after the step.
        self._observation_keys = [key for key in trajectories if f"_{key}" in trajectories]
        if agent.n_noise:
            self._observation_keys.append("noise")
        with torch.no_grad():
            self._state_keys = [*self._initial_state(0)]
        self._observation_keys = [k for k in self._observation_keys if k not in self._state_keys]

    def at_once(self) -> TemporalDictTensor:
        """Call the agent once on all transitions, from stored states."""
        trajectories = self._trajectories
        rows = self._places[0]
        agent_info = None if self._agent_info is None else self._agent_info.index(rows)
        state = trajectories.get(self._state_keys).flatten()
        observation = trajectories.get(self._observation_keys).flatten()
        _, output, _ = self._called(len(rows), state, observation, agent_info, None)
        return self._padded(dict(output.items()))

    def step_by_step(self, *, stored: bool) -> TemporalDictTensor:
        """Call the agent once per step, from the state of the previous call or stored states."""
        some_start = self._is_first.any(0).tolist()
        # Ended rows count as starting: their outputs are dropped.
        all_start = (self._is_first | ~self._trajectories.mask().bool()).all(0).tolist()
        outputs = []
        for step in range(int(self._trajectories.lengths.max())):
            if stored or step == 0:
                state = self._at(step, self._state_keys)
            if some_start[step] and self._state_keys and not stored:
                initial = self._initial_state(step)
                is_first = self._is_first[:, step]
                state = initial if all_start[step] else masked_dicttensor(state, initial, is_first)
            _, output, state = self._call(step, state)
            outputs.append(output)
        stacked = {key: torch.stack([each[key] for each in outputs], 1) for key in outputs[0]}
        return self._padded({k: taken(tensor, *self._places) for k, tensor in stacked.items()})

    def _call(self, step: int, state: DictTensor | None) -> tuple[DictTensor, ...]:
        history = self._history(step) if self._agent.require_history() else None
        observation = self._at(step, self._observation_keys)
        return self._called(self._n_rows, state, observation, self._agent_info, history)

    def _called(self, n_rows: int, *inputs: Any) -> tuple[DictTensor, ...]:
        returned = agent_step(self._agent(*inputs), inputs[0])
        before, output, after = (self._as_collected(part, n_rows) for part in returned)
        return before, output, after

    def _as_collected(self, part: Any, n_rows: int) -> DictTensor:
        """Convert half precisions of the agent's outputs or state to the collected, wider dtype."""
        steps, tensors = self._trajectories, dict(DictTensor(part).items())
        for key, tensor in tensors.items():
            if tensor.shape[:1] != (n_rows,):
                text = f"the agent returned {key!r} of shape {list(tensor.shape)} for {n_rows} rows"
                raise SpecError(text, fix="return one row for each row of the observation")
            if tensor.is_floating_point() and tensor.dtype.itemsize == 2 and key in steps:
                tensors[key] = tensor.to(torch.promote_types(tensor.dtype, steps[key].dtype))
        return DictTensor._wrap(tensors)

    def _initial_state(self, step: int) -> DictTensor:
        """Return the state of episodes that start at a step, for all rows."""
        state = None
        if self._agent.makes_initial_states():
            state = self._agent.initial_state(self._agent_info, self._n_rows)
        if state is None:
            return self._call(step, None)[0]
        return self._as_collected(state, self._n_rows)

    def _at(self, step: int, keys: list[str]) -> DictTensor:
        """Return values ``[B, ...]`` of a step; ended rows repeat their last step."""
        tensors = {key: self._trajectories[key] for key in keys}
        times = self._last.clamp(max=step)
        return DictTensor({k: taken(tensor, self._rows, times) for k, tensor in tensors.items()})

    def _history(self, step: int) -> TemporalDictTensor:
        """Return the previous steps of each row's episode, zero-padded past the lengths."""
        steps = self._trajectories
        numbers = torch.arange(step + 1, device=steps.device())
        began = torch.where(self._is_first[:, : step + 1], numbers, 0).amax(1)
        lengths = (steps.lengths.clamp(max=step) - began).clamp(min=0)
        times = numbers[: int(lengths.max())]
        is_step = times < lengths.unsqueeze(1)
        places = (began.unsqueeze(1) + times).clamp(max=step)
        rows = torch.arange(self._n_rows, device=steps.device()).unsqueeze(1)
        shifted = {}
        for key, tensor in steps.items():
            moved = as_signed(tensor)[rows, places]
            moved[~is_step] = 0
            shifted[key] = moved.view(tensor.dtype)
        return TemporalDictTensor(shifted, lengths)

    def _padded(self, output: Mapping[str, Tensor]) -> TemporalDictTensor:
        """Scatter outputs of all transitions ``[n, ...]`` to ``[B, T, ...]`` with zero padding."""
        padded = {}
        for key, tensor in output.items():
            padded[key] = tensor.new_zeros((*self._is_first.shape, *tensor.shape[1:]))
            as_signed(padded[key]).index_put_(self._places, as_signed(tensor))
        return TemporalDictTensor(padded, self._trajectories.lengths, self._trajectories.info)
