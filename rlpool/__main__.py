"""``python -m rlpool``: ``doctor``, ``top``, ``demo``, ``evaluate``, ``compare`` and ``verify``."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from rlpool import demo, doctor
from rlpool.observe import top

COMMANDS = {
    "doctor": (doctor.main, "print what this machine offers to workers"),
    "demo": (demo.main, "learn CartPole in ten seconds, with a curve"),
    "top": (top.main, "show what the workers of a running program do, by its pid"),
}


def main(arguments: list[str]) -> int:
    """Run a command; returns the exit code.

    Args:
        arguments: What follows ``python -m rlpool``.
    """
    parser = argparse.ArgumentParser(prog="python -m rlpool")
    version = f"rlpool {sys.modules['rlpool'].__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text)
    run, _ = COMMANDS[parser.parse_args(arguments[:1]).command]
    return run(arguments[1:])


def _main() -> int:
    """Run the command of this process; whoever reads its output may stop, as ``head`` does."""
    try:
        try:
            return main(sys.argv[1:])
        finally:
            sys.stdout.flush()  # here, where it may fail
    except BrokenPipeError:
        # What is not written yet goes nowhere: Python writes it at the end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # what shells say of a program that ends so


if __name__ == "__main__":
    sys.exit(_main())
