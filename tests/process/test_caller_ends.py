"""No worker is left behind, however the caller ends and regardless of what its workers are doing.

A script opens batchers and managers in many threads and brings each worker to a certain state:
asleep in ``step``, in a C call that holds the GIL, still importing, idle, and so on. Then the
script ends by itself or by a signal, so no process is left to notify the workers.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from process.watching import Script, in_new, wait_until, who_holds

from rlpool import EpisodeBatcher, ParallelEnvManager, UsageError

from support.faults import FaultyEnv, create_agent, create_env
from support.parents import N_STARTED
from support.variants import variants

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I5"),
    pytest.mark.promise("I6"),
]

RunScript = Callable[..., Script]

GONE_S = 5.0
"""So long after the caller was struck no worker and none of its memory is left."""

CLOSE_S = 5.0
"""A caller that ends by itself closes what it has opened in less than this, hangs included."""

CALLER = """
import os, signal, sys, threading, time
from functools import partial
from pathlib import Path
import numpy as np
from support import parents
from support.agents import ConstantAgent
from support.faults import FaultyEnv, code, create_agent, create_env, faults_at, strike

if __name__ == "__mp_main__" and os.path.exists(f"{__file__}.import"):
    # Imports take seconds where they are heavy or the machine is busy.
    strike("hang", open(f"{__file__}.import").read())

from rlpool import EpisodeBatcher, ParallelEnvManager

def main(at, end, start_method, *places):
    def go(number):
        owner, phase, kind = places[number].split(":")
        owners = {"episodes": episodes, "manager": manager, "children": children}
        owners[owner](f"{at}.{number}", phase, kind, start_method)

    is_left = end in ("return", "raise", "sys_exit", "os_exit")
    for number in range(len(places) - (not is_left)):
        threading.Thread(target=go, args=(number,), daemon=True).start()
    if not is_left:
        go(len(places) - 1)
    while not os.path.exists(f"{at}.go"):
        time.sleep(0.005)
    if end == "raise":
        raise ZeroDivisionError
    if end == "sys_exit":
        sys.exit(3)
    if end == "os_exit":
        os._exit(3)

def rest(at):
    Path(at).touch()
    while True:
        time.sleep(1)

def arguments(at, phase, kind):
    if phase == "import":
        Path(f"{__file__}.import").write_text(at)
    agent_args, env_args = {"struck_at": at}, {"struck_at": at, "n_lanes": 2}
    part = agent_args if phase.endswith("agent") else env_args
    if phase.startswith("c"):
        part["fault" if phase.startswith("create") else "close_fault"] = kind
    return create_agent, agent_args, create_env, env_args, 1, 1

def episodes(at, phase, kind, start_method):
    batcher = EpisodeBatcher(4, 6, *arguments(at, phase, kind), start_method=start_method)
    if phase == "update":
        batcher.update(kind)
    # More episodes than slots, longer than slots: some are being drained. The last one is struck.
    hit = kind if phase in ("reset", "step", "agent") else "none"
    length = 2_000_000 if phase == "busy" else 9
    plain = faults_at(9, 8, "none", 2, length=length)
    struck = faults_at(9, 8, hit, -1 if phase == "reset" else 2, length=length)
    batcher.execute(9, *((struck, plain) if phase == "agent" else (plain, struck)))
    if phase == "queued":
        batcher.execute(9)
        rest(at)
    if phase == "busy":
        Path(at).touch()
    batcher.get()
    batcher.close()

def children(at, phase, kind, start_method):
    env_args = {"notes": f"{at}.children"}
    os.mkdir(env_args["notes"])
    batcher = EpisodeBatcher(
        4, 6, ConstantAgent, {}, parents.create_env, env_args, 1, start_method=start_method
    )
    rest(at)

def manager(at, phase, kind, start_method):
    make_env = partial(strike, kind, at) if phase == "create_env" else partial(FaultyEnv, at)
    manager = ParallelEnvManager([make_env] * 3, envs_per_worker=2, start_method=start_method)
    options = {"fault": code(kind), "length": 10**6}
    options["fault_step"] = {"reset": -1, "step": 2}.get(phase, -2)
    manager.reset_lanes([0, 1, 2], [1, 2, 3], [None, None, options])
    if phase == "idle":
        rest(at)
    if phase == "busy":
        Path(at).touch()
    while True:
        manager.step_lanes([2], {"action": np.zeros(3, np.int64)})

if __name__ == "__main__":
    from rlpool.workers import crew, process_end
    # Wait a fraction of a second for workers that hang while they end, as `short_patience` does.
    crew.LEAVE_S, process_end.CLOSE_S, process_end.TERMINATE_S = 0.5, 0.5, 0.2
    main(*sys.argv[1:])
