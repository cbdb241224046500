"""Environments that fail on purpose, and checks of environments and agents, for users' tests."""

from rlpool.testing.check_agent import AgentContract, check_agent
from rlpool.testing.check_env import EnvContract, check_env
from rlpool.testing.checks import Finding, Report
from rlpool.testing.faults import KINDS, CountingEnv, FaultyEnv, code, faults, strike

__all__ = [
    "KINDS",
    "AgentContract",
    "CountingEnv",
    "EnvContract",
    "FaultyEnv",
    "Finding",
    "Report",
    "check_agent",
    "check_env",
    "code",
    "faults",
    "strike",
]
