"""Finds out for which lane a call failed that was made for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Lanes = Sequence[int]


def failing_lane(groups: Sequence[Lanes], fails: Callable[[Lanes], bool]) -> tuple[int, bool]:
    """Find the lane whose row makes a call fail.

    Lanes of one request at a time are tried alone, then halves of those, down to one lane.

    Args:
        groups: The lanes of each request that took part, no group being empty.
        fails: Whether the call fails for some lanes alone.

    Returns:
        The lane, and whether the call fails for it alone. If it does not, that is the first lane of
        the fewest lanes for which it was seen to fail.
    """
    lanes = groups[0]
    if len(groups) > 1:
        found = next((group for group in groups if fails(group)), None)
        if found is None:
            return lanes[0], False
        lanes = found
    while len(lanes) > 1:
        halves = lanes[: len(lanes) // 2], lanes[len(lanes) // 2 :]
        half = next((half for half in halves if fails(half)), None)
        if half is None:
            return lanes[0], False
        lanes = half
    return lanes[0], True
