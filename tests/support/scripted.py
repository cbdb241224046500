"""Environments of every shape and an agent whose every bit depends on all their inputs.

All are at module level, so that worker processes can unpickle them by name.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlpool import Agent, DictTensor, TemporalDictTensor

from support.envs import FIRST_STATE

MANY = 2**45
NEVER = -2
"""The option ``fails_at`` of an episode that does not fail; -1 is its reset."""

OBSERVED: dict[str, spaces.Space[Any]] = {
    "frame": spaces.Box(-np.inf, np.inf, (6,), np.float32),
    "wide": spaces.Box(-np.inf, np.inf, (6,), np.float64),
    "number": spaces.Discrete(MANY),
    "dict": spaces.Dict(
        {
            "vector": spaces.Box(-np.inf, np.inf, (6,), np.float64),
            "image": spaces.Box(0, 255, (2, 3), np.uint8),
            "deep": spaces.Dict(
                {"bits": spaces.MultiBinary(3), "few": spaces.Tuple((spaces.Discrete(9),) * 2)}
            ),
        }
    ),
}
WHERE_IDENTITY_IS = {"frame": "frame", "wide": "frame", "number": "frame", "dict": "vector"}

ACTED: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(7, start=-2),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "wide": spaces.Box(-1.0, 1.0, (), np.float64),
    "small": spaces.Box(-5, 5, (2, 1), np.int8),
    "bits": spaces.MultiBinary(3),
    "nested": spaces.Dict(
        {
            "drive": spaces.Box(-1.0, 1.0, (2,), np.float64),
            "gear": spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([2, 4]))),
        }
    ),
}

INFOS: dict[str, Any] = {
    "none": None,
    "declared": {"score": float, "hits": np.int16, "deep/on": bool, "pair": (np.float64, 2)},
    "named": ["score", "hits", "deep/on"],
}
"""``info_keys``."""


def leaves(space: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a space by key."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        yield key, space
        return
    inner = space.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    for name, part in inner:
        yield from leaves(part, f"{key}/{name}" if key else str(name))


def as_plain(value: Any) -> Any:
    """Return the dtypes and numbers of a nested value."""
    if isinstance(value, Mapping):
        return [(key, as_plain(part)) for key, part in value.items()]
    if isinstance(value, tuple):
        return [as_plain(part) for part in value]
    array = np.asarray(value)
    return array.dtype.str, array.tolist()


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """An observation contains its episode's id, its step, and a checksum of all inputs.

    Options of a reset: ``id``, ``length``, ``ends`` (0 terminated, 1 truncated, 2 both) and
    ``fails_at``, a step that raises; any others only enter the checksum.

    Args:
        observes, acts: Keys of ``OBSERVED`` and ``ACTED``.
        reuses: Whether all observations share the same memory.
    """

    def __init__(
        self, observes: str = "frame", acts: str = "discrete", reuses: bool = False
    ) -> None:
        self.observes, self.reuses = observes, reuses
        self.observation_space = OBSERVED[observes]
        self.action_space = ACTED[acts]
        self.buffer = np.zeros(6, self.content_dtype())

    def content_dtype(self) -> Any:
        return np.float32 if self.observes == "frame" else np.float64

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        given = dict(options or {})
        drawn = self.np_random.integers([2**31, 6, 3]).tolist()
        self.t, self.number = 0, given.get("id", drawn[0] if seed is None else seed)
        self.length, self.ends = given.get("length", 1 + drawn[1]), given.get("ends", drawn[2])
        self.fails_at = given.get("fails_at", NEVER)
        self.total = zlib.crc32(repr(sorted(given.items())).encode())
        self.fail(-1)
        return self.observation(), self.info()

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if not isinstance(action, np.floating):  # Gymnasium warns about these
            assert self.action_space.contains(action), action
        self.fail(self.t)
        self.t += 1
        self.total = zlib.crc32(repr((self.total, as_plain(action))).encode())
        reward = self.np_random.random() + self.total % 64
        over = self.t >= self.length
        flags = over and self.ends != 1, over and self.ends != 0
        return self.observation(), reward, *flags, self.info()

    def fail(self, step: int) -> None:
        if self.fails_at == step:
            raise RuntimeError(f"episode {self.number} fails at {step}")

    def observation(self) -> Any:
        draw = int(self.np_random.integers(1024))
        number, total = self.number, self.total
        if self.observes == "number":
            return np.int64(self.t + 1024 * number)
        parts = [self.t, number >> 16, number & 0xFFFF, draw / 3, total >> 16, total & 0xFFFF]
        content = self.buffer if self.reuses else np.empty(6, self.content_dtype())
        content[:] = parts
        if self.observes != "dict":
            return content
        bits = np.array([draw >> k & 1 for k in range(3)], np.int8)
        few = np.int64(draw % 9), np.int64(total % 9)
        image = np.full((2, 3), total & 0xFF, np.uint8)
        return {"vector": content, "image": image, "deep": {"bits": bits, "few": few}}

    def info(self) -> dict[str, Any]:
        draws = self.np_random.random(4)
        parts: dict[str, Any] = {
            "score": float(draws[0]),
            "hits": self.t,
            "deep": {"on": bool(draws[1] < 0.5)},
            "pair": draws[2:],
        }
        kept = draws < 0.5
        shown = {k: v for (k, v), is_kept in zip(parts.items(), kept, strict=True) if is_kept}
        return {"name": "scripted", **shown}


# The agent --------------------------------------------------------------------------------------

N_HIDDEN = 5
_ODD = 2 * np.random.default_rng(0).integers(2**40, size=2**11) + 1


def digest(values: Mapping[str, Tensor], along_time: bool = False) -> Tensor:
    """Return a checksum of all bits of each row, int64 ``[n]``; zeros do not change it.

    Args:
        values: Key to ``[n, ...]``.
        along_time: Whether the second dimension is time.
    """
    n_leading = 1 + along_time
    parts = [np.ascontiguousarray(values[key].numpy()) for key in sorted(values.keys())]
    shape = parts[0].shape[:n_leading]
    if 0 in shape:
        return torch.zeros(shape[0], dtype=torch.int64)
    rows = [part.view(np.uint8).reshape(*shape, -1) for part in parts if part.size]
    bits = np.concatenate(rows, -1).astype(np.int64)
    sums = bits @ _ODD[: bits.shape[-1]]
    return torch.from_numpy(sums @ _ODD[: sums.shape[1]] if along_time else sums)


def identity(observation: Mapping[str, Tensor], observes: str) -> tuple[Tensor, Tensor]:
    """Return the episode numbers and step numbers, int64 ``[n]`` each."""
    content = observation[WHERE_IDENTITY_IS[observes]]
    if observes == "number":
        return content // 1024, content % 1024
    whole = content.long()
    return (whole[:, 1] << 16) + whole[:, 2], whole[:, 0]


class ScriptedAgent(Agent):
    """Agent that depends on every bit of its input and refuses rows that belong to no episode.

    Args:
        acts: The key of ``ACTED``, or a space.
        observes: The key of ``OBSERVED``, ``None`` for environments whose rows do not
            identify themselves.
        n_noise: Random numbers per step.
        keeps: ``"nothing"``; or ``"state"``, created from the first observation, or
            ``"initial"``, created from ``agent_info`` alone.
        history: Whether it requires the history.
        spoils: Whether it overwrites its input.
        reuses: Whether it returns the same memory in each call.
    """

    def __init__(
        self,
        acts: Any = "discrete",
        observes: str | None = None,
        n_noise: int = 0,
        keeps: str = "nothing",
        history: bool = False,
        spoils: bool = False,
        reuses: bool = False,
    ) -> None:
        self.leaves = list(leaves(ACTED[acts] if isinstance(acts, str) else acts, "action"))
        self.observes, self.n_noise, self.keeps = observes, n_noise, keeps
        self.history, self.spoils, self.reuses = history, spoils, reuses
        self.bias, self.returned = 0.0, dict[str, Tensor]()
        generator = torch.Generator().manual_seed(3)
        self.of_seen = 0.7 * torch.randn(3, N_HIDDEN, generator=generator)
        self.of_hidden = 0.7 * torch.randn(N_HIDDEN, N_HIDDEN, generator=generator)

    def update(self, info: Any) -> None:
        self.bias = float(info["bias"])

    def require_history(self) -> bool:
        return self.history

    def makes_initial_states(self) -> bool:
        return self.keeps == "initial"

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        seen = torch.zeros(n, dtype=torch.int64) if agent_info is None else digest(agent_info)
        hidden = (seen % 89)[:, None] / 89 + torch.full((n, N_HIDDEN), self.bias)
        numbers = {"steps": torch.full((n,), FIRST_STATE), "who": torch.zeros_like(seen)}
        return DictTensor({"hidden": hidden, **numbers})

    def __call__(self, state, observation, agent_info=None, history=None):
        n, is_start = observation.n_elems(), state is None
        if is_start:
            state = DictTensor({})
            if self.keeps != "nothing":
                state = self.initial_state(agent_info, n)
        seen = digest(observation)
        for values in (agent_info, state):
            if values is not None and not values.empty():
                seen = seen * 31 + digest(values)
        if history is not None:
            seen = seen * 31 + digest(history, along_time=True)
        who = torch.zeros(n, dtype=torch.int64)
        if self.observes is not None:
            who, step = identity(observation, self.observes)
            self.check(is_start, state, (who, step, seen), agent_info, history)
        first = state.clone()
        parts = [seen % 997 / 997, (seen >> 20) % 991 / 991, torch.full((n,), self.bias)]
        hidden = torch.stack(parts, 1) @ self.of_seen
        if not state.empty():
            hidden = hidden + state["hidden"] @ self.of_hidden
        hidden = torch.tanh(hidden)
        # The lowest bits also affect later steps.
        chosen = (seen ^ hidden[:, 0].contiguous().view(torch.int32)) & 0x7FFFFFFF
        output = {"value": hidden.sum(1), "chosen": chosen, "row": torch.arange(n)}
        output |= {key: action_of(space, chosen) for key, space in self.leaves}
        new = {}
        if not state.empty():
            new = {"hidden": hidden, "steps": state["steps"] + 1, "who": who}
        if self.spoils:
            for part in (observation, agent_info or {}, history or {}, state):
                for key in list(part.keys()):
                    part[key].fill_(1)
        if self.reuses:
            output, new = self.in_same_memory(output), self.in_same_memory(new)
        return first, DictTensor(output), DictTensor(new)

    def in_same_memory(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        for key, value in values.items():
            self.returned.setdefault(key, torch.empty_like(value)).copy_(value)
        return {key: self.returned[key] for key in values}

    def check(
        self,
        is_start: bool,
        state: DictTensor,
        rows: tuple[Tensor, Tensor, Tensor],
        agent_info: DictTensor | None,
        history: TemporalDictTensor | None,
    ) -> None:
        """Check that every row belongs to one episode and one step in all inputs."""
        who, step, _ = rows
        if self.keeps == "state":
            assert ((step == 0) == is_start).all(), (is_start, step)
        if not state.empty():
            assert torch.equal(state["steps"] - FIRST_STATE, step)
            assert torch.equal(state["who"], torch.where(step > 0, who, 0))
        if history is not None:
            assert torch.equal(history.lengths, step)
        if agent_info is not None and "id" in agent_info:
            assert torch.equal(agent_info["id"], who)
        if (
            agent_info is not None
            and "breaks" in agent_info
            and (agent_info["breaks"] == step).any()
        ):
            raise RuntimeError("the agent breaks")
        shown: dict[Any, int] = {}
        for *row, bits in zip(*(column.tolist() for column in rows), strict=True):
            assert shown.setdefault(tuple(row), bits) == bits, f"two rows of {row} differ"


def action_of(space: Any, chosen: Tensor) -> Tensor:
    """Return a leaf's actions derived from numbers of at most 31 bits, in the stored dtype."""
    shape = (len(chosen), *space.shape)
    each = torch.stack([chosen >> 2 * k for k in range(max(1, int(np.prod(space.shape))))], 1)
    each = each.reshape(shape)
    if isinstance(space, spaces.Discrete):
        return int(space.start) + each % int(space.n)
    if isinstance(space, spaces.MultiBinary):
        return (each % 2).to(torch.int8)
    if isinstance(space, spaces.MultiDiscrete):
        return each % torch.as_tensor(space.nvec)
    if space.dtype == np.int8:
        return (each % 11 - 5).to(torch.int8)
    return (each % 129 - 64) / 64
