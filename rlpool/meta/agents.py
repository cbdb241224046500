"""An adapter for agents with ``act``, and a random agent."""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from rlpool.agents.agent import Agent, AgentStep
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import (
    DEFAULT_OBSERVATION_KEY,
    FLAGS,
    Leaf,
    fitted,
    flattener,
    leaves_of,
    narrowed,
    structure_of_space,
)
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import takes_keyword

FINAL_KEY = "final_obs"
"""Key of the last observation of an episode within a trial, see ``VariBadWrapper``."""

_OWN_KEYS = {"reward", "noise", FINAL_KEY, *FLAGS}


class AGENT_ARCHS(str, Enum):  # noqa: N801  (the established name)
    """Input of a learner's agent, and unit of stored experience.

    Attributes:
        Markov: Acts on the observation; stored by transition.
        Memory: Acts on all observations of the rollout so far; stored by rollout.
        Memory_Markov: Acts on the observation, while another part of the learner has a memory;
            stored by rollout.

    Example:
        >>> AGENT_ARCHS("markov")
        <AGENT_ARCHS.Markov: 'markov'>
    """

    Markov = "markov"
    Memory = "memory"
    Memory_Markov = "memory_markov"

    @classmethod
    def _missing_(cls, value: object) -> None:
        names = ", ".join(f"AGENT_ARCHS.{member.name}" for member in cls)
        raise SpecError(f"agent_arch is {value!r}", fix=f"use one of {names}")


