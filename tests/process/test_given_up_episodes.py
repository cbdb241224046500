"""Episodes that fail permanently end at the failing step, and the others are unaffected."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process.watching import worker_pids

from rlpool import (
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    GymEnv,
    NotRepeatedError,
    ParallelEnvManager,
    WorkerDiedError,
    evaluate,
)

from support.agents import ConstantAgent
from support.envs import CountingEnv
from support.faults import KINDS, faults
from support.fragile import FragileEnv, RecurrentAgent, create_fragile, failing
from support.variants import variants

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left", "short_patience"),
    pytest.mark.timeout(120),
]

ALWAYS = 1_000  # times that a fault strikes


def die_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_episode_whose_worker_is_killed_at_a_different_step_each_time_is_not_lost(
    tmp_path: Path,
) -> None:
    def create(seed: int) -> GymEnv:
        script = {step: partial(die_once, tmp_path / str(step)) for step in range(5)}
        return GymEnv([CountingEnv(5, script=script)], seed)

    with EpisodeBatcher(8, 8, ConstantAgent, create_env=create, n_workers=1, seeds=5) as batcher:
        batcher.execute(1)
        assert batcher.get().lengths.tolist() == [5]
    assert len(list(tmp_path.iterdir())) == 5


class LateEnv(FragileEnv):
    """Environment whose first reset in a process raises."""

    n_failures = 0

    def reset(self, **options: Any) -> Any:
        if LateEnv.n_failures < 1:
            LateEnv.n_failures += 1
            raise OSError("not yet")
        return super().reset(**options)


@pytest.mark.parametrize(("on_env_error", "n_workers"), [("raise", 0), ("truncate", 2)])
def test_a_batcher_starts_although_the_first_reset_fails(on_env_error: str, n_workers: int) -> None:
    LateEnv.n_failures = 0
    env_args = {"kind": LateEnv, "n_lanes": 2}
    options: dict[str, Any] = {"n_workers": n_workers, "seed": 5, "on_env_error": on_env_error}
    with EpisodeBatcher(16, 8, RecurrentAgent, {}, create_fragile, env_args, **options) as batcher:
        batcher.execute(4)
        assert batcher.get().lengths.min() > 0
        assert batcher.failures == ()


class LicensedEnv(FragileEnv):
    """Environment whose second step raises once its licence file is deleted."""

    def __init__(self, licence: str) -> None:
        super().__init__()
        self._licence = Path(licence)

    def step(self, action: Any) -> Any:
        if self.t == 1 and not self._licence.exists():
            raise OSError("no licence")
        return super().step(action)


@pytest.mark.parametrize("on_env_error", variants(["truncate"], ["restart"]))
def test_an_episode_that_fails_in_its_replayed_steps_ends_its_window(
    on_env_error: str, tmp_path: Path
) -> None:
    """The worker was killed between two windows, and its successor cannot repeat the first."""
    licence, others = tmp_path / "licence", worker_pids()
    licence.touch()
    env_args = {"restarts": True, "kind": LicensedEnv, "licence": str(licence)}
    options: dict[str, Any] = {"on_env_error": on_env_error, "max_restarts": 9}
    with Batcher(4, None, RecurrentAgent, {}, create_fragile, env_args, 1, 5, **options) as batcher:
        batcher.reset(None, {"length": 100})
        batcher.execute()
        batcher.get()
        licence.unlink()
        for pid in worker_pids() - others:
            os.kill(pid, signal.SIGKILL)
        batcher.execute()
        with pytest.raises(NotRepeatedError, match="step 1 fails now") as caught:
            batcher.get()
        assert caught.value.where.step == 1
        licence.touch()
        batcher.reset(None, {"length": 3})
        batcher.execute()
        assert batcher.get().lengths.tolist() == [4, 4]


# Environments in processes -------------------------------------------------------------------


def test_a_truncated_episode_is_not_repeated_for_other_lanes(tmp_path: Path) -> None:
    make = partial(FragileEnv, str(tmp_path), ALWAYS)
    options: dict[str, Any] = {"on_env_error": "restart", "max_restarts": 1}
    actions = {"action": np.array([1, 2])}
    with ParallelEnvManager([make] * 2, envs_per_worker=2, **options) as manager:
        manager.reset_lanes([0, 1], [1, 2], [{}, failing("sigkill", 0)])
        assert manager.step_lanes([0, 1], actions) == [1]
        os.kill(manager.workers[0].pid or 0, signal.SIGKILL)
        assert manager.step_lanes([0], actions) == []
        assert list(manager.failures) == [1]


def test_an_evaluation_reports_the_failed_episodes(tmp_path: Path) -> None:
    how: dict[str, Any] = {"env_args": {"marks": str(tmp_path), "times": ALWAYS}}
    how |= {"n_workers": 0, "env_info": faults(6, {3: ("raise", 1), 4: ("raise", 1)}, length=5)}
    found = evaluate(RecurrentAgent(), create_fragile, 6, on_env_error="truncate", **how)
    assert found.failed.nonzero().flatten().tolist() == [3, 4]
    assert found.lengths.tolist() == [5, 5, 5, 2, 2, 5]
    assert [error.where.episode for error in found.failures] == [3, 4]
    with pytest.raises(EnvError):
        evaluate(RecurrentAgent(), create_fragile, 6, **how)


def create_managed(seed: int, **arguments: Any) -> ParallelEnvManager:
    functions = [partial(FragileEnv, **arguments)] * 4
    return ParallelEnvManager(functions, seed=seed, envs_per_worker=2, on_env_error="truncate")


@pytest.mark.parametrize(("kind", "error"), [("raise", EnvError), ("sigkill", WorkerDiedError)])
def test_the_batchers_failure_policy_applies_to_a_manager(
    kind: str, error: type[Exception], tmp_path: Path
) -> None:
    def collected(batcher: EpisodeBatcher) -> Any:
        batcher.execute(6, {"gain": [1.0] * 6}, faults(6, {2: (kind, 1)}, length=5))
        return batcher.get()

    env_args = {"marks": str(tmp_path), "times": ALWAYS}
    arguments = 16, 24, RecurrentAgent, {}, create_managed, env_args, 0, 5
    with EpisodeBatcher(*arguments, on_env_error="truncate") as batcher:
        result, (failure,) = collected(batcher), batcher.failures
        assert isinstance(failure, error)
        assert result.info["failed"].tolist() == [row == 2 for row in range(6)]
        assert result.lengths.tolist() == [5, 5, 2, 5, 5, 5]
    with EpisodeBatcher(*arguments) as batcher:
        with pytest.raises(error) as caught:
            collected(batcher)
        where = caught.value.where
        assert (where.row, where.episode, where.step) == (2, 2, 1)


def test_a_manager_with_restarting_lanes_reports_failures_until_the_next_step(
    tmp_path: Path,
) -> None:
    make_env = partial(FragileEnv, marks=str(tmp_path), times=ALWAYS)
    options: dict[str, Any] = {"auto_reset": True, "on_env_error": "truncate"}
    with ParallelEnvManager([make_env], **options) as manager:
        manager.reset({"fault": KINDS.index("raise"), "fault_step": 1, "length": 9})
        zeros = DictTensor({"action": torch.zeros(1, dtype=torch.int64)})
        reported = []
        for _ in range(3):
            (stepped, _), _ = manager.step(zeros)
            reported.append((bool(stepped["truncated"]), list(manager.failures)))
        assert reported == [(False, []), (True, [0]), (False, [])]
