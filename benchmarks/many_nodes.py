"""How many nodes one caller can keep busy, from what a few of them cost it on this machine.

    python benchmarks/many_nodes.py [--nodes 2 4 8 16 32] [--seconds 4]

Environments sleep instead of computing, so that many actors fit on few cores. Each actor is a node
of its own for rlpool, with one worker of one environment, but Ray's nodes are two of this machine,
which hold several actors each.

- ``shards``: 2 to 32 actors, two requests pending of 4 episodes of 10 to 40 steps per worker, next
  to no bytes. Steps are longer with more actors, so that the cores suffice. Processor time per
  shard: of the caller's thread, of its process with Ray's threads in it, and of the head's raylet,
  which keeps the caller's object store. The mean of up to 8 actors is what the model takes, larger
  runs check it. ``busy`` is the time that the workers slept, ``rounds`` the mean number of shards
  of a node in a request, measured and by the dispatcher's rule.
- ``bytes``: 2 actors whose observations are large; what a shard costs more than there, per GB.
- ``looks``: what it costs to ask the nodes what they are doing, with nothing else to do.
- ``wait``: what each further node adds to waiting for any of them, with hundreds of results.
- ``latency``: from ``execute`` to ``get`` of one episode of one step without a sleep.

The prediction. A node of ``w`` workers makes ``w r`` steps per second and asks for ``k`` rounds of
shards per request, by the dispatcher's rule: a quarter of what is left for it if there are two
shards of it, and not less than four rows of lanes, or half of what it has in all. The caller is
busy with shards, bytes and looks; the store with shards and bytes; the caller's network with bytes.
``n_nodes`` is how many of them keep the busiest of the three 0.9 busy: with more, they wait. Rates
of W1 and W2 are those of ``cluster.py`` here; ``llm`` are steps of 1 s, with observations of 4096
tokens. The model leaves out the switches of a network, Ray's own head node, and memory bandwidth.

Prints a JSON line per run, one with what was fitted and one per prediction.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import psutil
import ray
import torch
from cluster import simulated_cluster
from many_workers import bare_sleep_s
from ray.util.placement_group import placement_group
from workloads import (
    SEED,
    PolicyAgent,
    StragglerEnv,
    create_env,
    make_straggler_policy,
    parser_of,
    show,
)

from rlpool.cluster.batchers import ClusterEpisodeBatcher
from rlpool.cluster.ray_reservation import Reservation
from rlpool.cluster.ray_transport import RayTransport
from rlpool.workers.failure_policy import FailurePolicy

N_EPISODES, N_STEPS, N_PENDING = 4, (10, 40), 2
"""Per worker and request; shortest and longest episode; requests."""

TIMES = {2: 1, 4: 1, 8: 2, 16: 4, 32: 8}
"""By number of nodes, how many times as long as asked for a step sleeps."""

MOST_FITTED = 8

START_S = 170.0
"""What 32 actors may take to start on few cores."""

LARGE = 60_000
"""Numbers in a large observation, float32."""

NETWORK_GB_PER_S = 1.25
"""Of the caller's machine: 10 Gbit/s."""

MOST_BUSY = 0.9

MOST_NODES = 1000
"""Predictions end here: how Ray does with more is not for this to say."""


class SizedEnv(StragglerEnv):
    """Sleeps, and shows observations of any size.

    Args:
        n_numbers: Size of an observation.
        sleep_s: Seconds per step.
        shortest: Steps of the shortest episode.
        longest: Steps of the longest episode.
    """

    def __init__(self, n_numbers: int, sleep_s: float, shortest: int, longest: int) -> None:
        super().__init__(sleep_s, shortest, longest)
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (n_numbers,), np.float32)
        self._observation = np.ones(n_numbers, np.float32)


class PackedReservation(Reservation):
    """Puts several actors on a node."""

    def _has_room(self, n_nodes: int, patience_s: float) -> bool:
        self.group = placement_group([self._bundle] * n_nodes, strategy="SPREAD")
        return bool(self.group.wait(patience_s))


class PackedTransport(RayTransport):
    """Puts several actors on a node, and counts what it is asked for."""

    n_sent = n_looks = 0

    def __init__(self, n_nodes: int) -> None:
        bundle: dict[str, float] = {"CPU": 1}
        super().__init__(n_nodes, bundle, {})
        self._reservation = PackedReservation(n_nodes, bundle, {})

    def send(self, node: int, shard: Any) -> None:
        self.n_sent += 1
        super().send(node, shard)

    def look(self, node: int) -> None:
        self.n_looks += 1
        super().look(node)


