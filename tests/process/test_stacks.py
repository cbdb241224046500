"""What workers are doing can be asked whatever they do, also by a signal from outside."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
from process.watching import Script, Struck, wait_until

from rlpool import EpisodeBatcher, ParallelEnvManager, UsageError

from support.faults import FaultyEnv, code, create_agent, create_env, faults_at

pytestmark = [
    pytest.mark.promise("I9"),
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(60),
]


def open_batcher(struck: Struck, **options: Any) -> EpisodeBatcher:
    return EpisodeBatcher(
        n_timesteps=4,
        n_slots=8,
        create_agent=create_agent,
        create_env=create_env,
        env_args={"struck_at": struck.path},
        seeds=7,
        **options,
    )


def test_a_worker_tells_where_it_is_unless_it_is_stopped_or_gone(struck: Struck) -> None:
    with open_batcher(struck, n_threads=1) as batcher:
        batcher.execute(2, env_info=faults_at(2, 1, "hold_the_lock", 1, length=3))
        wait_until(lambda: struck.is_there)
        pid = struck.pid
        # That the note is there says that it is about to hang, not that it hangs.
        wait_until(lambda: " in _strike\n" in batcher.dump_stacks(file=None))
        text = batcher.dump_stacks(file=None)
        head, threads, *stack = text.splitlines()
        place = f"lane 0, row 1, episode 1, step 1, seed {struck.seed}, env_info {{"
        assert head.startswith(f"worker 0 (pid {pid}): {place}")
        assert threads.endswith("(most recent call first):")
        functions = [line.rpartition(" in ")[2] for line in stack]
        assert functions[functions.index("_strike") - 1 :][:3] == ["strike", "_strike", "step"]
        assert text.count("(most recent call first)") == 1  # no threads that every worker has
        n_open = psutil.Process(pid).num_fds()
        for _ in range(20):
            assert batcher.dump_stacks(file=None) == text
        assert psutil.Process(pid).num_fds() == n_open

        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        text = batcher.dump_stacks(file=None)
        assert text.startswith(f"worker 0 (pid {pid}) is stopped, as by SIGSTOP")
        assert "most recent" not in text
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        assert batcher.dump_stacks(file=None).startswith(f"worker 0 (pid {pid}) is gone")


def test_stacks_go_to_stderr_unless_another_file_is_given(
    struck: Struck, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_batcher(struck, n_threads=0) as batcher:
        text = batcher.dump_stacks()
        assert capsys.readouterr() == ("", text)
        assert text.startswith(f"worker 0 (pid {os.getpid()}): no episode\n")
        assert "in test_stacks_go_to_stderr_unless_another_file_is_given" in text
        file = io.StringIO()
        assert batcher.dump_stacks(file=file) == file.getvalue() != ""
        assert capsys.readouterr() == ("", "")
        with pytest.raises(ValueError, match="file should be a text file, got 3"):
            batcher.dump_stacks(file=3)
    with pytest.raises(UsageError, match="closed"):
        batcher.dump_stacks()


def test_stacks_of_environments_in_processes(struck: Struck) -> None:
    with ParallelEnvManager([partial(FaultyEnv, struck.path)] * 2, seed=1) as manager:
        manager.remotes[1].send(("reset", {"options": {"fault": code("hang"), "fault_step": -1}}))
        wait_until(lambda: struck.is_there)
        idle, busy = manager.dump_stacks(file=None).split("\n\n")
        assert idle.startswith("worker 0 (pid ")
        assert "no episode" in idle
        assert busy.startswith(f"worker 1 (pid {struck.pid}): lane 1, ")
        assert "in strike\n" in busy
        os.kill(struck.pid, signal.SIGKILL)
    with pytest.raises(UsageError, match="closed"):
        manager.dump_stacks()


SCRIPT = """
import signal
import sys

import rlpool
from rlpool import EpisodeBatcher
from support.faults import create_agent, create_env, faults_at

class Stop(Exception):
    pass

def stop(*_):
    raise Stop

def main(struck):
    signal.signal(signal.SIGUSR2, stop)
    undo = rlpool.dump_stacks_on_signal()
    batcher = EpisodeBatcher(
        n_timesteps=4, n_slots=8, create_agent=create_agent, create_env=create_env,
        env_args={"struck_at": struck}, seeds=7,
    )
    batcher.execute(1, env_info=faults_at(1, 0, "hang", 1, length=3))
    print("ready", flush=True)
    try:
        batcher.get()
    except Stop:
        print("holds", flush=True)
        sum(range(10**13))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_a_signal_tells_where_caller_and_workers_are(
    struck: Struck, run_script: Callable[..., Script]
) -> None:
    script = run_script(SCRIPT, struck.path)
    script.wait_for_line("ready")
    wait_until(lambda: struck.is_there)
    for n_asked in (1, 2):
        script.signal(signal.SIGUSR1)
        wait_until(partial(_has_dumps, script, 2 * n_asked))
    assert script.stderr.count(" in get\n") == 2
    assert script.stderr.count(f"worker 0 (pid {struck.pid}): lane 0, row 0, ") == 2
    assert script.stderr.count(" in _strike\n") == 2

    # While the caller computes, nobody in it can ask the worker.
    script.signal(signal.SIGUSR2)
    script.wait_for_line("holds")
    script.signal(signal.SIGUSR1)
    wait_until(partial(_has_dumps, script, 5))
    assert f'script_0.py", line {_line_of("sum(range", SCRIPT)} in main' in script.stderr
    assert script.stderr.count(" in _strike\n") == 2
    assert script.returncode is None


def _has_dumps(script: Script, n_threads: int) -> bool:
    text = script.stderr
    return text.count("(most recent call first)") == n_threads and text.endswith(" in <module>\n")


def _line_of(text: str, source: str) -> int:
    return source[: source.index(text)].count("\n") + 1
