"""Traces: files that follow the format, and say what has happened."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from process.watching import n_descriptors

import rlpool
from rlpool import Batcher, EpisodeBatcher, GymEnv, GymEnvInf, SpecError, UsageError
from rlpool.observe.control import living

from support.agents import StepCounter
from support.envs import CountingEnv
from support.traces import TRACE, problems, read_trace


def create_env(seed: int, n_lanes: int = 2) -> GymEnv:
    return GymEnv([CountingEnv() for _ in range(n_lanes)], seed)


def create_restarting(seed: int) -> GymEnv:
    return GymEnvInf([CountingEnv(length=3 + 3 * n) for n in range(2)], seed)


def make(n_timesteps: int = 8, n_slots: int = 16) -> EpisodeBatcher:
    return EpisodeBatcher(
        n_timesteps, n_slots, StepCounter, {}, create_env, {}, n_threads=0, seeds=1
    )


def test_a_request_has_its_episodes_and_their_steps_on_one_clock(tmp_path: Path) -> None:
    lengths = [3, 5, 1, 4, 2]
    with make() as batcher, rlpool.trace(tmp_path / "request.json"):
        batcher.execute(5, env_info={"length": lengths})
        result = batcher.get()
    assert result is not None
    trace = read_trace(tmp_path / "request.json")
    episodes = sorted(trace.complete_episodes, key=lambda span: span["args"]["episode"])
    assert [span["args"]["steps"] for span in episodes] == lengths
    assert [span["args"]["episode"] for span in episodes] == list(range(5))
    assert {span["args"]["request"] for span in episodes} == {1}
    assert [span["args"]["rows"] for span in trace.of("request")] == [5]
    assert len(trace.named("agent")) == len(trace.named("env.step")) > 0
    assert trace.named("env.reset")
    assert [span["name"] for span in trace.of("worker")] == ["alive"]
    assert "caller" in trace.names[os.getpid(), -1]
    assert trace.n_left_out == 0


def test_two_batchers_have_tracks_of_their_own(tmp_path: Path) -> None:
    with make() as first, rlpool.trace(tmp_path / "both.json"), make() as second:
        for batcher in (first, second):
            batcher.execute(4)
            batcher.get()
    trace = read_trace(tmp_path / "both.json")
    assert len(trace.complete_episodes) == 8
    assert len({span["tid"] for span in trace.named("agent")}) == 2


def test_an_episode_longer_than_a_slot_waits_in_the_middle(tmp_path: Path) -> None:
    with make(n_timesteps=2, n_slots=2) as batcher, rlpool.trace(tmp_path / "long.json"):
        batcher.execute(3, env_info={"length": [5, 6, 5]})
        batcher.get()
    trace = read_trace(tmp_path / "long.json")
    assert sorted(span["args"]["steps"] for span in trace.complete_episodes) == [5, 5, 6]
    waits = [span for span in trace.of("wait") if span["name"] == "waits for a slot"]
    assert len(waits) == 2 + 2 + 2  # between the slots of an episode


def test_a_trace_of_the_second_window_knows_what_lanes_had_done_before(tmp_path: Path) -> None:
    options = {"n_threads": 0, "seeds": 1}
    with Batcher(4, create_agent=StepCounter, create_env=create_restarting, **options) as batcher:
        batcher.reset()
        batcher.execute()
        batcher.get()
        with rlpool.trace(tmp_path / "window.json"):
            batcher.execute()
            batcher.get()
    trace = read_trace(tmp_path / "window.json")
    by_lane = {trace.names[s["pid"], s["tid"]]: s["args"] for s in trace.complete_episodes[:2]}
    lengths = {name[-6:]: (args["steps"], args["steps_before"]) for name, args in by_lane.items()}
    assert lengths == {"lane 0": (3, 1), "lane 1": (6, 4)}
    assert [span["args"]["complete"] for span in trace.of("episode")].count(False) == 2


def test_what_does_not_fit_is_left_out_and_counted(tmp_path: Path) -> None:
    with make() as batcher, rlpool.trace(tmp_path / "short.json", max_events=100):
        batcher.execute(200)
        batcher.get()
    trace = read_trace(tmp_path / "short.json")
    assert trace.n_left_out > 0
    assert 0 < len(trace.spans) <= 200  # caller and worker


def test_a_block_that_raises_leaves_a_trace(tmp_path: Path) -> None:
    def collect_and_fail() -> None:
        with rlpool.trace(tmp_path / "raised.json"):
            batcher.execute(3)
            batcher.get()
            raise KeyError

    with make() as batcher, pytest.raises(KeyError):
        collect_and_fail()
    assert len(read_trace(tmp_path / "raised.json").complete_episodes) == 3


def test_outside_of_the_block_nothing_is_noted(tmp_path: Path) -> None:
    with make() as batcher:
        with rlpool.trace(tmp_path / "first.json"):
            batcher.execute(1)
            batcher.get()
        for _ in range(2):
            batcher.execute(3)
            batcher.get()
        assert batcher._dispatcher.control.events is None
        assert batcher._dispatcher._processes._record.events is None
        with rlpool.trace(tmp_path / "second.json"):
            batcher.execute(2)
            batcher.get()
    assert len(read_trace(tmp_path / "first.json").complete_episodes) == 1
    assert len(read_trace(tmp_path / "second.json").complete_episodes) == 2


def test_the_bits_are_those_without_a_trace(tmp_path: Path) -> None:
    results = []
    for path in (None, tmp_path / "bits.json"):
        with make() as batcher:
            if path is None:
                batcher.execute(6)
                results.append(batcher.get())
            else:
                with rlpool.trace(path):
                    batcher.execute(6)
                    results.append(batcher.get())
    for key in results[0]:
        assert (results[0][key] == results[1][key]).all()


def test_one_trace_at_a_time(tmp_path: Path) -> None:
    with rlpool.trace(tmp_path / "one.json"), pytest.raises(UsageError, match="another trace"):
        rlpool.trace(tmp_path / "two.json").__enter__()
    with rlpool.trace(tmp_path / "two.json"):
        pass
    assert read_trace(tmp_path / "two.json").spans == []


@pytest.mark.parametrize("path", [None, 5, b"request.json"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(SpecError, match=f"path is {path!r}"):
        rlpool.trace(path)


@contextmanager
def descriptors_left(n: int | None) -> Iterator[None]:
    """Let the process open only so many more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if n is not None:
        free = [fd for fd in range(soft) if not os.path.exists(f"/proc/self/fd/{fd}")][: n + 1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("file", "max_events", "n_left", "message"),
    [
        ("missing/file.json", 10, None, "No such file.*\n.*choose a file"),
        ("file.json", 10**13, None, "max_events=10{13} .*Cannot allocate.*\n.*lower max_events"),
        ("file.json", 10**30, None, "max_events=10{30} .*\n.*lower max_events"),
        # A batcher takes two descriptors, of which the second is closed when its file is.
        ("file.json", 10, 0, "Too many open files.*\n.*ulimit -n"),
        ("file.json", 10, 1, "Too many open files.*\n.*ulimit -n"),
        ("file.json", 10, 3, "Too many open files.*\n.*ulimit -n"),
        ("file.json", 10, 4, "cannot be written.*Too many open files.*\n.*ulimit -n"),
    ],
)
def test_a_trace_that_cannot_begin_leaves_nothing_behind(
    tmp_path: Path, file: str, max_events: int, n_left: int | None, message: str
) -> None:
    with make() as first, make() as second:
        path, before = tmp_path / file, n_descriptors()
        with descriptors_left(n_left), pytest.raises(SpecError, match=message):
            rlpool.trace(path, max_events=max_events).__enter__()
        assert not path.exists()
        assert n_descriptors() == before
        for batcher in (first, second):
            batcher.execute(1)
            batcher.get()
            assert batcher._dispatcher.control.events is None
        with rlpool.trace(tmp_path / "next.json"), make() as third:
            third.execute(2)
            third.get()
    assert len(read_trace(tmp_path / "next.json").complete_episodes) == 2


