"""Log records of workers reach the caller's loggers, and nothing else does."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpool import (
    DictTensor,
    EpisodeBatcher,
    ParallelEnvManager,
    WorkerDiedError,
    WorkerStartupError,
)

from support.talking import N_FLOOD, QuietAgent, TalkingEnv, create_env

pytestmark = [
    pytest.mark.promise("I9"),
    pytest.mark.usefixtures("no_shared_memory_left"),
    pytest.mark.timeout(60),
]


class Seen(logging.Handler):
    """Handler that keeps log records in the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.react: Callable[[], None] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.react()

    def of(self, name: str) -> list[logging.LogRecord]:
        return [record for record in self.records if record.name == name]

    def messages(self, name: str) -> list[str]:
        return [record.getMessage() for record in self.of(name)]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """Return a handler of all loggers, at level INFO for ``talk`` and WARNING otherwise."""
    handler = Seen()
    levels = {"talk": logging.INFO, "talk.silenced": logging.ERROR}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    talk, root = logging.getLogger("talk"), logging.getLogger()
    talk.propagate = False  # pytest would keep and print a flood
    for logger in (talk, root):
        logger.addHandler(handler)
    yield handler
    for logger in (talk, root):
        logger.removeHandler(handler)
    talk.propagate = True
    for name in levels:
        logging.getLogger(name).setLevel(logging.NOTSET)


def open_batcher(deed: str, directory: Path, n_threads: int = 1, **options: Any) -> EpisodeBatcher:
    return EpisodeBatcher(
        n_timesteps=4,
        n_slots=4,
        create_agent=QuietAgent,
        create_env=create_env,
        env_args={"deed": deed, "directory": str(directory)},
        n_threads=n_threads,
        seeds=3,
        **options,
    )


def begin(batcher: EpisodeBatcher, n_episodes: int = 1) -> None:
    batcher.execute(n_episodes, env_info=DictTensor({"id": torch.arange(n_episodes)}))


CONFIGURES_LOGGING = """
import logging

if __name__ != "__main__":  # a worker imports it
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("talk").addHandler(logging.StreamHandler())
"""


def test_log_records_arrive_once_and_unchanged(
    seen: Seen,
    tmp_path: Path,
    as_main: Callable[[str], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    as_main(CONFIGURES_LOGGING)
    with open_batcher("various", tmp_path) as batcher:
        begin(batcher)
        assert batcher.get() is not None
    assert capfd.readouterr() == ("", "")
    records = seen.of("talk.env")
    step, greeting, extra, failed = records
    assert step.getMessage() == "level 20 of talk"
    assert (step.levelname, step.worker, step.processName) == ("INFO", 0, "rlpool-worker-0")
    assert (step.funcName, step.filename, step.threadName) == (
        *("various", "talking.py"),
        "MainThread",
    )
    assert step.process != logging.makeLogRecord({}).process
    assert greeting.getMessage() == "Grüße 你好 \ud800 🚀\nand a second line"
    assert (extra.episode, extra.values) == (4, "[0 1 2]")
    text = logging.Formatter("%(levelname)s worker %(worker)s %(message)s").format(failed)
    assert text.startswith("ERROR worker 0 it failed\nTraceback (most recent call last):\n")
    assert text.endswith("KeyError: 'the goal'")
    assert seen.messages("talk.closed") == ["closing"]
    assert seen.of("talk.silenced") == seen.of("elsewhere") == []
    (warning,) = seen.messages("py.warnings")
    assert "talking.py" in warning
    assert "UserWarning: a warning" in warning


def test_the_same_warning_from_several_workers_is_issued_once(seen: Seen, tmp_path: Path) -> None:
    make = partial(TalkingEnv, "various", str(tmp_path))
    with ParallelEnvManager([make, make], seed=1) as manager:
        manager.reset_lanes([0, 1], [1, 2], [{"id": 0}, {"id": 1}])
    assert [record.worker for record in seen.of("talk.env")].count(1) == 4
    assert len(seen.of("talk.env")) == 8
    assert len(seen.of("py.warnings")) == 1


def test_the_last_records_of_workers_and_failing_factories_arrive(
    seen: Seen, tmp_path: Path
) -> None:
    with open_batcher("last_words", tmp_path) as batcher:
        begin(batcher)
        with suppress(WorkerDiedError):
            batcher.get()
        assert seen.messages("talk.last") == ["my last words"]
    with pytest.raises(WorkerStartupError, match="KeyError: 'nonsense'"):
        open_batcher("nonsense", tmp_path)
    assert seen.messages("talk.made") == ["what is 'nonsense'?"]


def test_records_arrive_while_get_waits(seen: Seen, tmp_path: Path) -> None:
    # The first may be delivered when get() is called, the second only while it waits.
    seen.react = lambda: (tmp_path / f"answer {len(seen.of('talk.question'))}").touch()
    with open_batcher("converse", tmp_path) as batcher:
        begin(batcher)
        assert batcher.get() is not None
    assert seen.messages("talk.question") == ["are you there?"] * 2


def test_a_caller_that_does_not_read_blocks_no_worker_and_learns_of_dropped_records(
    seen: Seen, tmp_path: Path
) -> None:
    with open_batcher("flood", tmp_path) as batcher:
        for _ in range(2):
            begin(batcher)
        while not (tmp_path / "flooded 2").exists():  # the caller reads nothing meanwhile
            time.sleep(0.002)
        for _ in range(2):
            assert batcher.get() is not None
        begin(batcher)
        assert batcher.get() is not None
    arrived = [int(number) for number in seen.messages("talk.flood")]
    assert arrived[:10] == list(range(10))
    assert arrived == sorted(arrived)
    dropped = [re.findall(r"\d+", message) for message in seen.messages("rlpool")]
    assert {worker for worker, _ in dropped} == {"0"}
    assert len(arrived) + sum(int(number) for _, number in dropped) == 3 * N_FLOOD
