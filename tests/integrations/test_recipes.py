"""The programs of the pages about Parquet and TorchRL, beside the real libraries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

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
