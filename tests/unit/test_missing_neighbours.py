"""Without the package of a neighbour, its adapter says which extra brings it."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("adapter", "package", "extra"),
    [("sb3", "stable_baselines3", "sb3"), ("minari", "minari", "minari")],
)
def test_an_adapter_without_its_neighbour_names_the_extra(
    adapter: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"rlpool.integrations.{adapter}"
    for module in [m for m in sys.modules if m.startswith((name, f"{package}."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ImportError, match=rf"pip install 'rlpool\[{extra}\]'"):
        importlib.import_module(name)
