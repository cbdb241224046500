"""Environments and agents for tests: importable, because spawned workers pickle by name."""
