"""Without Ray, the cluster's batcher can be imported, and says what it needs."""

from __future__ import annotations

import sys

import pytest

from rlpool.cluster import RayEpisodeBatcher

from support.agents import BinaryAgent


def test_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    advice = r"ray is not installed\n +fix: +pip install 'rlpool\[ray\]'"
    with pytest.raises(ImportError, match=advice):
        RayEpisodeBatcher(8, 8, BinaryAgent, {}, list)
