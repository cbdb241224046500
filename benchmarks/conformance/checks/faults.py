"""Faults: are they reported, and is anything left behind? Each check runs in its own process."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.conformance import data, expect
from benchmarks.conformance.checks import Library, check
from benchmarks.conformance.interface import Collector, Steps

MESSAGE = "no goal number 17"


def collect(collector: Collector, library: Library) -> list[Steps]:
    """Collect twice, long enough for a fault to strike, and until all environments return data.

    Those in a new process may be missing from a few results.
    """
    for number in range(8):
        found = collector.window(20) if library.has("window") else collector.episodes(16)
        if number and len(found) >= collector.job.n_envs:
            return found
    raise expect.Unexpected("expected an error or data of all environments, from one of 8 calls")


def collect_forever(collector: Collector, library: Library) -> None:
    """Collect until the signal comes."""
    collect(collector, library)
    library.ready()
    while True:
        collect(collector, library)


def attempt(library: Library, **env_args: object) -> None:
    """Create a collector, collect, and close it."""
    with library.open(**env_args) as collector:
        collect(collector, library)


def failing(library: Library, fault: str) -> dict[str, Any]:
    """Return arguments with which the last environment fails once, in its 13th step."""
    once = library.file("once")
    return {"policy": data.last_row, "fault": fault, "after": 12, "once": once}


def struck(library: Library, fault: str, **more: object) -> BaseException:
    """Return the error that the caller gets if an environment fails."""
    return expect.error_of(lambda: attempt(library, **failing(library, fault) | more))


@check("faults", "Farama-Foundation/Gymnasium#182")
def exception_names_its_cause(library: Library) -> None:
    """An environment's exception promptly becomes an error of the call, with its text.

    A hang, a broken pipe or an end of file gives the user nothing to search for.
    """
    text = expect.text_of(struck(library, "raise"))
    expect.holds(f"{MESSAGE!r} in the error, not {text.splitlines()[-1]!r}", MESSAGE in text)


@check("faults", "alex-petrenko/sample-factory#137")
def exception_in_the_constructor_names_its_cause(library: Library) -> None:
    """The same holds for an exception in an environment's constructor."""
    text = expect.text_of(struck(library, "raise", where="init", once=""))
    expect.holds(f"{MESSAGE!r} in the error, not {text.splitlines()[-1]!r}", MESSAGE in text)


@check("faults", "python/cpython#79492")
def unpicklable_exception_reaches_the_caller(library: Library) -> None:
    """An exception that cannot be pickled also causes an error, not a hang."""
    struck(library, "unpicklable")


@check("faults", "StanfordVL/BEHAVIOR-1K#361")
def sys_exit_is_noticed(library: Library) -> None:
    """An environment that calls `sys.exit` causes an error, neither a hang nor a normal result."""
    struck(library, "sys_exit")


@check("faults", "thu-ml/tianshou#504", "workers")
def killed_worker_is_noticed(library: Library) -> None:
    """A killed process, for example when out of memory, promptly causes an error or is replaced."""
    survives_or_raises(library, "kill")


def survives_or_raises(library: Library, fault: str) -> None:
    """Accept any timely end of the call: one that hangs runs into the deadline."""
    script = failing(library, fault)
    returns_or_raises(library.make(**script), library)
    expect.holds("the fault to strike", os.path.exists(script["once"]))


def returns_or_raises(collector: Collector, library: Library) -> None:
    """Collect data of all environments, or print the error; missing data is Unexpected."""
    try:
        collect(collector, library)
    except Exception as error:
        print(f"the call raised {expect.text_of(error)}")


@check("faults", "ray-project/ray#23739", "workers")
def run_survives_a_killed_worker(library: Library) -> None:
    """One killed process does not end the run: the next calls return correct data.

    Long runs on shared machines experience this occasionally.
    """
    script = failing(library, "kill")
    with library.open(lengths=(5,), **script) as collector:
        returns_or_raises(collector, library)
        expect.holds("the fault to strike", os.path.exists(script["once"]))
        for stream in collect(collector, library):
            paid = stream.reward % 1000
            expect.equal("rewards of steps", paid, data.steps(stream.observation) + 1)


