"""Trajectories and samples of a pool in TorchRL's layout, and back.

::

    rlpool                          TorchRL
    frame, _frame                   "observation", ("next", "observation")
    image/left, _image/left         ("image", "left"), ("next", "image", "left")
    action, any output of the agent the same name
    _reward, _terminated, ...       ("next", "reward"), ("next", "terminated"), ... [B, T, 1]
    reward, done, ...               "reward", "done", ... [B, T, 1]
    initial_state                   "is_init", [B, T, 1]
    lengths                         ("collector", "mask"), bool [B, T]
    info                            ("info", ...), the same in every step of a row
    weight (of a pool's sample)     "priority_weight"

A value after the step, whose key has a leading ``_``, is an entry of "next". The entry
("collector", "traj_ids") numbers the episodes; it follows from ``_done`` and the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlpool.data import rows as base
from rlpool.data.dict_tensor import DictTensor
from rlpool.data.rows import kind, steps_within
from rlpool.data.specs import DEFAULT_OBSERVATION_KEY, FLAGS
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError

__all__ = ["from_torchrl", "to_torchrl"]

_NEXT, _COLLECTOR, _INFO, _OBSERVATION = "next", "collector", "info", "observation"
_MASK = f"{_COLLECTOR}/mask"
_SIGNALS = ("reward", *FLAGS)
"""Keys of one number per step, which have a last dimension of 1 in TorchRL."""


def to_torchrl(
    batch: TemporalDictTensor | DictTensor, *, observation: str = DEFAULT_OBSERVATION_KEY
) -> Any:
    """A ``TensorDict`` in TorchRL's layout, of the same tensors.

    For ``torchrl.objectives``, replay buffers and samplers. Give a buffer the steps without the
    padding: ``buffer.extend(data[data["collector", "mask"]])``.

    Args:
        batch: Trajectories ``[B, T, ...]`` of a batcher or of ``Pool.sample_sequences``, or
            transitions ``[B, ...]`` of ``Pool.sample``.
        observation: The key that becomes ``"observation"``. By default that of observations that
            are no dict; where they are one, every key keeps its name.

    Returns:
        A ``tensordict.TensorDict`` with batch size ``[B, T]`` and the names ``[None, "time"]``, or
        ``[B]``. Its tensors are views: nothing is copied but ``("collector", "mask")`` (bool, true
        for steps, false for padding) and ``("collector", "traj_ids")`` (int64), which are made.
        Reward and flags, ``[B, T]`` here, are ``[B, T, 1]`` there. ``info`` is expanded to every
        step; where T is 0, it is left out.

    Raises:
        ImportError: If tensordict is not installed.
        SpecError: If two keys would get the same name, one is a name that the layout needs, a
            reward or flag ends with a dimension of 1, which means one number per step there, or
            there is no key ``observation``.

    Example:
        >>> steps = {"frame": torch.zeros(1, 3, 4), "_reward": torch.ones(1, 3)}
        >>> data = to_torchrl(TemporalDictTensor(steps))
        >>> data["observation"].shape, data["next", "reward"].shape
        (torch.Size([1, 3, 4]), torch.Size([1, 3, 1]))
    """
    if isinstance(batch, TemporalDictTensor):
        size = [batch.n_elems(), batch.n_timesteps()]
        reserved = [_COLLECTOR, _INFO]
    elif isinstance(batch, DictTensor):
        size, reserved = [batch._n_rows()], []
    else:
        raise SpecError(
            f"to_torchrl() got {kind(batch)}", fix="pass a TemporalDictTensor or a DictTensor"
        )
    if observation != DEFAULT_OBSERVATION_KEY and observation not in batch:
        raise SpecError(
            f"there is no key {observation!r} to become TorchRL's observation: {list(batch)}",
            fix="pass one of these keys as observation, or leave it out",
        )
    names = _names(observation, len(size))
    _check_keys(batch, names, reserved)
    _check_signals(batch, len(size))
    if isinstance(batch, TemporalDictTensor):
        _check_nesting(list(batch.info), "keys of info")
    entries = {_path(key, names): _with_last_one(key, t, len(size)) for key, t in batch.items()}
    if not isinstance(batch, TemporalDictTensor):
        return base.to_tensordict(entries, size, extra="torchrl")
    is_step = steps_within(batch.lengths, size[1])
    entries[_COLLECTOR, "mask"] = is_step
    entries[_COLLECTOR, "traj_ids"] = _episode_numbers(batch, is_step)
    for key, tensor in batch.info.items() if size[1] else ():
        path = (_INFO, *key.split("/"))
        entries[path] = tensor.unsqueeze(1).expand(*size, *tensor.shape[1:])
    return base.to_tensordict(entries, size, extra="torchrl", names=[None, "time"])


def from_torchrl(
    tensordict: Any, *, observation: str = DEFAULT_OBSERVATION_KEY
) -> TemporalDictTensor | Any:  # or a DictTensor, which type checkers cannot know
    """The tensors of a ``TensorDict`` in TorchRL's layout, under the names of rlpool.

    Args:
        tensordict: What ``to_torchrl`` made, a collector of TorchRL returned, or a replay buffer.
            Its last batch dimension is time if it has that name, as collectors give it, or if it
            has two or more batch dimensions: reshape a ``SliceSampler``'s to ``[B, T]``.
        observation: The key for ``"observation"``; the same as for ``to_torchrl``.

    Returns:
        With time, trajectories ``[B, T, ...]``, otherwise a ``DictTensor`` ``[B, ...]``. The
        tensors are views, and ``from_torchrl(to_torchrl(batch))`` has the keys and bits of
        ``batch``, but for ``info`` where T is 0. Of trajectories, the mask becomes ``lengths``, and
        other entries of the collector are left out; without time, they are keys such as
        ``collector/mask``. Entries that are no tensors are left out. A reward or flag ``[B, T, 1]``
        or ``[B, 1]`` loses its last dimension.

    Raises:
        SpecError: If it is no TensorDict, has no batch dimension, one before the last is named
            time, or it has a mask that is not true for the first steps of every row.
    """
    entries = base.from_tensordict(tensordict)
    n_leading = tensordict.ndim
    if not n_leading:
        raise SpecError("the TensorDict has no batch dimension", fix="unsqueeze(0) adds one")
    if "time" in tensordict.names[:-1]:
        raise SpecError(
            f"time is not the last batch dimension of the TensorDict: {tensordict.names}",
            fix=f"pass data.transpose({tensordict.names.index('time')}, -1)",
        )
    is_temporal = n_leading > 1 or tensordict.names[-1] == "time"
    if is_temporal and n_leading != 2:  # one environment, or several dimensions of them
        shape = (-1, tensordict.shape[-1])
        entries = {key: t.reshape(*shape, *t.shape[n_leading:]) for key, t in entries.items()}
    names = {theirs: ours for ours, theirs in _names(observation, 1 + is_temporal).items()}
    if not is_temporal:
        return DictTensor(_named(entries.items(), names, 1))
    lengths = _lengths_of(_mask_of(entries))
    steps, info = {}, {}
    for key, tensor in entries.items():
        first, is_nested, rest = key.partition("/")
        if first == _INFO and is_nested:
            info[rest] = tensor
        elif first != _COLLECTOR:
            steps[key] = tensor
    batch = TemporalDictTensor(_named(steps.items(), names, 2), lengths)
    is_step = steps_within(batch.lengths, batch.n_timesteps())
    told = {key: _first_step(key, tensor, is_step) for key, tensor in info.items()}
    return TemporalDictTensor(batch._tensors, batch.lengths, told)


# Names --------------------------------------------------------------------------------------------


def _names(observation: str, n_leading: int) -> dict[str, str]:
    """Keys that have another name in TorchRL."""
    names = {observation: _OBSERVATION, "initial_state": "is_init"}
    # In trajectories, a weight is whatever the environment calls so.
    return {**names, "weight": "priority_weight"} if n_leading == 1 else names


def _check_keys(keys: Iterable[str], names: Mapping[str, str], reserved: list[str]) -> None:
    """Refuse keys that could not be told apart afterwards."""
    plain = {key: key.removeprefix("_") for key in keys}
    for key, name in plain.items():
        first = name.partition("/")[0]
        if first in names.values() and names.get(name) != first:
            ours = next(ours for ours, theirs in names.items() if theirs == first)
            fix = f"rename the key, or {ours!r} if there is one"
            if first == _OBSERVATION:
                fix = "to_torchrl(batch, observation='observation') keeps its name"
            raise SpecError(f"there is a key {key!r}, which TorchRL has for {ours!r}", fix=fix)
        if first == _NEXT or (key == name and first in reserved):
            raise SpecError(
                f"there is a key {key!r}, and TorchRL's layout needs {first!r}", fix="rename it"
            )
    _check_nesting(plain, "keys")


def _check_nesting(keys: Collection[str], called: str) -> None:
    """Refuse keys of which one would be a tensor and a TensorDict."""
    for key in keys:
        parts = key.split("/")
        outer = ["/".join(parts[:n]) for n in range(1, len(parts))]
        if taken := [key for key in outer if key in keys]:
            raise SpecError(
                f"the {called} {taken[0]!r} and {key!r} cannot both be in a TensorDict",
                fix="rename one of them",
            )


def _check_signals(batch: TemporalDictTensor | DictTensor, n_leading: int) -> None:
    """Refuse signals that would come back without their last dimension."""
    for key, tensor in batch.items():
        if _has_last_one(key.removeprefix("_"), tensor, n_leading):
            raise SpecError(
                f"{key!r} is {kind(tensor)}, which TorchRL has for one number per step",
                fix=f"batch.set({key!r}, batch[{key!r}].squeeze(-1))",
            )


def _path(key: str, names: Mapping[str, str]) -> tuple[str, ...]:
    """The place of a key in TorchRL's layout."""
    name = key.removeprefix("_")
    path = (names.get(name, name)).split("/")
    return tuple(path) if name == key else (_NEXT, *path)


