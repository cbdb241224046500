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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

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

    dying = open_batcher(1, on_worker_failure="raise")
    batcher = open_batcher()
    before, old = collect(batcher), template()
    old.kill()
    assert collect(batcher).lengths.equal(before.lengths)  # its workers go on
    dying.execute(6, env_info=faults_at(6, 3, "os_exit", 1))
    with dying, pytest.raises(WorkerDiedError, match=f"exit code {EXIT_CODE}"):
        dying.get()
    batcher.close()
    assert not is_running(old.pid)
    with monkeypatch.context() as patch:
        patch.setattr(Template, "_start_process", start_and_kill)
        assert not why_spawned()
    assert n_starts == 3
    assert collect_once()["frame"].equal(before["frame"])


@pytest.mark.usefixtures("ready")
def test_a_template_that_is_killed_when_it_forks_leaves_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, old, n_asked = socket.send_fds, template(), 0

    def send_and_kill(connection: socket.socket, *arguments: Any) -> int:
        nonlocal n_asked
        n_asked += connection.type == socket.SOCK_SEQPACKET  # others carry memory to workers
        if n_asked != 2:  # one worker is there already
            return send(connection, *arguments)
        n_asked += 1
        old.suspend()  # it must not answer before it is killed
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


@pytest.mark.usefixtures("own_templates")
def test_workers_are_spawned_where_the_template_never_forks_one(
    write_module: WriteModule, caplog: pytest.LogCaptureFixture
) -> None:
    before = templates()
    rlpool.preload(write_module("fails", FAILING_FORK))
    open_batcher(1).close()
    assert templates() == before
    assert "Operation not permitted" in why_spawned()  # without another try
    assert caplog.text.count(why_spawned()) == 1


# What else goes on in the caller ---------------------------------------------------------------


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


@pytest.mark.slow
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
import os, random, signal, sys

arguments = list(sys.argv)
os.chdir("/")
os.environ["SET_BY_AN_IMPORT"] = "1"
sys.argv = ["changed"]
random.seed(0)
signal.signal(signal.SIGTERM, lambda *_: None)
"""


def create_reporting(path: Path, names: tuple[str, ...]) -> CountingEnv:
    """An environment whose process leaves a file that says what it found."""
    import random  # not that of the module's pickle

    report = {
        "modules": [name for name in names if name in sys.modules],
        "as in any worker": [os.getcwd(), sys.argv, sys.modules["changes"].arguments],
        "is set": os.environ.get("SET_BY_AN_IMPORT"),
        "handles_sigterm": signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL,
        "random": random.random(),
    }
    path.write_text(json.dumps(report))
    return CountingEnv()


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteModule:
    """A function that writes a module which can be imported; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
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
@pytest.mark.parametrize("n_bad", variants([1], [4]))
@pytest.mark.usefixtures("own_templates")
def test_modules_are_imported_once_and_those_that_cannot_be_are_named_once_and_left_out(
    n_bad: int, write_module: WriteModule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "imports"
    starts_thread = "import threading; threading.Thread(target=threading.Event().wait).start()"
    cuda = "import torch; torch.cuda.is_initialized = lambda: True"
    bad = {
        write_module("threads", starts_thread): "2 threads",
        write_module("killed", "import os; os.kill(os.getpid(), 9)"): "ended the process",
        "missing": "No module named",
        write_module("with_cuda", cuda): "CUDA",
    }
    bad = dict(itertools.islice(bad.items(), n_bad))
    good = [
        write_module("changes", CHANGES),
        write_module("once", f"open({str(log)!r}, 'a').write('imported ')"),
    ]
    rlpool.preload(good[0], *bad, *good[1:])
    for _ in range(2):
        paths = [tmp_path / f"worker-{worker}" for worker in range(2)]
        env_fns = [partial(create_reporting, path, (*good, *bad)) for path in paths]
        ParallelEnvManager(env_fns, envs_per_worker=1, seed=1).close()
        first, second = (json.loads(path.read_text()) for path in paths)
        assert first["modules"] == second["modules"] == good
        assert log.read_text() == "imported "
        assert first["random"] != second["random"]
        assert first["as in any worker"] == [os.getcwd(), sys.argv, sys.argv]
        assert first["is set"] == "1"
        assert first["handles_sigterm"]
    assert len(caplog.messages) == len(bad)
    for name, why in bad.items():
        (message,) = (text for text in caplog.messages if f" {name} is left out" in text)
        assert why in message


@pytest.mark.parametrize("name", ["", ".a", "a-b", 3])
def test_what_is_not_the_name_of_a_module_is_refused(name: Any) -> None:
    with pytest.raises(SpecError, match="name of a module"):
        rlpool.preload("nowhere", name)
    assert "nowhere" not in process_start._template._modules
