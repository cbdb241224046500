"""Every fault in every phase and job: the right error or identical results, nothing left behind.

Faults strike in a phase of a worker's life: while it is created, in a reset, a step or an agent
call, in an update, or while it closes. Jobs are requests for episodes, windows, and commands of
a manager. The expected outcome depends on the policy:

- ``"raise"``: failures of workers promptly raise errors that report where.
- ``"default"``: an episode that fails again raises an error for its own request only.
- ``"restart"``: a fault that strikes once costs time, but results are bit-identical.
- ``"truncate"``: an episode that fails again ends there, and the others are unaffected.

A default run covers all pairs of values; ``-m slow`` runs the remaining cells.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from process.watching import assert_equal, is_running, n_descriptors, wait_until, worker_pids

from rlpool import (
    AgentError,
    AgentSpecError,
    Batcher,
    EnvError,
    EnvSpecError,
    EpisodeBatcher,
    GymEnv,
    ParallelEnvManager,
    UsageError,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
    WorkerTimeoutError,
    replay,
)
from rlpool.workers import worker_process

from support.faults import DEATHS, RAISES, WRONG, WRONG_STEPS, faults
from support.fragile import (
    assert_same_rows,
    create_fragile,
    create_fragile_agent,
    failing,
    make_fragile,
    played,
)
from support.variants import variants

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left", "short_patience"),
    pytest.mark.timeout(120),
    pytest.mark.promise("I1"),
    pytest.mark.promise("I3"),
    pytest.mark.promise("I4"),
]

REPORT_S = 4.0
"""A fault surfaces within this time, hangs within ``TIMEOUT_S`` more."""

CLOSE_S = 7.0
"""close() takes less than this even if a worker has to be killed."""

TIMEOUT_S = 0.5
"""``timeout`` where workers hang, many times what healthy ones take for a step."""

ALWAYS = 1_000  # times that a fault strikes

SIZES = (6, 12, 5)
"""Episodes of the requests; one of the second is struck."""


class Place(NamedTuple):
    row: int
    step: int


PLACES = {"episodes": Place(7, 5), "windows": Place(3, 7), "commands": Place(1, 2)}
"""Place of the fault: a row of the second request, a lane of windows, a lane of a manager."""


class Cell(NamedTuple):
    """A fault, its phase, its job, and the failure policy."""

    kind: str
    phase: str
    job: str
    policy: str

    @property
    def place(self) -> Place:
        return PLACES[self.job.partition(" ")[0]]

    @property
    def step(self) -> int:
        return -1 if self.phase == "reset" else self.place.step

    @property
    def is_wrong(self) -> bool:
        """Whether the fault is a wrong result rather than a failure."""
        return self.kind in (*WRONG, *WRONG_STEPS)

    @property
    def is_survived(self) -> bool:
        """Whether the worker survives."""
        return self.is_wrong or self.kind in RAISES

    @property
    def hangs(self) -> bool:
        return not self.is_survived and self.kind not in (*DEATHS, "fork_and_sigkill")

    @property
    def error(self) -> type[WorkerError] | None:
        """Expected error; ``None`` if the fault costs only time or the rest of an episode."""
        if self.phase.startswith("close"):
            return None
        if self.is_wrong:
            return AgentSpecError if self.phase == "agent" else EnvSpecError
        if self.is_survived:
            if self.phase in ("reset", "step"):
                is_here = self.job.endswith("here")  # nothing is rerun in the caller's process
                raises = self.policy in ("raise", "default") or (
                    self.policy == "restart" and is_here
                )
                return EnvError if raises else None
            return WorkerStartupError if self.phase.startswith("create") else AgentError
        if self.policy == "default" and self.phase.startswith("create"):
            return WorkerDiedError  # after so many attempts
        if self.policy in ("raise", "default"):
            return WorkerTimeoutError if self.hangs else WorkerDiedError
        return None

    def makes_sense(self) -> bool:
        if self.job == "commands" and self.phase in (
            "create_agent",
            "agent",
            "update",
            "close_agent",
        ):
            return False
        if self.job.endswith("here") and self.kind != "raise":
            return False
        if self.policy == "truncate":
            return self.phase in ("reset", "step")
        if (self.phase, self.policy) == ("update", "default"):
            return self.job == "episodes here"  # else the update ends each successor as well
        return self.policy != "restart" or not self.phase.startswith("close")

    def hits(self, phases: tuple[str, ...]) -> dict[int, tuple[str, int]]:
        """Return the argument ``hits`` of ``faults``."""
        return {self.place.row: (self.kind, self.step)} if self.phase in phases else {}


PHASES = (
    *("create_env", "create_agent", "reset", "step", "agent", "update", "close_env"),
    "close_agent",
)
JOBS = ("episodes", "episodes here", "windows", "commands")
POLICIES = ("raise", "default", "restart", "truncate")
CELLS = [
    cell
    for cell in itertools.starmap(
        Cell, itertools.product(("raise", *DEATHS, "stop"), PHASES, JOBS, POLICIES)
    )
    if cell.makes_sense()
]
ODD = [
    Cell("fork_and_sigkill", "step", "episodes", "restart"),  # its child inherits all descriptors
    Cell("hold_the_lock", "step", "commands", "raise"),
    Cell("hang", "close_agent", "episodes", "raise"),
    Cell("hang", "agent", "episodes", "raise"),
    *(Cell(kind, "step", "episodes", "raise") for kind in (*RAISES, "wrong_dtype")),
    *(Cell(kind, "step", "episodes here", "raise") for kind in (*WRONG, *WRONG_STEPS)),
    *(Cell(kind, "agent", "episodes", "default") for kind in (*RAISES, *WRONG)),
    *(Cell(kind, "step", "commands", "raise") for kind in ("unpicklable", "wrong_reward")),
    *(Cell("wrong_shape", "reset", job, "default") for job in PLACES),
]


def pairwise(cells: list[Cell]) -> list[Cell]:
    """Return a subset of the cells that covers every pair of values."""
    pairs = {cell: set(itertools.combinations(enumerate(cell), 2)) for cell in cells}
    left, chosen = set.union(*pairs.values()), []
    while left:
        chosen.append(max(cells, key=lambda cell: len(pairs[cell] & left)))
        left -= pairs[chosen[-1]]
    return chosen


# Jobs -------------------------------------------------------------------------------------------


def opened(cell: Cell, marks: str | None) -> Any:
    """Open the object that does the job; without ``marks`` nothing fails."""
    common = {"marks": marks, "times": 1 if cell.policy == "restart" else ALWAYS}
    env_args, agent_args = dict(common), dict(common)
    when, _, what = cell.phase.partition("_")
    if what and marks is not None:
        struck = env_args if what == "env" else agent_args
        struck["fault" if when == "create" else "close_fault"] = cell.kind
    options: dict[str, Any] = {
        "raise": {"on_worker_failure": "raise"},
        "default": {},
        "restart": {"on_env_error": "restart", "max_restarts": 2 if cell.job == "windows" else 1},
        "truncate": {"on_env_error": "truncate"},
    }[cell.policy]
    options["timeout"] = TIMEOUT_S if cell.hangs else 60.0
    if cell.job == "commands":
        if marks is None:
            return GymEnv([make_fragile() for _ in range(3)], 1, info_keys={"t": int})
        make = partial(make_fragile, **env_args)
        options |= {"envs_per_worker": 2, "seed": 1, "info_keys": {"t": int}}
        return ParallelEnvManager([make] * 3, **options)
    # An agent is called with all lanes at once, so an error cannot be attributed to one row.
    env_args["n_lanes"] = 1 if cell.phase == "agent" and cell.job != "windows" else 2
    if cell.job == "windows":
        arguments = 5, None, create_fragile_agent, agent_args, create_fragile
        return Batcher(*arguments, {**env_args, "restarts": True}, 2, 5, **options)
    n_workers = 0 if marks is None or cell.job == "episodes here" else 2
    arguments = 4, 24, create_fragile_agent, agent_args, create_fragile
    return EpisodeBatcher(*arguments, env_args, n_workers, 11, **options)


def done(here: Any, cell: Cell, is_struck: bool = True) -> list[Any]:
    """Do the job and return everything observed."""
    env_hits = cell.hits(("reset", "step")) if is_struck else {}
    agent_hits = cell.hits(("agent",)) if is_struck else {}
    update = cell.kind if is_struck and cell.phase == "update" else "none"
    if cell.job == "commands":
        return played(here, failing(*env_hits[1]) if env_hits else {})
    results = []
    if cell.job == "windows":
        n = here.n_lanes
        here.reset(
            faults(n, agent_hits, gain=1 + torch.arange(n) / 100),
            faults(n, env_hits, length=13 + torch.arange(n)),
        )
        for number in range(4):
            here.update((update if number == 1 else "none", number / 10))
            here.execute()
            results.append((here.get(), here.failures))
        return results
    for number, n in enumerate(SIZES):
        here.update((update if number == 1 else "none", number / 10))
        is_hit = number == 1
        here.execute(
            n,
            faults(n, agent_hits if is_hit else {}, gain=1 + torch.arange(n) / 100),
            faults(n, env_hits if is_hit else {}, length=1 + torch.arange(n) % 8),
        )
    return [(here.get(), here.failures) for _ in SIZES]


def assert_continues(here: Any, cell: Cell) -> None:
    """Check that only a failed worker that is not replaced ends the job."""
    if cell.policy == "raise" and not cell.is_survived and cell.error is not None:
        with pytest.raises(cell.error):
            assert_works(here, cell)
    else:
        assert_works(here, cell)


def assert_closes(here: Any) -> None:
    """Close twice, in bounded time."""
    start_s = time.monotonic()
    here.close()
    assert time.monotonic() - start_s < CLOSE_S
    here.close()
    with pytest.raises(UsageError):
        here.reset() if hasattr(here, "reset") else here.execute(1)


def assert_works(here: Any, cell: Cell) -> None:
    """Check that pending requests end and the next ones are as if nothing had happened."""
    if cell.job == "windows":
        n = here.n_lanes
        here.update(("none", 0.0))  # the last one may have failed, and would fail again
        here.reset(faults(n, {}, gain=1.0), faults(n, {}, length=3))
        here.execute()
        assert here.get().lengths.tolist() == [5] * n
        assert not here.failures
        return
    if cell.job.startswith("episodes"):
        while here.n_pending:
            here.get()
        here.seek(0)
    got = done(here, cell, is_struck=False)
    with contextlib.closing(opened(cell, None)) as twin:
        assert_same(got, done(twin, cell, is_struck=False), cell, is_later=True)


def assert_same(got: list[Any], expected: list[Any], cell: Cell, is_later: bool = False) -> None:
    """Check that everything is bit-identical; later results differ in the number of updates."""
    if cell.job == "commands":
        assert_same_rows(got, expected)
        return
    for (mine, failures), (theirs, _) in zip(got, expected, strict=True):
        if is_later:
            mine.info.set("policy_version", theirs.info["policy_version"])
        assert_equal(mine, theirs)
        assert not failures


def assert_truncated(got: list[Any], whole: list[Any], cell: Cell) -> None:
    """Check that the episode ends with the failing step and the others are unaffected."""
    row, n_steps = cell.place.row, max(cell.step, 0) + 1
    if cell.job == "commands":
        at = 5 + n_steps - 1
        mine, theirs = got[at], whole[at]
        assert mine["failed"].tolist() == mine["truncated"].tolist() == [False, True, False]
        assert mine["reward"][1] == 0.0
        assert not mine["terminated"][1]
        got[5:10] = [{key: array[[0, 2]] for key, array in each.items()} for each in got[5:10]]
        whole[5:10] = [{key: array[[0, 2]] for key, array in each.items()} for each in whole[5:10]]
        assert_same_rows(got, whole)
        return
    columns: dict[str, list[Any]] = {key: [] for key in (*got[0][0].keys(), "whole")}
    for number, ((mine, failures), (theirs, _)) in enumerate(zip(got, whole, strict=True)):
        others = [k for k in range(len(mine.lengths)) if k != row]
        is_hit = cell.job == "windows" or number == 1
        if not is_hit:
            assert_equal(mine, theirs)
            continue
        assert mine.lengths[others].tolist() == theirs.lengths[others].tolist()
        for key in theirs:
            longest = int(mine.lengths[others].max())
            assert torch.equal(mine[key][others, :longest], theirs[key][others, :longest]), key
        n_failed = int(mine["_truncated"][row].sum())
        assert mine.info["failed"].nonzero().flatten().tolist() == [row] * (n_failed > 0)
        assert [error.where.row for error in failures] == [row] * (n_failed > 0)
        assert None not in [error.where.seed for error in failures]
        n = int(mine.lengths[row])
        for key in mine:
            columns[key].append(mine[key][row, :n])
        columns["whole"].append(theirs["frame"][row, :n])
    struck = {key: torch.cat(values) for key, values in columns.items()}
    is_last = torch.arange(len(struck["_done"])) % n_steps == n_steps - 1
    assert is_last.any()
    if cell.job != "windows":
        assert len(is_last) == n_steps
    assert torch.equal(struck["_truncated"], is_last)
    assert torch.equal(struck["_done"], is_last)
    assert not struck["_terminated"].any()
    assert (struck["_reward"][is_last] == 0).all()
    assert torch.equal(struck["_frame"][is_last], struck["frame"][is_last])
    assert torch.equal(struck["frame"][: n_steps - 1], struck["whole"][: n_steps - 1])


def assert_reported(error: WorkerError, cell: Cell) -> None:
    """Check the class of an error, its place, its cause, and its pickle."""
    assert isinstance(error, cell.error or ())
    assert isinstance(error, EnvSpecError | AgentSpecError) == cell.is_wrong
    where = error.where
    assert where.worker in (0, 1)
    if cell.phase in ("reset", "step", "agent"):
        is_first = cell.phase == "agent" and (cell.job != "windows" or cell.is_survived)
        row = cell.place.row - (is_first and cell.job == "windows")
        assert where.row == (None if cell.job == "commands" else row)
        assert where.step == max(cell.step, 0)
        assert where.lane == (0 if is_first else 1)
        assert where.seed is not None
        assert where.env_info is not None
        replayed = replay(make_fragile, error)  # where it does not fail
        n_steps = where.step + (cell.phase == "step")
        assert len(error.actions) == replayed.n_steps == n_steps, error.actions
    if isinstance(error, WorkerDiedError) and not cell.hangs and cell.kind in DEATHS:
        assert (error.exitcode, error.signal_name) == DEATHS[cell.kind]
    if cell.kind in (*RAISES, "hang"):  # where it raised, and the stack that it was in
        assert "strike" in "".join(traceback.format_exception(error.__cause__))
    if cell.policy == "default" and cell.phase.startswith("create") and cell.kind != "raise":
        assert len(error.history) >= 3
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.where) == (type(error), str(error), where)


@pytest.fixture
def no_stacks_of_the_stopped(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Do not wait for stacks of stopped workers, which write none."""
    return lambda: monkeypatch.setattr(worker_process, "_STACKS_S", 0.05)