def _named(
    entries: Iterable[tuple[str, Tensor]], names: Mapping[str, str], n_leading: int
) -> dict[str, Tensor]:
    """Entries by our keys, with signals of one number per step."""
    named: dict[str, Tensor] = {}
    for path, tensor in entries:
        name = path.removeprefix(f"{_NEXT}/")
        ours = names.get(name, name)
        key = ours if name == path else f"_{ours}"
        if key in named:
            raise SpecError(f"two entries would be {key!r}, one is {path!r}", fix="rename one")
        named[key] = tensor.squeeze(-1) if _has_last_one(ours, tensor, n_leading) else tensor
    return named


def _has_last_one(name: str, tensor: Tensor, n_leading: int) -> bool:
    """Whether something is one number per step, with a last dimension for it."""
    return name in _SIGNALS and tensor.ndim == n_leading + 1 and tensor.shape[-1] == 1


def _with_last_one(key: str, tensor: Tensor, n_leading: int) -> Tensor:
    is_signal = key.removeprefix("_") in _SIGNALS and tensor.ndim == n_leading
    return tensor.unsqueeze(-1) if is_signal else tensor


# Masks --------------------------------------------------------------------------------------------


def _episode_numbers(batch: TemporalDictTensor, is_step: Tensor) -> Tensor:
    """int64 ``[B, T]``: the number of every step's episode; padding has that of the last step."""
    is_first = torch.zeros_like(is_step)
    is_first[:, :1] = True
    if "_done" in batch:
        is_done = (batch["_done"] != 0).unsqueeze(-1).flatten(2).all(2)  # of all agents
        is_first[:, 1:] = is_done[:, :-1] & is_step[:, 1:]
    return is_first.flatten().cumsum(0).view(is_step.shape) - 1


