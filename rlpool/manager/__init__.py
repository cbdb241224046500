"""Environments in worker processes, the policy in the caller's."""
