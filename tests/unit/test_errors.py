"""The exceptions: their classes, whole messages, advice that fits the case, and pickling."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from functools import partial
from operator import setitem
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TransformObservation
from torch import nn

from rlpool import (
    Agent,
    Batcher,
    DeviceAgent,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    Pool,
    errors,
)
from rlpool.errors import (
    AgentError,
    EnvError,
    RlpoolError,
    SpecError,
    UsageError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
)
from rlpool.testing import CountingEnv

from support.agents import ConstantAgent

BASES: dict[type[RlpoolError], set[type[Exception]]] = {
    UsageError: {RuntimeError},
    errors.BatcherClosedError: {UsageError, ValueError},
    errors.ResultTimeoutError: {TimeoutError},
    SpecError: {ValueError},
    errors.NotEnoughDataError: {ValueError},
    WorkerError: {RuntimeError},
    WorkerStartupError: {WorkerError},
    EnvError: {WorkerError},
    errors.EnvSpecError: {EnvError, SpecError},
    errors.NotRepeatedError: {EnvError},
    AgentError: {WorkerError},
    errors.AgentSpecError: {AgentError, SpecError},
    WorkerDiedError: {WorkerError},
    errors.WorkerTimeoutError: {WorkerError, TimeoutError},
}


def test_every_exception_is_caught_by_its_documented_bases_only() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    found = {kind for kind in kinds if issubclass(kind, RlpoolError)} - {RlpoolError}
    assert {kind: set(kind.__bases__) - {RlpoolError} for kind in found} == BASES


# Mistakes --------------------------------------------------------------------------------------


def create_env(seed: int) -> GymEnv:
    return GymEnv([CountingEnv(length=2) for _ in range(3)], seed)


def batcher(
    create_agent: Any = ConstantAgent, env: Any = create_env, n_workers: int = 0, **options: Any
) -> EpisodeBatcher:
    return EpisodeBatcher(3, 4, create_agent, {}, env, n_workers=n_workers, seeds=1, **options)


def episodes(*given: Any, update: Any = None, **infos: Any) -> Any:
    with batcher(*given) as made:
        if update is not None:
            made.update(update)
        made.execute(3, **infos)
        return made.get()


def of_env(make: Any) -> Any:
    """Collect episodes of environments created by ``make``."""
    return episodes(ConstantAgent, lambda seed: GymEnv([make()], seed))


def window(create_agent: Any = ConstantAgent, n_workers: int = 0, n_steps: Any = None) -> Any:
    with Batcher(3, None, create_agent, {}, create_env, {}, n_workers, 1) as made:
        made.reset()
        made.execute(*(() if n_steps is None else (n_steps,)))
        return made.get()


def managed(env_fn: Any) -> None:
    with ParallelEnvManager([CountingEnv, env_fn]):
        pass


class FailingEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        raise KeyError("goal")


class FailingAgent(ConstantAgent):
    def __call__(self, *arguments: Any) -> Any:
        raise KeyError("weights")


class Doing(ConstantAgent):
    """Agent that does something with its observation before it acts."""

    def __init__(self, do: Any) -> None:
        super().__init__()
        self.do = do

    def __call__(self, state: Any, observation: Any, *others: Any) -> Any:
        self.do(observation)
        return super().__call__(state, observation, *others)


def of_agent(do: Any) -> Any:
    """Collect episodes of an agent that does something with its observation."""
    return episodes(lambda: Doing(do))


def without_arguments(method: str) -> Any:
    """Return an agent with a method that takes no arguments."""
    return type("Odd", (ConstantAgent,), {method: lambda self: None})


class AgentFirst(Agent, nn.Module):
    def forward(
        self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
    ) -> Any:
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor(), DictTensor({"action": action}), DictTensor()

    def update(self, info: Any) -> None:
        self.load_state_dict(info)


class ModuleFirst(nn.Module, Agent):
    forward = AgentFirst.forward


class Bare(Agent):
    pass


class Hidden(nn.Module, ConstantAgent):
    pass


class Uninitialised(AgentFirst):
    def __init__(self) -> None:
        self.network = nn.Linear(1, 2)


CALLS = [
    lambda: of_env(FailingEnv),
    lambda: episodes(FailingAgent, create_env, 1),
    lambda: episodes(ConstantAgent, lambda seed, n: create_env(seed)),
    lambda: episodes(update={}),
    lambda: episodes(Bare),
    lambda: episodes(lambda: nn.Linear(1, 1)),
    lambda: episodes(ConstantAgent, lambda seed: CountingEnv()),
    lambda: of_env(lambda: TransformObservation(CountingEnv(), lambda _: np.zeros(2), None)),
    lambda: episodes(nn.Linear(1, 1)),
    lambda: batcher(n_threads=0),
    lambda: episodes(agent_info={"x": torch.ones(2)}),
    lambda: batcher().execute(),
    lambda: batcher().get(),
    lambda: DictTensor({"frame": torch.zeros(3, 4)})[:, 0],
    lambda: Pool(pool_size=3).sample(1),
]
MESSAGES = """
EnvError: env.step raised KeyError: 'goal'
  where: worker 0, lane 0, row 0, episode 0, step 0, seed 29866163
  fix:   it ran in this process: debug it here (the __cause__ of the error has the frames)

