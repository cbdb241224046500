"""Arrays in several processes: every way to get one there, and every way a process can end."""

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
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from operator import setitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process.watching import Script, n_descriptors, wait_until

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

each_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
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
def in_forked(function: Any, *arguments: Any) -> Iterator[Connection]:
    """In a process that has inherited all that is here now."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *arguments))
    with warnings.catch_warnings():  # Python 3.12 warns of forking with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()  # the end of the child ends the pipe
    yield here
    ended(process)
    here.close()


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


def ended(process: Any) -> None:
    process.join(JOIN_S)
    assert process.exitcode == 0
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


def test_a_fork_server_passes_views_on_too() -> None:
    context = multiprocessing.get_context("forkserver")
    arrays = {name: make() for name in VIEWS}
    views = [VIEWS[name](array) for name, array in arrays.items()]
    try:
        process = context.Process(target=write_to_all, args=([*views, *views],))
        process.start()
        ended(process)
    finally:
        forkserver._forkserver._stop()
    assert [name for name, array in arrays.items() if not written(array, VIEWS[name])] == []


@each_view
def test_a_view_through_a_pipe_writes_here(view: Any) -> None:
    array = make()
    with in_forked(write_to_piped_array) as pipe:
        pipe.send(view(array))
    assert written(array, view)


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


def test_many_views_of_one_array_share_one_mapping_and_one_descriptor(running: Running) -> None:
    array = Array((4,), "int64", storage="shared")
    with running(receive_and_share_one_descriptor) as pipe:
        pipe.send((array[:2], array[1:]))
        for _ in range(3):
            pipe.send(array[:2])
        assert pipe.recv() == [1, 2]
    assert array.to_ndarray().tolist() == [1, 2, 2, 2]


def receive_and_share_one_descriptor(pipe: Connection) -> None:
    share_one_descriptor(*pipe.recv(), pipe)


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


def make_one_and_wait(pipe: Connection) -> None:
    array = Array((3,), "int64", storage="shared")
    array[...] = [1, 2, 3]
    pipe.send(array)
    pipe.recv()


def test_an_array_of_a_child_outlives_it(running: Running) -> None:
    with running(make_one_and_wait) as pipe:
        array = pipe.recv()
        pipe.send("end")
    array[0] = 9
    assert array.to_ndarray().tolist() == [9, 2, 3]


# Small, and without a trace ---------------------------------------------------------------------


@each_storage
@each_view
def test_a_pickle_of_any_view_is_smaller_than_a_kilobyte(view: Any, storage: str) -> None:
    array = make(storage)
    part = view(array)
    sent = pickle.dumps(part)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert received.shape == part.shape
    assert received.batch_shape == part.batch_shape
    assert (received == part).all()
    array.close()
    received.close()
    part._sent_indices = None
    del received
    descriptors.let_go_of_received()


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


def test_a_copy_lives_on_when_the_owner_closes() -> None:
    array = make()
    copy = pickle.loads(pickle.dumps(array[2]))
    array.close()
    copy[...] = 4
    assert (copy == 4).all()


def test_a_closed_array_cannot_be_sent_and_says_so() -> None:
    array = make()
    sent = pickle.dumps(array)
    array.close()
    with pytest.raises(UsageError, match="closed"):
        pickle.dumps(array)
    with pytest.raises(UsageError, match="is gone"):
        pickle.loads(sent)


def close_and_write(pipe: Connection) -> None:
    array = pipe.recv()
    array[0] = 1
    array.close()
    array.close()
    try:
        array[0] = 2
    except UsageError as error:
        pipe.send(str(error))


def test_closing_in_a_child_closes_there_only() -> None:
    array = Array((3,), "int64", storage="shared")
    with in_forked(close_and_write) as pipe:
        pipe.send(array)
        assert "closed" in pipe.recv()
    array[1] = 7
    assert array.to_ndarray().tolist() == [1, 7, 0]


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


def test_what_a_killed_child_wrote_stays() -> None:
    context = multiprocessing.get_context("fork")
    array = make()
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(there,))
    process.start()
    there.close()  # the end of the child ends the pipe
    here.send(array)
    here.recv()
    process.kill()
    process.join(JOIN_S)
    assert process.exitcode == -signal.SIGKILL
    array[...] = 1
    assert (array == 1).all()
    process.close()
    here.close()


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


def test_a_hundred_arrays_come_and_go() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:")

    gc.collect()
    before = n_descriptors(), mapped()
    for number in range(100):
        array = Array((4,), "float32", storage="shared")
        copy = pickle.loads(pickle.dumps(array[1:]))
        copy[0] = number
        assert array.to_ndarray()[1] == number
        if number % 2:
            array.close()
        del array, copy
    gc.collect()
    wait_until(lambda: (n_descriptors(), mapped()) == before, 10.0)
