"""Agents of every form that the contract allows, and some that violate it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlpool import Agent, DictTensor, sample_categorical

from support.envs import FIRST_STATE


def zeros(observation: DictTensor) -> Tensor:
    """One int64 zero per row."""
    return torch.zeros(observation.n_elems(), dtype=torch.int64)


class ConstantAgent(Agent):
    """Agent with a constant action and no state."""

    def __init__(self, action: int = 0) -> None:
        self.action = action

    def __call__(self, state, observation, agent_info=None, history=None):
        action = zeros(observation) + self.action
        return DictTensor(), DictTensor({"action": action}), DictTensor()


class StepCounter(Agent):
    """Counts its steps in its state, from ``FIRST_STATE``; the action is the count from 1."""

    def __call__(self, state, observation, agent_info=None, history=None):
        if state is None:
            state = DictTensor({"steps": zeros(observation) + FIRST_STATE})
        steps = state["steps"] + 1
        return state, DictTensor({"action": steps - FIRST_STATE}), DictTensor({"steps": steps})


class InfoEcho(Agent):
    """Outputs ``agent_info["id"]`` as ``info_id``, -1 without; keeps it in its state."""

    def __call__(self, state, observation, agent_info=None, history=None):
        ids = zeros(observation) - 1 if agent_info is None else agent_info["id"].clone()
        if state is None:
            state = DictTensor({"first_id": ids})
        output = DictTensor({"action": zeros(observation), "info_id": ids})
        return state, output, state


class GruAgent(Agent):
    """A recurrent policy over ``frame`` that draws its actions from its noise."""

    n_noise = 1

    def __init__(self, n_inputs: int = 2, n_actions: int = 3, n_hidden: int = 4) -> None:
        generator = torch.Generator().manual_seed(3)
        self.cell = torch.nn.GRUCell(n_inputs, n_hidden)
        self.head = torch.nn.Linear(n_hidden, n_actions)
        for module in (self.cell, self.head):
            for parameter in module.parameters():
                parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
        self.n_hidden = n_hidden

    def __call__(self, state, observation, agent_info=None, history=None):
        if state is None:
            state = DictTensor({"hidden": torch.ones(observation.n_elems(), self.n_hidden)})
        hidden = self.cell(observation["frame"], state["hidden"])
        action, log_probability = sample_categorical(self.head(hidden), observation["noise"])
        output = DictTensor({"action": action, "log_probability": log_probability})
        return state, output, DictTensor({"hidden": hidden})


class BinaryAgent(Agent):
    """Agent whose action, 0 or 1, depends on the whole frame."""

    def __call__(self, state, observation, agent_info=None, history=None):
        action = (observation["frame"].abs().sum(-1) * 1e3 % 2 > 1) * 1
        return None, DictTensor({"action": action}), None


class FunctionAgent(Agent):
    """Calls a function ``(state, observation, agent_info, history)``."""

    def __init__(self, function: Callable[..., Any], n_noise: int = 0) -> None:
        self.function = function
        self.n_noise = n_noise

    def __call__(self, state, observation, agent_info=None, history=None):
        return self.function(state, observation, agent_info, history)


class StochasticPolicy(nn.Module, Agent):
    """Policy for frames of four numbers, with modules in a list and in another agent.

    Args:
        seed: Seed of its parameters.
    """

    n_noise = 1

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.inner, self.parts = StepCounter(), [nn.Dropout()]
        self.inner.layer = nn.Dropout()

    def all_modules(self) -> tuple[nn.Module, ...]:
        return self, self.layers[1], self.parts[0], self.inner.layer

    def __call__(self, state, observation, agent_info=None, history=None):
        assert not any(module.training for module in self.all_modules())
        logits = self.layers(observation["frame"])
        action, _ = sample_categorical(logits, observation["noise"])
        if agent_info is not None:
            action = torch.where(agent_info["is_greedy"], logits.argmax(-1), action)
        return DictTensor(), DictTensor({"action": action}), DictTensor()
