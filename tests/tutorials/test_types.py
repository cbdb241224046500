"""mypy finds no error in programs of documents and tutorials that rlpool's signatures make.

What it finds because of the annotations of other libraries is listed here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import blocks_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))]

USES = """
from rlpool import EpisodeBatcher, TemporalDictTensor

def check(episodes: EpisodeBatcher) -> None:
    result: TemporalDictTensor = episodes.get(timeout=3.0)
    wrong: TemporalDictTensor = episodes.get(blocking=False)
"""

COMMAND = (
    *(sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports"),
    *("--check-untyped-defs", "--follow-imports=silent", "--no-error-summary"),
    "--scripts-are-modules",
)

# Part of a message, and of the line that it is about.
OTHERS = (
    # Gymnasium: the shape of a space, and what an environment is registered as, may be None; only
    # the class of a discrete space says that it has a number of actions.
    (r"not indexable|not subscriptable", r"_space\.shape\["),
    (r"", r"\.spec\."),
    (r"\"n\"", r"action_space\.n\b"),
    (r"overrides class \"Wrapper\"", r"def step"),
    # PyTorch: what a module registers is a `Tensor | Module`; private functions.
    (r"\"(Tensor \| Module|Module \| Tensor|Tensor \| float)\b|Unbound|_foreach_lerp_", r""),
    (r"\"Tensor\"( is)? not callable", r""),
    (r"\"arange\"|\"end\"|\"to\"", r"torch\.arange|self\.to\(memory_format"),
    # NumPy: the class of an array's elements is no number.
    (r"", r"np\.(float32|finfo|iinfo)|kind\(dtype\)"),
    # TorchRL has no annotations.
    (r"", r"ProbabilisticTensorDict|TensorDictModule|\.backward\(\)"),
    # A program's own: without annotations, a parameter with None as default counts as None, a
    # literal of a list or dict has elements of one type, and a name keeps the type that it began
    # with.
    (r"\"None\"", r"agent_info\["),
    (r"object", r"progress|ages|n_before"),
    (r"list\[int\]|annotation|Cannot determine", r"progress|VISIBLE|is_ending|epoch_of_"),
    (r"\*\*dict\[|multiple values", r"\*\*?\w+"),
    (r"None", r"self\.memory|cluster\.remove_node|__doc__|where\.|row"),
    (r"Incompatible types in assignment", r"parts? (=|in)|talker\.|RecordVideo"),
    (r"Cannot override instance variable", r"metadata"),
    (r"Expected 4 positional", r"\*inputs"),
)


def is_of_others(file: str, line: str, message: str) -> bool:
    source = Path(file).read_text("utf-8").splitlines()[int(line) - 1]
    return any(re.search(told, message) and re.search(at, source) for told, at in OTHERS)


@pytest.mark.slow
def test_no_error_of_types_comes_from_rlpool(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    files = sorted((ROOT / "tutorials").glob("*.py"))
    for document in DOCUMENTS:
        for number, source in enumerate(blocks_of(document)):
            if "__main__" in source and re.search(r"^(import|from) rlpool", source, re.M):
                name = re.sub(r"\W", "_", f"{document.removesuffix('.md')}_{number}")
                files.append(tmp_path / f"{name}.py")
                files[-1].write_text(source, encoding="utf-8")
    assert len(files) > 50
    files.append(tmp_path / "uses.py")
    files[-1].write_text(USES)
    command = [*COMMAND, f"--cache-dir={tmp_path / 'cache'}", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 1), done.stderr
    found = re.findall(r"^ *(\S+?\.py):(\d+)(?::\d+)?:?(?: -)? error: (.*)$", done.stdout, re.M)
    assert len(found) == done.stdout.count("error:"), done.stdout
    errors = [each for each in found if not is_of_others(*each)]
    told = "\n".join(f"{Path(file).name}:{line}: {message}" for file, line, message in errors)
    # The one that has to be found.
    assert [(Path(file).name, line) for file, line, _ in errors] == [("uses.py", "6")], told
