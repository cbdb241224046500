"""Beginnings and ends: of the caller, of the batcher, of whoever else is around."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from process.watching import (
    Script,
    Struck,
    is_running,
    pids_of_session,
    wait_until,
    worker_pids,
)

from rlpool import DictTensor, EpisodeBatcher, UsageError, WorkerDiedError
from rlpool.workers.failure_policy import START_METHODS

from support.faults import create_agent, create_env, faults_at

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(120)]

RunScript = Callable[..., Script]

both = pytest.mark.parametrize("start_method", START_METHODS)

DEATH_S = 3.0
"""No worker outlives its caller by more than this."""

CLOSE_S = 7.0
"""close() takes less than this even if a worker has to be killed."""

RUNNING = """
import os, signal, sys
from rlpool import EpisodeBatcher
from support.faults import create_agent, create_env, faults_at

def main(struck, place, kind, closing, start_method):
    env_args = {"struck_at": struck}
    if place == "create_env":
        env_args["fault"] = kind
        print("ready", flush=True)
    batcher = EpisodeBatcher(
        4, 8, create_agent, {}, create_env, env_args, n_threads=1, seeds=1,
        start_method=start_method,
    )
    print("ready", flush=True)
    batcher.execute(4, env_info=faults_at(4, 1, kind, 2))
    if closing == "forgotten":
        if kind == "none":
            batcher.get()
        return
    if closing == "with":
        with batcher:
            batcher.get()
    try:
        batcher.get()
        print("idle", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        if closing != "close":
            raise
        print("interrupted", flush=True)
        batcher.close()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def started(
    run_script: RunScript,
    struck: Struck,
    place: str,
    kind: str,
    closing: str = "",
    start_method: str = "auto",
) -> Script:
    """Run a script until its worker has come to where it is to be disturbed."""
    script = run_script(RUNNING, struck.path, place, kind, closing, start_method)
    script.wait_for_line("ready")
    if kind == "none":
        script.wait_for_line("idle")
    else:
        wait_until(lambda: struck.is_there)
    script.note_family()
    return script


def assert_quiet(script: Script, n_tracebacks: int) -> None:
    """Check that the script's own traceback is all that was printed."""
    assert script.stderr.count("Traceback") == n_tracebacks, script.stderr
    for word in ("rlpool-worker", "Exception ignored", "resource_tracker", "Process "):
        assert word not in script.stderr, script.stderr


# The caller ends ------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("place", "kind", "closing"),
    [
        ("step", "hang", ""),
        ("step", "hang", "with"),
        ("step", "none", ""),
        ("create_env", "hang", ""),
    ],
)
def test_ctrl_c_ends_quietly(
    run_script: RunScript, struck: Struck, place: str, kind: str, closing: str, start_method: str
) -> None:
    script = started(run_script, struck, place, kind, closing, start_method)
    script.signal(signal.SIGINT, group=True)
    assert script.finish() < CLOSE_S
    assert not script.left_after(0.5)
    assert_quiet(script, 1)
    assert script.stderr.rstrip().endswith("KeyboardInterrupt")
    assert script.returncode == -signal.SIGINT


def test_a_second_ctrl_c_while_closing_ends_as_well(run_script: RunScript, struck: Struck) -> None:
    script = started(run_script, struck, "step", "hang", "close")
    script.signal(signal.SIGINT, group=True)
    script.wait_for_line("interrupted")
    wait_until(lambda: script.state() == psutil.STATUS_SLEEPING)
    script.signal(signal.SIGINT, group=True)
    script.finish(CLOSE_S)
    assert not script.left_after(DEATH_S)


@pytest.mark.parametrize(
    ("kind", "start_method"), [("none", "auto"), ("hang", "auto"), ("none", "spawn")]
)
def test_a_script_that_forgets_close_ends_by_itself(
    run_script: RunScript, struck: Struck, kind: str, start_method: str
) -> None:
    script = run_script(RUNNING, struck.path, "step", kind, "forgotten", start_method)
    script.wait_for_line("ready")
    assert script.finish() < CLOSE_S
    assert not script.left_after(0.5)
    assert (script.stderr, script.returncode) == ("", 0)


