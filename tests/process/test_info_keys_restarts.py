"""Keys of infos are the same bits after a worker's death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from process.watching import assert_equal

from rlpool import Batcher, ParallelEnvManager

from support.agents import BinaryAgent
from support.faults import FailingEnv
from support.telling import CountedInfos, create_counted

pytestmark = [pytest.mark.timeout(120), pytest.mark.promise("I2")]


def create_counted_manager(seed: int, once: str, kind: str) -> ParallelEnvManager:
    def make() -> Any:
        return CountedInfos(FailingEnv(kind, at_step=4, once=once, length=9))

    return ParallelEnvManager([make] * 2, seed=seed, auto_reset=True, info_keys={"t": int})


@pytest.mark.parametrize(
    ("create", "n_threads"), [(create_counted, 1), (create_counted_manager, 0)]
)
def test_infos_are_the_same_after_a_workers_death(
    create: Any, n_threads: int, tmp_path: Path
) -> None:
    results = []
    for kind in ("sigkill", "none"):
        env_args = {"once": str(tmp_path / kind), "kind": kind}
        with Batcher(
            6,
            create_agent=BinaryAgent,
            agent_args={},
            create_env=create,
            env_args=env_args,
            n_threads=n_threads,
            seeds=1,
        ) as batcher:
            batcher.reset()
            windows = []
            for _ in range(3):
                batcher.execute()
                windows.append(batcher.get())
        results.append(windows)
    for one, other in zip(*results, strict=True):
        assert_equal(one, other)
        assert one is not None
        assert torch.equal(one["_t"], one["t"] + 1)
    assert (tmp_path / "sigkill").exists()
