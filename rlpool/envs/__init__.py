"""Environments as batches of lanes."""
