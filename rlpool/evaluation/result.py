"""What an evaluation found, episode by episode, and the files that hold it: JSON, no pickle.

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

``evaluate(record=path)`` appends to a file with the same in lines: everything but the episodes in
the first one, then an episode each. Numbers have as many digits as it takes to read the same bits.
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
"""What is recorded of an episode."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What ``evaluate`` found, episode by episode.

    Attributes:
        returns: float32 ``[n_episodes]``: sums of rewards, not discounted.
        lengths: int64 ``[n_episodes]``, in steps.
        successes: bool ``[n_episodes]``, ``None`` if the environments do not say.
        seeds: int64 ``[n_episodes]``: what each episode was reset with.
        failed: bool ``[n_episodes]``: those that were given up since their environment failed,
            ``None`` with ``on_env_error="raise"``.
        failures: Why, in order, of the episodes that this call ran.
        entries: What is recorded of each episode: the above, ``terminated`` (else it was
            truncated), ``error``, ``infos`` and its rows of ``agent_info`` and ``env_info``.
        protocol: How it was made: arguments, the environment's specification, versions, and digests
            of the policy's parameters and of the infos.

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
        """The evaluation that consists of these episodes.

        Args:
            entries: What is recorded of them.
            protocol: How it was made.
            failures: Why episodes were given up, as far as that is still known.
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
        """How many episodes failed for good."""
        return 0 if self.failed is None else int(self.failed.sum())

    def summary(self, *, failures: str | float | None = None) -> Summary:
        """Mean, median, interquartile mean and spread of the returns, with intervals.

        The interval of the mean is a bootstrap's (BCa), that of the success rate Wilson's, both of
        95 %. They are over episodes of one agent and say nothing about other training runs. Needs
        the extra ``evaluation``.

        Args:
            failures: How episodes count that failed for good: "exclude", or the return that they
                get (their success is what it was). There is no default if there are any.

        Raises:
            SpecError: If there are such episodes, and ``failures`` is missing.

        Example:
            >>> lengths = {"length": [2, 3, 4, 5]}
            >>> evaluation = evaluate(create_agent(), create_env, n_episodes=4, env_info=lengths)
            >>> evaluation.summary().median
            8.0
        """
        return summary_of(self, failures)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, which appears whole or not at all.

        Raises:
            SpecError: If there is no such folder, or no file can be written there.

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
        """Read what ``save`` wrote, or a complete ``record`` of ``evaluate``.

        Raises:
            SpecError: For another format or version, and a record that is not complete.
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
    """The file that an argument names, through links, which is to be written.

    Args:
        argument: Its name.
        path: Its value.

    Raises:
        SpecError: If no file can be written there, or there is something else, such as a pipe.
    """
    target = Path(path).resolve()
    is_free = target.is_file() or not target.exists()
    if not is_free or not os.access(target if target.exists() else target.parent, os.W_OK):
        why = "it is not a file, there is no such folder, or this process may not write there"
        message = f"{argument}={str(path)!r} cannot be written: {why}"
        raise SpecError(message, fix="choose another path")
    return target


def begin_record(path: Any, protocol: Mapping[str, Any], n_together: int) -> list[Entry]:
    """Write the first line of a record, or read the episodes that are there already.

    An incomplete last line is removed.

    Args:
        path: The file; it need not exist.
        protocol: How the evaluation is made.
        n_together: How many episodes at a time have to be complete.

    Raises:
        SpecError: If the file is that of another evaluation, or something else.
    """
    target = checked_target("record", path)
    if protocol["environment"]["seeding"] != "episode":
        message = "a record needs a seed for every episode, and one reset serves all lanes"
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
        raise SpecError(message, fix="choose another file, or evaluate as it was done there")
    if len(entries) < recorded["n_episodes"]:
        del entries[len(entries) // n_together * n_together :]
    kept = data.split(b"\n")[: 1 + len(entries)]
    os.truncate(target, sum(len(line) + 1 for line in kept))
    return entries


def append_to_record(path: Any, entries: Sequence[Entry]) -> None:
    """Write episodes that are complete."""
    with Path(path).open("ab") as file:
        file.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))


def _header(protocol: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": _FORMAT, "version": _VERSION, "protocol": dict(protocol)}


def _parsed_lines(path: Any, data: bytes) -> list[Any]:
    """The complete lines of a record."""
    try:
        return [json.loads(line) for line in data.split(b"\n")[:-1]] or [None]
    except ValueError:
        message = f"{path} is not a record of an evaluation: a line of it cannot be read"
        fix = "pass what evaluate(record=...) wrote, or another path"
        raise SpecError(message, fix=fix) from None


def _checked(path: Any, header: Any, entries: Sequence[Any]) -> dict[str, Any]:
    """The protocol of a record of this version."""
    found = header if isinstance(header, dict) else {}
    if (found.get("format"), found.get("version")) != (_FORMAT, _VERSION):
        message = f"{path} is not a record of an evaluation in version {_VERSION} of the format"
        raise SpecError(message, fix="pass what Evaluation.save or evaluate(record=...) wrote")
    if [entry.get("episode") for entry in entries] != list(range(len(entries))):
        raise SpecError(f"episodes of {path} are missing or repeated", fix="evaluate again")
    protocol: dict[str, Any] = found["protocol"]
    return protocol
