"""What checks the documentation's site finds what is wrong, and what makes it reads docstrings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    """A file of the repository that is no part of a package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site of two pages, on which every reference leads somewhere."""
    (tmp_path / "guide").mkdir()
    (tmp_path / "style.css").write_text("h1 { color: green }")
    (tmp_path / "index.html").write_text(
        '<link href="style.css"><h1 id="start">Start</h1><a href="guide/page.html#two">two</a>'
        '<a href="https://example.org">elsewhere</a><a href="#start">up</a>'
    )
    (tmp_path / "llms.txt").write_text("# Site\n\n- [two](guide/page.html#two): the second.\n")
    (tmp_path / "llms-full.md").write_text("see [start](index.html)\n\n```text\n[a](b)\n```\n")
    (tmp_path / "guide" / "page.html").write_text(
        '<link href="/style.css"><h2 id="two">Two</h2><a href="..">start</a>'
    )
    return tmp_path


def problems(site: Path) -> list[str]:
    return list(load(".ci/check_site.py").broken_references(site))


def test_a_site_whose_references_lead_somewhere_has_no_problems(site: Path) -> None:
    assert problems(site) == []


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ('<a href="../gone.html">', "guide/page.html links to ../gone.html, which is not there"),
        ('<a href="#three">', "guide/page.html links to #three: no such place on that page"),
        ('<a href="../index.html#end">', "index.html#end: no such place on that page"),
        ('<img src="lost.svg">', "links to lost.svg, which is not there"),
        (
            '<script src="https://cdn.example/a.js">',
            "loads https://cdn.example/a.js from elsewhere",
        ),
        ('<link href="//fonts.example/b.css">', "loads //fonts.example/b.css from elsewhere"),
    ],
)
def test_a_reference_that_leads_nowhere_or_elsewhere_is_named(
    site: Path, added: str, problem: str
) -> None:
    page = site / "guide" / "page.html"
    page.write_text(page.read_text() + added)
    (found,) = problems(site)
    assert found.endswith(problem)


def test_a_style_that_loads_from_elsewhere_is_named(site: Path) -> None:
    (site / "style.css").write_text("@font-face { src: url('https://fonts.example/c.woff') }")
    assert problems(site) == ["style.css loads https://fonts.example/c.woff' from elsewhere"]


def test_a_list_of_pages_that_is_missing_or_leads_nowhere_is_named(site: Path) -> None:
    (site / "llms.txt").write_text("- [gone](gone.html): no page of this site.")
    (site / "llms-full.md").unlink()
    assert problems(site) == [
        "llms.txt links to gone.html, which is not there",
        "llms-full.md is missing",
    ]


def test_a_folder_without_pages_is_a_problem(tmp_path: Path) -> None:
    assert f"{tmp_path} has no pages" in problems(tmp_path)


# docs/hooks.py -----------------------------------------------------------------------------------

DOCSTRING = """Do something.

It goes like this::

    first
    second

Args:
    value: What it takes.

Example::

    do(1)

Raises:
    SpecError: Never.
"""

MARKDOWN = """Do something.

It goes like this:

```python
first
second
```

Args:
    value: What it takes.

Examples:
    ```python
    do(1)
    ```

Raises:
    SpecError: Never.
