"""``Array``: storage for samples, with access to the rows before and after a batch.

You will learn

- how an ``Array`` differs from a NumPy array, and how to get NumPy arrays and tensors from it;
- the purpose of padding, and the meaning of ``array[-1]``;
- how ``rotate`` carries the end of one batch over to the next one;
- how ``next`` and ``previous`` pair each step with its neighbour in time;
- how ``full_size`` turns an array into a replay window;
- how several processes write into one array.

Run it: ``python tutorials/arrays.py``. It takes a few seconds and needs only rlpool.
"""

from __future__ import annotations

import argparse
import multiprocessing
from operator import setitem

import numpy as np
import torch

from rlpool import Array
from rlpool.patterns import write_to_piped_array

N_STEPS, N_ENVS = 5, 4


def writing_and_reading() -> Array:
    """An Array stores values but does not compute; views of it can be written."""
    array = Array((N_STEPS, N_ENVS), np.float32)
    array[:] = np.arange(N_ENVS)
    array[1] = torch.full((N_ENVS,), 8.0)

    # To compute, view the same memory as a NumPy array or a tensor.
    assert array.to_ndarray().sum(axis=-1).tolist() == [6, 32, 6, 6, 6]
    array.to_tensor()[2].mul_(10)
    assert array[2, 3] == 30

    # Indexing never copies: even selections by index arrays and masks can be written.
    chosen = array[[0, 4], [1, 2]]
    chosen[...] = -1
    array[array.to_ndarray() > 5] = 5
    assert array[0].to_ndarray().tolist() == [0, -1, 2, 3]
    assert array.to_ndarray().max() == 5
    return array


def rows_around_a_batch() -> Array:
    """Padding holds the last steps of the previous batch and the first ones of the next."""
    array = Array((N_STEPS, N_ENVS), np.float32, padding=1)
    array[:] = np.arange(N_ENVS)

    # Indices count from the first visible row. -1 is the row before it, not the last row: that is
    # array.last, and the row after it is array.last + 1.
    assert (array.first, array.last) == (0, N_STEPS - 1)
    array[array.last + 1] = [4, 5, 6, 7]
    array[-1] = 100
    # The padding is not visible, and [:] does not write to it.
    assert array.shape == (N_STEPS, N_ENVS)
    assert array.to_ndarray().max() == 3
    array[:] = 0
    assert (array[array.last + 1] == [4, 5, 6, 7]).all()
    assert (array[-1] == 100).all()
    # Outside the rows, ints raise and slices are clipped.
    assert array[-50:50].shape == (N_STEPS + 2, N_ENVS)
    try:
        array[array.last + 2]
    except IndexError as error:
        print(f"Two rows after the last one:\n{error}\n")
    return array


def from_batch_to_batch() -> None:
    """A sampler writes the observation after step t to row t + 1: the last one into the padding."""
    observations = Array((N_STEPS,), np.int64, padding=1)
    time = 0
    observations[0] = time
    for _ in range(3):
        for step in range(N_STEPS):
            time += 1
            observations[step + 1] = time
        # Rotating turns the rows after this batch into the beginning of the next one.
        observations.rotate()
        assert observations[0] == time
        assert observations[-1] == time - 1
    assert time == 15


def neighbours_in_time() -> Array:
    """Every view knows its position, so it can return the time step after or before."""
    array = Array((N_STEPS, N_ENVS), np.float32, padding=1)
    array[...] = np.arange(N_STEPS * N_ENVS).reshape(N_STEPS, N_ENVS)
    array[-1] = np.arange(-N_ENVS, 0)
    assert (array.previous[1:] == array[:4]).all()
    assert (array[2].next == array[3]).all()
    assert (array[2].previous == [4, 5, 6, 7]).all()

    # Transitions for Q-learning: a random batch, and the step after each of its steps.
    steps = np.random.default_rng(0).integers(0, N_STEPS - 1, size=16)
    batch = array[steps, steps % N_ENVS]
    assert (batch.next.to_ndarray() - batch.to_ndarray() == N_ENVS).all()
    return array


def replay_window() -> Array:
    """With full_size, an array has many batches, and the visible window moves over them."""
    array = Array((N_STEPS, N_ENVS), np.float32, full_size=2 * N_STEPS)
    array[...] = 7
    array.rotate()
    array[...] = 42
    assert array.full.shape == (2 * N_STEPS, N_ENVS)
    assert array.full.to_ndarray().mean() == (7 + 42) / 2
    # At the end it starts again, over the oldest batch.
    array.rotate()
    assert (array == 7).all()
    array[...] = 8
    assert set(array.full.to_ndarray().ravel().tolist()) == {8, 42}
    # Views do not move with the window.
    view = array[0]
    array.rotate()
    assert (array[0] == 42).all()
    assert (view == 8).all()
    return array


def one_array_in_two_processes() -> Array:
    """Shared arrays are not copied: other processes write to the same memory."""
    context = multiprocessing.get_context("spawn")
    array = Array((N_STEPS, N_ENVS), np.int32, storage="shared")

    # Any view can be sent through a pipe or queue, or as an argument of a process.
    here, there = context.Pipe()
    receiver = context.Process(target=write_to_piped_array, args=(there,))
    receiver.start()
    writer = context.Process(target=setitem, args=(array[0], ..., 7))  # array[0][...] = 7
    writer.start()
    here.send(array[np.array([1, 3]), np.array([0, 2])])
    for process in (receiver, writer):
        process.join()
        assert process.exitcode == 0
    assert (array[0] == 7).all()
    assert array[1, 0] == array[3, 2] == 42
    assert array.to_ndarray().sum() == N_ENVS * 7 + 2 * 42
    return array


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    print(f"An array:\n{writing_and_reading()}\n")
    array = rows_around_a_batch()
    print(f"With its padding:\n{array[-1 : N_STEPS + 1]}\n")
    from_batch_to_batch()
    array = neighbours_in_time()
    print(f"The time step before each row:\n{array.previous}\n")
    print(f"The second half of a replay window:\n{replay_window()}\n")
    shared = one_array_in_two_processes()
    print(f"Written by two other processes:\n{shared}")
    # The memory is freed with its last view. After close(), access raises even if views exist.
    shared.close()
    print(shared)


if __name__ == "__main__":
    main()
