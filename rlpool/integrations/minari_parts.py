"""What writing and reading data sets of Minari share: their keys, and the parts of spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlpool.data.specs import (
    DEFAULT_OBSERVATION_KEY,
    FLAGS,
    fitted,
    flattener,
    leaves_of,
    nester,
    structure_of_space,
)
from rlpool.data.storage import NDArray

ACTION = "action"

OPTIONS = "env_info"

OWN = ["reward", *FLAGS]

BOOL = np.dtype(bool)

N_SEEDS = 2**64
"""Seeds that Minari draws have 64 bits; ``info["seed"]`` has the same bits as an int64."""


class SpacePart:
    """An observation or action space, and the keys of its parts.

    Args:
        space: The space.
        name: What errors call it.
        prefix: Prefix of the keys; without parts, the key itself.

    Attributes:
        specs: Key to the shape and dtype that the space declares.
        dtypes: Key to the dtype alone.
    """

    def __init__(self, space: Any, name: str, prefix: str = "") -> None:
        structure = structure_of_space(space, keep_float64=True, name=name)
        leaves = leaves_of({prefix: structure} if prefix else structure, DEFAULT_OBSERVATION_KEY)
        self.specs = {key: leaf.spec for key, leaf in leaves.items()}
        self.dtypes = {key: spec.dtype for key, spec in self.specs.items()}
        self._nest, self._flatten = nester(structure), flattener(structure, name)

    def nested(self, values: Callable[[str], NDArray]) -> Any:
        """A nested value from the values of the parts."""
        return self._nest([fitted(repr(key), values(key), d) for key, d in self.dtypes.items()])

    def named(self, value: Any) -> dict[str, NDArray]:
        """The parts of a nested value."""
        return dict(zip(self.dtypes, map(np.asarray, self._flatten(value)), strict=True))
