"""``KeyboardInterrupt`` of users' code in workers is an error like any other.

That ``SystemExit`` is one, too, is tested with the faults.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from rlpool import (
    Agent,
    AgentError,
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    Pool,
    WorkerStartupError,
)

from support.acting_envs import ActingEnv
from support.agents import zeros
from support.envs import CountingEnv
from support.parallel import no_actions

pytestmark = [pytest.mark.timeout(60), pytest.mark.promise("I3")]


class RaisingEnv(CountingEnv):
    """Raises in a call if its id is 1; if it has a handler of SIGINT, too."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _begin(self, call: str) -> None:
        if call == self.call and self.number == 1:
            raise KeyboardInterrupt("goal")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed, options=options)
        self._begin("reset")
        return result

    def step(self, action: Any) -> Any:
        if self.t == 1:
            self._begin("step")
        return super().step(action)

    def close(self) -> None:
        self.number = 1
        self._begin("close")


class RaisingAgent(Agent):
    def __init__(self, call: str) -> None:
        self.call = call

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        if self.call == "initial_state" and agent_info is not None and bool(agent_info["id"].any()):
            raise KeyboardInterrupt("goal")
        return DictTensor({"steps": torch.zeros(n)})

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, history: Any = None):
        if self.call == "agent" and bool((observation["frame"] == 1).all(1).any()):
            raise KeyboardInterrupt("goal")
        return state, DictTensor({"action": zeros(observation)}), DictTensor(dict(state.items()))

    def update(self, info: Any) -> None:
        if info == self.call:
            raise KeyboardInterrupt("goal")


def create_env(seed: int, call: str) -> GymEnv:
    if call == "create_env":
        raise KeyboardInterrupt("goal")
    return GymEnv([RaisingEnv(call) for _ in range(2)], seed)


def create_agent(call: str) -> Agent:
    if call == "create_agent":
        raise KeyboardInterrupt("goal")
    return RaisingAgent(call)


def arguments(call: str) -> tuple[Any, ...]:
    given = {"call": call}
    return 4, 8, create_agent, given, create_env, given


@pytest.mark.parametrize("call", ["reset", "step", "agent", "initial_state", "update"])
def test_they_tell_lane_and_episode_and_the_batcher_works_on(call: str) -> None:
    with EpisodeBatcher(*arguments(call), n_threads=1, seeds=1) as batcher:
        ids = {"id": [0, 1, 0]}
        if call == "update":
            batcher.update(call)
        batcher.execute(3, ids, ids)
        kind = EnvError if call in ("reset", "step") else AgentError
        with pytest.raises(kind, match="raised KeyboardInterrupt: goal") as caught:
            batcher.get()
        where = caught.value.where
        if call in ("reset", "step"):
            assert (where.lane, where.row, where.step) == (1, 1, int(call == "step"))
        if call != "update":
            assert where.lane is not None
            assert where.row is not None
        batcher.update("fine")
        batcher.execute(2, {"id": [0, 0]}, {"id": [0, 0]})
        assert batcher.get().lengths.tolist() == [3, 3]
        assert batcher._dispatcher.restarts.n_restarts == 0


@pytest.mark.parametrize("call", ["create_env", "create_agent"])
def test_they_tell_what_could_not_be_made(call: str) -> None:
    with pytest.raises(WorkerStartupError, match=f"{call} raised KeyboardInterrupt: goal"):
        EpisodeBatcher(*arguments(call))


def test_windows_and_closing(capfd: pytest.CaptureFixture[str]) -> None:
    with Batcher(*arguments("step")) as batcher:
        batcher.reset({"id": [0, 1]}, {"id": [0, 1]})
        batcher.execute()
        with pytest.raises(EnvError, match="KeyboardInterrupt") as caught:
            batcher.get()
        assert caught.value.where.lane == 1
    batcher = EpisodeBatcher(*arguments("close"))
    batcher.close()
    with ParallelEnvManager([lambda: RaisingEnv("close")] * 2, envs_per_worker=2):
        pass
    assert capfd.readouterr() == ("", "")


def two_steps(manager: ParallelEnvManager) -> None:
    manager.reset_lanes([0, 1], [1, 2], [{"id": 0}, {"id": 1}])
    for _ in range(2):
        manager.step_lanes([0, 1], no_actions(manager))


@pytest.mark.parametrize("call", ["reset", "step"])
def test_managers_and_remotes(call: str) -> None:
    envs = [lambda: RaisingEnv(call)] * 2
    with ParallelEnvManager(envs, envs_per_worker=2) as manager:
        error = rf"env.{call} raised KeyboardInterrupt: goal"
        with pytest.raises(EnvError, match=error) as caught:
            two_steps(manager)
        assert caught.value.where.lane == 1
        manager.remotes[1].send(("reset", {"options": {"id": 1}}))
        replies = [manager.remotes[1].recv()]
        for _ in range(2 * (call == "step")):
            manager.remotes[1].send(("step", 0))
            replies.append(manager.remotes[1].recv())
        assert replies[-1][0] == "error"
        assert "KeyboardInterrupt" in replies[-1][1]


def test_the_policy_and_the_environment_of_a_pool() -> None:
    def policy(state: Any) -> int:
        raise KeyboardInterrupt("goal")

    class Failing(ActingEnv):
        def step(self, action: Any) -> Any:
            raise KeyboardInterrupt("goal")

    for env, kind in ((CountingEnv(), AgentError), (Failing(), EnvError)):
        raises = pytest.raises(kind, match=r"raised KeyboardInterrupt: goal")
        with Pool([env], pool_size=8, policy=policy) as pool, raises:
            pool.store()


@pytest.mark.parametrize("call", ["step", "agent"])
def test_in_the_caller_s_process_it_is_taken_for_ctrl_c(call: str) -> None:
    batcher = EpisodeBatcher(*arguments(call), n_threads=0)
    with batcher:
        batcher.execute(2, env_info={"id": [1, 1]})
        with pytest.raises(KeyboardInterrupt, match="goal"):
            batcher.get()
