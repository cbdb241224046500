"""Workers take whatever a process of ``torch.multiprocessing`` takes as an argument."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.multiprocessing
from process.watching import n_descriptors, wait_until, worker_pids
from torch import nn

from rlpool import (
    Agent,
    Array,
    EpisodeBatcher,
    ParallelEnvManager,
    Pool,
    SpecError,
    WorkerDiedError,
    WorkerStartupError,
    evaluate,
    make_parallel_env,
)

from support import sharing
from support.sharing import TouchingEnv, TouchingPolicy, create_agent, create_env
from support.variants import variants

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(120)]

Run = Callable[[], Any]
"""Runs an episode."""


def run_episode(batcher: EpisodeBatcher) -> None:
    batcher.execute(1)
    batcher.get()


@contextmanager
def in_create_env(things: Any, start_method: str) -> Iterator[Run]:
    env_args, n_threads = {"things": things}, int(start_method != "none")
    keywords = {} if start_method == "none" else {"start_method": start_method}
    with EpisodeBatcher(
        4, 2, create_agent, {}, create_env, env_args, n_threads, **keywords
    ) as batcher:
        yield functools.partial(run_episode, batcher)


@contextmanager
def in_create_agent(things: Any, start_method: str) -> Iterator[Run]:
    keywords = {"start_method": start_method}
    agent_args = {"things": things}
    with EpisodeBatcher(4, 2, create_agent, agent_args, create_env, {}, 1, **keywords) as batcher:
        yield functools.partial(run_episode, batcher)


@contextmanager
def in_closure(things: Any, start_method: str) -> Iterator[Run]:
    keywords = {"start_method": start_method}

    def create(seed: int) -> Any:
        return create_env(seed, things)

    with EpisodeBatcher(4, 2, create_agent, {}, create, {}, 1, **keywords) as batcher:
        yield functools.partial(run_episode, batcher)


@contextmanager
def in_manager(things: Any, start_method: str) -> Iterator[Run]:
    with closing(ParallelEnvManager([lambda: TouchingEnv(things)], start_method=start_method)) as m:
        yield m.reset


@contextmanager
def in_meta(things: Any, start_method: str) -> Iterator[Run]:
    keywords = {"things": things, "start_method": start_method}
    with closing(make_parallel_env(TouchingEnv, 1, 1, seed=1, **keywords)) as envs:
        yield envs.reset


def run_pool(pool: Pool) -> None:
    """Run an episode; a pool tells when it was interrupted, and starts anew."""
    try:
        pool.store()
    except WorkerDiedError:
        pool.store()


@contextmanager
def in_environments_of_pool(things: Any, start_method: str) -> Iterator[Run]:
    with Pool([TouchingEnv(things)], processes=1, pool_size=8, start_method=start_method) as pool:
        yield functools.partial(run_pool, pool)


@contextmanager
def in_policy_of_pool(things: Any, start_method: str) -> Iterator[Run]:
    keywords = {"policy": TouchingPolicy(things), "start_method": start_method}
    with Pool([TouchingEnv(None)], processes=1, pool_size=8, **keywords) as pool:
        yield functools.partial(run_pool, pool)


DOORS = [
    in_create_env,
    in_create_agent,
    in_closure,
    in_manager,
    in_meta,
    in_environments_of_pool,
    in_policy_of_pool,
]


def check_round(things: Any, run: Run) -> None:
    sharing.begin(things)
    run()
    assert sharing.not_touched(things) == []


def kill_workers(others: set[int]) -> None:
    for pid in worker_pids() - others:
        psutil.Process(pid).kill()


@pytest.mark.parametrize(
    ("door", "start_method", "context"),
    variants(
        [
            *((in_create_agent, "auto", "fork"), (in_manager, "auto", "fork")),
            (in_policy_of_pool, "auto", "spawn"),
        ],
        itertools.product(DOORS, ["auto", "spawn"], ["fork", "spawn"]),
    ),
)
def test_everything_is_shared_with_workers_and_their_successors(
    door: Any, start_method: str, context: str
) -> None:
    before = worker_pids()
    making = sharing.made(torch.multiprocessing.get_context(context))
    with making as things, door(things, start_method) as run:
        check_round(things, run)
        kill_workers(before)
        check_round(things, run)


def test_without_workers_they_are_the_same_objects() -> None:
    with sharing.made(torch.multiprocessing.get_context("fork")) as things:
        seen: list[Any] = []

        def create(seed: int, things: Any) -> Any:
            seen.extend(things.values())
            return create_env(seed)

        with EpisodeBatcher(4, 2, create_agent, {}, create, {"things": things}, 0):
            assert all(one is other for one, other in zip(seen, things.values(), strict=True))


def semaphores_in_use() -> set[str]:
    """Inodes of this process's semaphores; those of others come and go meanwhile."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/dev/shm/sem." in line}


