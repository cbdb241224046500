"""What the files of the repository promise: installing, checking, names, figures, quotations, site.

Links and programs of documents are in ``tests/tutorials/test_documents.py``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rlpool
from rlpool.__main__ import main
from rlpool.cluster import RayEpisodeBatcher

from support.agents import BinaryAgent

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
CORE = {"cloudpickle", "gymnasium", "numpy", "torch"}


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def name_of(requirement: str) -> str:
    """Normalised name of a requirement, without extras, bounds and markers."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


# Commands and dependencies


def test_the_readme_installs_and_runs_the_main_tutorial_and_the_tests() -> None:
    install = re.compile(r'(?:python -m )?pip install -c constraints\.txt "\.\[(\w+)\]" && (.+)')
    commands = [line for line in text_of("README.md").splitlines() if "pip install" in line]
    commands = [line for line in commands if "&&" in line]
    assert [match and match.groups() for match in map(install.fullmatch, commands)] == [
        ("tutorials", "python tutorials/multiprocess_episode_batcher.py"),
        ("test", "python -m pytest"),
    ]
    assert {"test", "tutorials", "dev", "tensordict", "ray"} <= set(EXTRAS)
    script = [str(REPOSITORY / ".ci" / "run"), "--print-test-command"]
    assert subprocess.check_output(script, cwd="/", text=True) == commands[1] + "\n"
    entries = re.findall(r"^ +entry: (.+)$", text_of(".pre-commit-config.yaml"), re.MULTILINE)
    assert entries == ["ruff check .", "ruff format --check .", "mypy --strict rlpool"]
    for entry in entries:
        assert f'in_venv "$work/tests" {entry}\n' in text_of(".ci/run")


def test_the_readme_lists_every_tutorial_and_documents_run_scripts_that_exist() -> None:
    listed = re.findall(r"\(tutorials/(\w+\.py)\)", text_of("README.md"))
    assert sorted(listed) == sorted(path.name for path in (REPOSITORY / "tutorials").glob("*.py"))
    for document in REPOSITORY.rglob("*.md"):
        scripts = re.findall(r"^python ([\w/]+\.py)", document.read_text("utf-8"), re.MULTILINE)
        assert [name for name in scripts if not (REPOSITORY / name).exists()] == []


def test_four_core_dependencies_and_every_direct_one_is_bounded_and_pinned() -> None:
    assert sorted(map(name_of, PROJECT["dependencies"])) == sorted(CORE)
    requirements = [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]
    direct = [r for r in requirements if name_of(r) != "rlpool"]
    assert [r for r in direct if ">=" not in r.split(";")[0]] == []
    lines = [line.split("#")[0].strip() for line in text_of("constraints.txt").splitlines()]
    pins = [line for line in lines if line]
    assert [pin for pin in pins if not re.match(r"[\w.-]+==[\w.]+( ;|$)", pin)] == []
    assert {name_of(r) for r in direct} <= {name_of(pin) for pin in pins}


