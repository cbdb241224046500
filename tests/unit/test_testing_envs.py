"""``CountingEnv`` counts, ``FaultyEnv`` fails where and how it is told."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rlpool import DictTensor, EpisodeBatcher, GymEnv, SpecError
from rlpool.testing import KINDS, CountingEnv, FaultyEnv, code, faults, strike
from rlpool.testing.faults import UnpicklableError, UnprintableError

from support.agents import ConstantAgent


def run(env: gymnasium.Env[Any, Any], **reset: Any) -> list[tuple[Any, ...]]:
    """The observation of the reset, then what each step returned except ``info``."""
    results: list[tuple[Any, ...]] = [(env.reset(**reset)[0].tolist(),)]
    while True:
        observation, *result, _ = env.step(0)
        results.append((observation.tolist(), *result))
        if result[1] or result[2]:
            return results


# CountingEnv


@pytest.mark.parametrize("kind", [CountingEnv, FaultyEnv])
def test_it_counts(kind: Any) -> None:
    env = kind(length=3)
    observation, info = env.reset(seed=5)
    assert info == {"id": 0}
    assert observation.dtype == np.float32
    assert observation.shape == (1,) == env.observation_space.shape
    assert run(env) == [
        ([0.0],),
        ([1.0], 1.0, False, False),
        ([2.0], 2.0, False, False),
        ([3.0], 3.0, True, False),
    ]
    assert observation.tolist() == [0.0], "handed out, and therefore not changed"
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    assert run(kind(length=1, truncate=True))[-1][1:] == (1.0, False, True)
    options = {"length": 2, "id": 7, "truncate": True, "other": 1}
    results = [result[1:] for result in run(env, options=options)[1:]]
    assert results == [(7001.0, False, False), (7002.0, False, True)]
    assert len(run(env)) == 4, "options hold for one episode"


@pytest.mark.parametrize("length", [0, 1.5, "x", None])
def test_lengths_that_cannot_be_are_refused(length: Any) -> None:
    with pytest.raises(SpecError, match="length"):
        CountingEnv(length=length)
    with pytest.raises(SpecError, match="length"):
        CountingEnv().reset(options={"length": length})


def test_a_batchers_result_can_be_written_down_by_hand() -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([FaultyEnv(), FaultyEnv()], seed)

    with EpisodeBatcher(4, 8, ConstantAgent, create_env=create_env, n_threads=0) as batcher:
        env_info = DictTensor({"length": torch.tensor([2, 1, 3]), "id": torch.tensor([0, 1, 2])})
        batcher.execute(3, env_info=env_info)
        result = batcher.get()
    assert result.lengths.tolist() == [2, 1, 3]
    assert result["frame"][..., 0].tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 2]]
    assert result["_reward"].tolist() == [[1, 2, 0], [1001, 0, 0], [2001, 2002, 2003]]


# FaultyEnv


@pytest.mark.parametrize(
    ("kind", "error"),
    [("raise", KeyError), ("unpicklable", UnpicklableError), ("sys_exit", SystemExit)],
)
@pytest.mark.parametrize(("at", "n_done"), [("init", 0), ("reset", 1), ("step", 4), ("close", 5)])
def test_it_raises_at_its_place_and_nowhere_else(
    kind: str, error: type[BaseException], at: str, n_done: int
) -> None:
    done: list[Any] = []

    def live() -> None:
        env = FaultyEnv(kind, at=at, at_step=2, length=3)
        calls = (lambda: "made", env.reset, *[lambda: env.step(0)] * 3, env.close)
        done.extend(call() for call in calls)

    with pytest.raises(error):
        live()
    assert len(done) == n_done


def test_exceptions_that_cannot_be_sent_or_printed() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(UnpicklableError("struck"))
    with pytest.raises(RuntimeError, match="no text"):
        str(UnprintableError("struck"))


def test_it_fails_in_one_episode_only_or_in_every_step() -> None:
    env = FaultyEnv("nan_reward", at_step=0, in_episode=1, length=2)
    env.reset()  # an episode without a step, such as that of a batcher's probe, does not count
    rewards = [[result[1] for result in run(env)[1:]] for _ in range(3)]
    assert rewards[0] == rewards[2] == [1.0, 2.0]
    assert np.isnan(rewards[1]).tolist() == [True, False]
    env = FaultyEnv("nan_reward", at_step=None, length=3)
    assert np.isnan([result[1] for result in run(env)[1:]]).all()


def test_it_fails_once_in_all_instances_and_processes(tmp_path: Path) -> None:
    marker = tmp_path / "struck"
    first = FaultyEnv("raise", once=marker)
    second = pickle.loads(pickle.dumps(first))
    for env in (first, second):
        env.reset()
    with pytest.raises(KeyError):
        second.step(0)
    assert marker.exists()
    for env in (first, second):
        env.reset()
        env.step(0)


@pytest.mark.parametrize(
    ("kind", "part", "is_wrong"),
    [
        ("nan", 0, lambda frame: np.isnan(frame).all()),
        ("nan", 1, np.isnan),
        ("nan_observation", 0, lambda frame: np.isnan(frame).all()),
        ("nan_observation", 1, lambda reward: reward == 1.0),
        ("nan_reward", 0, lambda frame: frame == 1.0),
        ("nan_reward", 1, np.isnan),
        ("wrong_dtype", 0, lambda frame: frame.dtype == np.int64),
        ("wrong_shape", 0, lambda frame: frame.shape == (2,)),
        ("wrong_reward", 1, np.ndim),
        ("wrong_flag", 2, np.ndim),
    ],
)
def test_wrong_results_are_wrong(kind: str, part: int, is_wrong: Any) -> None:
    env = FaultyEnv(kind)
    env.reset()
    assert is_wrong(env.step(0)[part])


def test_buffers_are_used_again_and_leaks_keep_memory() -> None:
    env = FaultyEnv("buffer_reuse", at_step=1)
    env.reset()
    before, first, second = (env.step(0)[0] for _ in range(3))
    assert first is second
    assert (before.tolist(), first.tolist()) == ([1.0], [3.0])
    tracemalloc.start()
    try:
        leaking = FaultyEnv("leak", at_step=None, leak_bytes=100_000, length=10)
        run(leaking)
        assert tracemalloc.get_traced_memory()[0] >= 1_000_000
    finally:
        tracemalloc.stop()


def test_options_choose_the_fault_of_an_episode() -> None:
    env = FaultyEnv("wrong_shape", at_step=0)
    env.reset(options={"fault": code("nan_reward"), "fault_step": 1})
    assert env.step(0)[0].shape == (1,)
    assert np.isnan(env.step(0)[1])
    env.reset(options={"fault": code("none")})
    assert env.step(0)[0].shape == (1,)
    env.reset()
    assert env.step(0)[0].shape == (2,)
    with pytest.raises(KeyError):
        env.reset(options={"fault": code("raise"), "fault_step": -1})
    with pytest.raises(SpecError, match="99"):
        env.reset(options={"fault": 99})


@pytest.mark.parametrize(
    "arguments",
    [
        {"fault": "explode"},
        {"fault": "raise", "at": "render"},
        {"fault": "raise", "at_step": -1},
        {"fault": "raise", "in_episode": -1},
        {"fault": "nan", "at": "init"},
        {"fault": "wrong_shape", "at": "close"},
        {"fault": "wrong_reward", "at": "reset"},
    ],
)
def test_faults_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        FaultyEnv(**arguments)


# faults


def test_faults_make_an_env_info() -> None:
    assert [KINDS[code(kind)] for kind in KINDS] == list(KINDS)
    with pytest.raises(SpecError, match="explode"):
        strike("explode")
    info = faults(4, row=[1, -1], kind="hang", step=3, length=7)
    assert {key: tensor.tolist() for key, tensor in info.items()} == {
        "fault": [0, code("hang"), 0, code("hang")],
        "fault_step": [3] * 4,
        "length": [7] * 4,
        "id": [0, 1, 2, 3],
    }
    assert not faults(2)["fault"].any()


@pytest.mark.parametrize(
    "arguments", [{"row": 4}, {"row": -5}, {"row": 0, "kind": "explode"}, {"row": 0, "step": -2}]
)
def test_faults_refuses_nonsense(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        faults(4, **arguments)
