"""Consistency of the repository: installation, names, figures, links.

Programs of documents and tutorials are run in ``tests/tutorials``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import rlpool
import rlpool.testing
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


DOCUMENTS = [
    "README.md",
    *(str(p.relative_to(REPOSITORY)) for p in REPOSITORY.glob("docs/**/*.md")),
]


def name_of(requirement: str) -> str:
    """Return the normalised name of a requirement, without extras, bounds and markers."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement)[0]).lower()


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
    # Annotations of keywords need a dependency of torch. annotationlib is in Python from 3.14.
    allowed = CORE | {"rlpool", "typing_extensions", "annotationlib"} | set(sys.stdlib_module_names)
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


def test_one_module_knows_the_operating_system() -> None:
    for path in (REPOSITORY / "rlpool").rglob("*.py"):
        if path.name != "platform.py":
            text = path.read_text(encoding="utf-8")
            known = r"\b(fcntl|resource|termios)\.|memfd_|[\"']/proc|signal\.SIG(KILL|ALRM|CHLD)"
            assert re.findall(known, text) == [], path


@pytest.mark.parametrize(
    ("package", "extra"), [("stable_baselines3", "sb3"), ("minari", "minari"), ("ray", "ray")]
)
def test_a_missing_package_raises_an_error_that_names_the_extra(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"rlpool.integrations.{extra}"
    for module in [m for m in sys.modules if m.startswith((name, f"{package}."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ImportError, match=rf"rlpool\[{extra}\]"):  # noqa: PT012
        if package == "ray":
            RayEpisodeBatcher(8, 8, BinaryAgent, {}, list)
        importlib.import_module(name)


# Names and versions


def test_all_lists_exactly_the_imported_names_and_each_has_a_docstring() -> None:
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


def test_version_and_date_agree_everywhere_and_with_the_installed_package() -> None:
    assert PROJECT["dynamic"] == ["version"]  # setuptools takes it from the package
    newest = re.search(r"^## \[(\d.*)\] - (\S+)$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert newest
    version, date = newest.groups()
    assert version == rlpool.__version__
    assert f"\nversion: {version}\ndate-released: {date}\n" in text_of("CITATION.cff")

    def contents(package: Path) -> dict[str, bytes]:
        paths = [p for p in package.rglob("*") if p.suffix == ".py" or p.name == "py.typed"]
        return {str(p.relative_to(package)): p.read_bytes() for p in paths}

    installed = Path(rlpool.__file__).resolve().parent
    ours, theirs = contents(REPOSITORY / "rlpool"), contents(installed)
    assert "py.typed" in ours
    differing = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    assert not differing, f"{installed} is another version: install rlpool again, best with -e"


def test_no_file_names_a_machine() -> None:
    # Absolute paths of a checkout or home directory; URLs and relative paths do not count.
    here = {re.escape(str(place)[1:]) for place in (REPOSITORY, Path.home()) if place.name}
    places = "|".join(sorted(here | {"home", "root", "Users", "work", "workspace", "opt", "mnt"}))
    machine_path = re.compile(rf"(?<![\w.~/-])/(?:{places})/\w")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if (REPOSITORY / name).is_file()]
    # Virtual environments, under any name.
    environments = tuple(n.removesuffix("pyvenv.cfg") for n in names if n.endswith("/pyvenv.cfg"))
    texts = {
        name: (REPOSITORY / name).read_text(encoding="utf-8", errors="ignore")
        for name in names
        if not name.startswith(environments)
    }
    assert [name for name, text in texts.items() if machine_path.search(text)] == []


# Figures and quotations


@pytest.mark.skipif(not (REPOSITORY / "benchmarks").exists(), reason="there are no benchmarks here")
def test_figures_in_documents_match_the_raw_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    page = importlib.import_module("page")
    texts = {document: text_of(document) for document in page.DOCUMENTS}
    for document, text in texts.items():
        assert page.with_tables(text) == text, f"run page.py: {document} has other figures"
    places = "".join(texts.values())
    assert [name for name in page.TABLES if f"<!-- {name} -->" not in places] == []


# Documents


def anchors_of(document: str) -> list[str]:
    """Return GitHub's anchors of the headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(document), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_links_resolve() -> None:
    for document in DOCUMENTS:
        text, here = text_of(document), (REPOSITORY / document).parent
        links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
        for target, _, anchor in (link.partition("#") for link in links if "://" not in link):
            path = (here / target).resolve() if target else REPOSITORY / document
            assert path.exists(), (document, target)
            if anchor:
                assert anchor in anchors_of(str(path.relative_to(REPOSITORY))), (document, anchor)


def test_every_public_name_has_one_place_in_the_reference() -> None:
    listed = []
    # A module is documented with its own public names, as selected.
    entry = r"^::: (\S+)$(?:\n    options:\n      members: \[(.*)\]$)?"
    for name, members in re.findall(entry, text_of("docs/api.md"), re.MULTILINE):
        package, _, short = name.rpartition(".")
        is_module = members and short.islower()  # of a class, members are its methods
        listed += [f"{package}.{m}" for m in members.split(", ")] if is_module else [name]
    modules = (rlpool, rlpool.testing)
    public = [f"{module.__name__}.{name}" for module in modules for name in module.__all__]
    public.append("rlpool.cluster.RayEpisodeBatcher")
    assert len(listed) == len(set(listed))
    assert set(public) <= set(listed)
