"""Evaluation of an agent: returns, lengths and successes of complete episodes; and verification.

The protocol of an evaluation has its arguments, the environment, and digests of policy and infos.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from rlpool.agents.agent import Agent, as_agent, is_agent
from rlpool.batch.batcher import EpisodeBatcher
from rlpool.batch.checks import CreateEnv
from rlpool.data.infos import Info, Infos, as_infos, options_of, part_of
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.description import plain
from rlpool.errors import EnvSpecError, SpecError, WorkerError, described
from rlpool.evaluation.figures import check_is_evaluation, differences
from rlpool.evaluation.result import (
    Entry,
    Evaluation,
    append_to_record,
    begin_record,
    checked_target,
)
from rlpool.machine.arguments import also_takes, optional_number, whole_number
from rlpool.machine.imports import import_extra
from rlpool.machine.own_state import default_device, torch_settings
from rlpool.machine.platform import require_linux
from rlpool.observe.control import Word
from rlpool.record.tape import Tape, tape_of
from rlpool.seeding import checked_seeds, evaluation_root
from rlpool.training.statistics import episode_returns, numbers_of
from rlpool.workers.failure_policy import DEFAULT_TIMEOUT_S, BatcherOptions
from rlpool.workers.sharing import Parcel, pickled

if TYPE_CHECKING:
    from typing_extensions import Unpack

AGENT_ROWS = 16
"""Rows of each call of the agent, so that results do not depend on the number of environments."""

_N_TIMESTEPS = 128
"""Steps per slot; longer episodes are joined from several slots."""

_PER_LANE = 4
"""Episodes of a request per lane of one worker. Two requests at most are in memory, and their size
does not depend on the number of workers."""


@also_takes(seed="seeds")
def evaluate(
    agent: Any,
    create_env: CreateEnv,
    n_episodes: int | None = None,
    *,
    env_args: Mapping[str, Any] | None = None,
    n_workers: int = 0,
    seeds: int = 0,
    agent_info: Info = None,
    env_info: Info = None,
    episode_seeds: Sequence[int] | None = None,
    agent_rows: int | None = AGENT_ROWS,
    max_steps: int | None = None,
    check_repeatable: bool = True,
    infos: Sequence[str] = (),
    record: str | os.PathLike[str] | None = None,
    progress: bool = False,
    timeout: float | None = DEFAULT_TIMEOUT_S,
    **policy: Unpack[BatcherOptions],
) -> Evaluation:
    """Run complete episodes with a copy of an agent, without gradients.

    The agent itself is not changed: its copy runs in evaluation mode (``nn.Module.eval`` of modules
    in attributes of agents, also in lists and dicts, but not inside other objects). The same seeds
    give the same bits for any ``n_workers`` and any number of environments per worker, if lanes can
    be reset one by one (see ``VectorGymEnv``) and ``agent_rows`` is a number.

    Successes are read from the key ``success`` (in any step of the episode, as in Meta-World) or
    ``is_success`` (in its last step, as in Gymnasium-Robotics), which ``info_keys`` of ``GymEnv``
    has to request; without either, there are no successes. Numbers above 0.5 count as success. NaN
    is an error. So is a key of ``info_keys`` that is absent from the infos of all episodes (unless
    some are in the ``record``, or a ``ParallelEnvManager`` runs them).

    Args:
        agent: The agent. It has to be picklable with workers, otherwise ``copy.deepcopy`` has to
            work.
        create_env: As for ``EpisodeBatcher``.
        n_episodes: Number of episodes, at least 1. By default the number of ``episode_seeds``.
        env_args: As for ``EpisodeBatcher``.
        n_workers: As for ``EpisodeBatcher``; at least one with ``on_env_error="restart"``, which
            restarts workers.
        seeds: Also ``seed``. A non-negative int from which all seeds derive, distinct from those of
            training: a batcher with the same value runs other episodes.
        agent_info: ``[n_episodes, ...]`` or empty, as for ``EpisodeBatcher.execute``, for example
            to make the agent greedy.
        env_info: Likewise.
        episode_seeds: Seeds of the environment of each episode, such as ``range(200)``, as for
            ``EpisodeBatcher.execute``. Noise still derives from ``seeds``.
        agent_rows: As for ``EpisodeBatcher``, but a number by default, so that results do not
            depend on the number of environments. ``None`` calls the agent with a row per
            environment.
        max_steps: Truncate episodes after this many steps. Without it, one warning is logged after
            100,000 steps of an episode, which may never end.
        check_repeatable: Repeat an episode after the first request and after the last one, with the
            same actions in an environment that has run others, and raise if observations, rewards
            or flags differ: state leaks from one episode to the next. Pass ``False`` for real
            robots and other environments that cannot repeat episodes. Lanes that are seeded per
            request are not checked.
        infos: Keys of the environments' infos (see ``info_keys`` of ``GymEnv``) or observations
            whose value after the last step is recorded in ``entries``.
        record: A file to which completed episodes are appended. If it already holds episodes of the
            same evaluation, which was killed, only the others are run. A record of another
            evaluation, or of an agent with other parameters, is refused.
        progress: Show a progress bar (tqdm).
        timeout: As for ``EpisodeBatcher``.
        **policy: As for ``EpisodeBatcher``. With ``on_env_error="truncate"`` or ``"restart"``, an
            episode whose environment fails for good ends there and is marked in ``failed``.

    Raises:
        SpecError: For arguments of the wrong kind or size, and a ``record`` of another evaluation
            or in a folder that does not exist.
        WorkerStartupError: If ``create_env`` raises.
        EnvError, AgentError: If the user's code fails, a key of ``info_keys`` was absent from all
            infos, or an episode was not repeated (``NotRepeatedError``).
        WorkerDiedError, WorkerTimeoutError: If a worker dies or hangs repeatedly.

    Example:
        >>> lengths = {"length": [2, 3, 4]}  # options of the environment's reset
        >>> evaluation = evaluate(create_agent(), create_env, n_episodes=3, env_info=lengths)
        >>> evaluation.returns, evaluation.returns.mean()
        (tensor([ 3.,  6., 10.]), tensor(6.3333))
    """
    as_agent(agent)
    given = None if episode_seeds is None else checked_seeds(episode_seeds, n_episodes)
    n_episodes = len(given) if given else n_episodes
    n_episodes = whole_number("n_episodes", n_episodes, 1, fix="or name episode_seeds")
    agent_rows = agent_rows and whole_number("agent_rows", agent_rows, 1)
    max_steps = optional_number("max_steps", max_steps, 1)
    if not n_workers and policy.get("on_env_error") == "restart":
        require_linux('on_env_error="restart"', 'use on_env_error="truncate"')
        n_workers = 1
    if record is not None:
        checked_target("record", record)  # before the workers start
    seeds = whole_number("seeds", seeds, 0)
    rows = as_infos(agent_info, env_info, n_episodes)
    copied, root = {"agent": _copied(agent, n_workers)}, evaluation_root(seeds)
    functions = _in_evaluation_mode, copied, create_env, env_args
    rest: Any = {"agent_rows": agent_rows, "timeout": timeout, **policy}
    sizes = max_steps, _N_TIMESTEPS, None  # the layout determines the number of slots
    with _Evaluator(*sizes, *functions, n_workers, root, **rest) as batcher:
        n_lanes = batcher.n_lanes // max(1, n_workers)
        protocol = _protocol_of(
            agent,
            batcher.environment,
            env_args,
            rows,
            n_episodes=n_episodes,
            seeds=seeds,
            episode_seeds=given,
            agent_rows=agent_rows,
            n_lanes=n_lanes if agent_rows is None else None,
            on_env_error=policy.get("on_env_error", "raise"),
            infos=list(infos),
            max_steps=max_steps,
        )
        checks = check_repeatable and batcher.environment["seeding"] == "episode"
        size = _PER_LANE * n_lanes
        return _evaluated(batcher, protocol, rows, given, size, checks, record, progress)


def _evaluated(
    batcher: _Evaluator,
    protocol: dict[str, Any],
    infos: Infos,
    given: list[int] | None,
    size: int,
    checks: bool,
    record: str | os.PathLike[str] | None,
    progress: bool,
) -> Evaluation:
    """Run the episodes that a record lacks, in requests of ``size`` episodes."""
    n_episodes = protocol["n_episodes"]
    n_kept = size if protocol["agent_rows"] is None else 1  # a record is kept in multiples of it
    entries = [] if record is None else begin_record(record, protocol, n_kept)
    numbers = range(len(entries), n_episodes)
    parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    failures: list[WorkerError] = []
    waiting, first, tape = iter(parts), 0, None
    batcher.seek(numbers.start)
    bar = import_extra("tqdm.auto", "evaluation").tqdm if progress else None
    for part in bar(parts, unit="request") if bar else parts:
        # Check the first request while nothing else runs.
        for each in islice(waiting, 1 if checks and part == parts[0] else None):
            seeds = given and given[each.start : each.stop]
            batcher.execute(len(each), *part_of(infos, each), episode_seeds=seeds)
        trajectories = batcher.get()
        failures += batcher.failures
        errors: dict[int | None, str] = {}
        for failure in batcher.failures:  # without the worker, which may vary
            worker = f"worker {failure.where.worker} "
            errors[failure.where.row] = failure.what.replace(worker, "its worker ", 1)
        row = next((row for row in range(len(part)) if row not in errors), None)
        if checks and tape is None and row is not None:
            # Truncation by max_steps is not part of the environment.
            flags = [] if batcher._max_steps is None else ["truncated", "done"]
            first = part[row]
            tape = tape_of(trajectories, row, [*batcher.environment["info_keys"], *flags])
            tape.options = options_of(infos[1], first)
        if tape is not None and part in (parts[0], parts[-1]):
            batcher.repeat(first, tape)
        found = _entries(part, trajectories, errors, infos, protocol["infos"])
        entries += found
        is_over = len(entries) == n_episodes == len(numbers)  # this call ran all of them
        if is_over and not all(entry["error"] for entry in entries):
            batcher.check_infos()
        if record is not None:
            append_to_record(record, found)
    return Evaluation.of_entries(entries, protocol, failures)


class _Evaluator(EpisodeBatcher):
    """A batcher with slots for two requests, and errors that refer to ``evaluate``."""

    _NAME = "evaluate"
    _WATCHES_INFOS = True
    _LOWERABLE = ()
    _SLOTS_PER_LANE = 2 * _PER_LANE

    def __init__(self, max_steps: int | None, *arguments: Any, **options: Any) -> None:
        self._max_steps = max_steps
        super().__init__(*arguments, **options)

    def repeat(self, episode: int, tape: Tape) -> None:
        """Repeat an episode, while nothing else runs."""
        after, self._tape = self.next_episode, tape
        self.seek(episode)
        self.execute(1)
        self.get()
        self.seek(after)
        self._tape = None

    def check_infos(self) -> None:
        """Refuse keys of ``info_keys`` that were absent from all infos in all workers."""
        words = self._not_closed().crew.control.rows[:, Word.SEEN_KEYS]
        seen = int(np.bitwise_or.reduce(words))
        for number, key in enumerate(self.environment["info_keys"]):
            if not seen >> min(number, 62) & 1:
                message = f"no {key!r} in any info of {self.next_episode} episodes (info_keys)"
                raise EnvSpecError(message, fix="correct the name, or report it in an episode")


def _entries(
    numbers: range,
    part: TemporalDictTensor,
    errors: Mapping[int | None, str],
    infos: Infos,
    keys: Sequence[str],
) -> list[Entry]:
    """Return the entries of the episodes of one request."""
    for key in keys:
        if key not in part or f"_{key}" not in part:
            known = [key for key in part if f"_{key}" in part]
            message = f"infos names {key!r}, which the environments do not report"
            raise SpecError(message, fix=f"name it in info_keys of GymEnv; there are {known}")
    last = torch.arange(len(numbers), device="cpu"), part.lengths - 1
    returns, successes = episode_returns(part).tolist(), _successes(part, numbers)
    terminated = part["_terminated"][last].tolist()
    seeds, lengths = part.info["seed"].tolist(), part.lengths.tolist()
    reported = {key: part[f"_{key}"][last].tolist() for key in keys}
    agent_info, env_info = infos
    return [
        {
            "episode": number,
            "seed": seeds[row],
            "return": returns[row],
            "length": lengths[row],
            "terminated": terminated[row],
            "success": None if successes is None else bool(successes[row]),
            "error": errors.get(row),
            "infos": {key: values[row] for key, values in reported.items()},
            "agent_info": options_of(agent_info, number) or {},
            "env_info": options_of(env_info, number) or {},
        }
        for row, number in enumerate(numbers)
    ]


def _successes(part: TemporalDictTensor, numbers: range) -> Tensor | None:
    if "_success" in part:
        found = numbers_of(part, "_success")
    elif "_is_success" in part:
        last = part.lengths[:, None] - 1
        found = numbers_of(part, "_is_success").gather(1, last)
    else:
        return None
    for row in found.isnan().any(1).nonzero()[:, 0].tolist():
        message = f"the success of episode {numbers[row]} is nan"
        raise SpecError(message, fix="let the environment report a bool, in every step")
    return (found > 0.5).any(1)


# Verification ------------------------------------------------------------------------------------


class Verification(NamedTuple):
    """Result of ``verify``.

    Attributes:
        n_episodes: Number of episodes that were run.
        episodes: Numbers of the episodes that differ.
        differences: Differences as text: first of policy, environment and versions, then by
            episode. Empty if all agree.

    Example:
        >>> evaluation = evaluate(create_agent(), create_env, n_episodes=4)
        >>> verify(evaluation, create_agent, create_env).episodes
        []
    """

    n_episodes: int
    episodes: list[int]
    differences: list[str]

    def __str__(self) -> str:
        n_same = self.n_episodes - len(self.episodes)
        result = f"{self.n_episodes} episodes were run again: {n_same} agree"
        return "\n".join([result, *self.differences])


def verify(
    evaluation: Evaluation,
    create_agent: Callable[[], Agent] | Agent,
    create_env: CreateEnv,
    *,
    env_args: Mapping[str, Any] | None = None,
    n_workers: int = 0,
) -> Verification:
    """Repeat the episodes of an evaluation's protocol, and compare them bit by bit.

    Args:
        evaluation: The evaluation, from ``evaluate`` or ``Evaluation.load``.
        create_agent: A function without arguments that returns the agent with the same parameters,
            or that agent.
        create_env: Creates the same environments.
        env_args: As for ``evaluate``.
        n_workers: As for ``evaluate``. If episodes failed, at least one worker is used, since they
            may end their process.

    Raises:
        SpecError: If the evaluation has no protocol.

    Example:
        >>> evaluation = evaluate(create_agent(), create_env, n_episodes=4)
        >>> print(verify(evaluation, create_agent, create_env))
        4 episodes were run again: 4 agree
    """
    check_is_evaluation(evaluation)
    protocol, entries = evaluation.protocol, evaluation.entries
    if not entries or not protocol:
        raise SpecError("the evaluation has no record", fix="make it with evaluate")
    names = "n_episodes", "seeds", "episode_seeds", "agent_rows", "infos", "on_env_error"
    arguments: dict[str, Any] = {n: protocol.get(n) for n in (*names, "max_steps")}
    for name in ("agent_info", "env_info"):
        arguments[name] = {
            key: np.array([entry[name][key] for entry in entries], dtype)
            for key, dtype in protocol[name].items()
        }
    if any(entry["error"] for entry in entries):
        n_workers = n_workers or 1
    agent = create_agent if is_agent(create_agent) else create_agent()
    arguments |= {"env_args": env_args, "n_workers": n_workers, "check_repeatable": False}
    again = evaluate(agent, create_env, **arguments)
    found = differences(protocol, again.protocol)
    numbers: list[int] = []
    for entry, other in zip(entries, again.entries, strict=True):
        number = other["episode"]
        if differs := differences({**entry, "error": None}, {**other, "error": None}):
            numbers.append(number)
            found += [f"episode {number}, {each}" for each in differs]
    return Verification(len(again.entries), numbers, found)


# Protocols ---------------------------------------------------------------------------------------


def _protocol_of(
    agent: Any,
    environment: Mapping[str, Any],
    env_args: Mapping[str, Any] | None,
    rows: Infos,
    **arguments: Any,
) -> dict[str, Any]:
    """Return everything that determines an evaluation's episodes, in JSON types.

    Args:
        agent: The agent.
        environment: The batcher's description of its environments.
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
        "agent": getattr(agent, "__qualname__", type(agent).__qualname__),
        "parameters": _digest_of(agent),
        "agent_info": dtypes[0],
        "env_info": dtypes[1],
        "infos_digest": _digest_of([dict(info) for info in rows]),
        "torch": {
            "default_device": str(default_device()),
            **{name: str(value) for name, value in torch_settings().items()},
        },
        "versions": {each.__name__: str(each.__version__) for each in libraries},
    }


