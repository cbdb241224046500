"""Recomputes an agent's outputs during collection, with gradients."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlpool.agents.agent import Agent, AgentStep
from rlpool.data.dict_tensor import DictTensor, masked_dicttensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError
from rlpool.specs import join_key

StateSource: TypeAlias = Literal["recompute", "stored"]

_AGENT_INFO = join_key("agent_info", "")


def replay_agent(
    agent: Agent, trajectories: TemporalDictTensor, *, state: StateSource = "recompute"
) -> TemporalDictTensor:
    """Call an agent again on every step that it was called on, this time with gradients.

    With the parameters that collected the trajectories, the outputs are the collected ones up to
    rounding, because the batches have other sizes here. (Rounding can change a sampled action: for
    log-probabilities, use the collected actions.) The agent gets what it got then: the
    observation's keys, ``noise`` if it has ``n_noise``, ``agent_info`` if there was any, and
    ``history`` if it wants it. A row that has ended stays in the batch with a copy of its last
    step: the agent never sees padding.

    Rows that start an episode, at the first step or inside the window of a ``Batcher``, start as
    in collection: from ``agent.initial_state`` if the agent overrides it, else by a call with
    ``state=None``. A row that continues an episode starts from its stored state, as a constant.

    Args:
        agent: An agent with the outputs and states of the one that collected. If it keeps a state
            without overriding ``initial_state``, it is also called with ``state=None``: once
            without gradients, to learn the names of its state, and where episodes start.
        trajectories: ``[B, T]`` as from ``get()``, or some of its rows or steps, with every key
            that ``get()`` gave; additional keys are ignored.
        state: Where the recurrent state comes from. ``"recompute"`` calls the agent step by step
            from the start of each row: backpropagation through time. ``"stored"`` takes the
            collected state of every step as a constant, and all steps in one call (step by step
            if the agent wants ``history``): faster, exact for agents without state, and
            truncated to one step for the others. Initial states then get no gradient.

    Returns:
        The agent's outputs ``[B, T, ...]``, zero-padded past the lengths, with the same
        ``lengths`` and ``info``. No gradient flows through padding. States are not included: if you
        need them, let the agent return them among its outputs, under another name.

    Raises:
        SpecError: If there is no step at all, or ``state`` is not one of these two.
        KeyError: If the trajectories lack the agent's state, or its noise.

    Note:
        ``history`` consists of the collected steps, as constants, and goes back at most to the
        row's first step: what came before a window is not known here.

    Example::

        trajectories = batcher.get()
        logits = replay_agent(agent, trajectories)["logits"]
        log_probabilities = categorical_log_probability(logits, trajectories["action"])
        loss = -(log_probabilities * advantages * trajectories.mask()).sum()
    """
    if state not in ("recompute", "stored"):
        raise SpecError(f"state is {state!r}", fix="pass state='recompute' or state='stored'")
    if not trajectories.lengths.any():
        raise SpecError("the trajectories have no steps", fix="leave empty trajectories out")
    replay = _Replay(agent, trajectories)
    if state == "stored" and not agent.require_history():
        return replay.at_once()
    return replay.step_by_step(stored=state == "stored")


class _Replay:
    """An agent on trajectories."""

    def __init__(self, agent: Agent, trajectories: TemporalDictTensor) -> None:
        self._agent = agent
        self._trajectories = trajectories
        agent_info = trajectories.info.truncate_key(_AGENT_INFO)
        self._agent_info = None if agent_info.empty() else agent_info
        self._n_rows = trajectories.n_elems()
        self._is_step = trajectories.mask().bool()
        self._is_first = trajectories["initial_state"] & self._is_step
        self._is_full = trajectories.full()
        # A row without any step is filled with the steps of another one.
        lengths = trajectories.lengths
        own = torch.arange(self._n_rows, device=lengths.device)
        self._rows = torch.where(lengths > 0, own, lengths.argmax())
        self._last = lengths[self._rows] - 1
        # Unlike outputs, what the environment and the state gave has a value after the step.
        self._observation_keys = [key for key in trajectories if f"_{key}" in trajectories]
        if agent.n_noise:
            self._observation_keys.append("noise")
        with torch.no_grad():
            self._state_keys = [*self._initial_state(0)]
        self._observation_keys = [k for k in self._observation_keys if k not in self._state_keys]

    def at_once(self) -> TemporalDictTensor:
        """One call on all transitions, from stored states."""
        trajectories = self._trajectories
        places = self._is_step.nonzero(as_tuple=True)
        agent_info = None if self._agent_info is None else self._agent_info.index(places[0])
        state = trajectories.get(self._state_keys).flatten()
        observation = trajectories.get(self._observation_keys).flatten()
        _, output, _ = self._agent(state, observation, agent_info, None)
        padded = {}
        for key, tensor in output.items():
            zeros = tensor.new_zeros((*self._is_step.shape, *tensor.shape[1:]))
            padded[key] = zeros.index_put(places, tensor)
        return TemporalDictTensor(padded, trajectories.lengths, trajectories.info)

    def step_by_step(self, *, stored: bool) -> TemporalDictTensor:
        """One call per step, each from the state after the one before it, or from stored states."""
        some_start = self._is_first.any(0).tolist()
        # Rows that have ended may start as well: their outputs are dropped.
        all_start = (self._is_first | ~self._is_step).all(0).tolist()
        outputs = []
        for step in range(int(self._trajectories.lengths.max())):
            if stored or step == 0:
                state = self._at(step, self._state_keys)
            if some_start[step] and self._state_keys and not stored:
                initial, is_first = self._initial_state(step), self._is_first[:, step]
                state = initial if all_start[step] else masked_dicttensor(state, initial, is_first)
            _, output, state = self._call(step, state)
            outputs.append(output)
        return self._padded(outputs)

    def _call(self, step: int, state: DictTensor | None) -> AgentStep:
        history = self._history(step) if self._agent.require_history() else None
        observation = self._at(step, self._observation_keys)
        return self._agent(state, observation, self._agent_info, history)

    def _initial_state(self, step: int) -> DictTensor:
        """The state of episodes that start at a step, for all rows."""
        state = None
        if self._agent.makes_initial_states():
            state = self._agent.initial_state(self._agent_info, self._n_rows)
        return self._call(step, None)[0] if state is None else state

    def _at(self, step: int, keys: list[str]) -> DictTensor:
        """Values ``[B, ...]`` of a step; rows that have ended stay at their last one."""
        tensors = {key: self._trajectories[key] for key in keys}
        if self._is_full:
            return DictTensor({key: tensor[:, step] for key, tensor in tensors.items()})
        times = self._last.clamp(max=step)
        return DictTensor({key: tensor[self._rows, times] for key, tensor in tensors.items()})

    def _history(self, step: int) -> TemporalDictTensor:
        """Every row's steps before this one in the same episode, zero-padded past the lengths."""
        steps = self._trajectories
        if not self._is_first[:, 1:].any():
            before = steps.temporal_slice(0, step)
            return TemporalDictTensor(dict(before.items()), before.lengths)
        numbers = torch.arange(step + 1, device=steps.device())
        began = torch.where(self._is_first[:, : step + 1], numbers, 0).amax(1)
        lengths = (steps.lengths.clamp(max=step) - began).clamp(min=0)
        times = numbers[: int(lengths.max())]
        is_step = times < lengths.unsqueeze(1)
        places = (began.unsqueeze(1) + times).clamp(max=step)
        rows = torch.arange(self._n_rows, device=steps.device()).unsqueeze(1)
        shifted = {key: _masked(tensor[rows, places], is_step) for key, tensor in steps.items()}
        return TemporalDictTensor(shifted, lengths)

    def _padded(self, outputs: list[DictTensor]) -> TemporalDictTensor:
        """Outputs of consecutive steps as ``[B, T, ...]``, zero past the lengths."""
        n_missing = self._trajectories.n_timesteps() - len(outputs)
        padded = {}
        for key in outputs[0]:
            tensor = torch.stack([output[key] for output in outputs], 1)
            if not self._is_full:
                zeros = tensor.new_zeros((self._n_rows, n_missing, *tensor.shape[2:]))
                tensor = _masked(torch.cat([tensor, zeros], 1), self._is_step)
            padded[key] = tensor
        return TemporalDictTensor(padded, self._trajectories.lengths, self._trajectories.info)


def _masked(tensor: Tensor, is_step: Tensor) -> Tensor:
    """``tensor [B, T, ...]`` with zeros, and no gradient, where it is no step."""
    mask = is_step.reshape(*is_step.shape, *[1] * (tensor.ndim - 2))
    return torch.where(mask, tensor, tensor.new_zeros(()))
