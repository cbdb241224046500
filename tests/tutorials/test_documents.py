"""What README and documents show can be run, what they link to exists, and no public name lacks."""

from __future__ import annotations

import ast
import doctest
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.programs import blocks_of, run_as_main

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    "README.md",
    *(str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / "docs").rglob("*.md"))),
]

TIMEOUT_S = 120.0


def text_of(document: str) -> str:
    return (REPOSITORY / document).read_text(encoding="utf-8")


def anchors_of(document: str) -> list[str]:
    """How GitHub names the places of the headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(document), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


BLOCKS = {
    f"{document}-{number}": source
    for document in DOCUMENTS
    for number, source in enumerate(blocks_of(document))
}
# A block with a main guard is a program, but for these: the first has a test of its own below, the
# second names a module of the reader's. Those of docs/neighbours are tested with the neighbours.
NOT_RUN = {"docs/cluster.md-0", "docs/start_methods.md-0"}
PROGRAMS = {
    name: source
    for name, source in BLOCKS.items()
    if 'if __name__ == "__main__":' in source and re.search(r"^(import|from) rlpool", source, re.M)
    if name not in NOT_RUN and not name.startswith("docs/neighbours/")
}


QUOTED = {
    f"{document}-{number}": output
    for document in DOCUMENTS
    for number, output in enumerate(
        re.findall(
            r"^```python\n.*?^```$(?:\n\n```text\n(.*?)^```$)?",
            text_of(document),
            re.MULTILINE | re.DOTALL,
        )
    )
    if output and not document.startswith("docs/neighbours/")
}
"""What a document says that a program prints, in the block right below it."""


def says(quoted: str, output: str) -> bool:
    """Whether this is what was printed, where ``...`` stands for anything.

    In warnings about workers numbers differ from run to run.
    """

    def comparable(text: str) -> str:
        return re.sub(r"^WARNING:.*$", lambda line: re.sub(r"\d+", "0", line[0]), text, flags=re.M)

    return doctest.OutputChecker().check_output(
        comparable(quoted), comparable(output), doctest.ELLIPSIS
    )


SLOW = {"docs/gpu.md-2"}
"""It starts processes that start workers."""


@contextmanager
def without_handlers() -> Iterator[None]:
    """The root logger as a new process has it, for programs that say how all of it logs."""
    level = logging.root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])
        try:
            yield
        finally:
            logging.root.setLevel(level)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PROGRAMS],
)
def test_a_program_runs(name: str, program_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if has_envpool := "import envpool" in PROGRAMS[name]:
        pytest.importorskip("envpool")
    script = program_folder / "program.py"
    script.write_text(PROGRAMS[name], encoding="utf-8")
    with without_handlers():
        run_as_main(script, folder=program_folder)
    output, errors = capfd.readouterr()
    assert errors == "" or has_envpool  # which warns of its own spaces
    assert output
    if name in QUOTED:
        assert says(QUOTED[name], output), output
    if name == "README.md-0":
        returns = [float(value) for value in re.findall(r"average return (\d+)", output)]
        assert returns[0] < 50
        assert max(returns) > 200  # it learns


def test_the_guides_have_programs_and_every_other_block_is_python() -> None:
    assert set(BLOCKS) > NOT_RUN
    assert len(PROGRAMS) > 12
    assert {"docs/tour.md-0", "docs/migration.md-0"} <= set(QUOTED) <= set(PROGRAMS)
    for name, source in BLOCKS.items():
        compile(source, name, "exec")


@pytest.mark.ray
def test_the_program_of_a_cluster_runs_on_one_machine(program_folder: Path) -> None:
    pytest.importorskip("ray", reason='needs Ray: pip install "rlpool[ray]"')
    script = program_folder / "program.py"
    script.write_text(blocks_of("docs/cluster.md")[0], encoding="utf-8")
    # A Ray of its own, whatever runs on this machine, and no token for later ones.
    output = subprocess.run(
        [sys.executable, str(script)],
        cwd=program_folder,
        env={**os.environ, "RAY_ADDRESS": "local", "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    ).stdout
    assert re.search(r"action +int64 \[256, \d+\]", output)


@pytest.mark.parametrize("name", ["lanes", "memory"])
def test_a_picture_is_drawn_from_a_real_run(name: str, program_folder: Path) -> None:
    script = REPOSITORY / "docs" / "pictures" / f"{name}.py"
    run_as_main(script, "--output", "drawn.svg", folder=program_folder)
    assert (REPOSITORY / "docs" / "pictures" / f"{name}.svg").exists()
    assert "</svg>" in (program_folder / "drawn.svg").read_text(encoding="utf-8")


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        text = text_of(document)
        here = REPOSITORY / Path(document).parent
        pictures = re.findall(r'src="([^"]+)"', text)
        links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
        for target, _, anchor in (link.partition("#") for link in links + pictures):
            path = (here / target).resolve() if target else REPOSITORY / document
            assert path.exists(), (document, target)
            names = anchors_of(str(path.relative_to(REPOSITORY))) if anchor else [anchor]
            assert anchor in names, (document, target, anchor)


def public_names(module: str) -> list[str]:
    """The full names of ``__all__``, read without importing, as extras may be missing."""
    tree = ast.parse(text_of(f"{module.replace('.', '/')}/__init__.py"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return [f"{module}.{name}" for name in names]


def test_every_public_name_has_one_place_in_the_reference() -> None:
    listed = []
    for page in (document for document in DOCUMENTS if document.startswith("docs/api/")):
        # A module is shown with the public names of its own that are asked for.
        entry = r"^::: (\S+)$(?:\n    options:\n      members: \[(.*)\]$)?"
        for name, members in re.findall(entry, text_of(page), re.MULTILINE):
            package, _, short = name.rpartition(".")
            is_module = members and short.islower()  # of a class, members are its methods
            listed += [f"{package}.{m}" for m in members.split(", ")] if is_module else [name]
    public = [n for m in ("rlpool", "rlpool.testing", "rlpool.cluster") for n in public_names(m)]
    assert len(listed) == len(set(listed))
    assert sorted(set(public) - set(listed)) == []
    integrations = (REPOSITORY / "rlpool" / "integrations").glob("[!_]*.py")
    modules = [path.stem for path in integrations if "\n__all__" in path.read_text("utf-8")]
    page = text_of("docs/api/integrations.md")
    assert [name for name in modules if f"rlpool.integrations.{name}`" not in page] == []


def test_every_document_has_its_place_on_the_site() -> None:
    navigation = text_of("mkdocs.yml").partition("\nnav:\n")[2]
    placed = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", navigation, flags=re.MULTILINE)
    tutorials = [f"tutorials/{path.stem}.md" for path in (REPOSITORY / "tutorials").glob("*.py")]
    documents = [name.removeprefix("docs/") for name in DOCUMENTS if name != "README.md"]
    made = ["overview.md", "contributing.md", "changes.md", *tutorials]
    assert sorted(placed) == sorted([*documents, *made])


def test_what_documents_call_by_its_full_name_needs_no_other_import() -> None:
    text = "".join(map(text_of, DOCUMENTS))
    called = sorted({*re.findall(r"\brlpool\.(\w+)(?:\.\w+)*\(", text)})
    program = "import rlpool, sys; sys.exit(str([*{*sys.argv[1:]} - {*dir(rlpool)}]))"
    command = [sys.executable, "-c", program, *called]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    assert done.stderr == "[]\n"