@both
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
@pytest.mark.parametrize("kind", ["none", "hang", "hold_the_lock"])
def test_no_worker_outlives_a_killed_caller(
    run_script: RunScript, struck: Struck, number: signal.Signals, kind: str, start_method: str
) -> None:
    script = started(run_script, struck, "step", kind, start_method=start_method)
    assert len(script.family) >= 2
    script.signal(number)
    script.finish()
    assert script.returncode == -number
    assert not script.left_after(DEATH_S)


@both
def test_no_worker_outlives_a_caller_that_is_killed_while_they_start(
    run_script: RunScript, struck: Struck, start_method: str
) -> None:
    script = started(run_script, struck, "create_env", "hang", start_method=start_method)
    script.signal(signal.SIGKILL)
    script.finish()
    assert not script.left_after(DEATH_S)


@both
def test_no_worker_outlives_a_killed_caller_whose_forked_child_lives_on(
    run_script: RunScript, struck: Struck, start_method: str
) -> None:
    script = run_script(FORKED, struck.path, "stays", start_method)
    script.wait_for_line("ready")
    wait_until(lambda: struck.is_there)
    # The child, and with it the tracker, may live on; the worker may not.
    (worker,) = worker_pids(script.pid) - {struck.pid}
    script.signal(signal.SIGKILL)
    wait_until(lambda: not is_running(worker), DEATH_S)


FORKED = """
import os, sys, time
from rlpool import DictTensor, EpisodeBatcher
from support.faults import create_agent, create_env, strike
import torch

def main(struck, what, start_method):
    batcher = EpisodeBatcher(
        20, 8, create_agent, {}, create_env, {}, n_threads=1, seeds=1, start_method=start_method
    )
    info = {"id": torch.arange(4), "length": torch.full((4,), 20), "sleep_ms": torch.full((4,), 5)}
    batcher.execute(4, env_info=DictTensor(info))
    pid = os.fork()
    if pid == 0:
        if what == "closes":
            batcher.close()
        if what == "drops":
            del batcher
        if what == "gets":
            try:
                batcher.get()
            except Exception:
                pass
        if what == "exits":
            sys.stderr = open(os.devnull, "w")
            sys.exit()
        if what == "stays":
            strike("hang", struck)
        os._exit(0)
    if what == "stays":
        print("ready", flush=True)
    os.waitpid(pid, 0)
    result = batcher.get()
    print(result.lengths.tolist(), result["frame"][:, 0, 0].tolist())
    batcher.execute(2)
    print(batcher.get().lengths.tolist())
    batcher.close()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize("what", ["exits", "closes", "drops"])
def test_a_forked_child_of_the_caller_does_not_disturb_the_workers(
    run_script: RunScript, struck: Struck, what: str
) -> None:
    script = run_script(FORKED, struck.path, what, "auto")
    script.finish()
    assert script.stdout.split("\n")[:2] == [
        "[20, 20, 20, 20] [0.0, 1.0, 2.0, 3.0]",
        "[3, 3]",
    ], script.stderr


# How a script may look ------------------------------------------------------------------------


UNGUARDED = """
import sys
from rlpool import EpisodeBatcher
from support.faults import create_agent, create_env

CONDITION EpisodeBatcher(
    4, 8, create_agent, {}, create_env, {}, n_threads=1, start_method=sys.argv[1]
)
print("never printed")
"""


@pytest.mark.parametrize(
    ("condition", "printed", "start_method"),
    [
        ("batcher =", "", "auto"),
        # It could be a guard: only the workers' own way there tells.
        ("if print('ready') is None: batcher =", "ready\nready\n", "auto"),
        ("if print('ready') is None: batcher =", "ready\nready\n", "spawn"),
    ],
)
def test_a_missing_main_guard_is_explained_and_leaves_no_process(
    run_script: RunScript, condition: str, printed: str, start_method: str
) -> None:
    script = run_script(UNGUARDED.replace("CONDITION", condition), start_method)
    script.finish()
    wait_until(lambda: not pids_of_session(script.pid), 0.5)
    assert script.returncode == 1
    assert script.stdout == printed
    assert_quiet(script, 1)
    assert "UsageError" in script.stderr
    assert 'if __name__ == "__main__"' in script.stderr


OWN_CLASSES = """
import functools, multiprocessing, sys, random
import torch
from rlpool import Agent, DictTensor, EpisodeBatcher, GymEnv
from support.faults import FaultyEnv

