"""What an evaluation found, as a record that others can check: JSON, one entry per episode.

::

    {"format": "rlpool evaluation", "version": 1,
     "protocol": {"environment": {...}, "agent": ..., "parameters": "sha256:...", "machine": {...},
                  "n_episodes": ..., "seeds": ..., "agent_rows": ..., ...},
     "episodes": [{"episode": 0, "seed": ..., "return": ..., "length": ..., "terminated": ...,
                   "success": ..., "restarts": ..., "error": ..., "agent_info": {...},
                   "env_info": {...}, "infos": {...}}, ...]}

A file that is appended to has the same in lines: everything but the episodes in the first one, then
an episode each. Numbers are written with as many digits as it takes to read the same bits again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any

import torch
from torch import Tensor

from rlpool.errors import SpecError, Where, WorkerError
from rlpool.evaluation.figures import Summary, summary_of
from rlpool.evaluation.protocol import environment_differences, refuse_unseeded
from rlpool.machine.files import checked_target, replaced
from rlpool.machine.fingerprint import differences

FORMAT, VERSION = "rlpool evaluation", 1

Entry = dict[str, Any]
"""What is recorded of an episode."""

_Kinds = Mapping[tuple[type, ...], str]

_TOP: _Kinds = {(dict,): "protocol", (list,): "episodes"}
_PROTOCOL: _Kinds = {
    (int,): "n_episodes seeds",
    (int, NoneType): "agent_rows",
    (str,): "on_env_error",
    (str, NoneType): "parameters",
    (list,): "infos",
    (list, NoneType): "episode_seeds",
    (dict,): "environment machine agent_info env_info",
}
_ENTRY: _Kinds = {
    (int,): "episode seed length restarts",
    (int, float): "return",
    (bool,): "terminated",
    (bool, NoneType): "success",
    (str, NoneType): "error",
    (dict,): "infos agent_info env_info",
}
"""The types that values in a record may have, and their keys."""

_TENSORS = "returns", "lengths", "successes", "seeds"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What ``evaluate`` found, episode by episode.

    Attributes:
        returns: float32 ``[n_episodes]``: sums of rewards, not discounted.
        lengths: int64 ``[n_episodes]``, in steps.
        successes: bool ``[n_episodes]``, ``None`` if the environments do not say.
        seeds: int64 ``[n_episodes]``: what each episode was reset with.
        videos: The files that were written, in order of episodes.
        failed: bool ``[n_episodes]``: those that were given up since their environment failed,
            ``None`` with ``on_env_error="raise"``.
        failures: Why, in order; ``where.episode`` is the number of the episode.
        entries: What is recorded of each episode: the above, ``terminated`` (else it was
            truncated), ``restarts`` (how often it was run again, since its environment or its
            worker failed), ``error``, ``infos`` and its rows of ``agent_info`` and ``env_info``.
        protocol: How it was made: versions, the environment's specification, seeds, ``agent_rows``,
            a digest of the parameters, the processor.

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
    videos: tuple[Path, ...] = ()
    failed: Tensor | None = None
    failures: tuple[WorkerError, ...] = ()
    entries: Sequence[Entry] = field(default=(), repr=False)
    protocol: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of_entries(
        cls,
        entries: Sequence[Entry],
        protocol: Mapping[str, Any],
        videos: tuple[Path, ...] = (),
        found: Mapping[int, WorkerError] = MappingProxyType({}),
    ) -> Evaluation:
        """The evaluation that consists of these episodes.

        Args:
            entries: What is recorded of them.
            protocol: How it was made.
            videos: The files that were written.
            found: Why episodes were given up, by their number, as far as that is still known.
        """
        success = [entry["success"] for entry in entries]
        tells = protocol.get("on_env_error", "raise") != "raise"
        failures = tuple(
            found.get(entry["episode"]) or _failure_of(entry) for entry in entries if entry["error"]
        )
        return cls(
            returns=torch.tensor([entry["return"] for entry in entries]),
            lengths=torch.tensor([entry["length"] for entry in entries]),
            successes=None if None in success or not success else torch.tensor(success),
            seeds=torch.tensor([entry["seed"] for entry in entries]),
            videos=videos,
            failed=torch.tensor([bool(entry["error"]) for entry in entries]) if tells else None,
            failures=failures,
            entries=tuple(entries),
            protocol=protocol,
        )

    @property
    def n_failed(self) -> int:
        """How many episodes failed for good."""
        return 0 if self.failed is None else int(self.failed.sum())

    def env_info_of(self, episode: int) -> Any:
        """An episode's row of ``env_info``, as it is recorded."""
        return self.entries[episode]["env_info"] if self.entries else None

    def summary(self, *, failures: str | float | None = None) -> Summary:
        """Mean, median, interquartile mean and spread of the returns, with intervals.

        The interval of the mean is a bootstrap's (BCa), that of the success rate Wilson's, both of
        95 %. They are over episodes of one agent: they say nothing of other training runs, see
        ``aggregate``. Needs the extra ``evaluation``.

        Args:
            failures: How episodes count that failed for good: "exclude", or the return that they
                get (their success is what it was). There is no default if there are any.

        Raises:
            SpecError: If there are such episodes, and it is not said how they count.

        Example:
            >>> lengths = {"length": [2, 3, 4, 5]}
            >>> evaluation = evaluate(create_agent(), create_env, n_episodes=4, env_info=lengths)
            >>> evaluation.summary().median
            8.0
        """
        return summary_of(self, failures)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a JSON file, which appears whole or not at all.

        Raises:
            SpecError: If there is no such folder, or no file can be written there.

        Example:
            >>> evaluate(create_agent(), create_env, n_episodes=2).save("evaluation.json")
            >>> Evaluation.load("evaluation.json").returns
            tensor([10., 10.])
        """
        whole = {**header_of(self.protocol), "episodes": list(self.entries)}
        with replaced(checked_target("path", path)) as unfinished:
            unfinished.write_text(json.dumps(whole, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Evaluation:
        """Read what ``save`` wrote, or a complete ``record`` of ``evaluate``.

        Raises:
            SpecError: For another format or version, and a record that is damaged or not complete.
        """
        if not isinstance(path, str | os.PathLike):
            raise SpecError(f"path should be a path, got {path!r:.60}", fix="name a file")
        data = Path(path).read_bytes()
        try:
            whole = json.loads(data)
        except ValueError:
            whole = None
        if isinstance(whole, dict) and "episodes" in whole:
            refuse_bad_records(path, whole)
        else:
            whole = parsed_lines(path, data)
        n_episodes, n_found = whole["protocol"]["n_episodes"], len(whole["episodes"])
        if n_found < n_episodes:
            what = f"{path} has {n_found} of {n_episodes} episodes"
            raise SpecError(what, fix="call evaluate with the same record again: it runs the rest")
        return cls.of_entries(whole["episodes"], whole["protocol"])

    def __getstate__(self) -> dict[str, Any]:
        state = {name: vars(self)[name] for name in _TENSORS}
        texts = [str(film) for film in self.videos], json.dumps(list(self.entries))
        protocol = json.dumps(dict(self.protocol))
        return {**state, "videos": texts[0], "entries": texts[1], "protocol": protocol}

    def __setstate__(self, state: dict[str, Any]) -> None:
        entries, protocol = json.loads(state["entries"]), json.loads(state["protocol"])
        videos = tuple(map(Path, state["videos"]))
        known = vars(Evaluation.of_entries(entries, protocol, videos))
        tensors = {name: state[name] for name in _TENSORS}
        for name, value in {**known, **tensors}.items():
            object.__setattr__(self, name, value)


torch.serialization.add_safe_globals([Evaluation])  # torch.load(weights_only=True) reads it


def error_of(failure: WorkerError) -> str:
    """What is recorded of a failure: nothing that depends on which worker ran the episode."""
    return failure.what.replace(f"worker {failure.where.worker} ", "its worker ", 1)


def _failure_of(entry: Entry) -> WorkerError:
    """A failure as far as it is recorded."""
    where = Where(episode=entry["episode"], step=entry["length"] - 1, seed=entry["seed"])
    return WorkerError(entry["error"].partition("\n")[0], where=where)


def header_of(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """What a record begins with."""
    return {"format": FORMAT, "version": VERSION, "protocol": dict(protocol)}


def refuse_bad_records(path: Any, whole: Any, *, in_lines: bool = False) -> None:
    """Raise for what is no record of this version, or is damaged.

    Args:
        path: The file, for the message.
        whole: What is in it.
        in_lines: Whether every episode has a line.
    """
    found = whole if isinstance(whole, dict) else {}
    if found.get("format") != FORMAT:
        kind = repr(found["format"]) if "format" in found else "missing or incomplete"
        what = f"{path} is no record of an evaluation: its format is {kind}"
        raise SpecError(what, fix="pass what Evaluation.save or evaluate(record=...) wrote")
    version = found.get("version")
    if type(version) is not int or version != VERSION:
        what = f"{path} has version {version!r} of the format, this is {VERSION}"
        raise SpecError(what, fix="read it with the version of rlpool that wrote it")
    problem = _misfit(found, _TOP) or _misfit(found["protocol"], _PROTOCOL, "its protocol ")
    n_episodes = 0 if problem else found["protocol"]["n_episodes"]
    for number, entry in enumerate([] if problem else found["episodes"]):
        here = f"line {number + 2} " if in_lines else f"number {number} of its episodes "
        problem = _misfit(entry, _ENTRY, here)
        if not problem and not entry["episode"] == number < n_episodes:
            problem = f"{here}is episode {entry['episode']}, not {number} of {n_episodes}"
        if problem:
            break
    if problem:
        raise SpecError(f"{path} is damaged: {problem}", fix="restore it, or evaluate again")


def _misfit(found: Any, kinds: _Kinds, name: str = "it ") -> str:
    """What a part of a record lacks or has of another type, empty if nothing."""
    if not isinstance(found, dict):
        return f"{name}is {found!r:.40}"
    for types, names in kinds.items():
        for key in names.split():
            if key not in found:
                return f"{name}lacks {key!r}"
            if type(found[key]) not in types:
                return f"{name}has {found[key]!r:.40} as {key!r}"
    return ""


def parsed_lines(path: Any, data: bytes) -> dict[str, Any]:
    """A record in lines; an incomplete last line is left out."""
    parsed: list[Any] = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            parsed.append(json.loads(line))
        except ValueError:
            what = f"line {number} of {path} cannot be read"
            fix = "pass what evaluate(record=...) wrote; only its last line may be incomplete, and "
            fix += "what save() wrote is no such file"
            raise SpecError(what, fix=fix) from None
    header = parsed[0] if parsed and isinstance(parsed[0], dict) else {}
    whole = {**header, "episodes": parsed[1:]}
    refuse_bad_records(path, whole, in_lines=True)
    return whole


class Record:
    """A file to which an evaluation appends every episode. It is locked until ``close``.

    Args:
        path: The file; it need not exist.
        protocol: How the evaluation is made.

    Attributes:
        entries: The episodes that are there already.

    Raises:
        SpecError: If the file is damaged, of another evaluation, or one is writing to it.
    """

    def __init__(self, path: str | os.PathLike[str], protocol: Mapping[str, Any]) -> None:
        refuse_unseeded(protocol["environment"], "record")
        self.entries = list[Entry]()
        file = Path(path)
        self._file = file.open("a+b")
        try:
            self._begin(path, json.dumps(header_of(protocol)).encode() + b"\n")
        except BaseException:
            self._file.close()
            raise

    def _begin(self, path: Any, header: bytes) -> None:
        """Lock the file, read what is there, and write the header if that is missing."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another evaluation is writing to {path}"
            raise SpecError(what, fix="wait for its end, or choose another file") from None
        except OSError:  # a file system that has no locks
            pass
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]  # an incomplete last line is written again
        if whole:
            found, mine = parsed_lines(path, whole), json.loads(header)["protocol"]
            self.entries, theirs = found["episodes"], found["protocol"]
            differs = environment_differences(theirs.pop("environment"), mine.pop("environment"))
            differs += differences(theirs, mine)
            if differs:
                what = f"{path} is the record of another evaluation: {'; '.join(differs[:3])}"
                raise SpecError(what, fix="choose another file, or evaluate as it was done there")
        elif not header.startswith(data):
            refuse_bad_records(path, None)
        self._file.truncate(len(whole))
        self._file.write(b"" if whole else header)
        self._file.flush()

    def append(self, entries: Sequence[Entry]) -> None:
        """Write episodes that are complete."""
        self._file.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
        self._file.flush()
        self.entries += entries

    def close(self) -> None:
        """Close the file."""
        self._file.close()
