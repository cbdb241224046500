"""The process from which workers are forked: however it lives and dies, only time is lost.

And what it imports for them, and what becomes of modules that it cannot have.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import psutil
import pytest
import torch
from process.watching import Script, is_running, n_descriptors, wait_until, worker_pids

import rlpool
from rlpool import DictTensor, EpisodeBatcher, ParallelEnvManager, SpecError
from rlpool.errors import WorkerDiedError
from rlpool.workers import process_start
from rlpool.workers.process_start import prepare, why_spawned
from rlpool.workers.template_handle import Template

from support.envs import CountingEnv
from support.faults import EXIT_CODE, create_agent, create_env, faults_at
from support.variants import variants

pytestmark = [
    pytest.mark.promise("I10"),
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
]

RunScript = Callable[..., Script]
WriteModule = Callable[[str, str], str]

GONE_S = 3.0


def open_batcher(n_threads: int = 2, **keywords: Any) -> EpisodeBatcher:
    return EpisodeBatcher(4, 8, create_agent, {}, create_env, {}, n_threads, seeds=1, **keywords)


def collect(batcher: EpisodeBatcher) -> DictTensor:
    """Episodes that are as they should be."""
    batcher.execute(6, env_info=DictTensor({"id": torch.arange(6)}))
    result = batcher.get()
    assert result.lengths.tolist() == [3] * 6
    assert result["frame"][:, :, 0].tolist() == [[id_] * 3 for id_ in range(6)]
    return result


def collect_once() -> DictTensor:
    """By a batcher that comes and goes."""
    with open_batcher() as batcher:
        return collect(batcher)


def templates() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if p.name() == "rlpool-template"]


def template() -> psutil.Process:
    (process,) = templates()
    return process


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture
def ready() -> Iterator[None]:
    """A template that serves; nothing is left behind of it but its successor."""
    collect_once()
    gc.collect()
    n_before, others = n_descriptors(), children() - {template().pid}
    yield
    wait_until(lambda: children() - {t.pid for t in templates()} <= others, GONE_S)
    gc.collect()
    assert n_descriptors() <= n_before


# Its death -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ready")
def test_a_template_that_was_killed_is_started_again_and_no_episode_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, n_starts = Template._start_process, 0

    def start_and_kill(handle: Template) -> None:
        nonlocal n_starts
        start(handle)
        n_starts += 1
        if n_starts < 3:
            handle._process.kill()

    ends = {"os_exit": f"exit code {EXIT_CODE}", "segfault": "SIGSEGV", "sigkill": "SIGKILL"}
    batchers = {kind: open_batcher(1, on_worker_failure="raise") for kind in ends}
    batcher = open_batcher()
    before, old = collect(batcher), template()
    old.kill()
    assert collect(batcher).lengths.equal(before.lengths)  # its workers go on
    for kind, dying in batchers.items():  # and their ends are told apart
        dying.execute(6, env_info=faults_at(6, 3, kind, 1))
        with pytest.raises(WorkerDiedError, match=ends[kind]):
            dying.get()
        dying.close()
    batcher.close()
    assert not is_running(old.pid)
    with monkeypatch.context() as patch:
        patch.setattr(Template, "_start_process", start_and_kill)
        assert not why_spawned()
    assert n_starts == 3
    assert collect_once()["frame"].equal(before["frame"])


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("is_asked", variants([True], [False]))
def test_a_template_that_is_killed_when_it_forks_leaves_no_worker(
    is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, old, n_asked = socket.send_fds, template(), 0

    def send_and_kill(connection: socket.socket, *arguments: Any) -> int:
        nonlocal n_asked
        n_asked += connection.type == socket.SOCK_SEQPACKET  # others carry memory to workers
        if n_asked != 2:  # one worker is there already
            return send(connection, *arguments)
        n_asked += 1
        old.suspend()  # it must not answer before it is killed
        if is_asked:
            send(connection, *arguments)
        old.kill()
        return 0

    monkeypatch.setattr(socket, "send_fds", send_and_kill)
    collect_once()
    assert n_asked >= 3
    assert template().pid != old.pid


def test_one_template_serves_all_threads_until_it_does_not_fit_or_until_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare("auto")
    n_before, old = n_descriptors(), template()
    monkeypatch.setenv("CHANGED", "1")
    threads = [threading.Thread(target=collect_once) for _ in range(3)]
    for thread in threads:  # which end before what they have started
        thread.start()
    wait_until(lambda: threading.active_count() == 1 and not worker_pids())
    assert not is_running(old.pid)
    old = template()
    collect_once()
    assert template().pid == old.pid
    rlpool.shutdown()
    rlpool.shutdown()
    assert not is_running(old.pid)
    assert n_descriptors() == n_before - 1


# What cannot be had ----------------------------------------------------------------------------


def test_a_template_that_cannot_start_is_not_tried_for_each_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare("auto")  # with the tracker of multiprocessing, whose interpreter is the same
    tries, interpreter = tmp_path / "tries", tmp_path / "python"
    before = multiprocessing.spawn.get_executable()
    interpreter.write_text(f"#!/bin/sh\necho >> {tries}\nkill -9 $$\n")
    interpreter.chmod(0o755)
    rlpool.shutdown()
    caplog.clear()
    multiprocessing.set_executable(str(interpreter))
    try:
        for _ in range(3):
            prepare("auto")
    finally:
        multiprocessing.set_executable(before)
    assert len(tries.read_text()) == 3
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "(exit code -9)" in caplog.text
    # As text: the error's traceback would keep the batcher that asked, and its memory, alive.
    assert [type(argument) for record in caplog.records for argument in record.args] == [str]
    assert not why_spawned()


FAILING_FORK = """
from rlpool.workers import template