_PARAMETERS = (Agent, nn.Module, Tensor)
"""Types of global variables of a function that count as parameters."""


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the parts of agents, modules, functions, dicts, lists and tuples, by path."""
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
        elif isinstance(part, partial):
            held = {"func": part.func, "args": part.args, "keywords": part.keywords}
        elif isinstance(part, MethodType):
            held = {"self": part.__self__}
        elif isinstance(part, FunctionType):
            used = inspect.getclosurevars(part)  # globals of a script, else nonlocals
            held = {k: v for k, v in used.globals.items() if isinstance(v, _PARAMETERS)}
            held |= used.nonlocals
        if held and id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        left += [(f"{path}/{key}", held[key]) for key in sorted(held, key=str)]


def _digest_of(value: Any) -> str:
    """Return the SHA-256 of all tensors, arrays, numbers and texts in an object.

    Training mode is ignored; other objects count by their class.
    """
    digest = hashlib.sha256()
    for path, part in _parts_of(value):
        if path.endswith("/training"):
            continue
        data = b""
        if isinstance(part, torch.Tensor):
            flat = part.detach().cpu().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes()
            header = f"{part.dtype} {list(part.shape)}"
        elif isinstance(part, np.ndarray | np.generic) and part.dtype.kind in "biufcSU":
            data, header = part.tobytes(), f"{part.dtype.str} {list(part.shape)}"
        elif part is None or isinstance(part, str | bytes | int | float):
            header = repr(part)
        else:
            header = getattr(part, "__qualname__", type(part).__qualname__)
        digest.update(f"{path} {header}\n".encode())
        digest.update(data)
    return f"sha256:{digest.hexdigest()}"


# Copies of agents --------------------------------------------------------------------------------


def _copied(agent: Any, n_workers: int) -> Any:
    """Copy the agent, pickled for workers.

    Raises:
        SpecError: If it cannot be copied.
    """
    if n_workers or not isinstance(agent, Agent | nn.Module):  # deepcopy does not copy functions
        fix = "exclude from its __getstate__ everything that acting does not need"
        return pickled({"agent": agent}, agent, fix=fix, copies=True)
    try:
        return copy.deepcopy(agent)
    except Exception as error:
        message = f"the agent cannot be copied: {described(error):.200}"
        fix = "define __deepcopy__, or exclude from __getstate__ everything that cannot be copied"
        raise SpecError(message, fix=fix) from error


def _in_evaluation_mode(agent: Any) -> Any:
    """Make the agent of a worker, with all modules in evaluation mode."""
    agent = agent.load() if isinstance(agent, Parcel) else agent
    for _, part in list(_parts_of(agent)):
        if isinstance(part, nn.Module):
            part.eval()
    return agent
