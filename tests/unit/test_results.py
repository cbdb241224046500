"""Tables of documents are those that the raw results in the repository give."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "page.py"

pytestmark = pytest.mark.skipif(
    not SCRIPT.exists(), reason="there are no benchmarks beside these tests"
)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("page")


def test_documents_have_the_figures_of_the_raw_results(page: ModuleType) -> None:
    for document in page.DOCUMENTS:
        text = (REPOSITORY / document).read_text(encoding="utf-8")
        assert page.with_tables(text) == text, f"run {SCRIPT.name}: {document} has other figures"


def test_every_table_has_its_place_in_a_document(page: ModuleType) -> None:
    texts = [(REPOSITORY / name).read_text(encoding="utf-8") for name in page.DOCUMENTS]
    assert [n for n in page.TABLES if not any(f"<!-- {n} -->" in text for text in texts)] == []
