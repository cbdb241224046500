"""However the caller ends, and whatever its workers do meanwhile, nothing of them is left.

Every phase of a batcher's life is a place where its script waits, or is kept waiting, until it is
struck by a signal: the workers end although nobody is left to tell them, whatever they are doing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from process.watching import Script, Struck, wait_until, who_holds

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(120)]

RunScript = Callable[..., Script]

GONE_S = 3.0
"""So long after the caller was struck no worker and none of its memory is left."""

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)

CALLER = """
import os, signal, sys
from functools import partial
import numpy as np
import torch
from support.faults import FaultyEnv, code, create_agent, create_env, faults_at, strike
from support.parallel import create_manager

if __name__ == "__mp_main__" and os.path.exists(f"{__file__}.import"):
    # Imports take seconds where they are heavy or the machine is busy.
    strike("hang", open(f"{__file__}.import").read())

from rlpool import Batcher, DictTensor, EpisodeBatcher, ParallelEnvManager

def main(struck, owner, phase, kind, start_method):
    if phase == "import":
        open(f"{__file__}.import", "w").write(struck)
    print("began", flush=True)
    {"episodes": episodes, "windows": windows, "manager": manager}[owner](
        struck, phase, kind, start_method
    )

def fault(phase, kind, n_rows, **columns):
    # In the last row of n_rows: as env_info and as agent_info.
    step = {"reset": -1, "step": 2, "agent": 2}.get(phase, 0)
    struck = faults_at(n_rows, n_rows - 1, kind, step, **columns)
    plain = faults_at(n_rows, 0, "none", 0, **columns)
    return {
        "env_info": struck if phase in ("reset", "step") else plain,
        "agent_info": struck if phase == "agent" else plain,
    }

def arguments(struck, phase, kind):
    agent_args, env_args = {"struck_at": struck}, {"struck_at": struck, "n_lanes": 2}
    if phase in ("create_env", "create_agent"):
        {"create_env": env_args, "create_agent": agent_args}[phase]["fault"] = kind
    if phase in ("close_env", "close_agent"):
        {"close_env": env_args, "close_agent": agent_args}[phase]["close_fault"] = kind
    return create_agent, agent_args, create_env, env_args, 2, 1

def rest():
    print("there", flush=True)
    while True:
        signal.pause()

def episodes(struck, phase, kind, start_method):
    batcher = EpisodeBatcher(
        4, 6, *arguments(struck, phase, kind), start_method=start_method
    )
    batcher.execute(3)
    batcher.get()
    if phase == "update":
        batcher.update(kind)
    # More episodes than slots, longer than slots: some are being drained.
    batcher.execute(9, **fault(phase, kind, 9, length=2_000_000 if phase == "busy" else 9))
    if phase == "queued":
        batcher.execute(9)
        rest()
    if phase == "busy":
        print("there", flush=True)
    batcher.get()
    if phase == "idle":
        rest()
    batcher.close()

def windows(struck, phase, kind, start_method):
    batcher = Batcher(4, None, *arguments(struck, phase, kind), start_method=start_method)
    batcher.reset(**fault(phase, kind, 4, length=9))
    batcher.execute()
    batcher.execute()
    batcher.get()
    if phase == "idle":
        rest()
    batcher.get()
    batcher.close()

def manager(struck, phase, kind, start_method):
    closing = kind if phase == "close_env" else "none"
    make_env = partial(FaultyEnv, struck, closing)
    if phase == "create_env":
        make_env = partial(strike, kind, struck)
    manager = ParallelEnvManager([make_env] * 3, envs_per_worker=2, start_method=start_method)
    options = {"fault": code(kind), "length": 10**6}
    options["fault_step"] = {"reset": -1, "step": 2}.get(phase, -2)
    manager.reset_lanes([0, 1, 2], [1, 2, 3], [None, None, options])
    if phase == "idle":
        rest()
    print("there" if phase == "busy" else "stepping", flush=True)
    n_steps = 10**9 if phase == "busy" else 4
    for _ in range(n_steps):
        manager.step_lanes([2], {"action": np.zeros(3, np.int64)})
    manager.close()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""

HANGS = ("hang", "hold_the_lock")  # asleep, and in a call in C during which no thread can run

PHASES = [
    *[("episodes", "import", "hang"), ("manager", "import", "hang")],
    *[("episodes", phase, kind) for phase in ("create_env", "create_agent") for kind in HANGS],
    *[("episodes", phase, kind) for phase in ("reset", "step", "agent") for kind in HANGS],
    *[("episodes", phase, "none") for phase in ("busy", "queued", "idle")],
    *[("episodes", "update", "hang"), ("episodes", "update", "hold_the_lock")],
    *[("episodes", phase, kind) for phase in ("close_env", "close_agent") for kind in HANGS],
    *[("windows", "step", "hang"), ("windows", "agent", "hold_the_lock")],
    *[("windows", "idle", "none"), ("windows", "close_env", "hold_the_lock")],
    *[("manager", phase, "hold_the_lock") for phase in ("create_env", "reset", "step")],
    *[("manager", phase, "none") for phase in ("busy", "idle")],
    *[("manager", "close_env", kind) for kind in HANGS],
]

CASES = [
    *[(number, *phase, "auto") for phase in PHASES for number in SIGNALS],
    *[(signal.SIGKILL, *phase, "spawn") for phase in PHASES],
]


def at_its_place(
    run_script: RunScript, struck: Struck, owner: str, phase: str, kind: str, start_method: str
) -> Script:
    """A script that has come to where it is to be struck."""
    script = run_script(CALLER, struck.path, owner, phase, kind, start_method)
    script.wait_for_line("began")
    if kind == "none":
        script.wait_for_line("there")
    else:
        wait_until(lambda: struck.is_there or script.returncode is not None)
    assert script.returncode is None, script.stderr
    script.note_family()
    assert len(script.family) >= 2  # with the tracker of multiprocessing
    return script


def assert_nothing_is_left(script: Script) -> None:
    """Wait for the last process of the script, and look for who has its memory."""
    deadline_s = GONE_S
    took_s = 0.0
    if script.returncode is None:
        took_s = script.finish(deadline_s)
    left = script.left_after(deadline_s - took_s)
    assert not left, [" ".join(process.cmdline()) for process in left]
    assert not who_holds(script.memory)


@pytest.mark.parametrize(
    ("number", "owner", "phase", "kind", "start_method"),
    CASES,
    ids=lambda value: getattr(value, "name", value),
)
def test_nothing_is_left_of_a_caller_that_is_struck(
    run_script: RunScript,
    struck: Struck,
    number: signal.Signals,
    owner: str,
    phase: str,
    kind: str,
    start_method: str,
) -> None:
    script = at_its_place(run_script, struck, owner, phase, kind, start_method)
    assert script.memory  # else there is nothing to look for
    script.signal(number)
    assert_nothing_is_left(script)
    assert script.returncode == -number
