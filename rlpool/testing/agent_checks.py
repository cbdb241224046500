"""The clauses of the contract of an agent, one function each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from rlpool.agents.agent import Agent, call_problem
from rlpool.data.dict_tensor import DictTensor
from rlpool.errors import SpecError
from rlpool.loop.agent_driver import AgentDriver
from rlpool.loop.probe import refuse_misfit
from rlpool.record.failures import agent_advice, described
from rlpool.specs import TensorSpec
from rlpool.testing.agent_call_checks import (
    deterministic,
    initial_state_agrees,
    inputs_unchanged,
    returns_its_state,
    rows_are_independent,
    same_in_every_worker,
    update_takes_state_dict,
)
from rlpool.testing.agent_results import specs_of, told
from rlpool.testing.agent_subject import AgentSubject, call, step_specs
from rlpool.testing.findings import (
    CannotCheck,
    Check,
    Failed,
    Finding,
    error,
    from_spec_error,
    warning,
)
from rlpool.testing.misfits import misfits
from rlpool.testing.native_actions import native_actions

Findings = Iterator[Finding]

_RETURN_FIX = (
    "return (state, output, new_state), DictTensors with a row per lane, 'action' in the output"
)


def creation(subject: AgentSubject) -> Findings:
    """It can be made, again and again."""
    made = []
    try:
        made = [subject.make(0), subject.make(1)]
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        yield error(
            "creation",
            f"{subject.name} raised {described(failure)}",
            "call it in this process to debug; arguments go into agent_args={...}",
        )
        return
    if not isinstance(made[0], Agent):
        yield error(
            "creation",
            f"{subject.name} returned {type(made[0]).__name__}, not an Agent",
            "subclass rlpool.Agent",
        )
    elif problem := call_problem(made[0]):
        yield from_spec_error("creation", SpecError(problem), "")
    elif made[0] is made[1] and not subject.is_instance:
        yield error(
            "creation",
            f"{subject.name} returned the same object twice",
            "make a new agent in every call",
        )


def picklable(subject: AgentSubject) -> Findings:
    """What makes it can be sent to a worker."""
    if subject.is_instance:
        raise CannotCheck("an instance was given: pass the function that makes it")
    try:
        cloudpickle.loads(cloudpickle.dumps(subject.sent_to_workers))
    except Exception as failure:
        yield error(
            "picklable",
            f"{subject.name} or its arguments cannot be pickled: {described(failure)}",
            "create inside the function what it needs, instead of capturing it",
        )


def returns(subject: AgentSubject) -> Findings:
    """It returns three values with a row per lane, in every call of the same kind."""
    for n in subject.batch_sizes:
        agent = subject.agent()
        try:
            if agent.require_history():
                _run_with_history(subject, agent, n)
            else:
                _run(subject, agent, n)
            inputs = subject.trace(agent, n, 0)[0]
            step_specs(inputs.observation, call(agent, inputs))
        except KeyboardInterrupt:
            raise
        except BaseException as failure:
            yield _failure("returns", failure, n)
            return


def same_for_any_number_of_rows(subject: AgentSubject) -> Findings:
    """Keys, shapes and dtypes do not depend on the number of rows."""
    kinds: dict[int, dict[str, dict[str, TensorSpec]]] = {}
    for n in subject.batch_sizes:
        agent = subject.agent()
        result = call(agent, subject.trace(agent, n, 0)[0])
        kinds[n] = {name: specs_of(part) for name, part in result.parts().items()}
    first_n, first = next(iter(kinds.items()))
    for n, specs in kinds.items():
        for name, part in specs.items():
            if part != first[name]:
                yield error(
                    "same_for_any_number_of_rows",
                    f"the {name} of {n} rows is {told(part)}, "
                    f"of {first_n} rows {told(first[name])}",
                    "return the same keys, shapes (but for the rows) and dtypes for any batch; "
                    "squeeze() without a dimension drops the rows of a batch of one",
                )
                return


def action_fits(subject: AgentSubject) -> Findings:
    """Actions are of the action space's kind, and in it."""
    space, leaves = subject.rows.action_space, subject.rows.action_leaves
    if space is None or leaves is None:
        raise CannotCheck("the action space is not known: pass action_space")
    agent = subject.agent()
    for inputs in subject.trace(agent, subject.n_rows, 0):
        output = call(agent, inputs).output
        actions = {k: t for k, t in output.items() if k == "action" or k.startswith("action/")}
        given = specs_of(actions)
        for key in sorted(leaves.keys() | given.keys()):
            try:
                refuse_misfit(key, given.get(key), leaves[key].spec if key in leaves else None)
            except SpecError as failure:
                yield from_spec_error("action_fits", failure, "return one action per row")
                return
        for row, action in enumerate(native_actions(space, actions)):
            for _, what in misfits(space, action, "the action"):
                is_bound = "outside the bounds" in what
                yield (warning if is_bound else error)(
                    "action_fits",
                    f"row {row}: {what}",
                    "clip it, or sample with rlpool.sample_tanh_normal"
                    if is_bound
                    else "return actions that are in the action space",
                )
                return


