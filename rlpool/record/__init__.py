"""Records of episodes, and what becomes of those that fail."""
