"""A worker forked from the template has the same state and results as a spawned one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from process.watching import Script

from rlpool.workers.template_handle import identity

pytestmark = [pytest.mark.promise("I10"), pytest.mark.timeout(120)]

MOMENTS = "while its main module is imported", "while its environment is made"

# A separate process starts a template, changes its own state, and then starts workers.
SCRIPT = """
import atexit, ctypes, json, os, resource, signal, sys
from pathlib import Path
from support.agents import ConstantAgent
from rlpool import GymEnv
from support.envs import CountingEnv
from support.self_report import drawn, report, report_late, started

IN_MAIN = [report(), drawn()]
if __name__ != "__main__":
    atexit.register(print, "said at exit")

def create_env(path, seed=None):
    late = report_late()
    print("printed")
    ctypes.CDLL(None).puts(b"printed by C")
    late |= {"starts processes": started(), "draws when seeded": drawn()}
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
    from rlpool.workers.process_start import prepare, why_spawned
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
    assert (identity(), why_spawned()) == (template, "")
    run_worker("spawned", "spawn")
"""


def test_a_forked_worker_has_the_same_state_as_a_spawned_one(
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
    assert forked[1]["starts processes"] == [0, [2, 2, 2], 7]
    (*_, first), (*_, second) = reports("two")
    assert [name for name in first if first[name] == second[name]] == []
    # Output appears where the caller prints now.
    lines = (tmp_path / "stdout").read_text().splitlines()
    assert sorted(lines) == sorted(4 * ["printed", "printed by C", "said at exit"])


CHANGES: dict[str, Callable[[], Any]] = {
    "variable": lambda: os.environ.update(ANY="other"),
    "directory": lambda: os.chdir("/"),
    "umask": lambda: os.umask(0o111),
    "ignored signal": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "nothing": lambda: os.environ.update(PYTEST_CURRENT_TEST="other"),
}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # for its os.fork()
def test_settings_that_a_running_process_cannot_adopt_need_another_template() -> None:
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