@pytest.mark.parametrize(
    ("kind", "phase", "job", "policy"), variants([*pairwise(CELLS), *ODD], CELLS)
)
def test_a_fault_raises_or_costs_only_time_or_one_episode(
    kind: str,
    phase: str,
    job: str,
    policy: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    no_stacks_of_the_stopped: Callable[[], None],
) -> None:
    cell, before = Cell(kind, phase, job, policy), worker_pids()
    if kind == "stop":
        no_stacks_of_the_stopped()
    caplog.set_level(logging.WARNING, "rlpool")
    with contextlib.ExitStack() as stack:

        def live() -> list[Any]:
            here = opened(cell, str(tmp_path))
            stack.callback(assert_closes, here)
            stack.callback(assert_continues, here, cell)
            return done(here, cell)

        if cell.error is not None:
            with pytest.raises(WorkerError) as caught:
                live()
            struck_s = max(path.stat().st_mtime for path in tmp_path.iterdir())
            assert time.time() - struck_s < REPORT_S + (TIMEOUT_S if cell.hangs else 0.0)
            assert_reported(caught.value, cell)
        else:
            got = live()
            with contextlib.closing(opened(cell, None)) as twin:
                whole = done(twin, cell)
            (assert_truncated if policy == "truncate" else assert_same)(got, whole, cell)
        if not phase.startswith("close"):
            texts = [path.read_text() for path in tmp_path.iterdir()]
            pids = [
                int(text) for text in texts if text
            ]  # a worker killed before writing it has none
            assert pids
            assert (pids[0] == os.getpid()) == job.endswith("here")
            if policy in ("default", "truncate") and phase in ("reset", "step"):
                is_once = (
                    cell.is_survived or job == "windows"
                )  # the step at which each episode is struck
                assert is_once or len(pids) == 2
            if policy == "restart" and cell.error is None:
                assert not any(map(is_running, pids))
                assert len(caplog.records) == len(pids)
    wait_until(lambda: worker_pids() == before, CLOSE_S)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("job", PLACES)
def test_idle_workers_that_are_killed_or_stopped_are_replaced(
    job: str, tmp_path: Path, no_stacks_of_the_stopped: Callable[[], None]
) -> None:
    no_stacks_of_the_stopped()
    cell, others = Cell("stop", "none", job, "default"), worker_pids()
    with contextlib.closing(opened(cell, str(tmp_path))) as here:
        assert_works(here, cell)
        n_held = n_descriptors()
        for number in (signal.SIGKILL, signal.SIGSTOP):
            assert_works(here, cell)
            os.kill(max(worker_pids() - others), number)
        assert_works(here, cell)
        gc.collect()
        assert n_descriptors() <= n_held + 1  # for one more slot in flight
