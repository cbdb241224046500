"""What docs/troubleshooting.md says can be found and run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.programs import run_as_main

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text("utf-8")


def _anchor(heading: str) -> str:
    """How GitHub names the place of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_list_at_the_top_is_that_of_the_sections() -> None:
    sections = re.findall(r"^## (.*)$", TEXT, flags=re.MULTILINE)
    entries = re.findall(r"^- \[(.*)\]\(#(.*)\)$", TEXT, flags=re.MULTILINE)
    assert entries == [(section, _anchor(section)) for section in sections]


def test_the_program_that_measures_where_time_goes_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    (program,) = [text for text in programs if "us per step" in text]
    script = tmp_path / "measure.py"
    script.write_text(program, encoding="utf-8")
    run_as_main(script)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["environments", "policy"]
    assert all(int(re.findall(r": (\d+) us", line)[0]) > 0 for line in lines)
