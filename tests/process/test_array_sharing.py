"""Arrays in several processes: every way to share one, every way to end, and a common window."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from process.watching import START_S, in_new, n_descriptors

from rlpool import Array
from rlpool.data import array as array_module

from support.variants import variants

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left", "no_descriptor_left"),
    pytest.mark.promise("I5"),
]

VIEWS: list[Callable[[Array], Array]] = [
    *(lambda array: array, lambda array: array[-1], lambda array: array[1, 2, 0]),
    *(lambda array: array[::-2, ::-1], lambda array: array[[1, 3], [0, 2]]),
    *(lambda array: array[np.arange(1000) % 5], lambda array: array[1:4][0][1:][::-1]),
    *(lambda array: array[2].full, lambda array: array[2:2]),
]

in_forked = partial(in_new, "fork")


@pytest.fixture
def no_descriptor_left() -> Iterator[None]:
    resource_tracker.ensure_running()  # its pipe belongs to the interpreter
    array_module._sent.clear()
    gc.collect()
    before = n_descriptors()
    yield
    array_module._sent.clear()
    gc.collect()
    assert n_descriptors() == before


def make(storage: str = "shared") -> Array:
    array = Array((5, 3), np.float32, feature_shape=(2,), storage=storage, padding=1, full_size=10)
    array.full[...] = np.arange(60).reshape(10, 3, 2)
    return array


# Every way to another process -------------------------------------------------------------------


def write_and_return(pipe: Connection, views: list[Array], queue: Any, results: Any) -> None:
    for view in views:
        view[...] = 42
    before = n_descriptors()
    whole, *parts = pipe.recv(), pipe.recv(), pipe.recv()  # one memory, one descriptor
    copies = [pickle.loads(pickle.dumps(whole)) for _ in range(20)]
    assert n_descriptors() <= before + 1  # none in a forked process, which knows it
    copies[-1][...] = 1
    for part in parts:
        part[...] = part.to_ndarray() + 1
    results.put(queue.get()[1:])
    pipe.recv()


@pytest.mark.parametrize(
    ("method", "storage"),
    variants([("fork", "memmap")], [("spawn", "shared")]),
)
def test_views_travel_as_arguments_and_through_pipes_and_queues(method: str, storage: str) -> None:
    arrays = [make(storage) for _ in VIEWS]
    views = [view(array) for view, array in zip(VIEWS, arrays, strict=True)]
    piped, queued = (Array((4,), "int64", storage=storage) for _ in range(2))
    context = multiprocessing.get_context(method)
    queue, results = context.Queue(), context.Queue()
    with in_new(method, write_and_return, views, queue, results) as pipe:
        for part in (piped, piped[1:3], piped[[2, 3]]):
            pipe.send(part)
        queue.put(queued)
        results.get(timeout=START_S)[0] = 5
        pipe.send("done")
    for view, array in zip(VIEWS, arrays, strict=True):
        expected = make("local")
        view(expected)[...] = 42
        assert (array[-1:11] == expected[-1:11]).all()
    assert piped.to_ndarray().tolist() == [1, 2, 3, 2]
    assert queued.to_ndarray().tolist() == [0, 5, 0, 0]
    for each in (queue, results):
        each.close()
        each.join_thread()


# The end ------------------------------------------------------------------------------------------

# A common window (the property test moves it in a forked process) ---------------------------------

N_ROTATIONS = 2000
USES: list[Callable[[Array], Any]] = [
    *(np.array, lambda array: np.asarray(array, np.float64), lambda array: array == 1),
    *(lambda array: array[[0, 1, 2]].to_ndarray(), lambda array: array[:3][::-1].to_tensor()),
    *(Array.rotate, Array.reset),
]


def use_one_by_one(pipe: Connection, array: Array) -> None:
    for use in USES:
        pipe.recv()
        use(array)
        pipe.send("done")


def test_copies_and_rotations_wait_while_another_process_rotates() -> None:
    array = Array((4,), "int64", padding=3, full_size=8, storage="shared")
    early = []
    with in_forked(use_one_by_one, array) as pipe:
        for use in USES:
            with array._allocation.locked():
                pipe.send("go")
                early += [use] if pipe.poll(0.05) else []
            assert pipe.recv() == "done"
    assert early == []


def rotate_often(pipe: Connection, array: Array) -> None:
    for _ in range(N_ROTATIONS):
        array.rotate()


def die_while_rotating(pipe: Connection, array: Array) -> None:
    with array._allocation.locked():
        os.kill(os.getpid(), signal.SIGKILL)


def test_all_rotations_complete_even_if_one_process_dies_while_rotating() -> None:
    array = Array((1,), "int64", (), 0, 2 * N_ROTATIONS + 2, "shared")
    array.full[...] = np.arange(array.full_size)
    with in_forked(die_while_rotating, array, exitcode=-signal.SIGKILL):
        pass
    assert np.array(array).tolist() == [0]
    with in_forked(rotate_often, array), in_forked(rotate_often, array):
        pass
    array.rotate()
    assert np.array(array).tolist() == [2 * N_ROTATIONS + 1]
