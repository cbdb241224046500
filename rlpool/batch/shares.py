"""Which worker runs which episode where that is fixed: lanes that cannot be seeded one by one."""

from __future__ import annotations

from rlpool.slots.blocks import Layout


class Shares:
    """The fixed shares of a request's episodes.

    Episode *i* runs in row ``i % n_lanes`` of a worker, as always, and rows go around the workers.
    So each lane of a worker has its episodes beforehand, which it runs one after another.

    Args:
        layout: Layout of the request's block.
        n_episodes: Its number of episodes.
    """

    def __init__(self, layout: Layout, n_episodes: int) -> None:
        self._n_lanes, self._n_workers = layout.step.n_lanes, layout.n_workers
        self._n_episodes = n_episodes

    def of(self, worker: int) -> list[int]:
        """The episodes of a worker, ascending."""
        return [number for number in range(self._n_episodes) if self.worker(number) == worker]

    def worker(self, episode: int) -> int:
        """The worker that runs an episode."""
        return episode // self._n_lanes % self._n_workers

    def seeding_episode(self, episode: int) -> int:
        """The first episode of the same worker: the reset of all its lanes has that one's seed."""
        return self.worker(episode) * self._n_lanes
