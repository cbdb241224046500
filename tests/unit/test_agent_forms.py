"""Arguments and results of agent calls, from the minimal to the legacy form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from rlpool import (
    Agent,
    DictTensor,
    EpisodeBatcher,
    Learner,
    SpecError,
    TemporalDictTensor,
    evaluate,
    make_env,
    replay_agent,
)
from rlpool.agents.agent import as_agent
from rlpool.agents.device_agent import DeviceAgent
from rlpool.errors import AgentError, WorkerStartupError
from rlpool.evaluation.evaluate import verify
from rlpool.testing import check_agent

from support.agents import zeros
from support.envs import CountingEnv, assert_same_tensors, create_counting

NAMES = ("state", "observation", "agent_info", "history")
INFO = {"id": torch.arange(3)}


def collect(create_agent: Any, n_workers: int = 0, **infos: Any) -> TemporalDictTensor:
    arguments = create_agent, {}, create_counting, {"n_envs": 2}, n_workers, 1
    with EpisodeBatcher(8, 3, *arguments) as batcher:
        batcher.execute(3, env_info={"length": [5, 2, 3]}, **infos)
        episodes = batcher.get()
    assert episodes.lengths.tolist() == [5, 2, 3]
    return episodes


# Arguments of a call


class Notes:
    """Agent that records the type of each argument.

    Attributes:
        seen: Types of each call's arguments by name.
    """

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []

    def __call__(self, **given: Any) -> dict[str, torch.Tensor]:
        self.seen.append({name: type(value).__name__ for name, value in given.items()})
        return {"action": zeros(given["observation"])}

    def method(self, agent_info: Any, observation: Any) -> Any:
        return self(agent_info=agent_info, observation=observation)


class InModule(nn.Module):
    def __init__(self, note: Notes) -> None:
        super().__init__()
        self.note = note

    def forward(self, observation: DictTensor, state: DictTensor | None) -> Any:
        return self.note(observation=observation, state=state)


class ModuleFirst(InModule, Agent):
    pass


class AgentFirst(Agent, InModule):
    pass


class ByCall(Agent):
    def __init__(self, note: Notes) -> None:
        self.note = note

    def __call__(self, history: TemporalDictTensor, observation: DictTensor) -> Any:
        return self.note(observation=observation, history=history)


class ByCallWithout(ByCall):
    def require_history(self) -> bool:
        return False


class WithOption(Agent):
    def __init__(self, note: Notes) -> None:
        self.note = note

    def __call__(
        self, observation: Any, state: Any, greedy: bool = False, scale: float = 1.0
    ) -> Any:
        assert (greedy, scale) == (False, 1.0)
        return self.note(observation=observation, state=state)


def keywords_only(note: Notes, *, observation: Any, agent_info: Any) -> Any:
    return note(observation=observation, agent_info=agent_info)


ALL = dict(zip(NAMES, ("DictTensor", "DictTensor", "DictTensor", "NoneType"), strict=True))
TAKES: dict[str, tuple[Callable[[Notes], Any], list[str]]] = {
    "one": (lambda note: lambda observation: note(observation=observation), ["observation"]),
    "a method": (lambda note: note.method, ["observation", "agent_info"]),
    "keywords": (lambda note: partial(keywords_only, note), ["observation", "agent_info"]),
    "a module": (InModule, ["observation", "state"]),
    "a module first": (ModuleFirst, ["observation", "state"]),
    "an agent first": (AgentFirst, ["observation", "state"]),
    "options": (WithOption, ["observation", "state"]),
    "bound": (
        lambda note: partial(lambda observation, much: note(observation=observation), much=2),
        ["observation"],
    ),
    "and others": (
        lambda note: lambda observation, *args, **kwargs: note(observation=observation),
        ["observation"],
    ),
    "all": (
        lambda note: (
            lambda state, observation, agent_info=None, history=None: note(
                state=state, observation=observation, agent_info=agent_info, history=history
            )
        ),
        [*NAMES],
    ),
    "other names": (
        lambda note: (
            lambda s, o, i=None, h=None: note(state=s, observation=o, agent_info=i, history=h)
        ),
        [*NAMES],
    ),
    "any": (
        lambda note: lambda *given: note(**dict(zip(NAMES, given, strict=True))),
        [*NAMES],
    ),
}


@pytest.mark.parametrize("form", TAKES)
def test_a_call_gets_the_arguments_its_signature_names_or_all_by_position(form: str) -> None:
    make, named = TAKES[form]
    note = Notes()
    collect(lambda: make(note), agent_info=INFO)
    assert note.seen[-1] == {name: ALL[name] for name in named}


def test_history_is_kept_for_a_call_that_names_it_without_a_default() -> None:
    for make, kind in ((ByCall, "TemporalDictTensor"), (ByCallWithout, "NoneType")):
        note = Notes()
        collect(partial(make, note))
        assert note.seen[-1] == {"observation": "DictTensor", "history": kind}


# Results of a call


class Sums(Agent):
    """Agent that sums frames, starting from a value in ``agent_info``."""

    n_noise = 1

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        assert agent_info is not None
        return DictTensor({"sum": agent_info["id"].float()})

    def step(self, state: Any, observation: DictTensor) -> tuple[Any, Any]:
        action = zeros(observation) + (observation["noise"][:, 0] < 0.5)
        return {"action": action}, {"sum": state["sum"] + observation["frame"][:, 0]}


class Pair(Sums):
    def __call__(self, observation: DictTensor, state: Any) -> Any:
        return self.step(state, observation)


class Tensors(Sums):
    def __call__(self, observation: DictTensor, state: Any) -> Any:
        return [DictTensor(part) for part in self.step(state, observation)]


class Triple(Sums):
    def __call__(self, s: Any, o: Any, i: Any = None, h: Any = None) -> Any:
        return (s, *self.step(s, o))


@pytest.mark.parametrize("kind", [Pair, Tensors])
def test_outputs_with_the_next_state_match_the_legacy_triple(kind: Any) -> None:
    short, whole = (collect(each, agent_info=INFO) for each in (kind, Triple))
    assert_same_tensors(short, whole)
    assert short["_sum"][0, 4] > 0
    assert_same_tensors(replay_agent(kind(), short), replay_agent(Triple(), short))


OUTPUTS = [
    lambda observation: {"action": zeros(observation) + 1},
    lambda observation: DictTensor({"action": zeros(observation) + 1}),
    lambda observation: ({"action": zeros(observation) + 1}, None),
    lambda s, o, i, h: (DictTensor(), {"action": zeros(o) + 1}, DictTensor()),
]


@pytest.mark.parametrize("agent", OUTPUTS)
def test_a_stateless_agent_returns_only_its_outputs(agent: Any) -> None:
    episodes = collect(lambda: agent)
    assert episodes["action"].sum() == 10
    assert replay_agent(agent, episodes)["action"].tolist() == episodes["action"].tolist()


# Functions that take agents


class Net(nn.Module):
    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.net, self.dropout = nn.Linear(2, 2), nn.Dropout()
        nn.init.zeros_(self.net.weight)
        self.net.bias.data = torch.tensor([0.0, bias])

    def forward(self, observation: DictTensor) -> dict[str, torch.Tensor]:
        logits = self.dropout(self.net(observation["frame"]))
        return {"action": logits.argmax(-1), "logits": logits}


class NetAgent(Net, Agent):
    pass


@pytest.mark.parametrize("kind", [Net, NetAgent])
def test_a_module_is_updated_with_its_state_in_workers(kind: Any) -> None:
    arguments = kind, {"bias": -1.0}, create_counting, {"n_envs": 2}
    with EpisodeBatcher(8, 3, *arguments, n_workers=1, seed=1) as batcher:
        sums = []
        for bias in (-1.0, 1.0):
            batcher.update(kind(bias).eval().state_dict())
            batcher.execute(3)
            episodes = batcher.get()
            sums.append(bool(episodes["action"].any()))
    assert sums == [False, True]
    assert replay_agent(kind(1.0), episodes)["logits"].requires_grad


def test_modules_and_functions_can_be_evaluated_and_checked() -> None:
    net = Net(1.0)

    def policy(observation: DictTensor) -> Any:
        assert not net.training
        return net(observation)

    for agent in (net, policy, DeviceAgent(net, "cpu"), partial(net.forward)):
        for n_workers in (0, 1):
            evaluation = evaluate(agent, create_counting, 3, n_workers=n_workers)
            assert evaluation.returns.tolist() == [6.0, 6.0, 6.0]
        assert not verify(evaluation, agent, create_counting).differences
    assert net.training
    for agent in (net.eval(), policy, lambda: policy):
        check_agent(agent, CountingEnv)
    digests = {evaluate(Net(b), create_counting, 1).protocol["parameters"] for b in (0.0, 1.0)}
    assert len(digests) == 2
    digests = set()
    for bias in (0.0, 1.0):  # of a script whose policy is a global variable
        script: dict[str, Any] = {"net": Net(bias), "__name__": "__main__"}
        exec("def policy(observation): assert not net.training; return net(observation)", script)
        digests.add(evaluate(script["policy"], create_counting, 1).protocol["parameters"])
        assert script["net"].training
    assert len(digests) == 2
    with pytest.raises(SpecError, match=r"create_agent is an object, policy[^$]*lambda: policy"):
        collect(policy)
    with pytest.raises(SpecError, match="call it first"):
        evaluate(lambda: net, create_counting, 1)


@pytest.mark.filterwarnings("ignore:Guards may run slower")  # on Python 3.13.0
def test_a_compiled_module_is_treated_like_the_original() -> None:
    made = torch.compile(ModuleFirst(Notes()), backend="eager")
    with EpisodeBatcher(
        8, 3, lambda: made, {}, create_counting, {}, n_workers=0, seed=1
    ) as batcher:
        batcher.execute(3)
        batcher.get()
    assert made.note.seen[-1] == {"observation": "DictTensor", "state": "DictTensor"}
    net = torch.compile(NetAgent(-1.0), backend="eager")
    agent = as_agent(net)
    agent.update(NetAgent(1.0).state_dict())
    assert net.net.bias[1] == 1.0


def test_a_learner_accepts_a_function() -> None:
    def policy(observation: DictTensor) -> Any:
        return {"action": zeros(observation) + 1}

    storage = Mock()
    env = make_env("CartPole-v1", episodes_per_task=1)
    learner = Learner(policy, storage, env, seed=0)
    assert learner.collect_rollouts_parallel(2) == storage.add_sample.call_count
    actions = {call.kwargs["action"].item() for call in storage.add_sample.call_args_list}
    assert actions == {1}


# Refusals


class Noisy(nn.Module):
    n_noise = 1

    def forward(self, observation: DictTensor) -> Any: ...


class Silent(Agent):
    pass


class Updates:
    def __call__(self, observation: DictTensor) -> Any: ...

    def update(self, info: Any) -> None: ...


def needs_more(observation: Any, temperature: float) -> Any: ...


NO_AGENTS: list[tuple[Any, str]] = [
    (3, "create_agent returned int, not an agent"),
    (Silent(), "Silent cannot choose actions"),
    (nn.Module(), "Module cannot choose actions"),
    (Net, "create_agent returned the class Net"),
    (lambda frame: frame, "<lambda> takes"),
    (lambda: None, "<lambda> takes"),
    (needs_more, "needs_more takes"),
    (Noisy(), r"with n_noise, not an Agent[^$]*Noisy\(nn.Module, Agent\)"),
    (Updates(), r"with update, not an Agent[^$]*Updates\(Agent\)"),
]


@pytest.mark.parametrize(("made", "words"), NO_AGENTS)
def test_objects_that_cannot_be_called_as_an_agent_are_refused(made: Any, words: str) -> None:
    with pytest.raises(WorkerStartupError, match=words):
        collect(lambda: made)


class Forgets(Sums):
    def __call__(self, observation: DictTensor, state: Any) -> Any:
        return self.step(state, observation)[0]


class Unnamed(Pair):
    def initial_state(self, agent_info: DictTensor | None, n: int) -> Any:
        return torch.zeros(n)


class NoFirst(Agent):
    def __call__(self, observation: DictTensor, state: Any) -> Any:
        return {"action": zeros(observation)}, {"sum": observation["reward"]}


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (Forgets, "the agent returned no next state"),
        (NoFirst, "but does not define the first one"),
        (lambda: lambda observation: zeros(observation), "the agent returned Tensor, not its"),
        (lambda: lambda observation: (1, 2, 3, 4), "the agent returned tuple of 4"),
        (lambda: lambda observation: (zeros(observation),) * 2, "^the agent returned tuple of 2"),
        (lambda: lambda observation, state: state["sum"], "defines initial_state"),
        (Unnamed, "agent.initial_state: .* got Tensor[^$]*hidden"),
    ],
)
def test_invalid_results_are_refused(agent: Any, words: str) -> None:
    with pytest.raises(AgentError, match=words):
        collect(agent, agent_info=INFO)