def seeds_and_closes(subject: AgentSubject) -> Findings:
    """``seed`` and ``close`` work."""
    agent = subject.agent()
    calls: dict[str, Callable[[], Any]] = {
        "seed(2**31 - 1)": lambda: agent.seed(2**31 - 1),
        "close()": agent.close,
    }
    for name, function in calls.items():
        try:
            function()
        except KeyboardInterrupt:
            raise
        except BaseException as failure:
            yield error(
                "seeds_and_closes",
                f"{name} raised {described(failure)}",
                "mend that method, or leave it out",
            )


def _run(subject: AgentSubject, agent: Agent, n: int) -> None:
    """Call the agent as the step loop does, with episodes that start at different times."""
    driver = AgentDriver(agent, n)
    info = subject.info(n, 0)
    shown = None if info is None else DictTensor(info)
    driver.start(range(n), shown)
    for step in range(subject.n_steps):
        observation = subject.observation(agent, n, 0, step)
        if step == subject.n_steps - 1:
            driver.start([0], shown)
            starting = subject.observation(agent, n, 0, 0)
            for key, tensor in observation.items():
                tensor[0] = starting[key][0]
        driver.act(observation, shown, None)
        driver.commit()


def _run_with_history(subject: AgentSubject, agent: Agent, n: int) -> None:
    """Call an agent that wants its history."""
    results = [call(agent, inputs.copied()) for inputs in subject.trace(agent, n, 0)]
    first = results[0]
    if not any(key == "action" or key.startswith("action/") for key in first.output):
        raise SpecError(f"the agent's output has the keys {sorted(first.output)}, but no 'action'")
    for result in results:
        for name in ("output", "new_state"):
            one, other = specs_of(first.parts()[name]), specs_of(result.parts()[name])
            if one != other:
                raise SpecError(
                    f"the agent's {name} is {told(other)}, at first it was {told(one)}",
                    fix="return the same keys, shapes and dtypes in every call",
                )


def _failure(check: str, failure: BaseException, n: int) -> Finding:
    if isinstance(failure, Failed):
        cause = failure.__cause__
        advice = "" if cause is None else agent_advice(cause)
        return error(check, f"with {n} rows: {failure}", advice or _RETURN_FIX)
    if isinstance(failure, SpecError):
        return from_spec_error(check, failure, _RETURN_FIX, f" (a batch of {n} rows)")
    return error(
        check,
        f"a call with {n} rows raised {described(failure)}",
        agent_advice(failure)
        or "let it take any number of rows, state None where rows start, and the keys of the "
        "environment; agent_info is None unless given",
    )


AGENT_CHECKS: list[Check[AgentSubject]] = [
    Check(function.__name__, function)
    for function in (
        creation,
        picklable,
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
]
"""All clauses, in the order in which they are checked."""
