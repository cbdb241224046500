"""How fast a convolutional policy collects frames, with one group of lanes and with two.

    python benchmarks/device_agent.py [--device cuda] [--lanes 16] [--workers 2] [--windows 5]

Environments in worker processes (``ParallelEnvManager``), the policy in this one, called through
``DeviceAgent`` by a batcher with ``n_threads=0``: 84 × 84 × 4 uint8 frames, the network of Mnih et
al. (2015), a step of 0.3 ms, which either computes or waits, as for another machine.

- ``one``: in each step all lanes wait for the policy, and the policy for all lanes.
- ``two``: ``min_ready`` is half of the lanes. While the policy is called for half of them, with
  copies to the device and back, the other half steps. Each call computes all rows, so that results
  do not depend on which lanes were ready: ``rows_per_step`` says how many for each step made.

Both take turns, window by window; ``ratio`` is steps per second of ``two`` by the mean of the two
windows of ``one`` around it. ``device_share`` is the part of the time that the network takes: on
CUDA between two events on the device's stream, so copies are left out and gaps between kernels are
not; elsewhere by the clock. The device is a GPU if there is one. Prints a JSON line for each kind
of step.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from throughput import batcher_window
from workloads import (
    SEED,
    NaturePolicy,
    PolicyAgent,
    SlowFramesEnv,
    in_turns,
    noise_of,
    parser_of,
    quartiles,
    show,
)

from rlpool import DeviceAgent, EpisodeBatcher, ParallelEnvManager

EPISODE_STEPS = 100
"""Of every episode: a request lasts two episodes of each lane."""


class TimedAgent(PolicyAgent):
    """The policy on a device, which notes for how many rows and how long it is called there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(NaturePolicy)
        self.policy.to(device)
        self._device = device
        self._n_rows = 0
        self._times: list[Any] = []  # pairs of events, or seconds

    def __call__(self, *arguments: Any) -> Any:
        self._n_rows += arguments[1].n_elems()
        if self._device.type != "cuda":
            start = time.perf_counter()
            result = super().__call__(*arguments)
            self._times.append(time.perf_counter() - start)
            return result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(self._device))
        result = super().__call__(*arguments)
        end.record(torch.cuda.current_stream(self._device))
        self._times.append((begin, end))
        return result

    def taken(self) -> tuple[int, float]:
        """Rows and seconds since the last call of this, when all that was begun is over."""
        n_rows, times, self._n_rows, self._times = self._n_rows, self._times, 0, []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            times = [begin.elapsed_time(end) / 1e3 for begin, end in times]
        return n_rows, sum(times)


class Groups:
    """A batcher over all lanes.

    Args:
        args: The program's.
        computes: Whether steps use the core.
        min_ready: Lanes that are waited for.
    """

    def __init__(self, args: argparse.Namespace, computes: bool, min_ready: int | None) -> None:
        self._agent = TimedAgent(torch.device(args.device))
        self._n_episodes = 2 * args.lanes
        envs = [partial(SlowFramesEnv, EPISODE_STEPS, computes)] * args.lanes
        of_manager = {"envs_per_worker": -(-args.lanes // args.workers), "min_ready": min_ready}
        self.batcher = EpisodeBatcher(
            EPISODE_STEPS,
            self._n_episodes,
            create_agent=lambda: DeviceAgent(self._agent, args.device),
            create_env=lambda seed: ParallelEnvManager(envs, seed=seed, **of_manager),
            n_threads=0,
            seeds=SEED,
        )
        self._shares: list[float] = []
        self._rows_per_step: list[float] = []

    def window(self, seconds: float) -> float:
        """Collect; returns steps per second."""
        self._agent.taken()
        start = time.perf_counter()
        rate = batcher_window(self.batcher, self._n_episodes, seconds)
        n_rows, busy_s = self._agent.taken()
        elapsed_s = time.perf_counter() - start
        self._shares.append(busy_s / elapsed_s)
        self._rows_per_step.append(n_rows / (rate * elapsed_s))
        return rate

    def figures(self, rates: list[float]) -> dict[str, Any]:
        """Medians of the windows, without those that warmed up."""
        n = len(rates)
        return {
            "steps_per_s": round(quartiles(rates)["median"]),
            "device_share": quartiles(self._shares[-n:])["median"],
            "rows_per_step": quartiles(self._rows_per_step[-n:], 2)["median"],
        }


def measure(computes: bool, args: argparse.Namespace) -> dict[str, Any]:
    """One group and two, in turns."""
    one = Groups(args, computes, None)
    with one.batcher:
        two = Groups(args, computes, args.lanes // 2)
        with two.batcher:
            others = {"two": two.window}
            ones, compared = in_turns(one.window, others, args.windows, args.seconds)
    twos, ratios = compared["two"]
    ratio = quartiles(ratios)
    is_gpu = torch.device(args.device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(args.device) if is_gpu else args.device,
        "step": "computes" if computes else "waits",
        "n_lanes": args.lanes,
        "n_workers": args.workers,
        "ratio": ratio["median"],
        "quartiles": ratio["quartiles"],
        "n_windows": ratio["n"],
        "one_to_one": noise_of(ones),
        "one": one.figures(ones),
        "two": two.figures(twos),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lanes", type=int, default=16, help="environments in all")
    parser.add_argument("--workers", type=int, default=2, help="processes of environments")
    parser.add_argument("--windows", type=int, default=5, help="windows of each that count")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for computes in (True, False):
        show(measure(computes, args))


if __name__ == "__main__":
    main()
