"""What checks the documentation's site finds what is wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

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


def test_a_reference_that_leads_nowhere_or_elsewhere_is_named(site: Path) -> None:
    page = site / "guide" / "page.html"
    before = page.read_text()
    for added in (
        '<a href="../gone.html">',
        '<a href="#three">',
        '<img src="lost.svg">',
        '<script src="https://cdn.example/a.js">',
        '<link href="//fonts.example/b.css">',
    ):
        page.write_text(before + added)
        assert len(problems(site)) == 1, added
    page.write_text(before)
    (site / "llms-full.md").unlink()
    assert problems(site) == ["llms-full.md is missing"]