def test_a_batcher_within_the_block_is_refused_memory_by_name(tmp_path: Path) -> None:
    many = rlpool.trace(tmp_path / "file.json", max_events=10**13)
    with many, pytest.raises(SpecError, match="lower max_events"):
        make()
    assert read_trace(tmp_path / "file.json").spans == []


def test_a_number_of_events_is_needed(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="max_events"):
        rlpool.trace(tmp_path / "file.json", max_events=0)


def test_a_trace_that_cannot_begin_keeps_the_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("precious")
    with make(), pytest.raises(SpecError, match="lower max_events"):
        rlpool.trace(tmp_path / "file.json", max_events=10**13).__enter__()
    assert (tmp_path / "file.json").read_text() == "precious"


def test_the_file_is_where_the_program_was_when_the_block_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with rlpool.trace("file.json"):
        monkeypatch.chdir("elsewhere")
    assert json.loads((tmp_path / "file.json").read_text())["traceEvents"] == []
    assert not list((tmp_path / "elsewhere").iterdir())


def test_closed_batchers_are_forgotten() -> None:
    before = len(living)
    with make():
        assert len(living) == before + 1
    assert len(living) == before


def test_the_schema_refuses_what_is_none() -> None:
    event = {"name": "a", "cat": "call", "ph": "X", "pid": 1, "tid": 0, "args": {}}
    event |= {"ts": 0, "dur": 1}
    whole = {"displayTimeUnit": "ms", "otherData": {"start_ns": 1, "events_left_out": 0}}
    assert problems({**whole, "traceEvents": [event]}, TRACE) == []
    for broken in ({"dur": -1}, {"ts": "0"}, {"ph": "B"}, {"pid": 1.5}, {"cat": "else"}):
        assert problems({**whole, "traceEvents": [{**event, **broken}]}, TRACE), broken
    del event["dur"]
    assert problems({**whole, "traceEvents": [event]}, TRACE)
