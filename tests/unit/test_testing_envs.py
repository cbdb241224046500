"""``CountingEnv`` counts, ``FaultyEnv`` fails at the chosen place in the chosen way."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlpool import SpecError
from rlpool.testing import KINDS, CountingEnv, FaultyEnv, code, faults, strike
from rlpool.testing.faults import UnpicklableError


def run(env: gymnasium.Env[Any, Any], **reset: Any) -> list[tuple[Any, ...]]:
    """The observation of the reset, then what each step returned except ``info``."""
    results: list[tuple[Any, ...]] = [(env.reset(**reset)[0].tolist(),)]
    while not any(results[-1][2:]):
        observation, *result, _ = env.step(0)
        results.append((observation.tolist(), *result))
    return results


def rewards(env: gymnasium.Env[Any, Any]) -> Any:
    return np.array([result[1] for result in run(env)[1:]])


NANS = ("nan", "nan_observation", "nan_reward")

# CountingEnv


@pytest.mark.parametrize("kind", [CountingEnv, FaultyEnv])
def test_it_counts(kind: Any) -> None:
    env = kind(length=2)
    observation, info = env.reset(seed=5)
    assert (info, observation.dtype) == ({"id": 0}, np.float32)
    assert run(env) == [([0.0],), ([1.0], 1.0, False, False), ([2.0], 2.0, True, False)]
    assert observation.tolist() == [0.0], "handed out, and therefore not changed"
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    assert run(kind(length=1, truncate=True))[-1][1:] == (1.0, False, True)
    options = {"length": 1, "id": 7, "truncate": True, "other": 1}
    assert run(env, options=options)[1:] == [([1.0], 7001.0, False, True)]
    assert len(run(env)) == 3, "options hold for one episode"


@pytest.mark.parametrize("length", [0, 1.5, "x", None])
def test_impossible_lengths_are_refused(length: Any) -> None:
    with pytest.raises(SpecError, match="length"):
        CountingEnv(length=length)
    with pytest.raises(SpecError, match="length"):
        CountingEnv().reset(options={"length": length})


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


def test_it_fails_in_one_episode_only_or_in_every_step() -> None:
    env = FaultyEnv("nan_reward", at_step=0, in_episode=1, length=2)
    env.reset()  # an episode without a step, such as that of a batcher's probe, does not count
    failed = [np.isnan(rewards(env)).tolist() for _ in range(3)]
    assert failed == [[False, False], [True, False], [False, False]]
    assert np.isnan(rewards(FaultyEnv("nan_reward", at_step=None, length=3))).all()


def test_it_fails_once_in_all_instances_and_processes(tmp_path: Path) -> None:
    first = FaultyEnv("raise", once=tmp_path / "struck", length=1)
    second = pickle.loads(pickle.dumps(first))
    with pytest.raises(KeyError):
        run(second)
    assert run(first) == run(second)


def test_wrong_results_are_wrong() -> None:
    def step(kind: str) -> Any:
        env = FaultyEnv(kind)
        env.reset()
        return env.step(0)

    is_nan = {kind: [bool(np.isnan(part).any()) for part in step(kind)[:2]] for kind in NANS}
    assert is_nan == {
        "nan": [True] * 2,
        "nan_observation": [True, False],
        "nan_reward": [False, True],
    }
    assert step("wrong_dtype")[0].dtype == np.int64
    assert step("wrong_shape")[0].shape == (2,)
    assert np.ndim(step("wrong_reward")[1]) == np.ndim(step("wrong_flag")[2]) == 1


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
    env.reset()
    assert env.step(0)[0].shape == (2,)
    with pytest.raises(KeyError):
        env.reset(options={"fault": code("raise"), "fault_step": -1})
    with pytest.raises(SpecError, match="99"):
        env.reset(options={"fault": 99})


def test_faults_make_an_env_info() -> None:
    assert [KINDS[code(kind)] for kind in KINDS] == list(KINDS)
    info = faults(4, row=(1, -1), kind="hang", step=3, length=7)
    assert {key: tensor.tolist() for key, tensor in info.items()} == {
        "fault": [0, code("hang"), 0, code("hang")],
        "fault_step": [3] * 4,
        "length": [7] * 4,
        "id": [0, 1, 2, 3],
    }
    assert not faults(2)["fault"].any()


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (FaultyEnv, {"fault": "explode"}),
        (FaultyEnv, {"fault": "raise", "at": "render"}),
        (FaultyEnv, {"fault": "raise", "at_step": -1}),
        (FaultyEnv, {"fault": "nan", "at": "init"}),
        (FaultyEnv, {"fault": "wrong_reward", "at": "reset"}),
        (strike, {"kind": "explode"}),
        (faults, {"n_rows": 4, "row": 4}),
        (faults, {"n_rows": 4, "row": [1, -5]}),
        (faults, {"n_rows": 4, "row": 0, "kind": "explode"}),
        (faults, {"n_rows": 4, "row": 0, "step": -2}),
    ],
)
def test_faults_that_cannot_be_are_refused(function: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        function(**arguments)
