"""A worker that was forked from the template is like a spawned one, with the same results."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from process.watching import Script

import rlpool
from rlpool import Batcher, DictTensor, EpisodeBatcher, GymEnv, ParallelEnvManager, Pool, SpecError
from rlpool.workers.process_state import identity

from support import busy
from support.agents import ConstantAgent

pytestmark = [pytest.mark.promise("I10"), pytest.mark.timeout(120)]

CORE_LIMIT = resource.getrlimit(resource.RLIMIT_CORE)[1]
PR_SET_NO_NEW_PRIVS = 38

MOMENTS = "while its main module is imported", "while its environment is made"

OTHER_TEMPLATE = {"environment", "directory", "search path", "flags", "cores", "filters"}
"""What the script changes that a process has in common with its template from the start."""

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

    run_worker("two", n_threads=2)

    os.dup2(os.open(Path(sys.argv[1], "stdout"), os.O_CREAT | os.O_WRONLY), 1)
    os.umask(0o027)
    os.nice(1)
    sys.argv.append("argument")
    for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGRTMIN + 1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGRTMIN + 2})
    limits = {resource.RLIMIT_NOFILE: 300, resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: 2**37}
    for limit, soft in limits.items():
        resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))
    run_worker("old template")

    os.environb[b"REPORTED"] = bytes(range(1, 256))
    os.environ.pop("HOME", None)
    os.chdir("/")
    sys.path.append("/nowhere")
    sys.warnoptions.append("ignore::UserWarning")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    run_worker("new template")
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

    (spawned,) = reports("spawned")
    for template in ("old", "new"):
        (forked,) = reports(f"{template} template")
        for moment, expected, found in zip(MOMENTS, spawned, forked, strict=False):
            differ = {name for name in expected if found[name] != expected[name]}
            if template == "old":
                differ -= OTHER_TEMPLATE
            assert {name: (found[name], expected[name]) for name in differ} == {}, moment
    (*_, first), (*_, second) = reports("two")
    assert [name for name in first if first[name] == second[name]] == []
    # All that is printed arrives where the caller prints now.
    lines = (tmp_path / "stdout").read_text().splitlines()
    assert sorted(lines) == sorted(3 * ["printed", "printed by C", "said at exit"])


def test_environment_computes_the_same_with_threads_and_processes_of_its_own(
    tmp_path: Path,
) -> None:
    found = {}
    for start_method in ("auto", "spawn"):
        path = tmp_path / start_method
        with EpisodeBatcher(
            n_timesteps=2,
            n_slots=1,
            n_threads=1,
            seeds=1,
            create_agent=ConstantAgent,
            create_env=busy.make,
            env_args={"path": str(path)},
            start_method=start_method,
        ) as batcher:
            batcher.execute(n_episodes=1)
            batcher.get()
        found[start_method] = json.loads(path.read_text())
    assert found["auto"] == found["spawn"]
    assert found["auto"]["with_a_process_of_torch"] == [0, [2.0] * 5]
    assert found["auto"]["with_a_fork"] == 7


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
    run_script: Callable[..., Script],
) -> None:
    script = run_script(BROKEN_MAIN)
    script.finish()
    assert "this main module is for nobody else" in script.stderr
    assert "exit code 1" in script.stderr


ASKS_FOR_ANOTHER_TEMPLATE: dict[str, Callable[[], Any]] = {
    "flags": lambda: sys.warnoptions.append("ignore::UserWarning"),
    "variable": lambda: os.environ.update(ANY="other"),
    "search path": lambda: sys.path.append("/nowhere"),
    "directory": lambda: os.chdir("/"),
    "hard limit": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    "privileges": lambda: ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
}
IS_TAKEN_OVER: dict[str, Callable[[], Any]] = {
    "variable that often changes": lambda: os.environ.update(PYTEST_CURRENT_TEST="other"),
    "umask": lambda: os.umask(0o111),
    "limit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, CORE_LIMIT)),
    "signal": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # for its os.fork()
def test_only_what_a_running_process_cannot_change_asks_for_another_template() -> None:
    kept = {}
    for name, change in {**ASKS_FOR_ANOTHER_TEMPLATE, **IS_TAKEN_OVER}.items():
        pid = os.fork()
        if not pid:
            code = 2
            with suppress(BaseException):
                before = identity()
                change()
                code = int(identity() == before)
            os._exit(code)
        kept[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    expected = dict.fromkeys(ASKS_FOR_ANOTHER_TEMPLATE, 0) | dict.fromkeys(IS_TAKEN_OVER, 1)
    assert kept == expected


# The same results ------------------------------------------------------------------------------

_LENGTH = 9

_WAS_SPAWNED = gc.get_freeze_count() == 0
"""Whether this worker imported torch by itself. The template froze what it had imported, which is
about all that tells the two apart."""


class StartedEnv(gymnasium.Env):
    """Draws from every generator there is, and shows whether its process was spawned."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step = 0
        return self._shown(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._shown(action), float(self._step), self._step == _LENGTH, False, {}

    def _shown(self, action: int) -> Any:
        legacy = np.random.normal()  # noqa: NPY002 (the one that all share)
        drawn = self.np_random.normal(), legacy, torch.rand(()).item()
        return np.array([_WAS_SPAWNED, action, *drawn], np.float32)


class GeneratorAgent(rlpool.Agent):
    """Chooses by torch's own generator."""

    def __call__(self, state: Any, observation: DictTensor, *_: Any) -> Any:
        action = torch.randint(2, (observation.n_elems(),))
        return DictTensor(), DictTensor({"action": action}), DictTensor()


def create_env(seed: int) -> GymEnv:
    return GymEnv([StartedEnv(), StartedEnv()], seed)


def create_limited() -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(StartedEnv(), _LENGTH)


def collected(owner: type, n_threads: int, **arguments: Any) -> torch.Tensor:
    n_slots = 7 if owner is EpisodeBatcher else None
    with owner(
        _LENGTH, n_slots, GeneratorAgent, {}, create_env, {}, n_threads, seeds=3, **arguments
    ) as batcher:
        if owner is Batcher:
            batcher.reset()
        batcher.execute(*[7] * (owner is EpisodeBatcher))
        return torch.as_tensor(batcher.get()["frame"]).clone()


def steps(**arguments: Any) -> torch.Tensor:
    with rlpool.make_parallel_env(create_limited, 2, 2, seed=3, **arguments) as manager:
        manager.reset()
        shown = [manager.current["frame"].copy()]
        for t in range(5):
            manager.step_lanes([0, 1], {"action": np.array([t % 2, 1])})
            shown.append(manager.current["frame"].copy())
    return torch.as_tensor(np.stack(shown, 1))


def test_results_are_the_same_bits_however_workers_start() -> None:
    # One worker: else what its own generators give is a matter of who comes first.
    for collect in (partial(collected, EpisodeBatcher, 1), steps):
        forked, spawned = collect(start_method="auto"), collect(start_method="spawn")
        assert not (forked[:, :, 0] == 1).any()
        assert (spawned[:, 0, 0] == 1).all()
        assert torch.equal(forked[:, :, 1:], spawned[:, :, 1:])
    assert not (collected(Batcher, 2)[:, :, 0] == 1).any()  # the template is the default


DOORS: dict[str, Callable[..., Any]] = {
    "EpisodeBatcher": partial(EpisodeBatcher, 4, 6, GeneratorAgent, {}, create_env, {}, 0),
    "Batcher": partial(Batcher, 4, None, GeneratorAgent, {}, create_env, {}, 0),
    "Pool": partial(Pool, pool_size=10),
    "Pool of environments": partial(Pool, [StartedEnv()], pool_size=10),
    "ParallelEnvManager": partial(ParallelEnvManager, [StartedEnv]),
    "make_parallel_env": partial(rlpool.make_parallel_env, create_limited, 2, 1),
}


def test_what_is_no_start_method_is_refused() -> None:
    for name, opened in DOORS.items():
        for value in ("fork", "", None, 1, ["spawn"]):
            with pytest.raises(SpecError, match="should be 'auto' or 'spawn', got") as caught:
                opened(start_method=value)
            assert repr(value) in str(caught.value), name
    for name in list(DOORS)[:3]:  # which start no process
        for value in ("auto", "spawn"):
            DOORS[name](start_method=value).close()
