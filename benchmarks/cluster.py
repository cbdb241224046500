"""How fast episodes arrive from a Ray cluster, compared with the same workers on one machine.

    python benchmarks/cluster.py [--workloads W1 W2 W3] [--windows 4] [--seconds 2] [--peers]

The cluster is simulated on this machine: a head node without processors, to which this process
belongs, and two nodes of one processor each, all with object stores of their own. Results go from
a node's store through the loopback device into the head's, as they would through a network.
W1, W2 and W3 are those of ``throughput.py``. ``RayEpisodeBatcher`` with one worker on each of the
nodes and ``EpisodeBatcher`` with two workers take turns, window by window, with the same requests,
as ``throughput.py`` describes it; ``ratio`` compares each window of the first with the mean of the
two windows of the second around it, ``local_to_local`` does the same with the second alone: what
it deviates from 1 is noise. ``--peers`` adds what RLlib and TorchRL offer on the same cluster, see
``cluster_peers.py``; they are asked for smaller requests, since they are slower. ``transfer`` of W3
is what Ray takes for the frames alone, see there.

Prints one JSON line per workload, and every window to stderr. Needs what
``requirements-cluster.txt`` says.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import cluster_peers
import ray
import torch
from ray.cluster_utils import Cluster
from throughput import batcher_window
from workloads import (
    WORKLOADS,
    Window,
    Workload,
    in_turns,
    make_batcher,
    noise_of,
    parser_of,
    quartiles,
    show,
)

from rlpool.cluster import RayEpisodeBatcher

N_PEER_EPISODES = {"W1": 1000, "W2": 16, "W3": 16}
"""Per request of a peer: about two seconds of them."""


@contextmanager
def simulated_cluster(n_nodes: int, n_cpus: int, store_bytes: int) -> Iterator[Cluster]:
    """A cluster on this machine, to which this process is connected.

    Args:
        n_nodes: Nodes beside the head, which has no processors.
        n_cpus: Processors that each of them says it has.
        store_bytes: Size of the object store of each node.
    """
    head = {"num_cpus": 0, "object_store_memory": store_bytes}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(n_nodes):
            cluster.add_node(num_cpus=n_cpus, object_store_memory=store_bytes)
        ray.init(cluster.address, log_to_driver=False, logging_level="error")
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def compare(workload: Workload, args: argparse.Namespace) -> dict[str, Any]:
    """The cluster's batcher, and peers, in turns with the local one."""
    n_episodes = args.n_episodes or workload.n_episodes
    n_nodes = workload.n_workers
    kind = partial(RayEpisodeBatcher, n_nodes=n_nodes)
    peers = cluster_peers.installed() if args.peers else {}
    if workload.name == "W3":
        peers["transfer"] = cluster_peers.bare_transfer
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(simulated_cluster(n_nodes, 1 + len(peers), args.store_mb * 10**6))
        local = enter(make_batcher(workload, n_episodes))
        cluster = enter(make_batcher(workload, n_episodes, n_threads=1, kind=kind))
        turns: dict[str, Window] = {"rlpool": partial(batcher_window, cluster, n_episodes)}
        for name, peer in peers.items():
            turns[name] = enter(peer(workload, N_PEER_EPISODES[workload.name]))
        window = partial(batcher_window, local, n_episodes)
        base, others = in_turns(window, turns, args.windows, args.seconds)
    rows = {
        name: {"ratio": quartiles(ratios), "steps_per_s": round(quartiles(rates)["median"])}
        for name, (rates, ratios) in others.items()
    }
    return {
        "workload": workload.name,
        **rows,
        "local_to_local": noise_of(base),
        "local_steps_per_s": round(quartiles(base)["median"]),
        "seconds": args.seconds,
        "n_episodes": n_episodes,
        "load": [round(average, 2) for average in os.getloadavg()],
    }


def main() -> None:
    parser = parser_of(__doc__)
    names = ["W1", "W2", "W3"]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--windows", type=int, default=4, help="windows of each but the local one")
    parser.add_argument("--seconds", type=float, default=2.0, help="least length of a window")
    parser.add_argument("--n-episodes", type=int, help="episodes per request, for sensitivity")
    parser.add_argument("--store-mb", type=int, default=400, help="object store of each node")
    parser.add_argument("--peers", action="store_true", help="other libraries as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.workloads:
        more = ["mujoco"] if name == "W2" else []
        show(compare(WORKLOADS[name], args), "ray", "torchrl", *more)


if __name__ == "__main__":
    main()
