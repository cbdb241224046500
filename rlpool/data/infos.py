"""``agent_info`` and ``env_info``: named values, one row per episode or lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlpool.data.dict_tensor import DictTensor
from rlpool.data.specs import fitted
from rlpool.data.storage import NDArray
from rlpool.errors import SpecError

_AS_ARRAY = "pass an array or a tensor, which keeps its dtype"

Info: TypeAlias = DictTensor | Mapping[str, Any] | None
"""Tensors, NumPy arrays or (nested) lists of numbers by name, with one row per episode or lane.

A number, a bool, or a 0-d tensor or array applies to all rows. Python ints become int64, Python
floats torch's default dtype (float32, whose range they must not exceed), bools bool; tensors and
arrays keep their dtype.
"""


WINDOW_KEYS = ("batcher", "lane", "episode", "first_step")  # origin of a window's rows

Infos = tuple[dict[str, NDArray], dict[str, NDArray]]
"""``(agent_info, env_info)`` as arrays by key."""


def info_rows(name: str, info: Info, n_rows: int | None) -> DictTensor:
    """Copy an info to tensors ``[n_rows, ...]`` on the CPU.

    Args:
        name: Its name in errors.
        info: The info, ``None`` for none.
        n_rows: Expected number of rows; ``None`` for any number common to all keys.

    Raises:
        SpecError: If a value is not numeric, has a dtype that NumPy lacks, or has another number of
            rows; the message names the key.
    """
    if info is None:
        return DictTensor()
    if not isinstance(info, DictTensor | Mapping):
        raise SpecError(
            f"{name} should be a DictTensor or a dict, got {type(info).__name__}",
            fix=f"name its values: {name}={{'task': ...}}",
        )
    tensors = {key: _copied(name, key, value) for key, value in info.items()}
    if n_rows is None:
        n_rows = next((tensor.shape[0] for tensor in tensors.values() if tensor.ndim), 1)
    for key, tensor in tensors.items():
        if not tensor.ndim:
            tensors[key] = tensor.repeat(n_rows)
        elif tensor.shape[0] != n_rows:
            raise SpecError(
                f"{key!r} in {name} has {tensor.shape[0]} rows, {n_rows} were expected",
                fix=f"give one row for each, or one number for all; or omit {name}",
            )
    return DictTensor(tensors)


def as_infos(agent_info: Info, env_info: Info, n_rows: int) -> Infos:
    """Copy infos to arrays, so that the caller may change its tensors afterwards.

    Raises:
        SpecError: As in ``info_rows``.
    """
    if agent_info is None and env_info is None:
        return {}, {}
    rows = info_rows("agent_info", agent_info, n_rows), info_rows("env_info", env_info, n_rows)
    agent_arrays, env_arrays = ({k: t.numpy() for k, t in part.items()} for part in rows)
    return agent_arrays, env_arrays


def part_of(infos: Infos, rows: range) -> Infos:
    """Return views of consecutive rows of infos."""
    agent_info, env_info = (
        {key: array[rows.start : rows.stop] for key, array in info.items()} for info in infos
    )
    return agent_info, env_info


def options_of(env_info: DictTensor | Mapping[str, Any], row: int) -> dict[str, Any] | None:
    """Convert one row of ``env_info`` to Python values, the ``options`` of a reset.

    Args:
        env_info: Tensors or arrays ``[n, ...]``.
        row: Index of the row.

    Returns:
        The options, ``None`` if ``env_info`` is empty.
    """
    return {key: rows[row].tolist() for key, rows in env_info.items()} or None


def _copied(name: str, key: Any, value: Any) -> Tensor:
    """Copy a value to a tensor."""
    if not isinstance(key, str):
        raise SpecError(f"key {key!r} in {name} is not a string", fix="name values by strings")
    try:
        tensor = _tensor(value)
        tensor.numpy()  # fails for dtypes that NumPy lacks
    except SpecError as error:
        raise SpecError(f"{key!r} in {name}: {error.what}", fix=_AS_ARRAY) from None
    except (TypeError, ValueError, RuntimeError) as error:
        message, _, _ = str(error).partition("\n")
        if isinstance(value, Tensor):
            message, fix = f"has dtype {value.dtype}, which NumPy lacks", f"pass {key}.float()"
        else:
            message = f"is {type(value).__name__} {value!r:.40}, not numbers ({message:.80})"
            fix = "give a tensor, an array or a list of numbers, with rows of equal length"
        raise SpecError(f"{key!r} in {name} {message}", fix=fix) from None
    return tensor


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    array = np.array(value)
    array = array.astype(array.dtype.newbyteorder("="))
    if not hasattr(value, "__array__") and array.dtype.kind == "f":  # Python floats
        array = fitted("it", array, torch.empty(0, device="cpu").numpy().dtype)
    return torch.from_numpy(array)
