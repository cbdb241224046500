"""Vector environments whose lanes are reset together, in workers that fail.

``property/test_against_loops`` covers lanes that are reset one by one.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from process.watching import assert_all_equal

from rlpool import (
    Batcher,
    EpisodeBatcher,
    VectorGymEnv,
    WorkerDiedError,
)

from support.faults import strike
from support.fragile import RecurrentAgent
from support.variants import variants
from support.vector_envs import ArrayEnv

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I2"),
]


class Struck(ArrayEnv):
    """Environment that restarts by itself and fails once, in its ``n_left``-th step in a worker.

    Args:
        mark: File that records the failure.
        kind: Kind of failure.
        n_left: Step since its creation at which it fails.
        **arguments: Arguments of ``ArrayEnv``.
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


def share(n_slots: int = 60, struck: Any = None, **options: Any) -> list[Any]:
    """Return the results of three requests to two workers, two of them concurrent."""
    with EpisodeBatcher(
        4, n_slots, RecurrentAgent, {}, create_struck, struck or {}, 2, 5, **options
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
    variants([(6, "sigkill", 30), (60, "raise", 12)], [(60, "os_exit", 1), (60, "hang", 12)]),
)
def test_the_share_of_a_dead_worker_is_rerun_bit_for_bit(
    tmp_path: Path, n_slots: int, kind: str, n_left: int
) -> None:
    options = {"on_env_error": "restart", "timeout": 1.0 if kind == "hang" else 60.0}
    struck = {"mark": str(tmp_path / "mark"), "kind": kind, "n_left": n_left}
    assert_all_equal(share(n_slots, struck, **options), share())
    assert (tmp_path / "mark").exists()


def test_a_worker_finishes_its_share_before_it_is_recycled() -> None:
    assert_all_equal(share(max_episodes_per_worker=5), share())


def windows(**struck: Any) -> list[Any]:
    """Return two windows of two workers after each of two resets."""
    with Batcher(
        4,
        create_agent=RecurrentAgent,
        create_env=create_struck,
        env_args=struck,
        n_workers=2,
        seeds=5,
    ) as batcher:
        found = []
        for _ in range(2):
            batcher.reset()
            for _ in range(2):
                batcher.execute()
            found += [batcher.get() for _ in range(2)]
        return found


def test_only_the_first_window_of_lanes_reset_together_survives_a_death(tmp_path: Path) -> None:
    first, later = ({"mark": str(tmp_path / name), "kind": "sigkill"} for name in ("a", "b"))
    assert_all_equal(windows(**first, n_left=3), windows())
    assert Path(first["mark"]).exists()
    with pytest.raises(WorkerDiedError):
        windows(**later, n_left=6)
