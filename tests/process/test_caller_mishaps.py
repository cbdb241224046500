"""What happens to callers: Ctrl-C twice, exits and errors half-way, threads, notebooks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from process.watching import Script, Struck, pids_of_session, wait_until, who_holds

from rlpool import DictTensor, EpisodeBatcher

from support.faults import create_agent, create_env

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(120)]

RunScript = Callable[..., Script]

GONE_S = 3.0
"""So long after its end nothing of a script is left."""

COMMON = """
import os, signal, sys, threading, time
import torch
from rlpool import Batcher, DictTensor, EpisodeBatcher
from support.faults import create_agent, create_env, faults_at
from support.parallel import create_manager
from support.faults import FaultyEnv

def open_batcher(struck, n_threads=1, **env_args):
    return EpisodeBatcher(
        4, 8, create_agent, {}, create_env, {"struck_at": struck, **env_args},
        n_threads=n_threads, seeds=1,
    )

def open_managed(struck):
    return EpisodeBatcher(
        4, 8, create_agent, {}, create_manager,
        {"make_env": FaultyEnv, "n_lanes": 2}, n_threads=0, seeds=1,
    )

def rows(first, n=3):
    return DictTensor({"id": torch.arange(first, first + n)})

def check(result, first, n=3):
    assert result.lengths.tolist() == [3] * n, result.lengths
    assert result["frame"][:, :, 0].tolist() == [[first + i] * 3 for i in range(n)]

"""


def finished(script: Script, returncode: int | None = 0) -> str:
    """Wait for the end of a script, see that nothing of it is left; returns what it printed."""
    script.finish()
    left = script.left_after(GONE_S)
    assert not left, [" ".join(process.cmdline()) for process in left]
    assert not who_holds(script.memory)
    assert script.returncode == returncode, script.stderr
    return script.stdout


# Ctrl-C ---------------------------------------------------------------------------------------

STUBBORN = """
def main(struck, phase):
    if phase == "start":
        print("ready", flush=True)
        open_batcher(struck, fault="hang")
    batcher = open_batcher(struck, close_fault="hang" if phase == "close" else "none")
    print("ready", flush=True)
    if phase == "collect":
        batcher.execute(4, env_info=faults_at(4, 1, "hang", 2))
        batcher.get()
    if phase == "handler":
        # What a user may write: Ctrl-C saves a checkpoint, and goes on.
        batcher.execute(4, env_info=faults_at(4, 1, "hang", 2))
        for _ in range(2):
            try:
                batcher.get()
            except KeyboardInterrupt:
                print("caught", flush=True)
        batcher.close()
        os.unlink(struck)
        main(struck, "collect")
    batcher.close()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize("phase", ["start", "collect", "close"])
@pytest.mark.parametrize("group", [True, False], ids=["group", "caller_only"])
def test_ctrl_c_twice_at_once(
    run_script: RunScript, struck: Struck, phase: str, group: bool
) -> None:
    script = run_script(COMMON + STUBBORN, struck.path, phase)
    script.wait_for_line("ready")
    wait_until(lambda: struck.is_there or script.returncode is not None)
    script.note_family()
    script.signal(signal.SIGINT, group=group)
    script.signal(signal.SIGINT, group=group)
    script.finish(GONE_S)
    finished(script, -signal.SIGINT)


def test_a_caught_ctrl_c_leaves_the_request_pending_and_further_ones_end_the_next_batcher(
    run_script: RunScript, struck: Struck
) -> None:
    script = run_script(COMMON + STUBBORN, struck.path, "handler")
    script.wait_for_line("ready")
    wait_until(lambda: struck.is_there)
    script.note_family()
    for n_caught in (1, 2):
        script.signal(signal.SIGINT, group=True)
        wait_until(lambda n=n_caught: script.stdout.count("caught") == n or script.returncode)
    wait_until(lambda: script.stdout.count("ready") == 2 or script.returncode)
    assert script.stdout == "ready\ncaught\ncaught\nready\n"
    assert script.stderr == ""
    wait_until(lambda: struck.is_there)
    script.note_family()

    def press() -> bool:
        if script.returncode is None:
            script.signal(signal.SIGINT, group=True)
        return script.returncode is not None

    wait_until(press, GONE_S)
    finished(script, script.returncode)


# The caller leaves in the middle --------------------------------------------------------------

