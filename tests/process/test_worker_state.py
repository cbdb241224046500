"""A worker that was forked from the template is like a spawned one, with the same results."""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from gymnasium import spaces
from process.watching import Script

from rlpool import EpisodeBatcher, GymEnv, WorkerDiedError
from rlpool.workers.process_start import why_spawned
from rlpool.workers.template_handle import identity

from support.agents import ConstantAgent
from support.envs import CountingEnv

pytestmark = [pytest.mark.promise("I10"), pytest.mark.timeout(120)]

PR_SET_NO_NEW_PRIVS = 38

MOMENTS = "while its main module is imported", "while its environment is made"

# A process of its own that has started a template changes itself, and then starts workers.
SCRIPT = """
import atexit, ctypes, json, os, resource, signal, sys
from pathlib import Path
from support.agents import ConstantAgent
from rlpool import GymEnv
from support.envs import CountingEnv
from support.self_report import drawn, report, report_late

IN_MAIN = [report(), drawn()]
if __name__ != "__main__":
    atexit.register(print, "said at exit")

def create_env(path, seed=None):
    late = report_late()
    print("printed")
    ctypes.CDLL(None).puts(b"printed by C")
    early, numbers = sys.modules["__main__"].IN_MAIN
    Path(path, str(os.getpid())).write_text(json.dumps([early, late, numbers]))
    return GymEnv([CountingEnv()], seed=seed)

def run_worker(name, start_method="auto", n_threads=1):
    path = Path(sys.argv[1], name)
    path.mkdir()
    with EpisodeBatcher(
        n_timesteps=5, n_slots=n_threads, n_threads=n_threads, seeds=1, create_agent=ConstantAgent,
        create_env=create_env, env_args={"path": str(path)}, start_method=start_method,
    ) as batcher:
        batcher.execute(n_episodes=n_threads)
        batcher.get()

if __name__ == "__main__":
    from rlpool import EpisodeBatcher
    from rlpool.workers.process_start import prepare
    from rlpool.workers.template_handle import identity

    # What a running process cannot take over: the template has it from its start.
    os.environb[b"REPORTED"] = bytes(range(1, 256))
    os.environ.pop("HOME", None)
    os.chdir("/")
    sys.path.append("/nowhere")
    sys.warnoptions.append("ignore::UserWarning")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.umask(0o027)
    os.nice(1)
    for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGRTMIN + 1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    limits = {resource.RLIMIT_NOFILE: 300, resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: 2**37}
    for limit, soft in limits.items():
        resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))
    prepare("auto")

    os.dup2(os.open(Path(sys.argv[1], "stdout"), os.O_CREAT | os.O_WRONLY), 1)
    sys.argv.append("argument")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGRTMIN + 2})
    template = identity()
    run_worker("forked")
    run_worker("two", n_threads=2)
    assert identity() == template
    run_worker("spawned", "spawn")
"""


def test_forked_worker_is_in_the_state_of_a_spawned_one(
    tmp_path: Path, run_script: Callable[..., Script]
) -> None:
    script = run_script(SCRIPT, str(tmp_path))
    script.finish()
    assert script.returncode == 0, script.stderr

    def reports(name: str) -> list[list[dict[str, Any]]]:
        return [json.loads(path.read_text()) for path in (tmp_path / name).iterdir()]

    (spawned,), (forked,) = reports("spawned"), reports("forked")
    for moment, expected, found in zip(MOMENTS, spawned, forked, strict=False):
        differ = {name for name in expected if found[name] != expected[name]}
        assert {name: (found[name], expected[name]) for name in differ} == {}, moment
    (*_, first), (*_, second) = reports("two")
    assert [name for name in first if first[name] == second[name]] == []
    # All that is printed arrives where the caller prints now.
    lines = (tmp_path / "stdout").read_text().splitlines()
    assert sorted(lines) == sorted(4 * ["printed", "printed by C", "said at exit"])


class StartingEnv(CountingEnv):
    """Draws, starts processes in its first step, and shows what came of it."""

    observation_space = spaces.Box(-1e9, 1e9, (8,), np.float64)

    def observation(self) -> Any:
        if not self.t:
            return np.zeros(8)
        shared = torch.zeros(3).share_memory_()
        process = torch.multiprocessing.get_context("fork").Process(target=shared.add_, args=(2,))
        process.start()
        process.join()
        if not (pid := os.fork()):
            os._exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        drawn = [random.random(), np.random.random(), torch.rand(()).item()]  # noqa: NPY002
        return np.array([*drawn, process.exitcode, *shared.tolist(), code])


def test_an_environment_draws_and_starts_processes_the_same_however_its_worker_started() -> None:
    found = []
    for start_method in ("auto", "spawn"):
        with EpisodeBatcher(
            n_timesteps=2,
            n_slots=1,
            n_threads=1,
            seeds=1,
            create_agent=ConstantAgent,
            create_env=lambda seed: GymEnv([StartingEnv(length=1)], seed),
            start_method=start_method,
        ) as batcher:
            batcher.execute(n_episodes=1)
            found.append(batcher.get()["_frame"].flatten().tolist())
    assert found[0] == found[1]
    assert why_spawned() == ""  # so that "auto" was forked
    assert found[0][3:] == [0, 2, 2, 2, 7]


BROKEN_MAIN = """
from rlpool import EpisodeBatcher
from support.agents import ConstantAgent

if __name__ != "__main__":
    raise RuntimeError("this main module is for nobody else")

if __name__ == "__main__":
    EpisodeBatcher(
        n_timesteps=5, n_slots=1, n_threads=1, seeds=1, max_restarts=0,
        create_agent=ConstantAgent, create_env=ConstantAgent,
    )
"""


def test_error_in_the_main_module_of_a_worker_is_printed(
    as_main: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WorkerDiedError, match="exit code 1"):
        as_main(BROKEN_MAIN)
    assert "this main module is for nobody else" in capfd.readouterr().err


CHANGES: dict[str, Callable[[], Any]] = {
    "flags": lambda: sys.warnoptions.append("ignore::UserWarning"),
    "variable": lambda: os.environ.update(ANY="other"),
    "search path": lambda: sys.path.append("/nowhere"),
    "directory": lambda: os.chdir("/"),
    "hard limit": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    "privileges": lambda: ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
    "umask": lambda: os.umask(0o111),
    "ignored signal": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "nice value": lambda: os.nice(1),
    "nothing": lambda: os.environ.update(PYTEST_CURRENT_TEST="other"),
}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # for its os.fork()
def test_what_a_running_process_cannot_take_over_asks_for_another_template() -> None:
    kept = []
    for name, change in CHANGES.items():
        pid = os.fork()
        if not pid:
            code = 2
            with suppress(BaseException):
                before = identity()
                change()
                code = int(identity() == before)
            os._exit(code)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            kept.append(name)
    assert kept == ["nothing"]
