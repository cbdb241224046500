"""Speed-up of a training loop by workers: proximal policy optimisation on CartPole-v1.

    python benchmarks/ppo_loop.py [--lanes 16] [--windows 7] [--seconds 4]

The agent and the learning of ``tutorials/ppo.py``, windows of 128 steps of all lanes, torch on one
thread. The contenders alternate, and count the steps that they have learned from:

- ``no workers``: a ``Batcher`` with ``n_threads=0``
- ``2 workers``: half of the lanes in each
- ``2 workers, ahead``: the next window is collected while this one is learned from, so its actions
  come from the previous parameters

``ratio`` compares each of them with the adjacent windows of ``no workers``. Prints a JSON line per
contender. ``learning_speed.py`` compares whole scripts with other libraries.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import gymnasium
import torch
from workloads import SEED, Window, in_turns, parser_of, quartiles, show

from rlpool import Batcher

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))
import ppo

SIZES = {"n_inputs": 4, "n_actions": 2}


class Loop:
    """A training loop over a batcher.

    Args:
        n_lanes: Total number of lanes.
        n_workers: Worker processes, 0 for none.
        is_ahead: Whether the next window is requested before this one is learned from.
    """

    def __init__(self, n_lanes: int, n_workers: int, is_ahead: bool = False) -> None:
        self._n_lanes, self._is_ahead = n_lanes, is_ahead
        torch.manual_seed(SEED)
        self._agent = ppo.ActorCritic(**SIZES)
        parameters = self._agent.parameters()
        self._optimizer = torch.optim.Adam(parameters, ppo.LEARNING_RATE, eps=1e-5, fused=True)
        self._batcher = Batcher(
            n_timesteps=ppo.N_STEPS,
            create_agent=ppo.ActorCritic,
            agent_args=SIZES,
            create_env=ppo.create_env,
            env_args={"env_id": "CartPole-v1", "n_envs": n_lanes // (n_workers or 1)},
            n_threads=n_workers,
            seeds=SEED,
        )
        self.close = self._batcher.close
        self._batcher.reset()

    def window(self, seconds: float) -> float:
        """Train for at least this long; returns the steps learned from per second."""
        n_steps = 0
        start = now = time.perf_counter()
        self._request()
        while now - start < seconds:
            collected = self._batcher.get()
            if self._is_ahead:
                self._request()
            ppo.learn(self._agent, self._optimizer, collected)
            if not self._is_ahead:
                self._request()
            n_steps += ppo.N_STEPS * self._n_lanes
            now = time.perf_counter()
        self._batcher.get()
        return n_steps / (now - start)

    def _request(self) -> None:
        self._batcher.update(self._agent.state_dict())
        self._batcher.execute()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0)
    args: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(1)
    gymnasium.logger.min_level = gymnasium.logger.ERROR
    with ExitStack() as stack:
        loops = {
            "no workers": Loop(args.lanes, 0),
            "2 workers": Loop(args.lanes, 2),
            "2 workers, ahead": Loop(args.lanes, 2, is_ahead=True),
        }
        for loop in loops.values():
            stack.callback(loop.close)
        windows: dict[str, Window] = {name: loop.window for name, loop in loops.items()}
        base, others = in_turns(windows.pop("no workers"), windows, args.windows, args.seconds)
    show(
        {"loop": "no workers", "lanes": args.lanes, "steps_per_s": round(quartiles(base)["median"])}
    )
    for name, (rates, ratios) in others.items():
        ratio = quartiles(ratios)
        figures = {"ratio": ratio["median"], "quartiles": ratio["quartiles"]}
        show({"loop": name, **figures, "steps_per_s": round(quartiles(rates)["median"])})


if __name__ == "__main__":
    main()
