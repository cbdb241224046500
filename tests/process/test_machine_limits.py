"""Limits that would bite are told before they do, and nothing is left behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil
import pytest
from process.watching import Script

from rlpool import (
    Batcher,
    EpisodeBatcher,
    ParallelEnvManager,
    Pool,
    SpecError,
    WorkerStartupError,
)
from rlpool.workers.warm_start import START_METHODS

from support.acting_envs import ActingEnv
from support.agents import StepCounter
from support.envs import CountingEnv, create_counting
from support.staying import stays

RunScript = Callable[..., Script]

pytestmark = pytest.mark.timeout(240)


def lines_of(script: Script) -> list[str]:
    script.finish()
    assert (script.returncode, script.stderr) == (0, "")
    return script.stdout.splitlines()


# Limits ---------------------------------------------------------------------------------------

EPISODE_BATCHER = "EpisodeBatcher(4, 8, StepCounter, {}, create_counting, {}, n_threads=N)"

KINDS = {
    "EpisodeBatcher": EPISODE_BATCHER,
    "Batcher": "Batcher(4, 8, StepCounter, {}, create_counting, {}, n_threads=N)",
    "ParallelEnvManager": "ParallelEnvManager([CountingEnv] * N)",
    "Pool": "Pool([ActingEnv() for _ in range(N)], N, 1000).store()",
}
"""How each kind of owner of N workers is made."""

SCRIPT = """
import multiprocessing, os, resource, sys
from rlpool import *
from support.acting_envs import ActingEnv
from support.agents import StepCounter
from support.envs import CountingEnv, create_counting

def attempt(make):
    before = len(os.listdir("/proc/self/fd"))
    try:
        made = make()
    except SpecError as error:
        print(error)
        print(len(multiprocessing.active_children()), len(os.listdir("/proc/self/fd")) - before)
    else:
        print("made")
        getattr(made, "close", print)()

def main():
{main}

if __name__ == "__main__":
    main()
"""


def script_of(*lines: str) -> str:
    return SCRIPT.replace("{main}", "\n".join(f"    {line}" for line in lines))


def attempt(kind: str, n_workers: int | str) -> str:
    return f"attempt(lambda: {KINDS[kind].replace('N', str(n_workers))})"


def test_descriptors_are_counted_before_any_worker_starts(run_script: RunScript) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))"
    lines = lines_of(run_script(script_of(limit, *(attempt(kind, 30) for kind in KINDS))))
    assert len(lines) == 3 * len(KINDS)
    for number, kind in enumerate(KINDS):
        what, fix, left = lines[3 * number : 3 * number + 3]
        wanted = 30 * (4 if kind == "ParallelEnvManager" else 3) + 32
        assert what.startswith(f"30 workers need {wanted} file descriptors, but of the 64 that ")
        assert "RLIMIT_NOFILE" in what
        assert "would fit), or raise the limit before starting Python: ulimit -n " in fix
        assert left == "0 0"
    advices = ("lower n_threads (", "lower n_threads (", "use fewer workers", "put fewer")
    for fix, advice in zip(lines[1::3], advices, strict=True):
        assert fix.startswith(f"  fix:   {advice}")


def test_as_many_workers_as_would_fit_do(run_script: RunScript) -> None:
    lines = (
        "resource.setrlimit(resource.RLIMIT_NOFILE, (44, 44))",
        "fits = (44 - (len(os.listdir('/proc/self/fd')) - 1) - 32) // 3",
        attempt("EpisodeBatcher", "fits + 1"),
        f"batcher = {EPISODE_BATCHER.replace('N', 'fits')}",
        "batcher.execute(8)",
        "print(fits, batcher.get().lengths.tolist())",
        "batcher.close()",
    )
    _, fix, _, collected = lines_of(run_script(script_of(*lines)))
    fits = int(collected.split()[0])
    assert fits >= 1
    assert f"({fits} would fit)" in fix
    assert collected == f"{fits} [3, 3, 3, 3, 3, 3, 3, 3]"


def test_processes_are_counted_before_any_worker_starts(run_script: RunScript) -> None:
    """Of a user who has limits: root becomes nobody."""
    lines = (
        "from rlpool.cgroups import ROOT",
        "from rlpool.worker_limits import _n_tasks",
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)",
        "limit = _n_tasks(ROOT) + 8",
        "resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))",
        attempt("EpisodeBatcher", 20),
        # Root's own Python may be one that nobody else can start.
        f"{attempt('EpisodeBatcher', 1)} if os.access(sys.executable, os.X_OK) else print('made')",
    )
    what, fix, left, made = lines_of(run_script(script_of(*lines)))
    assert what.startswith("20 workers need 42 processes and threads, but of the ")
    assert "RLIMIT_NPROC" in what
    assert "lower n_threads (3 would fit), or let the administrator" in fix
    assert (left, made) == ("0 0", "made")


def test_address_space_is_counted_before_a_block_is_allocated(run_script: RunScript) -> None:
    lines = (
        "resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))",
        "make = lambda n, w: EpisodeBatcher(10**4, n, StepCounter, {}, create_counting, {}, w)",
        "attempt(lambda: make(10**5, 1))",
        "attempt(lambda: make(10**5, 0))",
        "attempt(lambda: make(10, 1))",
    )
    found = lines_of(run_script(script_of(*lines)))
    for what, fix, left in (found[:3], found[3:6]):
        assert "a block of 100000 slots of 10000 steps would need " in what
        assert "(frame 7.45 GiB, " in what
        assert "of the 4 GiB that RLIMIT_AS allows (ulimit -v) " in what
        assert "lower n_slots or n_timesteps (n_slots=" in fix
        assert left in ("0 0", "0 4")  # the tracker and the template's three
    assert found[6:] == ["made"]


def test_a_process_that_the_system_refuses_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that cannot be known beforehand, such as those of other processes of the user."""
    before, start = set(psutil.Process().children()), SpawnProcess.start
    numbers = iter([True, False])

    def start_one(process: SpawnProcess) -> None:
        if not next(numbers):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", start_one)
    with pytest.raises(WorkerStartupError) as caught:
        EpisodeBatcher(4, 8, StepCounter, {}, create_counting, {}, n_threads=2)
    assert caught.value.what == (
        "1 of 2 workers could be started: [Errno 11] Resource temporarily unavailable"
    )
    assert "python -m rlpool doctor" in caught.value.fix
    left = set(psutil.Process().children()) - before
    assert all(stays(process) for process in left)