def _mask_of(entries: dict[str, Tensor]) -> Tensor | None:
    """The mask, taken out of the entries, where TorchRL puts it; ``None`` if there is none."""
    has_collector = any(key.startswith(f"{_COLLECTOR}/") for key in entries)
    return entries.pop(_MASK if has_collector else "mask", None)


def _lengths_of(mask: Tensor | None) -> Tensor | None:
    """int64 ``[B]``, from a bool mask ``[B, T]``."""
    if mask is None:
        return None
    if mask.dtype is not torch.bool or mask.ndim != 2:
        raise SpecError(f"the mask is {kind(mask)}", fix="make it bool [B, T], or rename it")
    lengths = mask.sum(1)
    if not torch.equal(mask, steps_within(lengths, mask.shape[1])):
        raise SpecError(
            "the mask is true for steps that follow padding",
            fix="begin every row with its first step, as split_trajectories of TorchRL does",
        )
    return lengths


def _first_step(key: str, tensor: Tensor, is_step: Tensor) -> Tensor:
    """``[B, ...]``: the value of each row, from one that is the same in all of its steps."""
    first = tensor[:, :1]
    is_same = (tensor == first) | ((tensor != tensor) & (first != first))  # NaN is the same as NaN
    differs = (~is_same).unsqueeze(-1).flatten(2).any(2)
    if (differs & is_step).any():
        raise SpecError(
            f"entry ('info', {key!r}) changes within a row, and info has one value per row",
            fix="give it another name than info",
        )
    return first[:, 0]
