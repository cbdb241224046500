"""A batcher whose workers are on several machines."""

from rlpool.cluster.ray_batcher import RayEpisodeBatcher

__all__ = ["RayEpisodeBatcher"]
