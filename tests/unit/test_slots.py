"""Blocks of slots and their owners."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from rlpool.data.specs import TensorSpec
from rlpool.data.storage import Memory
from rlpool.errors import SpecError
from rlpool.slots.blocks import BlockPool, Layout, StepSpecs

NUMBER = TensorSpec((), np.dtype(np.float32))
LAYOUT = Layout(StepSpecs(3, False, {"frame": NUMBER}, {"action": NUMBER}, {}), 6, 7, n_workers=2)


@pytest.mark.promise("I5")
def test_few_blocks_and_descriptors_are_kept_regardless_of_the_users_results() -> None:
    blocks = BlockPool(LAYOUT, Memory.local)
    in_flight = [blocks.reserve() for _ in range(20)]
    assert blocks.forget_surplus() == []
    kept = []
    for block in in_flight[:18]:
        kept.append(torch.from_numpy(next(iter(block.arrays.finals.values()))))
        block.release()
    # Beyond 16 blocks, those of the user's results are no longer tracked; two are still in flight.
    assert blocks.forget_surplus() == [block.number for block in in_flight[:4]]
    assert blocks.forget_surplus() == []
    kept.clear()
    gc.collect()
    assert len(blocks.forget_surplus()) == 14 - 2
    assert blocks.reserve() in in_flight


def test_a_system_without_memory_raises_an_error_that_names_the_argument_to_lower() -> None:
    def allocate(n_bytes: int) -> Memory:
        raise OSError("Cannot allocate memory")

    with pytest.raises(SpecError, match="lower n_slots or n_timesteps"):
        BlockPool(LAYOUT, allocate).reserve()
