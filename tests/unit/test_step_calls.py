"""A budget of function calls per batch step reveals slowdowns of the step loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "step_calls.py"


@pytest.mark.skipif(not SCRIPT.exists(), reason="there are no benchmarks here")
def test_a_batch_step_stays_within_its_budget_of_function_calls() -> None:
    run = subprocess.run(
        [sys.executable, SCRIPT], stdout=subprocess.PIPE, text=True, timeout=100.0, check=True
    )
    figures = [json.loads(line) for line in run.stdout.splitlines()]
    assert {each["workload"] for each in figures} >= {"W1", "infos", "W2", "V1", "windows"}
    for each in figures:
        assert each["calls_per_step"] <= each["budget"], each
