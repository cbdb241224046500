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
    rows, finals = set(layout().rows), set(layout().finals)
    assert rows == {"frame", "reward", "last_action", "action", "value", "hidden", "noise"}
    assert layout().rows["noise"] == spec("float32", 2)
    assert finals >= {"frame", "reward", "last_action", "hidden", "done"}
    assert not finals & {"action", "value", "noise"}
    restarting = layout(restarts=True).rows
    assert {*OBSERVATION, "hidden"} == {
        key for key in restarting if successor_key(key) in restarting
    }
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


@pytest.mark.promise("I5")
def test_few_blocks_and_descriptors_are_kept_whatever_the_user_keeps() -> None:
    blocks = BlockPool(layout(), Memory.local)
    in_flight = [blocks.take() for _ in range(20)]
    assert blocks.forget_surplus() == []
    kept = []
    for block in in_flight[:18]:
        kept.append(torch.from_numpy(next(iter(block.arrays.finals.values()))))
        block.release()
    # Beyond 16 blocks, those of the user's results are forgotten; two are still in flight.
    assert blocks.forget_surplus() == [block.number for block in in_flight[:4]]
    assert blocks.forget_surplus() == []
    kept.clear()
    gc.collect()
    assert len(blocks.forget_surplus()) == 14 - 2
    assert blocks.take() in in_flight


def test_a_system_without_memory_is_an_error_that_says_what_to_lower() -> None:
    def allocate(n_bytes: int) -> Memory:
        raise OSError("Cannot allocate memory")

    with pytest.raises(SpecError, match="lower n_slots or n_timesteps"):
        BlockPool(layout(), allocate).take()
