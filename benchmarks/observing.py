"""What it costs that a program is looked at: CPU time per batch step of W1.

    python benchmarks/observing.py [--seconds 100]

One batcher with ``n_threads=0`` runs small requests, each in one of several ways, in random order:

- ``alone``: as it is; ``again`` the same once more: what it deviates from 1 is noise
- ``watched``: as it is, while another process reads all that ``top`` shows, 25 times as often

Each is compared with the request of another way in the same round. Times are CPU time of this
thread, as programs next to it cost less of that than of the time of day; they still cost some, so
look at ``again`` first. Prints one JSON line per comparison.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from workloads import WORKLOADS, make_batcher, parser_of, quartiles, show

from rlpool import EpisodeBatcher

N_EPISODES = 120
N_LANES = WORKLOADS["W1"].n_lanes

WATCHER = """
import sys, time
from rlpool.observe.top import EVERY_S, Program

program = Program(int(sys.argv[1]))
print("ready", flush=True)
while True:
    program.read()
    time.sleep(EVERY_S / 25)
"""

COMPARISONS = {"again": "alone", "watched": "alone"}


def step_us(batcher: EpisodeBatcher) -> float:
    """CPU time of a batch step of all lanes in a request, in microseconds."""
    start = time.thread_time()
    batcher.execute(N_EPISODES)
    result = batcher.get()
    spent_s = time.thread_time() - start
    assert result is not None
    return 1e6 * N_LANES * spent_s / int(result.lengths.sum())


@contextmanager
def watched(watcher: subprocess.Popen[str]) -> Any:
    watcher.send_signal(signal.SIGCONT)
    yield
    watcher.send_signal(signal.SIGSTOP)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=100.0)
    args = parser.parse_args()
    with (
        make_batcher(WORKLOADS["W1"], N_EPISODES, 0) as batcher,
        subprocess.Popen(
            [sys.executable, "-c", WATCHER, str(os.getpid())], stdout=subprocess.PIPE, text=True
        ) as watcher,
    ):
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "ready\n"
        watcher.send_signal(signal.SIGSTOP)
        ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "alone": nullcontext,
            "again": nullcontext,
            "watched": partial(watched, watcher),
        }
        try:
            times = in_rounds(batcher, ways, args.seconds)
        finally:
            watcher.kill()
    for way, other in COMPARISONS.items():
        pairs = zip(times[way], times[other], strict=False)
        ratio = quartiles([mine / theirs for mine, theirs in pairs], 4)
        us = quartiles(times[way], 1)["median"]
        show({"way": way, "compared_with": other, "step_us": us, **ratio})


def in_rounds(
    batcher: EpisodeBatcher, ways: dict[str, Callable[[], Any]], seconds: float
) -> dict[str, list[float]]:
    """Requests in all ways, round after round; CPU time of a batch step in each of them."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    step_us(batcher)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for way in random.sample(list(ways), len(ways)):
            with ways[way]():
                times[way].append(step_us(batcher))
    return times


if __name__ == "__main__":
    main()