def fail():
    raise OSError(1, "")

template.fork_orphan = fail
"""


DEADLY_FORK = """
import os
from rlpool.workers import template

template.fork_orphan = lambda: os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("source", "why"),
    variants(
        [(FAILING_FORK, "the system does not fork for it: Operation not permitted")],
        [(DEADLY_FORK, "it ended the process (exit code -9)")],
    ),
)
def test_workers_are_spawned_where_the_template_never_forks_one(
    source: str,
    why: str,
    own_templates: None,
    write_module: WriteModule,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = templates()
    rlpool.preload(write_module("fails", source))
    open_batcher(1).close()
    assert templates() == before
    assert why_spawned() == why  # without another try
    assert caplog.text.count(why_spawned()) == 1


DYING_FORK = """
import os, signal
from rlpool.workers import template

fork, pids = template.fork_orphan, []

def fork_to_die():
    pids.append(fork())
    if pids == [0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return pids[-1]

template.fork_orphan = fork_to_die
"""


@pytest.mark.slow
def test_a_worker_that_is_killed_before_it_runs_anything_is_replaced_and_reaped(
    own_templates: None, write_module: WriteModule
) -> None:
    rlpool.preload(write_module("dies", DYING_FORK))
    start_s = time.monotonic()
    with open_batcher(1) as batcher:
        batcher.execute(1)
        assert batcher.get() is not None
        assert time.monotonic() - start_s < 15.0
        children = psutil.Process().children()
        assert not [child for child in children if child.status() == psutil.STATUS_ZOMBIE]


# What else goes on in the caller ---------------------------------------------------------------


class AlarmError(Exception):
    """What a handler of SIGALRM raises."""


@pytest.mark.usefixtures("ready")
def test_a_handler_that_raises_leaves_nothing_of_what_was_being_started() -> None:
    def strike(*_: Any) -> None:
        raise AlarmError

    def open_interrupted(delay_s: float) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            open_batcher(8).close()
            signal.pause()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for is_first, delay_s in ((False, 0.01), (True, 0.5)):
            if is_first:
                rlpool.shutdown()
            with pytest.raises(AlarmError):
                open_interrupted(delay_s)
            wait_until(lambda: not worker_pids(), GONE_S)
            assert templates() or is_first
    finally:
        signal.signal(signal.SIGALRM, before)
    collect_once()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # for its os.fork()
def test_a_fork_of_the_caller_has_a_template_of_its_own_and_does_not_disturb_the_others() -> None:
    with open_batcher() as batcher:
        theirs = template().pid
        pid = os.fork()
        if not pid:
            code = 1
            with contextlib.suppress(BaseException):
                collect_once()
                assert template().pid != theirs
                rlpool.shutdown()
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        collect(batcher)
        assert template().pid == theirs


# Its caller's death ----------------------------------------------------------------------------

CALLER = """
import os, signal, threading
from process.test_template import collect, open_batcher, template, templates
from process.watching import wait_until
from rlpool.workers.process_start import prepare

if __name__ == "__main__":
    batcher = open_batcher()
    collect(batcher)
    process = template()
    process.kill()
    process.wait()
    if os.fork():  # a process that keeps all descriptors
        threading.Thread(target=prepare, args=["auto"]).start()
        wait_until(templates)  # the next one, which imports
        print("there", flush=True)
    signal.pause()
"""


def test_nothing_is_left_when_the_caller_dies_after_its_template_and_while_the_next_one_starts(
    run_script: RunScript,
) -> None:
    script = run_script(CALLER)
    script.wait_for_line("there")
    names: dict[psutil.Process, str] = {}
    for process in script.family:
        with contextlib.suppress(psutil.NoSuchProcess):  # a template forks once to try it
            names[process] = process.name()
    workers, starting = (
        [process for process, name in names.items() if name.startswith(f"rlpool-{kind}")]
        for kind in ("worker", "template")
    )
    assert len(workers) == 2
    assert starting
    script.signal(signal.SIGKILL)
    for left, limit_s in ((workers, GONE_S), (starting, GONE_S + 10.0)):  # it ends its import
        wait_until(lambda left=left: not any(is_running(each.pid) for each in left), limit_s)


# Modules that it imports -----------------------------------------------------------------------

CHANGES = """
import gc, os, random, signal, sys

arguments = list(sys.argv)
os.chdir("/")
os.environ["SET_BY_AN_IMPORT"] = "1"
del os.environ["REMOVED_BY_AN_IMPORT"]
sys.argv = ["changed"]
gc.enable()
random.seed(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
"""


def create_reporting(path: Path, names: tuple[str, ...]) -> gymnasium.Env[Any, Any]:
    """An environment whose process leaves a file that says what it found."""
    import random  # not that of the module's pickle

    report = {
        "modules": [name for name in names if name in sys.modules],
        "variables": {name: os.environ.get(name) for name in os.environ if "_BY_AN_" in name},
        "as in any worker": [os.getcwd(), sys.argv, gc.isenabled()],
        "seen_arguments": getattr(sys.modules.get("changes"), "arguments", None),
        "handles_sigterm": signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL,
        "random": random.random(),
    }
    path.write_text(json.dumps(report))
    return CountingEnv()


def reports(n_workers: int, directory: Path, *names: str) -> list[dict[str, Any]]:
    """What workers found that were started now."""
    paths = [directory / f"worker-{worker}" for worker in range(n_workers)]
    env_fns = [partial(create_reporting, path, names) for path in paths]
    ParallelEnvManager(env_fns, envs_per_worker=1, seed=1).close()
    return [json.loads(path.read_text()) for path in sorted(directory.glob("worker-*"))]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteModule:
    """A function that writes a module which can be imported; returns its name."""
    directory = tmp_path / "modules"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))

    def write(name: str, source: str) -> str:
        path = directory.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return name

    return write


