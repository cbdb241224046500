"""Blocks of slots: what they hold, where it lies, who owns them."""

from __future__ import annotations

import gc
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch

from rlpool.errors import SpecError
from rlpool.memory.storage import PAGE_BYTES, Memory
from rlpool.slots.blocks import BlockPool, Layout, StepSpecs, flat, successor_key
from rlpool.specs import TensorSpec

FLAGS = ("terminated", "truncated", "done", "initial_state")


def spec(dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(shape, np.dtype(dtype))


OBSERVATION = {
    "frame": spec("uint8", 4, 4),
    "reward": spec("float32"),
    **{key: spec("bool") for key in FLAGS},
    "last_action": spec("int64"),
}


def step_specs(n_noise: int = 2, auto_reset: bool = False) -> StepSpecs:
    return StepSpecs(
        n_lanes=3,
        auto_reset=auto_reset,
        observation=OBSERVATION,
        output={"action": spec("int64"), "value": spec("float32")},
        state={"hidden": spec("float32", 5)},
        n_noise=n_noise,
    )


def layout(n_slots: int = 6, n_timesteps: int = 7, restarts: bool = False) -> Layout:
    return Layout(step_specs(), n_slots, n_timesteps, n_workers=2, restarts=restarts)


# Layout


def test_a_row_holds_what_cannot_be_derived() -> None:
    assert set(layout().rows) == {
        "frame",
        "reward",
        "last_action",
        "action",
        "value",
        "hidden",
        "noise",
    }
    assert layout().rows["noise"] == spec("float32", 2)
    assert set(layout().finals) >= {"frame", "reward", "last_action", "hidden", "done"}
    assert not set(layout().finals) & {"action", "value", "noise"}


def test_rows_of_lanes_that_restart_hold_the_values_after_the_step_too() -> None:
    rows = layout(restarts=True).rows
    for key in (*OBSERVATION, "hidden"):
        assert rows[key] == rows[successor_key(key)]
    assert not {"_action", "_value", "_noise"} & set(rows)
    assert not layout(restarts=True).finals


@pytest.mark.parametrize("restarts", [False, True])
def test_the_arrays_of_a_block_do_not_overlap_and_fill_its_bytes(restarts: bool) -> None:
    it = pickle.loads(pickle.dumps(layout(restarts=restarts)))
    assert it == layout(restarts=restarts)
    root = Memory.local(it.n_bytes).root()
    arrays = it.arrays(root)
    assert {k: (7, 7, *row.shape) for k, row in it.rows.items()} == {
        key: array.shape for key, array in arrays.rows.items()
    }
    everything = [
        *arrays.rows.values(),
        *arrays.finals.values(),
        *arrays.control.values(),
    ]
    for number, array in enumerate(everything):
        array.view(np.uint8 if array.dtype != bool else bool)[...] = number % 2 + 1
    start = root.__array_interface__["data"][0]
    spans = sorted((a.__array_interface__["data"][0] - start, a.nbytes) for a in everything)
    assert all(first + size <= then for (first, size), (then, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= it.n_bytes


def test_the_bytes_of_a_key_count_its_rows_and_finals() -> None:
    it = Layout(step_specs(), 1000, 10, n_workers=1)
    n_bytes = it.bytes_of_key()
    assert n_bytes["frame"] >= 1000 * 10 * 16 + 1000 * 16
    assert n_bytes["frame"] <= 1001 * 10 * 16 + 1000 * 16 + 2 * PAGE_BYTES
    assert sum(n_bytes.values()) < it.n_bytes


@pytest.mark.parametrize(
    ("output", "state"),
    [
        ("frame", "s"),
        ("_frame", "s"),
        ("_s", "s"),
        ("s", "s"),
        ("v", "_reward"),
        ("v", "noise"),
        ("last_action", "s"),
    ],
)
def test_keys_that_collide_are_refused(output: str, state: str) -> None:
    number = spec("float32")
    with pytest.raises(SpecError, match=r"is given by .* and by "):
        StepSpecs(3, False, OBSERVATION, {output: number}, {state: number}, n_noise=1)


# Rows as opaque elements


@pytest.mark.parametrize("dtype", ["bool", "float32"])
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
def test_flat_rows_can_be_assigned_by_index(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    target = np.zeros((4, 5, *shape), dtype)
    source = rng.integers(0, 2, (3, *shape)).astype(dtype)
    flat(target, 2)[np.array([0, 7, 19])] = flat(source, 1)
    expected = np.zeros((20, *shape), dtype)
    expected[[0, 7, 19]] = source
    assert target.reshape(20, *shape).tolist() == expected.tolist()


# Blocks


def pool(limit: int | None = None) -> tuple[BlockPool, list[int]]:
    made: list[int] = []

    def allocate(n_bytes: int) -> Memory:
        if limit is not None and len(made) >= limit:
            raise OSError("Cannot allocate memory")
        made.append(n_bytes)
        return Memory.local(n_bytes)

    return BlockPool(layout(), allocate), made


def test_a_block_is_used_again_when_its_last_user_is_gone() -> None:
    blocks, made = pool()
    block = blocks.take()
    tensor = torch.from_numpy(block.arrays.rows["frame"])[2, 3]
    block.release()
    assert not block.is_free
    other = blocks.take()
    assert other is not block
    other.release()
    del tensor
    gc.collect()
    assert block.is_free
    again = blocks.take()
    assert again in (block, other)
    assert len(made) == 2


@pytest.mark.parametrize("part", ["rows", "finals", "control"])
def test_every_array_of_a_block_keeps_it_from_being_free(part: str) -> None:
    blocks, _ = pool()
    block = blocks.take()
    array = next(iter(getattr(block.arrays, part).values()))[:1]
    block.release()
    gc.collect()
    assert not block.is_free
    del array
    gc.collect()
    assert block.is_free


def test_surplus_blocks_are_forgotten_and_named() -> None:
    blocks, _ = pool()
    taken = [blocks.take() for _ in range(6)]
    held = torch.from_numpy(taken[0].arrays.rows["frame"])
    for block in taken:
        block.release()
    gone = blocks.forget_surplus()
    assert len(gone) == 3
    assert len(set(gone)) == 3
    assert taken[0].number not in gone
    assert blocks.forget_surplus() == []
    assert held.shape[0] == 7


def test_results_that_are_kept_do_not_keep_descriptors() -> None:
    blocks, _ = pool()
    kept, n_forgotten = [], 0
    for _ in range(40):
        block = blocks.take()
        kept.append(torch.from_numpy(block.arrays.rows["frame"]))
        block.release()
        n_forgotten += len(blocks.forget_surplus())
    assert n_forgotten == 40 - 16


def test_blocks_in_flight_are_never_forgotten() -> None:
    blocks, _ = pool()
    taken = [blocks.take() for _ in range(20)]
    assert blocks.forget_surplus() == []
    taken[-1].release()
    assert blocks.forget_surplus() == [taken[-1].number]


def test_a_system_without_memory_is_an_error_that_says_what_to_lower() -> None:
    blocks, _ = pool(limit=1)
    blocks.take()
    with pytest.raises(SpecError, match="lower n_slots or n_timesteps"):
        blocks.take()
