"""What holds for every test: the installed package, one torch thread, no process left behind.

And that SIGINT is not ignored, wherever the tests were started.
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

# Far more than it takes a worker on a busy machine to end.
GRACE_S = 5.0


prefer_the_installed_package(REPOSITORY)

# Workers are processes; threads of this one would only compete with them.
torch.set_num_threads(1)

# How long an example takes says more about the machine than about the code: no test may
# depend on it. A run repeats the examples of the one before, so that a failure is of a change;
# `--hypothesis-profile=random` looks for others.
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("rlpool", settings.get_profile("random"), derandomize=True)
settings.load_profile("rlpool")


def pytest_report_header() -> list[str]:
    """Say which package is tested: the likeliest surprise is a stale installed one."""
    spec = importlib.util.find_spec("rlpool")
    origin = spec.origin if spec is not None else "not found"
    return [f"rlpool: {origin}", f"torch: {torch.__version__}"]


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Take SIGINT as at a prompt, here and in what tests start, which inherits that it is ignored.

    A shell that starts commands in its background lets them ignore it.
    """
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_module_only() -> None:
    """Keep the garbage collector from looking at what is there before a module's tests.

    Many tests collect, which would look at every module and test of the run each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_was_said() -> None:
    """Let environments say in every test what they say once."""
    from rlpool.workers.logs import SAID, SAID_OF_MACHINE

    SAID.clear()
    SAID_OF_MACHINE.clear()


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process alive, and end that process so that the next can pass.

    Processes of fixtures that live longer than the test are there before it and do not count,
    nor do those that live as long as this one: the tracker and the fork server that
    ``multiprocessing`` keeps, and the template from which workers are forked.
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
    """An empty folder to run programs in, always the same one.

    Where the working directory is another one, workers need another template.
    """
    folder = tmp_path_factory.getbasetemp() / "programs"
    folder.mkdir(exist_ok=True)
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return folder