"""


def test_literal_blocks_and_examples_of_docstrings_become_markdown() -> None:
    pytest.importorskip("mkdocs", reason='needs the extra docs: pip install "rlpool[docs]"')
    hooks = load("docs/hooks.py")
    assert hooks.as_markdown(DOCSTRING) + "\n" == MARKDOWN
    doctest = "Do.\n\nExample:\n    >>> do(1)\n    2"
    assert hooks.as_markdown(doctest) == "Do.\n\nExamples:\n    >>> do(1)\n    2"


def test_the_first_mention_of_a_name_leads_to_the_reference() -> None:
    pytest.importorskip("mkdocs", reason='needs the extra docs: pip install "rlpool[docs]"')
    linked = load("docs/hooks.py").with_names_linked
    assert linked("a `Pool`, a `Pool`") == "a [`Pool`][rlpool.Pool], a `Pool`"
    for untouched in ("# `Pool`", "```\n`Pool`\n```", "[`Pool`](pools.md)", "`no_name_of_rlpool`"):
        assert linked(untouched) == untouched


def test_a_page_is_listed_with_its_first_sentence() -> None:
    pytest.importorskip("mkdocs", reason='needs the extra docs: pip install "rlpool[docs]"')
    hooks = load("docs/hooks.py")
    hooks.TEXTS["pools.md"] = (
        "---\nsearch: 1\n---\n# Pools\n\n```bash\npip install x\n```\n\n"
        "What a [batcher](batchers.html) makes\nflows into a `Pool`. Then more.\n"
    )
    line = "- [Pools](pools.html): What a batcher makes flows into a `Pool`."
    assert hooks.line_about("pools.md") == line


def test_the_file_of_all_pages_has_signatures_and_docstrings() -> None:
    pytest.importorskip("mkdocs", reason='needs the extra docs: pip install "rlpool[docs]"')
    griffe = pytest.importorskip("griffe")
    package = griffe.load("rlpool", search_paths=[REPOSITORY], docstring_parser="google")
    page = "# Training\n\n::: rlpool.gae\n\n::: rlpool.EpisodeStatistics\n"
    text = load("docs/hooks.py").with_docstrings(page, package)
    assert "\n## rlpool.gae\n\n```python\ngae(reward: Tensor, value: Tensor," in text
    assert "Generalised advantage estimation." in text
    assert "\n### rlpool.EpisodeStatistics.update\n" in text
    assert ":::" not in text


def test_the_reference_leaves_out_what_users_do_not_call() -> None:
    pytest.importorskip("mkdocs", reason='needs the extra docs: pip install "rlpool[docs]"')
    hooks = load("docs/hooks.py")
    for name in ("_step_lanes", "of_tape", "forget", "reworded", "layout"):
        assert hooks.HIDDEN.search(name)
    for name in ("save", "step_lanes", "n_lanes", "layouts"):
        assert not hooks.HIDDEN.search(name)


def test_a_literal_block_that_is_no_program_is_not_coloured_as_one() -> None:
    pytest.importorskip("mkdocs", reason='needs the extra docs: pip install "rlpool[docs]"')
    hooks = load("docs/hooks.py")
    assert "```text\n" in hooks.as_markdown(
        "Names::\n\n    rlpool    TorchRL\n    frame     observation"
    )
    assert "```python\n" in hooks.as_markdown("So::\n\n    >>> 1 + 1\n    2")


def test_a_link_under_the_name_of_a_document_gets_its_title() -> None:
    pytest.importorskip("mkdocs", reason='needs the extra docs: pip install "rlpool[docs]"')
    hooks, known = load("docs/hooks.py"), SimpleNamespace(get_file_from_path=lambda path: path)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="neighbours/sb3.md"))

    def on_the_site(markdown: str) -> str:
        return str(hooks.on_page_markdown(markdown, page=page, config=None, files=known))

    assert on_the_site("see [../pools.md](../pools.md#x)") == "see [Replay pools](../pools.md#x)"
    assert on_the_site("see [pools](../pools.md)") == "see [pools](../pools.md)"
    assert on_the_site("[ppo.py](../../tutorials/ppo.py)") == "[ppo.py](../tutorials/ppo.md)"


def test_defaults_are_shown_as_values() -> None:
    pytest.importorskip("mkdocs", reason='needs the extra docs: pip install "rlpool[docs]"')
    griffe = pytest.importorskip("griffe")
    hooks = str(REPOSITORY / "docs" / "hooks.py")
    extensions = griffe.load_extensions("unpack_typeddict", f"{hooks}:DefaultsAsValues")
    rlpool = griffe.load(
        "rlpool", search_paths=[REPOSITORY], extensions=extensions, docstring_parser="google"
    )
    function = rlpool["batch.batcher.EpisodeBatcher.__init__"]
    defaults = {each.name: each.default for each in function.parameters}
    assert defaults["timeout"] == "600.0"
    assert defaults["max_restarts"] == "16"
    assert defaults["on_worker_failure"] == "'restart'"
    assert "..." not in map(str, defaults.values())
    assert "n_workers" in defaults
    assert not {"n_threads", "seed"} & defaults.keys()  # second names
    assert function.docstring is None  # its class explains all of them, once
    (section,) = (
        each for each in function.parent.docstring.parsed if each.kind.value == "parameters"
    )
    assert {each.name: each.value for each in section.value}["max_restarts"] == "16"