class Env(FaultyEnv):
    pass

class OwnAgent(Agent):
    def __init__(self, action):
        self.action = action
    def __call__(self, state, observation, agent_info=None, history=None):
        action = torch.full((observation.n_elems(),), self.action)
        return DictTensor({}), DictTensor({"action": action}), DictTensor({})

def create(cls, seed, n):
    return GymEnv([cls() for _ in range(n)], seed)

def main(method, start_method):
    if method != "none":
        multiprocessing.set_start_method(method)
    closed_over = 2
    def closure(**arguments):
        return OwnAgent(closed_over)
    for factory in (lambda: OwnAgent(2), closure, functools.partial(OwnAgent, 2)):
        with EpisodeBatcher(
            4, 8, factory, {}, functools.partial(create, Env), {"n": 2}, n_threads=1, seeds=1,
            start_method=start_method,
        ) as batcher:
            batcher.execute(3)
            result = batcher.get()
            assert (result["action"] == 2).all()
            print(result.lengths.tolist())
        if method != "none":
            break
    if method != "none":
        print(multiprocessing.get_start_method())

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@both
@pytest.mark.parametrize("mode", ["file", "stdin", "command"])
def test_factories_may_be_lambdas_closures_and_partials_of_the_script(
    run_script: RunScript, mode: str, start_method: str
) -> None:
    script = run_script(OWN_CLASSES, "none", start_method, mode=mode)
    script.finish()
    assert (script.stdout, script.stderr) == ("[3, 3, 3]\n" * 3, "")


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_any_start_method_of_the_caller_will_do(run_script: RunScript, method: str) -> None:
    script = run_script(OWN_CLASSES, method, "auto")
    script.finish()
    assert (script.stdout, script.stderr) == (f"[3, 3, 3]\n{method}\n", "")


INTERRUPTED = """
import os, signal, sys, threading, time
import torch
from rlpool import DictTensor, EpisodeBatcher
from support.faults import create_agent, create_env

class Interrupt(Exception):
    pass

def interrupt(number, frame):
    if batcher._dispatcher.n_pending:  # else get() has its result, and is about to return it
        raise Interrupt

def open_batcher(n_threads):
    return EpisodeBatcher(
        2, 3, create_agent, {}, create_env, {}, n_threads=n_threads, seeds=1
    )

def get(rng):
    n_interrupts = 0
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.004 * rng.random())
            result = batcher.get()
            signal.setitimer(signal.ITIMER_REAL, 0)
            return result, n_interrupts
        except Interrupt:
            n_interrupts += 1

def main():
    global batcher
    import random
    rng = random.Random(1)
    signal.signal(signal.SIGALRM, interrupt)
    n_interrupts = 0
    info = DictTensor({"id": torch.arange(5), "length": torch.tensor([50, 1, 80, 3, 20])})
    with open_batcher(1) as batcher:
        for _ in range(100):
            batcher.execute(5, env_info=info)
            result, n = get(rng)
            n_interrupts += n
            assert result.lengths.tolist() == [50, 1, 80, 3, 20], result.lengths
            for row, length in enumerate(result.lengths.tolist()):
                assert result["frame"][row, :length, 1].tolist() == list(range(length))
    assert n_interrupts > 10, n_interrupts
    print("done")

if __name__ == "__main__":
    main()
"""


def test_get_may_be_interrupted_and_repeated(run_script: RunScript) -> None:
    # As in a notebook, where Ctrl-C ends a cell and the next cell calls get() again.
    script = run_script(INTERRUPTED)
    script.finish(40.0)
    assert (script.stdout, script.stderr) == ("done\n", "")


# The batcher ends -----------------------------------------------------------------------------


