"""An environment that starts threads and processes, and computes on several cores."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

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


def numpy_on_all_cores() -> list[Any]:
    matrix = _matrix(700)
    return [_digest(matrix @ matrix), _digest(np.linalg.inv(matrix)), _n_threads()]


def in_a_thread() -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_digest(_matrix(300) @ _matrix(300))))
    thread.start()
    thread.join()
    return found[0]


def in_a_pool_of_threads() -> list[int]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda n: sum(range(n)), range(5)))


def with_openmp() -> list[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        matrix = torch.from_numpy(_matrix(600)).float()
        found = matrix @ matrix, matrix.exp().sum(0), matrix.std(), matrix.sort(0).values
        return [*(_digest(tensor.numpy()) for tensor in found), torch.get_num_threads()]
    finally:
        torch.set_num_threads(before)


def with_backends() -> list[str]:
    image = torch.from_numpy(_matrix(64)).float().expand(4, 3, -1, -1)
    kernel = torch.from_numpy(_matrix(12)).float().reshape(4, 3, 12, 1)
    found = [_digest(torch.conv2d(image, kernel).numpy())]
    with torch.backends.mkldnn.flags(enabled=False):
        found.append(_digest(torch.conv2d(image, kernel).numpy()))
    return [*found, torch.backends.cpu.get_cpu_capability()]


def with_a_process_of_torch() -> list[Any]:
    shared = torch.zeros(5).share_memory_()
    process = torch.multiprocessing.get_context("fork").Process(target=shared.add_, args=(2,))
    process.start()
    process.join()
    return [process.exitcode, shared.tolist()]


def with_a_data_loader() -> list[list[int]]:
    loader = DataLoader(range(6), batch_size=3, num_workers=1, multiprocessing_context="fork")
    return [batch.tolist() for batch in loader]


def with_a_program() -> list[Any]:
    done = subprocess.run(["sh", "-c", "ulimit -n; echo $0; exit 3"], capture_output=True)
    return [done.returncode, done.stdout.decode()]


def with_a_fork() -> int:
    if not (pid := os.fork()):
        os._exit(7 if _digest(_matrix(200) @ _matrix(200)) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def with_a_loop_of_events() -> list[int]:
    async def later(value: int) -> int:
        return await asyncio.to_thread(lambda: value + 1)

    async def both() -> list[int]:
        return list(await asyncio.gather(later(1), later(2)))

    return asyncio.run(both())


def _n_threads() -> int:
    return len(os.listdir("/proc/self/task"))


USES: tuple[Callable[[], Any], ...] = (
    numpy_on_all_cores,
    in_a_thread,
    in_a_pool_of_threads,
    with_openmp,
    with_backends,
    with_a_process_of_torch,
    with_a_data_loader,
    with_a_program,
    with_a_fork,
    with_a_loop_of_events,
)
