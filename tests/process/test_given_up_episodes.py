"""Episodes that fail for good end where they fail, and the others do not notice."""

from __future__ import annotations

import functools
import itertools
import logging
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
    WorkerTimeoutError,
    evaluate,
)

from support.agents import ConstantAgent
from support.envs import CountingEnv
from support.faults import KINDS
from support.fragile import FragileEnv, RecurrentAgent, create_fragile, failing
from support.variants import variants

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left", "short_patience"),
    pytest.mark.timeout(120),
]

ALWAYS = 1_000  # times that a fault strikes
N = 12


def infos(kind: str, step: int, rows: tuple[int, ...] = (2, 7)) -> dict[str, Any]:
    """Episodes of which some fail at a step, -1 for the reset."""
    fault = torch.zeros(N, dtype=torch.int64)
    fault[list(rows)] = KINDS.index(kind)
    return {"length": 2 + torch.arange(N) % 7, "fault": fault, "fault_step": step}


def collected(
    tmp_path: Path | None,
    env_info: Any,
    n_threads: int = 2,
    n_timesteps: int = 16,
    create_env: Any = create_fragile,
    **policy: Any,
) -> Any:
    env_args: dict[str, Any] = {"n_lanes": 4}
    if tmp_path is not None:
        env_args |= {"marks": str(tmp_path), "times": ALWAYS}
    with EpisodeBatcher(
        n_timesteps, 24, RecurrentAgent, {}, create_env, env_args, n_threads, 5, **policy
    ) as batcher:
        batcher.execute(N, {"gain": torch.linspace(0.5, 2.0, N)}, env_info)
        result, failures = batcher.get(), batcher.failures
        batcher.execute(3)
        assert batcher.get().lengths.min() > 0
        assert batcher.failures == ()
        return result, failures


def assert_truncated(result: Any, failures: Any, whole: Any, step: int, rows: Any = (2, 7)) -> None:
    """Some rows end with the step that fails, all others are as undisturbed."""
    failed = torch.zeros(N, dtype=torch.bool)
    failed[list(rows)] = True
    assert result.info["failed"].tolist() == failed.tolist()
    lengths = torch.where(failed, max(step, 0) + 1, whole.lengths)
    assert result.lengths.tolist() == lengths.tolist()
    for row in range(N):
        n = int(lengths[row]) - int(failed[row])
        for key in ("frame", "action", "_reward", "_frame"):
            assert torch.equal(result[key][row, :n], whole[key][row, :n]), (row, key)
        if failed[row]:
            assert bool(result["_truncated"][row, n])
            assert bool(result["_done"][row, n])
            assert not bool(result["_terminated"][row, n])
            assert float(result["_reward"][row, n]) == 0.0
            assert torch.equal(result["_frame"][row, n], result["frame"][row, n])
            assert not bool(result["_done"][row, :n].any())
    assert [error.where.row for error in failures] == list(rows)


@functools.cache
def undisturbed(n_threads: int = 2) -> Any:
    return collected(None, infos("none", 0), n_threads)[0]


@pytest.mark.parametrize(
    ("n_threads", "n_timesteps", "step"),
    variants([(0, 16, -1), (0, 2, 1), (2, 16, 0)], itertools.product([0, 2], [16, 2], [-1, 0, 1])),
)
def test_an_episode_whose_environment_raises_is_truncated(
    n_threads: int, n_timesteps: int, step: int, tmp_path: Path
) -> None:
    whole = undisturbed(n_threads)
    env_info = infos("raise", step)
    policy: dict[str, Any] = {"on_env_error": "truncate", "max_restarts": 0}
    result, failures = collected(tmp_path, env_info, n_threads, n_timesteps, **policy)
    assert_truncated(result, failures, whole, step)
    for error in failures:
        assert isinstance(error, EnvError)
        assert len(error.actions) == step + 1
        assert error.where.step == max(step, 0)


