"""The batchers of a cluster: the same calls as on one machine, and the same bits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rlpool.batch.batcher import EpisodeBatcher
from rlpool.batch.batcher_base import BatcherBase
from rlpool.batch.request_queue import RequestQueue
from rlpool.cluster.dispatch import ClusterDispatcher
from rlpool.cluster.requests import DividedEpisodes
from rlpool.cluster.shards import NodeSetup
from rlpool.cluster.transport import TransportMaker
from rlpool.record.capsule_files import CrashDir
from rlpool.workers.failure_policy import (
    FailurePolicy,
)

if TYPE_CHECKING:
    pass


class ClusterEpisodeBatcher(EpisodeBatcher):
    """Complete episodes from the nodes of any transport, see ``RayEpisodeBatcher``."""

    _EPISODES = DividedEpisodes

    def __init__(
        self, make_transport: TransportMaker, *arguments: Any, require_same_bits: bool = False
    ) -> None:
        self._make_transport = make_transport
        self._require_same_bits = require_same_bits
        BatcherBase.__init__(self, *arguments)

    def _started(
        self,
        functions: Any,
        n_timesteps: int,
        n_slots: int | None,
        n_threads: int,
        policy: FailurePolicy,
        timeout_s: float | None,
        crash_dir: CrashDir,
    ) -> RequestQueue:
        n_slots = n_slots or 0
        transport = self._make_transport()
        n_node_slots = max(1, n_slots // transport.n_expected)
        setup = NodeSetup(
            functions, n_threads, self._root, n_timesteps, n_node_slots, policy, timeout_s
        )
        return ClusterDispatcher(
            transport,
            setup,
            n_slots=n_slots,
            make_layout=partial(self.layout, n_timesteps, n_slots, n_threads),
            crash_dir=crash_dir,
            require_same_bits=self._require_same_bits,
        )
