"""Classes that inherit a contract are tests, for pytest and for unittest."""

from __future__ import annotations

import subprocess
import sys
import threading
import unittest
import warnings
from typing import Any

import pytest
import torch

import rlpool.testing
from rlpool import Agent, DictTensor, GymEnv, SpecError
from rlpool.testing import AgentContract, CountingEnv, EnvContract, FaultyEnv
from rlpool.testing.agent_checks import AGENT_CHECKS
from rlpool.testing.env_checks import ENV_CHECKS

from support.agents import ConstantAgent, GruAgent, HistoryAgent, InitialStateCounter, NoisyAgent
from support.envs import CountingEnv as PairEnv

# What pytest runs, as users would write it


class TestCountingEnv(EnvContract):
    def make_env(self) -> Any:
        return CountingEnv()


class TestManyLanes(EnvContract):
    n_steps = 20
    options = {"length": 4}  # noqa: RUF012  (as users would write it)

    def make_env(self, seed: int) -> Any:
        return GymEnv([CountingEnv(), CountingEnv()], seed)


class TestWithUnittest(EnvContract, unittest.TestCase):
    def setUp(self) -> None:
        self.length = 3

    def make_env(self) -> Any:
        return CountingEnv(self.length)


class TestInitialStateCounter(AgentContract):
    def make_agent(self) -> Any:
        return InitialStateCounter()

    def make_env(self) -> Any:
        return PairEnv()


class TestGruAgent(AgentContract, unittest.TestCase):
    batch_sizes = (1, 3)

    def make_agent(self) -> Any:
        return GruAgent()

    def make_env(self) -> Any:
        return PairEnv()


class TestHistoryAgent(AgentContract):
    def make_agent(self) -> Any:
        return HistoryAgent()

    def make_env(self) -> Any:
        return GymEnv([PairEnv(), PairEnv()])


class TestOptOut(EnvContract):
    """Takes out the one clause that it breaks."""

    test_values_are_finite = None  # type: ignore[assignment]

    def make_env(self) -> Any:
        return FaultyEnv("nan", at_step=3)


# What fails


def outcome(case: Any) -> unittest.TestResult:
    """Run a contract as unittest does, as pytest must not collect classes that fail."""
    bound = type("Bound", (case, unittest.TestCase), {"__module__": __name__})
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(bound).run(result)
    assert result.testsRun
    assert not result.errors
    return result


def failed(result: unittest.TestResult) -> set[str]:
    return {test.id().rpartition(".test_")[2] for test, _ in result.failures}


def skipped(result: unittest.TestResult) -> set[str]:
    return {test.id().rpartition(".test_")[2] for test, _ in result.skipped}


@pytest.mark.parametrize(
    ("contract", "checks"), [(EnvContract, ENV_CHECKS), (AgentContract, AGENT_CHECKS)]
)
def test_there_is_a_test_for_every_clause(contract: Any, checks: Any) -> None:
    tests = {name for name in vars(contract) if name.startswith("test_")}
    assert tests == {f"test_{check.name}" for check in checks}
    assert all(getattr(contract, name).__doc__ for name in tests)


def test_a_broken_environment_fails_the_test_of_its_clause() -> None:
    class Broken(EnvContract):
        def make_env(self) -> Any:
            return FaultyEnv("wrong_flag", at_step=2)

    result = outcome(Broken)
    assert failed(result) >= {"flags_are_bools"}
    text = next(text for test, text in result.failures if test.id().endswith("are_bools"))
    assert "step 2: terminated is array" in text
    assert "fix:   return bool(terminated)" in text


def test_a_broken_agent_fails_the_test_of_its_clause() -> None:
    class Broken(AgentContract):
        def make_agent(self) -> Any:
            return ConstantAgent(2)

        def make_env(self) -> Any:
            return CountingEnv()

    result = outcome(Broken)
    assert failed(result) == {"action_fits"}
    assert skipped(result) == {"update_takes_state_dict"}


def test_an_environment_that_raises_never_passes_by_being_skipped() -> None:
    class Broken(EnvContract):
        def make_env(self) -> Any:
            return FaultyEnv("raise", at_step=2)

    assert failed(outcome(Broken)) >= {"runs", "repeats", "fresh_instance_repeats", "lanes_agree"}


def test_without_the_methods_it_says_which_to_define() -> None:
    class Empty(EnvContract):
        pass

    result = outcome(Empty)
    assert "creation" in failed(result)
    assert "define make_env(self)" in result.failures[0][1]


def test_what_is_made_must_be_new() -> None:
    env = CountingEnv()

    class Same(EnvContract):
        def make_env(self) -> Any:
            return env

    assert "creation" in failed(outcome(Same))


def test_what_workers_cannot_get_is_named() -> None:
    lock = threading.Lock()

    class Captures(AgentContract):
        def make_agent(self) -> Any:
            assert lock
            return ConstantAgent()

        def make_env(self) -> Any:
            return CountingEnv()

    assert failed(outcome(Captures)) == {"picklable"}


def test_attributes_reach_the_checks() -> None:
    class NeedsInfo(Agent):
        def __call__(
            self, state: Any, observation: Any, agent_info: Any = None, history: Any = None
        ) -> Any:
            return None, DictTensor({"action": agent_info["id"].long()}), None

    class Without(AgentContract):
        def make_agent(self) -> Any:
            return NeedsInfo()

        def make_env(self) -> Any:
            return CountingEnv()

    class With(Without):
        agent_info = DictTensor({"id": torch.tensor([0, 1])})

    assert "returns" in failed(outcome(Without))
    assert not failed(outcome(With))


def test_warnings_are_given_as_warnings() -> None:
    class Reuses(EnvContract):
        def make_env(self) -> Any:
            return FaultyEnv("buffer_reuse", at="reset")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = outcome(Reuses)
    assert not result.failures
    assert any("own_buffers" in str(each.message) for each in caught)


def test_noise_is_part_of_the_arguments() -> None:
    class Noisy(AgentContract):
        def make_agent(self) -> Any:
            return NoisyAgent()

        def make_env(self) -> Any:
            return PairEnv()

    assert not failed(outcome(Noisy))


def test_an_environment_without_observations_is_an_error_that_says_so() -> None:
    class NoRows(AgentContract):
        def make_agent(self) -> Any:
            return ConstantAgent()

        def make_env(self) -> Any:
            return FaultyEnv("raise", at="reset")

    with pytest.raises(SpecError, match="observations"):
        NoRows().test_returns()


# The package


def test_the_kit_needs_no_test_runner() -> None:
    script = """
import sys
for name in ("pytest", "_pytest", "hypothesis", "psutil"):
    sys.modules[name] = None
import rlpool
assert "rlpool.testing" not in sys.modules, "import rlpool should not import the kit"
from rlpool.testing import AgentContract, CountingEnv, EnvContract, FaultyEnv
from rlpool.testing import check_agent, check_env
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


def test_all_is_sorted_and_complete() -> None:
    kit = rlpool.testing
    assert kit.__all__ == sorted(kit.__all__, key=lambda name: (not name.isupper(), name))
    for name in ("AgentContract", "CountingEnv", "EnvContract", "FaultyEnv"):
        assert getattr(kit, name).__doc__
    assert {"check_agent", "check_env"} <= set(kit.__all__)