LEAVES = """
def leave(how):
    if how == "sys_exit":
        sys.exit(3)
    if how == "os_exit":
        os._exit(3)
    if how == "raise":
        raise ZeroDivisionError("in the caller's loop")
    if how == "system_exit_in_thread":
        thread = threading.Thread(target=sys.exit)
        thread.start()
        thread.join()
        sys.exit(3)

def main(struck, how):
    opened = [open_batcher(struck), open_batcher(struck, 2), open_managed(struck)]
    windows = Batcher(4, None, create_agent, {}, create_env, {}, n_threads=1, seeds=1)
    windows.reset()
    opened[0].execute(4, env_info=faults_at(4, 1, "hang", 2))
    opened[1].execute(40, env_info=faults_at(40, 0, "none", 0, length=10**6))
    opened[2].execute(4)
    windows.execute()
    kept = windows.get()
    print("ready", flush=True)
    while not os.path.exists(struck) or not os.path.exists(struck + ".go"):
        opened[1].get(blocking=False)
        time.sleep(0.005)
    leave(how)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.parametrize("how", ["sys_exit", "raise", "os_exit", "system_exit_in_thread"])
def test_a_caller_may_leave_with_batchers_open(
    run_script: RunScript, struck: Struck, how: str
) -> None:
    script = run_script(COMMON + LEAVES, struck.path, how)
    script.wait_for_line("ready")
    wait_until(lambda: struck.is_there)
    script.note_family()
    assert len(script.family) >= 6
    Path(f"{struck.path}.go").touch()
    finished(script, 1 if how == "raise" else 3)
    assert script.stderr.count("Traceback") == (how == "raise"), script.stderr
    assert "Exception ignored" not in script.stderr


# Forks ----------------------------------------------------------------------------------------

FORKS = """
import multiprocessing
from rlpool import ParallelEnvManager, UsageError

def refused(call, *arguments):
    try:
        call(*arguments)
    except UsageError as error:
        assert "forked" in str(error) and "fix:" in str(error), error
        return
    raise AssertionError(f"{call} was not refused")

def square(number):
    return number * number

def main(struck):
    windows = Batcher(4, None, create_agent, {}, create_env, {}, n_threads=1, seeds=1)
    windows.reset()
    windows.execute()
    managed = open_managed(struck)
    managed.execute(3, env_info=rows(6))
    manager = ParallelEnvManager([FaultyEnv] * 2, seed=1)
    manager.reset()
    manager.remotes[0].send(("get_attr", {"attr": "action_space"}))
    with open_batcher(struck, 2) as batcher:
        batcher.execute(3, env_info=rows(5))
        pid = os.fork()
        if pid == 0:
            refused(batcher.get)
            refused(batcher.get, False)
            refused(batcher.execute, 3)
            refused(batcher.reexecute)
            refused(batcher.update, {})
            refused(lambda: batcher.progress)
            refused(batcher.dump_stacks, None)
            refused(windows.get)
            refused(windows.execute)
            refused(windows.reset)
            refused(lambda: windows.n_lanes)
            refused(lambda: windows.all_stopped)
            refused(manager.reset)
            refused(manager.reset_lanes, [1], [1], [None])
            refused(manager.step_lanes, [1], {})
            refused(manager.step_some)
            refused(manager.announce_episodes, [1], {})
            refused(manager.dump_stacks, None)
            refused(manager.remotes[0].recv)
            refused(manager.remotes[0].poll)
            refused(manager.remotes[1].send, ("reset", None))
            refused(manager.workers[0].is_alive)
            refused(manager.workers[0].join)
            refused(lambda: manager.workers[0].exitcode)
            assert str(manager.workers[0].pid) in repr(manager.workers[0])
            windows.close()
            windows.close()
            manager.close()
            managed.close()
            del managed
            # Its own batcher is its own; that of its parent it may also forget.
            with open_batcher(struck) as own:
                own.execute(3, env_info=rows(9))
                check(own.get(), 9)
            # multiprocessing tries to join the children of its parent, and says so.
            sys.stderr = open(os.devnull, "w")
            sys.exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
        check(batcher.get(), 5)
        check(managed.get(), 6)
        assert windows.get()["frame"].shape[:2] == (1, 3)
        assert manager.remotes[0].recv()[0] == "attr"
        manager.reset()
    print("done")

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_a_forked_child_has_a_batcher_of_its_own_and_may_not_use_those_of_its_parent(
    run_script: RunScript, struck: Struck
) -> None:
    script = run_script(COMMON + FORKS, struck.path)
    assert finished(script) == "done\n"
    assert script.stderr == ""


# Several batchers, threads --------------------------------------------------------------------


def open_batcher(n_threads: int = 1) -> EpisodeBatcher:
    return EpisodeBatcher(4, 8, create_agent, {}, create_env, {}, n_threads=n_threads, seeds=1)


def begin(batcher: EpisodeBatcher, first: int) -> None:
    batcher.execute(3, env_info=DictTensor({"id": torch.arange(first, first + 3)}))


def check(batcher: EpisodeBatcher, first: int) -> None:
    result = batcher.get()
    assert result is not None
    assert result["frame"][:, :, 0].tolist() == [[first + i] * 3 for i in range(3)]


