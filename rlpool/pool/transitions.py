"""The transitions of one episode, put together from windows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.one_env import ACTION_KEY, STATE_KEY
from rlpool.memory.storage import Array

Values = Array | dict[str, Array]
"""One array, or several by key where a state or an action is made of several."""


class Transitions(NamedTuple):
    """One episode of n steps, in order of time, in memory of the caller's own.

    Attributes:
        state: ``[n, *S]``, the state that each step started from; a dict of such arrays for
            states of several parts (nested keys joined with ``/``).
        action: ``[n, *A]``, the action of each step, or a dict.
        next_state: ``[n, *S]``, as ``state``. Both are views on one array ``[n + 1, *S]``, as the
            state after a step is the one that the next step starts from.
        reward: float32 ``[n]``.
        done: bool ``[n]``, True at the last step only.
        truncated: bool ``[n]``, True at the last step if the episode was cut off there.
    """

    state: Any
    action: Any
    next_state: Any
    reward: Array
    done: Array
    truncated: Array


class EpisodeParts:
    """The windows of one episode, copied out of their slots."""

    _AFTER = ("_reward", "_done", "_truncated")

    def __init__(self) -> None:
        self._parts: dict[str, list[Array]] = {}

    def add(self, window: TemporalDictTensor, row: int, *, is_last: bool) -> None:
        """Add a window's row."""
        n_steps = int(window.lengths[row])

        def take(key: str, steps: slice) -> None:
            self._parts.setdefault(key.removeprefix("_"), []).append(
                window[key][row, steps].numpy().copy()
            )

        states = [key for key in window if is_part(key, STATE_KEY)]
        actions = [key for key in window if is_part(key, f"_last_{ACTION_KEY}")]
        for key in (*self._AFTER, *actions):
            take(key, slice(0, n_steps))
        for key in states:
            take(key, slice(0, n_steps))
            if is_last:
                take(f"_{key}", slice(n_steps - 1, n_steps))

    def joined(self) -> Transitions:
        """The whole episode."""
        arrays = {
            key: parts[0] if len(parts) == 1 else np.concatenate(parts)
            for key, parts in self._parts.items()
        }
        states = {key: array for key, array in arrays.items() if is_part(key, STATE_KEY)}
        actions = {k: a for k, a in arrays.items() if is_part(k, f"last_{ACTION_KEY}")}
        return Transitions(
            state=_unnamed({key: array[:-1] for key, array in states.items()}, STATE_KEY),
            action=_unnamed(actions, f"last_{ACTION_KEY}"),
            next_state=_unnamed({key: array[1:] for key, array in states.items()}, STATE_KEY),
            reward=arrays["reward"],
            done=arrays["done"],
            truncated=arrays["truncated"],
        )


def is_part(key: str, name: str) -> bool:
    """Whether a key is ``name`` or below it."""
    return key == name or key.startswith(f"{name}/")


def _unnamed(arrays: dict[str, Array], name: str) -> Values:
    """The only array, or several without their common prefix."""
    if name in arrays:
        return arrays[name]
    return {key.removeprefix(f"{name}/"): array for key, array in arrays.items()}
