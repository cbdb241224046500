"""``python -m rlpool``: ``doctor``, ``demo`` and ``top``."""

from __future__ import annotations

import argparse
import sys

from rlpool import demo, doctor
from rlpool.machine.platform import end_without_reader
from rlpool.observe import top

COMMANDS = {
    "doctor": (doctor.main, "check this machine's limits for workers"),
    "demo": (demo.main, "learn CartPole in ten seconds, with a curve"),
    "top": (top.main, "show the activity of a running program's workers, by its pid"),
}


def main(arguments: list[str]) -> int:
    """Run a command, or list all of them; returns the exit code.

    Args:
        arguments: Arguments after ``python -m rlpool``.
    """
    parser = argparse.ArgumentParser(prog="python -m rlpool")
    version = f"rlpool {sys.modules['rlpool'].__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="command", dest="command")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text)
    command = parser.parse_args(arguments[:1]).command
    if command is None:
        parser.print_help()
        return 0
    run, _ = COMMANDS[command]
    return run(arguments[1:])


if __name__ == "__main__":
    end_without_reader()  # head, for example, may stop reading early
    sys.exit(main(sys.argv[1:]))
