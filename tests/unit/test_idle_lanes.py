"""Lanes without an episode: what the agent is shown of them, and that nothing fails there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from rlpool import (
    Agent,
    AgentError,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    VectorGymEnv,
)

from support.agents import FunctionAgent, Vandal, zeros
from support.envs import CountingEnv, FailingEnv, create_counting
from support.vector_envs import ArrayEnv

N_LANES = 4


class TableAgent(Agent):
    """Looks its info and its step up in tables that have no room for any other value.

    Args:
        initial: Whether it makes its initial states itself.
        fails: Whether it refuses info 2.
    """

    n_noise = 1

    def __init__(self, initial: bool = False, fails: bool = False) -> None:
        self.initial, self.fails = initial, fails
        self.infos, self.positions = torch.arange(3), torch.arange(6)

    def initial_state(self, agent_info: DictTensor | None, n: int) -> DictTensor:
        return DictTensor({"step": torch.zeros(n, dtype=torch.int64)})

    def makes_initial_states(self) -> bool:
        return self.initial

    def __call__(self, state, observation, agent_info=None, history=None):
        state = state or self.initial_state(agent_info, observation.n_elems())
        info = self.infos[agent_info["id"]]
        if self.fails and (info == 2).any():
            raise RuntimeError("no such task")
        step = self.positions[state["step"]]
        assert torch.equal(step, observation["frame"][:, 0].long())
        output = {"action": zeros(observation), "info": info}
        return state, DictTensor(output), DictTensor({"step": step + 1})


def make(create_agent: Any, create_env: Any = create_counting, **env_args: Any) -> EpisodeBatcher:
    options: dict[str, Any] = {"n_threads": 0, "seeds": 3, "env_args": env_args}
    return EpisodeBatcher(16, 64, create_agent, {}, create_env, **options)


def run(batcher: EpisodeBatcher, lengths: list[int], **agent_info: Any) -> Any:
    batcher.execute(len(lengths), agent_info or None, {"length": lengths})
    return batcher.get()


# What the agent is shown --------------------------------------------------------------------


@pytest.mark.parametrize("initial", [False, True])
def test_states_and_infos_of_idle_lanes_are_those_of_a_running_one(initial: bool) -> None:
    with make(partial(TableAgent, initial), n_envs=N_LANES) as batcher:
        for lengths in ([6, 1, 1, 2], [6], [1, 6, 6], [6, 6, 1, 1, 1, 1, 1]):
            result = run(batcher, lengths, id=[k % 3 for k in range(len(lengths))])
            assert result.lengths.tolist() == lengths


@pytest.mark.parametrize("initial", [False, True])
def test_infos_of_a_request_that_failed_are_shown_to_nobody(initial: bool) -> None:
    with make(partial(TableAgent, initial, fails=True), n_envs=N_LANES) as batcher:
        for lengths in ([3], [2, 3], [3, 1, 2, 5, 1]):
            with pytest.raises(AgentError, match="no such task"):
                run(batcher, [3] * 6, id=[2] * 6)
            assert run(batcher, lengths, id=[1] * len(lengths)).lengths.tolist() == lengths


# Vector environments ------------------------------------------------------------------------


class Fragile(CountingEnv):
    """Raises in the fourth step of an episode of 7 steps, and in the third of one of 9 steps."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.length == 7 and self.t == 3:
            raise RuntimeError("stepped past its limit")
        if self.length == 9 and self.t == 2:
            raise RuntimeError("no such step")
        return super().step(action)


