"""``check_agent``: whether an agent does what rlpool relies on.

Each check is a generator function below; they run in the order of ``AGENT_CHECKS``. An asterisk
marks those that only give warnings:

- ``creation``, ``picklable``: the function makes a new agent in each call, and can be sent to a
  worker.
- ``returns``: ``(state, output, new_state)`` with one row per lane, an ``action``, and the same
  keys, shapes and dtypes in every call, for lanes that start together and at other times.
- ``same_for_any_number_of_rows``: keys, shapes and dtypes are those of any other batch.
- ``action_fits``: actions are of the action space's kind, and in it.
- ``initial_state_agrees``: ``initial_state`` gives the state that a call with ``None`` starts from.
- ``rows_are_independent``: the same row at the same place has the same results, bit by bit,
  whatever the other rows are.
- ``deterministic``: the same arguments, noise included, give the same bits, whatever was called in
  between and whatever the state of the global random generators.
- ``inputs_unchanged``: observations, ``agent_info`` and history are left as they are.
- ``returns_its_state`` *: the first value is the state that the call started from.
- ``update_takes_state_dict``: after ``update(state_dict())`` of another instance the agent acts
  like that one, also when the memory of the argument is gone.
- ``same_in_every_worker`` *: agents made in two workers are the same.
- ``seeds_and_closes``: ``seed`` and ``close`` do not raise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlpool.data.infos import Info
from rlpool.errors import AgentSpecError
from rlpool.seeding import seeded_generators
from rlpool.testing import report
from rlpool.testing.check_env import misfits
from rlpool.testing.episodes import bits
from rlpool.testing.report import CannotCheck, Failed, Finding, error, user_code, warning
from rlpool.testing.rollouts import (
    AgentSubject,
    call,
    copied,
    described,
    difference,
    observations_of,
    specs_of,
    tensors_of,
)

Findings = Iterator[Finding]


def returns(subject: AgentSubject) -> Findings:
    """It returns three values with one row per lane, with the same keys in every call."""
    subject.agent()  # if that fails, another check reports it
    for n in subject.batch_sizes:
        try:
            subject.rollout(n)
        except Failed as failure:
            yield failure.finding
            return


def same_for_any_number_of_rows(subject: AgentSubject) -> Findings:
    """Keys, shapes and dtypes do not depend on the number of rows."""
    fix = "squeeze() without a dimension drops the rows of a batch of one"
    first_n, *others = subject.batch_sizes
    _, first = subject.rollout(first_n).trace[0]
    for n in others:
        _, result = subject.rollout(n).trace[0]
        for name, part, other in zip(result._fields, first, result, strict=True):
            if specs_of(part) != specs_of(other):
                what = f"of {n} rows is {described(other)}, of {first_n} rows {described(part)}"
                yield error(f"the {name} {what}", f"return the same for any batch: {fix}")
                return


def action_fits(subject: AgentSubject) -> Findings:
    """Actions are of the action space's kind, and in it."""
    space = subject.observations.action_space
    if space is None:
        raise CannotCheck("the action space is not known: pass action_space")
    rollout = subject.rollout(subject.n_rows)
    if rollout.misfit:
        yield rollout.misfit.finding
        return
    for action in rollout.actions:
        if found := list(misfits(space, action, "action")):
            is_bound = found[0].severity == report.WARNING
            fix = "clip it, or sample with rlpool.sample_tanh_normal"
            yield replace(found[0], fix=fix if is_bound else "choose from the action space")
            return


def initial_state_agrees(subject: AgentSubject) -> Findings:
    """``initial_state`` gives the state that a call with ``None`` would start from."""
    agent = subject.agent()
    (state, *seen), _ = subject.trace[0]
    if not agent.makes_initial_states():
        return
    try:
        started = call(agent, (None, *seen))
    except Failed:
        return  # it need not take None: it is never called with it
    if what := difference(call(agent, (state, *seen)), started):
        fix = "let the call use self.initial_state(agent_info, n) where state is None"
        yield error(f"called with None and called with initial_state: {what}", fix)


def rows_are_independent(subject: AgentSubject) -> Findings:
    """A row's results depend on that row alone."""
    n = subject.n_rows
    if n < 2:
        raise CannotCheck("batch_sizes has no batch of several rows")
    agent = subject.agent()
    for step, (inputs, _) in enumerate(subject.trace):
        first = call(agent, inputs)
        for row in range(n):
            alike = copied(inputs)
            for tensor in tensors_of(alike).values():
                tensor[:] = tensor[row].clone()
            if what := difference(first, call(agent, alike), row):
                fix = "use no statistics over the batch (call eval()), and no indices of rows"
                yield error(f"row {row} at step {step} beside other rows: {what}", fix)
                return


