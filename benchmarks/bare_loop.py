"""The bare loop: the throughput of the same processes if they do not store or send data.

One spawned process per worker of the batcher, each with its own environments and its own copy of
the policy. A step calls the policy on the batch under ``torch.inference_mode``, steps every
environment, resets those that ended, and writes the observations to the input buffer of the policy.
Rewards are dropped.

Vector environments take the batch of actions, restart their lanes by themselves, unseeded, and pass
their observation to the policy. The steps in which lanes restart are not counted, since they are
not part of an episode.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from workloads import SEED, Workload, seeded_policy

_START_S = 120.0
_END_S = 5.0


class Lanes:
    """The environments and the policy of one process.

    Args:
        workload: The workload.
    """

    def __init__(self, workload: Workload) -> None:
        self.envs = [workload.make_env() for _ in range(workload.n_lanes)]
        self.policy = seeded_policy(workload.make_policy)
        space = self.envs[0].observation_space
        if space.shape is None or space.dtype is None:
            raise ValueError(f"the bare loop has no buffer for observations of {space}")
        # Like rlpool: float64 becomes float32, other dtypes are kept.
        dtype = np.dtype(np.float32) if space.dtype == np.float64 else space.dtype
        self._batch = np.zeros((len(self.envs), *space.shape), dtype)
        self._noise = torch.zeros(len(self.envs), self.policy.n_noise)
        for row, env in zip(self._batch, self.envs, strict=True):
            row[...] = env.reset()[0]

    def run(self, seconds: float) -> tuple[int, float]:
        """Step for at least this long.

        Returns:
            Number of environment steps, and the seconds they took.
        """
        frame, noise, policy = torch.from_numpy(self._batch), self._noise, self.policy
        lanes = [
            (env.step, env.reset, row) for env, row in zip(self.envs, self._batch, strict=True)
        ]
        n_batches = 0
        clock = time.perf_counter
        with torch.inference_mode():
            start = clock()
            end = start + seconds
            while clock() < end:
                torch.rand(noise.shape, out=noise)
                action = policy(frame, noise)["action"].numpy()
                # Scalars as Python numbers, which environments handle fastest; vectors as views.
                actions = action.tolist() if action.ndim == 1 else action
                n_batches += 1
                for (step, reset, row), action in zip(lanes, actions, strict=True):
                    observation, _, terminated, truncated, _ = step(action)
                    if terminated or truncated:
                        observation, _ = reset()
                    row[...] = observation
            return n_batches * len(lanes), clock() - start

    def close(self) -> None:
        """Close the environments."""
        for env in self.envs:
            env.close()


class VectorLanes:
    """The vector environment and the policy of one process.

    Args:
        workload: The workload.
    """

    def __init__(self, workload: Workload) -> None:
        if workload.make_vector_env is None:
            raise ValueError(f"{workload.name} has no vector environment")
        self.env = workload.make_vector_env(workload.n_lanes, SEED)
        self.policy = seeded_policy(workload.make_policy)
        self._noise = torch.zeros(workload.n_lanes, self.policy.n_noise)
        self._observation = self.env.reset()[0]
        self._dtype = self.env.action_space.dtype

    def run(self, seconds: float) -> tuple[int, float]:
        """Step for at least this long, like ``Lanes.run``."""
        observation, noise, policy, step = (
            self._observation,
            self._noise,
            self.policy,
            self.env.step,
        )
        n_batches = n_ended = 0
        clock = time.perf_counter
        with torch.inference_mode():
            start = clock()
            end = start + seconds
            while clock() < end:
                torch.rand(noise.shape, out=noise)
                action = policy(torch.from_numpy(observation), noise)["action"].numpy()
                observation, _, terminated, truncated, _ = step(
                    action.astype(self._dtype, copy=False)
                )
                n_batches += 1
                n_ended += np.count_nonzero(terminated | truncated)
            elapsed_s = clock() - start
        self._observation = observation
        return n_batches * len(noise) - n_ended, elapsed_s  # without the steps of restarts

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class BareLoop:
    """The processes of the bare loop; blocked in a read outside of windows.

    Args:
        workload: The workload.
    """

    def __init__(self, workload: Workload) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for _ in range(workload.n_workers):
                here, there = context.Pipe()
                self._pipes.append(here)
                process = context.Process(target=_serve, args=(workload, there), daemon=True)
                process.start()
                self._processes.append(process)
                there.close()
            for pipe in self._pipes:
                if not pipe.poll(_START_S):
                    raise TimeoutError(f"the bare loop was not ready after {_START_S:g} s")
                pipe.recv()
        except BaseException:
            self.close()
            raise

    def window(self, seconds: float) -> float:
        """Run all processes at the same time; returns their total steps per second."""
        for pipe in self._pipes:
            pipe.send(seconds)
        counts: list[tuple[int, float]] = [pipe.recv() for pipe in self._pipes]
        return sum(n_steps / elapsed_s for n_steps, elapsed_s in counts)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()  # they end at the end of the file
        for process in self._processes:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes.clear()
        self._processes.clear()

    def __enter__(self) -> BareLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(workload: Workload, pipe: Connection) -> None:
    torch.set_num_threads(1)
    lanes = Lanes(workload) if workload.make_vector_env is None else VectorLanes(workload)
    try:
        pipe.send("ready")
        while True:
            pipe.send(lanes.run(pipe.recv()))
    except (EOFError, OSError, KeyboardInterrupt):
        pass  # the benchmark is over
    finally:
        lanes.close()
