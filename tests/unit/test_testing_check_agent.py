"""``check_agent`` names every clause that an agent breaks, and passes those that are fine."""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlpool import Agent, AgentSpecError, DictTensor, GymEnv, SpecError, sample_categorical
from rlpool.specs import TensorSpec
from rlpool.testing import CountingEnv, check_agent
from rlpool.testing.agent_checks import AGENT_CHECKS

from support.agents import (
    ConstantAgent,
    FunctionAgent,
    GruAgent,
    HistoryAgent,
    InfoEcho,
    InitialStateCounter,
    NoisyAgent,
    StepCounter,
)
from support.envs import CountingEnv as PairEnv

CLAUSES = [check.name for check in AGENT_CHECKS]
TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


def zeros(observation: DictTensor) -> torch.Tensor:
    return torch.zeros(observation.n_elems(), dtype=torch.int64)


class Net(nn.Module, Agent):
    """A recurrent policy that draws from its noise."""

    n_noise = 1

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(1, 4), nn.Linear(4, 2)

    def initial_state(self, agent_info: Any, n: int) -> DictTensor:
        return DictTensor({"hidden": torch.ones(n, 4)})

    def __call__(self, state, observation, agent_info=None, history=None):
        if state is None:
            state = self.initial_state(agent_info, observation.n_elems())
        hidden = self.cell(observation["frame"], state["hidden"])
        action, _ = sample_categorical(self.head(hidden), observation["noise"])
        return state, DictTensor({"action": action}), DictTensor({"hidden": hidden})

    def update(self, info: Any) -> None:
        self.load_state_dict(info)


def seeded(create: Callable[[], Agent]) -> Callable[[], Agent]:
    """The same network in every worker."""

    def make() -> Agent:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return create()

    return make


@pytest.mark.parametrize(
    "agent",
    [
        ConstantAgent,
        ConstantAgent(1),
        StepCounter,
        InitialStateCounter,
        InfoEcho,
        HistoryAgent,
        NoisyAgent,
        GruAgent,
    ],
)
def test_the_agents_of_our_tests_pass_without_a_word(agent: Any) -> None:
    report = check_agent(agent, PairEnv, agent_info=DictTensor({"id": torch.arange(3)}))
    assert report.findings == ()
    expected = {"update_takes_state_dict"}
    if isinstance(agent, Agent):
        expected |= {"picklable", "same_in_every_worker"}
    assert set(report.not_checked) == expected
    assert {*report.passed, *report.not_checked} == set(CLAUSES)


def test_a_network_passes_every_check() -> None:
    report = check_agent(seeded(Net), CountingEnv)
    assert report.passed == tuple(CLAUSES)