@pytest.mark.parametrize(
    ("kind", "on_env_error"),
    variants(
        [("sigkill", "truncate"), ("raise", "restart")],
        [("sigkill", "restart"), ("hang", "restart")],
    ),
)
def test_an_episode_that_fails_twice_is_given_up(
    kind: str, on_env_error: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = undisturbed()
    policy: dict[str, Any] = {"on_env_error": on_env_error, "max_restarts": 3, "timeout": 0.7}
    with caplog.at_level(logging.WARNING):
        result, failures = collected(tmp_path, infos(kind, 1, (3, 4, 8)), **policy)
    assert_truncated(result, failures, whole, 1, (3, 4, 8))
    assert caplog.text.count("the same episode failed 2 times") == 3


class UnluckyEnv(CountingEnv):
    """Its process is killed in each of its first steps once."""

    def __init__(self, marks: str) -> None:
        super().__init__(length=5)
        self.marks = Path(marks)

    def step(self, action: Any) -> Any:
        mark = self.marks / str(self.t)
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def test_an_episode_whose_worker_is_killed_at_another_step_each_time_is_not_lost(
    tmp_path: Path,
) -> None:
    def create(seed: int) -> GymEnv:
        return GymEnv([UnluckyEnv(str(tmp_path))], seed)

    with EpisodeBatcher(8, 8, ConstantAgent, create_env=create, n_workers=1, seeds=5) as batcher:
        batcher.execute(1)
        assert batcher.get().lengths.tolist() == [5]
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("kind", variants(["sigkill"], ["hang"]))
def test_an_episode_that_kills_its_worker_again_is_an_error_of_its_request(
    kind: str, tmp_path: Path
) -> None:
    env_args = {"n_lanes": 2, "marks": str(tmp_path), "times": ALWAYS}
    options: dict[str, Any] = {"timeout": 0.7, "max_restarts": 1}
    error = WorkerDiedError if kind == "sigkill" else WorkerTimeoutError
    with EpisodeBatcher(
        16, 64, RecurrentAgent, {}, create_fragile, env_args, 2, 5, **options
    ) as batcher:
        for _ in range(2):  # more failures than restarts
            batcher.execute(N, env_info=infos(kind, 1, (3,)))
            batcher.execute(5)
            with pytest.raises(error) as caught:
                batcher.get()
            assert caught.value.where.row == 3
            assert caught.value.where.step == 1
            assert batcher.get().lengths.min() > 0


@pytest.mark.parametrize("n_threads", variants([0], [2]))
def test_lanes_of_windows_go_on_after_an_episode_that_was_given_up(
    n_threads: int, tmp_path: Path
) -> None:
    """Every episode of lane 1 raises in its fourth step."""

    def windows(marks: str | None) -> list[Any]:
        env_args = {"n_lanes": 2, "restarts": True, "marks": marks, "times": ALWAYS}
        n_lanes = 2 * max(n_threads, 1)
        fault = torch.zeros(n_lanes, dtype=torch.int64)
        fault[1] = KINDS.index("raise")
        env_info = {"length": torch.arange(5, 5 + n_lanes), "fault": fault, "fault_step": 3}
        results = []
        with Batcher(
            7, None, RecurrentAgent, {}, create_fragile, env_args, n_threads, 5,
            on_env_error="truncate", max_restarts=0,
        ) as batcher:  # fmt: skip
            batcher.reset({"gain": torch.linspace(0.5, 2.0, n_lanes)}, env_info)
            for _ in range(4):
                batcher.execute()
                results.append((batcher.get(), batcher.failures))
        return results

    n_failed = 0
    for (got, failures), (whole, _) in zip(windows(str(tmp_path)), windows(None), strict=True):
        assert got.lengths.tolist() == whole.lengths.tolist()
        for row in range(len(got.lengths)):
            if row != 1:
                for key in ("frame", "action", "_reward", "_frame", "_done"):
                    assert torch.equal(got[key][row], whole[key][row]), (row, key)
        n_failed += int(got["_truncated"][1].sum())
        assert got.info["failed"].tolist() == [row == 1 for row in range(len(got.lengths))]
        assert [error.where.row for error in failures] == [1]
        assert not bool(got["_terminated"][1].any())
    assert n_failed == 7  # an episode is three steps, and the one that fails


def windows_of_failing_resets(n_threads: int, kind: str, marks: str | None) -> list[Any]:
    """Three windows, in which every reset of lane 1 fails."""
    env_args = {"n_lanes": 2, "restarts": True, "marks": marks, "times": ALWAYS}
    info = {"length": 3, "fault": [0, KINDS.index(kind)], "fault_step": -1}
    policy: dict[str, Any] = {"on_env_error": "truncate" if kind == "raise" else "restart"}
    with Batcher(
        *(3, None, RecurrentAgent, {}, create_fragile, env_args, n_threads, 5), **policy
    ) as batcher:
        batcher.reset({"gain": [0.5, 2.0]}, info)
        return [batcher.execute() or batcher.get() for _ in range(3)]


@pytest.mark.parametrize(
    ("n_threads", "kind"), variants([(0, "raise"), (1, "raise")], [(1, "sigkill")])
)
def test_an_episode_whose_reset_fails_behind_a_window_is_truncated_in_the_next(
    n_threads: int, kind: str, tmp_path: Path
) -> None:
    got = windows_of_failing_resets(n_threads, kind, str(tmp_path))
    for window, whole in zip(got, windows_of_failing_resets(0, "none", None), strict=True):
        assert window["_truncated"].tolist() == [[False] * 3, [True] * 3]
        assert window["_reward"][1].tolist() == [0.0] * 3
        for key in ("frame", "action", "_reward", "_frame", "_done"):
            assert torch.equal(window[key][0], whole[key][0]), key


class LateEnv(FragileEnv):
    """The first reset of a process raises."""

    n_failures = 0

    def reset(self, **options: Any) -> Any:
        if LateEnv.n_failures < 1:
            LateEnv.n_failures += 1
            raise OSError("not yet")
        return super().reset(**options)


@pytest.mark.parametrize(
    ("on_env_error", "n_workers"),
    variants([("raise", 0), ("truncate", 2)], [("raise", 2), ("truncate", 0), ("restart", 2)]),
)
def test_a_batcher_starts_although_the_first_reset_fails(on_env_error: str, n_workers: int) -> None:
    LateEnv.n_failures = 0
    env_args = {"kind": LateEnv, "n_lanes": 2}
    options: dict[str, Any] = {"n_workers": n_workers, "seed": 5, "on_env_error": on_env_error}
    with EpisodeBatcher(16, 8, RecurrentAgent, {}, create_fragile, env_args, **options) as batcher:
        batcher.execute(4)
        assert batcher.get().lengths.min() > 0
        assert batcher.failures == ()


class LicensedEnv(FragileEnv):
    """Its second step raises once its licence is gone."""

    def __init__(self, licence: str) -> None:
        super().__init__()
        self._licence = Path(licence)

    def step(self, action: Any) -> Any:
        if self.t == 1 and not self._licence.exists():
            raise OSError("no licence")
        return super().step(action)


@pytest.mark.parametrize("on_env_error", variants(["truncate"], ["restart"]))
def test_an_episode_that_fails_in_what_it_has_done_before_ends_its_window(
    on_env_error: str, tmp_path: Path
) -> None:
    """Its worker was killed between two windows, and the successor cannot repeat the first."""
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


def lived(envs_per_worker: int, kind: str, on_env_error: str, step: int, marks: str | None) -> Any:
    """What the lanes of a manager show in three episodes each, of which one fails."""
    make = partial(FragileEnv, marks, ALWAYS)
    options: dict[str, Any] = {"on_env_error": on_env_error, "max_restarts": 1}
    rows = []
    with ParallelEnvManager(
        [make] * 3, seed=1, envs_per_worker=envs_per_worker, **options
    ) as manager:
        for first in (0, 3, 6):
            seeds = [first, first + 1, first + 2]
            fails = [failing(kind, step) if seed == 4 else {} for seed in seeds]
            manager.reset_lanes([0, 1, 2], seeds, [{"length": 5, **one} for one in fails])
            for t in range(5):
                live = [n for n in (0, 1, 2) if not manager.current["done"][n]]
                ended = manager.step_lanes(live, {"action": np.array([t, 2, 3])})
                current = {key: array.copy() for key, array in manager.current.items()}
                rows.append((ended, current))
                if first == 3 and ended == [1]:
                    assert manager.failures[1].where.step == max(step, 0)
        assert not manager.failures
    return rows


RAISES, DIES = ("raise", "truncate"), ("sigkill", "restart")


@pytest.mark.parametrize(
    ("envs_per_worker", "fault", "step"),
    variants(
        [(1, RAISES, -1), (3, DIES, 2)],
        itertools.product([1, 3], [RAISES, DIES], [-1, 0, 2]),
    ),
)
def test_a_manager_truncates_lanes_that_fail(
    envs_per_worker: int, fault: tuple[str, str], step: int, tmp_path: Path
) -> None:
    """Seed 4 fails each time, all other lanes and episodes are as undisturbed."""
    marked, unmarked = (
        lived(envs_per_worker, *fault, step, marks) for marks in (str(tmp_path), None)
    )
    n_failed = 0
    for number, (mine, theirs) in enumerate(zip(marked, unmarked, strict=True)):
        ended, current = mine
        is_failed = 5 <= number < 10
        for key, values in theirs[1].items():
            for lane in (0, 1, 2):
                if not (is_failed and lane == 1):
                    assert np.array_equal(current[key][lane], values[lane]), (number, key, lane)
        if is_failed and 1 in ended:
            n_failed += 1
            assert number - 5 == max(step, 0)
            assert current["truncated"][1]
            assert not current["terminated"][1]
            assert current["reward"][1] == 0.0
    assert n_failed == 1


@pytest.mark.parametrize("kind", variants(["sigkill"], ["hang"]))
def test_a_manager_reports_a_lane_that_kills_its_worker_again(kind: str, tmp_path: Path) -> None:
    make = partial(FragileEnv, str(tmp_path), ALWAYS)
    error = WorkerDiedError if kind == "sigkill" else WorkerTimeoutError
    with ParallelEnvManager([make] * 2, seed=1, max_restarts=1, timeout=0.7) as manager:
        for _ in range(2):
            manager.reset_lanes([0, 1], [1, 2], [{"length": 5, **failing(kind, 1)}, {"length": 5}])
            actions = {"action": np.array([1, 2])}
            manager.step_lanes([0, 1], actions)
            with pytest.raises(error) as caught:
                manager.step_lanes([0, 1], actions)
            assert (caught.value.where.lane, caught.value.where.step) == (0, 1)


def test_a_truncated_episode_is_not_repeated_for_the_sake_of_other_lanes(tmp_path: Path) -> None:
    make = partial(FragileEnv, str(tmp_path), ALWAYS)
    options: dict[str, Any] = {"on_env_error": "restart", "max_restarts": 1}
    actions = {"action": np.array([1, 2])}
    with ParallelEnvManager([make] * 2, envs_per_worker=2, **options) as manager:
        manager.reset_lanes([0, 1], [1, 2], [{}, failing("sigkill", 0)])
        assert manager.step_lanes([0, 1], actions) == [1]
        os.kill(manager.workers[0].pid or 0, signal.SIGKILL)
        assert manager.step_lanes([0], actions) == []
        assert list(manager.failures) == [1]


@pytest.mark.parametrize("n_threads", variants([0], [2]))
def test_an_evaluation_tells_which_episodes_failed(n_threads: int, tmp_path: Path) -> None:
    env_args = {"n_lanes": 2, "marks": str(tmp_path), "times": ALWAYS}
    how: dict[str, Any] = {"env_args": env_args, "n_workers": n_threads}
    how["env_info"] = infos("raise", 1, (3, 8))
    found = evaluate(RecurrentAgent(), create_fragile, N, on_env_error="truncate", **how)
    assert found.failed is not None
    assert found.failed.nonzero().flatten().tolist() == [3, 8]
    assert found.lengths[[3, 8]].tolist() == [2, 2]
    assert [error.where.episode for error in found.failures] == [3, 8]
    with pytest.raises(EnvError):
        evaluate(RecurrentAgent(), create_fragile, N, **how)
    assert evaluate(RecurrentAgent(), create_fragile, 2, env_args={"n_lanes": 2}).failed is None


def create_managed(seed: int, n_lanes: int, **arguments: Any) -> ParallelEnvManager:
    functions = [partial(FragileEnv, **arguments)] * n_lanes
    return ParallelEnvManager(functions, seed=seed, envs_per_worker=2, on_env_error="truncate")


@pytest.mark.parametrize(("kind", "error"), [("raise", EnvError), ("sigkill", WorkerDiedError)])
def test_a_batcher_decides_what_becomes_of_failures_in_a_manager(
    kind: str, error: type[Exception], tmp_path: Path
) -> None:
    truncates = {"create_env": create_managed, "on_env_error": "truncate"}
    for step in (-1, 1):
        found = collected(tmp_path, infos(kind, step), n_threads=0, **truncates)
        assert_truncated(*found, undisturbed(0), step)
        assert all(isinstance(failure, error) for failure in found[1])
    with pytest.raises(error, match=r"row 2, episode 2, step 1"):
        collected(tmp_path, infos(kind, 1), n_threads=0, create_env=create_managed)


def test_a_manager_whose_lanes_restart_tells_why_an_episode_ended_until_the_next_step(
    tmp_path: Path,
) -> None:
    make_env = partial(FragileEnv, marks=str(tmp_path), times=ALWAYS)
    options: dict[str, Any] = {"auto_reset": True, "on_env_error": "truncate"}
    with ParallelEnvManager([make_env], **options) as manager:
        manager.reset({"fault": KINDS.index("raise"), "fault_step": 1, "length": 9})
        zeros = DictTensor({"action": torch.zeros(1, dtype=torch.int64)})
        told = []
        for _ in range(3):
            (stepped, _), _ = manager.step(zeros)
            told.append((bool(stepped["truncated"]), list(manager.failures)))
        assert told == [(False, []), (True, [0]), (False, [])]


def test_a_death_in_a_window_tells_the_seed_of_its_episode(tmp_path: Path) -> None:
    """Every episode kills its worker in its third step, twice."""
    env_args = {"n_lanes": 1, "restarts": True, "marks": str(tmp_path), "times": ALWAYS}
    seeds = []
    with Batcher(
        4, None, RecurrentAgent, {}, create_fragile, env_args, 1, 5, on_env_error="restart"
    ) as batcher:
        batcher.reset(None, {"length": 9, "fault": KINDS.index("sigkill"), "fault_step": 2})
        for _ in range(3):
            batcher.execute()
            first = int(batcher.get().info["seed"])
            seeds += [error.where.seed for error in batcher.failures]
    assert seeds[0] == first
    assert None not in seeds
    assert len(set(seeds)) == len(seeds) == 3
