"""A pool that stores single frames against one that stores whole stacks: the same, bit by bit."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpool import Pool, TemporalDictTensor
from rlpool.data.dict_tensor import DictTensor
from rlpool.slots.trajectories import Slice, StepTensors

N_LANES, N_FRAMES = 3, 3
KEYS = ("frame", "action", "_frame", "_reward", "_done")
SHAPES = {"images": ((3, 4, 5), np.uint8), "vectors": ((3, 4), np.float32)}


class Lane:
    """Stacks of random frames with few values, some of which are equal by chance."""

    def __init__(self, number: int, shape: str) -> None:
        self.rng = np.random.default_rng(number)
        self.shape, self.dtype = SHAPES[shape]
        self.reset()

    def frame(self) -> Any:
        if self.rng.random() < 0.2:
            return np.full(self.shape[1:], np.nan if self.dtype == np.float32 else 0, self.dtype)
        return self.rng.integers(0, 3, self.shape[1:]).astype(self.dtype)

    def reset(self) -> None:
        first, kind = self.frame(), self.rng.integers(3)
        padding = [first, np.zeros_like(first)][kind] if kind < 2 else None
        front = [self.frame() if padding is None else padding for _ in range(N_FRAMES - 1)]
        self.frames = [*front, first]

    def value(self) -> Any:
        return np.stack(self.frames)

    def step(self) -> dict[str, Any]:
        """A step; an episode that ends begins anew."""
        before, done = self.value(), self.rng.random() < 0.15
        self.frames = [*self.frames[1:], self.frame()]
        after = self.value()
        if done and self.rng.random() < 0.3:
            after = np.zeros_like(after)  # some environments give this
        if done:
            self.reset()
        return {
            "frame": before,
            "_frame": after,
            "action": self.rng.integers(2**60),
            "_reward": np.float32(self.rng.integers(5)),
            "_done": done,
            "hidden": before.reshape(-1)[-3:].astype(np.float64),
            "_hidden": after.reshape(-1)[-3:].astype(np.float64),
        }


def trajectories(rows: list[list[dict[str, Any]]], *, is_lazy: bool) -> TemporalDictTensor:
    lengths = np.array([len(row) for row in rows])
    shape = (len(rows), lengths.max() + 1)
    arrays = {}
    for key, value in next(row for row in rows if row)[0].items():
        value = np.asarray(value)
        array = arrays[key] = np.zeros((*shape, *value.shape), value.dtype)
        for number, row in enumerate(rows):
            for time, step in enumerate(row):
                array[number, time] = step[key]
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    if not is_lazy:
        return TemporalDictTensor(tensors, torch.from_numpy(lengths))
    finals = {}
    for key in ("frame", "hidden"):
        after = arrays.pop(f"_{key}")
        finals[key] = np.stack([a[max(0, n - 1)] for a, n in zip(after, lengths, strict=True)])
    part = Slice(arrays, finals, lengths, lengths)
    steps = StepTensors(list(tensors), lambda: part)
    return TemporalDictTensor._wrap(steps, torch.from_numpy(lengths), DictTensor())


def windows(lanes: list[Lane], n_steps: int, rng: Any, *, is_lazy: bool) -> TemporalDictTensor:
    """The next steps of all lanes, some of which make fewer; lazy rows end with an episode."""
    rows = []
    for lane in lanes:
        row: list[dict[str, Any]] = []
        for _ in range(n_steps - int(rng.random() < 0.2)):
            row.append(lane.step())
            if is_lazy and row[-1]["_done"]:
                break
        rows.append(row)
    if not any(rows):
        rows[0].append(lanes[0].step())
    return trajectories(rows, is_lazy=is_lazy)


def same(first: Any, second: Any) -> None:
    assert set(first.keys()) == set(second.keys())
    for key, tensor in first.items():
        assert tensor.shape == second[key].shape, key
        assert tensor.dtype == second[key].dtype, key
        assert tensor.numpy().tobytes() == second[key].numpy().tobytes(), key


def check(stacked: Pool, whole: Pool) -> None:
    assert stacked.lengths == whole.lengths
    assert stacked.specs == whole.specs
    same(stacked.transitions(), whole.transitions())
    n = len(whole)
    if n:
        batches = [pool.sample(n, n_step=3) for pool in (stacked, whole)]
        same(*batches)
        same(stacked.sample(n), whole.sample(n))
        sequences = [pool.sample_sequences(n, 4) for pool in (stacked, whole)]
        same(*sequences)
        assert torch.equal(sequences[0].lengths, sequences[1].lengths)


operations = st.sampled_from(["window", "window", "window", "one step", "single", "new", "clear"])


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    storage=st.sampled_from(["local", "memmap"]),
    arguments=st.fixed_dictionaries(
        {
            "pool_size": st.sampled_from([4, 11, 60]),
            "processes": st.integers(1, 3),
            "window_size": st.sampled_from([None, None, 3]),
            "random": st.booleans(),
            "keys": st.sampled_from([None, KEYS, ("frame", "_reward", "_done")]),
        }
    ),
    each=st.lists(st.tuples(operations, st.none() | st.integers(0, 2), st.booleans()), max_size=14),
    resumed=st.sampled_from([None, 3, 6]),
    seed=st.integers(0, 2**32),
)
def test_single_frames_give_the_bits_of_whole_stacks(
    shape: str,
    storage: str,
    arguments: dict[str, Any],
    each: list[tuple[str, int | None, bool]],
    resumed: int | None,
    seed: int,
) -> None:
    def new_pool(frame_stack: Any) -> Pool:
        return Pool(seed=seed, storage=storage, frame_stack=frame_stack, **arguments)

    stacked, whole = new_pool(N_FRAMES), new_pool(None)
    lanes = [Lane(seed + lane, shape) for lane in range(N_LANES)]
    rng = np.random.default_rng(seed)
    for number, (operation, index, is_lazy) in enumerate(each):
        index = None if index is None else index % arguments["processes"]
        if operation == "clear":
            for pool in (stacked, whole):
                pool.clear()
        elif operation == "single" and arguments["keys"]:
            step = lanes[index or 0].step()
            for pool in (stacked, whole):
                pool(*(step[key] for key in KEYS), index)
        else:
            if operation == "new":
                lanes[0].reset()
            n_steps = 1 if operation == "one step" else int(rng.integers(1, 7))
            batch = windows(lanes, n_steps, rng, is_lazy=is_lazy)
            for pool in (stacked, whole):
                pool.extend(batch, index)
        if number == resumed:
            torch.save(stacked.state_dict(), file := io.BytesIO())
            file.seek(0)
            stacked = new_pool(N_FRAMES)
            stacked.load_state_dict(torch.load(file, weights_only=True))
        check(stacked, whole)
    whole.close()
    stacked.close()
