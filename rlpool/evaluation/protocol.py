"""How an evaluation was made: arguments, environment, and digests of the policy and the infos."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from rlpool.agents.agent import Agent
from rlpool.data.infos import Infos
from rlpool.envs.description import plain
from rlpool.machine.torch_settings import default_device, torch_settings


def protocol_of(
    agent: Agent,
    environment: Mapping[str, Any],
    env_args: Mapping[str, Any] | None,
    rows: Infos,
    **arguments: Any,
) -> dict[str, Any]:
    """What the episodes of an evaluation follow from, as JSON says it.

    Args:
        agent: The agent.
        environment: What a batcher says of its environments.
        env_args: Arguments of ``create_env``.
        rows: ``agent_info`` and ``env_info``.
        **arguments: Other arguments of ``evaluate``.
    """
    dtypes = [{key: str(array.dtype) for key, array in info.items()} for info in rows]
    libraries = sys.modules["rlpool"], torch, np, gymnasium
    return {
        **arguments,
        "env_args": plain(env_args or {}),
        "environment": dict(environment),
        "agent": type(agent).__qualname__,
        "parameters": digest_of(agent),
        "agent_info": dtypes[0],
        "env_info": dtypes[1],
        "infos_digest": digest_of([dict(info) for info in rows]),
        "torch": {
            "default_device": str(default_device()),
            **{name: str(value) for name, value in torch_settings().items()},
        },
        "versions": {each.__name__: str(each.__version__) for each in libraries},
    }


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object consists of, by path: of agents, modules, dicts, lists and tuples."""
    seen: set[int] = set()
    left = [("", value)]
    while left:
        path, part = left.pop()
        held: Mapping[Any, Any] = {}
        if isinstance(part, Agent | nn.Module):
            held = vars(part)
        elif isinstance(part, Mapping):
            held = part
        elif isinstance(part, list | tuple):
            held = dict(enumerate(part))
        if held and id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        left += [(f"{path}/{key}", held[key]) for key in sorted(held, key=str)]


def digest_of(value: Any) -> str:
    """SHA-256 of all tensors, arrays, numbers and texts that an object consists of.

    Whether modules are in training mode does not matter; other objects count by their class.
    """
    digest = hashlib.sha256()
    for path, part in parts_of(value):
        if path.endswith("/training"):
            continue
        data = b""
        if isinstance(part, torch.Tensor):
            flat = part.detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes()
            what = f"{part.dtype} {list(part.shape)}"
        elif isinstance(part, np.ndarray | np.generic) and part.dtype.kind in "biufcSU":
            data, what = part.tobytes(), f"{part.dtype.str} {list(part.shape)}"
        elif part is None or isinstance(part, str | bytes | int | float):
            what = repr(part)
        else:
            what = getattr(part, "__qualname__", type(part).__qualname__)
        digest.update(f"{path} {what}\n".encode())
        digest.update(data)
    return f"sha256:{digest.hexdigest()}"


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Where two things that JSON can say differ, with both sides."""
    found: list[str] = []
    for key in sorted(one.keys() | other.keys()):
        first, second = one.get(key), other.get(key)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            found += differences(first, second, f"{prefix}{key}.")
        elif json.dumps(first) != json.dumps(second):  # not a number equals itself here
            found.append(f"{prefix}{key}: {first!r:.80} and {second!r:.80}")
    return found
