"""Where a value does not fit a Gymnasium space."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces


def misfits(space: Any, value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Say what of a value is not in a space.

    NaN is in no space; it is left to whoever looks for it.

    Args:
        space: The space.
        value: The value.
        path: What to call the value.

    Yields:
        The path of a part that does not fit, and one line that says why.
    """
    if isinstance(space, spaces.Dict):
        keys = set(space.spaces)
        if not isinstance(value, Mapping) or set(value) != keys:
            got = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            yield path, f"{path} should have the keys {sorted(keys)}, got {got}"
            return
        for key, inner in space.spaces.items():
            yield from misfits(inner, value[key], f"{path}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            yield path, f"{path} should be a tuple of {len(space.spaces)} parts, got {value!r}"
            return
        for number, inner in enumerate(space.spaces):
            yield from misfits(inner, value[number], f"{path}[{number}]")
    elif isinstance(space, spaces.Box):
        what = _misfit_of_box(space, value)
        if what:
            yield path, f"{path} {what}"
    elif not _is_in(space, value):
        yield path, f"{path} is {value!r}, which is not in {space}"


def _misfit_of_box(space: spaces.Box, value: Any) -> str:
    has_dtype = isinstance(value, np.ndarray | np.generic)
    try:
        array = np.asarray(value)
    except ValueError:
        return "is no array: its parts have different lengths"
    if array.shape != space.shape:
        return f"should have shape {list(space.shape)}, got {list(array.shape)}"
    if array.dtype.kind not in "fiub":
        return f"should have dtype {space.dtype}, got {array.dtype}"
    if has_dtype and not np.can_cast(array.dtype, space.dtype):
        return f"should have dtype {space.dtype}, got {array.dtype}"
    if bool(np.any(array < space.low)) or bool(np.any(array > space.high)):
        bad = (array < space.low) | (array > space.high)
        worst = array[bad].ravel()[0]
        low, high = space.low[bad].ravel()[0], space.high[bad].ravel()[0]
        return f"has the value {worst} outside the bounds {low} to {high}"
    return ""


def _is_in(space: Any, value: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(space.contains(value))
        except Exception:
            return False
