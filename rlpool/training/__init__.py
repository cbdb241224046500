"""What training scripts need beside experience: returns, and statistics of episodes."""
