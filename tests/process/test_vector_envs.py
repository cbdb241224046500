"""Vector environments in workers: the same bits for any number of them, and after any death."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import assert_equal

from rlpool import (
    Batcher,
    EnvError,
    EpisodeBatcher,
    TemporalDictTensor,
    WorkerDiedError,
    replay_crash,
)

from support.faults import faults
from support.fragile import RecurrentAgent
from support.variants import variants
from support.vector_envs import create_lanes

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I2"),
]

Hits = dict[int, tuple[str, int]]


def collect(n_threads: int, env_args: Any, hits: Hits | None = None, **options: Any) -> list[Any]:
    """Two requests, with hits in the first one."""
    with EpisodeBatcher(
        16, 30, RecurrentAgent, {}, create_lanes, env_args, n_threads, 5, **options
    ) as batcher:
        infos = faults(23, hits or {}, length=1 + torch.arange(23) % 13)
        batcher.execute(23, {"gain": torch.linspace(0.5, 2.0, 23)}, infos)
        batcher.execute(7)
        return [batcher.get() for _ in range(2)]


serial = cache(lambda: collect(0, {"over": "gym"}))


def assert_all_equal(mine: list[TemporalDictTensor], theirs: list[TemporalDictTensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize(
    ("n_threads", "over", "mode", "start_method"),
    variants(
        [(2, "sync", "NextStep", "auto"), (2, "async", "NextStep", "auto")],
        [
            (1, "raw", "SameStep", "spawn"),
            (3, "async", "SameStep", "spawn"),
            (2, "array", "Disabled", "auto"),
        ],
    ),
)
def test_any_number_of_workers_gives_the_bits_of_a_gym_env(
    n_threads: int, over: str, mode: str, start_method: str
) -> None:
    env_args = {"over": over, "mode": mode}
    assert_all_equal(collect(n_threads, env_args, start_method=start_method), serial())


@pytest.mark.promise("I3")
@pytest.mark.parametrize(
    ("over", "row", "step", "kind"),
    variants(
        [("sync", 4, 2, "sigkill"), ("async", 7, 3, "sigkill"), ("async", 7, 3, "raise")],
        [("sync", 5, -1, "os_exit"), ("raw", 12, 1, "segfault"), ("async", 9, -1, "hang")],
    ),
)
def test_episodes_of_a_dead_worker_are_run_again_with_the_same_bits(
    tmp_path: Path, over: str, row: int, step: int, kind: str
) -> None:
    env_args = {"over": over, "marks": str(tmp_path)}
    options = {"on_env_error": "restart", "timeout": 1.0 if kind == "hang" else 60.0}
    hits = {row: (kind, step)}
    undisturbed = collect(0, {"over": "gym"}, hits)
    assert_all_equal(collect(2, env_args, hits, **options), undisturbed)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("over", ["sync", "async"])
def test_the_lane_that_dies_is_named(tmp_path: Path, over: str) -> None:
    env_args = {"over": over, "marks": str(tmp_path), "times": 9}
    kind = WorkerDiedError if over == "sync" else EnvError
    with pytest.raises(kind) as caught:
        collect(1, env_args, {4: ("os_exit", 2)}, on_worker_failure="raise")
    where = caught.value.where
    assert (where.lane, where.episode, where.step) == (1, 4, 2)


def test_a_crash_in_a_worker_is_repeated_here(tmp_path: Path) -> None:
    env_args = {"over": "async", "marks": str(tmp_path), "times": 9}
    with pytest.raises(EnvError, match="struck") as caught:
        collect(2, env_args, {5: ("raise", 3)})
    assert "in _fail" in caught.value.traceback_text
    with pytest.raises(KeyError, match="struck"):
        replay_crash(caught.value, create_lanes, env_args)


def test_windows_have_the_bits_of_a_gym_env() -> None:
    def windows(n_threads: int, over: str) -> list[Any]:
        options = {"create_agent": RecurrentAgent, "create_env": create_lanes, "seeds": 5}
        options["env_args"] = {"over": over, "restarts": True}
        with Batcher(8, n_threads=n_threads, **options) as batcher:
            batcher.reset()
            found = []
            for _ in range(3):
                batcher.execute()
                found.append(batcher.get())
        return found

    assert_all_equal(windows(2, "async"), windows(2, "gym"))
