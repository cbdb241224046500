"""The last line of an error says what to do, and it fits the case."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from rlpool import (
    Agent,
    AgentError,
    AgentSpecError,
    Batcher,
    DeviceAgent,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    MonoThreadEpisodeBatcher,
    ParallelEnvManager,
    Pool,
    RlpoolError,
    SpecError,
    WorkerStartupError,
    make_parallel_env,
)
from rlpool.testing import CountingEnv, check_agent, check_env

from support.agents import ConstantAgent


def create_env(seed: int) -> GymEnv:
    return GymEnv([CountingEnv(length=2) for _ in range(3)], seed)


def error_of(
    create_agent: Any = ConstantAgent,
    create_env: Any = create_env,
    *,
    n_threads: int = 0,
    **infos: Any,
) -> RlpoolError:
    """What a batcher raises, at once or from ``get``."""
    functions = create_agent, {}, create_env, {}
    try:
        with EpisodeBatcher(3, 4, *functions, n_threads=n_threads, seeds=1) as batcher:
            batcher.execute(3, **infos)
            batcher.get()
    except RlpoolError as error:
        return error
    pytest.fail("nothing was raised")


def fix_of(error: BaseException) -> str:
    """The advice of an error."""
    _, _, fix = str(error).partition("\n  fix:   ")
    return fix


def step_of(observation: DictTensor) -> Any:
    action = torch.zeros(observation.n_elems(), dtype=torch.int64)
    return DictTensor(), DictTensor({"action": action}), DictTensor()


# Where it ran ---------------------------------------------------------------------------------


class FailingEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        raise KeyError("goal")


class FailingAgent(ConstantAgent):
    def __call__(self, *arguments: Any) -> Any:
        raise KeyError("weights")


def create_failing(seed: int) -> GymEnv:
    return GymEnv([FailingEnv()], seed)


@pytest.mark.parametrize(
    "parts", [(ConstantAgent, create_failing), (FailingAgent, create_env)], ids=["env", "agent"]
)
def test_nobody_is_told_to_run_here_what_ran_here(parts: Any) -> None:
    error = error_of(*parts)
    assert "n_threads=0" not in str(error)
    assert "it ran in this process" in fix_of(error)
    assert isinstance(error.__cause__, KeyError)
    assert error.__cause__.__traceback__ is not None
    assert "n_threads=0" in fix_of(error_of(*parts, n_threads=1))
    with MonoThreadEpisodeBatcher(parts[0], {}, parts[1], {}) as batcher:
        batcher.execute(1)
        with pytest.raises((EnvError, AgentError)) as caught:
            batcher.get()
    assert fix_of(caught.value) == fix_of(error)


def test_where_environments_ran_in_processes_the_advice_is_to_step_them_here() -> None:
    def create_manager(seed: int) -> ParallelEnvManager:
        return ParallelEnvManager([FailingEnv], seed=seed)

    fix = fix_of(error_of(ConstantAgent, create_manager))
    assert fix == "step it in this process to debug: GymEnv([env_fn()])"
    with Pool([FailingEnv()], 1, 10) as pool, pytest.raises(EnvError) as caught:
        pool.store()
    assert (
        fix_of(caught.value) == "call reset() and step() of environment 0 in this process to debug"
    )


# What an agent lacks --------------------------------------------------------------------------


class Noisy(Agent):
    def __call__(self, state: Any, observation: Any, *_: Any) -> Any:
        observation["noise"]
        return step_of(observation)


def test_a_forgotten_number_of_random_numbers_is_told() -> None:
    for n_threads in (0, 1):
        error = error_of(Noisy, n_threads=n_threads)
        assert isinstance(error, AgentError)
        assert "set n_noise" in fix_of(error)
    assert "set n_noise" in str(check_agent(Noisy, CountingEnv, strict=False))


class AgentFirst(Agent, nn.Module):
    def forward(
        self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
    ) -> Any:
        return step_of(observation)


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


@pytest.mark.parametrize(
    ("create_agent", "what"),
    [
        (Bare, "Bare does not say how to choose actions"),
        (Hidden, "Hidden does not say how to choose actions"),
        (OfFrames, "OfFrames.forward takes (frame"),
    ],
)
def test_an_agent_that_cannot_be_called_is_refused_when_it_is_made(
    create_agent: Any, what: str
) -> None:
    error = error_of(create_agent)
    assert isinstance(error, WorkerStartupError)
    assert what in str(error)
    wanted = "define __call__(self, state, observation, agent_info=None, history=None)"
    assert wanted in fix_of(error)
    assert ("put nn.Module last" in fix_of(error)) == (create_agent is Hidden)
    assert wanted in str(check_agent(create_agent, CountingEnv, strict=False))
    if create_agent is Bare:
        assert "class MyAgent(Agent, nn.Module)" in fix_of(error_of(lambda: nn.Linear(1, 1)))
        with pytest.raises(NotImplementedError, match="define __call__"):
            create_agent()(None, DictTensor())


ACTION = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("result", "what", "fix"),
    [
        (ACTION, "returned Tensor, not three values", "return (state, output, new_state)"),
        ((None, None), "returned tuple of 2, not three values", "return (state, output, new_s"),
        ((None, ACTION, None), "output should be a DictTensor, got Tensor", "DictTensor({"),
        ((None, {"action": ACTION.numpy()}, None), "be a tensor, got ndarray", "torch.as_tensor"),
        ((None, {"act": ACTION}, None), "but no 'action'", "put the actions under 'action'"),
    ],
)
def test_what_an_agent_returned_instead_is_told(result: Any, what: str, fix: str) -> None:
    class Returning(Agent):
        def __call__(self, *_: Any) -> Any:
            return result

    error = error_of(Returning)
    assert isinstance(error, AgentSpecError)
    assert what in str(error)
    assert fix in fix_of(error)


# What environments lack -----------------------------------------------------------------------


class NeedsTask(CountingEnv):
    """Cannot be reset without a task; each way to look for it fails in its own way."""

    def __init__(self, way: str) -> None:
        super().__init__(length=2)
        self.way = way

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.way == "asks":
            self.task = options["task"]
        elif self.way == "asks a dict":
            self.task = dict(options or {})["task"]
        elif self.way == "gets":
            self.task = options.get("task")
        elif self.way == "asserts":
            assert options is not None
        elif "task" not in (options or {}):
            raise ValueError("no task was given")
        return super().reset(seed=seed, options=options)


WAYS = ["asks", "asks a dict", "gets", "asserts", "raises"]


@pytest.mark.parametrize("way", WAYS)
def test_a_missing_task_is_told(way: str) -> None:
    def create_needing(seed: int) -> GymEnv:
        return GymEnv([NeedsTask(way)], seed)

    error = error_of(ConstantAgent, create_needing)
    name = "..." if way == "asserts" else '"task": ...'
    assert f"pass env_info={{{name}}}" in fix_of(error)
    if way == "asks a dict":  # what is there is not what is missing
        error = error_of(ConstantAgent, create_needing, env_info={"goal": 1})
        assert 'pass env_info={"task": ...}' in fix_of(error)


def test_whoever_passes_no_options_is_told_something_else() -> None:
    with Pool([NeedsTask("asks")], 1, 10) as pool, pytest.raises(EnvError) as caught:
        pool.store()
    assert "a pool passes none" in fix_of(caught.value)


class OfTheFormerGym(CountingEnv):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


def fails_otherwise(way: str) -> type[CountingEnv]:
    class Broken(OfTheFormerGym if way == "hands on" else CountingEnv):  # type: ignore[misc]
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if way == "hands on":
                return super().reset(seed=seed), options
            if way == "misses":
                return {}["simulator"]
            if way == "lacks":
                return self.simulator.reset(seed)
            simulator = None
            return simulator.reset(), {}  # type: ignore[attr-defined]

    return Broken


@pytest.mark.parametrize(
    ("way", "advice"),
    [("hands on", "take seed, and hand it on"), ("misses", ""), ("lacks", ""), ("breaks", "")],
)
def test_other_failures_of_reset_get_no_advice_that_does_not_fit(way: str, advice: str) -> None:
    fix = fix_of(error_of(ConstantAgent, lambda seed: GymEnv([fails_otherwise(way)()], seed)))
    assert advice in fix
    assert "every int from 0" not in fix
    assert "env_info" not in fix


class RefusesSeeds(CountingEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None and seed > 999:
            raise ValueError("Seed must be between 0 and 999")
        return super().reset(seed=seed, options=options)


def test_an_environment_that_refuses_its_seed_is_told_so() -> None:
    report = check_env(RefusesSeeds, strict=False)
    assert report.failed[0] == "runs"
    assert re.search(r"reset raised .*Seed must be .* \(episode seed \d+\)", str(report))
    assert "take every int from 0 to 2**31 - 1" in str(report)
    needing = check_env(lambda: NeedsTask("asks"), strict=False)
    assert 'check_env(env, options={"task": ...})' in str(needing)
    assert check_env(lambda: NeedsTask("asks"), options={"task": 1}, strict=False).ok
    error = error_of(ConstantAgent, lambda seed: GymEnv([RefusesSeeds()], seed))
    assert "take every int from 0 to 2**31 - 1" in fix_of(error)


@pytest.mark.parametrize(
    ("envs", "what", "fix"),
    [
        (lambda: [lambda: CountingEnv()], "environment 0 of a GymEnv is <function", "call it"),
        (lambda: ["CartPole-v1"], "is 'CartPole-v1', not", "gymnasium.make('CartPole-v1')"),
        (lambda: [GymEnv([CountingEnv()])], "is GymEnv, not an env", "one by one"),
        (lambda: [vector_env()], "is SyncVectorEnv, not an environment", "one by one"),
        (lambda: CountingEnv(), "got CountingEnv, not a list", "GymEnv([env], seed)"),
        (list, "got no environments", "pass at least one"),
    ],
)
def test_what_is_no_list_of_environments_is_refused(
    envs: Callable[[], Any], what: str, fix: str
) -> None:
    with pytest.raises(SpecError) as caught:
        GymEnv(envs())
    assert what in str(caught.value)
    assert fix in fix_of(caught.value)


def vector_env() -> gymnasium.vector.SyncVectorEnv:
    return gymnasium.vector.SyncVectorEnv([CountingEnv])


def test_lists_of_environments_may_be_of_any_kind() -> None:
    assert GymEnv(CountingEnv() for _ in range(3)).n_envs() == 3  # type: ignore[arg-type]
    assert GymEnv((CountingEnv(), CountingEnv())).n_envs() == 2
    assert GymEnv(np.array([CountingEnv()], object)).n_envs() == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (lambda: CountingEnv(), "returned CountingEnv, not", "return GymEnv([env], seed)"),
        (lambda: [CountingEnv()] * 2, "returned list, not", "return GymEnv(environments, seed)"),
        (lambda: None, "returned NoneType, not", "end create_env with return GymEnv("),
        (vector_env, "returned SyncVectorEnv, not", "one by one"),
    ],
)
def test_what_create_env_returned_instead_is_told(
    make: Callable[[], Any], what: str, fix: str
) -> None:
    error = error_of(ConstantAgent, lambda seed: make())
    assert isinstance(error, WorkerStartupError)
    assert what in str(error)
    assert fix in fix_of(error)


# What was passed ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_threads", [0, 1])
def test_objects_in_place_of_functions_are_refused(n_threads: int) -> None:
    for agent in (ConstantAgent(), DeviceAgent(ConstantAgent(), "cpu"), nn.Linear(1, 1)):
        error = error_of(agent, n_threads=n_threads)
        assert f"create_agent is an object, {type(agent).__name__}" in str(error)
        assert "create_agent=MyAgent" in fix_of(error)
    for env in (create_env(1), CountingEnv(), vector_env()):
        error = error_of(ConstantAgent, env, n_threads=n_threads)
        assert f"create_env is an object, {type(env).__name__}" in str(error)
        assert "create_env=lambda seed: GymEnv(" in fix_of(error)


COMMON: dict[str, Any] = {"create_agent": ConstantAgent, "create_env": create_env}


@pytest.mark.parametrize(
    ("function", "arguments", "fix"),
    [
        (EpisodeBatcher, {"n_workers": 2}, "pass n_threads"),
        (EpisodeBatcher, {"seed": 2}, "pass seeds"),
        (EpisodeBatcher, {"n_slot": 2}, "pass n_slots"),
        (EpisodeBatcher, {"num_envs": 8}, "let create_env return so many: GymEnv("),
        (EpisodeBatcher, {"device": "cuda"}, "it takes n_timesteps, n_slots, create_agent"),
        (Batcher, {"seed": 2}, "pass seeds"),
        (ParallelEnvManager, {"seeds": 2}, "pass seed"),
        (GymEnv, {"seeds": 2}, "pass seed"),
        (Pool, {"n_threads": 2}, "pass processes"),
        (make_parallel_env, {"n_threads": 2}, "pass num_workers"),
    ],
)
def test_other_names_of_arguments_are_told_the_right_one(
    function: Any, arguments: dict[str, Any], fix: str
) -> None:
    ((name, _),) = arguments.items()
    given = COMMON if "create_env" in inspect.signature(function).parameters else {}
    with pytest.raises(SpecError) as caught:
        function(**given, **arguments)
    assert isinstance(caught.value, TypeError)  # as from Python itself
    assert str(caught.value).startswith(f"{function.__name__}() takes no {name!r}")
    assert fix_of(caught.value).startswith(fix)


def test_other_names_of_arguments_of_calls_are_told_the_right_one() -> None:
    with EpisodeBatcher(3, 4, ConstantAgent, {}, create_env, {}, n_threads=0) as batcher:
        with pytest.raises(SpecError, match="pass n_episodes"):
            batcher.execute(num_episodes=2)  # type: ignore[call-arg]
        with pytest.raises(SpecError, match="pass blocking"):
            batcher.get(block=False)  # type: ignore[call-arg]


def test_arguments_of_an_environment_go_through() -> None:
    names = ("size", "steps", "env", "policy", "batch_size")
    with pytest.raises(RlpoolError) as caught:
        make_parallel_env("CartPole-v1", 1, 1, **dict.fromkeys(names, 1))
    assert "takes no" not in str(caught.value)
