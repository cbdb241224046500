"""Fixtures for tests with processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from process.watching import Script, Struck

from rlpool import preload
from rlpool.workers import crew, process_end

from support import named_memory


@pytest.fixture(scope="session", autouse=True)
def imported_once() -> None:
    """Preload the modules that tests import, which halves the start-up time of workers.

    Scripts have their own templates, without these modules.
    """
    support = ("agents", "faults", "fragile", "meta", "parallel", "vector_envs")
    preload("pytest", "process.watching", *(f"support.{name}" for name in support))


@pytest.fixture
def struck(tmp_path: Path) -> Struck:
    return Struck(str(tmp_path / "struck"))


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a fraction of a second instead of several for workers that hang while ending.

    That is still far longer than other workers take.
    """
    monkeypatch.setattr(crew, "LEAVE_S", 0.5)
    monkeypatch.setattr(process_end, "CLOSE_S", 0.5)
    monkeypatch.setattr(process_end, "TERMINATE_S", 0.2)


@pytest.fixture
def no_shared_memory_left() -> Iterator[None]:
    """Fail a test that leaves a file in /dev/shm, or shared memory mapped by name."""
    before = named_memory.names()
    yield
    left = named_memory.names() - before
    assert not left, f"left in /dev/shm: {left}"


@pytest.fixture
def as_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that runs a script in this process as the ``__main__`` of its workers."""

    def replace(source: str) -> None:
        script = ModuleType("__main__")
        script.__file__ = str(tmp_path / "main.py")
        Path(script.__file__).write_text(source)
        monkeypatch.setitem(sys.modules, "__main__", script)
        exec(compile(source, script.__file__, "exec"), vars(script))

    return replace


@pytest.fixture
def run_script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Return a function that starts a script, given its source and arguments."""
    scripts: list[Script] = []

    def run(source: str, *arguments: str) -> Script:
        path = tmp_path / f"script_{len(scripts)}.py"
        path.write_text(source)
        scripts.append(Script(tmp_path / f"output_{len(scripts)}", [str(path), *arguments]))
        return scripts[-1]

    yield run
    for script in scripts:
        script.kill()
