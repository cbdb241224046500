"""Runs an agent on another device, for policies in the caller's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlpool.agents.agent import Agent, AgentStep
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError

_ALIGNMENT = 64  # bytes: what torch gives its own tensors

_Signature = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


class DeviceAgent(Agent):
    """Calls an agent whose parameters are on another device, such as a GPU.

    What the agent sees is brought there in one transfer, and what it returns comes back in one,
    however many keys there are, through page-locked memory where the device is a GPU of CUDA's.
    On the CPU calls are passed on as they are.

    In a batcher with ``n_threads=0`` over a ``ParallelEnvManager`` this gives central inference:
    one batch of all lanes per step. Outside of a batcher, without ``torch.inference_mode`` (as in
    ``replay_agent``), arguments are only moved and results stay on the device.

    Args:
        agent: The agent. It has to put its parameters on the device itself.
        device: The device.

    Example::

        def create_agent():
            return DeviceAgent(MyAgent(model.to("cuda")), "cuda")
    """

    def __init__(self, agent: Agent, device: torch.device | str) -> None:
        if not isinstance(agent, Agent):
            raise SpecError(f"agent should be an Agent, got {type(agent).__name__}")
        self.agent = agent
        try:
            self.device = torch.device(device)
        except (TypeError, RuntimeError) as error:
            raise SpecError(
                f"device is {device!r}: {error}", fix="pass 'cuda', 'cuda:0' or 'cpu'"
            ) from None
        self.n_noise = agent.n_noise
        self._passes_on = self.device.type == "cpu"
        self._there = Transfer(torch.device("cpu"), self.device)
        self._back = Transfer(self.device, torch.device("cpu"))

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
            moved = [None if d is None else d.to(self.device) for d in (state, agent_info)]
            return self.agent(moved[0], observation.to(self.device), moved[1], history)
        there = self._there.moved(_joined(state=state, seen=observation, info=agent_info))
        result = self.agent(
            None if state is None else _part(there, "state"),
            _part(there, "seen"),
            None if agent_info is None else _part(there, "info"),
            history,
        )
        # A user's agent may return anything, such as a tensor of three rows.
        is_step = isinstance(result, tuple | list) and len(result) == 3
        if not is_step:
            return result  # which whoever called will refuse
        first, output, new_state = result
        # The state that was given is known here already.
        unknown = first if state is None else None
        back = self._back.moved(_joined(first=unknown, output=output, new=new_state))
        before = _part(back, "first") if state is None else state
        return before, _part(back, "output"), _part(back, "new")

    def makes_initial_states(self) -> bool:
        """Whether the agent makes its initial states itself, or a subclass of this one does."""
        is_own = type(self).initial_state is not DeviceAgent.initial_state
        return is_own or self.agent.makes_initial_states()

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor | None:
        """Ask the agent for it."""
        if self._passes_on:
            return self.agent.initial_state(agent_info, n)
        info = None if agent_info is None else agent_info.to(self.device)
        state = self.agent.initial_state(info, n)
        if state is None or not torch.is_inference_mode_enabled():
            return state
        return state.to(torch.device("cpu"))

    def require_history(self) -> bool:
        """Whether the agent wants it."""
        return self.agent.require_history()

    def update(self, info: Any) -> None:
        """Let the agent take over new parameters."""
        self.agent.update(info)

    def seed(self, seed: int) -> None:
        """Seed the agent."""
        self.agent.seed(seed)

    def close(self) -> None:
        """Close the agent."""
        self.agent.close()


class Transfer:
    """Moves batches of tensors in one piece.

    Args:
        source: The device that they come from.
        target: The device that they go to.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._signature: _Signature = ()
        self._outgoing: dict[str, torch.Tensor] = {}
        self._arrived: dict[str, torch.Tensor] = {}
        self._here = self._there = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __reduce__(self) -> tuple[type[Transfer], tuple[torch.device, torch.device]]:
        # Without its buffers: their views would not be views in a copy.
        return Transfer, (self._source, self._target)

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same values on the target; overwritten by the next call."""
        signature = tuple((key, tuple(t.shape), t.dtype) for key, t in tensors.items())
        if signature != self._signature:
            self._allocate(signature)
        for key, tensor in tensors.items():
            self._outgoing[key].copy_(tensor)
        self._there.copy_(self._here, non_blocking=True)
        if self._source.type == "cuda":
            torch.cuda.current_stream(self._source).synchronize()
        return self._arrived

    def _allocate(self, signature: _Signature) -> None:
        places: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        size = 0
        for key, shape, dtype in signature:
            places[key] = size, shape, dtype
            n_bytes = torch.Size(shape).numel() * dtype.itemsize
            size += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        self._here = self._buffer(size, self._source)
        self._there = self._buffer(size, self._target)
        self._outgoing = {key: _view(self._here, *place) for key, place in places.items()}
        self._arrived = {key: _view(self._there, *place) for key, place in places.items()}
        self._signature = signature

    def _buffer(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        is_locked = device.type == "cpu" and "cuda" in (self._source.type, self._target.type)
        return torch.zeros(n_bytes, dtype=torch.uint8, device=device, pin_memory=is_locked)


def _view(
    buffer: torch.Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    return buffer[start : start + n_bytes].view(dtype).view(shape)


def _joined(**parts: Any) -> dict[str, torch.Tensor]:
    """All tensors of some DictTensors in one dict."""
    return {
        f"{name}:{key}": tensor
        for name, part in parts.items()
        if part is not None
        for key, tensor in part.items()
    }


def _part(joined: Mapping[str, torch.Tensor], name: str) -> DictTensor:
    """One of the DictTensors that were joined."""
    prefix = f"{name}:"
    own = {key: tensor for key, tensor in joined.items() if key.startswith(prefix)}
    return DictTensor._wrap({key.removeprefix(prefix): tensor for key, tensor in own.items()})
