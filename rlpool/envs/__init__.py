"""Environments as lanes."""
