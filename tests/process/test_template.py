"""The process from which workers are forked: however it lives and dies, only time is lost."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from process.watching import Script, is_running, n_descriptors, wait_until, worker_pids

import rlpool
from rlpool import DictTensor, EpisodeBatcher
from rlpool.errors import WorkerDiedError, WorkerStartupError
from rlpool.workers.lifecycle import Workers
from rlpool.workers.process_start import process_class, why_spawned
from rlpool.workers.template_handle import Template, TemplateLostError

from support.faults import EXIT_CODE, create_agent, create_env, faults_at
from support.unforkable import IS_POSSIBLE

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="workers are spawned elsewhere"),
]

RunScript = Callable[..., Script]

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
    batcher = open_batcher()
    result = collect(batcher)
    batcher.close()
    return result


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
def test_a_template_that_was_killed_is_started_again_and_no_episode_is_lost() -> None:
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
    assert collect_once()["frame"].equal(before["frame"])
    old, began = template(), time.monotonic()
    old.suspend()
    collect_once()
    assert template().pid == old.pid
    assert time.monotonic() - began < GONE_S


@pytest.mark.usefixtures("ready")
def test_a_template_that_is_killed_when_it_forks_leaves_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = socket.send_fds
    for delay_s in (None, 0.0, 0.001, 0.01):
        old, n_asked = template(), 0

        def send_and_kill(connection: socket.socket, *arguments: Any) -> int:
            nonlocal n_asked
            n_asked += connection.type == socket.SOCK_SEQPACKET  # others carry memory to workers
            if n_asked != 2:  # one worker is there already
                return send(connection, *arguments)
            n_asked += 1
            if delay_s is not None:  # noqa: B023
                send(connection, *arguments)
                time.sleep(delay_s)  # noqa: B023
            old.kill()  # noqa: B023
            return 0

        monkeypatch.setattr(socket, "send_fds", send_and_kill)
        collect_once()
        assert n_asked >= 3
        monkeypatch.setattr(socket, "send_fds", send)
        collect_once()
        assert template().pid != old.pid


@pytest.mark.usefixtures("ready")
def test_a_worker_whose_answer_nobody_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    received = Template._received

    def lose(self: Template, timeout_s: float) -> bytes:
        monkeypatch.setattr(Template, "_received", received)
        wait_until(lambda: len(children() - before) > 0)
        raise TemplateLostError

    before = children()
    monkeypatch.setattr(Template, "_received", lose)
    collect_once()
    assert template().pid not in before


@pytest.mark.usefixtures("ready")
def test_a_template_that_is_killed_while_it_imports_is_started_again() -> None:
    killed = []

    def kill_early(delay_s: float) -> None:
        wait_until(lambda: children() - before)
        (pid,) = children() - before
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    for delay_s in (0.0, 0.5):
        rlpool.shutdown()
        before = children()
        killer = threading.Thread(target=kill_early, args=(delay_s,))
        killer.start()
        collect_once()
        killer.join()
        assert template().pid != killed[-1]


def test_one_template_serves_until_shutdown_or_until_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process_class("auto")
    n_before, old = n_descriptors(), template()
    rlpool.shutdown()
    rlpool.shutdown()
    assert not is_running(old.pid)
    assert n_descriptors() == n_before - 2
    threading.Thread(target=collect_once).start()  # it ends before what it has started
    wait_until(lambda: threading.active_count() == 1 and not worker_pids())
    old = template()
    collect_once()
    assert template().pid == old.pid
    for change in (lambda: monkeypatch.setenv("CHANGED", "1"), lambda: monkeypatch.chdir(tmp_path)):
        change()
        process_class("auto")
        assert not is_running(old.pid)
        assert template().pid != old.pid
        old = template()


@pytest.mark.usefixtures("ready")
def test_a_caller_that_ignores_its_children_has_a_template_all_the_same() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process_class("auto")
        old = template()
        old.kill()
        wait_until(lambda: not templates())  # the kernel has cleared it away
        process_class("auto")
        assert template().pid != old.pid
    finally:
        signal.signal(signal.SIGCHLD, before)


# What cannot be had ----------------------------------------------------------------------------


def test_a_template_that_cannot_start_is_not_tried_for_each_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process_class("auto")  # with the tracker of multiprocessing, whose interpreter is the same
    tries, interpreter = tmp_path / "tries", tmp_path / "python"
    before = multiprocessing.spawn.get_executable()
    try:
        for how, n_tries in (("exit 3", 1), ("kill -9 $$", 3)):
            tries.write_text("")
            interpreter.write_text(f"#!/bin/sh\necho >> {tries}\n{how}\n")
            interpreter.chmod(0o755)
            rlpool.shutdown()
            caplog.clear()
            multiprocessing.set_executable(str(interpreter))
            for _ in range(3):
                process_class("auto")
            assert len(tries.read_text()) == n_tries
            assert [r.levelno for r in caplog.records] == [logging.WARNING]
            assert why_spawned() in caplog.text
    finally:
        multiprocessing.set_executable(before)
    assert not why_spawned()


@pytest.mark.usefixtures("ready")
def test_a_caller_without_descriptors_is_told_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    start, limit = Workers.start, 0

    def start_with_few(workers: Workers, *arguments: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        start(workers, *arguments)

    errors = []
    with monkeypatch.context() as patch:
        patch.setattr(Workers, "start", start_with_few)
        for limit in range(n_descriptors(), n_descriptors() + 40, 2):  # noqa: B007 (read above)
            try:
                open_batcher(1).close()
                break
            except WorkerStartupError as error:
                errors.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert not worker_pids()
    assert len(errors) > 2
    assert all("0 of 1 workers could be started: [Errno 24]" in error for error in errors)
    collect_once()


REFUSED = """
import errno, logging, os, sys
import psutil
import rlpool
from process.test_template import WorkerStartupError, collect_once, templates, why_spawned
from support import unforkable

