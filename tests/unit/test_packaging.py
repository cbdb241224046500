"""What the repository's files promise about installing, checking and naming rlpool."""

from __future__ import annotations

import ast
import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

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

# -c and the extra's name are looked for, the rest of the line is free.
INSTALL = re.compile(r'(?:python -m )?pip install -c constraints\.txt "\.\[(\w+)\]" && (.+)')


def _text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def _set_up_commands() -> list[str]:
    """Lines of the README that install and go on."""
    lines = _text("README.md").splitlines()
    return [line for line in lines if "pip install" in line and "&&" in line]


def _name(requirement: str) -> str:
    """Normalised name of a requirement, without extras, bounds and markers."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _repository_files() -> list[Path]:
    """Files that git tracks or would track; none of what .gitignore names."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


# Commands


def test_readme_has_two_set_up_commands() -> None:
    commands = _set_up_commands()
    assert len(commands) == 2
    for command in commands:
        match = INSTALL.fullmatch(command)
        assert match, f"not one line of the shape {INSTALL.pattern}: {command}"
        assert match[1] in EXTRAS


def test_first_command_runs_the_main_tutorial() -> None:
    match = INSTALL.fullmatch(_set_up_commands()[0])
    assert match
    extra, rest = match.groups()
    assert (extra, rest) == ("tutorials", "python tutorials/multiprocess_episode_batcher.py")
    assert (REPOSITORY / rest.split()[1]).is_file()


def test_second_command_runs_the_tests() -> None:
    match = INSTALL.fullmatch(_set_up_commands()[1])
    assert match
    assert match.groups() == ("test", "python -m pytest")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    printed = subprocess.run(
        [str(REPOSITORY / ".ci" / "run"), "--print-test-command"],
        cwd="/",
        capture_output=True,
        check=True,
        text=True,
    )
    assert printed.stdout == _set_up_commands()[1] + "\n"
    assert "-m pytest" not in _text(".ci/run"), "the command is extracted, not copied"


@pytest.mark.parametrize("n_commands", [0, 2])
def test_ci_refuses_a_readme_without_exactly_one_test_command(
    n_commands: int, tmp_path: Path
) -> None:
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_bytes((REPOSITORY / ".ci" / "run").read_bytes())
    script.chmod(0o755)
    readme = "\n".join(["# rlpool", *[_set_up_commands()[1]] * n_commands])
    (tmp_path / "README.md").write_text(readme, encoding="utf-8")
    done = subprocess.run(
        [str(script), "--print-test-command"], capture_output=True, check=False, text=True
    )
    assert done.returncode == 1
    assert f"has {n_commands} test commands" in done.stderr
    assert done.stdout == ""


def test_ci_script_can_be_executed() -> None:
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)


def test_pre_commit_runs_what_ci_runs() -> None:
    entries = re.findall(r"^ +entry: (.+)$", _text(".pre-commit-config.yaml"), flags=re.MULTILINE)
    assert entries == ["ruff check .", "ruff format --check .", "mypy --strict rlpool"]
    for entry in entries:
        assert f'in_venv "$work/tests" {entry}\n' in _text(".ci/run")


def test_readme_lists_every_tutorial() -> None:
    listed = re.findall(r"\(tutorials/(\w+\.py)\)", _text("README.md"))
    assert sorted(listed) == sorted(path.name for path in (REPOSITORY / "tutorials").glob("*.py"))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_files_that_a_document_names_exist(document: str) -> None:
    text = _text(document)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    scripts = re.findall(r"^python ([\w/]+\.py)", text, flags=re.MULTILINE)
    missing = [name for name in links + scripts if not (REPOSITORY / name).exists()]
    assert missing == []


# Dependencies


def test_core_dependencies_are_exactly_four() -> None:
    assert {_name(requirement) for requirement in PROJECT["dependencies"]} == CORE
    assert len(PROJECT["dependencies"]) == len(CORE)


def test_extras_are_there() -> None:
    assert {"test", "tutorials", "dev", "tensordict"} <= set(EXTRAS)


def test_every_direct_dependency_has_a_lower_bound_and_is_pinned() -> None:
    requirements = [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]
    direct = [r for r in requirements if _name(r) != "rlpool"]
    assert [r for r in direct if ">=" not in r.split(";")[0]] == []

    lines = [line.split("#")[0].strip() for line in _text("constraints.txt").splitlines()]
    pins = [line for line in lines if line]
    assert [pin for pin in pins if not re.match(r"[\w.-]+==[\w.]+( ;|$)", pin)] == []
    assert {_name(r) for r in direct} <= {_name(pin) for pin in pins}


def test_the_pinned_mujoco_does_not_warn_about_half_cheetah(tmp_path: Path) -> None:
    source = "import gymnasium; gymnasium.make('HalfCheetah-v5').reset(seed=0)"
    # A process of its own: MuJoCo prints from C, and writes a file into the working directory.
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr, list(tmp_path.iterdir())) == ("", "", [])


def test_library_imports_nothing_but_its_dependencies() -> None:
    # The annotations of keywords need what torch brings along.
    allowed = CORE | {"rlpool", "typing_extensions"} | set(sys.stdlib_module_names)
    foreign = set()
    for path in (REPOSITORY / "rlpool").rglob("*.py"):
        if "integrations" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            roots = {name.split(".")[0] for name in names}
            foreign.update(f"{path.name}: {root}" for root in roots - allowed)
    assert foreign == set()


def test_setup_cfg_states_nothing_that_pyproject_states() -> None:
    config = configparser.ConfigParser()
    config.read_string(_text("setup.cfg"))
    declarative = {s for s in config.sections() if s == "metadata" or s.startswith("options")}
    assert declarative == set()
    tools = {s for s in config.sections() if s.split(":")[0] in {"tool", "mypy", "flake8"}}
    assert tools == set()


# Names and versions


def test_version_is_the_same_everywhere() -> None:
    changelog = re.search(r"^## \[(\d[^\]]*)\]", _text("CHANGELOG.md"), flags=re.MULTILINE)
    citation = re.search(r"^version: (\S+)$", _text("CITATION.cff"), flags=re.MULTILINE)
    assert changelog
    assert citation
    versions = {PROJECT["version"], rlpool.__version__, changelog[1], citation[1]}
    assert versions == {PROJECT["version"]}


def test_installed_package_is_that_of_the_repository() -> None:
    installed = Path(rlpool.__file__).resolve().parent
    source = REPOSITORY / "rlpool"

    def contents(package: Path) -> dict[str, bytes]:
        paths = [p for p in package.rglob("*") if p.suffix == ".py" or p.name == "py.typed"]
        return {str(p.relative_to(package)): p.read_bytes() for p in paths}

    ours, theirs = contents(source), contents(installed)
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
    found = []
    for path in _repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if machine_path.search(line):
                found.append(f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.mark.parametrize("name", ["README.md", "constraints.txt", "pyproject.toml", ".ci/run"])
def test_installing_uses_the_index_that_the_user_configured(name: str) -> None:
    options = ("--index-url", "--extra-index-url", "--find-links", "--trusted-host")
    assert [option for option in options if option in _text(name)] == []
