"""The agent interface, and tools for writing agents."""
