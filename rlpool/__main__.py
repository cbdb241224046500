"""``python -m rlpool``: ``doctor``, ``top``, ``demo``, ``evaluate``, ``compare`` and ``verify``."""

from __future__ import annotations

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
