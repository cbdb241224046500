"""Shows how far a request is while the caller waits for it: a bar, a line, or a function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from rlpool.errors import SpecError, UsageError

SHOW_EVERY_S = 0.25
"""A few times a second: what people can follow, and costs nothing."""


class SoFar(NamedTuple):
    """How far a request is.

    Attributes:
        n_finished: Episodes that are finished.
        n_episodes: Episodes that were requested.
        n_steps: Steps of all its episodes. Steps of a cluster's nodes count once they have arrived.
        is_there: Whether its result is.
    """

    n_finished: int
    n_episodes: int
    n_steps: int
    is_there: bool


class Progress(NamedTuple):
    """What a function given as ``progress`` is called with.

    Attributes:
        n_finished: Episodes that are finished.
        n_episodes: Episodes that were requested.
        n_steps: Steps of all its episodes. On a cluster, of those that have arrived.
        elapsed_s: Seconds since the first ``get`` of this request that shows its progress, which
            need not be its ``execute``. If a ``get`` ends with an exception, the next one begins
            again at zero.
        episodes_per_s: Episodes finished in this time, per second.
        steps_per_s: Steps made in this time, per second.

    Example:
        >>> def show(progress):
        ...     print(progress.n_finished, "of", progress.n_episodes, "episodes")
        >>> with EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0) as batcher:
        ...     batcher.execute(2)
        ...     episodes = batcher.get(progress=show)
        0 of 2 episodes
        2 of 2 episodes
    """

    n_finished: int
    n_episodes: int
    n_steps: int
    elapsed_s: float
    episodes_per_s: float
    steps_per_s: float


Show = Callable[[Progress], None]

ShowProgress = bool | Show
"""True for a bar, False for nothing, or a function."""


def checked_progress(progress: Any) -> ShowProgress:
    """An argument ``progress``.

    Raises:
        SpecError: If it is neither a bool nor a function.
    """
    if not isinstance(progress, bool) and not callable(progress):
        what = f"progress should be True, False or a function, got {progress!r:.60}"
        raise SpecError(what, fix="pass True for a bar, or a function that takes a Progress")
    shown: ShowProgress = progress
    return shown


class Meter:
    """Shows the requests of one batcher, one after the other."""

    def __init__(self) -> None:
        self._display: _Display | None = None
        self._first: tuple[float, SoFar] | None = None  # when the request was first looked at
        self._n_steps = 0  # the most so far: a worker's death takes steps back
        self._next_s = 0.0
        self._is_showing = False

    @contextmanager
    def shown(
        self, progress: ShowProgress, so_far: Callable[[], SoFar]
    ) -> Iterator[Callable[[], None] | None]:
        """Show the oldest request in a block that waits for it.

        What is shown goes on in the next block, until the result is there; an exception ends it.

        Args:
            progress: How.
            so_far: Says how far the request is.

        Yields:
            What to call at least a few times a second, ``None`` if nothing is shown.

        Raises:
            UsageError: If the function that shows is what waits.
        """
        if self._is_showing:
            what = "get() was called inside the function that shows its progress"
            raise UsageError(what, fix="call it when the first get() has returned")
        if progress is False:
            yield None
            if self._display is not None and so_far().is_there:
                self.close()
            return
        try:
            if self._display is None:
                self._display = _Bar.made() or _Line() if progress is True else _Display(progress)
            yield lambda: self._look(so_far)
            if (last := so_far()).is_there:
                self._show(last)
                self.close()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take away what is shown."""
        display, self._display, self._first = self._display, None, None
        self._n_steps, self._next_s = 0, 0.0
        if display is not None:
            display.close()

    def _look(self, so_far: Callable[[], SoFar]) -> None:
        if time.monotonic() >= self._next_s and not self._is_showing:
            self._show(so_far())
            self._next_s = time.monotonic() + SHOW_EVERY_S

    def _show(self, now: SoFar) -> None:
        now_s = time.monotonic()
        began_s, before = self._first = self._first or (now_s, now)
        self._n_steps = max(self._n_steps, now.n_steps)
        elapsed_s = now_s - began_s
        divisor_s = elapsed_s or float("inf")
        progress = Progress(
            now.n_finished,
            now.n_episodes,
            now.n_steps if now.is_there else self._n_steps,
            elapsed_s,
            (now.n_finished - before.n_finished) / divisor_s,
            max(0, self._n_steps - before.n_steps) / divisor_s,
        )
        if self._display is not None:
            self._is_showing = True
            try:
                self._display.show(progress)
            finally:
                self._is_showing = False


class _Display:
    """Where progress is shown: a function of the user, whose errors are the user's.

    Args:
        function: The function.
    """

    def __init__(self, function: Show) -> None:
        self._function = function

    def show(self, progress: Progress) -> None:
        """Show it."""
        self._function(progress)

    def close(self) -> None:
        """Take it away."""


class _Bar(_Display):
    """A bar of tqdm. Nothing that goes wrong with it reaches the user.

    Args:
        kind: The class of the bar.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._bar: Any = None

    @classmethod
    def made(cls) -> _Bar | None:
        """A bar, if tqdm is installed."""
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        # tqdm would start a thread, which looks after bars that are seldom updated.
        return cls(type("_Quiet", (tqdm,), {"monitor_interval": 0}))

    def show(self, progress: Progress) -> None:
        """Draw the bar."""
        with suppress(Exception):
            if self._bar is None:
                self._bar = self._kind(
                    total=progress.n_episodes,
                    initial=progress.n_finished,
                    unit=" episodes",
                    leave=False,
                )
            self._bar.n = progress.n_finished
            self._bar.set_postfix_str(f"{progress.steps_per_s:,.0f} steps/s", refresh=False)
            self._bar.refresh()

    def close(self) -> None:
        """Clear the bar."""
        with suppress(Exception):
            if self._bar is not None:
                self._bar.close()


class _Line(_Display):
    """A line on stderr, rewritten if that is a terminal; elsewhere only the last one is written."""

    def __init__(self) -> None:
        self._text = ""
        self._shown = ""

    def show(self, progress: Progress) -> None:
        """Write the line."""
        n_finished, n_episodes, n_steps, elapsed_s, _, steps_per_s = progress
        self._text = (
            f"{n_finished}/{n_episodes} episodes, {n_steps:,} steps in {elapsed_s:.1f} s, "
            f"{steps_per_s:,.0f} steps/s"
        )
        with suppress(Exception):
            if sys.stderr.isatty():
                sys.stderr.write("\r" + self._text.ljust(len(self._shown)))
                sys.stderr.flush()
                self._shown = self._text

    def close(self) -> None:
        """End the line."""
        with suppress(Exception):
            if self._text:
                sys.stderr.write("\n" if self._shown else self._text + "\n")
                sys.stderr.flush()
