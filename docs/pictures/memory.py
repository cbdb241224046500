"""Draw the memory of a request: slots with the steps of episodes, and chunks of longer ones.

Two real runs with the same seeds. In the first, every episode has its own slot; in the second,
slots are shorter than most episodes. Observations contain the number of the worker.

    python docs/pictures/memory.py --output docs/pictures/memory.svg
"""

from __future__ import annotations

import argparse
import multiprocessing
import re

import gymnasium as gym
import numpy as np
import torch

from rlpool import EpisodeBatcher, GymEnv, TemporalDictTensor

LENGTHS = [12, 33, 7, 40, 21, 28, 5, 17]  # steps of the episodes
LONG, SHORT = 40, 16  # steps of a slot in the two runs
N_WORKERS, N_LANES = 2, 2
COLOURS = ("#00897b", "#ffb300")  # of the workers


class WorkerEnv(gym.Env):
    """Observes the number of the worker that runs it."""

    observation_space = gym.spaces.Box(0.0, 1.0, (), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        name = multiprocessing.current_process().name
        self.worker = np.float32(re.findall(r"\d+", name)[-1])
        self.t, self.length = 0, int(options["length"]) if options else 1
        return self.worker, {}

    def step(self, action):
        self.t += 1
        return self.worker, 1.0, self.t == self.length, False, {}


class Still(torch.nn.Module):
    def forward(self, observation):
        return {"action": torch.zeros(observation.n_elems(), dtype=torch.int64)}


def create_env(seed):
    return GymEnv([WorkerEnv() for _ in range(N_LANES)], seed)


def collect(n_timesteps: int) -> TemporalDictTensor:
    """Run all episodes, in slots of ``n_timesteps``."""
    factories = {"create_agent": Still, "create_env": create_env}
    with EpisodeBatcher(
        n_timesteps, len(LENGTHS), **factories, n_workers=N_WORKERS, seed=0
    ) as batcher:
        batcher.execute(len(LENGTHS), env_info={"length": LENGTHS})
        episodes = batcher.get()
    assert episodes.lengths.tolist() == LENGTHS
    return episodes


def draw(episodes: TemporalDictTensor, joined: TemporalDictTensor, output: str) -> None:
    """Draw the block of the first run, and below it the rows of the second with their chunks."""
    import matplotlib as mpl  # here, because workers import this file too
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    figure = Figure(figsize=(9, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.2, 1])
    for axes, result in ((above, episodes), (below, joined)):
        for row, length in enumerate(result.lengths.tolist()):
            worker = int(result["frame"][row, 0])
            slot_steps = LONG if axes is above else SHORT
            for start in range(0, length, slot_steps):
                n_steps = min(slot_steps, length - start)
                look = {"facecolor": COLOURS[worker], "edgecolor": "white", "linewidth": 2}
                axes.add_patch(Rectangle((start, row - 0.4), n_steps, 0.8, **look))
                if axes is below and length > SHORT and n_steps > 3:  # it fits
                    name = f"chunk {start // SHORT}"
                    axes.text(start + n_steps / 2, row, name, ha="center", va="center", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)

    # The slots, and behind them those of two other keys.
    for behind, key in ((2, "reward"), (1, "action")):
        place = (0.5 * behind, -0.5 - 0.55 * behind)
        look = {"facecolor": "#fafafa", "edgecolor": "#9e9e9e", "zorder": -behind}
        above.add_patch(Rectangle(place, LONG, len(LENGTHS) + 1, **look))
        above.text(LONG + place[0], place[1] + 0.3, f"{key} ", ha="right", va="center", fontsize=8)
    above.add_patch(
        Rectangle(
            (0, -0.5), LONG, len(LENGTHS) + 1, facecolor="white", edgecolor="#424242", zorder=0
        )
    )
    above.text(LONG - 0.3, -0.2, "frame", ha="right", va="center", fontsize=8)
    for row in range(len(LENGTHS) + 1):
        above.plot([0, LONG], [row - 0.5] * 2, color="#bdbdbd", linewidth=0.6, zorder=1)
    slots = [*(f"slot {row}: row {row}" for row in range(len(LENGTHS))), "spare slot"]
    above.set_yticks(range(len(slots)), slots)
    above.text(
        LONG / 2,
        len(LENGTHS),
        "lanes without an episode write here",
        ha="center",
        va="center",
        fontsize=8,
        color="#616161",
    )
    above.text(
        LONG - 0.4, 6, "zeros: never written", ha="right", va="center", fontsize=8, color="#616161"
    )
    above.set(ylim=(len(slots) - 0.4, -1.9), title=f"n_timesteps={LONG}: a slot per episode")
    handles = [Patch(color=colour, label=f"worker {k}") for k, colour in enumerate(COLOURS)]
    above.legend(handles=handles, loc="upper left", ncols=2, fontsize=8, frameon=False)

    below.set_yticks(range(len(LENGTHS)), [f"row {row}" for row in range(len(LENGTHS))])
    title = f"n_timesteps={SHORT}: longer episodes take several slots; get() joins their chunks"
    below.set(ylim=(len(LENGTHS) - 0.4, -0.6), xlabel="step", xlim=(0, LONG + 1.5), title=title)
    with mpl.rc_context({"svg.hashsalt": "rlpool"}):
        figure.savefig(output, metadata={"Date": None} if output.endswith("svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="memory.svg", help="output file, .svg or .png")
    draw(collect(LONG), collect(SHORT), parser.parse_args().output)


if __name__ == "__main__":
    main()
