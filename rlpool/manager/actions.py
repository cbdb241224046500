"""Actions on their way from the caller into the buffers of a ``ParallelEnvManager``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlpool.envs.columns import fitted_rows
from rlpool.errors import SpecError
from rlpool.memory.storage import Array
from rlpool.specs import TensorSpec, is_action

Actions = Mapping[str, Array]


def hand_over(actions: Actions, lanes: Sequence[int], *targets: Actions) -> None:
    """Copy the rows of some lanes.

    Args:
        actions: Action key to array ``[n_lanes, ...]``.
        lanes: The lanes.
        *targets: Where to, ``[n_lanes, ...]`` per key.

    Raises:
        SpecError: If keys, shapes or values do not fit.
    """
    try:
        for arrays in targets:
            for key, array in arrays.items():
                values = actions[key]
                if values.shape != array.shape:
                    raise ValueError(f"got shape {list(values.shape)}")
                if values.dtype != array.dtype:
                    array[lanes] = fitted_rows(f"the action {key!r}", values, lanes, array.dtype)
                elif len(lanes) == len(array):
                    np.copyto(array, values)
                else:
                    array[lanes] = values[lanes]
    except SpecError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        wanted = {key: list(array.shape) for key, array in targets[0].items()}
        raise _refused(wanted, error) from error


def specs_of(actions: Actions) -> dict[str, TensorSpec]:
    """Specs of actions that no space declares.

    Raises:
        SpecError: If they are not arrays.
    """
    try:
        return {
            key: TensorSpec(array.shape[1:], array.dtype)
            for key, array in actions.items()
            if is_action(key)
        }
    except (AttributeError, TypeError) as error:
        raise _refused("[n_lanes, ...]", error) from error


def are_equal(some: Actions, others: Actions, lanes: Sequence[int]) -> bool:
    """Whether the rows of some lanes are the same, in the dtypes of the first."""
    try:
        return all(
            array[lanes].tobytes() == others[key][lanes].astype(array.dtype).tobytes()
            for key, array in some.items()
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return False


def _refused(wanted: Any, error: Exception) -> SpecError:
    return SpecError(
        f"actions should be arrays of the shapes {wanted}: {error}",
        fix="pass one row per lane, also for lanes that do not step",
    )
