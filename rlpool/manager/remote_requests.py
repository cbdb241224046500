"""Seeds and steps of environments that are spoken to one at a time, in their process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from rlpool.envs.gym_env import GymEnv
from rlpool.memory.storage import Array
from rlpool.seeding import LaneSeeds, root_from


class RemoteSeeds:
    """Seeds of the resets of remotes that bring none.

    Args:
        root: Root of all seeds.
        first_lane: Number of the worker's first lane.
    """

    def __init__(self, root: int, first_lane: int) -> None:
        self._stream = LaneSeeds(root, 0)
        self._first_lane = first_lane
        self._seeds: dict[int, Iterator[int]] = {}

    def next(self, lane: int) -> int:
        """The next seed of a lane."""
        if lane not in self._seeds:
            number = self._first_lane + lane
            # Backwards: forwards are the seeds of lanes that are reset together.
            self._seeds[lane] = (self._stream.seed(number, -k) for k in itertools.count(1))
        return next(self._seeds[lane])

    def give(self, lane: int, seed: int) -> None:
        """Go on with this seed, then with others that follow from it."""
        stream = LaneSeeds(root_from(seed), 0)
        others = (stream.seed(0, k) for k in itertools.count())
        self._seeds[lane] = itertools.chain([seed], (other for other in others if other != seed))

    def go_on(self, lane: int, seed: int | None, n_used: int) -> None:
        """Go on where another process was.

        Args:
            lane: The lane.
            seed: What it was given last, ``None`` if nothing.
            n_used: How many seeds were used since.
        """
        if seed is not None:
            self.give(lane, seed)
        for _ in range(n_used):
            self.next(lane)


def remote_step(env: GymEnv, lane: int, actions: Mapping[str, Array]) -> Any:
    """Step one environment, which keeps its results; returns what its remote receives."""
    env.step_lanes([lane], actions)
    observation, reward, _, _, info = env.results[0]
    done = bool(env.current["done"][lane])
    if env.current["truncated"][lane] and not env.current["terminated"][lane]:
        info = {**info, "TimeLimit.truncated": True}
    return observation, reward, done, info
