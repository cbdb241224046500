"""Agents of other styles as agents of the step loop, and one that needs no policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from rlpool.agents.agent import Agent, AgentStep
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError, UsageError
from rlpool.memory.storage import Array
from rlpool.signatures import takes_keyword, takes_position
from rlpool.specs import DEFAULT_OBSERVATION_KEY, join_key

_PREVIOUS = "previous_action"
_ACTED_SPACES = ("Box", "Discrete", "MultiDiscrete", "MultiBinary")


class ActingAgent(Agent):
    """An agent with ``act`` in place of ``__call__``, for one batch of rows.

    It has a memory if ``act`` takes ``prev_internal_state``. Without one it is called as
    ``act(obs, deterministic=False)`` (the latter if it takes that). With one it is called as
    ``act(prev_internal_state=, prev_action=, reward=, obs=, deterministic=False)``, and starts
    from ``get_initial_info()``, which gives a previous action ``[1, ...]``, a reward ``[1, 1]``
    and an internal state of batch size 1. It returns its action, or a tuple that begins with it;
    with memory, a pair of that and the new internal state.

    The internal state is a tensor, or tuples, dicts and DictTensors of tensors. Its batch is the
    second dimension where that has size 1 and there are three or more, as in ``torch.nn.GRU``,
    else the first; in a DictTensor always the first.

    Args:
        agent: The agent. Observations and rewards come to the device of its parameters.
        space: The action space of the environments. For a Discrete one, actions may be numbers
            or one-hot rows.
        wants_memory: Whether it has a memory if its ``act`` takes ``**kwargs``.

    Attributes:
        is_probed: Until this is set the agent is not called: zeros are returned.

    Raises:
        SpecError: For an action space that is not one array.
    """

    def __init__(self, agent: Any, space: Any, wants_memory: bool = False) -> None:
        if type(space).__name__ not in _ACTED_SPACES:
            raise SpecError(
                f"act() cannot choose actions of the action space {space}",
                fix=f"let it be one of {', '.join(_ACTED_SPACES)}, or subclass rlpool.Agent",
            )
        self._agent = agent
        self._space = space
        self._device = _device_of(agent)
        self._has_memory = has_memory(agent, wants_memory)
        takes_mode = takes_keyword(agent.act, "deterministic")
        self._mode = {"deterministic": False} if takes_mode else {}
        self._takes_position = takes_position(agent.act)
        self._structure: Any = None
        self._batch_dims: list[int] = []
        self._initial_reward = torch.zeros(1, 1, device=self._device)
        self.is_probed = False

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        """The previous action and the internal state of rows that start."""
        if not self._has_memory:
            return DictTensor()
        try:
            previous, reward, internal = self._agent.get_initial_info()
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"get_initial_info() failed or did not return three values: {error}",
                fix="return (previous action [1, ...], reward [1, 1], internal state)",
            ) from error
        self._initial_reward = torch.as_tensor(reward, device=self._device).reshape(1, -1)
        leaves, self._structure = _pytree.tree_flatten(internal)
        self._batch_dims = _batch_dims(internal, leaves)
        parts = [t.movedim(dim, 0).cpu() for t, dim in zip(leaves, self._batch_dims, strict=True)]
        parts = [part.expand(n, *part.shape[1:]) for part in parts]
        previous = torch.as_tensor(previous).cpu()  # lanes keep their states on the CPU
        state = {join_key("internal", str(i)): part for i, part in enumerate(parts)}
        return DictTensor({_PREVIOUS: previous.expand(n, *previous.shape[1:]), **state})

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> AgentStep:
        """One batched forward."""
        if state is None:
            raise LookupError("called without a state")
        if not self.is_probed:
            return state, DictTensor({"action": self._no_action(observation.n_elems())}), state
        seen = self._seen(observation)
        if not self._has_memory:
            chosen = (
                self._agent.act(seen, **self._mode)
                if self._takes_position
                else self._agent.act(obs=seen, **self._mode)
            )
            action = _first(chosen)
            return state, DictTensor({"action": self._for_env(action)}), DictTensor()
        reward = observation["reward"].to(self._device).unsqueeze(-1)
        starts = observation["initial_state"].to(self._device).unsqueeze(-1)
        result = self._agent.act(
            prev_internal_state=self._internal(state),
            prev_action=state[_PREVIOUS].to(self._device),
            reward=torch.where(starts, self._initial_reward.to(reward.dtype), reward),
            obs=seen,
            **self._mode,
        )
        if not isinstance(result, tuple) or len(result) != 2:
            raise SpecError(
                f"act() returned {type(result).__name__}, not (action, internal state)",
                fix="return ((action, ...), internal_state)",
            )
        action, internal = _first(result[0]), result[1]
        leaves, _ = _pytree.tree_flatten(internal)
        if len(leaves) != len(self._batch_dims):
            raise SpecError(
                f"act() returned an internal state of {len(leaves)} tensors, "
                f"get_initial_info() one of {len(self._batch_dims)}"
            )
        new_state = {_PREVIOUS: torch.as_tensor(action).cpu().to(state[_PREVIOUS].dtype)}
        for number, (leaf, dim) in enumerate(zip(leaves, self._batch_dims, strict=True)):
            new_state[join_key("internal", str(number))] = leaf.movedim(dim, 0).cpu()
        return state, DictTensor({"action": self._for_env(action)}), DictTensor(new_state)

    def _seen(self, observation: DictTensor) -> Any:
        """The observation as the environments give it, on the agent's device."""
        own = {"reward", "terminated", "truncated", "done", "initial_state", "noise"}
        keys = [k for k in observation if k not in own and not k.startswith("last_action")]
        if keys == [DEFAULT_OBSERVATION_KEY]:
            frame = observation[DEFAULT_OBSERVATION_KEY].to(self._device)
            return frame.unsqueeze(-1) if frame.ndim == 1 else frame
        return observation.get(keys).to(self._device)

    def _internal(self, state: DictTensor) -> Any:
        leaves = [
            state[join_key("internal", str(number))].to(self._device).movedim(0, dim).contiguous()
            for number, dim in enumerate(self._batch_dims)
        ]
        return _pytree.tree_unflatten(leaves, self._structure)

    def _for_env(self, chosen: Any) -> Tensor:
        """The agent's action as the environments take it."""
        action: Tensor = torch.as_tensor(chosen).cpu()
        if type(self._space).__name__ != "Discrete":
            return action.reshape(action.shape[0], *self._space.shape).to(self._no_action(0).dtype)
        if action.ndim == 2 and action.shape[1] == self._space.n > 1:
            action = action.argmax(-1) + int(self._space.start)
        return action.reshape(-1).to(torch.int64)

    def _no_action(self, n_rows: int) -> Tensor:
        dtype = np.dtype(self._space.dtype)
        dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
        return torch.from_numpy(np.zeros((n_rows, *self._space.shape), dtype))


