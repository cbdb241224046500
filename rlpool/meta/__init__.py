"""Meta-reinforcement learning: trials of several episodes on one task."""