@pytest.mark.parametrize("context", variants(["spawn"], ["fork"]))
def test_no_set_up_leaves_a_descriptor_or_a_semaphore(context: str) -> None:
    made = torch.multiprocessing.get_context(context)
    others, semaphores = semaphores_in_use(), set()
    counts = []
    for _ in range(3):
        with sharing.made(made) as things:
            for keywords in ({}, {"on_worker_failure": "raise"}):
                before = n_descriptors()
                with EpisodeBatcher(
                    4, 2, create_agent, {"things": things}, create_env, {}, 1, **keywords
                ) as batcher:
                    semaphores |= semaphores_in_use() - others
                    sharing.begin(things)
                    run_episode(batcher)
                    assert sharing.not_touched(things) == []
                    if keywords and counts:  # nothing is kept for a successor
                        assert n_descriptors() < before + 12
        del things
        gc.collect()
        counts.append(n_descriptors())
    assert counts[2] == counts[1]
    assert bool(semaphores) == (context == "spawn")  # those for forks have no names
    assert not semaphores & {str(entry.inode()) for entry in os.scandir("/dev/shm")}


def test_a_small_limit_of_descriptors_is_enough() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_descriptors() + 240, before[1]))
    try:
        with sharing.made(torch.multiprocessing.get_context("fork")) as things:
            arguments = create_agent, {}, create_env, {"things": things}, 4
            with EpisodeBatcher(4, 8, *arguments) as batcher:
                sharing.begin(things)
                batcher.execute(8)
                batcher.get()
                assert sharing.not_touched(things) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("start_method", variants(["auto"], ["spawn"]))
def test_more_parameters_are_shared_than_a_message_carries_descriptors(start_method: str) -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(600)).share_memory()

    def create(seed: int) -> Any:
        with torch.no_grad():
            for parameter in model:
                parameter.add_(1)
        return create_env(seed)

    with EpisodeBatcher(4, 2, create_agent, {}, create, {}, 2, start_method=start_method):
        assert all(parameter.item() == 2 for parameter in model)


def sending(connection: Any) -> Callable[[int], Any]:
    """A function that owns what it shares."""
    value = torch.multiprocessing.get_context("spawn").Value("i", 0)
    tensor, array = torch.zeros(1).share_memory_(), Array(1, np.int64, storage="shared")

    def create(seed: int) -> Any:
        with value.get_lock():
            value.value += 1
        tensor.add_(1)
        array[0] = array.to_ndarray()[0] + 1
        connection.send([value.value, int(tensor), int(array.to_ndarray()[0])])
        return create_env(seed)

    return create


def test_a_successor_gets_what_the_caller_has_dropped_or_closed() -> None:
    ours, theirs = torch.multiprocessing.get_context("spawn").Pipe()
    create = sending(theirs)

    before = worker_pids()
    with EpisodeBatcher(4, 2, create_agent, {}, create, {}, 1) as batcher:
        assert ours.recv() == [1, 1, 1]
        theirs.close()
        del create
        gc.collect()
        kill_workers(before)
        run_episode(batcher)
        assert ours.recv() == [2, 2, 2]
    with pytest.raises(EOFError):  # nobody has the other end any more
        ours.recv()


