"""Nothing makes the step loop slower unseen: calls of functions per batch step have a budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "step_calls.py"
SLOW = pytest.param(["infos", "W2", "V1", "windows", "request"], marks=pytest.mark.slow)


@pytest.mark.skipif(not SCRIPT.exists(), reason="there are no benchmarks beside these tests")
@pytest.mark.parametrize("workloads", [["W1"], SLOW])
def test_a_batch_step_calls_no_more_functions_than_its_budget(workloads: list[str]) -> None:
    command = [sys.executable, SCRIPT, "--workloads", *workloads]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100.0, check=True)
    figures = [json.loads(line) for line in run.stdout.splitlines()]
    assert [each["workload"] for each in figures] == workloads
    for each in figures:
        assert each["calls_per_step"] <= each["budget"], each
