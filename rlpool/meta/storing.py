"""Hands rollouts to a learner's storage, by transition or as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree

from rlpool.errors import SpecError
from rlpool.machine.arguments import takes_keyword
from rlpool.meta.agents import AGENT_ARCHS
from rlpool.meta.rollouts import Deliver, RolloutColumns

_SAMPLE = ("observation", "action", "reward", "terminal", "next_observation")
_METHODS = (("add_episode", RolloutColumns._fields), ("add_sample", _SAMPLE))


def store_into(storage: Any, arch: AGENT_ARCHS) -> Deliver:
    """A function that puts a rollout into the storage."""
    is_markov = arch is AGENT_ARCHS.Markov
    name, names = _METHODS[is_markov]
    add = getattr(storage, name, None)
    if not callable(add):
        raise SpecError(
            f"policy_storage is a {type(storage).__name__} without {name}()",
            fix=f"define {name}(), by which agent_arch {arch.name} stores, or change agent_arch",
        )

    has_names = all(takes_keyword(add, name) for name in names)
    has_task = takes_keyword(add, "task", otherwise=False)

    def store(columns: Sequence[Any], task: Any) -> None:
        told = {"task": task} if has_task else {}
        if has_names:
            add(**dict(zip(names, columns, strict=True)), **told)
        else:
            add(*columns, **told)

    def store_samples(rollout: RolloutColumns, task: Any) -> None:
        flat = rollout._replace(rewards=rollout.rewards[:, 0], terminals=rollout.terminals[:, 0])
        leaves, structure = _pytree.tree_flatten(flat)
        for sample in zip(*leaves, strict=True):
            store(_pytree.tree_unflatten(sample, structure), task)

    return store_samples if is_markov else store
