"""Shared code of the tutorials: flags, checkpoints, Ctrl-C, learning curves, videos.

You will learn

- how flags are checked at the start, so that a run does not fail after hours,
- how the whole state of a run is saved in one file, which is always complete,
- how Ctrl-C ends a run between two rounds of learning, so that none is lost,
- how to make a video of a policy.
"""

import argparse
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import gymnasium as gym
import torch

from rlpool import evaluate

# Flags with output folders, the package that writes there, and its pip requirement.
FOLDERS = ("track", "tensorboard", '"rlpool[tutorials]"'), ("video", "moviepy", "moviepy")


class Parser(argparse.ArgumentParser):
    """Uses the first line of a docstring as the description, and reports errors in one line."""

    def __init__(self, docstring):
        super().__init__(description=docstring.partition("\n")[0])

    def add_number(self, *flags, least, type=int, **options):
        """Add a flag with a finite number, ``least`` or above."""

        def number(text):
            try:
                if least <= (value := type(text)) < float("inf"):
                    return value
            except ValueError:
                pass
            kind = {int: "an int", float: "a number"}[type]
            raise argparse.ArgumentTypeError(f"should be {kind} of at least {least}, got {text}")

        self.add_argument(*flags, type=number, **options)

    def error(self, message) -> NoReturn:
        refuse(message)


def refuse(message) -> NoReturn:
    """Exit with a message of one line, and the exit code of wrong flags."""
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(2)


class CtrlC:
    """Defers Ctrl-C in a ``with`` block: it sets ``is_pressed``, so that a loop can end.

    The program then exits at the end of the block. A second Ctrl-C interrupts immediately; saved
    files are kept.

    An interrupted batcher drops its requests, and an interrupted optimizer has changed only some of
    the parameters. Therefore a run is saved between two rounds.
    """

    is_pressed = False

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def _press(self, *_):
        self.is_pressed = True
        signal.signal(signal.SIGINT, self._before)
        print("\nending after this round; Ctrl-C again ends immediately", file=sys.stderr)

    def __exit__(self, kind, *_):
        signal.signal(signal.SIGINT, self._before)
        if self.is_pressed and kind is None:
            sys.exit("interrupted; --resume continues from here")


def save_checkpoint(path, parts, progress):
    """Save the whole state of a run; the file is always complete."""
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "random": torch.get_rng_state(), "progress": progress}, f"{path}.new")
    Path(f"{path}.new").replace(path)


def load_checkpoint(path, parts):
    """Restore a run; returns its progress."""
    try:
        state = torch.load(path, weights_only=True)  # tensors and plain values: runs no code
    except Exception as error:  # a damaged file fails in many ways
        refuse(f"--resume: {path} is damaged or not a checkpoint ({type(error).__name__})")
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        return state["progress"]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        refuse(f"--resume: {path} is of a run with other flags; use the same ({reason})")


def check_arguments(arguments):
    """Check at the start for errors that would occur later."""
    path = Path(arguments.checkpoint)
    if path.is_dir() or path.suffix == ".png":
        refuse(f"--checkpoint: {path} is a folder, or a .png like the curve; choose another file")
    if arguments.resume and not path.is_file():
        refuse(f"--resume: {path} does not exist; run without --resume first")
    try:
        Path(f"{path}.new").touch()
        Path(f"{path}.new").unlink()
    except OSError as error:
        refuse(f"--checkpoint: {error}; choose a file in a writable folder")
    for flag, package, source in FOLDERS:
        if folder := getattr(arguments, flag, None):
            check_folder(flag, Path(folder))
            if find_spec(package) is None:
                refuse(f"--{flag}: needs {package}, pip install {source}")


def check_folder(flag, path):
    """Refuse a folder that cannot be created or written."""
    try:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        tempfile.TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        refuse(f"--{flag}: {path} cannot be written ({error.strerror}); choose another folder")


def make_env(arguments, is_discrete):
    """Make an environment to inspect; refuse one that the tutorial does not support.

    Observations are vectors. Actions are discrete if ``is_discrete``, else vectors.
    """
    env_id = arguments.env_id
    try:
        env = gym.make(env_id)
    except (gym.error.Error, ImportError) as error:
        refuse(f"--env-id: {error} (gymnasium.pprint_registry() lists all ids)")
    spaces, kind = [env.observation_space, env.action_space], "Discrete" if is_discrete else "a Box"
    is_vector = [isinstance(each, gym.spaces.Box) and len(each.shape) == 1 for each in spaces]
    is_known = isinstance(spaces[1], gym.spaces.Discrete) if is_discrete else is_vector[1]
    if not (is_vector[0] and is_known):
        found = f"{env_id} has observations {spaces[0]} and actions {spaces[1]}"
        refuse(f"--env-id: {found}; this tutorial needs vectors (a Box) and {kind}")
    if arguments.video and "rgb_array" not in env.metadata.get("render_modes", []):
        refuse(f"--video: {env_id} has no render mode rgb_array; omit --video")
    return env


def save_curve(progress, path):
    """Draw the returns of all episodes to the image ``path``."""
    from matplotlib.figure import Figure  # here, because workers import this file too

    axes = (figure := Figure(layout="constrained")).subplots()
    # Single episodes as dots, and the average as a line, over fewer episodes in short runs.
    n = min(100, max(1, len(progress["returns"]) // 10))
    sums = torch.tensor([0.0, *progress["returns"]]).cumsum(0)
    axes.plot(progress["steps"], progress["returns"], ".", markersize=1, color="lightgrey")
    axes.plot(progress["steps"][n - 1 :], (sums[n:] - sums[:-n]) / n)
    axes.set(xlabel="environment steps", ylabel=f"return, average of {n} episodes")
    figure.savefig(path)


def film(agent, create_env, folder, env_args, agent_info=None):
    """Write a video of an episode to a folder; ``create_env`` takes a ``render_mode``."""

    def filmed(env):
        # Gymnasium 1.4 films MuJoCo's robots with a fixed camera; their own camera follows them.
        renderer = getattr(env.unwrapped, "mujoco_renderer", None)
        if renderer is not None and env.unwrapped.model.ncam:
            renderer.camera_id = 0
        # From the first step on, since some resets only discover the observations.
        return gym.wrappers.RecordVideo(env, folder, step_trigger=lambda step: step == 1)

    def create_filmed_env(seed, **env_args):
        env = create_env(seed=seed, **env_args, render_mode="rgb_array")
        env.wrap(filmed)
        return env

    # The check would repeat and film the episode again.
    how = {"env_args": env_args, "agent_info": agent_info, "check_repeatable": False}
    evaluate(agent, create_filmed_env, 1, **how)
    (path,) = sorted(Path(folder).glob("*.mp4"))[-1:]
    print(f"video of an episode: {path}")