def main():
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    rlpool.preload("support.unforkable")
    os.environ[unforkable.VARIABLE] = str(errno.ENOMEM)
    for _ in range(2):
        try:
            collect_once()
        except WorkerStartupError as error:
            print(str(error).splitlines()[0])
        assert not psutil.Process().children()[2:]
    assert not why_spawned()
    os.environ[unforkable.VARIABLE] = str(errno.EPERM)
    collect_once()
    assert not templates()

if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(not IS_POSSIBLE, reason="the filter knows one machine")
def test_forks_that_fail_have_the_promised_results(run_script: RunScript) -> None:
    script = run_script(REFUSED)
    script.finish()
    assert script.returncode == 0, script.stderr
    why = "the system does not fork for it: Operation not permitted"
    assert script.stdout.splitlines() == [
        *2 * ["0 of 2 workers could be started: [Errno 12] Cannot allocate memory"],
        f"workers are spawned, not forked from a template: {why}",
    ]


# What else goes on in the caller ---------------------------------------------------------------


class AlarmError(TimeoutError):
    """As many handlers of SIGALRM raise."""


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
        for is_first, delay_s in ((False, 0.002), (False, 0.02), (True, 0.005), (True, 0.5)):
            if is_first:
                rlpool.shutdown()
            with pytest.raises(AlarmError):
                open_interrupted(delay_s)
            wait_until(lambda: not worker_pids(), GONE_S)
            assert templates() or is_first
    finally:
        signal.signal(signal.SIGALRM, before)
    collect_once()


GUEST = """
import multiprocessing, os, subprocess, sys, threading, traceback
import rlpool
from process.test_template import collect, collect_once, open_batcher, template

def fork():
    pid = os.fork()
    if pid == 0:
        try:
            rlpool.shutdown()
            collect_once()
            assert template().pid != theirs
            rlpool.shutdown()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def in_thread():
    collect_once()
    done.append(1)

if __name__ == "__main__":
    done = []
    threads = [threading.Thread(target=in_thread) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4
    theirs = template().pid
    batcher = open_batcher()
    assert fork() == 0
    collect(batcher)
    batcher.close()
    assert template().pid == theirs
    assert multiprocessing.get_start_method(allow_none=True) is None
    assert multiprocessing.active_children() == []
    listing = ["ls", "-l", "/proc/self/fd"]
    files = subprocess.run(listing, close_fds=False, capture_output=True, text=True).stdout
    assert "socket" not in files and "memfd" not in files, files
"""


def test_threads_and_forks_of_the_caller_have_templates_without_disturbing_each_other(
    run_script: RunScript,
) -> None:
    script = run_script(GUEST)
    script.finish()
    assert script.returncode == 0, script.stderr
    assert not script.left_after(GONE_S)


# Its caller's death ----------------------------------------------------------------------------

CALLER = """
import os, signal, sys
from process.test_template import collect, open_batcher, template

if __name__ == "__main__":
    print("began", flush=True)
    batcher = open_batcher()
    collect(batcher)
    if sys.argv[1] == "stopped":
        template().suspend()
    if sys.argv[1] == "dead":
        process = template()
        process.kill()
        process.wait()
    if os.fork():  # a process that keeps all descriptors
        print("there", flush=True)
    signal.pause()
"""


def test_nothing_is_left_when_the_caller_dies_before_or_after_its_template(
    run_script: RunScript,
) -> None:
    for state in ("importing", "stopped", "dead"):
        script = run_script(CALLER, state)
        script.wait_for_line("began" if state == "importing" else "there")
        if state == "importing":
            wait_until(lambda: psutil.Process(script.pid).children())  # noqa: B023
        script.note_family()
        family = script.family
        if state != "importing":  # else it is the template alone, without a name of its own
            script.family = [p for p in family if p.name().startswith("rlpool-")]
        assert len(script.family) >= {"importing": 1, "dead": 2}.get(state, 3)
        script.signal(signal.SIGKILL)
        left = script.left_after(GONE_S)
        script.family = family
        assert not left, (state, left)
