"""What the tutorials that train share: checkpoints, Ctrl-C, learning curves, films.

You will learn

- how all that a run consists of is saved in one file, of which there is a complete one at any time,
- how Ctrl-C ends a run between two rounds of learning, so that it resumes bit by bit,
- how a film of a policy is made.
"""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import torch

from rlpool import evaluate


class CtrlC:
    """A section that Ctrl-C does not interrupt: it sets ``is_pressed``, for a loop to end.

    At the end of the section the program exits then. A second Ctrl-C interrupts at once: what was
    saved until then stays.

    A batcher's state may be saved whatever Ctrl-C interrupts. What learns has no such promise: an
    optimizer that is interrupted has changed some parameters and not others.
    """

    is_pressed = False

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def _press(self, *_):
        self.is_pressed = True
        signal.signal(signal.SIGINT, self._before)
        print("\nending after this round; Ctrl-C again ends at once", file=sys.stderr)

    def __exit__(self, kind, *_):
        signal.signal(signal.SIGINT, self._before)
        if self.is_pressed and kind is None:
            sys.exit("interrupted; --resume goes on with the same bits")


def save_checkpoint(path, parts, progress):
    """Save all that a run consists of; there is a complete file at any time."""
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "random": torch.get_rng_state(), "progress": progress}, f"{path}.new")
    Path(f"{path}.new").replace(path)


def load_checkpoint(path, parts):
    """Let a run go on; returns the progress that it had made."""
    state = torch.load(path, weights_only=True)  # tensors and plain values: no code is run
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["random"])
    return state["progress"]


def check_arguments(parser, arguments):
    """Refuse at the start what would fail later."""
    path = Path(arguments.checkpoint)
    if arguments.resume and not path.is_file():
        parser.exit(2, f"--resume: there is no file {path}; run without --resume first\n")
    try:
        Path(f"{path}.new").touch()
        Path(f"{path}.new").unlink()
    except OSError as error:
        parser.exit(2, f"--checkpoint: {error}; name a file in a folder that can be written\n")
    if getattr(arguments, "video", None) and find_spec("moviepy") is None:
        parser.exit(2, '--video: needs an extra, pip install "rlpool[video]"\n')


def check_env_id(parser, env_id):
    """Refuse an environment that Gymnasium does not know."""
    try:
        gym.spec(env_id)
    except gym.error.Error as error:
        parser.exit(2, f"--env-id: {error} (gymnasium.pprint_registry() lists what there is)\n")


def save_curve(progress, path):
    """Draw the returns of all episodes, ``path`` being that of the picture."""
    from matplotlib.figure import Figure  # here, because workers import this file as well

    axes = (figure := Figure(layout="constrained")).subplots()
    # Single episodes as dots, and what is learned as a line, in short runs of fewer episodes.
    n = min(100, max(1, len(progress["returns"]) // 10))
    sums = torch.tensor([0.0, *progress["returns"]]).cumsum(0)
    axes.plot(progress["steps"], progress["returns"], ".", markersize=1, color="lightgrey")
    axes.plot(progress["steps"][n - 1 :], (sums[n:] - sums[:-n]) / n)
    axes.set(xlabel="environment steps", ylabel=f"return, average of {n} episodes")
    figure.savefig(path)


def film(agent, create_env, folder, env_args, agent_info=None):
    """Write a film of an episode into a folder; ``create_env`` takes a ``render_mode``."""
    env_args = {**env_args, "render_mode": "rgb_array"}
    options = {"env_args": env_args, "agent_info": agent_info}
    (path,) = evaluate(agent, create_env, n_episodes=1, video=folder, **options).videos
    print(f"film of an episode: {path}")