AgentError: the agent raised KeyError: 'weights'
  where: worker 0, lane 0, row 0, episode 0, step 0, seed 29866163
  fix:   run it in this process to debug: EpisodeBatcher(..., n_workers=0)

WorkerStartupError: create_env raised TypeError: <lambda>.<locals>.<lambda>() missing 1 required positional argument: 'n'
  where: worker 0
  fix:   let it take seed, by this name, and the keys of env_args: def create_env(seed)

AgentError: agent.update: ConstantAgent does not implement update(info)
  where: worker 0
  fix:   define update(self, info), for instance self.model.load_state_dict(info)

WorkerStartupError: Bare cannot choose actions
  where: worker 0
  fix:   define __call__(self, observation) in its class, or forward in a module

WorkerStartupError: Linear.forward takes (input: torch.Tensor) -> torch.Tensor, which are not the arguments of an agent
  where: worker 0
  fix:   name the parameters it needs: observation, state, agent_info, history

WorkerStartupError: create_env returned CountingEnv, not a VecEnv
  where: worker 0
  fix:   end create_env with return GymEnv([...environments...], seed)

EnvSpecError: env.reset: 'frame' should have shape [1], got [2]
  where: worker 0, lane 0, row 0, episode 0, step 0, seed 29866163
  fix:   if it varies: docs/episodes.md, "Values of different lengths", has a wrapper that pads texts, sequences and arrays, with a key for their length

SpecError: create_agent is an object, Linear
  fix:   pass the function or class that makes it; every worker calls it: create_agent=MyAgent, agent_args={...}

SpecError: both n_workers and n_threads are given, two names of the same argument
  fix:   pass n_workers alone

SpecError: 'x' in agent_info has 2 rows, 3 were expected
  fix:   give one row for each, or one number for all; or omit agent_info

SpecError: n_episodes should be an int of at least 1, got None
  fix:   say how many: execute(32)

UsageError: nothing is pending
  fix:   call execute() before get()

SpecError: cannot select from 3 rows with tuple (slice(None, None, None), 0)
  fix:   index one of the tensors: observation["frame"][:, 2]

NotEnoughDataError: 1 transitions were requested, but there are 0
  fix:   add more before sampling, or request a smaller batch
