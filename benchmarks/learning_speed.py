"""Speed of whole training loops, compared with CleanRL and Stable-Baselines3.

    python benchmarks/learning_speed.py --cleanrl FOLDER --cleanrl-python PYTHON --sb3-python PYTHON
        [--workloads cartpole half_cheetah pong] [--rounds 4] [--seconds 8] [--variants]

All use the same algorithm, environment, hyper-parameters and sizes: rlpool's tutorials unchanged,
CleanRL's scripts unchanged (``FOLDER`` holds ``ppo.py``, ``ppo_continuous_action.py`` and
``ppo_atari.py``), and Stable-Baselines3's ``PPO`` over a ``DummyVecEnv``. The whole run is timed,
including statistics, progress, files for TensorBoard (except Stable-Baselines3) and checkpoints
(only rlpool). Each is a separate program with its own interpreter; they alternate every few
seconds.

Start-up is excluded: the clock starts at the first progress after ``--warm-up`` seconds of
training, and the program is ended after another ``--seconds``. Torch uses one thread, on Pong two;
with ``--variants`` rlpool also runs with other numbers of workers.

Prints a JSON line per workload: steps per second, and rlpool's speed relative to the others in the
same round.

References:
    Huang et al. 2022, "CleanRL: High-quality single-file implementations of deep reinforcement
    learning algorithms"; Raffin et al. 2021, "Stable-Baselines3: Reliable reinforcement learning
    implementations".
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from workloads import ATARI, cleanrl_command, interpreter, note, parser_of, quartiles, show

ROOT = Path(__file__).resolve().parents[1]
STEPS = re.compile(rb"\s(\d+)/\d+ \[|SPS: (\d+)|\nsteps (\d+)")
"""Progress in the output of tqdm, CleanRL (one line per window), and ``BASELINES``."""

BASELINES = """
import sys, gymnasium, torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

class Show(BaseCallback):
    def _on_step(self):
        return True

    def _on_rollout_start(self):
        print(f"\\nsteps {self.num_timesteps}", flush=True)

def cartpole():
    env = make_vec_env("CartPole-v1", 4)
    return PPO("MlpPolicy", env, 2.5e-4, 128, 128, 4, clip_range=0.2, clip_range_vf=0.2,
               ent_coef=0.01)

def half_cheetah():
    env = VecNormalize(make_vec_env("HalfCheetah-v4", 1))
    return PPO("MlpPolicy", env, 3e-4, 2048, 64, 10, clip_range=0.2, clip_range_vf=0.2)

def pong():
    import ale_py
    env = VecFrameStack(make_atari_env("PongNoFrameskip-v4", 8), 4)
    return PPO("CnnPolicy", env, 2.5e-4, 128, 256, 4, clip_range=0.1, clip_range_vf=0.1,
               ent_coef=0.01)

