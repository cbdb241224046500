"""How an evaluation was made: what its figures depend on apart from the seeds of its episodes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from rlpool.agents.agent import Agent
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import VecEnv
from rlpool.envs.vector_gym_env import VectorGymEnv, as_vec_env
from rlpool.machine.arguments import called_with_seed
from rlpool.machine.fingerprint import fingerprint

_ROOM_BYTES = 2**16


class Telling:
    """A ``create_env`` that tells the caller of what its environments are. It can be pickled.

    Args:
        create_env: Makes the environments.
    """

    def __init__(self, create_env: Callable[..., Any]) -> None:
        self._create_env = create_env
        self._told = torch.zeros(_ROOM_BYTES, dtype=torch.uint8, device="cpu")
        self._told.share_memory_()  # type: ignore[no-untyped-call]

    def __call__(self, seed: int, **env_args: Any) -> Any:
        """Make the environments."""
        env = as_vec_env(called_with_seed(self._create_env, seed, env_args), seed)
        if isinstance(env, VecEnv):
            text = json.dumps(_described(env)).encode()[:_ROOM_BYTES].ljust(_ROOM_BYTES)
            self._told.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return env

    @property
    def environment(self) -> dict[str, Any]:
        """What was told: ``spec``, ``package`` and ``n_lanes``; empty before that."""
        text = self._told.numpy().tobytes().strip(b" \0")
        told: dict[str, Any] = {}
        with suppress(ValueError):  # a specification too long to be told
            told = json.loads(text) if text else {}
        return told


def _described(env: VecEnv) -> dict[str, Any]:
    spec, kind = None, type(env)
    if isinstance(env, GymEnv):
        with suppress(AttributeError):
            spec = env.attribute(0, "spec")
        with suppress(AttributeError):
            kind = type(env.attribute(0, "unwrapped"))
    elif isinstance(env, VectorGymEnv):
        spec, kind = env.vector_env.spec, type(env.vector_env.unwrapped)
    name = f"{kind.__module__}.{kind.__qualname__}"
    found: dict[str, Any] = {"class": name, "package": _package_of(kind), "spec": None}
    found["n_lanes"] = env.n_lanes
    if spec is not None:
        found["spec"] = {
            "id": spec.id,
            "max_episode_steps": spec.max_episode_steps,
            "kwargs": json.loads(json.dumps(spec.kwargs, default=repr, sort_keys=True)),
        }
    return found


def _package_of(kind: type) -> str | None:
    """The distribution that a class comes from, with its version."""
    top = kind.__module__.partition(".")[0]
    with suppress(importlib.metadata.PackageNotFoundError):  # usually it has the module's name
        return f"{top} {importlib.metadata.version(top)}"
    for name in importlib.metadata.packages_distributions().get(top, ()):
        return f"{name} {importlib.metadata.version(name)}"
    return None


def digest_of(agent: Any) -> str | None:
    """SHA-256 of names, dtypes, shapes and values of all parameters and buffers of an agent.

    ``None`` if it holds no modules.
    """
    found, has_modules = hashlib.sha256(), False
    for number, module in enumerate(modules_of(agent)):
        has_modules = True
        for name, tensor in sorted(module.state_dict().items()):
            if isinstance(tensor, torch.Tensor):
                values = tensor.detach().cpu().contiguous()
                found.update(f"{number} {name} {values.dtype} {list(values.shape)}\n".encode())
                found.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"sha256:{found.hexdigest()}" if has_modules else None


def modules_of(agent: Any) -> Iterator[nn.Module]:
    """The outermost modules that an agent holds, wherever it does so."""
    seen: set[int] = set()
    parts = [agent]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, nn.Module):
            yield part
        if isinstance(part, Agent):
            parts += vars(part).values()
        elif isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part


def protocol_of(
    agent: Any, environment: Mapping[str, Any], env_args: Mapping[str, Any], **settings: Any
) -> dict[str, Any]:
    """What an evaluation says of itself: of what JSON is made.

    Args:
        agent: The agent.
        environment: What ``Telling`` was told.
        env_args: Arguments of ``create_env``.
        **settings: Whatever else its episodes depend on.
    """
    args = json.loads(json.dumps(dict(env_args), default=_plain, sort_keys=True))
    return {
        "environment": {**environment, "args": args},
        "agent": type(agent).__qualname__,
        "parameters": digest_of(agent),
        "machine": fingerprint(),
        **settings,
    }


def described_infos(infos: tuple[Mapping[str, Any], Mapping[str, Any]]) -> dict[str, Any]:
    """Dtypes of ``agent_info`` and ``env_info``, and a digest of their rows."""
    found, digest = {}, hashlib.sha256()
    for name, info in zip(("agent_info", "env_info"), infos, strict=True):
        found[name] = {key: str(array.dtype) for key, array in info.items()}
        for key, array in sorted(info.items()):
            digest.update(f"{name} {key} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return {**found, "infos_digest": f"sha256:{digest.hexdigest()}"}


def _plain(value: Any) -> Any:
    """A value of ``env_args`` in JSON: arrays as lists, anything else by its name."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Where two protocols differ, with both sides."""
    found: list[str] = []
    for key in sorted(one.keys() | other.keys()):
        first, second = one.get(key), other.get(key)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            found += differences(first, second, f"{prefix}{key}.")
        elif json.dumps(first) != json.dumps(second):  # not a number equals itself here
            found.append(f"{prefix}{key}: {first!r:.80} and {second!r:.80}")
    return found
