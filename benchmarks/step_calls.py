"""Calls of rlpool's functions per batch step, a measure that does not depend on machine load.

    python benchmarks/step_calls.py [--workloads W1 infos W2 V1 windows request] [--functions]

Every workload runs in this process (``n_threads=0``). After a warm-up request, ``sys.setprofile``
counts calls of the package's functions, including lambdas, generators and comprehensions, over
whole requests: ends of episodes, resets and the cost of a request are included. They are divided by
the number of calls of the agent. Calls by agents (``DictTensor``, ``sample_categorical``) count
too.

``request`` counts the calls of the caller for requests of 32 episodes of W1 that one worker runs,
divided by the number of requests.

``--functions`` lists each workload's functions with their calls per step.

Prints one JSON line per workload, with its budget, which a test enforces.
"""

from __future__ import annotations

import select
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from workloads import (
    SEED,
    V1,
    WORKLOADS,
    PolicyAgent,
    create_lanes,
    make_batcher,
    make_window_batcher,
    parser_of,
    show,
)

import rlpool
from rlpool import DictTensor, EpisodeBatcher, TemporalDictTensor

PACKAGE = str(Path(rlpool.__file__).parent)

BUDGETS = {"W1": 30.0, "infos": 42.0, "W2": 19.0, "V1": 75.0, "windows": 26.0, "request": 110.0}
"""Maximum number of calls per batch step or request, by workload."""

N_WARM, N_COUNTED = 1, 2
"""Requests before the count, and during it."""


class StatefulAgent(PolicyAgent):
    """The policy of W1 with a state, six numbers of noise, and ``agent_info``."""

    def __init__(self) -> None:
        super().__init__(WORKLOADS["W1"].make_policy)
        self.n_noise = 6

    def initial_state(self, agent_info: DictTensor | None, n_rows: int) -> DictTensor:
        return DictTensor({"sum": torch.zeros(n_rows)})

    def __call__(
        self,
        state: DictTensor | None,
        observation: DictTensor,
        agent_info: DictTensor | None = None,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        assert state is not None
        assert agent_info is not None
        frame = observation["frame"] * agent_info["scale"].unsqueeze(1)
        output = self.policy(frame, observation["noise"][:, :1])
        new_state = DictTensor({"sum": state["sum"] + observation["reward"]})
        return state, DictTensor(output), new_state


AGENT_CALLS = {kind.__call__.__code__ for kind in (PolicyAgent, StatefulAgent)}


@contextmanager
def counting(calls: Counter[str]) -> Iterator[None]:
    """Count calls of rlpool's functions in a ``with`` block, and calls of agents as ``agent``."""

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call":
            if code in AGENT_CALLS:
                calls["agent"] += 1
            elif code.co_filename.startswith(PACKAGE):
                calls[f"{code.co_filename[len(PACKAGE) + 1 :]}: {code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def calls_of_episodes(batcher: EpisodeBatcher, n_episodes: int, *infos: Any) -> Counter[str]:
    """Count the calls of some requests for episodes."""
    calls: Counter[str] = Counter()
    with batcher:
        for number in range(N_WARM + N_COUNTED):
            with counting(calls if number >= N_WARM else Counter()):
                batcher.execute(n_episodes, *infos)
                batcher.get()
    return calls


def calls_of_requests() -> Counter[str]:
    """Count the caller's calls in some requests, after each result has arrived."""
    calls: Counter[str] = Counter()
    with make_batcher(WORKLOADS["W1"], 32, n_threads=1) as batcher:
        for number in range(N_WARM + 4 * N_COUNTED):
            counted = calls if number >= N_WARM else Counter()
            with counting(counted):
                batcher.execute(32)
            select.select([batcher], [], [])
            with counting(counted):
                batcher.get()
            counted["agent"] += 1
    return calls


def calls_of_windows() -> Counter[str]:
    """Count the calls of some windows of 128 steps of 8 lanes that restart."""
    calls: Counter[str] = Counter()
    with make_window_batcher(WORKLOADS["W1"], 128, n_threads=0, n_lanes=8) as batcher:
        batcher.reset()
        for number in range(N_WARM + 4 * N_COUNTED):
            with counting(calls if number >= N_WARM else Counter()):
                batcher.execute()
                batcher.get()
    return calls


def calls_with_infos() -> Counter[str]:
    """Count the calls of W1 with all optional parts of a request."""
    n_episodes, w1 = 200, WORKLOADS["W1"]
    batcher = EpisodeBatcher(
        w1.n_timesteps,
        n_episodes,
        StatefulAgent,
        {},
        create_lanes,
        {"workload": w1, "auto_reset": False},
        n_threads=0,
        seeds=SEED,
    )
    agent_info = {"scale": torch.linspace(0.5, 1.5, n_episodes)}
    env_info = {"low": torch.full((n_episodes,), -0.05), "high": torch.full((n_episodes,), 0.05)}
    return calls_of_episodes(batcher, n_episodes, agent_info, env_info)


def calls_of(name: str) -> Counter[str]:
    """Count the calls of a workload of other benchmarks, in one process."""
    workload = V1[0] if name == "V1" else WORKLOADS[name]
    n_episodes = {"W1": 200, "W2": 8, "V1": 256}[name]
    return calls_of_episodes(make_batcher(workload, n_episodes, n_threads=0), n_episodes)


COUNTS: dict[str, Callable[[], Counter[str]]] = {
    **{name: (lambda name=name: calls_of(name)) for name in ("W1", "W2", "V1")},
    "infos": calls_with_infos,
    "windows": calls_of_windows,
    "request": calls_of_requests,
}


def per_step(calls: Counter[str]) -> dict[str, float]:
    """Return the calls by function, per call of the agent."""
    return {k: n / calls["agent"] for k, n in calls.most_common() if k != "agent"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", choices=list(BUDGETS), default=list(BUDGETS))
    parser.add_argument("--functions", action="store_true", help="list the functions")
    arguments = parser.parse_args()
    for name in arguments.workloads:
        by_function = per_step(COUNTS[name]())
        total = round(sum(by_function.values()), 1)
        show({"workload": name, "calls_per_step": total, "budget": BUDGETS[name]})
        for function, n_calls in by_function.items() if arguments.functions else ():
            print(f"{n_calls:8.2f}  {function}")
