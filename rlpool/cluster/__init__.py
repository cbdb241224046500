"""Batchers whose workers are on several machines."""

from rlpool.cluster.ray_batchers import RayEpisodeBatcher

__all__ = ["RayEpisodeBatcher"]
