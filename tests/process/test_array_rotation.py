"""The window of an array that several processes hold: it moves for all, and as a whole."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from rlpool import Array, UsageError

pytestmark = pytest.mark.usefixtures("no_shared_memory_left")

JOIN_S = 60.0


@contextlib.contextmanager
def child(method: str, target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process with a pipe to it, which is its first argument."""
    with warnings.catch_warnings():  # Python 3.12 warns of forking with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        context: Any = multiprocessing.get_context(method)
        here, there = context.Pipe()
        process = context.Process(target=target, args=(there, *arguments))
        process.start()
    there.close()
    try:
        yield here
    finally:
        with contextlib.suppress(OSError):  # it has ended
            here.send(None)
        here.close()
        process.join(JOIN_S)
        process.close()


def numbered(window: int, n_windows: int, padding: int = 0, storage: str = "shared") -> Array:
    """Row i of ``full`` is i."""
    full_size = window * n_windows
    array = Array((window,), "int64", (), padding, full_size, storage)
    array.full[...] = np.arange(full_size)
    return array


def follow(pipe: Connection, array: Array) -> None:
    """Do what is asked for, and tell what the array and its views show then."""
    views = [array[0], array.next]
    while True:
        message = pipe.recv()
        if message is None:
            return
        command, received = message
        if received is not None:
            views.append(received)
        if command:
            getattr(array, command)()
        try:
            pipe.send([each.to_ndarray().tolist() for each in (array, *views)])
        except UsageError as error:
            pipe.send(str(error))


@pytest.mark.parametrize(("method", "storage"), [("spawn", "shared"), ("fork", "memmap")])
def test_whoever_rotates_the_window_moves_in_every_process(method: str, storage: str) -> None:
    array = numbered(2, 3, padding=1, storage=storage)
    view, packed = array[1:], pickle.dumps(array[:1])
    with child(method, follow, array) as pipe:

        def seen(command: str | None = None, sent: Any = None) -> Any:
            pipe.send((command, sent))
            return pipe.recv()

        assert seen() == [[0, 1], 0, [1, 2]]
        array.rotate()
        assert seen() == [[2, 3], 0, [1, 2]]  # what was bound before does not move
        assert seen("rotate") == [[4, 5], 0, [1, 2]]
        assert array.to_ndarray().tolist() == [4, 5]
        assert view.to_ndarray().tolist() == [1]
        assert pickle.loads(packed).to_ndarray().tolist() == [0]
        array[array.last + 1] = 9
        assert seen("rotate", array)[0] == [9, 1]
        assert array.to_ndarray().tolist() == [9, 1]
        assert int(array[-1]) == 5
        array.reset()
        assert seen(None, array[0])[0] == [4, 5]
        assert seen("rotate")[-1] == 4
        assert array.to_ndarray()[1] == 1
        assert "closed" in seen("close")
    assert array.to_ndarray()[1] == 1
    array.close()
    with pytest.raises(UsageError, match="closed"):
        array.rotate()


N_ROTATIONS = 2000
N_LOOKS = 500
WIDTH = 4000


def rotate_with_new_rows(pipe: Connection, array: Array) -> None:
    for number in range(1, N_ROTATIONS + 1):
        array[array.last + 1 : array.last + 1 + array.padding] = number
        array.rotate()
    pipe.send("done")


@pytest.mark.parametrize(
    "look",
    [
        np.array,
        lambda array: np.asarray(array, np.float64),
        lambda array: array[[0, 1, 2]].to_ndarray(),
        lambda array: array[:3][::-1].to_tensor().numpy(),
    ],
    ids=["copied", "converted", "index array", "reversed tensor"],
)
def test_a_copy_never_has_a_part_of_the_rows_that_a_rotation_brings_along(look: Any) -> None:
    array = Array((4,), "int64", (WIDTH,), padding=3, storage="shared")
    with child("fork", rotate_with_new_rows, array) as pipe:
        seen = set()
        while not pipe.poll():
            rows = np.unique(look(array)[:3])
            assert len(rows) == 1
            seen.add(int(rows[0]))
        assert pipe.recv() == "done"
    assert int(look(array)[0, 0]) == N_ROTATIONS
    assert len(seen) > 1


def rotate_often(pipe: Connection, array: Array) -> None:
    for _ in range(N_ROTATIONS):
        array.rotate()
    pipe.send("done")


def rotate_until_told(pipe: Connection, array: Array) -> None:
    while not pipe.poll():
        for _ in range(100):
            array.rotate()


def test_a_window_is_the_one_before_or_the_one_after_a_rotation() -> None:
    array = Array((4,), "int64", (WIDTH // 10,), padding=2, full_size=12, storage="shared")
    array.full[...] = np.repeat([1, 2, 3], 4)[:, None]
    array.full[12:14] = 1  # what will be brought along to the first window
    seen = set()
    with child("fork", rotate_until_told, array):
        for _ in range(N_LOOKS):
            rows = np.unique(array.to_ndarray().copy())
            assert len(rows) == 1
            seen.add(int(rows[0]))
            assert len(np.unique(array[...].to_tensor())) == 1
            bound = array[1:]
            assert (bound == bound.to_ndarray()[0, 0]).all()
    assert seen == {1, 2, 3}  # it did look while the window moved


def test_rotations_of_several_processes_are_all_done() -> None:
    array = numbered(1, 4003)
    with child("fork", rotate_often, array) as one, child("fork", rotate_often, array) as other:
        assert one.recv() == other.recv() == "done"
    assert array.to_ndarray().tolist() == [2 * N_ROTATIONS]


def die_while_rotating(pipe: Connection, array: Array) -> None:
    with array._allocation._version.changing():
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_while_it_rotates_holds_up_nobody() -> None:
    array = numbered(2, 2)
    with child("fork", die_while_rotating, array) as pipe, pytest.raises(EOFError):
        pipe.recv()
    assert np.array(array).tolist() == [0, 1]
    array.rotate()
    assert np.array(array).tolist() == [2, 3]