class ActingAgent(Agent):
    """An agent with ``act`` instead of ``__call__``, for one batch of rows.

    It has a memory if ``act`` takes ``prev_internal_state``. Without a memory it is called as
    ``act(obs, deterministic=False)`` (``deterministic`` is optional) and returns its action or a
    tuple that begins with the action. With a memory it is called as
    ``act(prev_internal_state=, prev_action=, reward=, obs=, deterministic=False)`` and returns a
    pair: action or tuple, and the new internal state. It then starts from ``get_initial_info()``,
    which returns a previous action ``[1, ...]``, a reward ``[1, 1]`` and an internal state of batch
    size 1.

    The internal state is a tensor, or tuples, dicts and DictTensors of tensors. The batch dimension
    is the second of three or more dimensions if that has size 1, as in ``torch.nn.GRU``, otherwise
    the first; in a DictTensor always the first.

    The first call, by which the loop discovers shapes, returns zeros without calling ``act``.

    Args:
        agent: The agent. Observations and rewards are moved to the device of its parameters.
        space: The action space of the environments. Actions of a Discrete space may be numbers or
            one-hot rows.
        needs_memory: Whether it must have a memory. Required for the memory of an ``act`` that
            takes ``**kwargs``.

    Raises:
        SpecError: If the agent has no ``act``, or the action space is not one array.
        UsageError: If it lacks the required memory.
    """

    def __init__(self, agent: Any, space: Any, needs_memory: bool = False) -> None:
        name = type(agent).__name__
        if not callable(getattr(agent, "act", None)):
            raise SpecError(
                f"the agent is a {name} without act()",
                fix="subclass rlpool.Agent, or define act(obs, deterministic=False)",
            )
        structure = narrowed(structure_of_space(space, name="action_space"), keep_float64=False)
        if not isinstance(structure, Leaf):
            raise SpecError(
                f"act() cannot choose actions of the action space {space}",
                fix="use a space of a single array, or subclass rlpool.Agent",
            )
        self._agent, self._space, self._action = agent, space, structure.spec
        self._has_memory = takes_keyword(agent.act, "prev_internal_state", otherwise=needs_memory)
        if needs_memory and not self._has_memory:
            raise UsageError(
                f"agent_arch is Memory, but {name}.act takes no prev_internal_state",
                fix="use AGENT_ARCHS.Markov or Memory_Markov, or give act() a memory",
            )
        if self._has_memory and not callable(getattr(agent, "get_initial_info", None)):
            raise UsageError(
                f"{name}.act takes prev_internal_state, but get_initial_info() is missing",
                fix="define get_initial_info() -> (previous action, reward, internal state)",
            )
        parameters = agent.parameters() if isinstance(agent, torch.nn.Module) else iter(())
        self._device = next((parameter.device for parameter in parameters), torch.device("cpu"))
        self._mode = {"deterministic": False} if takes_keyword(agent.act, "deterministic") else {}
        self._takes_obs = takes_keyword(agent.act, "obs")
        self._batch_dims: list[int] = []
        self._is_called = False

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        """Return the previous action and the internal state of rows that start."""
        if not self._has_memory:
            return DictTensor()
        previous, reward, internal = self._agent.get_initial_info()
        self._initial_reward = torch.as_tensor(reward, device=self._device).reshape(1, -1)
        leaves, self._structure = _pytree.tree_flatten((_tensor(previous), internal))
        is_dict = isinstance(internal, DictTensor)
        self._batch_dims = [0, *(_batch_dim(leaf, is_dict) for leaf in leaves[1:])]
        return DictTensor(
            {key: t.expand(n, *t.shape[1:]) for key, t in self._state_of(leaves).items()}
        )

    def __call__(
        self,
        state: Any,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> AgentStep:
        """Run one batched forward pass."""
        if not self._is_called:
            self._is_called = True
            shape = (observation.n_elems(), *self._action.shape)
            zeros = torch.zeros(shape, dtype=self._action.torch_dtype, device="cpu")
            return state, DictTensor({"action": zeros}), state
        chosen, new_state = self._act(state, observation)
        return state, DictTensor({"action": self._for_env(chosen)}), new_state

    def _act(self, state: DictTensor, observation: DictTensor) -> tuple[Tensor, DictTensor]:
        act, seen = self._agent.act, self._seen(observation)
        if not self._has_memory:
            positional, named = ((), {"obs": seen}) if self._takes_obs else ((seen,), {})
            return _first(act(*positional, **named, **self._mode)), DictTensor()
        leaves = [
            state[f"act/{i}"].to(self._device).movedim(0, dim).contiguous()
            for i, dim in enumerate(self._batch_dims)
        ]
        previous, internal = _pytree.tree_unflatten(leaves, self._structure)
        reward = observation["reward"].to(self._device).unsqueeze(-1)
        starts = observation["initial_state"].to(self._device).unsqueeze(-1)
        result = act(
            prev_internal_state=internal,
            prev_action=previous,
            reward=torch.where(starts, self._initial_reward.to(reward.dtype), reward),
            obs=seen,
            **self._mode,
        )
        chosen, *internals = result if isinstance(result, tuple) else (result,)
        action = _first(chosen)
        leaves, _ = _pytree.tree_flatten((action.to(previous.dtype), *internals))
        if len(leaves) != len(self._batch_dims):
            raise SpecError(
                "act() did not return (action, internal state) with an internal state like that of "
                "get_initial_info()",
                fix="return ((action, ...), internal_state)",
            )
        return action, DictTensor(self._state_of(leaves))

    def _state_of(self, leaves: list[Tensor]) -> dict[str, Tensor]:
        """Convert the state for the loop: CPU tensors with the batch dimension first."""
        return {
            f"act/{i}": leaf.movedim(dim, 0).cpu()
            for i, (leaf, dim) in enumerate(zip(leaves, self._batch_dims, strict=True))
        }

    def _seen(self, observation: DictTensor) -> Any:
        """Return the environments' own observation on the agent's device."""
        keys = [k for k in observation if k not in _OWN_KEYS and not k.startswith("last_action")]
        if keys != [DEFAULT_OBSERVATION_KEY]:
            return observation.get(keys).to(self._device)
        frame = observation[DEFAULT_OBSERVATION_KEY].to(self._device)
        return frame.unsqueeze(-1) if frame.ndim == 1 else frame

    def _for_env(self, action: Tensor) -> Tensor:
        """Convert the action to the shape and dtype of the action space."""
        action, space = action.cpu(), self._space
        n = space.n if type(space).__name__ == "Discrete" else 0
        if action.ndim == 2 and action.shape[1] == n > 1:
            action = action.argmax(-1) + int(space.start)
        rows = action.reshape(len(action), *self._action.shape).numpy(force=True)
        return torch.from_numpy(fitted("the action of act()", rows, self._action.dtype))


class RandomAgent(Agent):
    """Samples the action space, seeded by the rollout's noise at every step.

    Args:
        space: The action space.
    """

    n_noise = 2  # of 24 bits each: enough for a seed

    def __init__(self, space: Any) -> None:
        structure = narrowed(structure_of_space(space, name="action_space"), keep_float64=False)
        self._leaves = leaves_of({"action": structure}, "")
        self._flatten = flattener(structure, "action")
        self._space = copy.deepcopy(space)

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> AgentStep:
        """Draw one action per row."""
        samples = []
        for high, low in (observation["noise"].double() * 2**24).long().tolist():
            self._space.seed(2**24 * high + low)
            samples.append(self._flatten(self._space.sample()))
        columns = zip(self._leaves.items(), zip(*samples, strict=True), strict=True)
        actions = {k: torch.from_numpy(np.array(c, leaf.spec.dtype)) for (k, leaf), c in columns}
        return DictTensor(), DictTensor(actions), DictTensor()


def _batch_dim(leaf: Any, is_first: bool) -> int:
    """Return the batch dimension of a tensor of the initial internal state."""
    shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else ()
    dim = 1 if len(shape) >= 3 and shape[1] == 1 and not is_first else 0
    if not shape or shape[dim] != 1:
        raise SpecError(
            f"the initial internal state holds {leaf!r:.60}, not a tensor for a batch of 1",
            fix="return tensors [1, ...], or [layers, 1, ...] as for torch.nn.GRU",
        )
    return dim


def _first(result: Any) -> Tensor:
    return _tensor(result[0] if isinstance(result, tuple) else result)


def _tensor(value: Any) -> Tensor:
    """Convert anything but tensors to a CPU tensor, regardless of torch's default device."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
