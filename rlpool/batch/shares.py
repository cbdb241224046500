"""Lanes that cannot be seeded one by one: who runs which episode, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rlpool.errors import SpecError
from rlpool.memory.storage import Array
from rlpool.seeding import episode_seeds
from rlpool.slots.blocks import Layout, StepSpecs

_LOG = logging.getLogger("rlpool")


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


def warn_if_unseeded(step: StepSpecs) -> None:
    """Tell the user of a batcher whose environments cannot be seeded what that means."""
    if step.seeding == "stream":
        _LOG.warning(
            "the environments cannot be seeded (seeding='stream'): only a whole run gives the same "
            "data again; info['reproducible'] is False once a worker was replaced or a request "
            "failed or was given up"
        )


def check_rows(step: StepSpecs | None, env_info: Mapping[str, Array]) -> None:
    """Refuse different rows for lanes that are reset together.

    Args:
        step: What a step consists of, ``None`` before that is known.
        env_info: Per row.

    Raises:
        SpecError: If there are.
    """
    if step is None or not step.resets_together:
        return
    for key, array in env_info.items():
        if len({row.tobytes() for row in array}) > 1:
            raise SpecError(
                f"env_info[{key!r}] has different rows, and one reset serves all lanes "
                f"(seeding is {step.seeding!r})",
                fix="give all rows the same value, or use a vector environment whose lanes "
                "can be reset one by one, such as SyncVectorEnv",
            )


def check_shares(layout: Layout, env_info: Mapping[str, Array], n_rows: int) -> None:
    """Refuse what lanes that are reset together cannot run.

    Args:
        layout: Layout of the request's block.
        env_info: Its ``env_info``, per row.
        n_rows: Its number of rows.

    Raises:
        SpecError: If lanes have different ``env_info``, or there are too few slots for them.
    """
    check_rows(layout.step, env_info)
    n_lanes = layout.step.n_lanes * layout.n_workers
    if layout.n_slots < min(n_lanes, n_rows):
        raise SpecError(
            f"n_slots is {layout.n_slots}, and {n_lanes} lanes run at the same time: none of "
            f"them can wait for a slot (seeding is {layout.step.seeding!r})",
            fix=f"give n_slots={n_lanes} or more",
        )
