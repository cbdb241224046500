"""Evaluating agents: episodes with records, figures with intervals, and the commands for both."""
