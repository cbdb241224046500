"""One module per library, with a subclass of ``Collector`` per way of collecting.

``LIBRARIES`` maps each column to its module, which also names its requirements file, and its
class.
"""

from __future__ import annotations

import importlib
import os

from benchmarks.conformance.interface import Collector

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # both are read when the libraries are imported
os.environ["MAX_IDLE_COUNT"] = "15"  # seconds before a hung process of TorchRL is given up

LIBRARIES = {
    "gymnasium_sync": "gymnasium_vector:Sync",
    "gymnasium_async": "gymnasium_vector:Async",
    "sb3_dummy": "sb3:Dummy",
    "sb3_subproc": "sb3:Subproc",
    "torchrl": "torchrl_collectors:Single",
    "torchrl_multi": "torchrl_collectors:Multi",
    "tianshou_dummy": "tianshou_collector:Dummy",
    "tianshou_subproc": "tianshou_collector:Subproc",
    "pufferlib_serial": "pufferlib_vector:Serial",
    "pufferlib_multiprocessing": "pufferlib_vector:Multiprocessing",
    "envpool": "envpool_gymnasium:EnvPool",
    "rllib": "rllib_env_runners:Runners",
    "rlpool": "rlpool_batchers:Batchers",
}


def load(name: str) -> type[Collector]:
    """Return the adapter of a column."""
    module, _, adapter = LIBRARIES[name].partition(":")
    return getattr(importlib.import_module(f"benchmarks.conformance.adapters.{module}"), adapter)
