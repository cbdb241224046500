"""``stats()`` of a worker in this process, whose every step is known."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from rlpool import (
    AgentError,
    Batcher,
    EpisodeBatcher,
    GymEnv,
    GymEnvInf,
    Stats,
    UsageError,
)
from rlpool.machine.platform import IS_LINUX
from rlpool.observe.control import MAX_REQUESTS

from support.agents import StepCounter
from support.envs import CountingEnv
from support.meta import LaggingLanes

looks: list[Callable[[int], None]] = []


class LookingEnv(CountingEnv):
    """Environment that calls the last of ``looks`` in every step with its number, from 1."""

    def step(self, action: Any) -> Any:
        if looks:
            looks[-1](self.t + 1)
        return super().step(action)


@pytest.fixture(autouse=True)
def no_observer() -> Any:
    yield
    looks.clear()


def create_env(seed: int) -> GymEnv:
    return GymEnv([LookingEnv(length=5) for _ in range(2)], seed)


def make(n_timesteps: int = 8, n_slots: int = 8, **options: Any) -> EpisodeBatcher:
    return EpisodeBatcher(n_timesteps, n_slots, StepCounter, {}, create_env, {}, 0, 1, **options)


def lanes_of(stats: Stats) -> list[tuple[str, Any, Any, Any]]:
    return [(n.state, n.request, n.episode, n.step) for n in stats.workers[0].lanes]


def test_a_finished_request_is_counted_and_its_lanes_are_idle() -> None:
    with make() as batcher:
        batcher.execute(7)
        result = batcher.get()
        assert result is not None
        stats = batcher.stats()
        assert (stats.name, stats.pid, stats.requests) == ("EpisodeBatcher", os.getpid(), ())
        assert (stats.n_steps, stats.n_episodes, stats.restarts) == (35, 7, 0)
        (worker,) = stats.workers
        assert (worker.pid, worker.state, worker.restarts) == (os.getpid(), "alive", 0)
        assert worker.rss_bytes > 0 or not IS_LINUX
        assert lanes_of(stats) == [("idle", None, None, None)] * 2
        assert stats.steps_per_s > 0
    with pytest.raises(UsageError, match="closed"):
        batcher.stats()


@pytest.mark.parametrize("n_timesteps", [2, 8])  # whether or not an episode fits into one slot
def test_the_state_of_lanes_is_right_in_the_middle_of_a_step(n_timesteps: int) -> None:
    with make(n_timesteps) as batcher:
        seen: list[tuple[int, Stats]] = []
        looks.append(lambda step: seen.append((step, batcher.stats())))
        for _ in range(MAX_REQUESTS + 1):  # the last one reuses the first one's place in the record
            batcher.execute(4)
            batcher.get()
    assert [step for step, _ in seen[-20:]] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5] * 2
    for number, (step, stats) in enumerate(seen[-20:]):
        n_finished = 2 * (number // 10)
        lanes = [("running", 9, n_finished + lane, step - 1) for lane in range(2)]
        assert lanes_of(stats) == lanes
        (request,) = stats.requests
        assert (request.number, request.n_episodes, request.n_finished) == (9, 4, n_finished)


def test_lanes_not_waited_for_are_at_different_steps() -> None:
    envs = [LookingEnv(length=5) for _ in range(2)]
    args = {"envs": envs, "min_ready": 1}
    with EpisodeBatcher(8, 2, StepCounter, {}, LaggingLanes, args, 0, 1) as batcher:
        seen: list[tuple[list[int], Stats]] = []
        looks.append(lambda _: seen.append(([env.t for env in envs], batcher.stats())))
        batcher.execute(2)
        batcher.get()
    assert len({steps[0] - steps[1] for steps, _ in seen}) > 2
    for steps, stats in seen:
        running = [n for n in stats.workers[0].lanes if n.state == "running"]
        assert [n.step for n in running] == [steps[n.lane] for n in running]


def test_the_time_of_a_running_call_counts() -> None:
    with make() as batcher:
        shares = []

        def look_twice(step: int) -> None:
            batcher.stats()
            end = os.times().elapsed + 0.05
            while os.times().elapsed < end:
                pass
            shares.append(batcher.stats().workers[0].env_share)
            looks.clear()

        looks.append(look_twice)
        batcher.execute(1)
        batcher.get()
    assert shares == [1.0]


def test_between_windows_lanes_wait_in_the_middle_of_their_episodes() -> None:
    def create_restarting(seed: int) -> GymEnv:
        return GymEnvInf([CountingEnv(length=3 + 3 * n) for n in range(2)], seed)

    arguments = {"create_agent": StepCounter, "create_env": create_restarting}
    with Batcher(4, n_threads=0, seeds=1, **arguments) as batcher:
        batcher.reset()
        batcher.execute()
        batcher.get()
        stats = batcher.stats()
    # Lane 0 has restarted once, after three steps; lane 1 is in its first episode.
    assert lanes_of(stats) == [("waiting", 1, 1, 1), ("waiting", 1, 0, 4)]
    assert (stats.n_steps, stats.n_episodes) == (8, 1)


class FailingAgent(StepCounter):
    def __call__(self, state, observation, agent_info=None, history=None):
        if observation["frame"][0, 0] == 2:
            raise ValueError("on purpose")
        return super().__call__(state, observation, agent_info, history)


def test_a_call_that_raised_counts_as_ended() -> None:
    with EpisodeBatcher(8, 8, FailingAgent, {}, create_env, {}, 0, 1) as batcher:
        batcher.execute(2)
        with pytest.raises(AgentError):
            batcher.get()
        stats, later = batcher.stats(), batcher.stats()
    assert lanes_of(stats) == [("idle", None, None, None)] * 2
    assert stats.requests == ()
    assert later.workers[0].agent_share == later.workers[0].env_share == 0.0


def test_lanes_beyond_the_reported_ones_are_only_counted() -> None:
    def create_many(seed: int) -> GymEnv:
        return GymEnv([CountingEnv() for _ in range(1025)], seed)

    with EpisodeBatcher(4, 1100, StepCounter, {}, create_many, {}, 0, 1) as batcher:
        batcher.execute(1030)
        batcher.get()
        stats = batcher.stats()
    assert (stats.n_episodes, stats.workers[0].lanes) == (1030, ())
