"""Meta-reinforcement learning: tasks, trials of several episodes, rollouts with a task each."""
