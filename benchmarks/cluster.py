"""Throughput of a Ray cluster, relative to the same workers on one machine.

    python benchmarks/cluster.py [--n-episodes 16 256 2000] [--windows 9] [--seconds 1]

The cluster is simulated on this machine: a head node without processors, which includes this
process, and two nodes with one processor each, all with separate object stores. Results are sent
from a node's store through the loopback device to the head's, as through a network.
``RayEpisodeBatcher`` with one worker per node and ``EpisodeBatcher`` with two workers alternate,
window by window, with the same requests of W1 of ``throughput.py``. ``ratio`` compares each window
of the first with the mean of the two adjacent windows of the second. ``local_to_local`` compares
the second with itself: its deviation from 1 is noise.

Prints one JSON line per size of a request, with its threshold, and every window to stderr. Needs
the extra ``ray``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from throughput import batcher_window
from workloads import WORKLOADS, in_turns, make_batcher, noise_of, parser_of, quartiles, show

from rlpool.cluster import RayEpisodeBatcher

N_NODES = 2

BARS = {16: 0.7, 256: 0.75, 2000: 0.8}
"""Required median of ``ratio``, by episodes per request."""


@contextmanager
def simulated_cluster(store_bytes: int) -> Iterator[None]:
    """Start a cluster on this machine, and connect this process to it."""
    head = {"num_cpus": 0, "object_store_memory": store_bytes}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(N_NODES):
            cluster.add_node(num_cpus=1, object_store_memory=store_bytes)
        ray.init(cluster.address, log_to_driver=False, logging_level="error")
        cluster.wait_for_nodes()
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def compare(n_episodes: int, args: argparse.Namespace) -> dict[str, Any]:
    """Alternate between the cluster's batcher and the local one."""
    workload, kind = WORKLOADS["W1"], partial(RayEpisodeBatcher, n_nodes=N_NODES)
    with (
        make_batcher(workload, n_episodes) as local,
        make_batcher(workload, n_episodes, n_threads=1, kind=kind) as cluster,
    ):
        turns = {"cluster": partial(batcher_window, cluster, n_episodes)}
        window = partial(batcher_window, local, n_episodes)
        base, others = in_turns(window, turns, args.windows, args.seconds)
    rates, ratios = others["cluster"]
    ratio, bar = quartiles(ratios), BARS.get(n_episodes)
    return {
        "n_episodes": n_episodes,
        "ratio": ratio,
        **({} if bar is None else {"bar": bar, "is_met": ratio["median"] >= bar}),
        "steps_per_s": round(quartiles(rates)["median"]),
        "local_to_local": noise_of(base),
        "local_steps_per_s": round(quartiles(base)["median"]),
        "seconds": args.seconds,
        "load": [round(average, 2) for average in os.getloadavg()],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--n-episodes", nargs="+", type=int, default=list(BARS))
    parser.add_argument("--windows", type=int, default=9, help="windows of the cluster")
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum length of a window")
    parser.add_argument("--store-mb", type=int, default=400, help="object store of each node")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with simulated_cluster(args.store_mb * 10**6):
        for n_episodes in args.n_episodes:
            show(compare(n_episodes, args), "ray")


if __name__ == "__main__":
    main()
