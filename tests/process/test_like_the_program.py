"""Workers resemble the program: torch settings, start method, files flushed at the end."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from process.watching import worker_pids

from rlpool import DictTensor, EpisodeBatcher, GymEnv, ParallelEnvManager, WorkerDiedError
from rlpool.workers import crew

from support.agents import ConstantAgent
from support.envs import CountingEnv
from support.variants import variants

pytestmark = [pytest.mark.timeout(120), pytest.mark.promise("I2")]

LENGTH = 3  # of an episode


def create_env(seed: int, kind: Any, **arguments: Any) -> GymEnv:
    return GymEnv([kind(**arguments)], seed)


def open_batcher(
    kind: Any, n_workers: int = 1, env_args: Any = (), **options: Any
) -> EpisodeBatcher:
    env_args = {"kind": kind, **dict(env_args)}
    return EpisodeBatcher(4, 4, ConstantAgent, {}, create_env, env_args, n_workers, 1, **options)


# Settings of torch ----------------------------------------------------------------------------


def settings() -> list[int]:
    precision = ["highest", "high", "medium"].index(torch.get_float32_matmul_precision())
    is_double = torch.get_default_dtype() is torch.float64
    return [is_double, torch.get_deterministic_debug_mode(), precision, torch.empty(0).is_meta]


def use(dtype: torch.dtype, mode: int, precision: str, device: str | None) -> None:
    torch.set_default_dtype(dtype)
    torch.set_deterministic_debug_mode(mode)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_device(device)


DEFAULTS = (torch.float32, 0, "highest", None)
OTHERS = (torch.float64, 1, "medium", "meta")
IN_WORKERS = [1, 1, 2, 0]


class LookingEnv(CountingEnv):
    observation_space = spaces.Box(0, 2, (4,), np.int64)

    def observation(self) -> Any:
        return np.array(settings())


@pytest.fixture
def other_settings() -> Iterator[None]:
    use(*OTHERS)
    yield
    use(*DEFAULTS)


@pytest.mark.usefixtures("other_settings")
@pytest.mark.parametrize(
    ("n_workers", "start_method"), variants([(0, "auto"), (1, "auto")], [(1, "spawn")])
)
def test_torch_settings_apply_in_workers_and_results_are_on_the_cpu(
    n_workers: int, start_method: str
) -> None:
    options = {"start_method": start_method, "on_env_error": "truncate"}
    with open_batcher(LookingEnv, n_workers, **options) as batcher:
        use(*DEFAULTS)  # existing workers and their successors keep theirs
        for _ in range(2):
            batcher.execute(2)
            result = batcher.get()
            assert result["frame"].tolist() == [[IN_WORKERS] * LENGTH] * 2
            for pid in worker_pids():
                os.kill(pid, signal.SIGKILL)
        assert settings() == [0, 0, 0, 0]
        use(*OTHERS)
        batcher.execute(2, env_info={"x": [1.5, 2.5]})
        result = batcher.get()
        assert result.info["env_info/x"].dtype is torch.float64
        tensors = [*result.values(), *result.info.values(), result.lengths]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        assert settings() == [1, 1, 2, 1]


# Files that are left open ---------------------------------------------------------------------


class WritingEnv(CountingEnv):
    """Writes a line per step to a file that is never closed and is held by a reference cycle."""

    def __init__(self, directory: str) -> None:
        super().__init__(LENGTH)
        self.kept = open(f"{directory}/{os.getpid()}-{id(self)}", "w")  # noqa: SIM115
        self.me = self

    def step(self, action: Any) -> Any:
        self.kept.write("step\n")
        return super().step(action)


@pytest.mark.parametrize("start_method", variants(["auto"], ["spawn"]))
def test_files_that_environments_leave_open_are_written(tmp_path: Path, start_method: str) -> None:
    options = {"max_episodes_per_worker": 2, "start_method": start_method}
    with open_batcher(WritingEnv, 1, {"directory": str(tmp_path)}, **options) as batcher:
        batcher.execute(3)
        batcher.get()
    make = partial(WritingEnv, str(tmp_path))
    with ParallelEnvManager([make], seed=1, start_method=start_method) as manager:
        manager.reset()
        manager.step(DictTensor({"action": torch.zeros(1, dtype=torch.int64)}))
    written = [path.read_text().count("step\n") for path in tmp_path.iterdir()]
    assert sum(written) == 3 * LENGTH + 1


# Processes of environments --------------------------------------------------------------------

METHODS = ["fork", "spawn", "forkserver"]


class StartingEnv(CountingEnv):
    """Observes the start method of its process."""

    def observation(self) -> Any:
        return np.array([METHODS.index(multiprocessing.get_start_method())] * 2, np.float32)


@pytest.mark.parametrize(
    ("method", "start_method"),
    variants([("spawn", "auto")], [("fork", "spawn"), ("forkserver", "auto")]),
)
def test_environments_start_processes_with_the_programs_start_method(
    method: str, start_method: str
) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        with open_batcher(StartingEnv, start_method=start_method) as batcher:
            batcher.execute(1)
            assert batcher.get()["frame"][0, 0].tolist() == [METHODS.index(method)] * 2
    finally:
        multiprocessing.set_start_method(before, force=True)


# Deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_killed", [0, 1])
def test_a_kill_by_the_kernel_is_reported_as_out_of_memory(
    n_killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = itertools.count(5, n_killed)
    monkeypatch.setattr(crew, "n_oom_kills", lambda: next(counts))
    # As daemons do.
    closing = partial(CountingEnv, script={0: partial(os.closerange, 3, 256)})
    with open_batcher(closing, on_worker_failure="raise") as batcher:
        batcher.execute(1)
        with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
            batcher.get()
    assert ("out of memory" in str(caught.value)) == bool(n_killed)
    assert ("descriptors" in str(caught.value)) != bool(n_killed)