# Measuring --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Processor time, and what it was spent on.

    Attributes:
        n: Nodes.
        wall_s: How long it took.
        n_requests: Requests.
        n_shards: Shards.
        n_looks: Questions.
        n_gb: Bytes of results, in GB.
        slept_s: How long environments slept, in all.
        thread_s: Processor time of the caller's thread.
        process_s: That of its process.
        store_s: That of the head's raylet.
    """

    n: int
    wall_s: float
    n_requests: int
    n_shards: int
    n_looks: int
    n_gb: float
    slept_s: float
    thread_s: float
    process_s: float
    store_s: float

    def per_shard(self, name: str) -> float:
        """Seconds of processor time per shard."""
        return float(getattr(self, name)) / self.n_shards


COSTS = ("thread_s", "process_s", "store_s")


@contextmanager
def opened(n: int, n_slots: int, make_env: Any) -> Iterator[tuple[Any, PackedTransport]]:
    """A batcher over so many nodes with a worker each."""
    transport = PackedTransport(n)
    batcher = ClusterEpisodeBatcher(
        lambda: transport,
        N_STEPS[1],
        n_slots,
        PolicyAgent,
        {"make_policy": make_straggler_policy},
        create_env,
        {"make_env": make_env, "n_lanes": 1},
        1,
        SEED,
        START_S,
        FailurePolicy(),
        None,
    )
    with batcher:
        yield batcher, transport


def spent(transport: PackedTransport, head: psutil.Process) -> dict[str, float]:
    """What was spent so far."""
    times = head.cpu_times()
    return {
        "wall_s": time.perf_counter(),
        "n_shards": transport.n_sent,
        "n_looks": transport.n_looks,
        "thread_s": time.thread_time(),
        "process_s": time.process_time(),
        "store_s": times.user + times.system,
    }


def measured(n: int, n_numbers: int, sleep_s: float, seconds: float, head: psutil.Process) -> Run:
    """Keep two requests pending for some time."""
    bare_s = bare_sleep_s(sleep_s)
    n_episodes = N_EPISODES * n
    env = partial(SizedEnv, n_numbers, sleep_s, *N_STEPS)
    with opened(n, N_PENDING * n_episodes, env) as (batcher, transport):
        for _ in range(N_PENDING + 1):
            batcher.execute(n_episodes)
        batcher.get()
        before = spent(transport, head)
        n_requests = n_steps = 0
        while time.perf_counter() < before["wall_s"] + seconds:
            n_steps += int(batcher.get().lengths.sum())
            batcher.execute(n_episodes)
            n_requests += 1
        after = spent(transport, head)
    figures: dict[str, Any] = {name: after[name] - before[name] for name in after}
    n_gb = n_steps * n_numbers * 4 / 1e9
    return Run(n=n, n_requests=n_requests, n_gb=n_gb, slept_s=n_steps * bare_s, **figures)


def look_s(n: int, seconds: float, head: psutil.Process) -> float:
    """Processor time of the caller's thread per question, when nothing else happens."""
    with opened(n, n, partial(SizedEnv, 1, seconds / 10, 10, 10)) as (batcher, transport):
        batcher.execute(n)
        before = spent(transport, head)
        batcher.get()
        after = spent(transport, head)
    return (after["thread_s"] - before["thread_s"]) / (after["n_looks"] - before["n_looks"])


def latency_s(n: int, n_requests: int) -> float:
    """Median time of a request of one short episode."""
    times = []
    with opened(n, n, partial(SizedEnv, 1, 0.0, 1, 1)) as (batcher, _):
        for _ in range(n_requests):
            start = time.perf_counter()
            batcher.execute(1)
            batcher.get()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


class Sleeper:
    """Keeps a caller waiting."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def wait_s(n_few: int = 32, n_many: int = 800) -> float:
    """What a caller that waits for results of two shards per node needs longer for each node."""
    kind: Any = ray.remote(num_cpus=1)(Sleeper)
    actor = kind.remote()
    ray.get(actor.sleep.remote(0.0))
    costs = {}
    for n in (n_few, n_many):
        references = [actor.sleep.remote(10.0) for _ in range(2 * n)]
        start_s = time.thread_time()
        for _ in range(200):  # as the transport does it: for one, then for all that are there too
            ray.wait(references, num_returns=1, timeout=0)
            ray.wait(references, num_returns=len(references), timeout=0)
        costs[n] = (time.thread_time() - start_s) / 200
    ray.kill(actor)
    return (costs[n_many] - costs[n_few]) / (n_many - n_few)


# The model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What workers of a larger cluster do.

    Attributes:
        name: Short name.
        steps_per_s: Of a worker.
        n_lanes: Environments of a worker.
        n_bytes: Of a step.
        n_steps: Mean length of an episode.
        n_episodes: Per worker and request.
    """

    name: str
    steps_per_s: float
    n_lanes: int
    n_bytes: int
    n_steps: float
    n_episodes: int


WORKS = (
    Work("W1", 97_000, 16, 44, 22, 4000),
    Work("W2", 19_500, 8, 148, 1000, 16),
    Work("llm", 1, 1, 4 * 4096, 10, 4),
)


