"""What training scripts need beside experience: returns, statistics of episodes, evaluation."""
