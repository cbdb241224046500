"""``python -m rlpool``: see ``rlpool.demo``, ``rlpool.doctor`` and ``rlpool.top``."""

from __future__ import annotations

import sys

from rlpool import demo, doctor, top


def main(arguments: list[str]) -> int:
    """Run a command; returns the exit code.

    Args:
        arguments: What follows ``python -m rlpool``.
    """
    if arguments[:1] == ["top"]:
        return top.main(arguments[1:])
    if arguments[:1] == ["demo"]:
        return demo.main(arguments[1:])
    return doctor.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
