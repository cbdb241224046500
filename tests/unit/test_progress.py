"""Progress while ``get`` waits: what a function is told, bars, lines, and what ends them."""

from __future__ import annotations

import builtins
import itertools
import sys
import threading
import time
from typing import Any

import pytest
import torch

from rlpool import (
    EnvError,
    EpisodeBatcher,
    GymEnv,
    MonoThreadEpisodeBatcher,
    Progress,
    SpecError,
    UsageError,
)
from rlpool.batch import progress as module

from support.agents import NoisyAgent, StepCounter
from support.envs import CountingEnv, FailingEnv


class SlowEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        time.sleep(0.003)
        return super().step(action)


def create_slow(seed: int) -> GymEnv:
    return GymEnv([SlowEnv() for _ in range(2)], seed)


def make(n_threads: int = 0, create_env: Any = create_slow, **options: Any) -> EpisodeBatcher:
    options = {"n_threads": n_threads, "seeds": 0, "env_args": {}, **options}
    options = {"create_agent": StepCounter, "agent_args": {}, **options}
    return EpisodeBatcher(2, 8, create_env=create_env, **options)


@pytest.fixture(autouse=True)
def shown_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpool.batch.progress.SHOW_EVERY_S", 0.005)
    monkeypatch.setattr("rlpool.batch.request_queue.SHOW_EVERY_S", 0.005)


@pytest.mark.parametrize("n_threads", [0, 2])
@pytest.mark.parametrize("n_episodes", [6, 20])  # in place, and in slots that are emptied
def test_a_function_is_told_how_far_it_is(n_threads: int, n_episodes: int) -> None:
    told: list[Progress] = []
    with make(n_threads, progress=told.append) as batcher:
        for _ in range(2):
            told.clear()
            batcher.execute(n_episodes)
            assert batcher.get() is not None
            assert len(told) > 2
            for before, after in itertools.pairwise(told):
                assert after[:1] >= before[:1]
                assert after.n_steps >= before.n_steps
                assert after.elapsed_s > before.elapsed_s
            last = told[-1]
            assert last[:3] == (n_episodes, n_episodes, 3 * n_episodes)
            assert any(0 < progress.n_steps < last.n_steps for progress in told)
            assert last.steps_per_s == pytest.approx(
                (last.n_steps - told[0].n_steps) / last.elapsed_s
            )
        told.clear()
        batcher.execute(2)
        assert batcher.get(progress=False) is not None
        assert told == []


def test_without_workers_get_is_told_meanwhile_how_far_it_is_without_waiting() -> None:
    told: list[Progress] = []
    with make() as batcher:
        batcher.execute(6)
        assert batcher.get(False, progress=told.append) is not None
    assert told[0].n_steps == told[0].elapsed_s == 0
    assert len(told) > 2
    assert told[-1].n_steps == 18
    assert told[-1].elapsed_s >= 9 * 0.003  # of two lanes


def test_looks_without_waiting_go_on_with_the_same_bar() -> None:
    told: list[Progress] = []
    with make(1) as batcher:
        batcher.execute(6)
        while batcher.get(False, progress=told.append) is None:
            time.sleep(0.005)
    assert 3 <= len(told) < 30
    assert [p.elapsed_s for p in told] == sorted(p.elapsed_s for p in told)
    assert told[-1].n_finished == 6


@pytest.mark.parametrize("n_threads", [0, 1])
def test_what_the_function_raises_comes_out_of_get(n_threads: int) -> None:
    def fail(progress: Progress) -> None:
        raise ZeroDivisionError

    with make(n_threads) as batcher:
        batcher.execute(3)
        with pytest.raises(ZeroDivisionError):
            batcher.get(progress=fail)
        assert batcher.get(progress=True) is not None


@pytest.mark.parametrize("n_threads", [0, 1])
def test_a_request_that_is_complete_stays_complete_until_it_is_handed_out(n_threads: int) -> None:
    def fail(progress: Progress) -> None:
        if progress.n_finished == 3:
            raise ZeroDivisionError

    with make(n_threads) as batcher:
        batcher.execute(3)
        batcher.execute(2)
        while batcher.progress[0] < 3:  # without workers this runs it
            time.sleep(0.005)
        with pytest.raises(ZeroDivisionError):
            batcher.get(progress=fail)
        assert batcher.progress == (3, 3)
        assert batcher.get() is not None
        assert batcher.progress[1] == 2


