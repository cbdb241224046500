"""Limits that would bite are told before they do, and nothing is left behind."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable, Iterator
from multiprocessing.context import SpawnProcess
from typing import Any

import psutil
import pytest
from process.watching import Script, n_descriptors, worker_pids

from rlpool import (
    Batcher,
    EpisodeBatcher,
    ParallelEnvManager,
    Pool,
    SpecError,
    UsageError,
    WorkerStartupError,
    doctor,
)
from rlpool.workers.failure_policy import START_METHODS

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


LimitTo = Callable[[int, int], None]


@pytest.fixture
def limit_to() -> Iterator[LimitTo]:
    """A function that sets a soft limit of this process, until the test is over."""
    before = {}

    def limit(which: int, number: int) -> None:
        before.setdefault(which, resource.getrlimit(which))
        resource.setrlimit(which, (number, before[which][1]))

    yield limit
    for which, limits in before.items():
        resource.setrlimit(which, limits)


def made(kind: str, n_workers: int) -> Any:
    return eval(KINDS[kind], {**globals(), "N": n_workers})


def refused(make: Callable[[], Any]) -> list[str]:
    """What is said, line by line, about something of which nothing is left."""
    before = n_descriptors(), worker_pids()
    with pytest.raises(SpecError) as caught:
        make()
    assert (n_descriptors(), worker_pids()) == before
    return str(caught.value).splitlines()


def test_descriptors_are_counted_before_any_worker_starts(limit_to: LimitTo) -> None:
    limit = n_descriptors() + 50
    limit_to(resource.RLIMIT_NOFILE, limit)
    advices = ("lower n_threads (", "lower n_threads (", "use fewer workers", "put fewer")
    for kind, advice in zip(KINDS, advices, strict=True):
        what, fix = refused(lambda kind=kind: made(kind, 30))
        wanted = 30 * (4 if kind == "ParallelEnvManager" else 3) + 32
        assert what.startswith(f"30 workers need {wanted} file descriptors, but of the {limit} ")
        assert "RLIMIT_NOFILE" in what
        assert fix.startswith(f"  fix:   {advice}")
        assert "would fit), or raise the limit before starting Python: ulimit -n " in fix


def test_as_many_workers_as_would_fit_do(limit_to: LimitTo) -> None:
    made("EpisodeBatcher", 1).close()  # whatever is opened once on first use
    limit_to(resource.RLIMIT_NOFILE, n_descriptors() + 32 + 2 * 3 + 1)
    _, fix = refused(lambda: made("EpisodeBatcher", 3))
    assert "(2 would fit)" in fix
    with made("EpisodeBatcher", 2) as batcher:
        batcher.execute(8)
        assert batcher.get().lengths.tolist() == [3] * 8


def test_processes_are_counted_before_any_worker_starts(run_script: RunScript) -> None:
    """Of a user who has limits: root becomes nobody."""
    lines = (
        "from rlpool.machine.cgroups import ROOT",
        "from rlpool.machine.worker_limits import _n_tasks",
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


def test_address_space_is_counted_before_a_block_is_allocated(limit_to: LimitTo) -> None:
    made("EpisodeBatcher", 1).close()
    limit = psutil.Process().memory_info().vms // 2**30 + 4
    limit_to(resource.RLIMIT_AS, limit * 2**30)

    def batcher(n_slots: int, n_workers: int) -> EpisodeBatcher:
        return EpisodeBatcher(10**4, n_slots, StepCounter, {}, create_counting, {}, n_workers)

    for n_workers in (1, 0):
        what, fix = refused(lambda n=n_workers: batcher(10**5, n))
        assert "a block of 100000 slots of 10000 steps would need " in what
        assert "(frame 7.45 GiB, " in what
        assert f"of the {limit} GiB that RLIMIT_AS allows (ulimit -v) " in what
        assert "lower n_slots or n_timesteps (n_slots=" in fix
    batcher(10, 1).close()


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
def main(make):
    with attempt.lock:
        make()

attempt.lock = multiprocessing.Lock()
for make in MAKES:
    try:
        main(make)
    except UsageError as error:
        print(str(error).splitlines()[1].rpartition(",")[2])
main(make)
"""


def test_a_missing_guard_is_told_before_any_process_starts(run_script: RunScript) -> None:
    definitions, _, _ = script_of("pass").partition("if __name__")
    makes = f"[{', '.join(f'lambda: {make}' for make in KINDS.values())}]"
    script = run_script(definitions + MAIN.replace("MAKES", makes.replace("N", "2")))
    script.finish()
    assert script.returncode == 1
    n_lines = definitions.count("\n") + MAIN.count("\n")
    told = [f" line {n_lines - 3}"] * len(KINDS)
    assert script.stdout.splitlines() == ["imported", *told]  # by no worker
    assert script.stderr.count("Traceback") == 1
    assert "UsageError" in script.stderr
    assert 'if __name__ == "__main__"' in script.stderr
    assert f", line {n_lines}\n  fix:" in script.stderr


AsMain = Callable[[str], None]


def test_where_a_guard_may_be_another_one_the_workers_tell(
    as_main: AsMain, capfd: pytest.CaptureFixture[str]
) -> None:
    definitions, _, _ = script_of("pass").partition("if __name__")
    make = EPISODE_BATCHER.replace("N", "1")
    with pytest.raises(UsageError, match='if __name__ == "__main__"'):
        as_main(f"{definitions}print('imported', flush=True)\nif sys.argv:\n    {make}\n")
    assert capfd.readouterr() == ("imported\n" * 2, "")


GUARDS = {
    "the other way round": 'if __name__ != "__main__":\n    pass\nelse:\n    main()\n',
    "noted": 'is_main = __name__ == "__main__"\nis_main and main()\n',
    "in a function": "main()\n",
    "of somebody else": "run(main)\n",
}


@pytest.mark.parametrize("start_method", START_METHODS)
def test_other_guards_do(
    as_main: AsMain, capfd: pytest.CaptureFixture[str], start_method: str
) -> None:
    for guard, start in GUARDS.items():
        batcher = EPISODE_BATCHER.replace("N", f"1, start_method={start_method!r}")
        make = f"print({batcher}.closed)"
        if guard == "in a function":
            make = f"if multiprocessing.current_process().name == 'MainProcess': {make}"
        source, _, _ = script_of(make).partition("if __name__")
        as_main("from support.guards import run\n" + source + start)
        assert capfd.readouterr() == ("False\n", ""), guard


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


def test_the_doctor_finds_few_descriptors(
    limit_to: LimitTo, capsys: pytest.CaptureFixture[str]
) -> None:
    for limit in (n_descriptors() + 4, n_descriptors() + 34):
        limit_to(resource.RLIMIT_NOFILE, limit)
        assert doctor.main(["doctor"]) == 1
        text, errors = capsys.readouterr()
        assert "FAIL  file descriptors" in text
        assert f"are in use of the {limit} that this process may open" in text
        assert errors == ""


def test_the_doctor_can_be_asked_by_a_script(
    as_main: AsMain, capfd: pytest.CaptureFixture[str]
) -> None:
    source = """
from rlpool.doctor import examine, would_bite
if __name__ == "__main__":
    checks = examine(1)
    print(would_bite(checks), [check.status for check in checks if check.name == "worker process"])
"""
    as_main(source)
    assert capfd.readouterr() == ("False ['ok']\n", "")