def test_the_library_imports_nothing_but_its_dependencies() -> None:
    # The annotations of keywords need what torch brings along.
    allowed = CORE | {"rlpool", "typing_extensions"} | set(sys.stdlib_module_names)
    optional = {"batch": {"tqdm"}, "integrations": {"minari", "stable_baselines3"}}
    foreign = set()
    for path in (REPOSITORY / "rlpool").rglob("*.py"):
        extra = optional.get(path.parent.name, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            roots = {name.split(".")[0] for name in names}
            foreign.update(f"{path.name}: {root}" for root in roots - allowed - extra)
    assert foreign == set()


@pytest.mark.parametrize(
    ("package", "extra"), [("stable_baselines3", "sb3"), ("minari", "minari"), ("ray", "ray")]
)
def test_what_needs_a_package_that_is_missing_names_the_extra(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"rlpool.integrations.{extra}"
    for module in [m for m in sys.modules if m.startswith((name, f"{package}."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    use: Any = partial(importlib.import_module, name)
    if package == "ray":
        use = partial(RayEpisodeBatcher, 8, 8, BinaryAgent, {}, list)
    with pytest.raises(ImportError, match=rf"pip install 'rlpool\[{extra}\]'"):
        use()


# Names and versions


def test_all_is_exactly_what_the_package_imports_and_has_docstrings() -> None:
    names = {name for name, value in vars(rlpool).items() if not isinstance(value, ModuleType)}
    public = {name for name in names if not name.startswith("_") and name != "annotations"}
    assert set(rlpool.__all__) - {"__version__"} == public
    assert list(rlpool.__all__) == sorted(set(rlpool.__all__))
    for name in rlpool.__all__:
        exported = getattr(rlpool, name)
        if inspect.isclass(exported) or inspect.isroutine(exported):
            # The object's own text: inspect.getdoc would accept that of a base class.
            assert (exported.__doc__ or "").strip(), f"rlpool.{name} has no docstring"
            assert exported.__module__.startswith("rlpool."), f"rlpool.{name} is not rlpool's"


def test_the_version_is_the_same_everywhere_and_the_installed_package_is_this_one() -> None:
    changelog = re.search(r"^## \[(\d[^\]]*)\]", text_of("CHANGELOG.md"), re.MULTILINE)
    citation = re.search(r"^version: (\S+)$", text_of("CITATION.cff"), re.MULTILINE)
    assert changelog
    assert citation
    versions = {PROJECT["version"], rlpool.__version__, changelog[1], citation[1]}
    assert versions == {PROJECT["version"]}

    def contents(package: Path) -> dict[str, bytes]:
        paths = [p for p in package.rglob("*") if p.suffix == ".py" or p.name == "py.typed"]
        return {str(p.relative_to(package)): p.read_bytes() for p in paths}

    installed = Path(rlpool.__file__).resolve().parent
    ours, theirs = contents(REPOSITORY / "rlpool"), contents(installed)
    assert "py.typed" in ours
    differing = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    assert not differing, f"{installed} is another version: install rlpool again, best with -e"


def test_no_file_names_a_machine() -> None:
    # Paths of somebody's checkout or home; a URL's path or a relative one does not count.
    here = {re.escape(str(place)[1:]) for place in (REPOSITORY, Path.home()) if place.name}
    places = "|".join(sorted(here | {"home", "root", "Users", "work", "workspace", "opt", "mnt"}))
    machine_path = re.compile(rf"(?<![\w.~/-])/(?:{places})/\w")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if (REPOSITORY / name).is_file()]
    # Virtual environments, whatever the user of a clone has called them.
    environments = tuple(n.removesuffix("pyvenv.cfg") for n in names if n.endswith("/pyvenv.cfg"))
    texts = {
        name: (REPOSITORY / name).read_text(encoding="utf-8", errors="ignore")
        for name in names
        if not name.startswith(environments)
    }
    assert [name for name, text in texts.items() if machine_path.search(text)] == []


# Figures and quotations


@pytest.mark.skipif(not (REPOSITORY / "benchmarks").exists(), reason="there are no benchmarks here")
def test_documents_have_the_figures_of_the_raw_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    page = importlib.import_module("page")
    texts = {document: text_of(document) for document in page.DOCUMENTS}
    for document, text in texts.items():
        assert page.with_tables(text) == text, f"run page.py: {document} has other figures"
    places = "".join(texts.values())
    assert [name for name in page.TABLES if f"<!-- {name} -->" not in places] == []


def quoted(document: str) -> list[str]:
    """The blocks of text that a document shows."""
    return re.findall(r"^```text\n(.*?)^```$", text_of(document), re.MULTILINE | re.DOTALL)


def lines_of(text: str) -> set[str]:
    """Lines without what differs from run to run: numbers, and spaces between columns."""
    return {re.sub(r" +", " ", re.sub(r"\d+", "0", line)).strip() for line in text.splitlines()}


def test_the_doctor_says_what_is_quoted(capfd: pytest.CaptureFixture[str]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64 + len(os.listdir("/proc/self/fd")), before[1]))
    try:
        assert main(["doctor", "--n-workers", "16"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    said = lines_of(capfd.readouterr().out)
    blocks = [*quoted("docs/failures.md"), *quoted("docs/start_methods.md")]
    (missing,) = [each for each in blocks if each.startswith("FAIL")]
    (forked,) = [each for each in blocks if each.startswith("ok ")]
    assert lines_of(missing) | lines_of(forked) <= said


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    (tree,) = quoted("docs/api/errors.md")
    above: list[tuple[int, type]] = []
    drawn = set()
    for line in tree.splitlines():
        name = re.search(r"[A-Z]\w+", line)
        assert name
        kind = getattr(rlpool, name[0])
        while above and above[-1][0] >= name.start():
            above.pop()
        if above:
            assert above[-1][1] in kind.__bases__, line
        above.append((name.start(), kind))
        drawn.add(kind)
    kinds = {kind for name in rlpool.__all__ if isinstance(kind := getattr(rlpool, name), type)}
    assert drawn == {kind for kind in kinds if issubclass(kind, rlpool.RlpoolError)}


# The site


def problems(site: Path) -> list[str]:
    """What the script that checks the documentation's site finds."""
    path = REPOSITORY / ".ci" / "check_site.py"
    spec = importlib.util.spec_from_file_location("check_site", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.broken_references(site))


def test_a_reference_of_the_site_that_leads_nowhere_or_elsewhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "guide").mkdir()
    page = tmp_path / "guide" / "page.html"
    files = {
        tmp_path / "style.css": "h1 { color: green }",
        tmp_path / "index.html": '<link href="style.css"><h1 id="start">Start</h1>'
        '<a href="guide/page.html#two">two</a><a href="https://example.org">elsewhere</a>',
        tmp_path / "llms.txt": "# Site\n\n- [two](guide/page.html#two): the second.\n",
        tmp_path / "llms-full.md": "see [start](index.html)\n\n```text\n[a](b)\n```\n",
        page: '<link href="/style.css"><h2 id="two">Two</h2><a href="..">start</a>',
    }
    for path, text in files.items():
        path.write_text(text)
    assert problems(tmp_path) == []
    for added in (
        '<a href="../gone.html">',
        '<a href="#three">',
        '<img src="lost.svg">',
        '<script src="https://cdn.example/a.js">',
        '<link href="//fonts.example/b.css">',
    ):
        page.write_text(files[page] + added)
        assert len(problems(tmp_path)) == 1, added
    page.write_text(files[page])
    (tmp_path / "llms-full.md").unlink()
    assert problems(tmp_path) == ["llms-full.md is missing"]