class RandomAgent(Agent):
    """Draws from the action space; the episode's noise determines what.

    Bounded dimensions are uniform, unbounded ones normal, those with one bound exponential, as
    in ``Space.sample()``.

    Args:
        space: The action space.
    """

    def __init__(self, space: Any) -> None:
        self._draws: list[tuple[str, int, Callable[[Array], Array]]] = []
        self._add(space, "action")
        self.n_noise = sum(size for _, size, _ in self._draws)

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> AgentStep:
        """Draw one action per row."""
        noise = observation["noise"].numpy().astype(np.float64)
        actions = {}
        start = 0
        for key, size, draw in self._draws:
            actions[key] = torch.from_numpy(draw(noise[:, start : start + size]))
            start += size
        return DictTensor(), DictTensor(actions), DictTensor()

    def _add(self, space: Any, key: str) -> None:
        kind = type(space).__name__
        if kind in ("Dict", "Tuple"):
            inner = space.spaces.items() if kind == "Dict" else enumerate(space.spaces)
            for name, part in inner:
                self._add(part, join_key(key, str(name)))
            return
        if kind == "Box":
            draw = _box_draw(space)
        elif kind in ("Discrete", "MultiDiscrete", "MultiBinary"):
            draw = _discrete_draw(space, kind)
        else:
            raise SpecError(
                f"random actions cannot be drawn from {space}",
                fix="declare an action_space of Box, Discrete, MultiDiscrete, MultiBinary, "
                "Dict or Tuple",
            )
        self._draws.append((key, math.prod(space.shape), draw))


