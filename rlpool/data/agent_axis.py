"""Conversion of joint episodes of many agents to one row per agent, and back.

Row ``i * A + a`` is agent ``a`` of joint episode ``i``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlpool.data.rows import as_signed, kind, longest, steps_within, taken
from rlpool.data.specs import FLAGS, join_key, refuse_missing
from rlpool.errors import SpecError

if TYPE_CHECKING:
    from rlpool.data.temporal_dict_tensor import TemporalDictTensor

_ALIVE, _BORN = "alive", "born"
_OWN_NAMES = {"rewards": "reward", "terminations": "terminated", "truncations": "truncated"}
_ACTIONS = ("action", "last_action")
_JOINT = ("reward", *FLAGS)
_ALL_KEYS = "per_agent is for episodes of a PettingZooEnv, with all their keys"


class AgentSteps(NamedTuple):
    """The steps in which the agents of a group were alive, ordered by row, then time.

    Attributes:
        rows: int64 ``[N]``: the row of the agent.
        times: int64 ``[N]``: the step of the joint episode.
        lengths: int64 ``[B * A]``: number of steps of each agent.
        starts: bool ``[N]``: whether the agent's episode begins with the step.
        n_agents: A.
        others: Names of the other groups.
    """

    rows: Tensor
    times: Tensor
    lengths: Tensor
    starts: Tensor
    n_agents: int
    others: Collection[str]


def _steps_of_agents(joint: TemporalDictTensor, group: str) -> AgentSteps:
    """Return the steps in which the agents of a group were alive.

    Raises:
        SpecError: If the group does not exist.
    """
    n_elems, n_timesteps = joint.n_elems(), joint.n_timesteps()
    names = [key.rpartition("/") for key in joint if not key.startswith("_")]
    groups = [name for name, _, part in names if part == _ALIVE]
    if group not in groups:
        raise SpecError(
            f"key {join_key(group, _ALIVE)!r}, which marks the steps of each agent, is missing",
            fix=f"name a group: {', '.join(map(repr, groups))}" if groups else _ALL_KEYS,
        )
    refuse_missing("the episodes", list(joint), [born := join_key(group, _BORN)], _ALL_KEYS)
    alive = joint[join_key(group, _ALIVE)] & steps_within(joint.lengths, n_timesteps).unsqueeze(-1)
    n_agents = alive.shape[2]
    shape = n_elems * n_agents, n_timesteps
    alive, starts = (t.transpose(1, 2).reshape(shape) for t in (alive, joint[born]))
    rows, times = alive.nonzero(as_tuple=True)
    others = [name for name in groups if name != group]
    return AgentSteps(rows, times, alive.sum(1), starts[rows, times], n_agents, others)


def packed(
    joint: TemporalDictTensor, group: str, shared: Collection[str]
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Return the values of all agents' steps ``[N, ...]``, lengths, and infos, for ``per_agent``.

    Raises:
        SpecError: If the group does not exist, or the episodes lack a key that marks their ends.
    """
    steps = _steps_of_agents(joint, group)
    marks = [f"_{join_key(group, name)}" for name in ("terminations", "truncations")]
    needed = ["_terminated", "_truncated", *marks]
    refuse_missing("the episodes", list(joint), needed, _ALL_KEYS)
    n_agents, times = steps.n_agents, steps.times
    episodes = steps.rows.div(n_agents, rounding_mode="floor")
    own: dict[str, Tensor] = {}
    for key in joint:
        if key.removeprefix("_") in (*_JOINT, join_key(group, _ALIVE), join_key(group, _BORN)):
            continue
        name, is_groups = _name_in_group(key, group, steps.others)
        tensor = joint[key]
        if not group:
            head = name.removeprefix("_").partition("/")[0]
            is_groups = tensor.ndim > 2 and tensor.shape[2] == n_agents and head not in shared
        if is_groups:
            mark = "_" if name.startswith("_") else ""
            base = name.removeprefix("_")
            by_agent = tensor.transpose(1, 2).flatten(0, 1)
            own[mark + _OWN_NAMES.get(base, base)] = taken(by_agent, steps.rows, times)
        elif name:
            own[name] = taken(tensor, episodes, times)
    ends = {name: own[f"_{name}"] for name in ("terminated", "truncated")}
    is_cut = ~(ends["terminated"] | ends["truncated"])  # by the end of the joint episode
    for name, end in ends.items():
        own[f"_{name}"] = end | (is_cut & taken(joint[f"_{name}"], episodes, times))
    for mark in ("", "_"):
        own[f"{mark}done"] = own[f"{mark}terminated"] | own[f"{mark}truncated"]
    own["initial_state"], own["_initial_state"] = steps.starts, torch.zeros_like(steps.starts)
    rows = torch.arange(len(steps.lengths), device=steps.lengths.device)
    info = joint.info.index(rows.div(n_agents, rounding_mode="floor"))._tensors
    info["agent"] = rows % n_agents  # index in the group
    number = "lane" if "lane" in info else "episode"  # windows have lanes
    if number in info:
        info[number] = info[number] * n_agents + info["agent"]
    return own, steps.lengths, info


def _name_in_group(key: str, group: str, others: Collection[str]) -> tuple[str, bool]:
    """Return a key's name in a group (empty for other groups' keys), and whether it is owned."""
    if not group:
        return key, False
    mark, bare = ("_", key[1:]) if key.startswith("_") else ("", key)
    head, _, rest = bare.partition("/")
    if head in _ACTIONS:
        name, _, inner = rest.partition("/")
        kept = mark + (join_key(head, inner) if inner else head)
    else:
        name, kept = head, mark + rest
    if name == group:
        return kept, True
    return ("" if name in others else key), False


def joined(joint: TemporalDictTensor, values: Tensor, group: str) -> Tensor:
    """Scatter values ``[B * A, T', ...]`` of agents' own steps to ``[B, T, A, ...]``, else zero.

    Raises:
        SpecError: Unless there is one row per agent, at least as long as its episode.
    """
    steps = _steps_of_agents(joint, group)
    n_rows = len(steps.lengths)
    if not isinstance(values, Tensor) or values.ndim < 2 or values.shape[0] != n_rows:
        raise SpecError(f"values are {kind(values)}", fix=f"give one row per agent: [{n_rows}, T]")
    if values.shape[1] < longest(steps.lengths):
        message = f"values have {values.shape[1]} steps, agents have up to {longest(steps.lengths)}"
        raise SpecError(message, fix="give a value for every step of per_agent()")
    own = values[steps_within(steps.lengths, values.shape[1])]
    n_elems, n_timesteps, rest = joint.n_elems(), joint.n_timesteps(), values.shape[2:]
    result = values.new_zeros((n_rows * n_timesteps, *rest))
    as_signed(result).index_copy_(0, steps.rows * n_timesteps + steps.times, as_signed(own))
    return result.view(n_elems, steps.n_agents, n_timesteps, *rest).transpose(1, 2)