@check("faults", "ray-project/ray#12978", "workers")
def worker_killed_between_calls_is_noticed(library: Library) -> None:
    """A process that dies between two calls causes an error in the next one, or is replaced."""
    log = library.file("log")
    collector = library.make(log=log)
    collect(collector, library)
    workers = processes_in(log)
    expect.holds("processes of the library", len(workers) > 0)
    workers[-1].kill()
    time.sleep(0.5)
    returns_or_raises(collector, library)


@check("faults", "chainer/chainerrl#389", "workers")
def hang_is_noticed(library: Library) -> None:
    """A step that never returns causes an error or a restart within a limit set by the user."""
    survives_or_raises(library, "hang")


@check("faults", "HorizonRobotics/alf#1456", standard_env=True, signal=signal.SIGINT)
def interrupt_ends_the_run(library: Library) -> None:
    """Ctrl-C during collection ends the program and leaves nothing behind."""
    with library.open() as collector:
        collect_forever(collector, library)


@check("faults", "ikostrikov/pytorch-a2c-ppo-acktr-gail#119", leaves_no="")
def nothing_is_left_after_close(library: Library) -> None:
    """Five seconds after `close`, in the same program, no process runs environments any more."""
    log = library.file("log")
    attempt(library, log=log)
    time.sleep(5)
    left = [each.pid for each in processes_in(log)]
    expect.equal("processes that ran environments and still do", left, [])


def processes_in(log: str) -> list[psutil.Process]:
    """Return other processes that have run environments and are still alive."""
    lines = Path(log).read_text(encoding="utf-8").splitlines()
    pids = {int(line.split()[2]) for line in lines if line.startswith("start")} - {os.getpid()}
    alive = [each for each in psutil.process_iter(["status"]) if each.pid in pids]
    return [each for each in alive if each.info["status"] != psutil.STATUS_ZOMBIE]


@check("faults", "openai/gym#1544", leaves_no="")
def nothing_is_left_after_an_exception(library: Library) -> None:
    """A program that ends after an environment's exception, without `close`, leaves nothing."""
    collector = library.make(**failing(library, "raise"))
    with contextlib.suppress(Exception, expect.Unexpected):  # what it returns is another question
        collect(collector, library)


@check("faults", "hill-a/stable-baselines#570", standard_env=True, leaves_no="")
def nothing_is_left_without_close(library: Library) -> None:
    """A program that forgets `close` ends and leaves nothing behind."""
    collect(library.make(), library)


@check("faults", "tensorpack/tensorpack#1203", standard_env=True, signal=signal.SIGKILL, times=5)
def nothing_is_left_after_the_caller_is_killed(library: Library) -> None:
    """If the program is killed, its processes end and no shared memory is left behind.

    Schedulers and the kernel kill programs, and leftovers fill the machine for the next job.
    """
    collect_forever(library.make(), library)


@check("faults", "hill-a/stable-baselines#898")
def environments_are_closed(library: Library) -> None:
    """`close` closes every environment, so videos are written and simulators end."""
    log = library.file("log")
    attempt(library, log=log)
    time.sleep(1)
    lines = Path(log).read_text(encoding="utf-8").splitlines()
    n_closed = len({line for line in lines if line.startswith("close")})
    expect.holds(f"at least 4 environments closed, not {n_closed}", n_closed >= 4)


@check("faults", "pytorch/rl#2644", standard_env=True)
def descriptors_do_not_grow(library: Library) -> None:
    """Opening and closing collectors does not leak file descriptors."""
    counts = []
    for _ in range(4):
        attempt(library)
        gc.collect()
        counts.append(psutil.Process().num_fds())
    expect.holds(f"no growth of open descriptors, not {counts}", counts[3] <= counts[1])
