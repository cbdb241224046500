"""A failed episode that can be repeated, and the file that holds it.

A file is a ``.npz`` archive as ``numpy.load`` reads it::

    header                          JSON as bytes: everything that is not an array
    actions/action                  [step, ...], one array per key
    rewards                         [step]
    observation/frame, ...          the last observation
    agent_info/<name>               the episode's row
    batch/observation/frame, ...    [n_lanes, ...], for failures of the agent

It contains no pickle: reading a file runs no code.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from rlpool.data.storage import NDArray
from rlpool.errors import SpecError, Where, described
from rlpool.machine.files import checked_target, file_at, replaced
from rlpool.record.tape import Tape, joined

CALLS = ("reset", "step", "agent", "initial_state")
"""The calls that can fail: two of an environment, two of an agent."""

_FORMAT, _VERSION = "rlpool crash capsule", 1
_GROUPS = ("actions", "observation", "agent_info", "batch")
_TEXTS = ("call", "env_type", "error", "traceback")
_PLAIN = (*_TEXTS, "seed", "worker_seed", "n_lanes", "first_step", "versions")
_TUPLE, _ARRAY = "__tuple__", "__array__"  # marks of types that JSON lacks


def library_versions() -> dict[str, str]:
    """Versions of what an episode depends on, in this process."""
    return {
        "rlpool": str(getattr(sys.modules.get("rlpool"), "__version__", "unknown")),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "gymnasium": gymnasium.__version__,
    }


@dataclass(frozen=True, eq=False, repr=False)
class CrashCapsule:
    """An episode up to the call that failed, for ``rlpool.replay_crash``.

    It is made where the failure happened and travels with the error as ``WorkerError.capsule``.
    All arrays are copies with the values at that moment. What the episode shared with other
    processes is not among them, and a replay reads what is there at its own time. A capsule can be
    pickled, and saved to a file that holds no pickle.

    Attributes:
        call: What failed: the environment's ``"reset"`` or ``"step"``, or the agent (``"agent"``
            for its call, ``"initial_state"``).
        where: Worker, lane, episode, step, seed and ``env_info``.
        error: What happened, in one line.
        traceback: The traceback, as text.
        seed: Seed that the episode was reset with; ``None`` if that is not known.
        worker_seed: The ``seed`` that ``create_env`` got there; ``None`` if it was not called.
        n_lanes: Environments of the worker.
        env_type: Name of the class that held the environments, such as ``"GymEnv"``.
        options: The row of ``env_info`` as the environment got it, ``None`` without any.
        agent_info: Name to value: the episode's row of ``agent_info``, as NumPy arrays.
        actions: ``"action"`` (or ``"action/..."``) to array ``[step, ...]``: the actions from
            ``first_step`` on, the last one being that of the step that failed if ``call`` is
            ``"step"``, and that of the step before if the agent failed.
        rewards: ``[step]``: the rewards of the steps that succeeded, from ``first_step`` on; NaN
            if unknown, as for environments that were stepped by hand.
        first_step: 0, or more if the episode was so long that its first actions were not kept.
        observation: Key to array: the lane's last observation. Empty if the reset failed.
        batch: For failures of the agent, all lanes of what it was called with:
            ``"observation/..."``, ``"agent_info/..."`` and ``"state/..."``, ``[n_lanes, ...]``.
        versions: Versions of the libraries there.

    Example:
        >>> class Broken(CountingEnv):
        ...     def step(self, action):
        ...         return super().step(action if self.t < 3 else {}["struck"])
        >>> def broken(seed):
        ...     return GymEnv([Broken()], seed)
        >>> try:
        ...     evaluate(create_agent(), broken, n_episodes=1)
        ... except EnvError as error:
        ...     capsule = error.capsule
        >>> capsule.call, capsule.rewards.tolist(), len(capsule.actions["action"])
        ('step', [1.0, 2.0, 3.0], 4)
    """

    call: str
    where: Where
    error: str
    traceback: str = ""
    seed: int | None = None
    worker_seed: int | None = None
    n_lanes: int = 1
    env_type: str = ""
    options: Mapping[str, Any] | None = None
    agent_info: Mapping[str, NDArray] = field(default_factory=dict)
    actions: Mapping[str, NDArray] = field(default_factory=dict)
    rewards: NDArray = field(default_factory=lambda: np.zeros(0, np.float32))
    first_step: int = 0
    observation: Mapping[str, NDArray] = field(default_factory=dict)
    batch: Mapping[str, NDArray] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=library_versions)

    @classmethod
    def of_tape(
        cls,
        tape: Tape,
        call: str,
        where: Where,
        failing: Mapping[str, NDArray] | None = None,
        **known: Any,
    ) -> CrashCapsule:
        """The capsule of a failure after the steps of a tape; ``told`` says what happened.

        Args:
            tape: The episode until then.
            call: What failed.
            where: Where it did.
            failing: The action of the step that failed, ``[1, ...]`` per key.
            known: Other attributes.
        """
        chunks = [chunk for chunk in (tape.actions, failing) if chunk]
        return cls(
            call=call,
            where=where._replace(seed=tape.seed),
            error="",
            seed=tape.seed,
            options=tape.options,
            actions=joined(chunks),
            rewards=tape.rewards,
            first_step=tape.first_step,
            observation=tape.observation,
            **known,
        )

    def told(self, error: str, traceback: str) -> CrashCapsule:
        """The same capsule with the error, in one line and as a traceback."""
        return replace(self, error=error, traceback=traceback)

    @property
    def n_actions(self) -> int:
        """Number of the actions."""
        return min((len(array) for array in self.actions.values()), default=0)

    def __repr__(self) -> str:
        return f"CrashCapsule({self.error}; {self.where}; {self.n_actions} actions)"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything into one file, which appears whole or not at all.

        Args:
            path: The file; one that exists is replaced.

        Returns:
            The path.

        Raises:
            SpecError: If ``options`` hold a value that a file cannot store, there is no such
                folder, or there is something else than a file.
            OSError: If writing fails.
        """
        arrays: dict[str, Any] = {"header": self._header(), "rewards": self.rewards}
        for group in _GROUPS:
            for key, array in getattr(self, group).items():
                arrays[f"{group}/{key}"] = np.asarray(array)
        with replaced(checked_target("path", path)) as unfinished, open(unfinished, "xb") as file:
            np.savez(file, **arrays)
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CrashCapsule:
        """Read what ``save`` wrote.

        Args:
            path: The file.

        Raises:
            SpecError: If the file cannot be read, or is not a complete capsule.
        """
        try:
            with open(file_at(path), "rb") as file, np.load(file, allow_pickle=False) as archive:
                return cls._of({key: archive[key] for key in archive.files})
        except Exception as error:  # a damaged archive raises anything
            if isinstance(error, OSError):
                why = f"cannot be read: {error.strerror or error}"
            else:
                why = f"is not a crash capsule ({described(error)})"
            raise SpecError(
                f"{os.fspath(path)!r} {why}",
                fix="pass a file that CrashCapsule.save() or crash_dir=... wrote",
            ) from error

    def _header(self) -> NDArray:
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            **{name: getattr(self, name) for name in _PLAIN},
            "where": {k: v for k, v in self.where._asdict().items() if k != "env_info"},
            "options": _encoded(self.options, "options"),
        }
        return np.frombuffer(json.dumps(header, indent=1).encode(), np.uint8)

    @classmethod
    def _of(cls, arrays: Mapping[str, NDArray]) -> CrashCapsule:
        header = json.loads(arrays["header"].tobytes(), object_hook=_decoded)
        if (header["format"], header["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"version {header['version']}, this rlpool reads {_VERSION}")
        plain, options = {name: header[name] for name in _PLAIN}, header["options"]
        where = Where(**header["where"], env_info=options)
        integers = (*where[:5], plain["seed"], plain["worker_seed"])
        if (
            plain["call"] not in CALLS
            or not all(isinstance(number, int | None) for number in integers)
            or not isinstance(where.node, str | None)
            or not isinstance(options, dict | None)
            or not isinstance(plain["n_lanes"], int)
        ):
            raise ValueError("its header is damaged")
        groups: dict[str, Any] = {group: {} for group in _GROUPS}
        for name, array in arrays.items():
            group, _, key = name.partition("/")
            if group in groups and key:
                groups[group][key] = array
        return cls(where=where, options=options, rewards=arrays["rewards"], **plain, **groups)


def _encoded(value: Any, path: str) -> Any:
    """A value as JSON can hold it.

    Raises:
        SpecError: Naming the part that it cannot hold.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        parts = [_encoded(part, f"{path}[{number}]") for number, part in enumerate(value)]
        return parts if isinstance(value, list) else {_TUPLE: parts}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufU":
        array = {_ARRAY: np.asarray(value).tolist(), "dtype": value.dtype.str}
        return array if isinstance(value, np.ndarray) else {**array, "is_scalar": True}
    is_dict = isinstance(value, Mapping) and all(type(key) is str for key in value)
    if is_dict and not {_TUPLE, _ARRAY}.intersection(value):
        return {key: _encoded(part, f"{path}[{key!r}]") for key, part in value.items()}
    raise SpecError(
        f"{path} of the failed episode holds a {type(value).__name__}, which a file of plain "
        "numbers and texts cannot store",
        fix="pickle the capsule instead, or pass numbers, texts, lists, dicts and arrays",
    )


def _decoded(value: dict[str, Any]) -> Any:
    """What a JSON object stands for, its parts decoded already."""
    if _TUPLE in value:
        return tuple(value[_TUPLE])
    if _ARRAY in value:
        array = np.array(value[_ARRAY], np.dtype(str(value["dtype"])))
        return array[()] if value.get("is_scalar") else array
    return value
