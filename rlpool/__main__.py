"""``python -m rlpool``: ``doctor``, ``top``, ``demo``, ``evaluate``, ``compare`` and ``verify``."""

from __future__ import annotations

import os
import signal
import sys

from rlpool import demo, doctor
from rlpool.evaluation import command as evaluation_command
from rlpool.observe import top


def main(arguments: list[str]) -> int:
    """Run a command; returns the exit code.

    Args:
        arguments: What follows ``python -m rlpool``.
    """
    if arguments[:1] == ["top"]:
        return top.main(arguments[1:])
    if arguments[:1] == ["demo"]:
        return demo.main(arguments[1:])
    if arguments[:1] and arguments[0] in evaluation_command.COMMANDS:
        return evaluation_command.main(arguments)
    return doctor.main(arguments)


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
