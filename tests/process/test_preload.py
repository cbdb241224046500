"""Modules that the template imports for its workers, and what becomes of those it cannot have."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import rlpool
from rlpool import ParallelEnvManager, SpecError
from rlpool.workers import process_start, template_handle
from rlpool.workers.template_handle import Template

from support.envs import CountingEnv

WriteModule = Callable[[str, str], str]

CHANGES = """
import gc, os, random, signal, sys

arguments = list(sys.argv)
os.chdir("/")
os.environ["SET_BY_AN_IMPORT"] = "1"
del os.environ["REMOVED_BY_AN_IMPORT"]
sys.path.append("/added/by/an/import")
sys.argv = ["changed"]
os.umask(0o777)
gc.enable()
random.seed(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
"""


def create_reporting(path: Path, names: tuple[str, ...]) -> gymnasium.Env[Any, Any]:
    """An environment whose process leaves a file that says what it found."""
    import gc
    import random

    umask = os.umask(0)
    os.umask(umask)
    report = {
        "modules": [name for name in names if name in sys.modules],
        "variables": {name: os.environ.get(name) for name in os.environ if "_BY_AN_" in name},
        "as in any worker": [os.getcwd(), sys.argv, umask != 0o777, gc.isenabled()],
        "last_in_path": sys.path[-1],
        "seen_arguments": getattr(sys.modules.get("changes"), "arguments", None),
        "handles_sigterm": signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL,
        "random": random.random(),
    }
    path.write_text(json.dumps(report))
    return CountingEnv()


def started(n_workers: int, directory: Path, *names: str) -> ParallelEnvManager:
    paths = [directory / f"worker-{worker}" for worker in range(n_workers)]
    return ParallelEnvManager(
        [partial(create_reporting, path, names) for path in paths], envs_per_worker=1, seed=1
    )


def reports(n_workers: int, directory: Path, *names: str) -> list[dict[str, Any]]:
    """What workers found that were started now."""
    started(n_workers, directory, *names).close()
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


@pytest.fixture(autouse=True)
def own_templates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No modules of other tests, and none for them."""
    templates = process_start._Templates()
    monkeypatch.setattr(process_start, "_templates", templates)
    yield
    templates.shutdown()


def test_modules_that_fail_or_make_forking_unsafe_are_named_once_and_left_out(
    write_module: WriteModule,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Template.told

    def told_soon(self: Template) -> tuple[str, str]:
        try:
            words = told(self)
        finally:
            monkeypatch.setattr(template_handle, "IMPORT_S", 120.0)
        if words == ("importing", "hangs"):
            monkeypatch.setattr(template_handle, "IMPORT_S", 0.2)
        return words

    monkeypatch.setattr(Template, "told", told_soon)
    starts_thread = "import threading; threading.Thread(target=threading.Event().wait).start()"
    cuda = "import torch; torch.cuda.is_initialized = lambda: True"
    starts_workers = "import rlpool; rlpool.ParallelEnvManager([object])"
    bad = {
        write_module("package.threads", starts_thread): "it has 2 threads",
        write_module("with_cuda", cuda): "it has a CUDA context",
        write_module("killed", "import os; os.kill(os.getpid(), 9)"): "ended the process (exit",
        write_module("hangs", "import time; time.sleep(3600)"): "longer than",
        write_module("starts_workers", starts_workers): "SystemExit",
        "missing": "No module named 'missing'",
    }
    short_thread = "import threading; t = threading.Thread(target=str); t.start(); t.join()"
    good = [write_module("first", short_thread), write_module("prints", "print('in a worker')")]
    rlpool.preload(good[0], *bad, *good[1:])
    with caplog.at_level(logging.WARNING, "rlpool"):
        for _ in range(2):
            (report,) = reports(1, tmp_path, *good, *bad)
            assert report["modules"] == good
    assert len(caplog.messages) == len(bad)
    for name, why in bad.items():
        (message,) = (text for text in caplog.messages if f" {name} is left out" in text)
        assert why in message


def test_modules_are_imported_once_and_leave_what_a_worker_would_have(
    write_module: WriteModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMOVED_BY_AN_IMPORT", "1")
    log, before = tmp_path / "imports", tmp_path / "before"
    before.mkdir()
    names = [
        write_module(name, f"open({str(log)!r}, 'a').write({name!r} + ' ')")
        for name in ("early", "late_1", "late_2")
    ]
    write_module("changes", CHANGES)
    rlpool.preload("early")
    with started(1, before, *names) as manager:
        pids = [worker.pid for worker in manager.workers]
        threads = [
            threading.Thread(target=rlpool.preload, args=[name])
            for name in ("early", "late_1", "changes", "late_2")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first, second = reports(2, tmp_path, *names, "changes")
        manager.reset()
        assert [worker.pid for worker in manager.workers] == pids
    # By two templates: a module that is named later is for workers that start later.
    assert sorted(log.read_text().split()) == sorted(["early", *names])
    assert first["modules"] == second["modules"] == [*names, "changes"]
    assert first["variables"] == {"SET_BY_AN_IMPORT": "1"}
    assert first["last_in_path"] == "/added/by/an/import"
    assert first["seen_arguments"] == sys.argv
    assert first["as in any worker"] == [os.getcwd(), sys.argv, True, True]
    assert first["handles_sigterm"]
    assert first["random"] != second["random"]


def test_what_is_not_the_name_of_a_module_is_refused() -> None:
    bad: list[Any] = ["", ".a", "a..b", "a-b", "__main__", "__main__.a", 3, None, ["a"]]
    for name in bad:
        with pytest.raises(SpecError, match=r"not the name of a module[^\0]*fix:"):
            rlpool.preload("first", name)
    assert process_start._templates._modules == ()
