"""``CountingEnv`` counts, ``FaultyEnv`` fails where and how it is told."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rlpool import Agent, DictTensor, EnvError, EnvSpecError, EpisodeBatcher, GymEnv, SpecError
from rlpool.testing import KINDS, CountingEnv, FaultyEnv, code, faults, strike
from rlpool.testing.faults import HANGING, LETHAL, RAISING, WRONG, UnpicklableError

from support.agents import ConstantAgent


def run(env: gymnasium.Env[Any, Any], **reset: Any) -> list[tuple[Any, ...]]:
    """The observation of the reset, then what each step returned but for ``info``."""
    results: list[tuple[Any, ...]] = [(env.reset(**reset)[0],)]
    while True:
        *result, _ = env.step(0)
        results.append(tuple(result))
        if result[2] or result[3]:
            return results


# CountingEnv


def test_counting_env_counts() -> None:
    env = CountingEnv(length=3)
    observation, info = env.reset(seed=5)
    assert info == {"id": 0}
    assert observation.dtype == np.float32
    assert observation.shape == (1,) == env.observation_space.shape
    assert [[each.tolist() if i == 0 else each for i, each in enumerate(r)] for r in run(env)] == [
        [[0.0]],
        [[1.0], 1.0, False, False],
        [[2.0], 2.0, False, False],
        [[3.0], 3.0, True, False],
    ]


def test_counting_env_truncates_if_told() -> None:
    assert run(CountingEnv(length=1, truncate=True))[-1][1:] == (1.0, False, True)


def test_counting_env_takes_options_for_one_episode() -> None:
    env = CountingEnv(length=4)
    options = {"length": 2, "id": 7, "truncate": True, "other": 1}
    assert [result[1:] for result in run(env, options=options)[1:]] == [
        (7001.0, False, False),
        (7002.0, False, True),
    ]
    assert len(run(env)) == 5


def test_counting_env_hands_out_arrays_of_its_own() -> None:
    env = CountingEnv()
    first = env.reset()[0]
    env.step(0)
    assert first.tolist() == [0.0]


def test_counting_env_refuses_steps_outside_episodes() -> None:
    env = CountingEnv(length=1)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    run(env)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)


@pytest.mark.parametrize("length", [0, -1, 1.5, "x", None])
def test_counting_env_refuses_lengths(length: Any) -> None:
    with pytest.raises(SpecError, match="length"):
        CountingEnv(length=length)
    with pytest.raises(SpecError, match="length"):
        CountingEnv().reset(options={"length": length})


def test_counting_env_gives_a_batchers_result_by_hand() -> None:
    with EpisodeBatcher(
        4,
        4,
        ConstantAgent,
        create_env=lambda seed: GymEnv([CountingEnv(), CountingEnv()], seed),
        n_threads=0,
    ) as batcher:
        env_info = DictTensor({"length": torch.tensor([2, 1, 3]), "id": torch.tensor([0, 1, 2])})
        batcher.execute(3, env_info=env_info)
        result = batcher.get()
    assert result.lengths.tolist() == [2, 1, 3]
    assert result["frame"][..., 0].tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 2]]
    assert result["_reward"].tolist() == [[1, 2, 0], [1001, 0, 0], [2001, 2002, 2003]]


# FaultyEnv


def test_without_a_fault_it_counts() -> None:
    assert run(FaultyEnv(length=3)) == run(CountingEnv(length=3))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("raise", KeyError),
        ("unpicklable", UnpicklableError),
        ("unprintable", Exception),
        ("sys_exit", SystemExit),
    ],
)
@pytest.mark.parametrize("at", ["init", "reset", "step", "close"])
def test_it_raises_at_its_place(kind: str, expected: type[BaseException], at: str) -> None:
    make = partial(FaultyEnv, kind, at=at, at_step=2)
    if at == "init":
        with pytest.raises(expected):
            make()
        return
    env = make()
    if at == "reset":
        with pytest.raises(expected):
            env.reset()
        return
    env.reset()
    env.step(0)
    env.step(0)
    if at == "step":
        with pytest.raises(expected):
            env.step(0)
        return
    env.step(0)
    with pytest.raises(expected):
        env.close()
    assert env.is_closed


def test_what_is_unpicklable_cannot_be_pickled() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(UnpicklableError("x"))


def test_it_fails_in_one_episode_only() -> None:
    env = FaultyEnv("nan_reward", at_step=0, in_episode=1, length=2)
    env.reset()  # an episode without a step, such as that of a batcher's probe, is none
    rewards = [[result[1] for result in run(env)[1:]] for _ in range(3)]
    assert rewards[0] == rewards[2] == [1.0, 2.0]
    assert np.isnan(rewards[1][0])
    assert rewards[1][1] == 2.0


def test_it_fails_in_every_step_if_told() -> None:
    env = FaultyEnv("nan_reward", at_step=None, length=3)
    assert np.isnan([result[1] for result in run(env)[1:]]).all()


def test_it_fails_once_for_all_instances(tmp_path: Path) -> None:
    marker = tmp_path / "struck"
    first, second = (FaultyEnv("raise", once=marker) for _ in range(2))
    for env in (first, second):
        env.reset()
    with pytest.raises(KeyError):
        first.step(0)
    assert marker.exists()
    second.step(0)
    first.reset()
    first.step(0)


def wrong(kind: str, **arguments: Any) -> tuple[Any, ...]:
    env = FaultyEnv(kind, **arguments)
    env.reset()
    return env.step(0)


def test_wrong_results_are_wrong() -> None:
    assert np.isnan(wrong("nan")[0]).all()
    assert np.isnan(wrong("nan")[1])
    assert np.isnan(wrong("nan_observation")[0]).all()
    assert wrong("nan_observation")[1] == 1.0
    assert wrong("nan_reward")[0].tolist() == [1.0]
    assert np.isnan(wrong("nan_reward")[1])
    assert wrong("wrong_dtype")[0].dtype == np.int64
    assert wrong("wrong_shape")[0].shape == (2,)
    assert np.ndim(wrong("wrong_reward")[1]) == 1
    assert np.ndim(wrong("wrong_flag")[2]) == 1


def test_a_wrong_reset_is_wrong() -> None:
    assert FaultyEnv("wrong_shape", at="reset").reset()[0].shape == (2,)


def test_buffers_are_used_again() -> None:
    env = FaultyEnv("buffer_reuse", at_step=1)
    env.reset()
    before, first, second = (env.step(0)[0] for _ in range(3))
    assert first is second
    assert first.tolist() == [3.0]
    assert before.tolist() == [1.0]


def test_a_leak_keeps_memory() -> None:
    import tracemalloc

    env = FaultyEnv("leak", at_step=None, leak_bytes=100_000, length=10)
    tracemalloc.start()
    try:
        run(env)
        kept = tracemalloc.get_traced_memory()[0]
        del env
        assert kept - tracemalloc.get_traced_memory()[0] >= 1_000_000
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


def test_it_can_be_sent_to_a_process(tmp_path: Path) -> None:
    env = FaultyEnv("raise", at_step=1, once=tmp_path / "once", length=5)
    copied = pickle.loads(pickle.dumps(env))
    copied.reset()
    copied.step(0)
    with pytest.raises(KeyError):
        copied.step(0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"fault": "explode"},
        {"fault": "raise", "at": "render"},
        {"fault": "raise", "at_step": -1},
        {"fault": "raise", "in_episode": -1},
        {"fault": "raise", "at": "init", "in_episode": 0},
        {"fault": "nan", "at": "init"},
        {"fault": "wrong_shape", "at": "close"},
        {"fault": "wrong_reward", "at": "reset"},
        {"fault": "raise", "once": "/no/such/directory/file"},
    ],
)
def test_faults_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        FaultyEnv(**arguments)


def test_unknown_codes_are_refused() -> None:
    with pytest.raises(SpecError, match="99"):
        FaultyEnv().reset(options={"fault": 99})
    with pytest.raises(SpecError, match="explode"):
        strike("explode")


# faults


def test_every_kind_is_of_one_sort_and_has_a_code() -> None:
    assert sorted(KINDS) == sorted(("none", "leak", *RAISING, *LETHAL, *HANGING, *WRONG))
    assert [KINDS[code(kind)] for kind in KINDS] == list(KINDS)
    assert code("none") == 0


def test_faults_make_an_env_info() -> None:
    info = faults(4, row=[1, -1], kind="hang", step=3, length=7)
    assert info["fault"].tolist() == [0, code("hang"), 0, code("hang")]
    assert info["fault_step"].tolist() == [3] * 4
    assert info["length"].tolist() == [7] * 4
    assert info["id"].tolist() == [0, 1, 2, 3]
    assert not faults(2)["fault"].any()


@pytest.mark.parametrize(
    "arguments", [{"row": 4}, {"row": -5}, {"row": 0, "kind": "explode"}, {"row": 0, "step": -2}]
)
def test_faults_refuses_nonsense(arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        faults(4, **arguments)


def create_faulty(seed: int) -> GymEnv:
    return GymEnv([FaultyEnv(), FaultyEnv()], seed)


@pytest.mark.parametrize(("kind", "step"), [("raise", 2), ("raise", -1), ("wrong_dtype", 0)])
def test_a_batcher_names_the_row_that_failed(kind: str, step: int) -> None:
    expected = EnvSpecError if kind == "wrong_dtype" else EnvError
    agent: type[Agent] = ConstantAgent
    with EpisodeBatcher(4, 8, agent, create_env=create_faulty, n_threads=0) as batcher:
        batcher.execute(6, env_info=faults(6, row=4, kind=kind, step=step, length=5))
        with pytest.raises(expected) as caught:
            batcher.get()
    assert caught.value.where.episode == 4
    assert caught.value.where.step == max(step, 0)
