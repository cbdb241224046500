"""Arrays in several processes: every way to get one there, every way to end, and one window."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from operator import setitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process.watching import Script, n_descriptors

from rlpool import Array, UsageError
from rlpool.memory import transfer as descriptors
from rlpool.patterns import write_to_piped_array

from support.staying import stays

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left", "no_descriptor_left")]

STORAGES = ("shared", "memmap")
JOIN_S = 60.0

VIEWS: dict[str, Callable[[Array], Array]] = {
    "whole": lambda array: array,
    "row": lambda array: array[2],
    "row before the first": lambda array: array[-1],
    "element": lambda array: array[1, 2, 0],
    "rows": lambda array: array[1:4],
    "reversed": lambda array: array[::-2, ::-1],
    "columns": lambda array: array[:, 1],
    "index arrays": lambda array: array[[1, 3], [0, 2]],
    "mask": lambda array: array[np.arange(15).reshape(5, 3) % 2 == 0],
    "many indices": lambda array: array[np.arange(1000) % 5],
    "view of a view": lambda array: array[1:4][0][1:][::-1],
    "full": lambda array: array[2].full,
    "next": lambda array: array.next,
    "nothing": lambda array: array[2:2],
}

each_storage = pytest.mark.parametrize("storage", STORAGES)


def obey(pipe: Connection) -> None:
    """Call one function after another, each with the pipe and what it is given."""
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            function(pipe, *arguments)
            pipe.send("done")
        except Exception:
            pipe.send(traceback.format_exc())
        del function, arguments
        gc.collect()
        descriptors.let_go_of_received()


Running = Callable[..., contextlib.AbstractContextManager[Connection]]
"""What the fixture ``running`` gives: a function at work in another process, which has the other
end of the pipe as its first argument and has dropped all it had when the section is over."""


@pytest.fixture(scope="module")
def in_spawned() -> Iterator[Running]:
    """In a process that lives as long as the tests here: spawning one takes seconds."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=obey, args=(there,))
    process.start()
    there.close()

    @contextlib.contextmanager
    def run(function: Any, *arguments: Any) -> Iterator[Connection]:
        here.send((function, arguments))
        yield here
        assert here.recv() == "done"

    yield run
    here.close()
    ended(process)


@contextlib.contextmanager
def in_context(method: str, function: Any, *arguments: Any, exitcode: int = 0) -> Iterator[Any]:
    """In a new process; forked ones inherit all that is here now."""
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *arguments))
    with warnings.catch_warnings():  # Python 3.12 warns of forking with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()  # the end of the child ends the pipe
    try:
        yield here
    finally:
        with contextlib.suppress(OSError):  # it has ended
            here.send(None)
        process.join(JOIN_S)
        here.close()
    ended(process, exitcode)


in_forked = partial(in_context, "fork")


@pytest.fixture(params=["spawn", "fork"])
def running(request: pytest.FixtureRequest, in_spawned: Running) -> Running:
    return in_spawned if request.param == "spawn" else in_forked


@pytest.fixture
def no_descriptor_left(in_spawned: Running) -> Iterator[None]:
    resource_tracker.ensure_running()  # its pipe belongs to the interpreter
    gc.collect()
    before = n_descriptors()
    yield
    gc.collect()
    descriptors.let_go_of_received()
    assert n_descriptors() == before


@pytest.fixture(params=["spawn", "fork"])
def context(request: pytest.FixtureRequest) -> Iterator[Any]:
    with warnings.catch_warnings():  # Python 3.12 warns of forking with threads, such as a queue's
        warnings.simplefilter("ignore", DeprecationWarning)
        yield multiprocessing.get_context(request.param)


def make(storage: str = "shared") -> Array:
    array = Array((5, 3), np.float32, feature_shape=(2,), storage=storage, padding=1, full_size=10)
    array.full[...] = np.arange(60).reshape(10, 3, 2)
    return array


def ended(process: Any, exitcode: int = 0) -> None:
    process.join(JOIN_S)
    assert process.exitcode == exitcode
    process.close()


def written(array: Array, view: Callable[[Array], Array]) -> bool:
    """Whether 42 was written to a view, and nowhere else."""
    expected = make("local")
    view(expected)[...] = 42
    return bool((array[-1:11] == expected[-1:11]).all())


# Every way to another process -------------------------------------------------------------------


def write_to_all(views: list[Array]) -> None:
    for view in views:
        view[...] = 42


def use_arguments(pipe: Connection, views: list[Array], *call: Any) -> None:
    write_to_all(views)
    setitem(*call)
    share_one_descriptor(views[0], views[1], pipe)


