"""Tables of documents are those that the raw results in the repository give."""

from __future__ import annotations

import importlib
import json
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


def test_a_table_is_made_anew_where_its_raw_results_differ(
    page: ModuleType, tmp_path: Path
) -> None:
    text = "before\n<!-- figures -->\n| old |\n<!-- /figures -->\nafter"
    assert page.with_tables(text, tmp_path) == text  # nothing was measured
    line = {"workload": "W4", "efficiency": 0.876, "quartiles": [0.87, 0.88]}
    (tmp_path / "throughput.jsonl").write_text(json.dumps(line) + "\n")
    made = page.with_tables(text, tmp_path)
    assert made.startswith("before\n<!-- figures -->\n| workload |")
    assert made.endswith("| 0.88 | 0.87 to 0.88 |\n<!-- /figures -->\nafter")


RATIO = {"median": 1.604, "quartiles": [1.39, 1.886]}
LINES = {
    "requests": (
        [{"requests": "32 episodes, 1 pending", "ratio": 0.384},
         {"requests": "32 episodes, 1 pending, updates", "ratio": 0.37}],
        "| 32 episodes, 1 pending | 0.38 | 0.37 |",
    ),
    "choosing": (
        [{"kind": "computes", "steps_per_s": {"0 x 1": 930, "2 x 16": 1900}}],
        "| | 0 × 1 | 2 × 16 |\n|---|---|---|\n| steps that compute for 1 ms | 930 | **1,900** |",
    ),
    "agent_rows": (
        [{"agent": "MLP", "lanes": 1, "times": {"8": 1.38, "16": 1.4}},
         {"agent": "MLP", "lanes": 4, "times": {"8": 1.2, "16": 1.22}}],
        "| MLP 4-64-64-2, CartPole | 1 | 1.38 | 1.40 |\n| | 4 | 1.20 | 1.22 |",
    ),
    "many_agents": (
        [{"many_agents": "bare loop", "steps_per_s": {"median": 3023.0}},
         {"many_agents": "rlpool", "steps_per_s": {"median": 4168.0}, "ratio": RATIO}],
        ("| bare loop, one process | 3,023 | 1 |\n"
        "| `EpisodeBatcher`, 2 workers of 8 environments | 4,168 | 1.60 (1.39 to 1.89) |"),
    ),
    "learning_speed": (
        [{"workload": "cartpole", "rates": {
            "rlpool": [100.0, 120.0], "rlpool, 2 workers": [50.0, 90.0], "CleanRL": [50.0, 40.0]}}],
        ("| PPO, CartPole-v1, 4 environments | 110 | 45 | | 2.50 (2.00 to 3.00) | |\n"
        "| the same with 2 workers | 70 | | | 1.62 (1.00 to 2.25) | |"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_what_a_script_prints_becomes_the_table_of_a_document(
    name: str, page: ModuleType, tmp_path: Path
) -> None:
    lines, expected = LINES[name]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = [table for make in page.TABLES.values() if (table := "\n".join(make(tmp_path)))]
    assert [table.endswith(expected) for table in made] == [True], made


def test_every_table_has_its_place_in_a_document(page: ModuleType) -> None:
    texts = [(REPOSITORY / name).read_text(encoding="utf-8") for name in page.DOCUMENTS]
    assert [n for n in page.TABLES if not any(f"<!-- {n} -->" in text for text in texts)] == []
