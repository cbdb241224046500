"""The last line of an error says what to do, and it fits the case."""

from __future__ import annotations

import re
from functools import partial
from operator import delitem, setitem
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TransformReward
from torch import nn

from rlpool import (
    Agent,
    AgentSpecError,
    Batcher,
    DeviceAgent,
    DictTensor,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    RlpoolError,
    UsageError,
    WorkerStartupError,
    evaluate,
)
from rlpool.testing import CountingEnv, check_agent

from support.agents import ConstantAgent


def create_env(seed: int) -> GymEnv:
    return GymEnv([CountingEnv(length=2) for _ in range(3)], seed)


def error_of(
    create_agent: Any = ConstantAgent, env: Any = create_env, n_threads: int = 0, **infos: Any
) -> RlpoolError:
    """What a batcher raises, at once or from ``get``."""
    with pytest.raises(RlpoolError) as caught:  # noqa: PT012, SIM117
        with EpisodeBatcher(
            3, 4, create_agent, {}, env, {}, n_threads=n_threads, seeds=1
        ) as batcher:
            batcher.execute(3, **infos)
            batcher.get()
    return caught.value


def fix_of(error: BaseException) -> str:
    """The advice of an error."""
    return str(error).partition("\n  fix:   ")[2]


# Where it ran ---------------------------------------------------------------------------------


class FailingEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        raise KeyError("goal")


class FailingAgent(ConstantAgent):
    def __call__(self, *arguments: Any) -> Any:
        raise KeyError("weights")


def create_failing(seed: int) -> GymEnv:
    return GymEnv([FailingEnv()], seed)


def test_a_module_in_place_of_its_parameters_is_met_with_the_call_to_make() -> None:
    class Module(nn.Linear, ConstantAgent):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.action = 0

        __call__ = ConstantAgent.__call__
        update = nn.Module.load_state_dict

    with EpisodeBatcher(3, 4, Module, {}, create_env, n_workers=0) as batcher:
        batcher.update(Module())
        batcher.execute(3)
        with pytest.raises(RlpoolError) as caught:
            batcher.get()
    assert fix_of(caught.value) == "send the parameters: batcher.update(policy.state_dict())"


@pytest.mark.parametrize(
    "parts", [(ConstantAgent, create_failing), (FailingAgent, create_env)], ids=["env", "agent"]
)
def test_nobody_is_told_to_run_here_what_ran_here(parts: Any) -> None:
    error = error_of(*parts)
    assert "it ran in this process" in fix_of(error)
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.__traceback__ is not None


def test_what_ran_in_processes_is_to_be_run_here() -> None:
    assert "n_workers=0" in fix_of(error_of(FailingAgent, n_threads=1))
    fix = fix_of(error_of(env=lambda seed: ParallelEnvManager([FailingEnv], seed=seed)))
    assert fix == "step it in this process to debug: GymEnv([env_fn()])"


def window_error_of(create_agent: Any, n_threads: int) -> RlpoolError:
    with pytest.raises(RlpoolError) as caught:  # noqa: PT012, SIM117
        with Batcher(3, None, create_agent, {}, create_env, {}, n_threads, 1) as batcher:
            batcher.reset()
            batcher.execute()
            batcher.get()
    return caught.value


def evaluation_error_of(create_agent: Any, n_threads: int) -> RlpoolError:
    with pytest.raises(RlpoolError) as caught:
        evaluate(create_agent(), create_env, n_episodes=1, n_workers=n_threads)
    return caught.value


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (error_of, "EpisodeBatcher"),
        (window_error_of, "Batcher"),
        (evaluation_error_of, "evaluate"),
    ],
)
def test_the_same_class_or_function_is_to_be_run_here(run: Any, name: str) -> None:
    fix = fix_of(run(FailingAgent, n_threads=1))
    assert fix == f"run it in this process to debug: {name}(..., n_workers=0)"


# Functions that cannot be called ----------------------------------------------------------------


class Odd(ConstantAgent):
    """Does not take what its methods get."""

    def update(self) -> None:  # type: ignore[override]
        pass


class OddStart(ConstantAgent):
    def initial_state(self) -> Any:  # type: ignore[override]
        pass


class OddSeed(ConstantAgent):
    def seed(self) -> None:  # type: ignore[override]
        pass


def update_error_of(create_agent: Any) -> RlpoolError:
    with EpisodeBatcher(3, 4, create_agent, {}, create_env, {}, 0, seeds=1) as batcher:
        batcher.update({})
        batcher.execute(1)
        with pytest.raises(RlpoolError) as caught:
            batcher.get()
    return caught.value


