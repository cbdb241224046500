"""What it costs to look at a running program: W1 while ``top`` watches it, and while it is traced.

    python benchmarks/observing.py [--windows 10] [--seconds 2]

Windows of the batcher alternate with windows of the same batcher that is looked at: ``top`` is
another process that reads what ``python -m rlpool top`` shows, twice a second; ``trace`` is
``rlpool.trace``, whose file is written after the window. ``ratio`` compares each of these windows
with the mean of the two windows around it. What workers note all the time is not left out in any of
them.

Prints one JSON line per way of looking, and every window to stderr.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path

from workloads import (
    WORKLOADS,
    in_turns,
    make_batcher,
    noise_of,
    parser_of,
    quartiles,
    show,
)

import rlpool
from rlpool import EpisodeBatcher
from rlpool.top import EVERY_S

N_EPISODES = 2000

WATCHER = """
import sys
from rlpool.top import Program

program = Program(int(sys.argv[1]))
print("ready", flush=True)
while sys.stdin.readline():  # a line for each look
    program.read()
"""


def window(batcher: EpisodeBatcher, seconds: float, watcher: subprocess.Popen[str] | None) -> float:
    """Collect for at least this long; returns steps per second."""
    n_steps, n_looks = 0, 0
    start = now = time.perf_counter()
    while now - start < seconds:
        batcher.execute(N_EPISODES)
        result = batcher.get()
        n_steps += int(result.lengths.sum())
        del result
        now = time.perf_counter()
        if watcher is not None and watcher.stdin is not None and now - start > n_looks * EVERY_S:
            n_looks += 1
            watcher.stdin.write("\n")
            watcher.stdin.flush()
    return n_steps / (now - start)


def traced_window(batcher: EpisodeBatcher, path: Path, seconds: float) -> float:
    """The same within ``rlpool.trace``."""
    with rlpool.trace(path):
        return window(batcher, seconds, None)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    with (
        make_batcher(WORKLOADS["W1"], N_EPISODES) as batcher,
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", WATCHER, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as watcher,
    ):
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        with closing(watcher.stdin):
            assert watcher.stdout.readline() == "ready\n"
            others = {
                "top": lambda seconds: window(batcher, seconds, watcher),
                "trace": partial(traced_window, batcher, Path(folder) / "trace.json"),
            }
            base, found = in_turns(
                lambda seconds: window(batcher, seconds, None), others, args.windows, args.seconds
            )
    for name, (_, ratios) in found.items():
        ratio = quartiles(ratios)
        show({"looking": name, "ratio": ratio["median"], **ratio, "noise": noise_of(base)})


if __name__ == "__main__":
    main()