@pytest.fixture
def own_templates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No modules of other tests, and none for them."""
    templates = Template()
    monkeypatch.setattr(process_start, "_template", templates)
    yield
    templates.shutdown()


# For each bad one another template is started.
@pytest.mark.parametrize("n_bad", variants([1], [5]))
@pytest.mark.usefixtures("own_templates")
def test_modules_are_imported_once_and_those_that_cannot_be_are_named_once_and_left_out(
    n_bad: int,
    write_module: WriteModule,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REMOVED_BY_AN_IMPORT", "1")
    log = tmp_path / "imports"
    starts_thread = "import threading; threading.Thread(target=threading.Event().wait).start()"
    cuda = "import torch; torch.cuda.is_initialized = lambda: True"
    starts_workers = "import rlpool; rlpool.ParallelEnvManager([object])"
    bad = {
        write_module("package.threads", starts_thread): "it has 2 threads",
        write_module("killed", "import os; os.kill(os.getpid(), 9)"): "ended the process (exit",
        "missing": "No module named 'missing'",
        write_module("with_cuda", cuda): "it has a CUDA context",
        write_module("starts_workers", starts_workers): "SystemExit",
    }
    bad = dict(itertools.islice(bad.items(), n_bad))
    short_thread = "import threading; t = threading.Thread(target=str); t.start(); t.join()"
    good = [
        write_module("early", short_thread),
        write_module("late", f"open({str(log)!r}, 'a').write('late ')"),
        write_module("changes", CHANGES),
    ]
    rlpool.preload(good[0], *bad, *good[1:])
    for _ in range(2):
        first, second = reports(2, tmp_path, *good, *bad)
        assert first["modules"] == second["modules"] == good
        assert log.read_text() == "late "
        assert first["random"] != second["random"]
    assert first["variables"] == {"SET_BY_AN_IMPORT": "1"}
    assert first["seen_arguments"] == sys.argv
    assert first["as in any worker"] == [os.getcwd(), sys.argv, True]
    assert first["handles_sigterm"]
    assert len(caplog.messages) == len(bad)
    for name, why in bad.items():
        (message,) = (text for text in caplog.messages if f" {name} is left out" in text)
        assert why in message


@pytest.mark.parametrize("name", ["", ".a", "a-b", "__main__.a", 3])
def test_what_is_not_the_name_of_a_module_is_refused(name: Any) -> None:
    with pytest.raises(SpecError, match=r"not the name of a module[^\0]*fix:"):
        rlpool.preload("nowhere", name)
    assert "nowhere" not in process_start._template._modules
