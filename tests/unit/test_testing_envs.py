"""``CountingEnv`` counts, ``FaultyEnv`` fails at the chosen place in the chosen way."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlpool import SpecError
from rlpool.testing import KINDS, CountingEnv, FaultyEnv, code, faults, strike


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
    assert run(CountingEnv(length=1, truncate=True))[-1][1:] == (1.0, False, True)
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


@pytest.mark.parametrize(("kind", "error"), [("raise", KeyError), ("sys_exit", SystemExit)])
@pytest.mark.parametrize(("at_step", "n_done"), [(-1, 0), (0, 1), (2, 3), (None, 1), (3, 4)])
def test_it_raises_at_its_step_and_nowhere_else(
    kind: str, error: type[BaseException], at_step: int | None, n_done: int
) -> None:
    env = FaultyEnv(kind, at_step=at_step, length=4)
    done: list[Any] = []
    with pytest.raises(error):
        done.extend(call() for call in (env.reset, *[lambda: env.step(0)] * 4))
    assert len(done) == n_done


def test_it_fails_in_every_step_of_every_episode() -> None:
    env = FaultyEnv("nan_reward", at_step=None, length=3)
    assert np.isnan([rewards(env), rewards(env)]).all()


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


def test_options_choose_the_fault_of_an_episode() -> None:
    env = FaultyEnv("wrong_shape", at_step=0)
    env.reset(options={"fault": code("nan_reward"), "fault_step": 1})
    assert env.step(0)[0].shape == (1,)
    assert np.isnan(env.step(0)[1])
    env.reset()
    assert env.step(0)[0].shape == (2,)
    with pytest.raises(KeyError):
        env.reset(options={"fault": code("raise"), "fault_step": -1})


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
    ("function", "arguments", "named"),
    [
        (FaultyEnv, {"fault": "explode"}, "explode"),
        (FaultyEnv, {"fault": "raise", "at_step": -2}, "at_step"),
        (FaultyEnv, {"fault": "raise", "at": "reset"}, "takes no 'at'\n.*at_step"),
        (strike, {"kind": "explode"}, "explode"),
        (faults, {"n_rows": 4, "row": 0, "kind": "explode"}, "explode"),
        (faults, {"n_rows": 4, "row": 0, "step": -2}, "step"),
    ],
)
def test_faults_that_cannot_be_are_refused(
    function: Any, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(SpecError, match=named):
        function(**arguments)