def share_one_descriptor(first: Array, second: Array, pipe: Connection) -> None:
    before = len(os.listdir("/proc/self/fd"))
    more = [pipe.recv() for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert (more[-1] == first).all()
    copies = [pickle.loads(pickle.dumps(first)) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    copies[-1][...] = 1
    second[...] = 2
    pipe.send(first.to_ndarray().tolist())


@each_storage
def test_views_in_process_arguments_write_here(context: Any, storage: str) -> None:
    arrays = {name: make(storage) for name in VIEWS}
    views = [VIEWS[name](array) for name, array in arrays.items()]
    target, one = make(storage), Array((4,), "int64", storage=storage)
    here, there = context.Pipe()
    process = context.Process(
        target=use_arguments,
        args=(there, [one[:2], one[1:], *views], target[2, :2][1:], (0, 1), -7),
    )
    process.start()
    there.close()  # the end of the child ends the pipe
    for _ in range(3):
        here.send(one[:2])
    assert here.recv() == [1, 2]
    ended(process)
    here.close()
    assert [name for name, array in arrays.items() if not written(array, VIEWS[name])] == []
    assert target.to_ndarray()[2, 1].tolist() == [14, -7]
    assert one.to_ndarray().tolist() == [1, 2, 2, 2]


def write_to_piped_arrays(pipe: Connection, n_arrays: int) -> None:
    for _ in range(n_arrays):
        write_to_piped_array(pipe)


@each_storage
def test_views_through_a_pipe_write_here_under_spawn(in_spawned: Running, storage: str) -> None:
    arrays = {name: make(storage) for name in VIEWS}
    with in_spawned(write_to_piped_arrays, len(VIEWS)) as pipe:
        for name, array in arrays.items():
            pipe.send(VIEWS[name](array))
    assert [name for name, array in arrays.items() if not written(array, VIEWS[name])] == []


def add_one_to_all(queue: Any, n_arrays: int, results: Any) -> None:
    received = [queue.get() for _ in range(n_arrays)]
    for array in received:
        array[...] = array.to_ndarray() + 1
    for array in received:
        results.put(array)
    queue.get()


@each_storage
def test_views_through_queues_go_there_and_back(context: Any, storage: str) -> None:
    array = make(storage)
    queue, results = context.Queue(), context.Queue()
    process = context.Process(target=add_one_to_all, args=(queue, 3, results))
    process.start()
    for sent in (array, array[2], array[[0, 4]]):
        queue.put(sent)
    returned = [results.get(timeout=JOIN_S) for _ in range(3)]
    assert [r.shape for r in returned] == [(5, 3, 2), (3, 2), (2, 3, 2)]
    expected = np.arange(30).reshape(5, 3, 2) + 1
    expected[[2, 0, 4]] += 1
    assert (array == expected).all()
    returned[0][...] = 7
    assert (array == 7).all()
    queue.put(None)
    ended(process)
    for each in (queue, results):
        each.close()
        each.join_thread()


def received_late(pipe: Connection) -> None:
    pipe.send([float(pickle.loads(sent).to_ndarray().sum()) for sent in pipe.recv()])


def test_arrays_that_the_sender_dropped_arrive_late(running: Running) -> None:
    with running(received_late) as pipe:
        sent = []
        for number in range(5):
            array = Array((3,), "float32", storage="shared")
            array[...] = number
            sent.append(pickle.dumps(array))
            del array
        gc.collect()
        pipe.send(sent)
        assert pipe.recv() == [0, 3, 6, 9, 12]


def write_what_is_in(pipe: Connection, sent: bytes) -> None:
    for _ in range(3):
        view = pickle.loads(sent)
        view[...] = view.to_ndarray() + 1
        pipe.send(len(view))


def test_one_pickle_goes_to_any_number_of_processes(in_spawned: Running) -> None:
    array = Array((4,), "int64", storage="shared")
    sent = pickle.dumps(array[1:3])
    for run in (in_forked, in_spawned, in_forked):
        with run(write_what_is_in, sent) as pipe:
            assert [pipe.recv() for _ in range(3)] == [2] * 3
    assert array.to_ndarray().tolist() == [0, 9, 9, 0]


def pass_on(pipe: Connection) -> None:
    array = pipe.recv()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=setitem, args=(array[1], ..., 5))
    process.start()
    process.join(JOIN_S)
    pipe.send(array)
    pipe.recv()


def test_a_receiver_can_pass_an_array_on(running: Running) -> None:
    array = Array((3, 2), "int64", storage="shared")
    with running(pass_on) as pipe:
        pipe.send(array[1:])
        back = pipe.recv()
        pipe.send("done")
    assert array.to_ndarray().tolist() == [[0, 0], [0, 0], [5, 5]]
    assert back.to_ndarray().tolist() == [[0, 0], [5, 5]]
    back[0] = 6
    assert array.to_ndarray().tolist() == [[0, 0], [6, 6], [5, 5]]


# Small, and without a trace ---------------------------------------------------------------------


def test_a_received_copy_can_be_dropped_and_closed_in_the_owners_process() -> None:
    array = make()
    sent = pickle.dumps(array[2])
    copy = pickle.loads(sent)
    del copy
    gc.collect()
    array[2] = 1
    copy = pickle.loads(sent)
    assert (copy == 1).all()
    copy.close()
    with pytest.raises(UsageError, match="closed"):
        copy.to_ndarray()
    assert (array[2] == 1).all()
    assert (pickle.loads(pickle.dumps(array))[2] == 1).all()


def test_a_closed_array_cannot_be_sent_and_says_so() -> None:
    array = make()
    sent = pickle.dumps(array)
    array.close()
    with pytest.raises(UsageError, match="closed"):
        pickle.dumps(array)
    with pytest.raises(UsageError, match="is gone"):
        pickle.loads(sent)


OWNER = """
import multiprocessing, sys
import numpy as np
from rlpool import Array

def child(array, pipe, inherited):
    for end in inherited:
        end.close()
    more = pipe.recv()
    array[0] = 1
    more[0] = 1
    print("child", flush=True)
    pipe.recv()

if __name__ == "__main__":
    storage, method = sys.argv[1:]
    context = multiprocessing.get_context(method)
    array = Array((4, 1000), np.float64, storage=storage)
    array[...] = 3
    here, there = context.Pipe()
    inherited = [here] if method == "fork" else []
    process = context.Process(target=child, args=(array[1:], there, inherited))
    process.start()
    here.send(array[np.arange(500) % 4])
    process.join()
"""


@pytest.mark.parametrize("victim", ["owner", "child"])
@pytest.mark.parametrize(("storage", "method"), [("shared", "spawn"), ("memmap", "fork")])
def test_a_kill_leaves_nothing_behind(
    storage: str,
    method: str,
    victim: str,
    run_script: Callable[..., Script],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))  # where a memmap lies, and sockets would
    script = run_script(OWNER, storage, method)
    script.wait_for_line("child")
    (child,) = (process for process in script.family if not stays(process))
    if victim == "owner":
        script.signal(signal.SIGKILL)
        script.finish()
        assert script.left_after(20.0) == []
    else:
        child.kill()
        script.finish()
        assert script.returncode == 0, script.stderr
    assert list(temporary.iterdir()) == []


