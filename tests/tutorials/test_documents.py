"""What README and documents show can be run, and what they link to exists."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.programs import run_as_main

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", *(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))]

TIMEOUT_S = 120.0
# How long processes may take to end after the script that started them has ended.
GRACE_S = 5.0


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
    for document in ("README.md", "docs/guide.md")
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


def run_script(script: Path) -> tuple[str, str]:
    """Run it to its end, which must be that of its workers; returns what it printed."""
    # A session of its own, by which the processes that the script starts can be found.
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors
            deadline = time.monotonic() + GRACE_S
            while (left := members_of(process.pid)) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert left == []
            return output, errors
        finally:
            for pid in members_of(process.pid):
                os.kill(pid, signal.SIGKILL)


def members_of(session: int) -> list[int]:
    """Numbers of the living processes of a session."""
    members = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == session:
                members.append(process)
        except (ProcessLookupError, PermissionError):
            continue
    return [one.pid for one in members if one.info["status"] != psutil.STATUS_ZOMBIE]


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


@pytest.mark.parametrize("document", ["docs/guide.md", "docs/troubleshooting.md"])
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