# The guard ------------------------------------------------------------------------------------


MAIN = """
print("imported")
def main():
    with attempt.lock:
        MAKE

attempt.lock = multiprocessing.Lock()
main()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_guard_is_told_before_any_process_starts(
    run_script: RunScript, kind: str
) -> None:
    definitions, _, _ = script_of("pass").partition("if __name__")
    script = run_script(definitions + MAIN.replace("MAKE", KINDS[kind].replace("N", "2")))
    script.finish()
    assert script.returncode == 1
    assert script.stdout == "imported\n"  # by no worker
    assert script.stderr.count("Traceback") == 1
    assert "UsageError" in script.stderr
    assert 'if __name__ == "__main__"' in script.stderr
    n_lines = definitions.count("\n") + MAIN.count("\n")
    assert f", line {n_lines}\n  fix:" in script.stderr


@pytest.mark.parametrize("condition", ["if sys.argv", "while sys.argv"])
def test_where_a_guard_may_be_another_one_the_workers_tell(
    run_script: RunScript, condition: str
) -> None:
    definitions, _, _ = script_of("pass").partition("if __name__")
    make = EPISODE_BATCHER.replace("N", "1")
    script = run_script(f"{definitions}print('imported')\n{condition}:\n    {make}\n")
    script.finish()
    assert script.returncode == 1
    assert script.stdout == "imported\n" * 2
    assert script.stderr.count("Traceback") == 1
    assert "UsageError" in script.stderr
    assert 'if __name__ == "__main__"' in script.stderr


GUARDS = {
    "the other way round": 'if __name__ != "__main__":\n    pass\nelse:\n    main()\n',
    "noted": 'is_main = __name__ == "__main__"\nis_main and main()\n',
    "in a function": "main()\n",
    "of somebody else": "run(main)\n",
}


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("guard", GUARDS)
def test_other_guards_do(run_script: RunScript, guard: str, start_method: str) -> None:
    batcher = EPISODE_BATCHER.replace("N", f"1, start_method={start_method!r}")
    make = f"print({batcher}.closed)"
    if guard == "in a function":
        make = f"if multiprocessing.current_process().name == 'MainProcess': {make}"
    source, _, _ = script_of(make).partition("if __name__")
    importing = "from support.guards import run\n"
    assert lines_of(run_script(importing + source + GUARDS[guard])) == ["False"]


# Pickling -------------------------------------------------------------------------------------


class Logger:
    def __init__(self) -> None:
        self.stream = threading.Lock()


def create_agent_with(model: Any) -> Callable[[], Any]:
    return lambda: StepCounter() if model else None


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "create_agent": (
        {"create_agent": create_agent_with(Logger())},
        "create_agent cannot be pickled: create_agent.<closure 'model'>.stream is a _thread.lock",
    ),
    "env_args": (
        {"env_args": {"logger": Logger()}},
        "env_args cannot be pickled: env_args['logger'].stream is a _thread.lock",
    ),
    "agent_args": (
        {"agent_args": {"logger": [Logger()]}},
        "agent_args cannot be pickled: agent_args['logger'][0].stream is a _thread.lock",
    ),
}


@pytest.mark.parametrize("kind", [EpisodeBatcher, Batcher])
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_what_cannot_be_pickled_is_named(kind: Any, argument: str) -> None:
    before = psutil.Process().children()
    arguments, words = ARGUMENTS[argument]
    defaults = {"create_agent": StepCounter, "create_env": create_counting}
    with pytest.raises(WorkerStartupError) as caught:
        kind(4, 8, **{**defaults, **arguments}, n_threads=2)
    assert caught.value.what.startswith(words)
    assert "__getstate__" in caught.value.fix
    assert psutil.Process().children() == before


def test_environments_that_cannot_be_pickled_are_named() -> None:
    logger = Logger()
    with pytest.raises(WorkerStartupError) as caught:
        ParallelEnvManager([CountingEnv, CountingEnv, lambda: (logger, CountingEnv())[1]])
    assert caught.value.what.startswith(
        "env_fns[2] cannot be pickled: env_fns[2].<closure 'logger'>.stream is a _thread.lock"
    )
    env = ActingEnv()
    env.logger = logger  # type: ignore[attr-defined]
    with pytest.raises(WorkerStartupError) as caught:
        Pool([ActingEnv(), env], 2, 100).store()
    assert caught.value.what.startswith(
        "environment 1 cannot be pickled: env[1].logger.stream is a _thread.lock"
    )


def test_an_update_that_cannot_be_pickled_is_refused_and_the_batcher_goes_on() -> None:
    with EpisodeBatcher(4, 8, StepCounter, {}, create_counting, {}, n_threads=1) as batcher:
        with pytest.raises(SpecError, match=r"info\['logger'\].stream is a _thread.lock"):
            batcher.update({"logger": Logger()})
        batcher.execute(2)
        assert batcher.get().lengths.tolist() == [3, 3]


# The doctor -----------------------------------------------------------------------------------


def test_the_doctor_starts_a_worker_and_finds_nothing(run_script: RunScript) -> None:
    script = run_script("rlpool", "doctor", "--json", "--workers", "1", mode="module")
    script.finish()
    assert (script.returncode, script.stderr) == (0, "")
    report = json.loads(script.stdout)
    assert report["ok"] is True
    worker = report["checks"][-1]
    assert (worker["name"], worker["status"]) == ("worker process", "ok")
    assert worker["what"].startswith("started, ran an episode and answered after ")


@pytest.mark.parametrize("limit", [32, 64])
def test_the_doctor_finds_few_descriptors(run_script: RunScript, limit: int) -> None:
    limited = ("sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh")
    script = run_script("rlpool", "doctor", mode="module", prefix=limited)
    script.finish()
    assert (script.returncode, script.stderr) == (1, "")
    assert "FAIL  file descriptors" in script.stdout
    assert f"are in use of the {limit} that this process may open" in script.stdout


def test_the_doctor_can_be_asked_by_a_script(run_script: RunScript) -> None:
    source = """
from rlpool.doctor import examine, would_bite
if __name__ == "__main__":
    checks = examine(1)
    print(would_bite(checks), [check.status for check in checks if check.name == "worker process"])
"""
    assert lines_of(run_script(source)) == ["False ['ok']"]
