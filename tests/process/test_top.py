"""``python -m rlpool top`` of programs with worker processes."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process.watching import Script, Struck, wait_until

import rlpool
from rlpool import EpisodeBatcher, ParallelEnvManager
from rlpool.machine.platform import has_ended
from rlpool.observe import top

from support.envs import CountingEnv
from support.faults import create_agent, create_env

pytestmark = [
    pytest.mark.usefixtures("no_shared_memory_left", "short_patience", "short_looks"),
    pytest.mark.timeout(180),
]

HANGING_ROW, HANGING_STEP = 3, 2

PROGRAM = f"""
import sys
from rlpool import EpisodeBatcher
from support.faults import create_agent, create_env, faults_at

if __name__ == "__main__":
    arguments = 16, 16, create_agent, {{}}, create_env, {{"n_lanes": 2, "struck_at": sys.argv[1]}}
    with EpisodeBatcher(*arguments, 2, 1, timeout=None) as batcher:
        batcher.execute(6, env_info=faults_at(6, {HANGING_ROW}, "hang", {HANGING_STEP}))
        batcher.get()
"""


@pytest.fixture
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observe for less than half a second."""
    monkeypatch.setattr(top, "EVERY_S", 0.05)


def test_a_running_program_is_found_by_its_pid(
    tmp_path: Path, struck: Struck, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = Script(tmp_path / "run", [str(tmp_path / "program.py"), struck.path])
    try:
        wait_until(lambda: struck.is_there or program.returncode is not None)
        assert program.returncode is None, program.stderr

        (stats,) = top.Program(program.pid).read()
        assert (stats.pid, stats.name) == (program.pid, "EpisodeBatcher")
        assert [worker.state for worker in stats.workers] == ["alive", "alive"]
        (hanging,) = (worker for worker in stats.workers if worker.pid == struck.pid)
        assert hanging.rss_bytes > 0
        lanes = [lane for lane in hanging.lanes if lane.episode == HANGING_ROW]
        assert [(lane.state, lane.step) for lane in lanes] == [("running", HANGING_STEP)]
        (request,) = stats.requests
        assert (request.number, request.n_episodes) == (1, 6)
        assert request.n_finished < 6

        assert program.pid in top.programs()
        assert top.main([]) == 0
        assert f"{program.pid}  {sys.executable}" in capsys.readouterr().out
        assert top.main([str(program.pid), "--once"]) == 0
        text = capsys.readouterr().out
        assert f"EpisodeBatcher of process {program.pid}" in text
        assert f"{HANGING_ROW}:{HANGING_STEP}" in text
        assert top.main([str(struck.pid), "--once"]) == 1
        assert "has no batcher and no ParallelEnvManager" in capsys.readouterr().err

        os.kill(program.pid, signal.SIGSTOP)  # deaths are no longer detected
        os.kill(struck.pid, signal.SIGKILL)
        watched = top.Program(program.pid)
        wait_until(lambda: "dead" in {w.state for w in watched.read()[0].workers})

        os.killpg(program.pid, signal.SIGKILL)
        wait_until(
            lambda: has_ended(program.pid)
        )  # and its parent, this process, has not reaped it
        with pytest.raises(rlpool.UsageError, match=f"process {program.pid}"):
            watched.read()
        assert top.main([str(program.pid), "--once"]) == 1
        assert f"process {program.pid} does not exist" in capsys.readouterr().err
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        wait_until(lambda: program.returncode is not None)


def test_the_table_has_a_row_per_worker_and_is_refreshed_until_the_program_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending(top.Program):
        n_looks = 0

        def read(self) -> Any:
            self.n_looks += 1
            if self.n_looks > 3:
                raise rlpool.UsageError("it has ended", fix="none")
            return super().read()

    with EpisodeBatcher(8, 64, create_agent, {}, create_env, {"n_lanes": 3}, 0, 1):
        assert top.main([str(os.getpid()), "--once"]) == 0
        _, heading, row, *_ = capsys.readouterr().out.splitlines()
        monkeypatch.setattr(top, "Program", Ending)
        assert top.main([str(os.getpid())]) == 1
    assert heading.split() == list(top._COLUMNS)
    assert row.split()[:2] == ["0", str(os.getpid())]
    out, err = capsys.readouterr()
    assert out.count("EpisodeBatcher of process") > 1
    assert "it has ended" in err


def test_a_managers_workers_are_listed() -> None:
    with ParallelEnvManager([CountingEnv] * 3, seed=1, envs_per_worker=2) as manager:
        manager.reset()
        stats = manager.stats()
        assert (stats.name, len(stats.workers), stats.requests) == ("ParallelEnvManager", 2, ())
        assert [worker.state for worker in stats.workers] == ["alive", "alive"]
        assert {worker.pid for worker in stats.workers} == {w.pid for w in manager.workers}
        manager.step_lanes([0, 2], {"action": np.zeros(3, np.int64)})
        assert manager.stats().n_steps == 2
