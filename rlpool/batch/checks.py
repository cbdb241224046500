"""Validation of batcher arguments and state dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from rlpool.envs.vec_env import VecEnv
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import whole_number

LAST_NUMBER = 2**62
"""Episode and policy numbers are 64-bit words in workers."""

LAST_ROOT = 2**128 - 1
"""Root seeds have 128 bits, see ``root_from``."""

Show = Callable[[int, int], object]

ShowProgress = bool | Show
"""True for a bar, False for nothing, or a function of the finished and requested rows."""

State = dict[str, int]

CreateEnv = Callable[..., VecEnv]
CreateAgent = Callable[..., Any]
Seeds = int | Sequence[int] | None


def checked_progress(progress: Any) -> ShowProgress:
    """Validate an argument ``progress``.

    Raises:
        SpecError: If it is neither a bool nor a function.
    """
    if not isinstance(progress, bool) and not callable(progress):
        message = f"progress should be True, False or a function, got {progress!r:.60}"
        raise SpecError(message, fix="pass True for a bar, or a function of (done, asked)")
    checked: ShowProgress = progress
    return checked


@contextmanager
def showing_progress(
    progress: ShowProgress, finished: Callable[[], tuple[int, int]]
) -> Iterator[Callable[[], None]]:
    """Show progress at the beginning, at the end, and whenever the yielded function is called.

    Args:
        progress: True for a bar, or the function to call.
        finished: Returns the numbers of finished and requested rows.

    Raises:
        UsageError: If a bar is requested and tqdm is not installed.
    """
    bar: Any = nullcontext()
    if progress is True:
        try:
            from tqdm import tqdm
        except ImportError:
            message = "progress=True shows a bar of tqdm, which is not installed"
            fix = 'pip install "rlpool[evaluation]", or pass a function'
            raise UsageError(message, fix=fix) from None
        bar = tqdm(unit=" episodes", leave=False)

    def show() -> None:
        done, asked = finished()
        if callable(progress):
            progress(done, asked)
        else:
            bar.total, bar.n = asked, done
            bar.refresh()

    with bar:
        show()
        yield show
        show()


def checked_state(state: Any) -> State:
    """Validate the state dict of a batcher.

    Raises:
        SpecError: Unless it is exactly what ``state_dict`` returns.
    """
    names = ("root", "next_episode", "policy_version")
    fix = "pass what state_dict() of a batcher returned"
    if not isinstance(state, Mapping) or set(state) != set(names):
        message = f"a batcher's state has the keys {list(names)}, got {state!r:.200}"
        raise SpecError(message, fix=fix)
    checked = {name: whole_number(name, state[name], 0, fix=fix) for name in names}
    for name, most in zip(names, (LAST_ROOT, LAST_NUMBER, LAST_NUMBER), strict=True):
        if checked[name] > most:
            raise SpecError(f"{name} is {checked[name]}, the largest is {most}", fix=fix)
    return checked


def checked_batcher_seeds(seeds: Any, n_workers: int = 0) -> Seeds:
    """Validate seeds: one int, or a list with one per worker."""
    if seeds is None:
        return None
    try:
        numbers = [whole_number("each of seeds", seed, 0) for seed in seeds]
    except TypeError:
        return whole_number("seeds", seeds, 0, fix="give one int, or one per worker")
    # In this process a list may have any length: one from a run with workers gives the same data.
    if not numbers or (n_workers and len(numbers) != n_workers):
        raise SpecError(
            f"seeds has {len(numbers)} entries, n_workers is {n_workers}",
            fix="give one int, or one per worker",
        )
    return numbers