def rounds(n_episodes: int, n_least: int, n_lanes: int, n_nodes: int = 16) -> float:
    """Shards of a request per node, by the dispatcher's rule.

    Args:
        n_episodes: Per node.
        n_least: Episodes of the smallest shard.
        n_lanes: Episodes come in multiples of this.
        n_nodes: Nodes; the result hardly depends on it.
    """
    left, n_shards = n_episodes * n_nodes, 0
    while left > 0:
        size = max(min(4 * n_least, n_episodes / 2), left / (2 * n_nodes))
        left -= max(n_least, int(size) // n_lanes * n_lanes)
        n_shards += 1
    return n_shards / n_nodes


class Fitted:
    """What shards, bytes and looks cost.

    Args:
        shards: Runs with next to no bytes.
        large: A run with large observations.
        look_s: Of the caller's thread per question.
        wait_s: By how much a wait takes longer for each node.
    """

    def __init__(self, shards: Sequence[Run], large: Run, look_s: float, wait_s: float) -> None:
        few = [run for run in shards if run.n <= MOST_FITTED]
        self.look_s, self.wait_s = look_s, wait_s
        self._per_shard, self.per_gb = {}, {}
        for name in COSTS:
            self._per_shard[name] = float(np.mean([run.per_shard(name) for run in few]))
            rest_s = getattr(large, name) - large.n_shards * self.per_shard(name, large.n)
            self.per_gb[name] = rest_s / large.n_gb

    def per_shard(self, name: str, n: int) -> float:
        """Processor time per shard with so many nodes."""
        return self._per_shard[name] + (0.0 if name == "store_s" else n * self.wait_s)

    def shares(self, work: Work, n_workers: int, n: int) -> dict[str, float]:
        """How busy the caller's thread, its store and its network are with so many nodes."""
        n_episodes = work.n_episodes * n_workers
        n_rounds = rounds(n_episodes, work.n_lanes * max(1, n_workers // 2), work.n_lanes)
        n_steps_per_s = n * n_workers * work.steps_per_s
        shards_per_s = n * n_rounds * work.steps_per_s / (work.n_episodes * work.n_steps)
        gb_per_s = n_steps_per_s * work.n_bytes / 1e9
        looks_s = n / max(0.5, 0.01 * n) * self.look_s
        found = {
            name: shards_per_s * self.per_shard(name, n) + gb_per_s * self.per_gb[name]
            for name in ("thread_s", "store_s")
        }
        return {
            "caller": found["thread_s"] + looks_s,
            "store": found["store_s"],
            "network": gb_per_s / NETWORK_GB_PER_S,
        }

    def predict(self, work: Work, n_workers: int) -> dict[str, Any]:
        """The largest cluster that nothing here slows down."""
        n = 1
        while n < MOST_NODES and max(self.shares(work, n_workers, n + 1).values()) <= MOST_BUSY:
            n += 1
        shares = self.shares(work, n_workers, n)
        return {
            "predicted": work.name,
            "workers_per_node": n_workers,
            "n_nodes": n,
            "n_workers": n * n_workers,
            "shares": {name: round(share, 2) for name, share in shares.items()},
        }


def show_run(kind: str, run: Run, fitted: Fitted) -> None:
    """Print a run beside what was fitted."""
    figures = {
        name.replace("_s", "_ms"): [
            round(1e3 * s, 2) for s in (run.per_shard(name), fitted.per_shard(name, run.n))
        ]
        for name in COSTS
    }
    show(
        {
            "kind": kind,
            "n_nodes": run.n,
            "busy": round(run.slept_s / run.wall_s / run.n, 3),
            "shards_per_s": round(run.n_shards / run.wall_s, 1),
            "gb_per_s": round(run.n_gb / run.wall_s, 3),
            "rounds": [
                round(n, 2)
                for n in (run.n_shards / run.n_requests / run.n, rounds(N_EPISODES, 1, 1, run.n))
            ],
            **figures,
            "load": [round(average, 2) for average in os.getloadavg()],
        }
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", choices=TIMES, default=list(TIMES))
    parser.add_argument("--sleep-ms", type=float, default=1.0, help="of the shortest steps")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sleep_s = args.sleep_ms / 1e3
    with simulated_cluster(2, max(args.nodes), 400_000_000) as cluster:
        head = psutil.Process(cluster.head_node.all_processes["raylet"][0].process.pid)
        shards = [measured(n, 1, TIMES[n] * sleep_s, args.seconds, head) for n in args.nodes]
        large = measured(2, LARGE, sleep_s, args.seconds, head)
        fitted = Fitted(shards, large, look_s(2, args.seconds, head), wait_s())
        single_s = latency_s(2, 100)
    for kind, run in [*(("shards", run) for run in shards), ("bytes", large)]:
        show_run(kind, run, fitted)
    show(
        {
            "look_ms": round(1e3 * fitted.look_s, 2),
            "latency_ms": round(1e3 * single_s, 2),
            "wait_us_per_node": round(1e6 * fitted.wait_s, 2),
            "s_per_gb": {name: round(cost, 2) for name, cost in fitted.per_gb.items()},
        }
    )
    for work in WORKS:
        for n_workers in (1, 32):
            show(fitted.predict(work, n_workers))


if __name__ == "__main__":
    main()