NAMED_FILES = """
import os
import psutil
import torch
import torch.multiprocessing
from process.watching import wait_until, worker_pids
from rlpool import EpisodeBatcher
from support.sharing import create_agent, create_env

level = None

def create(seed, level):
    level.add_(1)
    return create_env(seed)

if __name__ == "__main__":
    torch.multiprocessing.set_sharing_strategy("file_system")
    level = torch.zeros(1).share_memory_()
    before = worker_pids()
    with EpisodeBatcher(4, 2, create_agent, {}, create, {"level": level}, 2) as batcher:
        for n_starts in (2, 4, 6):
            for pid in worker_pids() - before:
                psutil.Process(pid).kill()
            batcher.execute(2)
            batcher.get()
            wait_until(lambda: batcher.stats() and level.item() == n_starts + 2)
    print("done")
"""


@pytest.mark.slow
def test_named_files_of_tensors_outlive_workers(run_script: Any) -> None:
    script = run_script(NAMED_FILES)
    script.finish()
    assert (script.returncode, script.stdout) == (0, "done\n"), script.stderr
    # torch's manager of such files takes a moment.
    wait_until(lambda: not list(Path("/dev/shm").glob(f"torch_{script.pid}_*")))


def test_proxies_of_a_manager_reach_it() -> None:
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        numbers = manager.dict()

        def create(seed: int) -> Any:
            numbers["made"] = numbers.get("made", 0) + 1
            return create_env(seed)

        before = worker_pids()
        with EpisodeBatcher(4, 2, create_agent, {}, create, {}, 1) as batcher:
            kill_workers(before)
            run_episode(batcher)
            assert numbers["made"] == 2


def test_what_is_not_shared_is_copied() -> None:
    level, array = torch.zeros(1), torch.zeros(2)
    model = nn.Linear(1, 1)
    mapped = torch.from_numpy(array.numpy())
    odd = (
        torch.eye(2).to_sparse_coo(),
        nn.LazyLinear(2),
        torch.zeros(0),
        torch.empty(2, device="meta"),
    )

    def create(seed: int) -> Any:
        assert len(odd) == 4
        for tensor in (level, mapped, model.weight.data):
            tensor.fill_(7)
        return create_env(seed)

    with EpisodeBatcher(4, 2, create_agent, {}, create, {}, 1):
        assert not level.is_shared()
        assert not model.weight.is_shared()
        assert level.item() == mapped[0].item() == 0
        assert model.weight.item() != 7


class Writer(Agent):
    """Writes into whatever it is given."""

    def __init__(self) -> None:
        self.told: Any = None
        self.weights = nn.Parameter(torch.zeros(1)).share_memory_()

    def __call__(self, state, observation, agent_info=None, history=None):
        for tensor in (self.told, self.weights.data, agent_info and agent_info["x"]):
            if tensor is not None:
                tensor.fill_(7)
        return create_agent()(state, observation)

    def update(self, info: Any) -> None:
        self.told = info


def test_infos_and_updates_are_always_copies() -> None:
    info, update = torch.zeros(2).share_memory_(), torch.zeros(1).share_memory_()
    for n_threads in (0, 1):
        with EpisodeBatcher(4, 2, Writer, {}, create_env, {}, n_threads) as batcher:
            batcher.update(update)
            batcher.execute(2, agent_info={"x": info}, env_info={"y": info})
            batcher.get()
    assert info.tolist() == [0, 0]
    assert update.item() == 0


def test_an_evaluated_agent_is_always_a_copy() -> None:
    agent = Writer()
    for n_threads in (0, 1):
        evaluate(agent, create_env, 2, n_workers=n_threads)
        assert agent.weights.item() == 0


