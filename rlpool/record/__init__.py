"""Records of episodes, and errors for those that fail."""
