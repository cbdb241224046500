"""Set-up of every test: the installed package, one torch thread, no process left behind.

SIGINT is not ignored either, however pytest was started.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings

from support.staying import started, stays
from support.tested import prefer_the_installed_package

REPOSITORY = Path(__file__).resolve().parents[1]

# Far longer than a worker takes to end on a busy machine.
GRACE_S = 5.0


prefer_the_installed_package(REPOSITORY)

# Workers are processes; threads in this process would only compete with them.
torch.set_num_threads(1)

# The duration of an example depends on the machine more than on the code, so no test depends on
# it. Every run uses the same examples, so a new failure is due to a change;
# `--hypothesis-profile=random` draws others.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("rlpool", settings.get_profile("random"), derandomize=True)
settings.load_profile("rlpool")


def pytest_report_header() -> list[str]:
    """Report which package is tested, in case a stale installed one is picked up."""
    spec = importlib.util.find_spec("rlpool")
    origin = spec.origin if spec is not None else "not found"
    return [f"rlpool: {origin}", f"torch: {torch.__version__}"]


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Handle SIGINT as at a prompt, here and in child processes, which inherit the disposition.

    A shell makes background commands ignore SIGINT.
    """
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_module_only() -> None:
    """Exclude objects that exist before a module's tests from garbage collection.

    Many tests collect garbage, which would otherwise scan every module and test of the run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def once_only_messages_are_repeated() -> None:
    """Let messages that are issued only once appear again in every test."""
    from rlpool.workers.logs import SAID, SAID_OF_MACHINE

    SAID.clear()
    SAID_OF_MACHINE.clear()


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process running, and kill that process so that the next can pass.

    Processes of longer-lived fixtures exist before the test and do not count, nor do those that
    live as long as this one: the resource tracker and fork server of ``multiprocessing``, and the
    template from which workers are forked.
    """
    before = started()
    yield
    left = [process for process in started() - before if not stays(process)]
    if not left:
        return
    gc.collect()
    _, alive = psutil.wait_procs(left, timeout=GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    if alive:
        pytest.fail(f"the test left processes behind: {alive}", pytrace=False)


@pytest.fixture
def program_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty folder to run programs in, the same one for all tests.

    A different working directory would need a different template for workers.
    """
    folder = tmp_path_factory.getbasetemp() / "programs"
    folder.mkdir(exist_ok=True)
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return folder
