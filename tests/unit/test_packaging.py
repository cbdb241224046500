"""What the repository's files promise about installing, checking and naming rlpool."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rlpool

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
CORE = {"cloudpickle", "gymnasium", "numpy", "torch"}


def _text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def _name(requirement: str) -> str:
    """Normalised name of a requirement, without extras, bounds and markers."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _lines_of_repository() -> Iterator[tuple[str, str]]:
    """Place and text of every line of the files that git tracks or would track.

    Virtual environments are left out, whatever the user of a clone has called them.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if name]
    environments = [n.removesuffix("pyvenv.cfg") for n in names if n.endswith("/pyvenv.cfg")]
    for name in names:
        if (REPOSITORY / name).is_file() and not name.startswith(tuple(environments)):
            text = (REPOSITORY / name).read_text(encoding="utf-8", errors="ignore")
            yield from ((f"{name}:{n}", line) for n, line in enumerate(text.splitlines(), start=1))


# Commands


def test_the_readme_installs_and_runs_the_main_tutorial_and_the_tests() -> None:
    install = re.compile(r'(?:python -m )?pip install -c constraints\.txt "\.\[(\w+)\]" && (.+)')
    lines = [line for line in _text("README.md").splitlines() if "pip install" in line]
    commands = [line for line in lines if "&&" in line]
    assert [match and match.groups() for match in map(install.fullmatch, commands)] == [
        ("tutorials", "python tutorials/multiprocess_episode_batcher.py"),
        ("test", "python -m pytest"),
    ]
    assert {"test", "tutorials", "dev", "tensordict", "ray"} <= set(EXTRAS)
    script = [str(REPOSITORY / ".ci" / "run"), "--print-test-command"]
    assert subprocess.check_output(script, cwd="/", text=True) == commands[1] + "\n"
    assert "-m pytest" not in _text(".ci/run"), "the command is extracted, not copied"


def test_pre_commit_runs_what_ci_runs() -> None:
    entries = re.findall(r"^ +entry: (.+)$", _text(".pre-commit-config.yaml"), flags=re.MULTILINE)
    assert entries == ["ruff check .", "ruff format --check .", "mypy --strict rlpool"]
    for entry in entries:
        assert f'in_venv "$work/tests" {entry}\n' in _text(".ci/run")


def test_readme_lists_every_tutorial_and_documents_run_scripts_that_exist() -> None:
    listed = re.findall(r"\(tutorials/(\w+\.py)\)", _text("README.md"))
    assert sorted(listed) == sorted(path.name for path in (REPOSITORY / "tutorials").glob("*.py"))
    for document in REPOSITORY.rglob("*.md"):
        text = document.read_text(encoding="utf-8")
        scripts = re.findall(r"^python ([\w/]+\.py)", text, flags=re.MULTILINE)
        assert [name for name in scripts if not (REPOSITORY / name).exists()] == []


# Dependencies


def test_four_core_dependencies_and_every_direct_one_is_bounded_and_pinned() -> None:
    assert sorted(map(_name, PROJECT["dependencies"])) == sorted(CORE)
    requirements = [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]
    direct = [r for r in requirements if _name(r) != "rlpool"]
    assert [r for r in direct if ">=" not in r.split(";")[0]] == []
    lines = [line.split("#")[0].strip() for line in _text("constraints.txt").splitlines()]
    pins = [line for line in lines if line]
    assert [pin for pin in pins if not re.match(r"[\w.-]+==[\w.]+( ;|$)", pin)] == []
    assert {_name(r) for r in direct} <= {_name(pin) for pin in pins}


def test_library_imports_nothing_but_its_dependencies() -> None:
    # The annotations of keywords need what torch brings along.
    allowed = CORE | {"rlpool", "typing_extensions"} | set(sys.stdlib_module_names)
    optional = {
        "batch": {"tqdm"},
        "integrations": {"minari", "stable_baselines3"},
    }
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


def test_version_is_the_same_everywhere() -> None:
    changelog = re.search(r"^## \[(\d[^\]]*)\]", _text("CHANGELOG.md"), flags=re.MULTILINE)
    citation = re.search(r"^version: (\S+)$", _text("CITATION.cff"), flags=re.MULTILINE)
    assert changelog
    assert citation
    versions = {PROJECT["version"], rlpool.__version__, changelog[1], citation[1]}
    assert versions == {PROJECT["version"]}


def test_installed_package_is_that_of_the_repository() -> None:
    def contents(package: Path) -> dict[str, bytes]:
        paths = [p for p in package.rglob("*") if p.suffix == ".py" or p.name == "py.typed"]
        return {str(p.relative_to(package)): p.read_bytes() for p in paths}

    installed = Path(rlpool.__file__).resolve().parent
    ours, theirs = contents(REPOSITORY / "rlpool"), contents(installed)
    assert "py.typed" in ours
    differing = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
    assert differing == [], f"{installed} is another version: install rlpool again, best with -e"


def test_no_file_names_a_machine() -> None:
    # Paths of somebody's checkout or home; a URL's path or a relative one does not count.
    here = {re.escape(str(place)[1:]) for place in (REPOSITORY, Path.home()) if place.name}
    places = "|".join(sorted(here | {"home", "root", "Users", "work", "workspace", "opt", "mnt"}))
    machine_path = re.compile(rf"(?<![\w.~/-])/(?:{places})/\w")
    assert [p for p, line in _lines_of_repository() if machine_path.search(line)] == []
