"""Draw a timeline of lanes: episodes, a straggler, and a worker that is killed.

A real run of three workers with three lanes, whose environments record the beginning and end of
episodes in a file. Two requests of 24 episodes are pending. Episode 4 of the first is long; in
episode 10, the worker kills itself once with SIGKILL.

    python docs/pictures/lanes.py --output docs/pictures/lanes.svg
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch

from rlpool import EpisodeBatcher, GymEnv

N_WORKERS, N_LANES = 3, 3
N_EPISODES = 24  # of each request
STEP_S = 0.005  # sleep of a step; the lanes of a worker step one after another
STRAGGLER, KILLED = 4, 10  # episodes of the first request
COLOURS = ("#00897b", "#ffb300")  # of the two requests


class NotedEnv(gym.Env):
    """Episodes of a given length, recorded in a file."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, lane: int, notes: str) -> None:
        self.worker = int(re.findall(r"\d+", multiprocessing.current_process().name)[-1])
        self.lane, self.notes = lane, Path(notes)
        self.episode = (-1, -1)

    def note(self, what: str) -> None:
        row = self.worker * N_LANES + self.lane
        line = " ".join(map(str, (what, time.monotonic(), row, *self.episode)))
        with self.notes.open("a") as file:  # a single write of a short line is atomic
            file.write(f"{line}\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if options:  # the first reset, before any request, has none
            self.episode = tuple(int(options[name]) for name in ("request", "episode"))
            self.length = int(options["length"])
            self.note("begin")
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        time.sleep(STEP_S)
        self.t += 1
        if (
            self.episode == (0, KILLED)
            and self.t == 10
            and not (self.notes.parent / "once").exists()
        ):
            (self.notes.parent / "once").touch()
            self.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        has_ended = self.t == self.length
        if has_ended:
            self.note("end")
        return np.zeros(1, np.float32), 1.0, has_ended, False, {}


class Still(torch.nn.Module):
    def forward(self, observation):
        return {"action": torch.zeros(observation.n_elems(), dtype=torch.int64)}


def create_env(seed, notes):
    return GymEnv([NotedEnv(lane, notes) for lane in range(N_LANES)], seed)


class Bar(NamedTuple):
    """One attempt at an episode, in seconds since the first ``execute``."""

    row: int
    request: int
    episode: int
    begin_s: float
    end_s: float
    has_ended: bool


def run() -> tuple[list[Bar], list[float]]:
    """Collect two requests; returns the bars of the lanes, and the arrival times of results."""
    lengths = np.random.default_rng(3).integers(8, 40, (2, N_EPISODES))
    lengths[0, STRAGGLER] = 110
    logging.basicConfig(level=logging.WARNING)  # shows the restart
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        with EpisodeBatcher(
            n_timesteps=110,
            n_slots=2 * N_EPISODES,
            create_agent=Still,
            create_env=create_env,
            env_args={"notes": str(notes)},
            n_workers=N_WORKERS,
            seed=0,
        ) as batcher:
            start_s = time.monotonic()
            for request, row in enumerate(lengths):
                env_info = {"request": request, "episode": np.arange(N_EPISODES), "length": row}
                batcher.execute(N_EPISODES, env_info=env_info)
            results_s = []
            for row in lengths:
                episodes = batcher.get()
                results_s.append(time.monotonic() - start_s)
                assert episodes.lengths.tolist() == row.tolist()  # including the killed one
        lines = [line.split() for line in notes.read_text().splitlines()]
    return bars_of(lines, start_s), results_s


def bars_of(lines: list[list[str]], start_s: float) -> list[Bar]:
    """Convert the records to attempts at episodes."""
    running: dict[int, tuple[int, int, float]] = {}
    bars = []
    for what, noted_s, *numbers in lines:
        moment_s = float(noted_s) - start_s
        row, request, episode = map(int, numbers)
        # The death of a worker ends the episodes of all its lanes.
        worker = row // N_LANES
        lanes = range(worker * N_LANES, (worker + 1) * N_LANES) if what == "killed" else [row]
        if what == "begin":
            running[row] = (request, episode, moment_s)
            continue
        bars += [
            Bar(lane, *running.pop(lane), moment_s, what == "end")
            for lane in lanes
            if lane in running
        ]
    return bars


def draw(bars: list[Bar], results_s: list[float], output: str) -> None:
    """One row per lane, one bar per episode."""
    import matplotlib as mpl  # here, because workers import this file too
    from matplotlib.figure import Figure

    lost = next(bar for bar in bars if not bar.has_ended and bar.episode == KILLED)
    again = next(bar for bar in bars if bar.has_ended and (bar.request, bar.episode) == (0, KILLED))
    # The killed worker is on top: it varies from run to run.
    worker = lost.row // N_LANES
    order = sorted(range(N_WORKERS * N_LANES), key=lambda row: (row // N_LANES != worker, row))
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots()
    for bar in bars:
        length_s = bar.end_s - bar.begin_s
        look = {"facecolor": COLOURS[bar.request], "edgecolor": "white", "linewidth": 0.8}
        if not bar.has_ended:
            look = {"facecolor": "#e0e0e0", "edgecolor": "#c62828", "hatch": "////"}
        height = order.index(bar.row)
        axes.barh(height, length_s, left=bar.begin_s, height=0.82, **look)
        if length_s > 0.06:
            middle_s = bar.begin_s + length_s / 2
            is_straggler = (bar.request, bar.episode) == (0, STRAGGLER)
            name = f"{bar.episode}, a straggler" if is_straggler else str(bar.episode)
            axes.text(middle_s, height, name, ha="center", va="center", fontsize=8)
    remarks = [
        (f"worker {worker} is killed", (lost.end_s, -0.4), 0.0),
        ("what it lost runs again", (again.begin_s + 0.1, -0.4), 0.3),
    ]
    for text, place, shift_s in remarks:
        axes.annotate(
            text,
            place,
            (place[0] + shift_s, -1.35),
            arrowprops={"arrowstyle": "->", "color": "#424242"},
            fontsize=9,
            ha="left" if shift_s else "right",
            va="center",
        )
    for moment_s, colour, name in zip(results_s, COLOURS, ("first", "second"), strict=True):
        axes.axvline(moment_s, color=colour, linewidth=2, linestyle="--")
        axes.text(moment_s, N_WORKERS * N_LANES - 0.35, f"get(): {name}", ha="right", fontsize=9)
    names = [f"worker {row // N_LANES}, lane {row % N_LANES}" for row in order]
    axes.set_yticks(range(len(names)), names)
    for edge in range(1, N_WORKERS):
        axes.axhline(edge * N_LANES - 0.5, color="#9e9e9e", linewidth=0.8)
    axes.set(xlabel="seconds since execute", ylim=(N_WORKERS * N_LANES - 0.1, -2), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    with mpl.rc_context({"svg.hashsalt": "rlpool"}):
        figure.savefig(output, metadata={"Date": None} if output.endswith("svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="lanes.svg", help="output file, .svg or .png")
    output = parser.parse_args().output
    draw(*run(), output)


if __name__ == "__main__":
    main()
