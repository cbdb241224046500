"""How an evaluation was made: what its figures depend on apart from the seeds of its episodes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import wrappers
from gymnasium.vector import VectorWrapper
from torch import nn

from rlpool.agents.agent import Agent
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import VecEnv
from rlpool.envs.vector_gym_env import VectorGymEnv, as_vec_env
from rlpool.errors import SpecError
from rlpool.machine.arguments import called_with_seed
from rlpool.machine.fingerprint import differences, fingerprint
from rlpool.manager.parallel_env import ParallelEnvManager

_ROOM_BYTES = 2**16
_MOST_CHARACTERS = 2**14
"""Of a specification or of wrappers; a digest takes the place of longer ones."""

_ONLOOKERS = (
    wrappers.OrderEnforcing,
    wrappers.PassiveEnvChecker,
    wrappers.RecordEpisodeStatistics,
    wrappers.RecordVideo,
)
"""Wrappers that change nothing of an episode."""

_INDIFFERENT = "n_envs", "num_envs", "n_environments", "num_environments", "render_mode"
"""Arguments of environments that do not decide about an episode."""


class Telling:
    """A ``create_env`` that tells the caller of what its environments are. It can be pickled.

    Args:
        create_env: Makes the environments.
        prepare: Is called with them, ``None`` for nothing.
    """

    def __init__(
        self, create_env: Callable[..., Any], prepare: Callable[[VecEnv], None] | None
    ) -> None:
        self._create_env, self._prepare = create_env, prepare
        self._told = torch.zeros(_ROOM_BYTES, dtype=torch.uint8, device="cpu")
        self._told.share_memory_()  # type: ignore[no-untyped-call]

    def __call__(self, seed: int, **env_args: Any) -> Any:
        """Make the environments."""
        env = as_vec_env(called_with_seed(self._create_env, seed, env_args), seed)
        if isinstance(env, VecEnv):
            if self._prepare is not None:
                self._prepare(env)
            told = _described(env)
            for key in ("spec", "wrappers"):
                if len(json.dumps(told[key])) > _MOST_CHARACTERS:
                    told[key] = _digest(told[key])
            text = json.dumps(told).encode()[:_ROOM_BYTES].ljust(_ROOM_BYTES)
            self._told.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return env

    @property
    def environment(self) -> dict[str, Any]:
        """What was told: ``spec``, ``package`` and ``n_lanes``; empty before that."""
        text = self._told.numpy().tobytes().strip(b" \0")
        told: dict[str, Any] = json.loads(text) if text else {}
        return told


def _described(env: VecEnv) -> dict[str, Any]:
    """What an environment says of itself; ``None`` for what is not known."""
    spec, around = None, None
    kind: type | None = type(env)
    if isinstance(env, GymEnv):
        with suppress(AttributeError):
            spec = env.attribute(0, "spec")
        with suppress(AttributeError):
            kind = type(env.attribute(0, "unwrapped"))
        around = _wrappers_of(env.outermost(0))
    elif isinstance(env, VectorGymEnv):
        spec, kind = env.vector_env.spec, type(env.vector_env.unwrapped)
        around = _wrappers_of(env.vector_env)
    elif isinstance(env, ParallelEnvManager):  # its environments are elsewhere
        env.remotes[0].send(("get_attr", {"attr": "spec"}))
        reply, found = env.remotes[0].recv()
        spec, kind = found if reply == "attr" else None, None
    return {
        "class": kind and _name_of(kind),
        "package": kind and _package_of(kind),
        "spec": spec
        and {
            "id": spec.id,
            "max_episode_steps": spec.max_episode_steps,
            "kwargs": plain(spec.kwargs),
        },
        "wrappers": around,
        "seeding": env.seeding,
        "n_lanes": env.n_lanes,
    }


def _wrappers_of(env: Any) -> dict[str, Any]:
    """Wrappers with the arguments that Gymnasium keeps of them, the innermost first."""
    found: list[Any] = []
    while isinstance(env, gymnasium.Wrapper | VectorWrapper):
        if not isinstance(env, _ONLOOKERS):
            found.insert(0, env)
        env = env.env
    return {
        f"{depth} {_name_of(type(each))}": plain(vars(each).get("_saved_kwargs"))
        for depth, each in enumerate(found, 1)
    }


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

    ``None`` if it holds no modules. Buffers that are not part of the ``state_dict`` are among them.
    """
    found, has_modules = hashlib.sha256(), False
    for number, module in enumerate(modules_of(agent)):
        has_modules = True
        tensors = {**dict(module.named_buffers()), **module.state_dict()}
        for name, tensor in sorted(tensors.items()):
            if isinstance(tensor, torch.Tensor):
                found.update(f"{number} {name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                found.update(_bytes_of(tensor))
    return f"sha256:{found.hexdigest()}" if has_modules else None


def _bytes_of(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()


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


def protocol_of(agent: Any, environment: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """What an evaluation says of itself: of what JSON is made.

    Args:
        agent: The agent.
        environment: What ``Telling`` was told, with the arguments of ``create_env``.
        **settings: Whatever else its episodes depend on.
    """
    return {
        "environment": dict(environment),
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
            if array.dtype.kind == "c":
                what = f"{key!r} in {name} is {array.dtype}, a record holds real numbers"
                raise SpecError(what, fix="pass real and imaginary parts under two keys")
            digest.update(f"{name} {key} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return {**found, "infos_digest": f"sha256:{digest.hexdigest()}"}


def plain(value: Any) -> Any:
    """An argument in JSON: functions and classes by name, other objects with a digest."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        parts = {key if isinstance(key, str) else str(plain(key)): value[key] for key in value}
        return {key: plain(part) for key, part in sorted(parts.items())}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "__qualname__"):
        return _name_of(value)
    with suppress(Exception):  # it cannot be pickled, or refers to itself
        return f"{_name_of(type(value))} {_digest(value)}"
    return _name_of(type(value))


class _ByValue(pickle.Pickler):
    """Writes the same bytes for equal objects, in every process."""

    def persistent_id(self, value: Any) -> Any:
        if hasattr(value, "__qualname__"):  # a function or a class
            return _name_of(value)
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), _bytes_of(value)
        if isinstance(value, set | frozenset):
            return sorted(map(_digest, value))
        return None


def _digest(value: Any) -> str:
    file = io.BytesIO()
    pickler = _ByValue(file, protocol=4)
    pickler.fast = True  # whether parts are the same object does not matter
    pickler.dump(value)
    return f"sha256:{hashlib.sha256(file.getvalue()).hexdigest()}"


def _name_of(value: Any) -> str:
    name = value.__qualname__.replace("<listcomp>.", "")  # which Python 3.12 leaves out
    module = getattr(value, "__module__", None)
    if module in ("__main__", "__mp_main__"):  # what the program's file is called if it is imported
        main: Any = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else module
    return f"{module}.{name}"


def environment_differences(
    recorded: Mapping[str, Any], here: Mapping[str, Any], but: Iterable[str] = ()
) -> list[str]:
    """Where two environments differ in what decides about an episode, with both sides.

    What one of them does not know is left out, and what a record of an older version does not say.

    Args:
        recorded: What an evaluation says of its environment.
        here: What another one says.
        but: Keys that do not matter.
    """
    known = {key for key in recorded if None not in (recorded[key], here.get(key))}.difference(but)
    one, other = ({key: _deciding(each[key]) for key in known} for each in (recorded, here))
    return differences(one, other)


def _deciding(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _deciding(part) for key, part in value.items() if key not in _INDIFFERENT}


def refuse_unseeded(environment: Mapping[str, Any], what: str) -> None:
    """Raise for environments whose episodes cannot be run again one by one.

    Args:
        environment: What an evaluation says of its environment.
        what: What needs that.
    """
    seeding = environment.get("seeding", "episode")
    if seeding != "episode":
        raise SpecError(
            f"{what} needs a seed for every episode, the environments have seeding={seeding!r}",
            fix="use environments that can be reset one by one, such as those of a SyncVectorEnv",
        )
