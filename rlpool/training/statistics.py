"""Returns and lengths of episodes, complete ones or those that go on from window to window."""

from __future__ import annotations

from collections.abc import Mapping
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
_STATE = "sums", "lengths"


def episode_returns(trajectories: TemporalDictTensor, key: str = _REWARD) -> Tensor:
    """Sum of the rewards of each row.

    Args:
        trajectories: Complete episodes, such as those of an ``EpisodeBatcher``. Padding does not
            count.
        key: What is summed up: one number per step, ``[B, T]`` or ``[B, T, 1]``.

    Returns:
        float32 ``[B]`` (float64 if the rewards are), on their device. Summed up in float64.

    Raises:
        SpecError: If there is no such key, or it has more than one number per step.

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
    """Number of steps of each row of complete episodes: a copy of ``lengths``, int64 ``[B]``.

    Example:
        >>> steps = {"_reward": torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 0.0]])}
        >>> episode_lengths(TemporalDictTensor(steps, torch.tensor([3, 1])))
        tensor([3, 1])
    """
    return _checked(trajectories).lengths.clone()


class EndedEpisodes(NamedTuple):
    """Episodes that ended in a window, in order of time, then of rows.

    Attributes:
        returns: float32 ``[N]`` (float64 if the rewards are): sums over whole episodes, steps in
            earlier windows included, as far as these were added.
        lengths: int64 ``[N]``: their numbers of steps, counted likewise.
        rows: int64 ``[N]``: the row of this window in which each of them ended.

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
    """Returns and lengths of episodes in windows of a ``Batcher``, also of those that span several.

    Args:
        key: What is summed up: one number per step, ``[B, T]`` or ``[B, T, 1]``. ``"_success"`` or
            ``"_cost"``, say, in a second object.

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
        """Forget the episodes that are running.

        Not needed after ``batcher.reset()``: the next window says itself where episodes begin.
        """
        # By lane: what the episode that runs there has had up to now.
        self._sums: NDArray = np.zeros(0, np.float64)
        self._n_steps: NDArray = np.zeros(0, np.int64)

    def update(self, window: TemporalDictTensor) -> EndedEpisodes:
        """Add the next window.

        Windows have to come in the order of their steps, none left out. Lanes that have stopped
        are missing in later ones: ``window.info["episode"]`` says which lane each row is. Where it
        is missing, row *i* is lane *i*.

        Args:
            window: Trajectories with ``_reward`` (or the other key) and ``_done``, on any device.
                Where ``initial_state`` is there and True in a row's first step, nothing of earlier
                windows is added to that row.

        Returns:
            The episodes that ended in it, on the CPU.

        Raises:
            SpecError: If a key is missing, it has more than one number per step, or
                ``info["episode"]`` does not name a different lane for each row.
        """
        values = numbers_of(window, self._key)
        done = numbers_of(window, _DONE).bool().cpu().numpy()
        lengths = window.lengths.cpu().numpy()
        dtype = _dtype_of(values)
        numbers = as_numpy(values)
        lanes = self._lanes_of(window)
        if _START in window:  # what ran there before was dropped
            begins = numbers_of(window, _START)[:, :1].any(1).cpu().numpy()
            for running in (self._sums, self._n_steps):
                running[lanes] = np.where(begins, 0, running[lanes])
        is_step = np.arange(done.shape[1]) < lengths[:, None]
        done, numbers = done & is_step, np.where(is_step, numbers, 0).astype(np.float64)
        sums, n_steps = self._sums[lanes], self._n_steps[lanes]
        ended = [(sums[:0], n_steps[:0], n_steps[:0])]
        for step in range(done.shape[1]):
            sums, n_steps = sums + numbers[:, step], n_steps + is_step[:, step]
            (rows,) = done[:, step].nonzero()
            if len(rows):
                ended.append((sums[rows], n_steps[rows], rows))
                sums[rows], n_steps[rows] = 0, 0
        self._sums[lanes], self._n_steps[lanes] = sums, n_steps
        parts = [torch.from_numpy(np.concatenate(part)) for part in zip(*ended, strict=True)]
        return EndedEpisodes(parts[0].to(dtype), parts[1], parts[2])

    def _lanes_of(self, window: TemporalDictTensor) -> Any:
        """The lane of each row; there is a place for the sums of each."""
        n_rows = window.n_elems()
        lanes: Any = slice(n_rows)
        n_lanes = n_rows
        if "episode" in window.info:
            lanes = window.info["episode"].cpu().numpy()
            is_right = lanes.shape == (n_rows,) and lanes.dtype.kind in "iu"
            if not is_right or lanes.min(initial=0) < 0 or len(np.unique(lanes)) < n_rows:
                what = f"info['episode'] is {kind(window.info['episode'])}, not a lane for each row"
                raise SpecError(what, fix="keep what the Batcher's window has there")
            n_lanes = int(lanes.max(initial=-1)) + 1
        n_more = n_lanes - len(self._sums)
        if n_more > 0:
            self._sums = np.append(self._sums, np.zeros(n_more))
            self._n_steps = np.append(self._n_steps, np.zeros(n_more, np.int64))
        return lanes

    def state_dict(self) -> dict[str, Tensor]:
        """The sums and lengths of the episodes that are running, by lane; copies."""
        parts = torch.tensor(self._sums), torch.tensor(self._n_steps)
        return dict(zip(_STATE, parts, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what ``state_dict`` returned.

        Raises:
            SpecError: For anything else.
        """
        parts = [state.get(key) if isinstance(state, Mapping) else None for key in _STATE]
        sums, lengths = (part if isinstance(part, Tensor) else torch.empty(()) for part in parts)
        if sums.ndim != 1 or lengths.shape != sums.shape:
            got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            what = f"the state of an EpisodeStatistics has {' and '.join(_STATE)}, got {got}"
            raise SpecError(what, fix="pass what state_dict() returned")
        self._sums = sums.detach().cpu().double().numpy().copy()
        self._n_steps = lengths.detach().cpu().long().numpy().copy()


def _checked(trajectories: Any) -> TemporalDictTensor:
    # None once all lanes have stopped, or if get() does not wait.
    fix = "pass what batcher.get() returns, unless that is None"
    return instance(trajectories, TemporalDictTensor, "trajectories", fix)


def numbers_of(trajectories: TemporalDictTensor, key: str) -> Tensor:
    """One number per step, ``[B, T]``.

    Raises:
        SpecError: If there is no such key, or it has more than one number per step.
    """
    _checked(trajectories)
    refuse_missing("the trajectories", trajectories.keys(), [key], "name one of these")
    values = trajectories[key]
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[..., 0]
    if values.ndim != 2:
        what = f"{key!r} has shape {list(values.shape)}, not one number per step: [B, T]"
        raise SpecError(what, fix="name a key with one number per step")
    return values


def _dtype_of(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
