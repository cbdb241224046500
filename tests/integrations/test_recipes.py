"""Programs of docs/integrations.md that do not use an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.programs import run_block

PAGE = "docs/integrations.md"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_steps_of_episodes_fill_a_torchrl_replay_buffer(program_folder: Path, capfd: Any) -> None:
    pytest.importorskip("torchrl")
    run_block(PAGE, 1, program_folder)
    assert capfd.readouterr().out.endswith("torch.Size([64, 1])\n")


def test_episodes_round_trip_through_parquet_and_pandas_reads_them(
    program_folder: Path, capfd: Any
) -> None:
    for library in ("pyarrow", "pandas"):
        pytest.importorskip(library)
    run_block(PAGE, 3, program_folder)
    same, average = capfd.readouterr().out.splitlines()
    assert same == "True"
    assert average == "average return: 38.6875"  # with the lengths shown in the tour


def test_episode_returns_are_logged_to_tensorboard(program_folder: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_block(PAGE, 4, program_folder)
    events = accumulators.EventAccumulator(str(program_folder / "runs" / "tour"))
    events.Reload()
    returns = events.Scalars("return")
    n_steps = 16 * returns[0].value
    assert [point.step for point in returns] == pytest.approx([n_steps, 2 * n_steps, 3 * n_steps])
