"""Stable-Baselines3: its buffers are filled, a pool is one of them, its policies are agents."""

from __future__ import annotations

from rlpool.errors import compose

try:
    import stable_baselines3  # noqa: F401  (the modules below need it)
except ModuleNotFoundError as error:
    what = f"Stable-Baselines3 is not installed: {error}"
    raise ImportError(compose(what, fix="pip install 'rlpool[sb3]'")) from error

from rlpool.integrations.sb3_buffers import to_sb3
from rlpool.integrations.sb3_policies import Sb3Agent, from_sb3
from rlpool.integrations.sb3_pool import PoolReplayBuffer

__all__ = ["PoolReplayBuffer", "Sb3Agent", "from_sb3", "to_sb3"]
