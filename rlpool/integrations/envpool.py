"""Environments of EnvPool: ``EnvPoolEnv``, which is in ``rlpool`` as well."""

from __future__ import annotations

from rlpool.envs.envpool_env import EnvPoolEnv

__all__ = ["EnvPoolEnv"]
