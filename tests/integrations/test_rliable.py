"""The recipe for rliable in docs/evaluation.md.

rliable needs pandas before version 3, and so an environment of its own: see ``.ci/run``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpool import evaluate

from support.agents import StepCounter
from support.envs import create_counting
from support.programs import blocks_of

pytest.importorskip("rliable.library", reason="needs rliable")


def test_the_recipe_finds_the_interquartile_mean_of_runs_and_tasks(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    exec(blocks_of("docs/evaluation.md")[1], names)
    paths = [[tmp_path / f"{task}-{run}.json" for run in range(4)] for task in range(2)]
    for task, runs in enumerate(paths):
        for run, path in enumerate(runs):
            length = {"length": [1 + task + run]}
            evaluate(StepCounter(), create_counting, 1, env_info=length).save(path)
    value, low, high = names["interquartile_mean"](paths, 0.0, 15.0)  # type: ignore[operator]
    returns = sorted(n * (n + 1) / 2 for n in (1, 2, 3, 4, 2, 3, 4, 5))
    assert value == pytest.approx(sum(returns[2:6]) / 4 / 15)
    assert low < value < high
