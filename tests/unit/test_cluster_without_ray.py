"""Without Ray, the cluster's batchers can be imported, and say what they need."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from rlpool.cluster import RayBatcher, RayEpisodeBatcher

from support.agents import BinaryAgent


@pytest.mark.parametrize(
    ("kind", "arguments"), [(RayEpisodeBatcher, {"n_slots": 8}), (RayBatcher, {})]
)
def test_an_error_names_the_extra(
    kind: Any, arguments: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    for name in ("ray_transport", "ray_reservation", "node_actor"):
        monkeypatch.delitem(sys.modules, f"rlpool.cluster.{name}", raising=False)
    advice = r"ray is not installed\n +fix: +pip install 'rlpool\[ray\]'"
    with pytest.raises(ImportError, match=advice):
        kind(n_timesteps=8, create_agent=BinaryAgent, create_env=list, **arguments)