@pytest.mark.parametrize("n_episodes", [6, 20])  # in place, and in slots that are emptied
@pytest.mark.parametrize("n_finished", [0, 1, 5])
def test_a_function_that_raises_in_the_middle_loses_no_episode(
    n_finished: int, n_episodes: int
) -> None:
    def fail(progress: Progress) -> None:
        if progress.n_steps and progress.n_finished >= n_finished:
            raise ZeroDivisionError

    with make(create_agent=NoisyAgent) as undisturbed:
        undisturbed.execute(n_episodes)
        undisturbed.execute(3)
        expected = [undisturbed.get(), undisturbed.get()]
    with make(create_agent=NoisyAgent) as batcher:
        batcher.execute(n_episodes)
        batcher.execute(3)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                batcher.get(progress=fail)
        found = [batcher.get(), batcher.get()]
    for one, other in zip(expected, found, strict=True):
        assert one is not None
        assert other is not None
        assert one.keys() == other.keys()
        assert torch.equal(one.lengths, other.lengths)
        for key in one:
            assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("n_threads", [0, 1])
@pytest.mark.parametrize("blocking", [True, False])
def test_the_function_may_look_at_the_batcher_but_not_wait_for_it(
    n_threads: int, blocking: bool
) -> None:
    looks: list[tuple[int, int]] = []
    told: list[tuple[int, int]] = []

    def look(progress: Progress) -> None:
        told.append(progress[:2])
        looks.append(batcher.progress)
        with pytest.raises(UsageError, match="inside the function that shows its progress"):
            batcher.get()

    with make(n_threads) as batcher:
        batcher.execute(3)
        while batcher.get(blocking, progress=look) is None:
            time.sleep(0.005)
    assert looks[-1] == told[-1] == (3, 3)
    if n_threads == 0:  # looking runs nothing
        assert looks == told
        assert looks[0] == (0, 3)
        assert len(looks) > 2


class Ends:
    """Stands for a class of tqdm's bars."""

    made: list[Ends]

    def __init__(self, **options: Any) -> None:
        self.options, self.is_closed, self.n = options, False, 0
        self.made.append(self)

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def refresh(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("raised", "error"), [(KeyboardInterrupt(), KeyboardInterrupt), (KeyError("goal"), EnvError)]
)
def test_a_bar_is_closed_however_get_ends(
    raised: BaseException, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_env(seed: int) -> GymEnv:
        return GymEnv([FailingEnv(raised, fails_at=1)], seed)

    monkeypatch.setattr("tqdm.tqdm", Ends)
    Ends.made = []
    with make(create_env=create_env, progress=True) as batcher:
        batcher.execute(3, env_info={"id": [0, 0, 1]})
        with pytest.raises(error):
            batcher.get()
    (bar,) = Ends.made
    assert bar.is_closed
    assert bar.options["total"] == 3
    assert "steps/s" in bar.text


def test_a_bar_starts_no_thread_and_writes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    with MonoThreadEpisodeBatcher(StepCounter, {}, create_slow, progress=True) as batcher:
        batcher.execute(4)
        batcher.get()
    out, err = capfd.readouterr()
    assert threading.active_count() == threads
    assert out == ""
    assert "4/4" in err
    assert "steps/s" in err


@pytest.mark.parametrize("is_terminal", [False, True])
def test_without_tqdm_there_is_a_line(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_import = builtins.__import__

    def import_all_but_tqdm(name: str, *arguments: Any) -> Any:
        if name == "tqdm":
            raise ImportError
        return real_import(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", import_all_but_tqdm)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    with make(progress=True) as batcher:
        batcher.execute(4)
        batcher.get()
    err = capsys.readouterr().err
    assert err.rstrip().rpartition("\r")[2].startswith("4/4 episodes, 12 steps in ")
    assert ("\r" in err) == is_terminal
    assert err.count("\n") == 1


def test_a_stderr_that_is_closed_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Bar, "made", lambda: None)
    monkeypatch.setattr(sys, "stderr", None)
    with make(progress=True) as batcher:
        batcher.execute(4)
        assert batcher.get() is not None


def test_anything_else_is_refused_before_workers_start() -> None:
    with pytest.raises(SpecError, match="progress should be True, False or a function, got 'bar'"):
        make(1, progress="bar")
    with make() as batcher:
        batcher.execute(2)
        with pytest.raises(SpecError, match="progress should be"):
            batcher.get(progress=3)  # type: ignore[arg-type]
        assert batcher.get() is not None
