"""Evaluating agents: episodes with records, and figures with intervals."""
