"""Re-computes what an agent put out during collection, with gradients."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlpool.agents.agent import Agent
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

    With the parameters that collected the trajectories the outputs are the collected ones, except
    for the last bits: batches have other sizes here. (A last bit can turn a sampled action into
    another one: for log-probabilities, take the collected actions.) The agent gets what it got
    then: the observation's keys, ``noise`` if it has ``n_noise``, ``agent_info`` if there was one,
    ``history`` if it wants it. A row that has ended stays in the batch with a copy of its last
    step: the agent never sees padding.

    Rows that start an episode, at the first step or inside the window of a ``Batcher``, start as
    in collection: with ``agent.initial_state`` if the agent overrides it, else with a call with
    ``state=None``. A row that goes on with an episode starts from its stored state, as a constant.

    Args:
        agent: An agent with the outputs and states of the one that collected. One that keeps a
            state without overriding ``initial_state`` is asked for the names of its state once,
            without gradients, by a call with ``state=None`` and an observation in which these
            names occur too.
        trajectories: ``[B, T]`` as from ``get()``; some of its rows or steps, or more keys, are
            fine too, as long as every key that ``get()`` gave is there.
        state: Where the recurrent state comes from. ``"recompute"`` calls the agent step by step
            from the start of each row: backpropagation through time. ``"stored"`` takes the
            collected state of every step as a constant, and all steps in one call (step by step
            if the agent wants ``history``): faster, exact for agents without state, and
            truncated to one step for the others. Initial states then get no gradient.

    Returns:
        The agent's outputs ``[B, T, ...]``, zero past the lengths, with the same ``lengths`` and
        ``info``. No gradient flows through padding. The states are not among them: an agent whose
        state is needed has it among its outputs, under another name.

    Raises:
        SpecError: If there is no step at all, or ``state`` is another word.
        KeyError: If the trajectories lack the agent's state, or its noise.

    Note:
        ``history`` is made of the collected steps, as constants, and goes back at most to the
        row's first step: what lies before a window is not known here.

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
        # A row without any step stands in the batch with the steps of another one.
        lengths = trajectories.lengths
        own = torch.arange(self._n_rows, device=lengths.device)
        self._rows = torch.where(lengths > 0, own, lengths.argmax())
        self._last = lengths[self._rows] - 1
        self._has_restarts = bool(self._is_first[:, 1:].any())
        # What the environment and the state gave has a value after the step, outputs have not.
        self._observation_keys = [key for key in trajectories if f"_{key}" in trajectories]
        if agent.n_noise:
            self._observation_keys.append("noise")
        self._state_keys = self._ask_for_state()
        self._observation_keys = [k for k in self._observation_keys if k not in self._state_keys]

    def at_once(self) -> TemporalDictTensor:
        """One call on all transitions, from stored states."""
        trajectories = self._trajectories
        rows, times = self._is_step.nonzero(as_tuple=True)
        agent_info = None if self._agent_info is None else self._agent_info.index(rows)
        _, output, _ = self._agent(
            trajectories.get(self._state_keys).flatten(),
            trajectories.get(self._observation_keys).flatten(),
            agent_info,
            None,
        )
        n_timesteps = trajectories.n_timesteps()
        places = rows * n_timesteps + times
        padded = {}
        for key, tensor in output.items():
            zeros = tensor.new_zeros((self._n_rows * n_timesteps, *tensor.shape[1:]))
            filled = zeros.index_copy(0, places, tensor)
            padded[key] = filled.view(self._n_rows, n_timesteps, *tensor.shape[1:])
        return TemporalDictTensor(padded, trajectories.lengths, trajectories.info)

    def step_by_step(self, *, stored: bool) -> TemporalDictTensor:
        """One call per step, or two where only some of the rows start an episode."""
        longest = int(self._trajectories.lengths.max())
        some_start = self._is_first.any(0).tolist()
        # Rows that have ended may start as well: nobody looks at them.
        all_start = (self._is_first | ~self._is_step).all(0).tolist()
        state = DictTensor()
        outputs = []
        for step in range(longest):
            if stored or (step == 0 and not all_start[0]):
                state = self._stored_state(step)
            if stored or not self._state_keys or not some_start[step]:
                output, state = self._call(step, state)
            elif all_start[step]:
                output, state = self._call(step, self._initial_state())
            else:
                output, state = self._call_with_starts(step, state)
            outputs.append(output)
        return self._padded(outputs)

    def _call_with_starts(self, step: int, state: DictTensor) -> tuple[DictTensor, DictTensor]:
        """Start some rows' episodes, while the others go on from ``state``."""
        is_first = self._is_first[:, step]
        initial = self._initial_state()
        if initial is not None:
            return self._call(step, masked_dicttensor(state, initial, is_first))
        output, new_state = self._call(step, state)
        first_output, first_state = self._call(step, None)
        return (
            masked_dicttensor(output, first_output, is_first),
            masked_dicttensor(new_state, first_state, is_first),
        )

    def _call(self, step: int, state: DictTensor | None) -> tuple[DictTensor, DictTensor]:
        history = self._history(step) if self._agent.require_history() else None
        _, output, new_state = self._agent(
            state, self._at(step, self._observation_keys), self._agent_info, history
        )
        return output, new_state

    def _initial_state(self) -> DictTensor | None:
        """The agent's own initial state, ``None`` if it makes it when called."""
        if not self._agent.makes_initial_states():
            return None
        return self._agent.initial_state(self._agent_info, self._n_rows)

    def _ask_for_state(self) -> list[str]:
        """Names of the agent's state."""
        with torch.no_grad():
            state = self._initial_state()
            if state is None:
                _, state = self._call(0, None)
        return list(state.keys())

    def _stored_state(self, step: int) -> DictTensor:
        return self._at(step, self._state_keys)

    def _at(self, step: int, keys: list[str]) -> DictTensor:
        """Values ``[B, ...]`` of a step; rows that have ended stay at their last one."""
        tensors = {key: self._trajectories[key] for key in keys}
        if self._is_full:
            return DictTensor({key: tensor[:, step] for key, tensor in tensors.items()})
        times = self._last.clamp(max=step)
        return DictTensor({key: tensor[self._rows, times] for key, tensor in tensors.items()})

    def _history(self, step: int) -> TemporalDictTensor:
        """Every row's steps before this one in the same episode; zero behind their lengths."""
        steps = self._trajectories
        if not self._has_restarts:
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
                tensor = _masked(tensor, self._is_step[:, : len(outputs)])
            if n_missing:
                zeros = tensor.new_zeros((self._n_rows, n_missing, *tensor.shape[2:]))
                tensor = torch.cat([tensor, zeros], 1)
            padded[key] = tensor
        return TemporalDictTensor(padded, self._trajectories.lengths, self._trajectories.info)


def _masked(tensor: Tensor, is_step: Tensor) -> Tensor:
    """``tensor [B, T, ...]`` with zeros, and no gradient, where it is no step."""
    mask = is_step.reshape(*is_step.shape, *[1] * (tensor.ndim - 2))
    return torch.where(mask, tensor, tensor.new_zeros(()))
