"""Programs and recipes of the documents, beside the libraries that they are for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlpool import evaluate

from support.agents import StepCounter
from support.envs import create_counting
from support.programs import blocks_of, run_block, run_source


def test_episodes_come_back_from_parquet_and_pandas_reads_them(
    program_folder: Path, capfd: Any
) -> None:
    for library in ("pyarrow", "pandas"):
        pytest.importorskip(library)
    writing, reading = blocks_of("docs/neighbours/parquet.md")
    run_source(writing + reading, program_folder)
    same, average, shape = capfd.readouterr().out.splitlines()
    assert same == "True"
    assert 15 < float(average.rpartition(" ")[2]) < 35  # of random actions
    assert re.fullmatch(r"observations: \(\d+, 4\)", shape)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("number", "printed"), [(0, r"(entropy: 0\.6\d+\n){3}"), (1, r"(?s).*frame.*")]
)
def test_the_programs_of_the_page_about_torchrl_run(
    number: int, printed: str, program_folder: Path, capfd: Any
) -> None:
    pytest.importorskip("torchrl")
    run_block("docs/neighbours/torchrl.md", number, program_folder)
    assert re.fullmatch(printed, capfd.readouterr().out)


def test_tensorboard_gets_the_numbers_of_the_windows_and_of_the_progress(
    program_folder: Path,
) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    collecting, tensorboard, *_ = blocks_of("docs/neighbours/tracking.md")
    run_source(collecting + tensorboard, program_folder)
    events = accumulators.EventAccumulator(str(program_folder / "runs" / "uniform"))
    events.Reload()
    returns = events.Scalars("return")
    assert [point.step for point in returns] == [8 * 64 * 2 * n for n in range(1, 11)]
    assert all(8 < point.value < 60 for point in returns)  # of an agent that draws its actions
    assert 8 < events.Scalars("evaluation/length")[0].value < 60


def test_rliables_recipe_finds_the_interquartile_mean_of_runs_and_tasks(tmp_path: Path) -> None:
    # It needs pandas before version 3, and so an environment of its own: see .ci/run.
    pytest.importorskip("rliable.library", reason="needs rliable")
    names: dict[str, Any] = {}
    exec(blocks_of("docs/evaluation.md")[1], names)
    paths = [[tmp_path / f"{task}-{run}.json" for run in range(4)] for task in range(2)]
    for task, runs in enumerate(paths):
        for run, path in enumerate(runs):
            length = {"length": [1 + task + run]}
            evaluate(StepCounter(), create_counting, 1, env_info=length).save(path)
    value, low, high = names["interquartile_mean"](paths, 0.0, 15.0)
    returns = sorted(n * (n + 1) / 2 for n in (1, 2, 3, 4, 2, 3, 4, 5))
    assert value == pytest.approx(sum(returns[2:6]) / 4 / 15)
    assert low < value < high