def open_batcher(
    struck: Struck, n_threads: int = 1, n_slots: int = 8, **arguments: Any
) -> EpisodeBatcher:
    return EpisodeBatcher(
        4,
        n_slots,
        create_agent,
        {"struck_at": struck.path},
        create_env,
        {"struck_at": struck.path},
        n_threads=n_threads,
        seeds=1,
        **arguments,
    )


def get(batcher: EpisodeBatcher) -> dict[str, torch.Tensor]:
    result = batcher.get()
    assert result is not None
    return dict(result.items())


@both
def test_close_does_not_wait_for_a_long_step(struck: Struck, start_method: str) -> None:
    batcher = open_batcher(struck, 2, start_method=start_method)
    batcher.execute(4, env_info=faults_at(4, 3, "hang", 1))
    wait_until(lambda: struck.is_there)
    workers = worker_pids()
    start = time.monotonic()
    batcher.close()
    assert time.monotonic() - start < CLOSE_S
    assert not any(is_running(pid) for pid in workers)
    batcher.close()


def test_close_gives_up_what_is_running_and_queued(struck: Struck) -> None:
    batcher = open_batcher(struck, 1, 2)
    columns = {"length": torch.full((2,), 5000), "sleep_ms": torch.full((2,), 2)}
    for _ in range(12):
        batcher.execute(2, env_info=DictTensor(columns))
    start = time.monotonic()
    batcher.close()
    assert time.monotonic() - start < 2.0
    assert not worker_pids()
    with pytest.raises(UsageError, match="closed"):
        batcher.get()
    with pytest.raises(UsageError, match="closed"):
        batcher.execute(1)


def test_an_exception_in_a_with_block_ends_the_workers(struck: Struck) -> None:
    batcher = open_batcher(struck)
    with pytest.raises(ZeroDivisionError), batcher:
        raise ZeroDivisionError
    assert not worker_pids()
    assert batcher.closed


@both
def test_a_dropped_batcher_ends_its_workers(struck: Struck, start_method: str) -> None:
    batcher = open_batcher(struck, start_method=start_method)
    batcher.execute(2)
    assert worker_pids()
    gc.disable()  # it does not take the garbage collector
    try:
        del batcher
        assert not worker_pids()
    finally:
        gc.enable()


def test_results_stay_valid_after_close(struck: Struck) -> None:
    batcher = open_batcher(struck)
    batcher.execute(4, env_info=DictTensor({"id": torch.arange(4)}))
    kept = batcher.get()
    assert kept is not None
    batcher.close()
    del batcher
    gc.collect()
    for row in range(4):
        assert kept["frame"][row].tolist() == [[row, step] for step in range(3)]
        assert kept["_frame"][row].tolist() == [[row, step + 1] for step in range(3)]
    assert (kept["action"] == 1).all()


@both
def test_workers_outlive_the_thread_that_started_them(struck: Struck, start_method: str) -> None:
    opened: list[EpisodeBatcher] = []
    thread = threading.Thread(
        target=lambda: opened.append(open_batcher(struck, start_method=start_method))
    )
    thread.start()
    thread.join()
    with opened[0] as batcher:
        for _ in range(3):
            batcher.execute(2)
            assert get(batcher)["frame"].shape == (2, 3, 2)


def test_two_batchers_do_not_disturb_each_other(struck: Struck, tmp_path: Path) -> None:
    with (
        open_batcher(struck) as first,
        open_batcher(struck, on_worker_failure="raise") as second,
    ):
        first.execute(2)
        second.execute(4, env_info=faults_at(4, 1, "sigkill", 1))
        with pytest.raises(WorkerDiedError):
            second.get()
        second.close()
        assert get(first)["frame"].shape == (2, 3, 2)


@both
def test_a_worker_leaves_ctrl_c_to_the_caller(struck: Struck, start_method: str) -> None:
    with open_batcher(struck, start_method=start_method) as batcher:
        (worker,) = worker_pids()
        os.kill(worker, signal.SIGINT)
        batcher.execute(2)
        assert get(batcher)["frame"].shape == (2, 3, 2)
        assert worker_pids() == {worker}
