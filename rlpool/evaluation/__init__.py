"""Evaluation of agents: recorded episodes, and figures with intervals."""
