"""Stable-Baselines3: its buffers are filled, a pool is one of them, its policies are agents."""

from __future__ import annotations

from rlpool.machine.imports import imports_of

with imports_of("sb3"):
    from rlpool.integrations.sb3_buffers import to_sb3
    from rlpool.integrations.sb3_policies import Sb3Agent, from_sb3
    from rlpool.integrations.sb3_pool import PoolReplayBuffer

__all__ = ["PoolReplayBuffer", "Sb3Agent", "from_sb3", "to_sb3"]
