"""Classes that inherit a contract are tests, for pytest and for unittest."""

from __future__ import annotations

import subprocess
import sys
import threading
import unittest
from typing import Any

import numpy as np
import pytest
import torch

from rlpool import DictTensor, GymEnv
from rlpool.testing import AgentContract, CountingEnv, EnvContract, FaultyEnv

from support.agents import ConstantAgent, FunctionAgent

# What pytest runs, as users would write it


class TestWithUnittest(EnvContract, unittest.TestCase):
    n_steps = 20
    options = {"length": 4}  # noqa: RUF012  (as users would write it)

    def make_env(self, seed: int) -> Any:
        return GymEnv([CountingEnv() for _ in range(2)], seed)


class TestOptOut(EnvContract):
    """Leaves out the one check that it breaks."""

    test_values_are_finite = None

    def make_env(self) -> Any:
        return FaultyEnv("nan_reward", at_step=3)


# What fails


class NegativeEnv(CountingEnv):
    """Observes what is not in its space."""

    def _observation(self) -> Any:
        return np.array([-1.0], np.float32)


def env_contract(make: Any) -> Any:
    return type("Case", (EnvContract,), {"make_env": make})


def agent_contract(make: Any, **attributes: Any) -> Any:
    methods = {"make_agent": make, "make_env": lambda self: CountingEnv()}
    return type("Case", (AgentContract,), {**methods, **attributes})


def outcome(case: Any) -> dict[str, dict[str, str]]:
    """Run a contract as unittest does: what failed and what was skipped, and why."""
    bound = type("Bound", (case, unittest.TestCase), {"__module__": __name__})
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(bound).run(result)
    assert result.testsRun
    assert not result.errors
    kinds = {"failed": result.failures, "skipped": result.skipped}
    return {
        kind: {test.id().rpartition(".test_")[2]: text for test, text in found}
        for kind, found in kinds.items()
    }


def test_what_is_wrong_fails_the_test_of_its_check_and_doubts_are_warnings() -> None:
    failed = outcome(env_contract(lambda self: FaultyEnv("wrong_flag", at_step=2)))["failed"]
    assert "'terminated' should be True or False, got array" in failed["runs"]
    assert "fix:   return a bool" in failed["runs"]
    result = outcome(agent_contract(lambda self: ConstantAgent(2)))
    assert result["failed"].keys() == {"action_fits"}
    with pytest.warns(UserWarning, match="observations_fit: .*\n  fix: "):
        result = outcome(env_contract(lambda self: NegativeEnv()))
    assert not result["failed"]


def test_an_environment_that_raises_never_passes_by_being_skipped() -> None:
    failed = outcome(env_contract(lambda self: FaultyEnv("raise", at_step=2)))["failed"]
    assert failed.keys() >= {"runs", "repeats", "fresh_instance_repeats"}
    assert "define make_env(self)" in outcome(EnvContract)["failed"]["runs"]


def test_what_is_made_must_reach_a_worker() -> None:
    lock = threading.Lock()
    captures = agent_contract(lambda self: lock and ConstantAgent())
    assert outcome(captures)["failed"].keys() == {"picklable"}


def test_attributes_reach_the_checks() -> None:
    def make(self: Any) -> FunctionAgent:
        return FunctionAgent(lambda s, o, agent_info, h: (None, {"action": agent_info["id"]}, None))

    info = DictTensor({"id": torch.tensor([0, 1])})
    assert "pass agent_info" in outcome(agent_contract(make))["failed"]["returns"]
    assert not outcome(agent_contract(make, agent_info=info))["failed"]


# The package


def test_the_kit_needs_no_test_runner() -> None:
    script = """
import sys
for name in ("pytest", "_pytest", "hypothesis", "psutil"):
    sys.modules[name] = None
import rlpool
assert "rlpool.testing" not in sys.modules, "import rlpool should not import the kit"
from rlpool.testing import CountingEnv, EnvContract, check_env
class Case(EnvContract):
    def make_env(self):
        return CountingEnv()
Case().test_runs()
assert check_env(CountingEnv)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
