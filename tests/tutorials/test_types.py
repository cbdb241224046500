"""Programs of documents raise no error of type checkers that comes from rlpool's signatures."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/agents.md", "docs/asynchronous.md", "docs/tour.md", "docs/training.md")

USES = """
from rlpool import Batcher, EpisodeBatcher, TemporalDictTensor, evaluate

def check(batcher: Batcher, episodes: EpisodeBatcher) -> None:
    window: TemporalDictTensor = batcher.get()
    result: TemporalDictTensor = episodes.get(timeout=3.0)
    wrong: TemporalDictTensor = episodes.get(blocking=False)
"""


def checked(checker: list[str], *files: Path) -> str:
    command = [sys.executable, "-m", *checker, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "checker",
    [
        ["mypy", "--config-file=", "--ignore-missing-imports", "--check-untyped-defs"],
        ["basedpyright", "--level=error"],
    ],
    ids=lambda checker: checker[0],
)
def test_programs_of_documents_have_no_errors_of_types(checker: list[str], tmp_path: Path) -> None:
    if importlib.util.find_spec(checker[0]) is None:
        pytest.skip(f"needs {checker[0]}")
    if checker[0] == "basedpyright":
        (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "basic"}')
        checker = [*checker, f"--project={tmp_path}", f"--pythonpath={sys.executable}"]
    else:
        checker = [*checker, "--follow-imports=silent", f"--cache-dir={tmp_path / 'cache'}"]
    files = []
    for page in PAGES:
        program = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        assert program is not None
        files.append(tmp_path / f"program_{len(files)}.py")
        files[-1].write_text(program[1])
    uses = tmp_path / "uses.py"
    uses.write_text(USES)
    told = checked(checker, *files, uses)
    errors = [line for line in told.splitlines() if re.search(r"\berror:", line)]
    # The one that has to be found.
    assert len(errors) == 1, told
    assert "uses.py:7" in errors[0], told
