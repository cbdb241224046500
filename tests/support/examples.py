"""Runs docstring examples, and provides the names they use implicitly: an agent, environments.

``python -m support.examples rlpool.cluster.batcher`` runs those of one module.
"""

from __future__ import annotations

import doctest
import importlib
import sys
from typing import Any

import gymnasium
import numpy as np
import torch

import rlpool
import rlpool.testing
from rlpool import Agent, DictTensor, GymEnv
from rlpool.testing import CountingEnv


class Coin(Agent):
    """Chooses 0 or 1 at random."""

    n_noise = 1

    def __call__(
        self, state: Any, observation: DictTensor, agent_info: Any = None, history: Any = None
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        action = (observation["noise"][:, 0] < 0.5).long()
        return DictTensor(), DictTensor({"action": action}), DictTensor()

    def update(self, info: Any) -> None:
        """Accept new parameters; a coin does not have any."""


def create_env(seed: int) -> GymEnv:
    return GymEnv([CountingEnv(length=4) for _ in range(2)], seed)


def namespace(module: Any) -> dict[str, Any]:
    """Return the names available to every example, as after the usual imports."""
    names = {
        name: getattr(room, name)
        for room in (rlpool, rlpool.testing, module)
        for name in getattr(room, "__all__", ())
    }
    usual = {"torch": torch, "np": np, "gymnasium": gymnasium, "rlpool": rlpool}
    own = {"create_agent": Coin, "create_env": create_env}
    # Workers get definitions of an example by value, like those of a script.
    return {**names, **usual, **own, "__name__": "__main__"}


def complaints(module_name: str) -> str:
    """Return the failures of the examples in a module's docstrings; empty if there are none."""
    module = importlib.import_module(module_name)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for example in doctest.DocTestFinder().find(module, globs=namespace(module)):
        runner.run(example, out=said.append)
    if not runner.summarize(verbose=False).attempted:
        return f"{module_name} has no examples"
    return "".join(said)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(complaints(name), end="")
