"""The pool and other replay buffers behind a common interface.

All store the same five keys of every step: observation, action, reward, next observation and
whether the episode ended. Each gets a trajectory batch ``[B, T]``; the others flatten it with
``flat``, by one ``take`` per key, and are then filled by their call for the largest batch. If a
library is not installed, its constructor raises ``ImportError``.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch

from rlpool import Pool, TemporalDictTensor

KEYS = ("frame", "action", "_reward", "_frame", "_done")
BATCH_SIZE = 256
N_SEQUENCES, SEQUENCE_LENGTH = 32, 64
ALPHA, BETA = 0.6, 0.4  # of prioritised sampling

PRIORITIES = np.random.default_rng(0).random(BATCH_SIZE).astype(np.float32) + 1e-3
"""New priorities, like a learner's errors: of the same dtype, and computed beforehand."""


def flat(trajectories: TemporalDictTensor) -> dict[str, np.ndarray[Any, Any]]:
    """Return the steps of trajectories as arrays ``[n, ...]``."""
    lengths = trajectories.lengths.numpy()
    ends = np.cumsum(lengths)
    shifts = np.arange(len(lengths)) * trajectories.n_timesteps() - (ends - lengths)
    places = np.repeat(shifts, lengths) + np.arange(ends[-1])
    arrays = {key: trajectories[key].numpy() for key in KEYS}
    return {
        key: array.reshape(-1, *array.shape[2:]).take(places, axis=0)
        for key, array in arrays.items()
    }


class Contender:
    """A store of transitions.

    ``extend(trajectories)`` adds every step of a batch. ``sample()`` draws ``BATCH_SIZE``
    transitions uniformly, ``sequences()`` draws ``N_SEQUENCES`` pieces of episodes of at most
    ``SEQUENCE_LENGTH`` steps, and ``prioritised()`` draws by priority and sets new priorities.

    Args:
        size: Capacity in transitions.
        prioritised: Whether ``sample`` is proportional to priorities.

    Attributes:
        name: Its name in figures.
        packages: Distributions whose versions matter.
        operations: Supported operations besides ``extend``.
    """

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    operations: ClassVar[tuple[str, ...]] = ("sample", "prioritised")


class RlPool(Contender):
    """This library."""

    name = "rlpool"
    operations = ("sample", "sequences", "prioritised")

    def __init__(self, size: int, *, prioritised: bool) -> None:
        self._pool = Pool(
            pool_size=size, keys=KEYS, seed=0, priority_exponent=ALPHA if prioritised else None
        )

    def extend(self, trajectories: TemporalDictTensor) -> None:
        self._pool.extend(trajectories)

    def sample(self) -> Any:
        return self._pool.sample(BATCH_SIZE)

    def sequences(self) -> Any:
        return self._pool.sample_sequences(N_SEQUENCES, SEQUENCE_LENGTH)

    def prioritised(self) -> Any:
        batch = self._pool.sample(BATCH_SIZE, beta=BETA)
        self._pool.update_priorities(batch["index"], PRIORITIES)
        return batch


class TorchRL(Contender):
    """``TensorDictReplayBuffer`` over a ``LazyTensorStorage``, with flat keys, which are faster."""

    name = "torchrl"
    packages = ("torchrl", "tensordict")
    operations = ("sample", "sequences", "prioritised")

    def __init__(self, size: int, *, prioritised: bool) -> None:
        from tensordict import TensorDict
        from torchrl.data import (
            LazyTensorStorage,
            SliceSampler,
            TensorDictPrioritizedReplayBuffer,
            TensorDictReplayBuffer,
        )

        logging.getLogger("torchrl").setLevel(logging.WARNING)  # it logs to stdout
        self._make_batch = TensorDict
        storage = LazyTensorStorage(size)
        if prioritised:
            self._buffer = TensorDictPrioritizedReplayBuffer(
                alpha=ALPHA, beta=BETA, storage=storage, batch_size=BATCH_SIZE
            )
            return
        self._buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH_SIZE)
        # Shares the storage, since another buffer would have to be filled separately. The ends of
        # episodes are searched once per extend, not once per sample.
        self._slices = TensorDictReplayBuffer(
            storage=storage,
            sampler=SliceSampler(
                slice_len=SEQUENCE_LENGTH, end_key="_done", strict_length=False, cache_values=True
            ),
            batch_size=N_SEQUENCES * SEQUENCE_LENGTH,
        )

    def extend(self, trajectories: TemporalDictTensor) -> None:
        arrays = flat(trajectories)
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        self._buffer.extend(self._make_batch(tensors, batch_size=[len(arrays["action"])]))

    def sample(self) -> Any:
        return self._buffer.sample()

    def sequences(self) -> Any:
        return self._slices.sample()

    def prioritised(self) -> Any:
        batch = self._buffer.sample()
        self._buffer.update_priority(batch["index"], torch.from_numpy(PRIORITIES))
        return batch