def manager_error_of(env_fn: Any) -> RlpoolError:
    with pytest.raises(RlpoolError) as caught, ParallelEnvManager([CountingEnv, env_fn]):
        pass
    return caught.value


@pytest.mark.parametrize(
    ("run", "fix"),
    [
        (lambda: error_of(env=lambda s: create_env(s)), "def create_env(seed)"),
        (lambda: error_of(env=lambda seed, n: create_env(seed)), "the keys of env_args"),
        (lambda: error_of(lambda hidden: ConstantAgent()), "pass all that it needs in agent_args"),
        (lambda: error_of(OddSeed), "define seed(self, seed)"),
        (lambda: error_of(OddStart), "define initial_state(self, agent_info, n)"),
        (lambda: update_error_of(Odd), "define update(self, info)"),
        (lambda: manager_error_of(lambda seed: CountingEnv()), "called without arguments"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_told_how_it_is(run: Any, fix: str) -> None:
    error = run()
    assert "raised TypeError" in str(error)
    assert fix in fix_of(error)


def test_an_environment_that_only_the_program_has_registered_is_told_where_to() -> None:
    make = partial(gymnasium.make, "OnlyHere-v0")
    for error in (
        error_of(env=lambda seed: GymEnv([make()], seed), n_threads=1),
        manager_error_of(make),
    ):
        assert "gym.make('module:Id')" in fix_of(error)


def test_a_function_that_fails_in_itself_is_not_told_how_it_is_called() -> None:
    def create(seed: int) -> Any:
        return GymEnv()  # type: ignore[call-arg]

    error = error_of(env=create)
    assert "raised TypeError: GymEnv.__init__() missing" in str(error)
    assert "this process" in fix_of(error)  # not how it is called


# What an agent lacks --------------------------------------------------------------------------


class Noisy(Agent):
    def __call__(self, state: Any, observation: Any, *_: Any) -> Any:
        return observation["noise"]


class AgentFirst(Agent, nn.Module):
    def forward(
        self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
    ) -> Any:
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor(), DictTensor({"action": action}), DictTensor()


class ModuleFirst(nn.Module, Agent):
    forward = AgentFirst.forward


@pytest.mark.parametrize("create_agent", [AgentFirst, ModuleFirst])
def test_a_module_with_forward_is_an_agent_on_either_side(create_agent: Any) -> None:
    for make in (create_agent, lambda: DeviceAgent(create_agent(), "cpu")):
        with EpisodeBatcher(3, 4, make, {}, create_env, {}, n_threads=0) as batcher:
            batcher.execute(3)
            assert batcher.get().lengths.tolist() == [2] * 3


class Bare(Agent):
    pass


class Hidden(nn.Module, ConstantAgent):
    pass


class OfFrames(nn.Module, Agent):
    def forward(self, frame: Any) -> Any:
        return frame


CALL = "define __call__(self, state, observation, agent_info=None, history=None)"


@pytest.mark.parametrize(
    ("create_agent", "what", "fix"),
    [
        (Noisy, "agent raised KeyError", "set n_noise"),
        (Bare, "Bare does not say how to choose actions", CALL),
        (Hidden, "Hidden does not say how to choose actions", "put nn.Module last"),
        (OfFrames, "OfFrames.forward takes (frame", CALL),
    ],
)
def test_what_an_agent_lacks_is_told(create_agent: Any, what: str, fix: str) -> None:
    error = error_of(create_agent)
    assert isinstance(error, WorkerStartupError) == (create_agent is not Noisy)
    assert what in str(error)
    assert fix in fix_of(error)
    with pytest.raises(AgentSpecError, match=re.escape(CALL if fix != "set n_noise" else fix)):
        check_agent(create_agent, CountingEnv)


def test_a_module_that_is_no_agent_is_told_how_to_become_one() -> None:
    assert "class MyAgent(Agent, nn.Module)" in fix_of(error_of(lambda: nn.Linear(1, 1)))
    with pytest.raises(NotImplementedError, match="define __call__"):
        Bare()(None, DictTensor())


class Doing(ConstantAgent):
    """Does something with its observation before it acts."""

    def __init__(self, do: Any) -> None:
        super().__init__()
        self.do = do

    def __call__(self, state: Any, observation: Any, *others: Any) -> Any:
        self.do(observation)
        return super().__call__(state, observation, *others)


@pytest.mark.parametrize(
    ("do", "fix"),
    [
        (lambda o: nn.Linear(1, 2).double()(o["frame"]), "network.float()"),
        (lambda o: nn.Linear(1, 2, bias=False).bfloat16()(o["frame"]), "network.float()"),
        (lambda o: nn.Conv1d(1, 2, 1).double()(o["frame"][:, None]), "network.float()"),
        (lambda o: nn.GRU(1, 2).double()(o["frame"]), "network.float()"),
        (lambda o: nn.LayerNorm(1).double()(o["frame"]), "network.float()"),
        (lambda o: o[:, 0], 'observation["frame"][:, 2]'),
        (lambda o: o[..., :1], 'observation["frame"][:, 2]'),
        (lambda o: nn.Linear(1, 2)(o), 'such as observation["frame"]'),
        (lambda o: o / 255, 'such as observation["frame"]'),
        (lambda o: setitem(o, "frame", o["frame"] / 2), 'set("frame", e["frame"] / 2)'),
        (lambda o: nn.Linear(1, 2)(o["frame"]).sum().backward(), "replay_agent("),
    ],
)
def test_what_an_agent_does_wrong_is_met_with_what_to_write(do: Any, fix: str) -> None:
    assert fix in fix_of(error_of(lambda: Doing(do)))


class Uninitialised(AgentFirst):
    def __init__(self) -> None:
        self.size = 3


class SetsModule(AgentFirst):
    def __init__(self) -> None:
        self.network = nn.Linear(1, 2)


class UninitialisedEnv(GymEnv):
    def __init__(self, seed: int) -> None:
        self.size = 3


@pytest.mark.parametrize(
    "parts", [(Uninitialised,), (SetsModule,), (ConstantAgent, UninitialisedEnv)]
)
def test_who_forgets_super_is_told_to_call_it(parts: Any) -> None:
    error = error_of(*parts)
    assert isinstance(error, WorkerStartupError)
    assert "call super().__init__(" in fix_of(error)


def test_only_modules_move() -> None:
    assert isinstance(AgentFirst().to("cpu"), AgentFirst)
    with pytest.raises(UsageError, match=r"\(Agent, nn.Module\)"):
        ConstantAgent().to("cuda")  # type: ignore[attr-defined]


def test_what_is_returned_wrong_need_not_be_debugged() -> None:
    for error in (
        error_of(lambda: Doing(lambda o: DictTensor({"a": o["frame"], "b": o["frame"][:1]}))),
        error_of(env=lambda seed: GymEnv([TransformReward(CountingEnv(), str)], seed)),
    ):
        assert "this process" not in str(error)


# What environments lack -----------------------------------------------------------------------


def vector_env() -> gymnasium.vector.SyncVectorEnv:
    return gymnasium.vector.SyncVectorEnv([CountingEnv])


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (CountingEnv, "returned CountingEnv, not", "return GymEnv([...env"),
        (lambda: [CountingEnv()] * 2, "returned list, not", "return GymEnv([...env"),
        (lambda: None, "returned NoneType, not", "end create_env with return GymEnv("),
    ],
)
def test_what_create_env_returned_instead_is_told(make: Any, what: str, fix: str) -> None:
    error = error_of(env=lambda seed: make())
    assert isinstance(error, WorkerStartupError)
    assert what in str(error)
    assert fix in fix_of(error)


# What was passed ------------------------------------------------------------------------------


def test_calls_that_go_wrong_are_met_with_those_to_make() -> None:
    given = None, ConstantAgent, {}, create_env, {}, 0
    with EpisodeBatcher(3, 4, *given[1:]) as batcher, Batcher(3, *given) as windows:
        batcher.execute(3)
        windows.reset()
        episodes: Any = batcher.get()
        halves = {"x": torch.ones(3, dtype=torch.bfloat16)}
        for call, fix in (
            (lambda: episodes[:, 0], 'observation["frame"][:, 2]'),
            (
                lambda: setitem(episodes, "frame", episodes["frame"] / 2),
                'e.set("frame", e["frame"]',
            ),
            (lambda: delitem(episodes, "frame"), "get(keys)"),
            (lambda: batcher.execute(), "execute(32)"),
            (lambda: batcher.execute(3, halves), "x.float()"),
            (lambda: windows.execute(np.int64(8)), "call execute() for the next window"),
        ):
            with pytest.raises(RlpoolError) as caught:
                call()
            assert fix in fix_of(caught.value)


def test_objects_in_place_of_functions_are_refused() -> None:
    error = error_of(nn.Linear(1, 1), n_threads=1)
    assert "create_agent is an object, Linear" in str(error)
    assert "create_agent=MyAgent" in fix_of(error)
    error = error_of(env=vector_env())
    assert "create_env is an object, SyncVectorEnv" in str(error)
    assert "create_env=lambda seed: GymEnv(" in fix_of(error)
