"""Which worker runs which episode where that is fixed: lanes that cannot be seeded one by one."""

from __future__ import annotations

from rlpool.seeding import episode_seeds
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
        return [number for number, other in enumerate(self.workers) if other == worker]

    @property
    def workers(self) -> list[int]:
        """The worker of each episode."""
        return [n // self._n_lanes % self._n_workers for n in range(self._n_episodes)]

    def seeds(self, root: int, first: int) -> list[int]:
        """The seed of each episode: that of its worker's first one, as one reset serves all lanes.

        Args:
            root: Root of all seeds.
            first: Episodes requested before.
        """
        seeds = episode_seeds(root, first, self._n_episodes)
        return [seeds[worker * self._n_lanes] for worker in self.workers]
