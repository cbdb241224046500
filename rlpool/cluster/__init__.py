"""Batchers whose workers are on several machines."""
