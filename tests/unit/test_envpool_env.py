"""EnvPoolEnv: episodes of EnvPool. Skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from process.watching import assert_all_equal, assert_equal

from rlpool import (
    AgentError,
    EnvPoolEnv,
    EpisodeBatcher,
    SpecError,
    VectorGymEnv,
)
from rlpool.testing import check_env

from support.agents import BinaryAgent, FunctionAgent, binary_action
from support.vector_envs import windows

envpool = pytest.importorskip("envpool", reason="EnvPool is not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def make(name: str = "CartPole-v1", n_lanes: int = 4, **arguments: Any) -> Any:
    return envpool.make(name, env_type="gymnasium", num_envs=n_lanes, **{"seed": 3, **arguments})


def create(seed: int, **arguments: Any) -> EnvPoolEnv:
    return EnvPoolEnv(make(**arguments))


def collect(n_threads: int, n_slots: int = 40, **env_args: Any) -> list[Any]:
    with EpisodeBatcher(
        16, n_slots, BinaryAgent, {}, create, env_args, n_threads, seeds=1
    ) as batcher:
        for n_episodes in (18, 7):
            batcher.execute(n_episodes)
        return [batcher.get() for _ in range(2)]


def of_one_lane(lane: int, n_episodes: int, **arguments: Any) -> list[Any]:
    """The episodes of a lane, by hand: what other lanes do does not matter to it."""
    pool = make(n_lanes=lane + 1, **arguments)
    pool.reset()  # the probe
    frames, _ = pool.reset()
    episodes: list[Any] = [[frames[lane]]]
    is_over = False
    while True:
        actions = np.repeat(binary_action(frames[lane]), lane + 1).astype(np.int32)
        frames, _, terminated, truncated, _ = pool.step(actions)
        if is_over:
            episodes.append([])
        episodes[-1].append(frames[lane])
        is_over = terminated[lane] or truncated[lane]
        if is_over and len(episodes) == n_episodes:
            return episodes


def test_episodes_are_those_of_each_environment() -> None:
    result = collect(0)[0]
    for lane in range(4):
        rows = range(lane, 18, 4)
        for row, frames in zip(rows, of_one_lane(lane, len(rows)), strict=True):
            n = int(result.lengths[row])
            assert n == len(frames) - 1
            assert result["frame"][row, :n].numpy().tobytes() == np.stack(frames[:-1]).tobytes()
            assert result["_frame"][row, n - 1].numpy().tobytes() == frames[-1].tobytes()
            assert bool(result["_done"][row, n - 1])
    assert result.info["reproducible"].tolist() == [True] * 18


def test_workers_and_few_slots() -> None:
    first, second = collect(2, 8), collect(2, 40)
    assert_all_equal(first, second)
    assert [len(result.lengths) for result in first] == [18, 7]


def test_a_pool_that_create_env_returns_is_a_stream() -> None:
    with EpisodeBatcher(
        16, 40, BinaryAgent, {}, lambda seed: make(), n_threads=0, seeds=1
    ) as batcher:
        batcher.execute(18)
        assert_equal(batcher.get(), collect(0)[0])


def test_a_request_follows_one_that_failed() -> None:
    calls = iter(range(1000))

    def act(*inputs: Any) -> Any:
        assert next(calls) != 9
        return BinaryAgent()(*inputs)

    with EpisodeBatcher(16, 40, FunctionAgent, {"function": act}, create, n_threads=0) as batcher:
        batcher.execute(18)
        with pytest.raises(AgentError):
            batcher.get()
        batcher.execute(18)
        result = batcher.get()
    assert result is not None
    assert result["_done"][np.arange(18), result.lengths - 1].all()
    assert not result.info["reproducible"].any()


def test_lanes_of_windows_restart() -> None:
    options: Any = {"auto_reset": True, "max_episode_steps": 9}
    create_env = lambda: EnvPoolEnv(make(), **options)  # noqa: E731
    (window,) = windows(create_env, [1], 30, create_agent=BinaryAgent)
    assert window is not None
    assert window["_done"].sum() > 4
    assert int(window.lengths.max()) == 30


def test_continuous_actions_and_check_env() -> None:
    check_env(lambda seed: EnvPoolEnv(make("Pendulum-v1", seed=seed)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: EnvPoolEnv(3), "3 is not an EnvPool"),
        (lambda: VectorGymEnv(make(batch_size=2)), "batch_size=2 of its num_envs=4"),
        (lambda: EnvPoolEnv(make(batch_size=3), auto_reset=True), "batch_size=3"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        wrong()
    assert caught.value.fix


def test_infos() -> None:
    def create_env(seed: int) -> EnvPoolEnv:
        return EnvPoolEnv(make(), info_keys=["elapsed_step"])

    with EpisodeBatcher(200, 8, BinaryAgent, {}, create_env, {}, 0, seeds=1) as batcher:
        batcher.execute(8)
        result = batcher.get()
    steps = torch.arange(result["done"].shape[1]) * result.mask()
    assert torch.equal(result["elapsed_step"], steps.int())
    assert torch.equal(result["_elapsed_step"], (steps + result.mask().long()).int())
    with pytest.raises(
        SpecError, match="info has no 'livess': reset gave 'elapsed_step', 'env_id'"
    ):
        EnvPoolEnv(make(), info_keys=["livess"])
