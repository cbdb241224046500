"""Workers die and are replaced; the caller gets the bits that it would have got without."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from process.watching import is_running, wait_until, worker_pids

from rlpool import (
    Batcher,
    DictTensor,
    EnvError,
    EpisodeBatcher,
    SpecError,
    TemporalDictTensor,
    WorkerDiedError,
    WorkerTimeoutError,
)
from rlpool.workers import failure_policy as restarts

from support import faults
from support.mortal import (
    RememberingAgent,
    create_unsteady_walks,
    create_walks,
    create_walks_once,
    create_walks_that_end_with_a_full_slot,
)

pytestmark = [pytest.mark.usefixtures("no_shared_memory_left"), pytest.mark.timeout(120)]

GIVEN_UP_S = 60.0
"""Ten starts that fail, with growing delays, take less than this."""

CLOSE_S = 7.0
"""close() takes less than this even if a worker has to be killed."""

Results = list[TemporalDictTensor]
Marks = Callable[[], str]


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    """Makes directories for marks."""
    made: list[Path] = []

    def make() -> str:
        made.append(tmp_path / f"marks_{len(made)}")
        made[-1].mkdir()
        return str(made[-1])

    return make


def n_processes(marks: str) -> int:
    """Processes in which environments were reset."""
    return len(list(Path(marks).glob("pid-*")))


def assert_same(mine: Results, theirs: Results) -> None:
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert list(one.keys()) == list(other.keys())
        assert torch.equal(one.lengths, other.lengths)
        for key in one.keys():  # noqa: SIM118  (not a dict)
            assert torch.equal(one[key], other[key]), key
        for key in one.info:
            assert torch.equal(one.info[key], other.info[key]), key


def open_batcher(marks: str, n_threads: int = 2, **options: Any) -> EpisodeBatcher:
    env_args = {"marks": marks, **options.pop("env_args", {})}
    return EpisodeBatcher(
        n_timesteps=4,
        n_slots=options.pop("n_slots", 24),
        create_agent=options.pop("create_agent", RememberingAgent),
        create_env=create_walks,
        env_args=env_args,
        n_threads=n_threads,
        seeds=11,
        **options,
    )


def collect(batcher: EpisodeBatcher, sizes: tuple[int, ...] = (10, 16, 5)) -> Results:
    """Requests with updates in between, all sent before the first is fetched."""
    first = 0
    for number, size in enumerate(sizes):
        batcher.update(number / 10)
        batcher.execute(
            size,
            agent_info=DictTensor({"offset": torch.arange(size) / 100}),
            env_info=DictTensor({"id": torch.arange(first, first + size)}),
        )
        first += size
    results = [batcher.get() for _ in sizes]
    return [result for result in results if result is not None]


def undisturbed(marks: Marks, **options: Any) -> Results:
    with open_batcher(marks(), 0, **options) as batcher:
        return collect(batcher)


# Episodes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ((4, -1), "sigkill"),  # in a reset
        ((7, 2), "os_exit"),
        ((12, 0), "segfault"),  # in the second request, with another policy than the third
        ((30, 0), "fork_and_sigkill"),  # in the last request
    ],
)
def test_episodes_of_a_dead_worker_are_run_again_with_the_same_bits(
    marks: Marks, caplog: pytest.LogCaptureFixture, place: tuple[int, int], kind: str
) -> None:
    expected = undisturbed(marks)
    mine = marks()
    with open_batcher(mine, env_args={"strikes": {place: kind}}) as batcher:
        before = worker_pids()
        with caplog.at_level(logging.WARNING, "rlpool"):
            results = collect(batcher)
        left = worker_pids() - before
    for pid in left:  # what the environment had forked
        if is_running(pid):
            psutil.Process(pid).kill()
    assert_same(results, expected)
    assert n_processes(mine) == 3
    (record,) = [r for r in caplog.records if r.name == "rlpool"]
    assert "died" in record.getMessage()
    assert f"episode {place[0] % 10 if place[0] < 10 else ''}".strip() in record.getMessage()


def test_many_deaths_in_few_slots_lose_nothing(marks: Marks) -> None:
    # Requests of more episodes than slots, and episodes of more chunks than one.
    strikes = {(3, 2): "sigkill", (9, 5): "os_exit", (14, -1): "sigkill", (22, 0): "sigkill"}
    expected = undisturbed(marks, n_slots=6)
    mine = marks()
    with open_batcher(mine, n_slots=6, env_args={"strikes": strikes}) as batcher:
        assert_same(collect(batcher), expected)
    assert n_processes(mine) == 2 + len(strikes)


def test_what_a_killed_worker_wrote_into_a_full_slot_does_not_show_behind_a_shorter_episode(
    marks: Marks,
) -> None:
    with EpisodeBatcher(
        n_timesteps=4,
        n_slots=4,
        create_agent=RememberingAgent,
        create_env=create_walks_that_end_with_a_full_slot,
        env_args={"marks": marks(), "n_timesteps": 4},
        seeds=3,
    ) as batcher:
        batcher.execute(
            2, env_info=DictTensor({"id": torch.arange(2), "length": torch.full((2,), 4)})
        )
        result = batcher.get()
    assert result is not None
    assert result.lengths.tolist() == [2, 4]
    for key, values in result.items():
        assert not values[0, 2:].any(), key


def test_an_idle_worker_that_dies_is_replaced_by_the_next_request(marks: Marks) -> None:
    expected = undisturbed(marks)
    with open_batcher(marks()) as batcher:
        results = []
        first = 0
        for number, size in enumerate((10, 16, 5)):
            there = sorted(worker_pids())  # one, if the other could do all of the last request
            victim = there[number % len(there)]
            psutil.Process(victim).kill()
            wait_until(lambda pid=victim: not is_running(pid))
            batcher.update(number / 10)
            batcher.execute(
                size,
                agent_info=DictTensor({"offset": torch.arange(size) / 100}),
                env_info=DictTensor({"id": torch.arange(first, first + size)}),
            )
            results.append(batcher.get())
            first += size
    assert_same([r for r in results if r is not None], expected)


@contextmanager
def signals_for(seconds: float) -> Iterator[Callable[[], bool]]:
    """Send workers signals at random for so long; gives what tells whether that goes on."""
    rng = random.Random(7)
    sent: list[int] = []

    def strike_again_and_again() -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            time.sleep(rng.uniform(0.05, 0.3))
            there = sorted(worker_pids())  # none where all wait for their restarts
            with contextlib.suppress(IndexError, ProcessLookupError):
                number = rng.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV))
                os.kill(rng.choice(there), number)
                sent.append(number)

    thread = threading.Thread(target=strike_again_and_again)
    thread.start()
    try:
        yield thread.is_alive
    finally:
        thread.join()
    assert len(sent) > seconds


@pytest.mark.parametrize(("seconds", "n_threads", "n_slots"), [(3, 1, 24), (15, 2, 24), (3, 3, 6)])
def test_workers_that_are_hit_again_and_again_also_while_they_start_lose_nothing(
    marks: Marks,
    seconds: float,
    n_threads: int,
    n_slots: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restarts, "_LONGEST_DELAY_S", 0.2)  # else they are rarely there to be hit
    n_rounds = 0
    args = {"n_slots": n_slots, "env_args": {"step_s": 0.003}}
    with open_batcher(marks(), n_threads, max_restarts=None, **args) as batcher:
        results = []
        with signals_for(seconds) as goes_on:
            while goes_on():
                results += collect(batcher)
                n_rounds += 1
        results += collect(batcher)
    with open_batcher(marks(), 0, n_slots=n_slots) as batcher:
        assert_same(results, [each for _ in range(n_rounds + 1) for each in collect(batcher)])


@pytest.mark.parametrize(
    ("kind", "worked_before"),
    [("reset", True), ("os_exit", True), ("segfault", False), ("segfault", True)],
)
def test_a_start_that_always_fails_is_given_up(
    marks: Marks, kind: str, worked_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_CALM_S", 10.0)
    mine, start_s = marks(), time.monotonic()
    if not worked_before:
        (Path(mine) / "made").touch()

    def collect_once() -> None:
        with EpisodeBatcher(
            n_timesteps=4,
            n_slots=8,
            create_agent=RememberingAgent,
            create_env=create_walks_once,
            env_args={"marks": mine, "kind": kind},
            max_restarts=None,
            on_env_error="restart",
        ) as batcher:
            batcher.execute(4, env_info=DictTensor({"id": torch.arange(4)}))
            batcher.get()

    with pytest.raises(WorkerDiedError, match="times before it was ready") as caught:
        collect_once()
    assert time.monotonic() - start_s < GIVEN_UP_S
    assert len(caught.value.history) - worked_before >= 3


@pytest.mark.parametrize("kind", ["hang", "hold_the_lock"])
def test_a_worker_that_hangs_is_replaced(marks: Marks, kind: str) -> None:
    expected = undisturbed(marks)
    with open_batcher(marks(), timeout=0.5, env_args={"strikes": {(12, 1): kind}}) as batcher:
        assert_same(collect(batcher), expected)


def test_a_budget_that_is_used_up_is_an_error_with_the_failures(marks: Marks) -> None:
    strikes = {(2, step): "sigkill" for step in range(-1, 8)}
    with open_batcher(marks(), 1, max_restarts=1, env_args={"strikes": strikes}) as batcher:
        batcher.execute(
            6, env_info=DictTensor({"id": torch.arange(6), "length": torch.full((6,), 9)})
        )
        with pytest.raises(WorkerDiedError, match="max_restarts") as caught:
            batcher.get()
        with pytest.raises(WorkerDiedError):
            batcher.execute(1)
    error = caught.value
    assert (error.exitcode, error.signal_name) == (-9, "SIGKILL")
    assert [failure.where.episode for failure in error.history] == [2, 2]
    assert [failure.where.step for failure in error.history] == [0, 0]
    assert error.where.seed is not None


def test_a_hang_is_in_the_history_too(marks: Marks) -> None:
    strikes = {(1, 0): "hang", (1, 1): "sigkill"}
    with open_batcher(
        marks(), 1, timeout=0.5, max_restarts=1, env_args={"strikes": strikes}
    ) as batcher:
        batcher.execute(
            3, env_info=DictTensor({"id": torch.arange(3), "length": torch.full((3,), 5)})
        )
        with pytest.raises(WorkerDiedError) as caught:
            batcher.get()
    assert [type(failure) for failure in caught.value.history] == [
        WorkerTimeoutError,
        WorkerDiedError,
    ]


def test_an_environment_that_raises_is_reported_unless_restarts_are_asked_for(
    marks: Marks,
) -> None:
    expected = undisturbed(marks)
    with (
        open_batcher(marks(), env_args={"strikes": {(8, 1): "raise"}}) as batcher,
        pytest.raises(EnvError),
    ):
        collect(batcher)
    mine = marks()
    with open_batcher(
        mine, on_env_error="restart", env_args={"strikes": {(8, 1): "raise"}}
    ) as batcher:
        assert_same(collect(batcher), expected)
    assert n_processes(mine) == 3


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("ending", ["none", *faults.ENDINGS])
def test_an_environment_that_raises_and_takes_its_worker_down_is_one_failure(
    marks: Marks, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = "raise_and_die" if ending == "none" else "raise"
    env_args = {"strikes": {(3, 1): kind}, "close_fault": ending}
    with (
        open_batcher(
            marks(), 1, on_env_error="restart", max_restarts=1, timeout=None, env_args=env_args
        ) as batcher,
        caplog.at_level(logging.WARNING, "rlpool"),
    ):
        assert len(collect(batcher)) == 3
    assert len(caplog.records) == 1


def test_an_environment_that_always_raises_uses_up_the_budget(marks: Marks) -> None:
    strikes = {(1, step): "raise" for step in range(8)}
    with open_batcher(
        marks(), 1, on_env_error="restart", max_restarts=1, env_args={"strikes": strikes}
    ) as batcher:
        batcher.execute(
            3, env_info=DictTensor({"id": torch.arange(3), "length": torch.full((3,), 8)})
        )
        with pytest.raises(WorkerDiedError) as caught:
            batcher.get()
    assert [type(failure) for failure in caught.value.history] == [EnvError, EnvError]
    assert "struck" in str(caught.value.__cause__)


# Windows -------------------------------------------------------------------------------------


def windows(
    marks: str, n_threads: int = 2, restarts: bool = True, deaths: bool = False, **options: Any
) -> Results:
    """Windows after each of two resets, with a death between some of them."""
    results = []
    env_args = {"marks": marks, "restarts": restarts, **options.pop("env_args", {})}
    with Batcher(
        n_timesteps=5,
        create_agent=RememberingAgent,
        create_env=create_walks,
        env_args=env_args,
        n_threads=n_threads,
        seeds=5,
        **options,
    ) as batcher:
        for n_reset in range(2):
            n_rows = batcher.n_lanes
            ids = torch.arange(n_rows) + 100 * n_reset
            length = torch.full((n_rows,), 13) + torch.arange(n_rows)
            batcher.reset(
                agent_info=DictTensor({"offset": torch.arange(n_rows) / 100}),
                env_info=DictTensor({"id": ids, "length": length}),
            )
            for number in range(4):
                if batcher.all_stopped:
                    break
                batcher.update(number / 10)
                batcher.execute()
                result = batcher.get()
                assert result is not None
                results.append(result)
                if deaths and number == 1:
                    psutil.Process(sorted(worker_pids())[n_reset]).kill()
    return results


@pytest.mark.parametrize("restarts", [False, True], ids=["episodes end", "episodes restart"])
def test_windows_go_on_after_a_death_with_the_same_bits(marks: Marks, restarts: bool) -> None:
    expected = windows(marks(), restarts=restarts)
    strikes = {(1, 7): "sigkill", (103, -1): "os_exit", (102, 12): "sigkill"}
    mine = marks()
    results = windows(mine, restarts=restarts, env_args={"strikes": strikes})
    assert_same(results, expected)
    assert n_processes(mine) == 2 + len(strikes)


def test_windows_go_on_after_a_death_between_two_of_them(marks: Marks) -> None:
    assert_same(windows(marks(), deaths=True), windows(marks()))


def test_an_environment_that_does_not_repeat_itself_is_told_of(marks: Marks) -> None:
    with Batcher(
        n_timesteps=5,
        create_agent=RememberingAgent,
        create_env=create_unsteady_walks,
        env_args={"marks": marks()},
        n_threads=1,
        seeds=5,
    ) as batcher:
        batcher.reset(env_info=DictTensor({"length": torch.tensor([50])}))
        batcher.execute()
        assert batcher.get() is not None
        psutil.Process(*worker_pids()).kill()
        batcher.execute()
        with pytest.raises(EnvError, match="did not repeat an episode: 'frame'") as caught:
            batcher.get()
        assert (caught.value.where.worker, caught.value.where.lane) == (0, 0)
        batcher.reset()
        batcher.execute()
        assert batcher.get() is not None


def test_windows_of_an_agent_with_history_cannot_be_continued_but_begun_again(
    marks: Marks,
) -> None:
    with Batcher(
        n_timesteps=5,
        create_agent=RememberingAgent,
        agent_args={"wants_history": True},
        create_env=create_walks,
        env_args={"marks": marks(), "restarts": True},
        n_threads=1,
        seeds=5,
    ) as batcher:
        batcher.reset()
        batcher.execute()
        assert batcher.get() is not None
        psutil.Process(*worker_pids()).kill()
        batcher.execute()
        with pytest.raises(WorkerDiedError):
            batcher.get()
        batcher.reset()
        batcher.execute()
        assert batcher.get() is not None


@pytest.mark.parametrize(("kind", "error"), [("raise", EnvError), ("sigkill", WorkerDiedError)])
def test_an_update_outlives_the_windows_that_a_failure_gives_up(
    marks: Marks, kind: str, error: type[Exception]
) -> None:
    env_args = {"marks": marks(), "restarts": True, "strikes": {(0, 6): kind}}
    with Batcher(
        n_timesteps=5,
        create_agent=RememberingAgent,
        agent_args={"wants_history": True},
        create_env=create_walks,
        env_args=env_args,
        n_threads=2,
        seeds=5,
    ) as batcher:
        batcher.reset(env_info=DictTensor({"id": torch.arange(4), "length": torch.full((4,), 50)}))
        batcher.execute()
        batcher.execute()
        batcher.update(0.5)
        batcher.execute()
        assert batcher.get() is not None
        with pytest.raises(error):
            batcher.get()
        batcher.reset()
        batcher.execute()
        window = batcher.get()
    assert window is not None
    assert window["bias"].unique().tolist() == [0.5]
    assert window.info["policy_version"].unique().tolist() == [1]


# Worn workers --------------------------------------------------------------------------------


def test_workers_are_replaced_after_so_many_episodes(marks: Marks) -> None:
    expected = undisturbed(marks)
    mine = marks()
    with open_batcher(mine, max_episodes_per_worker=9, max_restarts=0) as batcher:
        assert_same(collect(batcher), expected)
    assert n_processes(mine) in (4, 5)  # 31 episodes, dealt out to two workers as it comes


def test_a_leaking_environment_stays_bounded(marks: Marks) -> None:
    expected = undisturbed(marks)
    mine = marks()
    with open_batcher(mine, 1, env_args={"leaks": True}) as batcher:
        base = psutil.Process(*worker_pids()).memory_info().rss
    limit = base + 12 * 2**24
    with open_batcher(
        mine, 1, max_rss_bytes=limit, max_restarts=0, env_args={"leaks": True}
    ) as batcher:
        results = collect(batcher)
    assert_same(results, expected)
    assert n_processes(mine) in (3, 4)  # one of them measured the base


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("ending", faults.ENDINGS)
@pytest.mark.parametrize("part", ["env", "agent"])
def test_whatever_a_worn_worker_does_while_it_closes_it_is_replaced_soon_and_without_a_failure(
    part: str, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    with EpisodeBatcher(
        n_timesteps=4,
        n_slots=8,
        create_agent=faults.create_agent,
        agent_args={"close_fault": ending} if part == "agent" else {},
        create_env=faults.create_env,
        env_args={"close_fault": ending} if part == "env" else {},
        max_episodes_per_worker=2,
        max_restarts=0,
        timeout=None,
    ) as batcher:
        with caplog.at_level(logging.WARNING, "rlpool"):
            for _ in range(2):
                batcher.execute(2)
                assert batcher.get() is not None
        assert not caplog.records
        start_s = time.monotonic()
    assert time.monotonic() - start_s < CLOSE_S


@pytest.mark.usefixtures("short_patience")
def test_a_worn_worker_that_hangs_while_it_closes_hands_its_windows_on(marks: Marks) -> None:
    with Batcher(
        n_timesteps=4,
        create_agent=faults.create_agent,
        create_env=faults.create_env,
        env_args={"close_fault": "hang", "restarts": True},
        max_episodes_per_worker=2,
        max_restarts=0,
        timeout=None,
    ) as batcher:
        batcher.reset()
        frames = []
        for _ in range(3):
            batcher.execute()
            frames += batcher.get()["frame"][0, :, 1].tolist()
    assert frames == [0, 1, 2] * 4


def test_a_limit_that_a_fresh_worker_exceeds_is_refused(marks: Marks) -> None:
    with pytest.raises(SpecError, match="max_rss_bytes is 20 MiB, but a worker"):
        open_batcher(marks(), 1, max_rss_bytes=20 * 2**20)


def test_worn_workers_hand_their_windows_on(marks: Marks) -> None:
    mine = marks()
    results = windows(mine, max_episodes_per_worker=4, max_restarts=0)
    assert_same(results, windows(marks()))
    assert n_processes(mine) > 2