def tutorial(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"tutorial_{name}", TUTORIALS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


@pytest.mark.parametrize(
    ("name", "agent", "agent_args", "env_args", "info"),
    [
        ("recurrent_policy", "RecurrentAgent", {"n_hidden": 8}, {}, None),
        ("recurrent_policy", "FeedForwardAgent", {"n_hidden": 8}, {}, None),
        ("dqn", "EpsilonGreedyAgent", {}, {}, "epsilon"),
        ("pool", "RecurrentAgent", {}, {}, None),
        ("multiprocess_episode_batcher", "LeftwardAgent", {"n_agents": 3}, {}, None),
        ("reinforce", "PolicyAgent", {"n_hidden": 8}, {}, None),
    ],
)
def test_the_agents_of_the_tutorials_pass(
    name: str, agent: str, agent_args: Any, env_args: Any, info: str | None
) -> None:
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    module = tutorial(name)
    if name.startswith("multiprocess"):
        env_args = {"max_episode_steps": 10}
    agent_info = None if info is None else DictTensor({info: torch.tensor([0.0, 0.5])})
    skip = ["picklable"]  # of a module that cannot be imported by name
    report = check_agent(
        getattr(module, agent),
        module.create_env,
        agent_args,
        env_args,
        agent_info=agent_info,
        skip=skip,
    )
    assert {finding.check for finding in report.warnings} <= {"same_in_every_worker"}


# Where observations come from


def create_env(seed: int, n_envs: int) -> GymEnv:
    return GymEnv([CountingEnv() for _ in range(n_envs)], seed)


@pytest.mark.parametrize(
    ("source", "more"),
    [
        (create_env, {"env_args": {"n_envs": 3}}),
        (CountingEnv(), {}),
        (CountingEnv(length=1), {}),
        (spaces.Box(-1, 1, (1,)), {"action_space": spaces.Discrete(2)}),
        (spaces.Box(-1, 1, (1,)), {}),
        (DictTensor({"frame": torch.rand(5, 1)}), {}),
        ({"frame": torch.rand(1, 1)}, {"action_space": spaces.Discrete(2)}),
        ({"frame": TensorSpec((1,), np.dtype(np.float32))}, {}),
        ({"frame": spaces.Box(-1, 1, (1,))}, {}),
    ],
)
def test_observations_come_from_many_places(source: Any, more: Any) -> None:
    report = check_agent(seeded(Net), source, **more)
    assert report.findings == ()
    assert set(report.not_checked) <= {"action_fits"}


def test_an_agent_sees_every_key_of_an_environment() -> None:
    keys = set()

    def look(state: Any, observation: DictTensor, *rest: Any) -> Any:
        keys.update(observation.keys())
        return None, DictTensor({"action": zeros(observation)}), None

    check_agent(partial(FunctionAgent, look, 3), CountingEnv, skip=["picklable"])
    flags = {"terminated", "truncated", "done", "initial_state"}
    assert keys == {"frame", "reward", "last_action", "noise", *flags}


def test_rows_start_where_the_state_is_none() -> None:
    def look(state: Any, observation: DictTensor, *rest: Any) -> Any:
        assert (state is None) == bool(observation["initial_state"].all())
        x = DictTensor({"x": zeros(observation)}) if state is None else state
        return x, DictTensor({"action": zeros(observation)}), x

    assert check_agent(partial(FunctionAgent, look), CountingEnv, skip=["picklable"]).ok


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (7, "observations"),
        (spaces.Text(5), "Text"),
        (DictTensor({}), "examples"),
        ({"frame": 5}, "frame|dict of"),
        (partial(create_env, n_envs=0), "environments"),
    ],
)
def test_a_source_without_observations_is_refused(source: Any, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        check_agent(ConstantAgent, source)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"skip": ["row"]}, "row"),
        ({"n_steps": 1}, "n_steps"),
        ({"batch_sizes": []}, "batch_sizes"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"agent_args": spaces.Discrete(2)}, "agent_args"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        check_agent(ConstantAgent, CountingEnv, **arguments)


# Bad ones


def acting(function: Callable[..., Any], n_noise: int = 0) -> Callable[[], Agent]:
    """An agent whose action a function of the observation gives."""

    def call(state: Any, observation: DictTensor, *rest: Any) -> Any:
        return None, DictTensor({"action": function(observation)}), None

    return partial(FunctionAgent, call, n_noise)


def returning(function: Callable[[Any, DictTensor], Any]) -> Callable[[], Agent]:
    return partial(FunctionAgent, lambda state, observation, *rest: function(state, observation))


def action_of(observation: DictTensor) -> DictTensor:
    return DictTensor({"action": zeros(observation)})


def raises(*arguments: Any) -> Any:
    raise KeyError("goal")


def in_place(state: Any, observation: DictTensor) -> Any:
    observation["frame"].add_(1)
    return None, action_of(observation), None


def state_in_place(state: Any, observation: DictTensor) -> Any:
    if state is None:
        state = DictTensor({"x": zeros(observation)})
    state["x"].add_(1)
    return state, action_of(observation), state


def two_states(state: Any, observation: DictTensor) -> Any:
    first, then = DictTensor({"a": zeros(observation)}), DictTensor({"b": zeros(observation)})
    return first if state is None else state, action_of(observation), then


class Counts(ConstantAgent):
    """Remembers in itself how often it was called."""

    n_calls = 0

    def __call__(self, state, observation, agent_info=None, history=None):
        self.n_calls += 1
        return None, DictTensor({"action": zeros(observation) + self.n_calls % 2}), None


class BadStart(InitialStateCounter):
    def __init__(self, start: Callable[[Any, int], Any]) -> None:
        self.start = start

    def initial_state(self, agent_info: Any, n: int) -> Any:
        return self.start(agent_info, n)

    def __call__(self, state, observation, agent_info=None, history=None):
        if state is None:
            state = DictTensor({"steps": zeros(observation) + 1})
        return state, action_of(observation), DictTensor({"steps": state["steps"] + 1})


class History(HistoryAgent):
    def __init__(self, output: Callable[[Any], dict[str, torch.Tensor]]) -> None:
        self.output = output

    def __call__(self, state, observation, agent_info=None, history=None):
        return DictTensor({}), DictTensor(self.output(history)), DictTensor({})