"""  # noqa: E501

HERE = "this process"
ADVICE: list[tuple[Callable[[], Any], type[RlpoolError], str]] = [
    # where it ran
    (lambda: window(FailingAgent, 1), AgentError, "Batcher(..., n_workers=0)"),
    (
        lambda: episodes(ConstantAgent, lambda seed: ParallelEnvManager([FailingEnv], seed=seed)),
        EnvError,
        "GymEnv([env_fn()])",
    ),
    # functions that cannot be called as they are
    (lambda: episodes(without_arguments("seed")), WorkerStartupError, "define seed(self, seed)"),
    (lambda: managed(lambda seed: CountingEnv()), WorkerStartupError, "without arguments"),
    # one that fails in itself
    (lambda: episodes(ConstantAgent, lambda seed: GymEnv()), WorkerStartupError, HERE),
    # registered only by the program
    (lambda: managed(partial(gymnasium.make, "Here-v0")), WorkerStartupError, "'module:Id'"),
    # methods that an agent lacks
    (lambda: of_agent(lambda o: o["noise"]), AgentError, "set n_noise"),
    (lambda: episodes(Hidden), WorkerStartupError, "put nn.Module last"),
    (lambda: episodes(Uninitialised), WorkerStartupError, "super().__init__("),
    (lambda: ConstantAgent().to("cuda"), UsageError, "(Agent, nn.Module)"),
    (lambda: episodes(AgentFirst, update=AgentFirst()), RlpoolError, "policy.state_dict()"),
    # operations on its observation
    (lambda: of_agent(lambda o: nn.Linear(1, 2).double()(o["frame"])), AgentError, ".float()"),
    (lambda: of_agent(lambda o: nn.Linear(1, 2)(o)), AgentError, 'observation["frame"]'),
    (lambda: of_agent(lambda o: setitem(o, "frame", 1)), AgentError, 'set("frame"'),
    (
        lambda: of_agent(lambda o: nn.Linear(1, 2)(o["frame"]).sum().backward()),
        AgentError,
        "replay_agent(",
    ),
    # invalid arguments
    (lambda: episodes(ConstantAgent, lambda seed: None), WorkerStartupError, "return GymEnv("),
    (lambda: episodes(ConstantAgent, create_env(0)), SpecError, "create_env=lambda seed: GymEnv("),
    (lambda: episodes(agent_info={"x": torch.ones(3).bfloat16()}), SpecError, "x.float()"),
    (lambda: window(n_steps=8), SpecError, "call execute()"),
]


def error_of(call: Callable[[], Any]) -> RlpoolError:
    with pytest.raises(RlpoolError) as caught:
        call()
    return caught.value


@pytest.mark.linux
def test_messages_give_the_problem_the_place_and_the_fix() -> None:
    said = [f"{type(error).__name__}: {error}" for error in map(error_of, CALLS)]
    assert said == MESSAGES.strip().split("\n\n")


@pytest.mark.linux
def test_advice_fits_the_case() -> None:
    for call, kind, part in ADVICE:
        error = error_of(call)
        assert isinstance(error, kind), error
        assert part in error.fix, error


def test_an_error_in_this_process_has_the_original_and_its_frames_as_cause() -> None:
    cause = error_of(lambda: episodes(FailingAgent)).__cause__
    assert isinstance(cause, KeyError)
    assert cause.__traceback__ is not None


@pytest.mark.parametrize("create_agent", [AgentFirst, ModuleFirst])
def test_a_module_with_forward_is_an_agent_on_either_side(create_agent: Any) -> None:
    for make in (create_agent, lambda: DeviceAgent(create_agent(), "cpu")):
        assert episodes(make).lengths.tolist() == [2] * 3


# Their state -----------------------------------------------------------------------------------

WHERE = Where(worker=3, lane=14, row=7, episode=27, step=112, seed=17, env_info={"task": 5})
REPORT: dict[str, Any] = {
    "where": WHERE,
    "fix": "look there",
    "options": {"task": 5},
    "actions": (1, 2),
}
DEATH = {"exitcode": -9, "signal_name": "SIGKILL", "history": (EnvError("before"),)}


def test_messages_include_everything_known_about_the_place() -> None:
    assert str(WorkerError("it broke", **REPORT)).splitlines() == [
        "it broke",
        "  where: worker 3, lane 14, row 7, episode 27, step 112, seed 17, env_info {'task': 5}",
        "  fix:   look there",
    ]
    assert (str(EnvError("it broke")), EnvError("it broke").where) == ("it broke", Where())


@pytest.mark.parametrize("kind", BASES)
def test_every_exception_survives_pickling_and_shows_its_remote_traceback(
    kind: type[RlpoolError],
) -> None:
    if not issubclass(kind, WorkerError):
        again = pickle.loads(pickle.dumps(kind("what", fix="that")))
        assert (type(again), str(again)) == (kind, "what\n  fix:   that")
        return
    more: Any = DEATH if kind is WorkerDiedError else {}
    error = kind("it broke", **REPORT, traceback_text="Traceback:\n  in worker\n", **more)
    reworded = error.reworded(what="it broke down", fix="look here")
    assert (reworded.what, reworded.fix) == ("it broke down", "look here")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), reworded):
        assert type(other) is kind
        for name in vars(error).keys() - ({"what", "fix"} if other is reworded else set()):
            assert repr(getattr(other, name)) == repr(getattr(error, name)), name
        printed = "".join(traceback.format_exception(other))
        assert "in worker" in printed
        assert "direct cause" in printed
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