def collect(batcher: EpisodeBatcher, first: int) -> None:
    for number in range(20):
        begin(batcher, first + number)
        check(batcher, first + number)


def test_batchers_take_turns() -> None:
    with open_batcher(2) as one, open_batcher() as two:
        for number in range(20):
            begin(one, number)
            begin(two, 100 + number)
            check(two, 100 + number)
            check(one, number)


def test_batchers_of_several_threads_and_one_that_is_handed_on() -> None:
    def whole_life(number: int) -> None:
        with open_batcher(2) as batcher:
            collect(batcher, 100 * number)

    with open_batcher(2) as handed_on, ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(whole_life, number) for number in range(3)]
        threads.submit(collect, handed_on, 7).result()
        collect(handed_on, 50)
        for future in futures:
            future.result()


THREADS = """
def whole_life(struck):
    with open_batcher(struck, 2) as batcher:
        for number in range(20):
            batcher.execute(3, env_info=rows(number))
            check(batcher.get(), number)
    print("collected")

def hang(struck):
    batcher = open_batcher(struck)
    batcher.execute(1, env_info=faults_at(1, 0, "hang", 0))
    batcher.get()

def main(struck):
    threading.Thread(target=hang, args=(struck,), daemon=True).start()
    while not os.path.exists(struck):
        time.sleep(0.005)
    # The interpreter waits for this thread, and the thread's workers must not mind.
    threading.Thread(target=whole_life, args=(struck,)).start()
    print("left")

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_the_main_thread_may_leave_before_others_and_leave_a_daemon_behind(
    run_script: RunScript, struck: Struck
) -> None:
    script = run_script(COMMON + THREADS, struck.path)
    assert sorted(finished(script).split()) == ["collected", "left"], script.stderr
    assert script.stderr == ""
    wait_until(lambda: not pids_of_session(script.pid), GONE_S)


# Notebooks ------------------------------------------------------------------------------------

NOTEBOOK = '''
import code, os, sys
from process.watching import worker_pids

CELL = """
import os, signal, torch
from rlpool import Agent, DictTensor, EpisodeBatcher, GymEnv
from support.faults import FaultyEnv
class Env(FaultyEnv):
    def step(self, action):
        if self._options.get("interrupts") and self._step == 20:
            os.kill(os.getppid(), signal.SIGINT)
        return super().step(action)
class Mine(Agent):
    def __call__(self, state, observation, agent_info=None, history=None):
        action = torch.full((observation.n_elems(),), NUMBER)
        return DictTensor({}), DictTensor({"action": action}), DictTensor({})
def create_env(seed):
    return GymEnv([Env(), Env()], seed)
batcher = EpisodeBatcher(
    n_timesteps=4, n_slots=8, create_agent=Mine, create_env=create_env, n_threads=2, seeds=1
)
batcher.execute(5)
result = batcher.get()
print(result["action"].unique().tolist(), result.lengths.tolist())
"""

FAILING = "batcher.execute(2)\\n1 / 0\\n"
INTERRUPTED = """
info = {"length": LENGTH, "sleep_ms": 1, "interrupts": 1}
batcher.execute(1, env_info=DictTensor({k: torch.tensor([v]) for k, v in info.items()}))
batcher.get()
"""

def main():
    # Like a notebook's kernel: one namespace, __main__ without a file, errors are shown and kept.
    del sys.modules["__main__"].__file__
    shell = code.InteractiveInterpreter(sys.modules["__main__"].__dict__)
    sys.stderr = open(os.devnull, "w")
    def run(source):
        shell.runcode(compile(source, "<cell>", "exec"))
    run("NUMBER = 1")
    run(CELL)
    first = worker_pids()
    run("NUMBER = 2")
    run(CELL)
    second = worker_pids()
    print(len(first), len(second), len(first & second))
    run(FAILING)
    run("print(batcher.get().lengths.tolist())")
    run("LENGTH = 200")
    run(INTERRUPTED)
    print(worker_pids() == second)
    run("print(batcher.get().lengths.tolist())")
    run("LENGTH = 10**6")
    run(INTERRUPTED)
    run(CELL)
    # What was shown is kept for debuggers, with all that it refers to.
    del sys.last_value, sys.last_traceback
    print(len(worker_pids()), len(worker_pids() & second))

if __name__ == "__main__":
    main()
'''


def test_a_notebook_cell_may_be_run_again(run_script: RunScript) -> None:
    script = run_script(NOTEBOOK)
    assert finished(script).splitlines() == [
        "[1] [3, 3, 3, 3, 3]",
        "[2] [3, 3, 3, 3, 3]",
        "2 2 0",
        "[3, 3]",
        "True",
        "[200]",
        "[2] [3, 3, 3, 3, 3]",
        "2 0",
    ]
