"""Returns, advantages, and statistics of episodes."""
