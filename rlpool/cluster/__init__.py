"""Batchers whose workers are on several machines."""

from rlpool.cluster.ray_batchers import RayBatcher, RayEpisodeBatcher

__all__ = ["RayBatcher", "RayEpisodeBatcher"]
