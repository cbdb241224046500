"""Clauses about what the results of an agent's calls depend on, and what calls change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.generators import seeded_generators
from rlpool.record.failures import described
from rlpool.testing.agent_results import difference, difference_of, specs_of, told
from rlpool.testing.agent_subject import AgentSubject, Inputs, call, initial_state
from rlpool.testing.episodes import bits
from rlpool.testing.findings import CannotCheck, Failed, Finding, error, warning

Findings = Iterator[Finding]

_NOISE_FIX = (
    "declare n_noise and draw from observation['noise'] (see rlpool.sample_categorical), keep "
    "nothing but parameters outside the state, and call eval() where there is dropout"
)


def initial_state_agrees(subject: AgentSubject) -> Findings:
    """``initial_state`` gives the state that a call with ``None`` would start from."""
    agent = subject.agent()
    if not agent.makes_initial_states():
        return
    for n in subject.batch_sizes:
        info = subject.info(n, 0)
        try:
            state = initial_state(agent, info, n)
        except Failed as failure:
            yield error("initial_state_agrees", str(failure), "return a DictTensor of n rows")
            return
        for key, tensor in state.items():
            if tensor.shape[:1] != (n,):
                yield error(
                    "initial_state_agrees",
                    f"initial_state(agent_info, {n}) has {key!r} of shape {list(tensor.shape)}",
                    "return n rows under every key",
                )
                return
    first = subject.trace(agent, subject.n_rows, 0)[0]
    new_state = call(agent, first.copied()).new_state
    if specs_of(first.state or {}) != specs_of(new_state):
        yield error(
            "initial_state_agrees",
            f"initial_state gives {told(specs_of(first.state or {}))}, "
            f"calls give {told(specs_of(new_state))}",
            "return the same keys, shapes and dtypes",
        )
        return
    try:
        started = call(agent, Inputs(None, first.observation, first.agent_info, first.history))
    except Failed:
        return  # it need not take None: it is never called with it
    what = difference(call(agent, first.copied()), started)
    if what:
        yield error(
            "initial_state_agrees",
            f"called with None and called with initial_state: {what}",
            "let the call use self.initial_state(agent_info, n) where state is None",
        )


def rows_are_independent(subject: AgentSubject) -> Findings:
    """A row's results depend on that row alone."""
    n = subject.n_rows
    if n < 2:
        raise CannotCheck("batch_sizes has no batch of several rows")
    agent = subject.agent()
    one, *others = (subject.trace(agent, n, variant) for variant in range(4))
    for step in sorted({0, subject.n_steps - 1}):
        alone = call(agent, one[step].copied())
        for row in range(n):
            companies = [other[step].with_row_of(one[step], row) for other in others]
            companies.append(one[step].with_all_rows_like(row))
            whats = (difference(alone, call(agent, inputs), row) for inputs in companies)
            if what := next(filter(None, whats), ""):
                yield error(
                    "rows_are_independent",
                    f"row {row} of {n} at step {step}, with other values in the other rows: {what}",
                    "compute each row from itself: no statistics over the batch (call eval() where "
                    "there is batch normalisation), no indexing by position",
                )
                return


def deterministic(subject: AgentSubject) -> Findings:
    """The same arguments give the same bits, whatever was called in between."""
    agent = subject.agent()
    one, other = (subject.trace(agent, subject.n_rows, variant) for variant in (0, 1))
    for step in sorted({0, subject.n_steps - 1}):
        with seeded_generators(1):
            first = call(agent, one[step].copied())
        call(agent, other[step].copied())
        with seeded_generators(2):
            again = [call(agent, one[step].copied()) for _ in range(2)]
        if what := difference(first, again[0]) or difference(first, again[1]):
            yield error(
                "deterministic",
                f"step {step} twice with the same arguments, another call in between: {what}",
                _NOISE_FIX,
            )
            return


def inputs_unchanged(subject: AgentSubject) -> Findings:
    """What it is called with stays as it was, but for the state, which is a copy."""
    agent = subject.agent()
    for step, inputs in enumerate(subject.trace(agent, subject.n_rows, 0)):
        before = inputs.copied()
        call(agent, inputs, copy=False)
        for name in ("observation", "agent_info", "history"):
            for key, tensor in _items(getattr(before, name)):
                if bits(tensor) != bits(dict(_items(getattr(inputs, name)))[key]):
                    yield error(
                        "inputs_unchanged",
                        f"the call at step {step} changed {key!r} of {name}",
                        "write into copies: x = x + 1, not x += 1 or x.add_(1)",
                    )
                    return


def returns_its_state(subject: AgentSubject) -> Findings:
    """The first value is the state that the call started from."""
    agent = subject.agent()
    for step, inputs in enumerate(subject.trace(agent, subject.n_rows, 0)):
        result = call(agent, inputs.copied())
        if inputs.state is None:
            what = difference_of(specs_of(result.state), specs_of(result.new_state))
            fix = "return (state, output, new_state), both states with the same keys and shapes"
            if what:
                yield error(
                    "returns_its_state", f"started with None, state and new_state: {what}", fix
                )
                return
        elif bits(inputs.state) != bits(result.state):
            yield warning(
                "returns_its_state",
                f"the state returned at step {step} is not the one that the call got",
                "return (state, output, new_state) and make new_state anew: nothing in place",
            )
            return


def update_takes_state_dict(subject: AgentSubject) -> Findings:
    """``update`` takes what the learner's copy gives, and keeps none of its memory."""
    learner, agent = subject.agent(0), subject.agent(1)
    info = subject.update_info
    if info is None:
        state_dict = getattr(learner, "state_dict", None)
        info = state_dict() if callable(state_dict) else None
        if not info:
            raise CannotCheck("the agent has no state_dict() with anything in it: pass update_info")
    # As it arrives in a worker: other memory, which is gone after the call.
    info = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, info)
    try:
        agent.update(info)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        yield error(
            "update_takes_state_dict",
            f"update raised {described(failure)}",
            "def update(self, info): self.load_state_dict(info); or pass what it takes as "
            "update_info",
        )
        return
    trace = subject.trace(agent, subject.n_rows, 0)
    updated = [call(agent, inputs.copied()) for inputs in trace]
    pytree.tree_map(lambda x: x.zero_() if isinstance(x, torch.Tensor) else x, info)
    for inputs, result in zip(trace, updated, strict=True):
        what = difference(result, call(agent, inputs.copied()))
        if what:
            yield error(
                "update_takes_state_dict",
                f"the agent uses the tensors that update got, whose memory is dropped: {what}",
                "copy them, as load_state_dict does",
            )
            return
        what = difference(result, call(learner, inputs.copied()))
        if what and subject.update_info is None:
            yield error(
                "update_takes_state_dict",
                f"after update(state_dict()) the agent differs from the one it came from: {what}",
                "let state_dict() hold, and update() take over, everything that calls depend on",
            )
            return


def same_in_every_worker(subject: AgentSubject) -> Findings:
    """Each worker makes the same agent."""
    if subject.is_instance:
        raise CannotCheck("an instance was given: pass the function that makes it")
    agent, other = subject.agent(0), subject.agent(1)
    for inputs in subject.trace(agent, subject.n_rows, 0):
        what = difference(call(agent, inputs.copied()), call(other, inputs.copied()))
        if what:
            yield warning(
                "same_in_every_worker",
                f"agents made in two workers differ: {what}",
                "call batcher.update(agent.state_dict()) before the first execute(), or seed the "
                "initialisation in create_agent",
            )
            return


def _items(rows: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(rows, TemporalDictTensor):
        yield "lengths", rows.lengths
    yield from (rows.items() if rows is not None else ())
