"""Episodes that travel without padding are the same when they are put together again."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rlpool import EpisodeBatcher
from rlpool.slots.blocks import Layout
from rlpool.slots.trajectories import Unpadded, trajectories_of

from support.fragile import RecurrentAgent, create_fragile


@pytest.mark.parametrize("sizes", [(9,), (4, 1, 4)])
def test_parts_of_a_request_give_all_of_its_tensors(sizes: tuple[int, ...]) -> None:
    make = partial(EpisodeBatcher, 4, 12, RecurrentAgent, {}, create_fragile, {"n_lanes": 3}, 0, 5)
    with make() as whole, make() as divided:
        whole.execute(9)
        expected = whole.get()
        parts = []
        for n_episodes in sizes:
            divided.execute(n_episodes)
            parts.append(Unpadded.of(divided.get()._tensors.part).copy())
        blocks = whole._not_closed()._blocks
    assert blocks is not None
    assert all(len(rows) == part.lengths.sum() for part in parts for rows in part.rows.values())
    rows = Unpadded.joined(parts)
    layout = Layout(blocks.layout.step, 9, 1, 1)
    found = trajectories_of(layout, rows.lengths, lambda: rows)
    assert list(found) == list(expected)
    assert torch.equal(found.lengths, expected.lengths)
    for key in expected:
        assert torch.equal(found[key], expected[key]), key