def deterministic(subject: AgentSubject) -> Findings:
    """The same arguments give the same bits, whatever was called in between."""
    agent, trace = subject.agent(), subject.trace
    for step, other in ((0, -1), (-1, 0)):
        with seeded_generators(1):
            first = call(agent, trace[step][0])
        call(agent, trace[other][0])
        with seeded_generators(2):
            again = [call(agent, trace[step][0]) for _ in range(2)]
        if what := difference(first, again[0]) or difference(first, again[1]):
            fix = (
                "draw from observation['noise'] (see rlpool.sample_categorical), call eval(), "
                "and keep everything but parameters in the state"
            )
            yield error(f"the same call twice, with another one in between: {what}", fix)
            return


def inputs_unchanged(subject: AgentSubject) -> Findings:
    """What it is called with stays as it was, except for the state, which is a copy."""
    agent = subject.agent()
    for step, (inputs, _) in enumerate(subject.trace):
        given = copied(inputs)
        with user_code("the call"):
            agent(*given)
        after = tensors_of(given)
        for (number, key), tensor in tensors_of(inputs).items():
            if number and bits(tensor) != bits(after[number, key]):
                name = ("state", "observation", "agent_info", "history")[number]
                fix = "write into copies: x = x + 1, not x += 1 or x.add_(1)"
                yield error(f"the call at step {step} changed {key!r} of {name}", fix)
                return


def returns_its_state(subject: AgentSubject) -> Findings:
    """The first value is the state that the call started from."""
    for step, ((state, *_), result) in enumerate(subject.trace):
        if state is not None and bits(dict(state.items())) != bits(result.state):
            fix = "return (state, output, new_state) and make new_state anew: nothing in place"
            yield warning(f"the state returned at step {step} is not the one passed in", fix)
            return


def update_takes_state_dict(subject: AgentSubject) -> Findings:
    """``update`` takes what the learner's copy gives, and keeps none of its memory."""
    learner, agent = subject.agent(0), subject.agent(1)
    given = subject.update_info
    if given is None:
        state_dict = getattr(learner, "state_dict", None)
        given = state_dict() if callable(state_dict) else None
        if not given:
            raise CannotCheck("the agent has no state_dict() with anything in it: pass update_info")
    # As it arrives in a worker: other memory, which is gone after the call.
    info = pytree.tree_map_only(torch.Tensor, torch.clone, given)
    fix = "def update(self, info): self.load_state_dict(info); or pass what it takes as update_info"
    try:
        with user_code("update", fix):
            agent.update(info)
    except Failed as failure:
        yield failure.finding
        return
    updated = [call(agent, inputs) for inputs, _ in subject.trace]
    pytree.tree_map_only(torch.Tensor, torch.zero_, info)
    for (inputs, _), result in zip(subject.trace, updated, strict=True):
        if what := difference(result, call(agent, inputs)):
            what = f"the agent uses the tensors that update got, whose memory is dropped: {what}"
            yield error(what, "copy them, as load_state_dict does")
            return
        what = difference(result, call(learner, inputs))
        if what and subject.update_info is None:
            fix = "let state_dict() hold, and update() take over, all that calls depend on"
            yield error(f"after update(state_dict()) the agent acts otherwise: {what}", fix)
            return


def same_in_every_worker(subject: AgentSubject) -> Findings:
    """Each worker makes the same agent."""
    report.refuse_instance(subject)
    agent, other = subject.agent(0), subject.agent(1)
    for inputs, _ in subject.trace:
        if what := difference(call(agent, inputs), call(other, inputs)):
            fix = "call batcher.update(agent.state_dict()) first, or seed it in create_agent"
            yield warning(f"agents made in two workers differ: {what}", fix)
            return


def seeds_and_closes(subject: AgentSubject) -> Findings:
    """``seed`` and ``close`` work."""
    agent = subject.agent()
    for name, arguments in (("seed", (2**31 - 1,)), ("close", ())):
        try:
            with user_code(f"{name}()", f"correct {name}, or leave it out"):
                getattr(agent, name)(*arguments)
        except Failed as failure:
            yield failure.finding


AGENT_CHECKS: tuple[report.Check, ...] = (
    report.creation,
    report.picklable,
    returns,
    same_for_any_number_of_rows,
    action_fits,
    initial_state_agrees,
    rows_are_independent,
    deterministic,
    inputs_unchanged,
    returns_its_state,
    update_takes_state_dict,
    same_in_every_worker,
    seeds_and_closes,
)
"""All checks, in their order."""


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
) -> report.Report:
    """Check an agent against the contract of ``rlpool.Agent``, and report all problems at once.

    It runs in this process, as in a worker: under ``torch.inference_mode``, with one thread. An
    instance that is given is copied, unless it cannot be. The process's global random generators
    are left as they were. Findings carry the names of their checks, which
    ``help(rlpool.testing.AgentContract)`` lists.

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

    Example:
        >>> check_agent(create_agent, CountingEnv).ok
        True
    """
    observations = observations_of(env, env_args, options, action_space, seed)
    subject = AgentSubject(
        agent, agent_args, observations, agent_info, update_info, seed, batch_sizes, n_steps
    )
    found = report.run_checks(subject, AGENT_CHECKS, skip)
    if strict and not found.ok:
        raise AgentSpecError(f"check_agent: {found}")
    return found
