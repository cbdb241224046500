"""Runs examples of docstrings, with what they use without saying so: an agent, environments.

``python -m support.examples RayEpisodeBatcher`` runs that of ``rlpool.cluster`` on its own.
"""

from __future__ import annotations

import doctest
import sys
from typing import Any

import gymnasium
import numpy as np
import torch

import rlpool
import rlpool.cluster
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
        """Take new parameters, of which a coin has none."""


def create_env(seed: int) -> GymEnv:
    return GymEnv([CountingEnv(length=4) for _ in range(2)], seed)


def namespace() -> dict[str, Any]:
    """The names that every example finds, as in a program that begins with the usual imports."""
    public = {
        name: getattr(module, name)
        for module in (rlpool, rlpool.testing)
        for name in module.__all__
    }
    usual = {"torch": torch, "np": np, "gymnasium": gymnasium, "rlpool": rlpool}
    own = {"create_agent": Coin, "create_env": create_env}
    # Workers get what an example defines by value, as what a script defines.
    return {**public, **usual, **own, "__name__": "__main__"}


def complaints(name: str, docstring: str) -> str:
    """What is wrong with the example in a docstring; empty if nothing is."""
    example = doctest.DocTestParser().get_doctest(docstring, namespace(), name, name, 0)
    if not example.examples:
        return f"{name} has no example in its docstring"
    said: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=flags).run(example, out=said.append)
    return "".join(said)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(complaints(name, getattr(rlpool.cluster, name).__doc__ or ""), end="")
