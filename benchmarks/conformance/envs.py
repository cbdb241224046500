"""A scripted environment whose observations identify their episode and step."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np

NUMBERED = "conformance/Numbered-v0"
TAG, LENGTH, STEP = 0, 1, 2  # the first three numbers of an observation
FLAGS = ("terminated", "truncated")
SHORT, LONG = 2, 40  # very different episode lengths
SCRIPT = {"lengths": (3, 5), "ends": "truncated", "dtype": "float32", "shape": (3,), "base": 0.0}
SCRIPT |= {"reuse": False, "global_random": False, "slow_s": 0.0, "helper": False, "forks": False}
SCRIPT |= {"fault": "", "where": "step", "after": 0, "once": "", "log": ""}


class Unpicklable(Exception):
    """An exception that cannot be sent to another process."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("this exception cannot be pickled")


class Numbered(gym.Env):
    """Observes ``[tag, length, step]`` plus ``base``; the reward is the number of the step.

    The tag is drawn from the environment's generator at each reset, or is the option ``level``. It
    determines the rest of the episode. Steps are counted from 0. The reward of a step is its
    number, from 1, plus 1,000 times the action, plus ``base``.

    Its keyword arguments, with the defaults of ``SCRIPT``:

    Args:
        lengths: Episode lengths, all equally likely.
        ends: Flag at the end of episodes, "terminated" or "truncated".
        dtype: Dtype of observations.
        shape: Shape of observations; only the first three numbers are used.
        base: Added to observations and rewards.
        reuse: Return the same array and the same info each time, changed in place.
        global_random: Draw the tag from NumPy's global generator.
        slow_s: Duration of a step in a quarter of the episodes.
        fault: Kind of fault, a key of ``FAULTS``.
        where: Place of the fault: "init", "reset" or "step".
        after: Number of this environment's steps that succeed first.
        once: Only a step with action 1 fails, and only in the environment that creates this file.
        log: File that gets a line with tag and process at the first step of an episode, and one
            per ``close``.
        helper: Start a process that ``close`` ends.
        forks: Compute each reset in a process of ``multiprocessing``.
    """

    def __init__(self, **script: Any) -> None:
        assert script.keys() <= SCRIPT.keys(), script
        self.__dict__.update(SCRIPT | script)
        dtype, shape = np.dtype(self.dtype), self.shape
        low, high = (-np.inf, np.inf) if dtype.kind == "f" else (0, np.iinfo(dtype).max)
        self.observation_space = gym.spaces.Box(low, high, shape, dtype)
        self.action_space = gym.spaces.Discrete(2)
        self.steps_taken = 0
        self._observation, self._info = np.zeros(shape, dtype), {}
        self.process = subprocess.Popen(["sleep", "600"]) if self.helper else None
        self._strike("init", 1)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        super().reset(seed=seed)
        self._strike("reset", 1)
        if self.forks:
            process = multiprocessing.Process(target=time.sleep, args=(0,))
            process.start()
            process.join()
        draw = np.random.randint if self.global_random else self.np_random.integers
        self.tag = (options or {}).get("level", int(draw(1, 2**20)))
        self.length, self.step_number = self.lengths[self.tag // 2 % len(self.lengths)], 0
        return self._observe(), self._inform()

    def step(self, action: Any) -> tuple:
        if self.step_number == 0 and self.log:
            _append(self.log, f"start {self.tag} {os.getpid()}")
        if self.slow_s and is_slow(self.tag):
            time.sleep(self.slow_s)
        if self.steps_taken >= self.after:
            self._strike("step", int(action))
        self.step_number, self.steps_taken = self.step_number + 1, self.steps_taken + 1
        reward = self.step_number + 1000.0 * int(action) + self.base
        flags = [self.step_number >= self.length and self.ends == flag for flag in FLAGS]
        return self._observe(), reward, *flags, self._inform()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.log:
            _append(self.log, f"close {id(self)} {os.getpid()}")

    def _observe(self) -> np.ndarray:
        observation = self._observation if self.reuse else np.zeros_like(self._observation)
        numbers = np.array([self.tag, self.length, self.step_number]) + self.base
        observation.reshape(-1)[:3] = numbers % 256 if self.dtype == "uint8" else numbers
        return observation

    def _inform(self) -> dict[str, int]:
        info = self._info if self.reuse else {}
        info.clear()
        info["step"] = np.int64(self.step_number)
        return info

    def _strike(self, where: str, action: int) -> None:
        strikes = self.fault and where == self.where
        if strikes and (not self.once or (action == 1 and _creates(self.once))):
            FAULTS[self.fault]()


def is_slow(tag: int) -> bool:
    """Whether an episode is among those that may be slow."""
    return tag % 8 >= 6


def _creates(path: str) -> bool:
    """Whether this is the first call with the path, in any process."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return True
    return False


def _append(path: str, line: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def _raise(kind: type[Exception]) -> None:
    raise kind("no goal number 17")


FAULTS = {
    "raise": lambda: _raise(ValueError),
    "unpicklable": lambda: _raise(Unpicklable),
    "sys_exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(600),
}


def make(env_id: str, frame_stack: int = 1, **arguments: Any) -> gym.Env:
    """``gymnasium.make``; unpickling this function registers the environments."""
    env = gym.make(env_id, disable_env_checker=True, **arguments)
    return env if frame_stack == 1 else gym.wrappers.FrameStackObservation(env, frame_stack)


gym.register(NUMBERED, entry_point=Numbered)
