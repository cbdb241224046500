"""Returns and lengths of episodes, complete or spread over several windows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlpool.data.array_view import as_numpy
from rlpool.data.rows import instance, kind
from rlpool.data.specs import refuse_missing
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import SpecError

_REWARD = "_reward"
_DONE = "_done"
_START = "initial_state"


def episode_returns(trajectories: TemporalDictTensor, key: str = _REWARD) -> Tensor:
    """Sum the rewards of each row.

    Args:
        trajectories: Complete episodes, such as those of an ``EpisodeBatcher``. Padding does not
            count.
        key: Key to sum: one number per step, ``[B, T]`` or ``[B, T, 1]``.

    Returns:
        float32 ``[B]`` (float64 if the rewards are), on their device. Summed in float64.

    Raises:
        SpecError: If the key is missing, or it has more than one number per step.

    Example:
        >>> steps = {"_reward": torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 0.0]])}
        >>> episode_returns(TemporalDictTensor(steps, torch.tensor([3, 1])))
        tensor([7., 1.])
    """
    values = numbers_of(trajectories, key)
    steps = torch.arange(values.shape[1], device=values.device)
    is_padding = steps >= trajectories.lengths[:, None]
    return values.double().masked_fill(is_padding, 0).sum(1).to(_dtype_of(values))


def episode_lengths(trajectories: TemporalDictTensor) -> Tensor:
    """Return the number of steps of each complete episode: a copy of ``lengths``, int64 ``[B]``.

    Example:
        >>> steps = {"_reward": torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 0.0]])}
        >>> episode_lengths(TemporalDictTensor(steps, torch.tensor([3, 1])))
        tensor([3, 1])
    """
    return _checked(trajectories).lengths.clone()


class EndedEpisodes(NamedTuple):
    """Episodes that ended in a window, ordered by time, then row.

    Attributes:
        returns: float32 ``[N]`` (float64 if the rewards are): sums over whole episodes, including
            steps in earlier windows that were added.
        lengths: int64 ``[N]``: numbers of steps, counted likewise.
        rows: int64 ``[N]``: the row of this window in which each episode ended.

    Example:
        >>> done = torch.tensor([[False, True, False], [False, False, True]])
        >>> steps = {"_reward": torch.ones(2, 3), "_done": done}
        >>> returns, lengths, rows = EpisodeStatistics().update(TemporalDictTensor(steps))
        >>> returns, rows
        (tensor([2., 3.]), tensor([0, 1]))
    """

    returns: Tensor
    lengths: Tensor
    rows: Tensor


class EpisodeStatistics:
    """Returns and lengths of episodes in windows of a ``Batcher``, even if they span several.

    Args:
        key: Key to sum: one number per step, ``[B, T]`` or ``[B, T, 1]``. Use a second object for
            another key, such as ``"_success"`` or ``"_cost"``.

    Example:
        >>> def create_endless_env(seed):
        ...     return GymEnvInf([CountingEnv(length=4) for _ in range(2)], seed)
        >>> batcher = Batcher(6, None, create_agent, {}, create_endless_env, n_workers=0)
        >>> batcher.reset()
        >>> statistics = EpisodeStatistics()
        >>> for _ in range(2):  # windows of 6 steps, episodes of 4
        ...     batcher.execute()
        ...     print(statistics.update(batcher.get()).lengths)
        tensor([4, 4])
        tensor([4, 4, 4, 4])
    """

    def __init__(self, key: str = _REWARD) -> None:
        self._key = key
        self.reset()

    def reset(self) -> None:
        """Forget the running episodes.

        Not needed after ``batcher.reset()``: the next window marks where episodes begin.
        """
        # By lane: sum and length of the running episode so far.
        self._running: NDArray = np.zeros((2, 0))

    def update(self, window: TemporalDictTensor) -> EndedEpisodes:
        """Add the next window.

        Add all windows, in order. Lanes that have stopped are absent from later windows:
        ``window.info["lane"]`` is the lane of each row. Without it, row *i* is lane *i*.

        Args:
            window: Trajectories with ``_reward`` (or the other key) and ``_done``, on any device.
                A row whose first step has ``initial_state`` True does not continue an episode of
                earlier windows.

        Returns:
            The episodes that ended in it, on the CPU.

        Raises:
            SpecError: If a key is missing, it has more than one number per step, or
                ``info["lane"]`` does not name a different lane for each row.
        """
        values = numbers_of(window, self._key)
        done = numbers_of(window, _DONE).bool().cpu().numpy()
        lanes = self._lanes_of(window)
        running = self._running[:, lanes].copy()
        if _START in window:  # the episode that ran there was dropped
            running[:, numbers_of(window, _START)[:, :1].any(1).cpu().numpy()] = 0
        is_step = np.arange(done.shape[1]) < window.lengths.cpu().numpy()[:, None]
        counted = np.where(is_step, as_numpy(values), 0), is_step
        ended, rows_of_ended = [running[:, :0]], [np.zeros(0, np.int64)]
        for step in range(done.shape[1]):
            running += [part[:, step] for part in counted]
            (rows,) = (done & is_step)[:, step].nonzero()
            if len(rows):
                ended.append(running[:, rows])
                rows_of_ended.append(rows)
                running[:, rows] = 0
        self._running[:, lanes] = running
        returns, lengths = torch.from_numpy(np.concatenate(ended, 1))
        rows_found = torch.from_numpy(np.concatenate(rows_of_ended))
        return EndedEpisodes(returns.to(_dtype_of(values)), lengths.long(), rows_found)

    def _lanes_of(self, window: TemporalDictTensor) -> Any:
        """Return the lane of each row, after extending the running sums to all lanes."""
        n_rows = window.n_elems()
        lanes: Any = slice(n_rows)
        n_lanes = n_rows
        name = "lane" if "lane" in window.info else "episode"
        if name in window.info:
            lanes = window.info[name].cpu().numpy()
            is_right = lanes.shape == (n_rows,) and lanes.dtype.kind in "iu"
            if not is_right or lanes.min(initial=0) < 0 or len(np.unique(lanes)) < n_rows:
                message = f"info[{name!r}] is {kind(window.info[name])}, not a lane for each row"
                raise SpecError(message, fix="keep the values of the Batcher's window")
            n_lanes = int(lanes.max(initial=-1)) + 1
        n_more = max(0, n_lanes - self._running.shape[1])
        self._running = np.pad(self._running, [(0, 0), (0, n_more)])
        return lanes


def _checked(trajectories: Any) -> TemporalDictTensor:
    # get() returns None once all lanes have stopped, or if it does not wait.
    fix = "pass the result of batcher.get(), unless it is None"
    return instance(trajectories, TemporalDictTensor, "trajectories", fix)


def numbers_of(trajectories: TemporalDictTensor, key: str) -> Tensor:
    """Return one number per step, ``[B, T]``.

    Raises:
        SpecError: If the key is missing, or it has more than one number per step.
    """
    _checked(trajectories)
    refuse_missing("the trajectories", trajectories.keys(), [key], "name one of these")
    values = trajectories[key]
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[..., 0]
    if values.ndim != 2:
        message = f"{key!r} has shape {list(values.shape)}, not one number per step: [B, T]"
        raise SpecError(message, fix="name a key with one number per step")
    return values


def _dtype_of(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
