"""An environment that starts threads and processes, and computes on several cores."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from rlpool import GymEnv

from support.envs import CountingEnv


class BusyEnv(CountingEnv):
    """Does all of it in its first step, and writes down what came out.

    Args:
        path: Where.
    """

    def __init__(self, path: str) -> None:
        super().__init__(length=1)
        self.path = path

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        found = {use.__name__: use() for use in USES}
        Path(self.path).write_text(json.dumps(found))
        return super().step(action)


def make(path: str, seed: int | None = None) -> GymEnv:
    return GymEnv([BusyEnv(path)], seed=seed)


def _digest(value: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def _matrix(n: int) -> Any:
    return np.random.default_rng(0).standard_normal((n, n))


def from_all_generators() -> list[float]:
    return [random.random(), np.random.random(), torch.rand(()).item()]  # noqa: NPY002


def numpy_on_all_cores() -> list[Any]:
    matrix = _matrix(700)
    return [_digest(matrix @ matrix), len(os.listdir("/proc/self/task"))]


def in_a_pool_of_threads() -> list[str]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda n: _digest(_matrix(n) @ _matrix(n)), (100, 300)))


def with_openmp() -> list[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        matrix = torch.from_numpy(_matrix(600)).float()
        found = matrix @ matrix, matrix.exp().sum(0), matrix.sort(0).values
        return [*(_digest(tensor.numpy()) for tensor in found), torch.get_num_threads()]
    finally:
        torch.set_num_threads(before)


def with_a_process_of_torch() -> list[Any]:
    shared = torch.zeros(5).share_memory_()
    process = torch.multiprocessing.get_context("fork").Process(target=shared.add_, args=(2,))
    process.start()
    process.join()
    return [process.exitcode, shared.tolist()]


def with_a_fork() -> int:
    if not (pid := os.fork()):
        os._exit(7 if _digest(_matrix(200) @ _matrix(200)) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


USES: tuple[Callable[[], Any], ...] = (
    from_all_generators,
    numpy_on_all_cores,
    in_a_pool_of_threads,
    with_openmp,
    with_a_process_of_torch,
    with_a_fork,
)