def test_what_is_shared_is_refused_by_an_update() -> None:
    ours, theirs = torch.multiprocessing.get_context("spawn").Pipe()
    value = torch.multiprocessing.get_context("spawn").Value("i", 0)
    with EpisodeBatcher(4, 2, create_agent, {}, create_env, {}, 0) as batcher:
        for info in (theirs, value):
            with pytest.raises(SpecError, match="info cannot be pickled"):
                batcher.update({"what": info})
    ours.close()
    theirs.close()


def test_a_lock_that_another_fork_uses_is_refused_by_name() -> None:
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    pid = os.fork()
    if not pid:
        os.read(os.pipe()[0], 1)
    try:
        with pytest.raises(WorkerStartupError, match=f"env_args.'things'..'logs'.*process {pid}"):
            EpisodeBatcher(4, 2, create_agent, {}, create_env, {"things": {"logs": queue}}, 1)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_fork_that_is_made_later_shares_with_workers() -> None:
    context = torch.multiprocessing.get_context("fork")
    started, over = context.Semaphore(0), context.Semaphore(0)

    def create(seed: int) -> Any:
        started.release()
        assert over.acquire(timeout=sharing.PATIENCE_S)
        return create_env(seed)

    def answer() -> None:
        started.acquire(timeout=sharing.PATIENCE_S)
        over.release()

    over.release()
    with EpisodeBatcher(4, 2, create_agent, {}, create, {}, 1):
        assert started.acquire(timeout=sharing.PATIENCE_S)
    fork = context.Process(target=answer)
    fork.start()
    with EpisodeBatcher(4, 2, create_agent, {}, create, {}, 1):
        fork.join()


def test_a_pool_keeps_its_workers_while_what_they_share_is_the_same() -> None:
    context = torch.multiprocessing.get_context("fork")
    before = worker_pids()
    with sharing.made(context) as things:
        del things["array of rlpool"]  # whose pickles differ
        policy = TouchingPolicy(things)
        with Pool([TouchingEnv(things)], processes=1, pool_size=8, policy=policy) as pool:
            pool.store()
            workers = worker_pids() - before
            check_round(things, pool.store)
            assert worker_pids() - before == workers
            policy.things = {**things, "more": torch.zeros(2).share_memory_()}
            check_round(things, pool.store)
            assert not worker_pids() & workers


def test_a_structure_of_the_script_is_found_by_its_name(as_main: Callable[[str], None]) -> None:
    as_main("import ctypes\nclass Point(ctypes.Structure): _fields_ = [('x', ctypes.c_int)]")
    point = torch.multiprocessing.get_context("spawn").Value(sys.modules["__main__"].Point, 1)

    def create(seed: int) -> Any:
        point.x += 1
        return create_env(seed)

    with EpisodeBatcher(4, 2, create_agent, {}, create, {}, 1):
        assert point.x == 2


def release(lock: Any) -> None:
    lock.release()


def test_a_worker_cannot_hand_on_what_is_for_forks_but_to_forks() -> None:
    context = torch.multiprocessing.get_context("fork")
    lock, told = context.Lock(), context.SimpleQueue()

    def create(seed: int) -> Any:
        fork = context.Process(target=release, args=(lock,))
        assert lock.acquire()
        fork.start()
        fork.join()
        assert lock.acquire(timeout=sharing.PATIENCE_S)
        try:
            torch.multiprocessing.get_context("spawn").Process(target=release, args=(lock,)).start()
        except RuntimeError as error:
            told.put(str(error))
        with pytest.raises(WorkerStartupError, match="this process has it from another one: make"):
            EpisodeBatcher(4, 2, create_agent, {}, create_env, {"lock": lock}, 1)
        return create_env(seed)

    with EpisodeBatcher(4, 2, create_agent, {}, create, {}, 1):
        assert "created in a fork context" in told.get()
