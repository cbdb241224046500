"""What README and documents show can be run, and what they link to exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import run_as_main

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", *(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))]

TIMEOUT_S = 120.0


def text_of(document: str) -> str:
    return (REPOSITORY / document).read_text(encoding="utf-8")


def blocks_of(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text_of(document), re.MULTILINE | re.DOTALL)


def anchors_of(document: str) -> list[str]:
    """How GitHub names the places of the headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(document), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


PROGRAMS = {
    f"{document}-{number}": source
    for document in ("README.md", "docs/guide.md", "docs/monitoring.md")
    for number, source in enumerate(blocks_of(document))
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs(name: str, program_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = program_folder / "program.py"
    script.write_text(PROGRAMS[name], encoding="utf-8")
    # One that says how all of its process logs and takes signals needs a process of its own.
    if "on_signal(" in PROGRAMS[name]:
        output, errors = run_script(script)
    else:
        run_as_main(script, folder=program_folder)
        output, errors = capfd.readouterr()
    assert errors == ""
    assert output
    if name == "README.md-0":
        returns = [float(value) for value in re.findall(r"average return (\d+)", output)]
        assert returns[0] < 50
        assert max(returns) > 200  # it learns


@pytest.mark.ray
def test_the_program_of_a_cluster_runs_on_one_machine(program_folder: Path) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "rlpool[ray]"')
    script = program_folder / "program.py"
    script.write_text(blocks_of("docs/cluster.md")[0], encoding="utf-8")
    # A Ray of its own, whatever runs on this machine, and no token for later ones.
    output, _ = run_script(script, RAY_ADDRESS="local", RAY_AUTH_MODE="disabled")
    assert re.search(r"action +int64 \[256, \d+\]", output)


def run_script(script: Path, **variables: str) -> tuple[str, str]:
    """Run it in a process of its own, and to its end; returns what it printed."""
    command = [sys.executable, script.name]
    done = subprocess.run(
        command,
        cwd=script.parent,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = text_of(document)
    here = REPOSITORY / Path(document).parent
    pictures = re.findall(r'src="([^"]+)"', text)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    for target, _, anchor in (link.partition("#") for link in links + pictures):
        path = (here / target).resolve() if target else REPOSITORY / document
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(str(path.relative_to(REPOSITORY))), anchor


@pytest.mark.parametrize(
    "document", ["docs/cluster.md", "docs/guide.md", "docs/troubleshooting.md"]
)
def test_the_list_at_the_top_is_that_of_the_sections(document: str) -> None:
    sections = re.findall(r"^## (.*)$", text_of(document), flags=re.MULTILINE)
    listed = re.findall(r"^- \[(.*)\]\(#.*\)$", text_of(document), flags=re.MULTILINE)
    assert listed == sections


def test_the_program_that_measures_where_time_goes_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = [b for b in blocks_of("docs/troubleshooting.md") if "us per step" in b]
    script = tmp_path / "measure.py"
    script.write_text(program, encoding="utf-8")
    run_as_main(script)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["environments", "policy"]
    assert all(int(re.findall(r": (\d+) us", line)[0]) > 0 for line in lines)