class Updated(Net):
    """A network with another ``update``."""

    def __init__(self, update: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._update = update

    def update(self, info: Any) -> None:
        self._update(self, info)


def assign(agent: Any, info: Any) -> None:
    agent.load_state_dict(info, assign=True)


def ignore(agent: Any, info: Any) -> None:
    """Takes nothing over."""


class NoUpdate(nn.Linear, Agent):
    def __init__(self) -> None:
        super().__init__(1, 2)

    def __call__(self, state, observation, agent_info=None, history=None):
        return None, DictTensor({"action": self.forward(observation["frame"]).argmax(1)}), None


class Dropout(NoUpdate):
    def __call__(self, state, observation, agent_info=None, history=None):
        values = nn.functional.dropout(self.forward(observation["frame"]), 0.5, True)
        return None, DictTensor({"action": values.argmax(1), "values": values}), None


class Normed(NoUpdate):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def __call__(self, state, observation, agent_info=None, history=None):
        frame = observation["frame"]
        values = self.norm(frame) if len(frame) > 1 else frame
        return None, DictTensor({"action": zeros(observation), "values": values}), None


class Unclosable(ConstantAgent):
    def close(self) -> None:
        raise OSError("busy")


class Unseedable(ConstantAgent):
    def seed(self, seed: int) -> None:
        np.random.RandomState([seed, "a word"])


LOCK = threading.Lock()
ONE = ConstantAgent()


def captures(lock: Any) -> Agent:
    return ConstantAgent()


def ones(observation: DictTensor, n: int = 1) -> torch.Tensor:
    return torch.ones(observation.n_elems() * n, dtype=torch.int64)


def mean(observation: DictTensor) -> torch.Tensor:
    return (observation["frame"][:, 0] > observation["frame"].mean()).long()


ERRORS: list[tuple[str, Any]] = [
    ("creation", raises),
    ("creation", lambda: 7),
    ("creation", lambda: ONE),
    ("creation", 7),
    ("picklable", partial(captures, LOCK)),
    ("returns", acting(raises)),
    ("returns", returning(lambda state, observation: action_of(observation))),
    ("returns", returning(lambda state, observation: (None, 7, None))),
    ("returns", returning(lambda state, observation: (None, {"x": zeros(observation)}, None))),
    ("returns", acting(lambda observation: ones(observation, 2))),
    ("returns", acting(lambda observation: [0] * observation.n_elems())),
    ("returns", acting(lambda o: zeros(o).float() if o["initial_state"].any() else zeros(o))),
    ("returns", returning(two_states)),
    ("returns", partial(BadStart, lambda info, n: DictTensor({"other": torch.ones(n)}))),
    ("returns", partial(History, raises)),
    ("returns", partial(History, lambda history: {"x": history.lengths})),
    ("returns", partial(History, lambda h: {"action": h.lengths, **dict(h.items())})),
    ("returns", acting(lambda o: zeros(o).reshape(-1, 1).squeeze())),
    (
        "same_for_any_number_of_rows",
        acting(lambda o: zeros(o) if o.n_elems() > 1 else zeros(o).int()),
    ),
    ("action_fits", acting(lambda o: zeros(o).float())),
    ("action_fits", acting(lambda o: torch.zeros(o.n_elems(), 2, dtype=torch.int64))),
    ("action_fits", acting(lambda o: zeros(o) + 2)),
    ("action_fits", acting(lambda o: zeros(o) - 1)),
    ("initial_state_agrees", partial(BadStart, raises)),
    (
        "initial_state_agrees",
        partial(BadStart, lambda info, n: DictTensor({"steps": torch.zeros(n).long()})),
    ),
    (
        "initial_state_agrees",
        partial(BadStart, lambda info, n: DictTensor({"steps": torch.ones(n, 1).long()})),
    ),
    (
        "initial_state_agrees",
        partial(BadStart, lambda info, n: DictTensor({"steps": torch.ones(2 * n).long()})),
    ),
    ("rows_are_independent", acting(mean)),
    ("rows_are_independent", Normed),
    ("deterministic", Counts),
    ("deterministic", Dropout),
    ("deterministic", acting(lambda o: torch.randint(2, (o.n_elems(),)))),
    ("deterministic", acting(lambda o: zeros(o) + random.randrange(2**30) % 2)),
    ("inputs_unchanged", returning(in_place)),
    ("update_takes_state_dict", NoUpdate),
    ("update_takes_state_dict", partial(Updated, raises)),
    ("update_takes_state_dict", partial(Updated, assign)),
    ("update_takes_state_dict", partial(Updated, ignore)),
    ("seeds_and_closes", Unclosable),
    ("seeds_and_closes", Unseedable),
]

WARNINGS: list[tuple[str, Any]] = [
    ("same_in_every_worker", Net),
    ("returns_its_state", returning(state_in_place)),
]


@pytest.mark.parametrize(("clause", "agent"), ERRORS)
def test_a_broken_clause_is_named(clause: str, agent: Any) -> None:
    report = check_agent(agent, CountingEnv, strict=False)
    assert clause in report.failed, str(report)
    assert not report
    for finding in report.errors:
        assert finding.what
        assert finding.fix
    with pytest.raises(AgentSpecError, match=clause):
        check_agent(agent, CountingEnv)


@pytest.mark.parametrize(("clause", "agent"), WARNINGS)
def test_a_doubtful_thing_is_named_and_passes(clause: str, agent: Any) -> None:
    report = check_agent(agent, CountingEnv)
    assert [finding.check for finding in report.warnings] == [clause]


def test_every_clause_is_broken_by_one_of_the_above() -> None:
    assert {clause for clause, _ in ERRORS + WARNINGS} == set(CLAUSES)


def test_actions_outside_the_bounds_are_a_warning() -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    agent = acting(lambda o: torch.full((o.n_elems(), 2), 3.0))
    report = check_agent(agent, spaces.Box(-1, 1, (1,)), action_space=space)
    assert [finding.check for finding in report.warnings] == ["action_fits"]
    nested = spaces.Dict({"a": space, "b": spaces.Discrete(3)})
    assert (
        "action_fits"
        in check_agent(agent, spaces.Box(-1, 1, (1,)), action_space=nested, strict=False).failed
    )


def test_agent_info_reaches_the_agent() -> None:
    class NeedsInfo(ConstantAgent):
        def __call__(self, state, observation, agent_info=None, history=None):
            return None, DictTensor({"action": agent_info["epsilon"].long()}), None

    info = DictTensor({"epsilon": torch.tensor([0.0, 1.0])})
    assert check_agent(NeedsInfo, CountingEnv, agent_info=info).ok
    assert "returns" in check_agent(NeedsInfo, CountingEnv, strict=False).failed


def test_update_info_stands_in_for_the_state_dict() -> None:
    def update(agent: Any, info: Any) -> None:
        agent.load_state_dict(info["weights"])

    agent = partial(Updated, update)
    assert "update_takes_state_dict" in check_agent(agent, CountingEnv, strict=False).failed
    info = {"weights": Net().state_dict(), "version": 3}
    report = check_agent(agent, CountingEnv, update_info=info)
    assert "update_takes_state_dict" in report.passed


def test_the_caller_is_left_as_it_was() -> None:
    before = random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_agent(acting(lambda o: torch.randint(2, (o.n_elems(),))), CountingEnv, strict=False)
        assert torch.get_num_threads() == 2
        assert not torch.is_inference_mode_enabled()
    finally:
        torch.set_num_threads(before[2])
    assert (random.getstate(), torch.get_rng_state().tolist()) == before[:2]


def test_an_instance_is_left_alone() -> None:
    agent = Net()
    before = {key: tensor.clone() for key, tensor in agent.state_dict().items()}
    check_agent(agent, CountingEnv)
    assert all(torch.equal(before[key], tensor) for key, tensor in agent.state_dict().items())
    assert all(parameter.requires_grad for parameter in agent.parameters())


def test_all_problems_are_told_at_once() -> None:
    class Everything(Unclosable):
        def __call__(self, state, observation, agent_info=None, history=None):
            observation["frame"].mul_(2)
            return None, DictTensor({"action": torch.randint(5, 9, (observation.n_elems(),))}), None

    with pytest.raises(AgentSpecError) as caught:
        check_agent(Everything, CountingEnv)
    for name in ("action_fits", "deterministic", "inputs_unchanged", "seeds_and_closes"):
        assert f"error: {name}" in str(caught.value)


def test_what_no_check_complains_about_is_told_all_the_same() -> None:
    def call(state: Any, observation: DictTensor, *rest: Any) -> Any:
        if observation["frame"].sum() == -1:  # never
            return None
        return None, action_of(observation), None

    class Late(FunctionAgent):
        """Fails from its hundredth call on, when most checks have been made."""

        n_calls = 0

        def __call__(self, *arguments: Any) -> Any:
            type(self).n_calls += 1
            if type(self).n_calls > 60:
                raise OSError("late")
            return super().__call__(*arguments)

    report = check_agent(partial(Late, call), CountingEnv, strict=False)
    assert "OSError: late" in str(report.errors)
