"""``check_agent``: whether an agent keeps what rlpool builds on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlpool.data.infos import Info
from rlpool.errors import AgentSpecError, SpecError
from rlpool.testing.agent_checks import AGENT_CHECKS
from rlpool.testing.agent_subject import AgentSubject, as_in_a_worker
from rlpool.testing.findings import Report, refuse_no_mapping, run_checks
from rlpool.testing.observation_rows import rows_of


def check_agent(
    agent: Any,
    env: Any,
    agent_args: Mapping[str, Any] | None = None,
    env_args: Mapping[str, Any] | None = None,
    *,
    action_space: Any = None,
    agent_info: Info = None,
    options: Mapping[str, Any] | None = None,
    update_info: Any = None,
    seed: int = 0,
    batch_sizes: Sequence[int] = (1, 2, 5),
    n_steps: int = 4,
    skip: Collection[str] = (),
    strict: bool = True,
) -> Report:
    """Check an agent against the contract of ``rlpool.Agent``, and report all problems at once.

    It runs in this process, as in a worker: under ``torch.inference_mode``, with one thread. An
    instance that is given is copied, unless it cannot be. The process's global random generators
    are left as they were.

    The checks, by the name that findings carry (those of warnings only with an asterisk):

    - ``creation``, ``picklable``: what makes the agent makes a new one in each call, and can be
      sent to a worker.
    - ``returns``: ``(state, output, new_state)`` with one row per lane, an ``action``, and the same
      keys, shapes and dtypes in every call, for lanes that start together and at other times.
    - ``same_for_any_number_of_rows``: keys, shapes and dtypes are those of any other batch.
    - ``action_fits``: actions are of the action space's kind, and in it.
    - ``initial_state_agrees``: ``initial_state`` gives what a call with ``None`` starts from.
    - ``rows_are_independent``: the same row at the same place has the same results, bit by bit,
      whatever the other rows are.
    - ``deterministic``: the same arguments, noise included, give the same bits, whatever was
      called in between and whatever the state of the global random generators.
    - ``inputs_unchanged``: observations, ``agent_info`` and history are left as they are.
    - ``returns_its_state``: the first value is the state that the call started from.
    - ``update_takes_state_dict``: after ``update(state_dict())`` of another instance the agent
      acts like that one, also when the memory of the argument is gone.
    - ``same_in_every_worker`` *: agents made in two workers are the same.
    - ``seeds_and_closes``: ``seed`` and ``close`` do not raise.

    Args:
        agent: What ``create_agent`` of a batcher is, or an agent.
        env: Where observations come from: what ``check_env`` takes, an observation space, or a
            ``DictTensor`` (or dict of tensors ``[R, ...]``) of example observations. Keys that
            every environment has (``reward``, ``done``, ...) are added.
        agent_args: Arguments of ``create_agent``.
        env_args: Arguments of ``create_env``.
        action_space: The action space, where ``env`` is an observation space or examples.
        agent_info: As for ``execute``, with any number of rows, which are used in turns.
        options: ``options`` of every reset, like a row of ``env_info``.
        update_info: What ``update`` is tried with, instead of the agent's ``state_dict()``.
        seed: Root of all seeds.
        batch_sizes: Numbers of rows to call the agent with.
        n_steps: How many steps of an episode to look at, at least 2.
        skip: Names of checks to leave out.
        strict: Whether to raise where there are errors. Warnings never raise; they are in the
            report, and go to the logger ``rlpool``.

    Returns:
        The report: ``findings``, each with ``check``, ``severity``, ``what`` and ``fix``; it is
        true if none is an error, and ``print(report)`` shows everything.

    Raises:
        AgentSpecError: If ``strict`` and there are errors, with all of them.
        SpecError: For arguments that make no sense, or an environment that gives no observations.
    """
    refuse_no_mapping(agent_args=agent_args, env_args=env_args, options=options)
    if n_steps < 2:
        raise SpecError(f"n_steps is {n_steps}", fix="n_steps should be at least 2")
    if not batch_sizes or min(batch_sizes) < 1:
        raise SpecError(f"batch_sizes is {list(batch_sizes)}", fix="give numbers of at least 1")
    rows = rows_of(env, env_args, options, action_space, seed)
    subject = AgentSubject(
        agent, agent_args, rows, agent_info, update_info, seed, batch_sizes, n_steps
    )
    with as_in_a_worker():
        report = run_checks(subject, subject.name, AGENT_CHECKS, skip)
    if strict and not report.ok:
        raise AgentSpecError(f"check_agent: {report}")
    return report
