"""Running some episodes of an evaluation again, to see whether they have the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from rlpool.agents.agent import Agent, refuse_no_agent
from rlpool.batch.batcher_base import CreateEnv
from rlpool.data.infos import as_infos
from rlpool.errors import SpecError
from rlpool.evaluation.evaluate import Evaluator
from rlpool.evaluation.figures import refuse_no_evaluation
from rlpool.evaluation.protocol import digest_of, environment_differences, refuse_unseeded
from rlpool.evaluation.result import Entry, Evaluation
from rlpool.machine.arguments import whole_number
from rlpool.machine.fingerprint import differences, fingerprint
from rlpool.seeding import evaluation_root

_OF_TIME = ("restarts", "error")
"""What an entry says that may be otherwise the next time."""


class Verification(NamedTuple):
    """What came of running episodes again.

    Attributes:
        episodes: The numbers of the episodes that were run.
        differences: What was different, as text; empty if all bits agree.
        machine: What is different about this machine and its versions, which may be the reason.

    Example:
        >>> evaluation = evaluate(create_agent(), create_env, n_episodes=4)
        >>> verify(evaluation, create_agent(), create_env, n_episodes=2).episodes
        [0, 3]
    """

    episodes: list[int]
    differences: list[str]
    machine: list[str]

    def __str__(self) -> str:
        n = len(self.episodes)
        lines = [f"{n} episodes were run again: {n if not self.differences else 'not all'} agree"]
        lines += [f"differs: {each}" for each in self.differences]
        lines += [f"this machine: {each}" for each in self.machine]
        return "\n".join(lines)


def verify(
    evaluation: Evaluation,
    agent: Agent,
    create_env: CreateEnv,
    *,
    n_episodes: int = 5,
    env_args: Mapping[str, Any] | None = None,
    n_workers: int = 0,
) -> Verification:
    """Run some episodes of an evaluation again, and compare them bit by bit.

    Args:
        evaluation: What was recorded.
        agent: The agent, with the parameters that it had.
        create_env: The environments that it was evaluated on.
        n_episodes: How many episodes, from the first to the last.
        env_args: As for ``evaluate``.
        n_workers: As for ``evaluate``. Episodes that failed or were run again then are run in a
            worker in any case, since they may end their process.

    Raises:
        SpecError: If the agent's parameters, the environment or its arguments are others, naming
            both; or the evaluation has no record of its episodes, or none has a seed of its own.

    Example:
        >>> evaluation = evaluate(create_agent(), create_env, n_episodes=4)
        >>> print(verify(evaluation, create_agent(), create_env))
        4 episodes were run again: 4 agree
    """
    refuse_no_evaluation("evaluation", evaluation)
    refuse_no_agent(agent)
    protocol, entries = evaluation.protocol, evaluation.entries
    if not entries:
        raise SpecError("the evaluation has no record", fix="make it with evaluate")
    refuse_unseeded(protocol["environment"], "verify")
    mine, theirs = digest_of(agent), protocol["parameters"]
    if mine != theirs:
        what = f"the agent's parameters are {mine}, those of the evaluation were {theirs}"
        raise SpecError(what, fix="load the checkpoint that was evaluated")
    wanted = min(whole_number("n_episodes", n_episodes, 1), len(entries))
    numbers = sorted({int(n) for n in np.linspace(0, len(entries) - 1, wanted)})
    agent_info, env_info = (_infos(n, protocol, entries) for n in ("agent_info", "env_info"))
    infos = as_infos(agent_info, env_info, len(entries))
    rows, root = protocol["agent_rows"], evaluation_root(protocol["seeds"])
    # Where rows of the batch decide about bits, all episodes that had shared it.
    n_beside = 1 if rows is not None else int(protocol["environment"]["n_lanes"])
    starts = sorted({n // n_beside * n_beside for n in numbers})
    parts = [range(start, min(start + n_beside, len(entries))) for start in starts]
    again = [entries[n] for part in parts for n in part]
    if any(entry["error"] or entry["restarts"] for entry in again):
        n_workers = n_workers or 1  # they may end their process
    failing = {"on_env_error": protocol["on_env_error"]}
    given = [entry["seed"] for entry in entries] if protocol["episode_seeds"] else None
    found: dict[int, Entry] = {}
    with Evaluator(agent, create_env, env_args, n_workers, root, rows, failing) as runs:
        if differs := environment_differences(protocol["environment"], runs.environment):
            what = f"the environment is another one: {'; '.join(differs[:3])}"
            raise SpecError(what, fix="pass the create_env and env_args of the evaluation")
        for part in parts:
            for entries_again in runs.parts(part, infos, given, protocol["infos"]):
                found |= {entry["episode"]: entry for entry in entries_again}
    told = [
        f"episode {n}, {each}"
        for n in numbers
        for each in differences(_of_bits(entries[n]), _of_bits(found[n]))
    ]
    return Verification(numbers, told, differences(protocol["machine"], fingerprint()))


def _infos(name: str, protocol: Mapping[str, Any], entries: Any) -> dict[str, Any]:
    """The infos of all episodes, in the dtypes that they had."""
    return {
        key: np.array([entry[name][key] for entry in entries], dtype)
        for key, dtype in protocol[name].items()
    }


def _of_bits(entry: Entry) -> Entry:
    return {key: value for key, value in entry.items() if key not in _OF_TIME}
