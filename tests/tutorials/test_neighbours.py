"""The programs of docs/neighbours that need nothing but what the tests have."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.programs import blocks_of, run_source


def test_tensorboard_gets_the_numbers_of_the_windows_and_of_the_progress(
    program_folder: Path,
) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason='needs TensorBoard: pip install "rlpool[tutorials]"',
    )
    collecting, tensorboard, *_ = blocks_of("docs/neighbours/tracking.md")
    run_source(collecting + tensorboard, program_folder)
    events = accumulators.EventAccumulator(str(program_folder / "runs" / "uniform"))
    events.Reload()
    returns = events.Scalars("return")
    assert [point.step for point in returns] == [8 * 64 * 2 * n for n in range(1, 11)]
    assert all(8 < point.value < 60 for point in returns)  # of an agent that draws its actions
    assert 8 < events.Scalars("evaluation/length")[0].value < 60
