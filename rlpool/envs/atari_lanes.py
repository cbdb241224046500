"""ale-py's vector environment of Atari games: its lanes can be reset one by one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv


def resets_atari_lanes(env: VectorEnv[Any, Any, Any]) -> bool:
    """Whether this is an ``AtariVectorEnv``, wrapped or not, whose single lanes can be reset.

    With ``SAME_STEP``, they have restarted before anybody could do that; with a ``batch_size``,
    only all of them can be reset.
    """
    module = sys.modules.get("ale_py.vector_env")  # imported by whoever made one
    base: Any = env.unwrapped
    if module is None or not isinstance(base, module.AtariVectorEnv):
        return False
    steps_all = base.batch_size == base.num_envs
    return steps_all and base.autoreset_mode is AutoresetMode.NEXT_STEP


def take_a_seed_per_lane(base: Any) -> None:
    """Let an ``AtariVectorEnv`` be reset as Gymnasium's ``SyncVectorEnv`` is.

    Its own ``reset`` takes an array of the seeds of the lanes that it resets. A lane that is reset
    in time does not restart by itself, and the metadata then say so.

    Args:
        base: The vector environment, not wrapped. Other arguments mean what they meant.
    """
    reset = base.reset

    def reset_lanes(*, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        if isinstance(seed, list):
            seed = np.array(seed)[(options or {}).get("reset_mask", ...)]
        return reset(seed=seed, options=options)

    base.reset = reset_lanes
    base.metadata = {**base.metadata, "autoreset_mode": AutoresetMode.DISABLED}
