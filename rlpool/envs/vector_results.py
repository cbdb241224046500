"""What vector environments are given and return: looked at, and checked."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlpool.data.storage import NDArray
from rlpool.envs.columns import as_array, wrong_count
from rlpool.envs.vec_env import Options
from rlpool.errors import SpecError


def with_equal_options(options: Sequence[Options]) -> list[list[int]]:
    """The positions of equal options, together."""
    if len(options) == 1 or not any(options):
        return [list(range(len(options)))] if options else []
    groups: dict[bytes, list[int]] = {}
    for row, option in enumerate(options):
        # Bytes tell 1 from True, and compare arrays as well.
        groups.setdefault(pickle.dumps(option), []).append(row)
    return list(groups.values())


def checked_pair(result: Any) -> tuple[Any, Any]:
    """The observation and the infos that ``reset`` returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise wrong_count("reset", "two", result)
    return result


def as_bools(flags: NDArray) -> NDArray:
    """Flags as bools, copied only if they are none."""
    return flags if flags.dtype == np.bool_ else flags.astype(bool)


def per_lane(name: str, values: Any, n_lanes: int) -> NDArray:
    """Rewards or flags as an array ``[n_lanes]``.

    Raises:
        SpecError: If there is not one for each lane.
    """
    array = as_array(values)
    if array.shape != (n_lanes,):
        raise SpecError(
            f"{name!r} should have shape [{n_lanes}], got {list(array.shape)}",
            fix="return one value per lane",
        )
    return array


def final_observations(infos: Any, ended: Sequence[int]) -> tuple[Any, bool]:
    """Last observations of lanes that restarted in the same step, and whether they are a list.

    Args:
        infos: What the step returned beside them.
        ended: The lanes whose episodes ended.

    Raises:
        SpecError: If they are missing.
    """
    if isinstance(infos, Mapping):
        final = infos.get("final_obs")
    else:  # one info per lane
        final = [info.get("final_obs") for info in infos]
    is_list = isinstance(final, list)
    if final is None or (is_list and any(final[lane] is None for lane in ended)):
        raise SpecError(
            "a lane restarted in the step that ended its episode, and the infos have no "
            "'final_obs'",
            fix="use AutoresetMode.NEXT_STEP or AutoresetMode.DISABLED",
        )
    return final, is_list or (isinstance(final, np.ndarray) and final.dtype == object)
