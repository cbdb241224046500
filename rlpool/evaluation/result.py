"""Results of an evaluation by episode, and their files: JSON, not pickle.

``Evaluation.save`` writes one document::

    {
        "format": "rlpool evaluation",
        "version": 2,
        "protocol": {...},
        "episodes": [
            {
                "episode": 0,
                "seed": ...,
                "return": ...,
                "length": ...,
                "terminated": ...,
                "success": ...,
                "error": ...,
                "agent_info": {...},
                "env_info": {...},
                "infos": {...},
            },
            ...,
        ],
    }

``evaluate(record=path)`` appends to a file with the same content in lines: the first line has
everything but the episodes, and each further line one episode. Numbers have enough digits to read
back the same bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlpool.errors import SpecError, WorkerError
from rlpool.evaluation.figures import Summary, differences, summary_of

_FORMAT, _VERSION = "rlpool evaluation", 2

Entry = dict[str, Any]
"""The record of an episode."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Results of ``evaluate``, by episode.

    Attributes:
        returns: float32 ``[n_episodes]``: undiscounted sums of rewards.
        lengths: int64 ``[n_episodes]``, in steps.
        successes: bool ``[n_episodes]``, ``None`` if the environments do not report successes.
        seeds: int64 ``[n_episodes]``: the seed of each episode's reset.
        failed: bool ``[n_episodes]``: episodes whose environment failed for good, ``None`` with
            ``on_env_error="raise"``.
        failures: Their errors, in order, for the episodes run by this call.
        entries: The record of each episode: the above, ``terminated`` (else it was truncated),
            ``error``, ``infos`` and its rows of ``agent_info`` and ``env_info``.
        protocol: Arguments, the environment's specification, versions, and digests of the policy's
            parameters and of the infos.

    Example:
        >>> lengths = {"length": [2, 3]}
        >>> evaluation = evaluate(create_agent(), create_env, n_episodes=2, env_info=lengths)
        >>> evaluation.returns, evaluation.lengths
        (tensor([3., 6.]), tensor([2, 3]))
    """

    returns: Tensor
    lengths: Tensor
    successes: Tensor | None
    seeds: Tensor
    failed: Tensor | None = None
    failures: tuple[WorkerError, ...] = ()
    entries: Sequence[Entry] = field(default=(), repr=False)
    protocol: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of_entries(
        cls,
        entries: Sequence[Entry],
        protocol: Mapping[str, Any],
        failures: Sequence[WorkerError] = (),
    ) -> Evaluation:
        """Make the evaluation that consists of these episodes.

        Args:
            entries: Their records.
            protocol: The protocol.
            failures: Errors of failed episodes, where still known.
        """
        success = [entry["success"] for entry in entries]
        on_cpu = partial(torch.tensor, device="cpu")
        can_fail = protocol.get("on_env_error", "raise") != "raise"
        return cls(
            returns=on_cpu([entry["return"] for entry in entries], dtype=torch.float32),
            lengths=on_cpu([entry["length"] for entry in entries]),
            successes=None if None in success else on_cpu(success),
            seeds=on_cpu([entry["seed"] for entry in entries]),
            failed=on_cpu([bool(entry["error"]) for entry in entries]) if can_fail else None,
            failures=tuple(failures),
            entries=tuple(entries),
            protocol=protocol,
        )

    @property
    def n_failed(self) -> int:
        """Number of episodes that failed for good."""
        return 0 if self.failed is None else int(self.failed.sum())

    def summary(self, *, failures: str | float | None = None) -> Summary:
        """Compute mean, median, interquartile mean and spread of the returns, with intervals.

        The 95 % intervals are a bootstrap (BCa) for the mean and Wilson's for the success rate.
        They cover episodes of one agent, not the variation between training runs. Needs the extra
        ``evaluation``.

        Args:
            failures: Treatment of episodes that failed for good: "exclude", or the return that they
                get (their success is kept). Required if there are any.

        Raises:
            SpecError: If there are such episodes and ``failures`` is missing.

        Example:
            >>> lengths = {"length": [2, 3, 4, 5]}
            >>> evaluation = evaluate(create_agent(), create_env, n_episodes=4, env_info=lengths)
            >>> evaluation.summary().median
            8.0
        """
        return summary_of(self, failures)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, completely or not at all.

        Raises:
            SpecError: If the folder does not exist, or the file cannot be written there.

        Example:
            >>> evaluate(create_agent(), create_env, n_episodes=2).save("evaluation.json")
            >>> Evaluation.load("evaluation.json").returns
            tensor([10., 10.])
        """
        content = {**_header(self.protocol), "episodes": list(self.entries)}
        target = checked_target("path", path)
        unfinished = target.with_name(f".{target.name}.unfinished")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(unfinished, target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Evaluation:
        """Read a file of ``save``, or a complete ``record`` of ``evaluate``.

        Raises:
            SpecError: For another format or version, and an incomplete record.
        """
        data = Path(path).read_bytes()
        try:
            content = json.loads(data)
        except ValueError:  # in lines
            content = {}
        entries = content.get("episodes") if isinstance(content, dict) else None
        if entries is None:
            content, *entries = _parsed_lines(path, data)
        n_found, n_episodes = len(entries), _checked(path, content, entries)["n_episodes"]
        if n_found < n_episodes:
            message = f"{path} has {n_found} of {n_episodes} episodes"
            raise SpecError(message, fix="call evaluate with this record again: it runs the rest")
        return cls.of_entries(entries, content["protocol"])


def checked_target(argument: str, path: str | os.PathLike[str]) -> Path:
    """Return the file to write that an argument names, with links resolved.

    Args:
        argument: Name of the argument.
        path: Its value.

    Raises:
        SpecError: If the file cannot be written, or is not a file, such as a pipe.
    """
    target = Path(path).resolve()
    is_free = target.is_file() or not target.exists()
    if not is_free or not os.access(target if target.exists() else target.parent, os.W_OK):
        why = "it is not a file, its folder does not exist, or this process may not write there"
        message = f"{argument}={str(path)!r} cannot be written: {why}"
        raise SpecError(message, fix="choose another path")
    return target


def begin_record(path: Any, protocol: Mapping[str, Any], n_together: int) -> list[Entry]:
    """Write the first line of a record, or read the existing episodes.

    An incomplete last line is removed.

    Args:
        path: The file; it need not exist.
        protocol: The protocol of the evaluation.
        n_together: Keep a multiple of this many episodes.

    Raises:
        SpecError: If the file is not a record of this evaluation.
    """
    target = checked_target("record", path)
    if protocol["environment"]["seeding"] != "episode":
        message = "a record needs a seed for every episode, but all lanes are reset together"
        raise SpecError(message, fix="use environments that can be reset one by one: a GymEnv")
    header = json.dumps(_header(protocol)).encode() + b"\n"
    data = target.read_bytes() if target.exists() else b""
    if header.startswith(data) and data != header:  # a new file, or cut in its first line
        target.write_bytes(header)
        return []
    found, *entries = _parsed_lines(path, data)
    recorded = _checked(path, found, entries)
    if differs := differences(recorded, json.loads(header)["protocol"]):
        message = f"{path} is the record of another evaluation: {'; '.join(differs[:3])}"
        raise SpecError(message, fix="choose another file, or evaluate with the same arguments")
    if len(entries) < recorded["n_episodes"]:
        del entries[len(entries) // n_together * n_together :]
    kept = data.split(b"\n")[: 1 + len(entries)]
    os.truncate(target, sum(len(line) + 1 for line in kept))
    return entries


def append_to_record(path: Any, entries: Sequence[Entry]) -> None:
    """Append complete episodes."""
    with Path(path).open("ab") as file:
        file.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))


def _header(protocol: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": _FORMAT, "version": _VERSION, "protocol": dict(protocol)}


def _parsed_lines(path: Any, data: bytes) -> list[Any]:
    """Parse the complete lines of a record."""
    try:
        return [json.loads(line) for line in data.split(b"\n")[:-1]] or [None]
    except ValueError:
        message = f"{path} is not a record of an evaluation: a line cannot be parsed"
        fix = "pass a file of evaluate(record=...), or another path"
        raise SpecError(message, fix=fix) from None


def _checked(path: Any, header: Any, entries: Sequence[Any]) -> dict[str, Any]:
    """Check a record of this version, and return its protocol."""
    found = header if isinstance(header, dict) else {}
    if (found.get("format"), found.get("version")) != (_FORMAT, _VERSION):
        message = f"{path} is not a record of an evaluation in version {_VERSION} of the format"
        raise SpecError(message, fix="pass a file of Evaluation.save or evaluate(record=...)")
    if [entry.get("episode") for entry in entries] != list(range(len(entries))):
        raise SpecError(f"episodes in {path} are missing or repeated", fix="evaluate again")
    protocol: dict[str, Any] = found["protocol"]
    return protocol