def hold(pipe: Connection) -> None:
    array = pipe.recv()
    pipe.send(float(array.to_ndarray().sum()))
    pipe.recv()
    pipe.send(float(array.to_ndarray().sum()))


def test_memory_of_the_owner_is_given_back_and_a_child_keeps_its_own() -> None:
    array = make()
    array[...] = 2
    with in_forked(hold) as pipe:
        pipe.send(array)
        assert pipe.recv() == 60
        array[0] = 0
        array.close()
        del array
        pipe.send("look again")
        assert pipe.recv() == 48


# One window in all processes --------------------------------------------------------------------


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
    with in_context(method, follow, array) as pipe:

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
N_LOOKS = 300
LOOKS: list[Callable[[Array], Any]] = [
    np.array,
    lambda array: np.asarray(array, np.float64),
    lambda array: array[[0, 1, 2]].to_ndarray(),
    lambda array: array[:3][::-1].to_tensor().numpy(),
]


def rotate_with_new_rows(pipe: Connection, array: Array) -> None:
    for number in range(1, N_ROTATIONS + 1):
        array[array.last + 1 : array.last + 1 + array.padding] = number
        array.rotate()
    pipe.send("done")


def test_a_copy_never_has_a_part_of_the_rows_that_a_rotation_brings_along() -> None:
    array = Array((4,), "int64", (4000,), padding=3, storage="shared")
    with in_forked(rotate_with_new_rows, array) as pipe:
        seen = set()
        while not pipe.poll():
            for look in LOOKS:
                rows = np.unique(look(array)[:3])
                assert len(rows) == 1
                seen.add(int(rows[0]))
        assert pipe.recv() == "done"
    assert int(array[0, 0]) == N_ROTATIONS
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
    array = Array((4,), "int64", (400,), padding=2, full_size=12, storage="shared")
    array.full[...] = np.repeat([1, 2, 3], 4)[:, None]
    array.full[12:14] = 1  # what will be brought along to the first window
    seen = set()
    with in_forked(rotate_until_told, array):
        for number in range(100 * N_LOOKS):
            if number > N_LOOKS and len(seen) == 3:
                break
            rows = np.unique(array.to_ndarray().copy())
            assert len(rows) == 1
            seen.add(int(rows[0]))
            assert len(np.unique(array[...].to_tensor())) == 1
            bound = array[1:]
            assert (bound == bound.to_ndarray()[0, 0]).all()
    assert seen == {1, 2, 3}  # it did look while the window moved


def test_rotations_of_several_processes_are_all_done() -> None:
    array = numbered(1, 4003)
    with in_forked(rotate_often, array) as one, in_forked(rotate_often, array) as other:
        assert one.recv() == other.recv() == "done"
    assert array.to_ndarray().tolist() == [2 * N_ROTATIONS]


def die_while_rotating(pipe: Connection, array: Array) -> None:
    with array._allocation._version.changing():
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_while_it_rotates_holds_up_nobody() -> None:
    array = numbered(2, 2)
    with in_forked(die_while_rotating, array, exitcode=-signal.SIGKILL):
        pass
    assert np.array(array).tolist() == [0, 1]
    array.rotate()
    assert np.array(array).tolist() == [2, 3]
