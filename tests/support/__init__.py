"""Environments and agents for tests: importable, because worker processes pickle by name."""
