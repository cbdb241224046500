"""Vector environments in workers: the same bits for any number of them, and after any death."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from process.watching import assert_all_equal, assert_equal

from rlpool import (
    EnvError,
    EpisodeBatcher,
    VectorGymEnv,
    WorkerDiedError,
)

from support.faults import faults, strike
from support.fragile import RecurrentAgent
from support.variants import variants
from support.vector_envs import ArrayEnv, create_lanes, windows

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I2"),
]

Hits = dict[int, tuple[str, int]]


def collect(
    n_threads: int,
    env_args: Any,
    hits: Hits | None = None,
    n_timesteps: int = 16,
    n_slots: int = 30,
    **options: Any,
) -> list[Any]:
    """Two requests, with hits in the first one."""
    with EpisodeBatcher(
        n_timesteps, n_slots, RecurrentAgent, {}, create_lanes, env_args, n_threads, 5, **options
    ) as batcher:
        infos = faults(23, hits or {}, length=1 + torch.arange(23) % 13)
        batcher.execute(23, {"gain": torch.linspace(0.5, 2.0, 23)}, infos)
        batcher.execute(7)
        return [batcher.get() for _ in range(2)]


@pytest.mark.promise("I3")
@pytest.mark.parametrize(
    ("over", "row", "step", "kind"),
    variants(
        [("own", 4, 2, "sigkill"), ("own", 7, 3, "raise")],
        [("own", 5, -1, "os_exit"), ("raw", 12, 1, "segfault"), ("own", 9, -1, "hang")],
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


@pytest.mark.promise("I3")
@pytest.mark.parametrize("restarts", variants([True], [False]))
def test_windows_have_the_bits_of_a_gym_env_after_deaths(tmp_path: Path, restarts: bool) -> None:
    hits = {1: ("sigkill", 18), 4: ("sigkill", 10)}
    options = {"n_threads": 2, "env_info": faults(6, hits, length=[30, 20, 11, 9, 25, 30])}
    run = partial(windows, create_lanes, [4], **options, restarts=restarts)
    assert_all_equal(run(over="own", marks=str(tmp_path)), run(over="gym", marks=None))
    assert len(list(tmp_path.iterdir())) == len(hits)


# Lanes that are reset together, or not at all ------------------------------------------------


class Struck(ArrayEnv):
    """Restarts by itself, and fails once in its ``n_left``-th step in a worker.

    Args:
        mark: A file that tells that it has failed.
        kind: How.
        n_left: In which step since its creation.
        **arguments: Of ``ArrayEnv``.
    """

    def __init__(self, mark: str, kind: str, n_left: int, **arguments: Any) -> None:
        super().__init__(3, AutoresetMode.NEXT_STEP, **arguments)
        self._mark, self._kind, self._n_left = Path(mark), kind, n_left

    def step(self, actions: Any) -> Any:
        self._n_left -= 1
        if not self._n_left:
            with suppress(FileExistsError):
                self._mark.touch(exist_ok=False)
                strike(self._kind)
        return super().step(actions)


def create_struck(
    seed: int, mark: str = "/dev/null", kind: str = "none", n_left: int = 0
) -> VectorGymEnv:
    return VectorGymEnv(Struck(mark, kind, n_left, seeds="all"), seed, seeding="request")


def share(
    n_threads: int,
    n_slots: int = 60,
    **options: Any,
) -> list[Any]:
    """Results of three requests, two of which are made at the same time."""
    struck = {key: options.pop(key) for key in ("mark", "kind", "n_left") if key in options}
    with EpisodeBatcher(
        4, n_slots, RecurrentAgent, {}, create_struck, struck, n_threads, 5, **options
    ) as batcher:
        results = []
        for requests in ((31, 20), (7,)):
            for n_episodes in requests:
                batcher.execute(n_episodes, {"gain": torch.linspace(0.5, 2.0, n_episodes)})
            results += [batcher.get() for _ in requests]
        return results


@pytest.mark.promise("I3")
@pytest.mark.parametrize(
    ("n_slots", "kind", "n_left"),
    variants(
        [(6, "sigkill", 30), (60, "raise", 12)],
        [
            *((60, "sigkill", 12), (60, "sigkill", 45), (60, "os_exit", 1)),
            *((8, "raise", 40), (60, "hang", 12)),
        ],
    ),
)
def test_the_share_of_a_dead_worker_is_run_again_with_the_same_bits(
    tmp_path: Path, n_slots: int, kind: str, n_left: int
) -> None:
    options = {"on_env_error": "restart", "timeout": 1.0 if kind == "hang" else 60.0}
    options |= {"mark": str(tmp_path / "mark"), "kind": kind, "n_left": n_left}
    assert_all_equal(share(2, n_slots=n_slots, **options), share(2))
    assert (tmp_path / "mark").exists()


def test_a_worker_that_is_replaced_for_its_age_runs_its_share_before() -> None:
    assert_all_equal(share(2, max_episodes_per_worker=5), share(2))


@pytest.mark.parametrize("n_threads", variants([2], [0]))
def test_a_request_has_the_same_bits_after_one_that_failed(tmp_path: Path, n_threads: int) -> None:
    env_args = {"mark": str(tmp_path / "mark"), "kind": "raise", "n_left": 12}
    with EpisodeBatcher(
        4, 60, RecurrentAgent, {}, create_struck, env_args, n_threads, 5
    ) as batcher:
        for n_episodes in (31, 20):
            batcher.execute(n_episodes, {"gain": torch.linspace(0.5, 2.0, n_episodes)})
        with pytest.raises(EnvError, match="struck") as caught:
            batcher.get()
        assert caught.value.actions is None
        assert_equal(batcher.get(), share(n_threads)[1])


def test_windows_of_lanes_reset_together(tmp_path: Path) -> None:
    run = partial(windows, create_struck, [2, 2], 4)
    assert_all_equal(run(n_threads=1), run(n_threads=0))
    in_the_first = {"mark": str(tmp_path / "mark"), "kind": "sigkill", "n_left": 3}
    assert_all_equal(run(n_threads=2, **in_the_first), run(n_threads=2))
    assert (tmp_path / "mark").exists()
    with pytest.raises(WorkerDiedError):
        run(n_threads=2, mark=str(tmp_path / "other"), kind="sigkill", n_left=6)