def has_memory(agent: Any, wants_memory: bool) -> bool:
    """Whether ``agent.act`` takes an internal state; one that takes every keyword, if it shall."""
    return takes_keyword(agent.act, "prev_internal_state", otherwise=wants_memory)


def _device_of(agent: Any) -> torch.device:
    if isinstance(agent, torch.nn.Module):
        for parameter in agent.parameters():
            return parameter.device
    return torch.device("cpu")


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple | list) else result


def _batch_dims(internal: Any, leaves: list[Any]) -> list[int]:
    """Where the batch of 1 is in each tensor of an initial internal state."""
    dims = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise SpecError(
                f"the internal state holds a {type(leaf).__name__}, not only tensors",
                fix="make it a tensor, or a tuple, dict or DictTensor of tensors",
            )
        in_second = leaf.ndim >= 3 and leaf.shape[1] == 1 and not isinstance(internal, DictTensor)
        dim = 1 if in_second else 0
        if leaf.ndim == 0 or leaf.shape[dim] != 1:
            raise SpecError(
                f"the initial internal state has shape {list(leaf.shape)}, "
                "of which no dimension is a batch of 1",
                fix="return [1, ...], or [layers, 1, ...] as torch.nn.GRU takes it",
            )
        dims.append(dim)
    return dims


def _box_draw(space: Any) -> Callable[[Array], Array]:
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    dtype = np.dtype(np.float32) if space.dtype == np.float64 else np.dtype(space.dtype)
    is_float = dtype.kind == "f"
    has_low, has_high = np.isfinite(low), np.isfinite(high)
    base = np.where(has_low, low, 0.0)
    width = np.where(has_high, high, 0.0) - base + (0.0 if is_float else 1.0)

    def draw(noise: Array) -> Array:
        uniform = noise.reshape(-1, *space.shape)
        tail = -np.log1p(-uniform)
        middle = torch.from_numpy(2.0 * uniform - 1.0 + 2.0**-24)
        normal = math.sqrt(2.0) * torch.erfinv(middle).numpy()
        values = np.select(
            [has_low & has_high, has_low, has_high],
            [base + uniform * width, base + tail, high - tail],
            normal,
        )
        if not is_float:
            values = np.floor(values)
        clipped: Array = np.clip(values, low, high).astype(dtype)
        return clipped

    return draw


def _discrete_draw(space: Any, kind: str) -> Callable[[Array], Array]:
    counts = {"Discrete": "n", "MultiDiscrete": "nvec"}
    n_values = np.asarray(getattr(space, counts[kind]) if kind in counts else 2, np.float64)
    first = np.asarray(getattr(space, "start", 0))
    dtype = np.dtype(space.dtype)

    def draw(noise: Array) -> Array:
        values: Array = np.floor(noise.reshape(-1, *space.shape) * n_values) + first
        return values.astype(dtype)

    return draw


def check_agent(agent: Any, *, needs_memory: bool) -> None:
    """Refuse what cannot act.

    Raises:
        SpecError: If it is neither an Agent nor has ``act``.
        UsageError: If it should have a memory and has none.
    """
    if isinstance(agent, Agent):
        return
    if not callable(getattr(agent, "act", None)):
        raise SpecError(
            f"the agent is a {type(agent).__name__} without act()",
            fix="subclass rlpool.Agent, or give it act(obs, deterministic=False)",
        )
    takes_state = has_memory(agent, needs_memory)
    if takes_state and not callable(getattr(agent, "get_initial_info", None)):
        raise UsageError(
            f"{type(agent).__name__}.act takes prev_internal_state, but there is no "
            "get_initial_info()",
            fix="define get_initial_info() -> (previous action, reward, internal state)",
        )
    if needs_memory and not takes_state:
        raise UsageError(
            f"agent_arch is Memory, but {type(agent).__name__}.act takes no prev_internal_state",
            fix="use AGENT_ARCHS.Markov or Memory_Markov, or give act() a memory",
        )
