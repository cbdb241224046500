"""The batchers of a cluster: the same calls as on one machine, and the same bits."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlpool.batch.batcher import EpisodeBatcher
from rlpool.batch.batcher_base import BatcherBase
from rlpool.batch.request_queue import RequestQueue
from rlpool.batch.window_batcher import Batcher
from rlpool.cluster.dispatch import ClusterDispatcher
from rlpool.cluster.requests import DividedEpisodes, DividedWindow
from rlpool.cluster.shards import NodeSetup
from rlpool.cluster.transport import Transport, TransportMaker
from rlpool.machine.arguments import check_choice
from rlpool.record.capsule_files import CrashDir, CrashFiles
from rlpool.workers.failure_policy import FailurePolicy


class _OnNodes(BatcherBase):
    """A batcher whose workers are on the nodes of any transport.

    Args:
        make_transport: Called once the arguments were checked.
        *arguments: Of ``BatcherBase``.
        require_same_bits: Whether nodes that may compute other bits are refused.
    """

    _SHARES_NOTHING = "only processes of one machine can share it"
    _HOW_TO_PICKLE = (
        "create it inside create_env or create_agent, which run on the node. What nodes share goes "
        "through Ray: an actor for numbers and events, ray.util.queue.Queue for messages; a tensor "
        "goes with update(), agent_info or env_info, or as a copy: tensor.clone()"
    )
    _ONE_SEED_PER_WORKER = False

    _has_fixed_lanes = False
    """Whether every node has lanes of its own, and results one row for each of all lanes."""

    _transport: Transport | None = None

    def __init__(
        self, make_transport: TransportMaker, *arguments: Any, require_same_bits: bool = False
    ) -> None:
        check_choice("require_same_bits", require_same_bits, (True, False))
        self._make_transport = make_transport
        self._require_same_bits = require_same_bits
        try:
            BatcherBase.__init__(self, *arguments)
        except BaseException:
            if self._transport is not None:
                self._transport.close()
            raise

    def _started(
        self,
        functions: Any,
        n_timesteps: int,
        n_slots: int | None,
        n_workers: int,
        policy: FailurePolicy,
        timeout_s: float | None,
        crash_dir: CrashDir,
    ) -> RequestQueue:
        CrashFiles(crash_dir)  # refused before anything is reserved
        # Known before it reserves anything: whatever interrupts that, it is closed.
        self._transport = transport = self._make_transport()
        transport.reserve()
        n_nodes = transport.n_expected
        if self._has_fixed_lanes:
            n_slots, self._n_workers = None, n_workers * n_nodes
        n_node_slots = None if n_slots is None else max(1, n_slots // n_nodes)
        setup = NodeSetup(
            functions.data, n_workers, self._root, n_timesteps, n_node_slots, policy, timeout_s
        )
        return ClusterDispatcher(
            transport,
            setup,
            n_slots=n_slots or 0,
            make_layout=partial(self._first_layout, n_timesteps, n_slots, self._n_workers),
            crash_dir=crash_dir,
            require_same_bits=self._require_same_bits,
        )


class ClusterEpisodeBatcher(_OnNodes, EpisodeBatcher):
    """Complete episodes from the nodes of any transport, see ``RayEpisodeBatcher``."""

    _EPISODES = DividedEpisodes


class ClusterBatcher(_OnNodes, Batcher):
    """Windows from the nodes of any transport.

    Each of the nodes that were there at the beginning has its part of the lanes, those of the first
    one come first. The part of a node that is lost goes to another one.
    """

    _WINDOWS = DividedWindow
    _has_fixed_lanes = True
