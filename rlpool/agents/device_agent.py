"""Runs an agent on another device, for policies in the main process."""

from __future__ import annotations

from typing import Any

import torch

from rlpool.agents.agent import Agent, AgentStep, refuse_no_agent
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError

_ALIGNMENT = 64  # bytes, as for tensors that torch allocates

_Name = tuple[int, str]  # number of the batch, key
_Signature = list[tuple[_Name, torch.Size, torch.dtype]]


class DeviceAgent(Agent):
    """Calls an agent whose parameters are on another device, such as a GPU.

    All inputs go to the device in one transfer, and all outputs come back in one; for a CUDA GPU
    through page-locked memory. For ``device="cpu"``, calls are passed on unchanged.

    In a batcher with ``n_workers=0`` over a ``ParallelEnvManager`` this gives central inference:
    one batch of all lanes per step. Outside a batcher, without ``torch.inference_mode`` (as in
    ``replay_agent``), arguments are moved and results stay on the device.

    Args:
        agent: The agent. It puts its parameters on the device itself.
        device: The device.

    Raises:
        SpecError: If ``agent`` is no agent, or there is no such device.

    Example:
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> evaluate(DeviceAgent(create_agent(), device), create_env, n_episodes=3).returns
        tensor([10., 10., 10.])
    """

    def __init__(self, agent: Agent, device: torch.device | str) -> None:
        refuse_no_agent(agent)
        self.agent = agent
        try:
            self.device = torch.device(device)
        except (TypeError, RuntimeError) as error:
            fix = "pass 'cuda', 'cuda:0' or 'cpu'"
            raise SpecError(f"device is {device!r}: {error}", fix=fix) from None
        if self.device.type == "cuda" and not torch.cuda.is_available():
            fix = "device = 'cuda' if torch.cuda.is_available() else 'cpu'"
            raise SpecError(f"device is {device!r}, and torch finds no such GPU", fix=fix)
        self.n_noise = agent.n_noise
        self._passes_on = self.device.type == "cpu"
        self._there = _Transfer(torch.device("cpu"), self.device)
        self._back = _Transfer(self.device, torch.device("cpu"))

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> AgentStep:
        """Call the agent on its device."""
        if self._passes_on:
            return self.agent(state, observation, agent_info, history)
        if history is not None:
            history = history.to(self.device)
        if not torch.is_inference_mode_enabled():
            given = [None if d is None else d.to(self.device) for d in (state, agent_info)]
            return self.agent(given[0], observation.to(self.device), given[1], history)
        there_state, there, there_info = self._there.moved(state, observation, agent_info)
        result: Any = self.agent(there_state, there, there_info, history)
        if isinstance(result, tuple | list) and len(result) == 3:  # otherwise the caller raises
            if state is not None:  # it need not come back
                result = state, *self._back.moved(*result[1:])
            else:
                result = self._back.moved(*result)
        return result  # type: ignore[no-any-return]

    def makes_initial_states(self) -> bool:
        """Whether the agent, or a subclass of this class, makes its initial states itself."""
        is_own = type(self).initial_state is not DeviceAgent.initial_state
        return is_own or self.agent.makes_initial_states()

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor | None:
        """The agent's initial state."""
        info = None if agent_info is None else agent_info.to(self.device)
        state = self.agent.initial_state(info, n)
        if state is None or not torch.is_inference_mode_enabled():
            return state
        return state.to(torch.device("cpu"))

    def require_history(self) -> bool:
        """Whether the agent requires a history."""
        return self.agent.require_history()

    def update(self, info: Any) -> None:
        """Update the agent."""
        self.agent.update(info)

    def seed(self, seed: int) -> None:
        """Seed the agent."""
        self.agent.seed(seed)

    def close(self) -> None:
        """Close the agent."""
        self.agent.close()


class _Transfer:
    """Moves batches of tensors between two devices in one piece.

    Args:
        source: The device that the tensors are on.
        target: The device that they are moved to.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._signature: _Signature = []
        self._here, self._outgoing = self._carved(source)
        self._there, self._arrived = self._carved(target)

    def __reduce__(self) -> tuple[type[_Transfer], tuple[torch.device, torch.device]]:
        # Without the buffers: in a copy, their views would be separate tensors.
        return _Transfer, (self._source, self._target)

    def moved(self, *batches: DictTensor | None) -> tuple[Any, ...]:
        """Batches with the same values on the target; the next call overwrites them."""
        given = [(n, batch) for n, batch in enumerate(batches) if batch is not None]
        tensors = {(n, key): tensor for n, batch in given for key, tensor in batch.items()}
        signature = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        if signature != self._signature:
            self._signature = signature
            self._here, self._outgoing = self._carved(self._source)
            self._there, self._arrived = self._carved(self._target)
        for name, tensor in tensors.items():
            self._outgoing[name].copy_(tensor)
        self._there.copy_(self._here, non_blocking=True)
        if self._source.type == "cuda":
            torch.cuda.current_stream(self._source).synchronize()
        moved: list[DictTensor | None] = [None] * len(batches)
        for n, batch in given:
            moved[n] = DictTensor._wrap({key: self._arrived[n, key] for key in batch})
        return tuple(moved)

    def _carved(self, device: torch.device) -> tuple[torch.Tensor, dict[_Name, torch.Tensor]]:
        """Make a buffer on a device; returns it and its views as tensors."""
        ends = [0]
        for _, shape, dtype in self._signature:
            ends.append(ends[-1] + -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT)
        is_locked = device.type == "cpu" and "cuda" in (self._source.type, self._target.type)
        buffer = torch.zeros(ends[-1], dtype=torch.uint8, device=device, pin_memory=is_locked)
        return buffer, {
            name: buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, (name, shape, dtype) in zip(ends, self._signature, strict=False)
        }
