"""Some lanes of environments as rows of a larger batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlpool.envs.columns import Columns
from rlpool.envs.vec_env import FLAGS, LaneError, Options, VecEnv
from rlpool.memory.storage import Array, batch_array
from rlpool.specs import Leaf, row_specs


class RowsEnv(VecEnv):
    """A batch of ``n_rows`` rows, of which each lane of ``lanes`` drives one at a time.

    The last bits of what an agent computes depend on the number of rows of the batch and on the
    position of a row in it. Here both are free of how many environments there are, so that one
    environment, one after another, gives what many give side by side.

    Args:
        lanes: The environments. They are not closed with this object.
        n_rows: Rows of the batch, at least as many as there are lanes.

    Attributes:
        lane_of: The lane that drives each row; whoever resets a row says which before.
        is_probed: Until this is set, ``reset_lanes`` leaves the environments alone: a probe wants
            to know keys and shapes only.
    """

    def __init__(self, lanes: VecEnv, n_rows: int) -> None:
        super().__init__(n_rows)
        self._lanes = lanes
        self.lane_of = np.zeros(n_rows, np.int64)
        self.is_probed = False
        self._fresh = set(range(n_rows))  # rows that never held an observation
        self._pairs: list[tuple[Array, Array]] = []
        self._actions: dict[str, Array] = {}
        self._row_of: dict[int, int] = {}  # lanes that were told to step
        self.min_ready = lanes.min_ready

    @property
    def columns(self) -> Columns | None:
        """The observations' columns of the environments, which have one row per lane."""
        return self._lanes.columns

    @property
    def action_leaves(self) -> dict[str, Leaf] | None:
        """Keys of the actions, ``None`` if the environments declare no action space."""
        return self._lanes.action_leaves

    def _reset_lanes(
        self, rows: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        if not self.is_probed:
            if not _observation_keys(self._lanes):
                # Spaces that nobody declared: an observation has to tell.
                self._on_lanes("reset_lanes", rows[:1], [0], seeds[:1], options[:1])
            self._declare_observations()
            return
        places = np.argsort(self.lane_of[list(rows)])  # a VecEnv wants its lanes in order
        by_lane = [rows[place] for place in places]
        lanes = self.lane_of[by_lane].tolist()
        self._on_lanes(
            "reset_lanes",
            by_lane,
            lanes,
            [seeds[place] for place in places],
            [options[place] for place in places],
        )
        self._read(by_lane, lanes)
        if self._fresh:
            # Rows that stand idle hold something valid: the agent sees them, too.
            self._fresh.difference_update(rows)
            for own, _ in self._pairs:
                own[list(self._fresh)] = own[by_lane[0]]

    def _step_lanes(
        self, rows: Sequence[int], actions: Mapping[str, Array]
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        by_lane, lanes = self._handed_over(rows, actions)
        self._on_lanes("step_lanes", by_lane, lanes, self._actions)
        return self._results(rows)

    def step_some(
        self,
        min_ready: int = 1,
        lanes: Sequence[int] = (),
        actions: Mapping[str, Array] | None = None,
    ) -> list[int]:
        """See ``VecEnv.step_some``; its lanes are the rows here."""
        _, inner = self._handed_over(lanes, actions or {})
        rows = list(self._row_of.values())
        stepped = self._on_lanes("step_some", rows, min_ready, inner, self._actions)
        ready = sorted(self._row_of.pop(lane) for lane in stepped)
        rewards, terminated, truncated = self._results(ready)
        self._reward[ready] = rewards
        self._initial_state[ready] = False
        for key, array in self._last_actions.items():
            array[ready] = self._actions[key][self.lane_of[ready]]
        self._note_ends(ready, terminated, truncated)
        return ready

    def _handed_over(
        self, rows: Sequence[int], actions: Mapping[str, Array]
    ) -> tuple[list[int], list[int]]:
        """Put actions where the lanes read them; gives rows and lanes, in the lanes' order."""
        by_lane = [rows[place] for place in np.argsort(self.lane_of[list(rows)])]
        lanes: list[int] = self.lane_of[by_lane].tolist()
        for key, values in actions.items():
            if key not in self._actions:
                shape = (self._lanes.n_lanes, *values.shape[1:])
                self._actions[key] = np.zeros(shape, values.dtype)
            self._actions[key][lanes] = values[by_lane]
        self._row_of.update(zip(lanes, by_lane, strict=True))
        return by_lane, lanes

    def _results(self, rows: Sequence[int]) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """Take over the observations of rows that made their step; gives the rest."""
        lanes = self.lane_of[list(rows)]
        self._read(list(rows), lanes)
        current = self._lanes.current
        terminated, truncated = current["terminated"][lanes], current["truncated"][lanes]
        return current["reward"][lanes], terminated.tolist(), truncated.tolist()

    def _on_lanes(self, name: str, rows: Iterable[int], *arguments: Any) -> Any:
        """Call a method of the environments; a lane that fails is known here by its row."""
        try:
            return getattr(self._lanes, name)(*arguments)
        except LaneError as error:
            failed = [row for row in rows if self.lane_of[row] == error.lane]
            error.lane = int(failed[0]) if failed else 0
            raise

    def _declare_observations(self) -> None:
        if not self._pairs:
            source = {key: self._lanes.current[key] for key in _observation_keys(self._lanes)}
            specs = row_specs(source)
            own = {key: batch_array(spec, self.n_lanes) for key, spec in specs.items()}
            self._pairs = [(own[key], source[key]) for key in source]
            self.current = {**own, **self.current}

    def _read(self, rows: Any, lanes: Any) -> None:
        for own, source in self._pairs:
            own[rows] = source[lanes]


def _observation_keys(env: VecEnv) -> list[str]:
    """What is in ``env.current`` besides what every VecEnv has; empty before it is known."""
    return [
        key
        for key in env.current
        if key not in ("reward", "last_action", *FLAGS) and not key.startswith("last_action/")
    ]
