"""The process from which workers are forked: however it dies, only time is lost.

Also the modules it imports for them, including those that cannot be imported.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from process.watching import in_new, is_running, n_descriptors, wait_until, worker_pids

import rlpool
from rlpool import DictTensor, EpisodeBatcher, ParallelEnvManager, SpecError
from rlpool.errors import WorkerDiedError
from rlpool.workers import process_start, template_handle
from rlpool.workers.process_start import prepare
from rlpool.workers.template_handle import Template

from support.envs import CountingEnv
from support.faults import EXIT_CODE, create_agent, create_env, faults_at
from support.variants import variants

pytestmark = [
    pytest.mark.promise("I10"),
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
]


GONE_S = 3.0


def open_batcher(n_threads: int = 2, **keywords: Any) -> EpisodeBatcher:
    return EpisodeBatcher(4, 8, create_agent, {}, create_env, {}, n_threads, seeds=1, **keywords)


def collect(batcher: EpisodeBatcher) -> DictTensor:
    """Collect episodes and check them."""
    batcher.execute(6, env_info=DictTensor({"id": torch.arange(6)}))
    result = batcher.get()
    assert result.lengths.tolist() == [3] * 6
    assert result["frame"][:, :, 0].tolist() == [[id_] * 3 for id_ in range(6)]
    return result


def collect_once() -> DictTensor:
    """Collect with a new batcher and close it."""
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
    """Yield a working template, and check that only its successor is left behind."""
    collect_once()
    gc.collect()
    n_before, others = n_descriptors(), children() - {template().pid}
    yield
    wait_until(lambda: children() - {t.pid for t in templates()} <= others, GONE_S)
    gc.collect()
    assert n_descriptors() <= n_before


# Its death -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ready")
def test_a_killed_template_is_restarted_and_no_episode_is_lost() -> None:
    dying = open_batcher(1, on_worker_failure="raise")
    batcher = open_batcher()
    before, old = collect(batcher), template()
    old.kill()
    assert collect(batcher).lengths.equal(before.lengths)  # its workers continue
    dying.execute(6, env_info=faults_at(6, 3, "os_exit", 1))
    with dying, pytest.raises(WorkerDiedError, match=f"exit code {EXIT_CODE}"):
        dying.get()
    batcher.close()
    assert not is_running(old.pid)
    assert collect_once()["frame"].equal(before["frame"])


@pytest.mark.usefixtures("ready")
def test_a_template_killed_while_forking_leaves_no_worker_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, old, n_asked = socket.send_fds, template(), 0

    def send_and_kill(connection: socket.socket, *arguments: Any) -> int:
        nonlocal n_asked
        n_asked += connection.type == socket.SOCK_SEQPACKET  # others carry memory to workers
        if n_asked != 2:  # one worker exists already
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


def test_one_template_serves_all_threads_until_shutdown_or_a_mismatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare("auto")
    n_before, old = n_descriptors(), template()
    monkeypatch.setenv("CHANGED", "1")
    threads = [threading.Thread(target=collect_once) for _ in range(3)]
    for thread in threads:  # which end before the processes they have started
        thread.start()
    wait_until(lambda: not any(each.is_alive() for each in threads) and not worker_pids())
    assert not is_running(old.pid)
    old = template()
    collect_once()
    assert template().pid == old.pid
    rlpool.shutdown()
    rlpool.shutdown()
    assert not is_running(old.pid)
    assert n_descriptors() == n_before - 1


# Templates that are not available --------------------------------------------------------------


def test_the_template_is_given_up_after_three_deaths_in_a_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, interpreter = tmp_path / "tries", tmp_path / "python"
    serves = f'[ $(wc -l < {tries}) -eq 6 ] && exec {sys.executable} "$@"'
    interpreter.write_text(f"#!/bin/sh\necho >> {tries}\n{serves}\nkill -9 $$\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", str(interpreter))
    templates = Template()
    for _ in range(3):
        assert not templates.ready()
    assert len(tries.read_text()) == 3
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "(exit code -9)" in caplog.text
    templates.shutdown()  # which forgets why there was none
    assert templates.ready()
    assert len(tries.read_text()) == 6
    templates.shutdown()


@pytest.mark.parametrize(
    ("forks_fail", "why"),
    variants(
        [("os.register_at_fork(after_in_child=lambda: os._exit(3))", "exit code 3")],
        [("os.fork = lambda: os.kill(os.getpid(), 10**9)", "Invalid argument")],
    ),
)
def test_workers_are_spawned_where_a_template_cannot_fork(
    forks_fail: str, why: str, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import os\n{forks_fail}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with open_batcher(1) as batcher:
        collect(batcher)
    (message,) = caplog.messages
    assert "workers are spawned" in message
    assert why in message


def test_no_template_is_started_where_its_workers_could_not_be_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_start, "_template", Template())
    monkeypatch.setattr(template_handle, "_PR_SET_CHILD_SUBREAPER", 10**6)
    before = children()
    prepare("auto")
    assert "adopt" in process_start.why_spawned()
    assert children() == before


# Other activity in the caller ------------------------------------------------------------------


kept: list[EpisodeBatcher] = []


def collect_in_a_daemon() -> int:
    assert multiprocessing.current_process().daemon
    kept.append(open_batcher())  # it is not closed
    collect(kept[0])
    return template().pid


def test_a_fork_of_the_caller_has_its_own_template_and_does_not_affect_other_workers() -> None:
    with open_batcher() as batcher:
        theirs, others = template().pid, worker_pids()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(collect_in_a_daemon) != theirs
            pids = worker_pids() - others
            assert len(pids) >= 3
        wait_until(lambda: not any(map(is_running, pids)), GONE_S)
        collect(batcher)
        assert template().pid == theirs


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
    """Create an environment whose process leaves a file with its findings."""
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


def test_modules_are_imported_once_and_a_failing_one_is_skipped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = Template()  # without the modules of other tests
    monkeypatch.setattr(process_start, "_template", templates)
    log = tmp_path / "imports"
    sources = {
        "changes": CHANGES,
        "threads": "import threading; threading.Thread(target=threading.Event().wait).start()",
        "once": f"open({str(log)!r}, 'a').write('imported ')",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    rlpool.preload("changes", "threads", "once")
    for _ in range(2):
        paths = [tmp_path / f"worker-{worker}" for worker in range(2)]
        env_fns = [partial(create_reporting, path, tuple(sources)) for path in paths]
        ParallelEnvManager(env_fns, envs_per_worker=1, seed=1).close()
        first, second = (json.loads(path.read_text()) for path in paths)
        assert first["modules"] == second["modules"] == ["changes", "once"]
        assert log.read_text() == "imported "
        assert first["random"] != second["random"]
        assert first["as in any worker"] == [os.getcwd(), sys.argv, sys.argv]
        assert first["is set"] == "1"
        assert first["handles_sigterm"]
    templates.shutdown()
    (message,) = caplog.messages
    assert "threads is left out" in message
    assert "2 threads" in message


def ask_for_a_template(_: Any) -> None:
    rlpool.preload("waits")
    prepare("auto")


@pytest.mark.slow
def test_a_template_ends_if_its_caller_dies_during_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, go = tmp_path / "pid", tmp_path / "go"
    source = f"""
        import os, pathlib, time
        pathlib.Path({str(note)!r}).write_text(str(os.getpid()))
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)
    """
    (tmp_path / "waits.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = children()
    with in_new("fork", ask_for_a_template, exitcode=-signal.SIGKILL):
        wait_until(lambda: note.exists() and note.read_text())
        for caller in children() - before:
            os.kill(caller, signal.SIGKILL)
    go.touch()
    wait_until(lambda: not is_running(int(note.read_text())), GONE_S)


@pytest.mark.parametrize("name", ["", ".a", "a-b", 3])
def test_invalid_module_names_are_refused(name: Any) -> None:
    with pytest.raises(SpecError, match="name of a module"):
        rlpool.preload("nowhere", name)
    assert "nowhere" not in process_start._template._modules
