"""One module per library, with a subclass of ``Collector`` per way to collect.

``LIBRARIES`` names the columns: the module of each, after which its file of requirements is named
too, and its class.
"""

from __future__ import annotations

import importlib

from benchmarks.conformance.interface import Collector

LIBRARIES = {
    "gymnasium_sync": "gymnasium_vector:Sync",
    "gymnasium_async": "gymnasium_vector:Async",
    "rlpool": "rlpool_batchers:Batchers",
}


def load(name: str) -> type[Collector]:
    """The adapter of a column."""
    module, _, adapter = LIBRARIES[name].partition(":")
    return getattr(importlib.import_module(f"benchmarks.conformance.adapters.{module}"), adapter)
