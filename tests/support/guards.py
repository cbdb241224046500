"""A guard that a script gets from elsewhere."""

from __future__ import annotations

from collections.abc import Callable


def run(main: Callable[[], None]) -> None:
    """Run a script's main function, but not where the script is imported."""
    if main.__module__ == "__main__":
        main()
