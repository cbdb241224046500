"""The process that Ray starts on a node: a ``Node``, its logs, and its name.

Every method may wait; Ray runs them in threads.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import ray

from rlpool.cluster.node import Node
from rlpool.cluster.node_logs import KeptRecords, Said
from rlpool.cluster.shards import Look, NodeReport, NodeSetup, Outcome, Shard
from rlpool.workers.logs import Levels, current_levels, set_levels

N_CALLS = 32
"""Calls at once: two shards, what was cancelled, and questions."""


class NodeActor(Node):
    """What a node runs.

    Args:
        number: Number of this node among all.
        setup: What to start.
        path: The caller's ``sys.path``, so that modules are found as they are on one machine.
        levels: Levels of the caller's loggers.
    """

    def __init__(self, number: int, setup: NodeSetup, path: list[str], levels: Levels) -> None:
        self._levels: Levels = {}
        self._records = KeptRecords()
        logging.root.addHandler(self._records)
        self._follow(levels)
        known = {*sys.path}
        sys.path += [part for part in path if part not in known and os.path.exists(part)]
        self._id: str = ray.get_runtime_context().get_node_id()
        address_of: Any = ray.util.get_node_ip_address  # without annotations
        super().__init__(setup, f"{address_of()} ({self._id[:6]})", number)

    def begin(self) -> tuple[NodeReport, str]:
        """Wait until the workers are ready.

        A caller that could not reach this process for a while calls it again: what was sent before
        is given up.

        Returns:
            What this node knows about itself, and Ray's id of it.
        """
        self.cancel()
        return self.report(), self._id

    def outcome_of(self, shard: Shard) -> Outcome:
        """Run a shard."""
        return self.run(shard, lambda: ray.get(shard.policy.reference)).result()

    def look_and_listen(self, levels: Levels) -> tuple[Look, Said]:
        """What this node is doing and has logged."""
        self._follow(levels)
        return self.look(), self._records.take()

    def end(self) -> Said:
        """End the workers; returns what was logged last."""
        self.close()
        return self._records.take()

    def _follow(self, levels: Levels) -> None:
        set_levels(self._levels, levels)
        self._levels = levels


def make_actor(number: int, setup: Any, bundle: Mapping[str, float], strategy: Any) -> Any:
    """Let Ray make a ``NodeActor``; returns its handle at once.

    Args:
        number: Number of its node among all.
        setup: Ray's reference to a ``NodeSetup``.
        bundle: What it takes, by Ray's names: processors and other resources.
        strategy: Where Ray may run it.
    """
    others = dict(bundle)
    options = {
        "num_cpus": others.pop("CPU"),
        "num_gpus": others.pop("GPU", 0),
        "memory": others.pop("memory", None),
        "resources": others,
        "max_restarts": 0,  # of what it restarts, Ray does not say why it died
        "max_task_retries": 0,
        "max_concurrency": N_CALLS,
        "scheduling_strategy": strategy,
    }
    return (
        ray.remote(NodeActor).options(**options).remote(number, setup, sys.path, current_levels())
    )
