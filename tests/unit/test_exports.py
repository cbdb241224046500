"""``rlpool.__all__`` is exactly what the package shows, and all of it is documented."""

from __future__ import annotations

import inspect
from types import ModuleType

import rlpool


def test_all_is_exactly_what_the_package_imports_and_has_docstrings() -> None:
    names = {name for name, value in vars(rlpool).items() if not isinstance(value, ModuleType)}
    public = {name for name in names if not name.startswith("_") and name != "annotations"}
    assert set(rlpool.__all__) - {"__version__", "patterns", "testing"} == public
    assert list(rlpool.__all__) == sorted(set(rlpool.__all__))
    for name in rlpool.__all__:
        exported = getattr(rlpool, name)
        if inspect.isclass(exported) or inspect.isroutine(exported):
            # The object's own text: inspect.getdoc would accept that of a base class.
            assert (exported.__doc__ or "").strip(), f"rlpool.{name} has no docstring"
            assert exported.__module__.startswith("rlpool."), f"rlpool.{name} is not rlpool's"
