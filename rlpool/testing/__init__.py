"""A counting environment, and checks of environments and agents, for users' tests."""

from rlpool.testing.check_agent import check_agent
from rlpool.testing.check_env import check_env
from rlpool.testing.counting_env import CountingEnv

__all__ = ["CountingEnv", "check_agent", "check_env"]
