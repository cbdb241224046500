"""``rlpool.__all__`` is exactly what the façade shows."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import rlpool

FACADE = ast.parse(Path(rlpool.__file__).read_text(encoding="utf-8"))


def _public_names() -> set[str]:
    """Names without a leading underscore that the façade's module level binds."""
    names = set()
    for node in FACADE.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                continue
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(t.id for t in targets if isinstance(t, ast.Name))
    return {name for name in names if not name.startswith("_")}


def test_all_is_exactly_what_the_facade_imports() -> None:
    assert set(rlpool.__all__) - {"__version__"} == _public_names()


def test_all_is_sorted_and_names_nothing_twice() -> None:
    assert list(rlpool.__all__) == sorted(set(rlpool.__all__))


@pytest.mark.parametrize("name", rlpool.__all__)
def test_exported_name_resolves_and_is_documented(name: str) -> None:
    exported = getattr(rlpool, name)
    if inspect.isclass(exported) or inspect.isroutine(exported):
        # The object's own text: inspect.getdoc would accept that of a base class.
        assert (exported.__doc__ or "").strip(), f"rlpool.{name} has no docstring"
        assert exported.__module__.startswith("rlpool."), f"rlpool.{name} is not rlpool's"


def test_star_import_gives_what_all_lists() -> None:
    namespace: dict[str, object] = {}
    exec("from rlpool import *", namespace)
    assert set(rlpool.__all__) == set(namespace) - {"__builtins__"}


def test_package_says_what_it_is() -> None:
    assert ast.get_docstring(FACADE)
