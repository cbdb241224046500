"""EnvPool: its environments as lanes, under the name that they have beside other libraries'."""

from __future__ import annotations

from rlpool.envs.envpool_env import EnvPoolEnv

__all__ = ["EnvPoolEnv"]
