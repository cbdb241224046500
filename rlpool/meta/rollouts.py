"""Which rollouts run where, and what becomes of them when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlpool.envs.vec_env import FLAGS
from rlpool.loop.plan import Episode
from rlpool.memory.storage import Array, Memory
from rlpool.meta.rows import RowsEnv
from rlpool.meta.trials import TASK_OPTION
from rlpool.seeding import NoiseStarts, Words
from rlpool.slots.blocks import Arrays, Layout
from rlpool.specs import DEFAULT_OBSERVATION_KEY

MAX_CHUNK = 128
"""Steps of a rollout that stay in a slot: longer ones are copied out piece by piece, so that the
slots of image observations stay small."""

NO_TASK: Any = object()
"""Stands for a rollout without a task, where ``None`` could be one."""


@dataclass(frozen=True)
class RolloutData:
    """A complete rollout of L steps, as arrays of its own.

    Attributes:
        number: Its number within the collection.
        task: Its task, ``NO_TASK`` without.
        observations: ``[L, ...]``, or a dict of such arrays; numbers are ``[L, 1]``.
        actions: Likewise.
        rewards: float32 ``[L, 1]``.
        terminals: bool ``[L, 1]``, True at most at the end, and only for a termination.
        next_observations: As the observations, one step later.
    """

    number: int
    task: Any
    observations: Any
    actions: Any
    rewards: Array
    terminals: Array
    next_observations: Any

    @property
    def n_steps(self) -> int:
        """Number of steps L."""
        return int(self.rewards.shape[0])


class RolloutPlan:
    """Rollouts dealt out to lanes beforehand: rollout *i* runs on lane ``i % n_lanes``.

    In the batch it stands in row ``i % n_rows``, whatever the number of lanes. Where the rows of
    two rollouts that run at the same time would be the same one (which needs a number of lanes
    that does not divide that of the rows, and one lane several rollouts ahead of another), the
    later one waits.

    Args:
        layout: Layout of slots, one per row.
        env: The rows.
        n_lanes: Number of lanes.
        seeds: One per rollout.
        noise_keys: One per rollout.
        tasks: One per rollout, ``NO_TASK`` for none.
        deliver: Takes each complete rollout, in the order in which they end.
    """

    worker = 0
    agent_info: dict[str, Array] | None = None

    def __init__(
        self,
        layout: Layout,
        env: RowsEnv,
        n_lanes: int,
        seeds: Sequence[int],
        noise_keys: Words,
        tasks: Sequence[Any],
        deliver: Callable[[RolloutData], None],
    ) -> None:
        self.layout = layout
        self.arrays: Arrays = layout.arrays(Memory.local(layout.n_bytes).root())
        self._env = env
        self._seeds = seeds
        self._tasks = tasks
        self._deliver = deliver
        n_noise = layout.step.n_noise
        self._noise = NoiseStarts(noise_keys, n_noise) if n_noise else None
        self._n_rows = layout.step.n_lanes
        self._n_lanes = n_lanes
        self._next_of_lane = list(range(n_lanes))
        self._is_busy = [False] * n_lanes
        self._chunks: dict[int, list[dict[str, Array]]] = {}
        step = layout.step
        apart = ("reward", "last_action", *FLAGS)
        self._observation_keys = [
            key
            for key in step.observation
            if key not in apart and not key.startswith("last_action/")
        ]
        self._action_keys = [k for k in step.output if k == "action" or k.startswith("action/")]

    def next_episode(self, row: int) -> Episode | None:
        """The rollout that comes next in a row, if its lane has come to it."""
        for lane, number in enumerate(self._next_of_lane):
            is_next = number < len(self._seeds) and number % self._n_rows == row
            if is_next and not self._is_busy[lane]:
                break
        else:
            return None
        self._next_of_lane[lane] += self._n_lanes
        self._is_busy[lane] = True
        self._env.lane_of[row] = lane
        task = self._tasks[number]
        return Episode(
            number,
            self._seeds[number],
            None if task is NO_TASK else {TASK_OPTION: task},
            self._noise[number] if self._noise is not None else None,
            row,
        )

    def restarted(self, lane: int, episode: Episode) -> Episode:
        """Never asked for: a rollout that ended is complete."""
        raise NotImplementedError

    def next_slot(self, lane: int, episode: int) -> int | None:
        """The row's own slot again: what it held was copied out."""
        return lane

    def chunk_done(self, episode: int, slot: int, chunk: int, is_last: bool) -> None:
        """Copy a slot out; with the last one the rollout is complete."""
        length = int(self.arrays.control["length"][slot])
        kept = [*self._observation_keys, *self._action_keys, "reward"]
        rows = self.arrays.rows
        self._chunks.setdefault(episode, []).append(
            {key: rows[key][slot, :length].copy() for key in kept}
        )
        if is_last:
            self._is_busy[episode % self._n_lanes] = False
            self._deliver(self._joined(episode, slot))

    def flush(self) -> None:
        """Nobody waits for reports."""

    def wait(self) -> bool:
        """Nothing comes from outside."""
        return False

    def has_news(self) -> bool:
        """Nothing comes from outside."""
        return False

    def is_cancelled(self) -> bool:
        """A collection is not given up."""
        return False

    def _joined(self, episode: int, slot: int) -> RolloutData:
        chunks = self._chunks.pop(episode)
        whole = {key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]}
        finals = self.arrays.finals

        def successors(key: str) -> Array:
            return np.concatenate([whole[key][1:], finals[key][slot][None]])

        terminals = np.zeros((len(whole["reward"]), 1), bool)
        terminals[-1] = finals["terminated"][slot]
        observed = {key: whole[key] for key in self._observation_keys}
        following = {key: successors(key) for key in self._observation_keys}
        actions = {key: whole[key] for key in self._action_keys}
        return RolloutData(
            episode,
            self._tasks[episode],
            _nested(observed, DEFAULT_OBSERVATION_KEY),
            _nested(actions, "action"),
            _as_columns(successors("reward")),
            terminals,
            _nested(following, DEFAULT_OBSERVATION_KEY),
        )


def _as_columns(array: Array) -> Array:
    """Numbers ``[L]`` as ``[L, 1]``, as replay buffers of one column hold them."""
    return array[:, None] if array.ndim == 1 else array


def _nested(arrays: dict[str, Array], default_key: str) -> Any:
    """The array alone if there is one of the default key, else a dict."""
    if list(arrays) == [default_key]:
        return _as_columns(arrays[default_key])
    prefix = f"{default_key}/"
    return {key.removeprefix(prefix): _as_columns(array) for key, array in arrays.items()}
