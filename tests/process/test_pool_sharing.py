"""A pool that other processes read."""

from __future__ import annotations

import os
import pickle
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
from process.watching import START_S, in_new, is_running, wait_until

from rlpool import Pool, UsageError

from support.transitions import WIDTH, add_numbers, is_whole, trajectories_of_numbers
from support.variants import variants


def read_until_told(pipe: Connection, pool: Any) -> None:
    """Sample until a message comes; sends its pid, how often, and how often that was not whole."""
    n_read = n_partial = 0
    pipe.send(os.getpid())
    while not pipe.poll():
        n_read += 1
        n_partial += not is_whole(pool.sample(64))
    pipe.send((n_read, n_partial))


def fill_and_die(pipe: Connection, frame_stack: dict[str, int]) -> None:
    """Make a pool, send it, and be killed while filling it."""
    pool = Pool(pool_size=200, storage="shared", frame_stack=frame_stack, seed=0)
    add_numbers(pool, 0, 200)
    pipe.send((os.getpid(), pool))
    pipe.recv()
    number = 200
    while True:
        pool.extend(trajectories_of_numbers(number, [7, 50, 3]))
        number += 60


def received(pipe: Connection) -> Any:
    assert pipe.poll(START_S), "no answer"
    return pipe.recv()


@pytest.mark.parametrize(
    ("method", "storage", "frame_stack"),
    variants(
        [("fork", "memmap", {}), ("fork", "shared", {"frame": WIDTH})], [("spawn", "shared", {})]
    ),
)
def test_a_reader_never_sees_half_a_transition(
    method: str, storage: str, frame_stack: dict[str, int]
) -> None:
    pool = Pool(pool_size=150, storage=storage, frame_stack=frame_stack, seed=0)
    add_numbers(pool, 0, 150)
    with in_new(method, read_until_told, pool) as pipe:
        received(pipe)
        for number in range(150, 6_150, 60):
            pool.extend(trajectories_of_numbers(number, [7, 50, 3]))
            add_numbers(pool, number, number + 3)
        pipe.send("end")
        n_read, n_partial = received(pipe)
        assert n_read > 3
        assert n_partial == 0
    with in_new("fork", read_until_told, pool, exitcode=-signal.SIGKILL) as pipe:
        os.kill(received(pipe), signal.SIGKILL)  # one that dies stops nobody
    add_numbers(pool, 0, 200)
    assert len(pool) == 150


@pytest.mark.parametrize("frame_stack", variants([{"frame": WIDTH}], [{}]))
def test_a_writer_that_is_killed_leaves_whole_transitions(frame_stack: dict[str, int]) -> None:
    with in_new("fork", fill_and_die, frame_stack, exitcode=-signal.SIGKILL) as pipe:
        pid, reader = received(pipe)
        pipe.send("go")
        newest = reader.transitions()["action"].max()
        while reader.transitions()["action"].max() == newest:
            pass
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        for _ in range(50):
            assert is_whole(reader.sample(64))
        assert is_whole(reader.transitions())


def test_what_is_sent_is_a_reader_of_a_few_hundred_bytes_that_draws_for_itself() -> None:
    for pool, words in (
        (Pool(pool_size=10), 'storage="shared"'),
        (Pool(pool_size=1000, storage="shared"), "before it has a transition"),
    ):
        with pytest.raises(UsageError, match=words):
            pickle.dumps(pool)
        add_numbers(pool, 0, 100)
    assert len(pickle.dumps(pool)) < 1024
    one, other = (pickle.loads(pickle.dumps(pool)) for _ in range(2))
    assert one.sample(50)["action"].tolist() != other.sample(50)["action"].tolist()
    one.seed(3)
    other.seed(3)
    assert one.sample(50)["action"].tolist() == other.sample(50)["action"].tolist()
