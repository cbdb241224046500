"""Runs an agent on another device, for policies in the main process."""

from __future__ import annotations

from typing import Any

import torch

from rlpool.agents.agent import Agent, Tensors, agent_step, as_agent
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.rows import checked_device


class DeviceAgent(Agent):
    """Calls an agent whose parameters are on another device, such as a GPU.

    For ``device="cpu"``, calls are passed on unchanged.

    In a batcher with ``n_workers=0`` over a ``ParallelEnvManager`` this gives central inference:
    one batch of all lanes per step. Outside ``torch.inference_mode`` (as in ``replay_agent``),
    arguments are moved to the device and results stay there.

    Args:
        agent: The agent. It puts its parameters on the device itself.
        device: The device.

    Raises:
        SpecError: If ``agent`` is not an agent, or the device does not exist.

    Example:
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> evaluate(DeviceAgent(create_agent(), device), create_env, n_episodes=3).returns
        tensor([10., 10., 10.])
    """

    def __init__(self, agent: Any, device: torch.device | str) -> None:
        self.agent, self._called = agent, as_agent(agent)
        self.device = checked_device(device)
        self.n_noise = self._called.n_noise
        self._passes_on = self.device.type == "cpu"

    def __call__(self, *given: DictTensor | None) -> Any:
        """Call the agent on its device, with the arguments of an agent in positional order."""
        if self._passes_on:
            return self._called(*given)
        moved: Any = [None if each is None else each.to(self.device) for each in given]
        result = self._called(*moved)
        if not torch.is_inference_mode_enabled():
            return result
        parts = agent_step(result, moved[0])
        return tuple(None if each is None else DictTensor(each).to("cpu") for each in parts)

    def makes_initial_states(self) -> bool:
        """Whether the agent, or a subclass of this class, overrides ``initial_state``."""
        is_own = type(self).initial_state is not DeviceAgent.initial_state
        return is_own or self._called.makes_initial_states()

    def initial_state(self, agent_info: DictTensor | None, n: int) -> Tensors | None:
        """Return the agent's initial state."""
        info = None if agent_info is None else agent_info.to(self.device)
        state = self._called.initial_state(info, n)
        if state is None or not torch.is_inference_mode_enabled():
            return state
        return DictTensor(state).to(torch.device("cpu"))

    def require_history(self) -> bool:
        """Whether the agent requires a history."""
        return self._called.require_history()

    def update(self, info: Any) -> None:
        """Update the agent."""
        self._called.update(info)

    def seed(self, seed: int) -> None:
        """Seed the agent."""
        self._called.seed(seed)

    def close(self) -> None:
        """Close the agent."""
        self._called.close()