"""

# Asleep, and in a C call during which no thread can run.
MANY = (
    *("episodes:create_env:hang", "episodes:create_agent:hold_the_lock"),
    *("episodes:reset:hold_the_lock", "episodes:update:hold_the_lock", "episodes:agent:hang"),
    *("episodes:queued:none", "episodes:busy:none", "episodes:close_agent:hold_the_lock"),
    *("manager:create_env:hold_the_lock", "manager:step:hold_the_lock", "manager:busy:none"),
    "children:idle:none",
    "episodes:step:hang",
)
FEW = (
    *("episodes:queued:none", "episodes:busy:none", "manager:idle:none", "children:idle:none"),
    "episodes:step:hang",
)
ENDS = ("SIGTERM", "SIGINT", "SIGINT SIGINT", "return", "raise", "sys_exit", "os_exit")

CASES = variants(
    [("SIGKILL", "auto", MANY)],
    [
        *[(end, "auto", FEW) for end in ENDS],
        *[("SIGKILL", "spawn", places) for places in (MANY, ("episodes:import:hang",))],
    ],
)


@pytest.mark.promise("I4")
@pytest.mark.parametrize(
    ("end", "start_method", "places"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else f"{len(value)}-{value[-1]}",
)
def test_nothing_is_left_behind_when_the_caller_ends(
    run_script: RunScript, tmp_path: Path, end: str, start_method: str, places: tuple[str, ...]
) -> None:
    at = [tmp_path / f"at.{number}" for number in range(len(places))]
    script = run_script(CALLER, str(tmp_path / "at"), end, start_method, *places)
    wait_until(lambda: all(path.exists() for path in at) or script.returncode is not None)
    assert script.returncode is None, script.stderr
    script.note_family()
    started = [psutil.Process(int(path.name)) for path in tmp_path.glob("at.*.children/*")]
    assert len(started) == (N_STARTED if "children:idle:none" in places else 0)
    script.family += started
    assert script.memory
    if end == "SIGKILL":  # the workers' parent, too, and first
        for process in script.family:
            with suppress(psutil.NoSuchProcess):  # a process that an environment started
                if process.name() == "rlpool-template":
                    process.kill()
    (tmp_path / "at.go").touch()
    numbers = [getattr(signal, name) for name in end.split() if name.startswith("SIG")]
    for number in numbers:
        script.signal(number, group=number == signal.SIGINT)
    script.finish(GONE_S if end.startswith(("SIGKILL", "SIGTERM", "SIGINT ")) else CLOSE_S)
    left = script.left_after(GONE_S)
    assert not left, [" ".join(process.cmdline()) for process in left]
    assert not who_holds(script.memory)
    expected = {"return": 0, "raise": 1, "sys_exit": 3, "os_exit": 3}
    assert script.returncode == (-numbers[0] if numbers else expected[end]), script.stderr
    if end != "SIGINT SIGINT":  # only the script's own traceback is printed
        assert script.stderr.count("Traceback") == (end in ("SIGINT", "raise")), script.stderr
        for word in ("rlpool-worker", "Exception ignored", "resource_tracker", "Process "):
            assert word not in script.stderr, script.stderr


SCATTERED = """
import os, random, signal, sys
from pathlib import Path
from support import parents
from support.agents import ConstantAgent
from rlpool import EpisodeBatcher

if __name__ == "__main__":
    notes, go = sys.argv[1:]
    arguments = ConstantAgent, {}, parents.create_env, {"notes": notes}
    batcher = EpisodeBatcher(4, 6, *arguments, n_workers=8)
    print("started", flush=True)
    while not os.path.exists(go):
        pass
    for number in range(4):  # closing them takes as long as a worker needs to end
        file = os.memfd_create(f"slow-{number}")
        os.posix_fallocate(file, 0, 2**28)
    files = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2]
    random.Random(1).shuffle(files)
    for number, fd in enumerate(files):
        try:
            os.dup2(fd, 500 + number)
        except OSError:
            pass  # the one that listed them
        else:
            os.close(fd)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_behind_in_any_order_of_closing_the_callers_files(
    run_script: RunScript, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    script = run_script(SCATTERED, str(notes), str(tmp_path / "go"))
    script.wait_for_line("started")
    script.family += [psutil.Process(int(path.name)) for path in notes.iterdir()]
    (tmp_path / "go").touch()
    script.finish()
    assert script.returncode == -signal.SIGKILL, script.stderr
    assert not script.left_after(GONE_S)


# Forks ----------------------------------------------------------------------------------------


def use_what_belongs_to_the_parent(pipe: Any, batcher: Any, manager: Any) -> None:
    calls: list[Callable[[], Any]] = [
        *(batcher.get, lambda: batcher.execute(3), lambda: batcher.update({})),
        *(manager.reset, lambda: manager.step_lanes([1], {}), manager.remotes[0].recv),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="forked"):
            call()
    batcher.close()
    manager.close()


def test_a_forked_child_may_not_use_its_parents_batchers() -> None:
    with (
        EpisodeBatcher(4, 8, create_agent, {}, create_env, {}, n_threads=2, seeds=1) as batcher,
        ParallelEnvManager([FaultyEnv] * 2, seed=1) as manager,
    ):
        manager.reset()
        manager.remotes[0].send(("get_attr", {"attr": "action_space"}))
        batcher.execute(3, env_info={"id": [5, 6, 7]})
        with in_new("fork", use_what_belongs_to_the_parent, batcher, manager):
            pass
        assert batcher.get()["frame"][:, :, 0].tolist() == [[5] * 3, [6] * 3, [7] * 3]
        assert manager.remotes[0].recv()[0] == "attr"
