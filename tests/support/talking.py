"""An environment whose worker logs in ways chosen by a test."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from rlpool import GymEnv

from support.agents import ConstantAgent as QuietAgent  # noqa: F401
from support.envs import CountingEnv


def various(directory: Path) -> None:
    """Log records of various kinds."""
    log = logging.getLogger("talk.env")
    log.debug("too fine for the caller")
    log.info("level %d of %s", log.getEffectiveLevel(), "talk")
    log.warning("Grüße 你好 \ud800 🚀\nand a second line")
    log.info("with extra", extra={"episode": 4, "values": np.arange(3)})
    try:
        raise KeyError("the goal")
    except KeyError:
        log.exception("it failed")
    logging.getLogger("talk.silenced").warning("the caller wants no warnings of this one")
    logging.getLogger("elsewhere").info("the caller's root wants warnings only")
    warnings.warn("a warning", stacklevel=1)


def last_words(directory: Path) -> None:
    """Log and be killed, once."""
    if not (directory / "killed").exists():
        (directory / "killed").touch()
        logging.getLogger("talk.last").warning("my last words")
        os.kill(os.getpid(), signal.SIGKILL)


def converse(directory: Path) -> None:
    """Log, and wait until the reader of the record creates a file; twice."""
    for number in (1, 2):
        logging.getLogger("talk.question").info("are you there?")
        while not (directory / f"answer {number}").exists():
            time.sleep(0.002)


N_FLOOD = 5000


def flood(directory: Path) -> None:
    """Log far more than a pipe holds, and record the number of messages."""
    n_before = len(list(directory.iterdir()))
    for number in range(N_FLOOD):
        logging.getLogger("talk.flood").info("%d", n_before * N_FLOOD + number)
    (directory / f"flooded {n_before + 1}").touch()


DEEDS: dict[str, Callable[[Path], None]] = {
    deed.__name__: deed for deed in (various, last_words, converse, flood)
}


class TalkingEnv(CountingEnv):
    """Environment with one step per episode that logs in the reset of episodes with ``id`` 0 or 1.

    Args:
        deed: Key of ``DEEDS`` to run.
        directory: Directory for its files.
    """

    def __init__(self, deed: str, directory: str) -> None:
        if deed not in DEEDS:
            logging.getLogger("talk.made").error("what is %r?", deed)
        talk = partial(DEEDS[deed], Path(directory))
        super().__init__(length=1, number=-1, script={(0, -1): talk, (1, -1): talk})

    def close(self) -> None:
        logging.getLogger("talk.closed").info("closing")


def create_env(seed: int, deed: str, directory: str) -> GymEnv:
    return GymEnv([TalkingEnv(deed, directory)], seed)
