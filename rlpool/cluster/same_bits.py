"""Whether nodes may compute different bits."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from rlpool.batch.agreement import other_lanes
from rlpool.cluster.shards import NodeReport
from rlpool.errors import SpecError
from rlpool.machine.fingerprint import PINS, differences, versions

_LOG = logging.getLogger("rlpool")


def check_alike(first: NodeReport, other: NodeReport, *, require_same_bits: bool) -> None:
    """Compare a node that joins with the first one, and what computes there with this process.

    Args:
        first: The first node.
        other: The node.
        require_same_bits: Whether it may not join if its bits may differ; else that is logged.

    Raises:
        SpecError: If it may not join.
    """
    if other.n_lanes != first.n_lanes:
        names = f"a worker of node {first.name}", f"one of node {other.name}"
        raise other_lanes(*names, first.n_lanes, other.n_lanes)
    for what in _doubts(first, other):
        fix = f"install the same versions, and set {PINS} to what all processors can do"
        error = SpecError(what, fix=fix)
        if require_same_bits:
            raise error
        _LOG.warning("%s", error)


def _doubts(first: NodeReport, other: NodeReport) -> Iterator[str]:
    """Why a node may compute other bits than the first one, and than this process."""
    own, theirs = versions(), other.fingerprint
    # Simulators need not be where the program learns.
    own = {name: own[name] for name in own if name in theirs or name == "rlpool"}
    for whose, expected, found in (
        (f"nodes {first.name}", first.fingerprint, theirs),
        ("the calling process", own, {name: theirs[name] for name in own if name in theirs}),
    ):
        if differing := "; ".join(differences(expected, found)):
            yield f"{whose} and {other.name} may compute different bits: {differing}"
