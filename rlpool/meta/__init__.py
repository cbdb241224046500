"""Meta-reinforcement learning: tasks, trials of several episodes, one task per rollout."""