class Picky(CountingEnv):
    """Takes the number of its episode and nothing else as an action."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action != self.number:
            raise RuntimeError(f"illegal action {action}")
        return super().step(action)


class FragileArrays(ArrayEnv):
    """Lanes without an object each, which raise as those of ``Fragile`` do."""

    def step(self, actions: Any) -> Any:
        if ((self._length == 7) & (self._t == 3)).any():
            raise RuntimeError("stepped past its limit")
        if ((self._length == 9) & (self._t == 2)).any():
            raise RuntimeError("no such step")
        return super().step(actions)


def create_vector(
    seed: int, over: str, kind: Any = Fragile, limit: int | None = None
) -> VectorGymEnv:
    fns = [kind] * N_LANES
    made: Any
    if over == "sync":
        made = SyncVectorEnv(fns)
    elif over == "arrays":
        made = FragileArrays(N_LANES, AutoresetMode.DISABLED)
    else:
        shared = over == "async"
        mode = AutoresetMode.NEXT_STEP if shared else AutoresetMode.DISABLED
        made = AsyncVectorEnv(fns, context="fork", shared_memory=shared, autoreset_mode=mode)
    return VectorGymEnv(made, seed, seeding="episode", max_episode_steps=limit)


def play_id(state: Any, observation: Any, agent_info: Any, history: Any) -> Any:
    action = observation["frame"][:, 1].long() if observation["frame"].shape[1] == 2 else None
    action = zeros(observation) if action is None else action
    return None, DictTensor({"action": action}), None


OVER = ["sync", "async", "async, pickled", "arrays"]


@pytest.mark.parametrize("over", OVER)
def test_lanes_truncated_by_a_limit_are_not_stepped_past_it(over: str) -> None:
    """The environment raises where the limit should have stopped it."""
    with make(lambda: FunctionAgent(play_id), create_vector, over=over, limit=3) as batcher:
        for lengths in ([7, 7, 7, 7], [7], [7, 7, 7, 7, 7], [1, 7]):
            limited = [min(length, 3) for length in lengths]
            assert run(batcher, lengths).lengths.tolist() == limited


@pytest.mark.parametrize("over", OVER)
def test_episodes_of_a_request_that_failed_are_not_stepped_on(over: str) -> None:
    def fail_once(state: Any, observation: Any, agent_info: Any, history: Any) -> Any:
        if agent_info is not None and (observation["frame"][:, 0] == 1).all():
            raise RuntimeError("refused")
        return play_id(state, observation, agent_info, history)

    with make(lambda: FunctionAgent(fail_once), create_vector, over=over) as batcher:
        assert run(batcher, [4, 2]).lengths.tolist() == [4, 2]
        for lengths in ([8], [5, 8], [8] * 6):
            with pytest.raises(AgentError, match="refused"):
                run(batcher, [9, 9, 9, 9], id=0)
            assert run(batcher, lengths).lengths.tolist() == lengths


def play_legal(state: Any, observation: Any, agent_info: Any, history: Any) -> Any:
    return None, DictTensor({"action": agent_info["legal"]}), None


def test_lanes_that_cannot_rest_do_what_an_episode_did_and_are_seldom_reset() -> None:
    """A reset may cost as much as hundreds of steps, as those of Atari games do."""
    n_resets = []

    class PickyArrays(ArrayEnv):
        """Takes one action per episode, which follows from an option that it needs."""

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            n_resets.append(1)
            result = super().reset(seed=seed, options=options)
            self.has_options = "length" in options
            return result

        def step(self, actions: Any) -> Any:
            if not self.has_options or (actions != self._length % 3).any():
                raise RuntimeError(f"illegal actions {actions}")
            return super().step(actions)

    def create_env(seed: int) -> VectorGymEnv:
        return VectorGymEnv(PickyArrays(N_LANES), seed, seeding="episode")

    requests = [200], [4], [4], [200, 3], [3, 3, 3, 200], [100, 201], [5, 202, 1], [1], [900], [3]
    with make(lambda: FunctionAgent(play_legal), create_env) as batcher:
        for lengths in requests:
            n_resets.clear()
            batcher.execute(len(lengths), {"legal": [n % 3 for n in lengths]}, {"length": lengths})
            assert batcher.get().lengths.tolist() == lengths
            assert len(n_resets) < 20


@pytest.mark.parametrize("over", OVER[:3])
def test_lanes_at_rest_take_no_action(over: str) -> None:
    """An action that is legal in one lane may not be in another."""
    with make(lambda: FunctionAgent(play_id), create_vector, over=over, kind=Picky) as batcher:
        for n_episodes in (4, 1, 6, 2):
            ids = [10 * n_episodes + k for k in range(n_episodes)]
            batcher.execute(n_episodes, env_info={"id": ids, "length": [1 + k for k in ids]})
            result = batcher.get()
            assert result["frame"][:, 0, 1].tolist() == ids
            assert result.lengths.tolist() == [1 + k for k in ids]


def test_an_error_in_a_vector_environment_names_its_episode() -> None:
    create = partial(FailingEnv, RuntimeError("struck"), fails_at=7, step=2)

    def create_env(seed: int) -> VectorGymEnv:
        return VectorGymEnv(SyncVectorEnv([create] * 3), seed)

    with make(lambda: FunctionAgent(play_id), create_env) as batcher:
        batcher.execute(5, env_info={"id": [1, 2, 3, 4, 7]})
        with pytest.raises(EnvError, match="struck") as failure:
            batcher.get()
        where = failure.value.where
        assert where is not None
        assert (where.row, where.step, where.lane) == (4, 2, 1)
        assert len(failure.value.actions) == 3


# What an agent does in place ----------------------------------------------------------------


class StrictVandal(Vandal):
    """Compares what it is shown before it overwrites that."""

    def __call__(self, state, observation, agent_info=None, history=None):
        assert torch.equal(history.lengths, observation["frame"][:, 0].long())
        assert agent_info is None or not agent_info["gain"].any()
        return super().__call__(state, observation, agent_info or {"gain": torch.zeros(3)}, history)


@pytest.mark.parametrize("needs_info", [False, True])
def test_what_an_agent_does_in_place_is_not_shown_to_it_again(needs_info: bool) -> None:
    # The first request asks again for what the first call, of no episode, could not show.
    with make(partial(StrictVandal, history=True), n_envs=3) as batcher:
        infos = ({"gain": [0.0] * 4} if needs_info else None), {"length": [2, 1, 3, 1]}
        batcher.execute(4, *infos)
        assert batcher.get().lengths.tolist() == [2, 1, 3, 1]
