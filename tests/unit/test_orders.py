"""The pieces of environments in processes that need no process."""

from __future__ import annotations

import numpy as np
import pytest

from rlpool.manager.arena import Arena, ArenaLayout
from rlpool.manager.env_messages import Announce
from rlpool.manager.episodes_ahead import EpisodesAhead
from rlpool.memory.storage import Memory
from rlpool.specs import Leaf, TensorSpec

LAYOUT = ArenaLayout(
    n_lanes=5,
    n_workers=2,
    observation={
        "frame": Leaf(TensorSpec((3,), np.dtype(np.float32)), is_scalar=False),
        "count": Leaf(TensorSpec((), np.dtype(np.int64)), is_scalar=True),
    },
    action={"action": TensorSpec((2,), np.dtype(np.float64))},
)


def arenas() -> tuple[Arena, list[Arena]]:
    """An arena as the caller sees it, and as two workers do."""
    memory = Memory.local(sum(LAYOUT.bytes_of_key().values()))
    return Arena(LAYOUT, memory), [Arena(LAYOUT, memory, s) for s in (slice(0, 3), slice(3, 5))]


def test_workers_see_their_own_rows_of_the_callers_arena() -> None:
    whole, parts = arenas()
    for number, part in enumerate(parts, 1):
        for arrays in (part.observation, part.ahead, part.action):
            for array in arrays.values():
                array[:] = number
        for array in (part.reward, part.elapsed, part.seed, part.is_ahead):
            array[:] = number
        part.flags[number] = True
        part.finished[number - 1] = number
    rows = [1, 1, 1, 2, 2]
    for arrays in (whole.observation, whole.ahead, whole.action):
        for array in arrays.values():
            assert array.reshape(5, -1)[:, 0].tolist() == rows
            assert array.reshape(5, -1)[:, -1].tolist() == rows
    for array in (whole.reward, whole.elapsed, whole.seed, whole.is_ahead):
        assert array.tolist() == rows
    assert whole.flags.astype(int).tolist() == [
        [0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0],
    ]
    assert whole.finished.tolist() == [1, 2]
    assert whole.order.tolist() == [0, 0]


def test_observations_are_aligned_as_torch_aligns_its_tensors() -> None:
    memory = Memory.shared(sum(LAYOUT.bytes_of_key().values()))
    whole = Arena(LAYOUT, memory)
    memory.close_fd()
    assert all(array.ctypes.data % 64 == 0 for array in whole.observation.values())


@pytest.fixture
def ahead() -> EpisodesAhead:
    """Ten episodes in five lanes, of which lanes 3 and 4 are this worker's 0 and 1."""
    numbers = np.array([3, 4, 8, 9])
    info = {"task": np.array([30, 40, 80, 90])}
    return EpisodesAhead(3, Announce(5, numbers, numbers * 100, info))


def test_a_lane_that_begins_an_episode_has_the_next_of_its_row_ahead(ahead: EpisodesAhead) -> None:
    assert ahead.next(0) is None
    ahead.note_begin(0, 300)
    assert ahead.next(0) == (8, 800, {"task": 80})
    assert ahead.next(0) is None
    assert ahead.next(1) is None
    ahead.note_begin(1, 400)
    assert ahead.next(1) == (9, 900, {"task": 90})


def test_a_lane_that_begins_another_episode_has_none_ahead(ahead: EpisodesAhead) -> None:
    ahead.note_begin(0, 300)
    ahead.note_begin(0, 400)  # that of the other lane
    assert ahead.next(0) is None
    ahead.note_begin(0, 300)
    ahead.note_begin(0, 7)
    assert ahead.next(0) is None
    ahead.note_begin(0, 800)
    assert ahead.next(0) is None  # it was the last


def test_without_an_announcement_nothing_is_ahead() -> None:
    ahead = EpisodesAhead(0)
    ahead.note_begin(0, 1)
    assert ahead.next(0) is None
    without_infos = EpisodesAhead(0, Announce(1, np.arange(2), np.arange(2), {}))
    without_infos.note_begin(0, 0)
    assert without_infos.next(0) == (1, 1, None)
