"""What documents quote without a program above it: errors, and lines of the doctor."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest

import rlpool
from rlpool.__main__ import main

REPOSITORY = Path(__file__).resolve().parents[2]


def quoted(document: str) -> list[str]:
    """The blocks of text that a document shows."""
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    return re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def lines_of(text: str) -> list[str]:
    """Lines without what differs from run to run: numbers, and spaces between columns."""
    return [re.sub(r" +", " ", re.sub(r"\d+", "0", line)).strip() for line in text.splitlines()]


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
    assert set(lines_of(missing)) <= set(said)
    assert set(lines_of(forked)) <= set(said)


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
    public = [getattr(rlpool, name) for name in rlpool.__all__]
    kinds = {kind for kind in public if isinstance(kind, type)}
    assert drawn == {kind for kind in kinds if issubclass(kind, rlpool.RlpoolError)}
