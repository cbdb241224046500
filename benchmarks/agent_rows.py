"""Cost of a fixed number of rows: ``agent_rows`` compared with one row per lane.

    python benchmarks/agent_rows.py [--lanes 1 4 8 16 32] [--rows 8 16 32] [--windows 5]

An MLP (4-64-64-2) on CartPole, a GRU (4-64, 64 hidden units) on CartPole, and the Nature CNN on
frames of 84 × 84 × 4 with steps at no cost, all in this process, on one thread. Windows alternate
between the same agent with and without ``agent_rows``; ``times`` is the median ratio of the times
per batch step. Prints a JSON line per agent and number of lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from throughput import batcher_window
from torch import nn
from workloads import FramesEnv, in_turns, make_cartpole, parser_of, quartiles, show

from rlpool import Agent, DictTensor, EpisodeBatcher, GymEnv, sample_categorical


class Mlp(nn.Module, Agent):
    """A policy without memory."""

    n_noise = 1

    def __init__(self, body: nn.Module, n_features: int, n_actions: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(n_features, n_actions)

    def __call__(self, state: Any, observation: Any, *_: Any) -> Any:
        features = self.body(observation["frame"].float())
        action, _ = sample_categorical(self.head(features), observation["noise"])
        return DictTensor(), DictTensor({"action": action}), DictTensor()


class Gru(nn.Module, Agent):
    """A policy with a memory."""

    n_noise = 1

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 64), nn.Linear(64, 2)

    def initial_state(self, agent_info: Any, n_rows: int) -> DictTensor:
        return DictTensor({"memory": torch.zeros(n_rows, 64)})

    def __call__(self, state: Any, observation: Any, *_: Any) -> Any:
        memory = self.cell(observation["frame"], state["memory"])
        action, _ = sample_categorical(self.head(memory), observation["noise"])
        return state, DictTensor({"action": action}), DictTensor({"memory": memory})


class Frames(nn.Module):
    """The convolutions of Mnih et al. 2015."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        )  # fmt: skip

    def forward(self, frames: torch.Tensor) -> Any:
        return self.layers(frames.permute(0, 3, 1, 2) / 255)


AGENTS: dict[str, tuple[Callable[[], Agent], Callable[[], Any]]] = {
    "MLP": (
        lambda: Mlp(
            nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), 64, 2
        ),
        make_cartpole,
    ),
    "GRU": (Gru, make_cartpole),
    "Nature CNN": (lambda: Mlp(Frames(), 512, 6), partial(FramesEnv, 50)),
}


def compare(name: str, n_lanes: int, args: Any) -> dict[str, float]:
    """Return the ratio of the times per batch step, by number of rows."""
    create_agent, make_env = AGENTS[name]
    n_episodes = 8 * n_lanes

    def create_env(seed: int) -> GymEnv:
        return GymEnv([make_env() for _ in range(n_lanes)], seed)

    with ExitStack() as stack:

        def window(rows: int | None) -> Any:
            batcher = EpisodeBatcher(
                100, n_episodes, create_agent, None, create_env, n_workers=0, agent_rows=rows
            )
            return partial(batcher_window, stack.enter_context(batcher), n_episodes)

        turns = {str(rows): window(rows) for rows in args.rows}
        _, others = in_turns(window(None), turns, args.windows, args.seconds)
    return {rows: round(1 / quartiles(r)["median"], 2) for rows, (_, r) in others.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--agents", nargs="+", choices=list(AGENTS), default=list(AGENTS))
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a window")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.agents:
        for n_lanes in args.lanes:
            times = compare(name, n_lanes, args)
            show({"agent": name, "lanes": n_lanes, "times": times})


if __name__ == "__main__":
    main()
