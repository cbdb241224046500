"""What a caller reserves of a Ray cluster: a place for one actor on each of its nodes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group

from rlpool.errors import SpecError
from rlpool.machine.interrupts import InterruptsHeld

_LOG = logging.getLogger("rlpool")

_ROOM_S = 30.0
"""How long to wait for nodes with enough free processors."""

_ROOM_HINT_S = 5.0
"""After this it is logged what is waited for."""

_FEWER_S = 3.0
"""How long to wait for all nodes that there are before doing with fewer."""


class Reservation:
    """A placement group, each bundle on a node of its own.

    Args:
        n_nodes: How many nodes to use, ``None`` for all that there are.
        bundle: What each node reserves, by Ray's names: processors and other resources.
        labels: What the labels of a node have to be, as Ray's label selectors say it.

    Attributes:
        group: Ray's, ``None`` as long as nothing is reserved.
    """

    def __init__(
        self, n_nodes: int | None, bundle: Mapping[str, float], labels: Mapping[str, str]
    ) -> None:
        self.group: Any = None
        self._n_nodes = n_nodes
        self._bundle = dict(bundle)
        self._labels = dict(labels)

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive and have enough of everything, used or not."""
        return [
            node
            for node in all_nodes()
            if self._is_enough(node["Resources"])
            and all(_has_label(node["Labels"].get(key), self._labels[key]) for key in self._labels)
        ]

    def _is_enough(self, resources: Mapping[str, float]) -> bool:
        return all(resources.get(name, 0) >= amount for name, amount in self._bundle.items())

    def reserve(self) -> int:
        """Reserve the nodes; returns how many.

        Raises:
            SpecError: If the cluster does not have so many nodes with so many free processors.
        """
        n_there = len(self.nodes())
        if self._n_nodes is None:
            n = n_there
            while n and not self._has_room(n, _FEWER_S if n > 1 else _ROOM_S):
                n = min(n - 1, max(1, self._n_free())) if n > 1 else 0
            if 0 < n < n_there:
                _LOG.warning("%d of %d nodes have no free processors", n_there - n, n_there)
        else:
            # Processors that are in use may become free; nodes that are not there seldom appear.
            patience_s = _ROOM_S if n_there >= self._n_nodes else _FEWER_S
            n = self._n_nodes if self._has_room(self._n_nodes, patience_s) else 0
        if not n:
            raise self._refusal()
        return n

    def _n_free(self) -> int:
        """How many nodes have enough of everything that nobody uses."""
        list_free: Any = available_resources_per_node  # without annotations
        free = list_free()
        return sum(self._is_enough(free.get(node["NodeID"], {})) for node in self.nodes())

    def _has_room(self, n_nodes: int, patience_s: float) -> bool:
        """Reserve so many nodes, if there is room for it."""
        with InterruptsHeld():
            self.group = placement_group(
                [self._bundle] * n_nodes,
                strategy="STRICT_SPREAD",
                bundle_label_selector=[self._labels] * n_nodes,
            )
        if self.group.wait(min(patience_s, _ROOM_HINT_S)):
            return True
        if patience_s > _ROOM_HINT_S:
            _LOG.warning("waiting for %d nodes with %s free on each", n_nodes, self._bundle)
            if self.group.wait(patience_s - _ROOM_HINT_S):
                return True
        with InterruptsHeld():
            self.release()
        return False

    def _refusal(self) -> SpecError:
        n_cpus, *others = (f"{amount:g} {name}" for name, amount in self._bundle.items())
        n_cpus = n_cpus.replace("CPU", "free processors")
        others += [f"{key}={value}" for key, value in self._labels.items()]
        sizes = []
        for node in all_nodes():
            found = (f"{node['Resources'].get(name, 0):g}" for name in self._bundle)
            labels = (f"{key}={node['Labels'].get(key)}" for key in self._labels)
            sizes.append(f"{node['NodeManagerAddress']} has {', '.join([*found, *labels])}")
        wanted = "a node" if self._n_nodes in (None, 1) else f"{self._n_nodes} nodes"
        return SpecError(
            f"the cluster has no {', '.join([n_cpus, *others])} on {wanted} "
            f"(in all, used ones included: {', '.join(sizes)})",
            fix="lower n_nodes, n_workers or resources, end what uses them, or start more nodes "
            "(ray start --address=..., or ray.autoscaler.sdk.request_resources and wait for them)",
        )

    def release(self) -> None:
        """Give back what is reserved. May be repeated."""
        if self.group is not None:
            with suppress(RayError):
                remove_placement_group(self.group)
            self.group = None


def all_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that are alive."""
    list_nodes: Any = ray.nodes  # without annotations
    return [node for node in list_nodes() if node["Alive"]]


def _has_label(label: str | None, wanted: str) -> bool:
    """Whether Ray's selector, such as ``"a"``, ``"!a"`` or ``"in(a, b)"``, takes a label."""
    is_taken = not wanted.startswith("!")
    wanted = wanted.removeprefix("!")
    taken = wanted[3:-1].split(",") if wanted.startswith("in(") else [wanted]
    return (label in {each.strip() for each in taken}) == is_taken