torch.set_num_threads(int(sys.argv[2]))
globals()[sys.argv[1]]().learn(10_000_000, callback=Show())
"""
"""Stable-Baselines3 with the hyper-parameters of CleanRL and the tutorials."""


@dataclass(frozen=True)
class Workload:
    """An algorithm on an environment.

    Attributes:
        tutorial: rlpool's script.
        arguments: Its arguments.
        cleanrl: CleanRL's script.
        cleanrl_arguments: Its arguments.
        n_steps_per_window: Steps between two lines of CleanRL's output.
        n_threads: Threads of torch.
        variants: Further arguments of rlpool's script, by name.
        setup: Code that CleanRL's interpreter runs before the script.
    """

    tutorial: str
    arguments: tuple[str, ...]
    cleanrl: str
    cleanrl_arguments: tuple[str, ...]
    n_steps_per_window: int
    n_threads: int = 1
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)
    setup: str = ""


TWO_WORKERS = {"rlpool, 2 workers": ("--n-threads=2",)}
WORKLOADS = {
    "cartpole": Workload("ppo.py", (), "ppo.py", (), 4 * 128, variants=TWO_WORKERS),
    "half_cheetah": Workload(
        "ppo_continuous.py",
        (),
        "ppo_continuous_action.py",
        ("--env-id=HalfCheetah-v4",),
        2048,
    ),
    "pong": Workload(
        "ppo_atari.py",
        (),
        "ppo_atari.py",
        ("--env-id=PongNoFrameskip-v4",),
        8 * 128,
        n_threads=2,
        variants={
            "rlpool, no workers": ("--n-threads=0",),
            "rlpool, bfloat16": ("--bfloat16",),
        },
        setup=ATARI,
    ),
}


def commands(name: str, args: object, folder: str) -> dict[str, list[str]]:
    """Return the commands by contender."""
    workload = WORKLOADS[name]
    ours = [sys.executable, str(ROOT / "tutorials" / workload.tutorial), *workload.arguments]
    ours += ["--total-timesteps=10000000", f"--checkpoint={folder}/run.pt", f"--track={folder}"]
    found = {"rlpool": ours}
    if args.variants:
        found |= {which: [*ours, *more] for which, more in workload.variants.items()}
    if args.cleanrl:
        script = Path(args.cleanrl).resolve() / workload.cleanrl
        found["CleanRL"] = cleanrl_command(
            args.cleanrl_python, script, workload.setup, workload.n_threads
        )
        found["CleanRL"] += [*workload.cleanrl_arguments, "--total-timesteps=10000000"]
    if args.sb3_python:
        found["Stable-Baselines3"] = [args.sb3_python, "-W", "ignore", "-c", BASELINES, name]
        found["Stable-Baselines3"] += [str(workload.n_threads)]
    return found


def steps_per_s(
    command: list[str], workload: Workload, warm_up_s: float, seconds: float, folder: str
) -> float:
    """Run a program for a while, and return its training speed."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(workload.n_threads)}
    program = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    n_windows, output, points = 0, b"", []
    try:
        while not points or points[-1][0] - points[0][0] < warm_up_s + seconds:
            more = os.read(program.stdout.fileno(), 1 << 16)
            if not more:
                raise RuntimeError(f"{command}: {output.decode(errors='replace')[-2000:]}")
            output = output[-2000:] + more
            for match in STEPS.finditer(output):
                n_windows += match[2] is not None
                n_steps = match[1] or match[3] or n_windows * workload.n_steps_per_window
                if int(n_steps) > (points[-1][1] if points else 0):
                    points.append((time.perf_counter(), int(n_steps)))
                rest = match.end()
            output = output[rest:] if STEPS.search(output) else output
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        program.stdout.close()
    start_s = points[0][0] + warm_up_s
    first = next(point for point in points if point[0] >= start_s)
    return (points[-1][1] - first[1]) / (points[-1][0] - first[0])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm-up", type=float, default=2.0)
    parser.add_argument("--variants", action="store_true", help="also other numbers of workers")
    parser.add_argument("--cleanrl", metavar="FOLDER", help="CleanRL's scripts")
    parser.add_argument(
        "--cleanrl-python", metavar="PYTHON", type=interpreter, default=sys.executable
    )
    parser.add_argument(
        "--sb3-python", metavar="PYTHON", type=interpreter, help="with Stable-Baselines3"
    )
    args = parser.parse_args()
    for name in args.workloads:
        rates: dict[str, list[float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            contenders = commands(name, args, folder)
            for _ in range(args.rounds):
                for who, command in contenders.items():
                    measured = WORKLOADS[name], args.warm_up, args.seconds, folder
                    rates.setdefault(who, []).append(steps_per_s(command, *measured))
                    note(f"{name}, {who}: {rates[who][-1]:.0f} steps/s")
        figures = {who: round(quartiles(found)["median"]) for who, found in rates.items()}
        ratios = {
            who: quartiles([a / b for a, b in zip(rates["rlpool"], found, strict=True)])
            for who, found in rates.items()
            if who != "rlpool"
        }
        found = {who: [round(rate, 1) for rate in each] for who, each in rates.items()}
        show({"workload": name, "steps_per_s": figures, "rlpool_by": ratios, "rates": found})


if __name__ == "__main__":
    main()