class StableBaselines3(Contender):
    """``ReplayBuffer`` of many environments, since it adds one step of all of them at a time."""

    name = "stable_baselines3"
    packages = ("stable-baselines3",)
    operations = ("sample",)

    _N_ENVS = 100

    def __init__(self, size: int, *, prioritised: bool) -> None:
        from stable_baselines3.common.buffers import ReplayBuffer

        self._buffer = ReplayBuffer(
            size,
            gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32),
            gymnasium.spaces.Discrete(2),
            device="cpu",
            n_envs=self._N_ENVS,
            handle_timeout_termination=False,
        )
        self._infos: list[dict[str, Any]] = [{}] * self._N_ENVS

    def extend(self, trajectories: TemporalDictTensor) -> None:
        arrays = flat(trajectories)
        columns = [arrays[key] for key in ("frame", "_frame", "action", "_reward", "_done")]
        for start in range(0, len(columns[0]), self._N_ENVS):
            rows = slice(start, start + self._N_ENVS)
            self._buffer.add(*[column[rows] for column in columns], self._infos)

    def sample(self) -> Any:
        return self._buffer.sample(BATCH_SIZE)


class Tianshou(Contender):
    """``VectorReplayBuffer`` with a single sub-buffer, since it loops over them in Python."""

    name = "tianshou"
    packages = ("tianshou", "numba")

    def __init__(self, size: int, *, prioritised: bool) -> None:
        from tianshou.data import Batch, PrioritizedVectorReplayBuffer, VectorReplayBuffer

        self._make_batch = Batch
        if prioritised:
            self._buffer = PrioritizedVectorReplayBuffer(size, 1, alpha=ALPHA, beta=BETA)
        else:
            self._buffer = VectorReplayBuffer(size, 1)

    def extend(self, trajectories: TemporalDictTensor) -> None:
        arrays = flat(trajectories)
        done = arrays["_done"]
        batch = self._make_batch(
            obs=arrays["frame"],
            act=arrays["action"],
            rew=arrays["_reward"],
            terminated=done,
            truncated=np.zeros_like(done),
            obs_next=arrays["_frame"],
        )
        self._buffer.add(batch, buffer_ids=np.zeros(len(done), np.int64))

    def sample(self) -> Any:
        return self._buffer.sample(BATCH_SIZE)

    def prioritised(self) -> Any:
        batch, index = self._buffer.sample(BATCH_SIZE)
        self._buffer.update_weight(index, PRIORITIES)
        return batch


class Cpprb(Contender):
    """``ReplayBuffer`` and ``PrioritizedReplayBuffer``, in Cython and C++."""

    name = "cpprb"
    packages = ("cpprb",)

    def __init__(self, size: int, *, prioritised: bool) -> None:
        from cpprb import PrioritizedReplayBuffer, ReplayBuffer

        columns = {
            "frame": {"shape": 4, "dtype": np.float32},
            "action": {"dtype": np.int64},
            "_reward": {"dtype": np.float32},
            "_frame": {"shape": 4, "dtype": np.float32},
            "_done": {"dtype": np.bool_},
        }
        if prioritised:
            self._buffer = PrioritizedReplayBuffer(size, columns, alpha=ALPHA)
        else:
            self._buffer = ReplayBuffer(size, columns)

    def extend(self, trajectories: TemporalDictTensor) -> None:
        self._buffer.add(**flat(trajectories))

    def sample(self) -> Any:
        return self._buffer.sample(BATCH_SIZE)

    def prioritised(self) -> Any:
        batch = self._buffer.sample(BATCH_SIZE, BETA)
        self._buffer.update_priorities(batch["indexes"], PRIORITIES)
        return batch


PEERS: tuple[type[Contender], ...] = (TorchRL, StableBaselines3, Tianshou, Cpprb)
