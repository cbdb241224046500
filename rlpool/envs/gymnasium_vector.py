"""Adapts vector environments that are known: how lanes are reset, which one fails, and how."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from rlpool.data.storage import NDArray
from rlpool.envs.atari_lanes import resets_atari_lanes, take_a_seed_per_lane
from rlpool.envs.columns import checked_result
from rlpool.errors import RemoteTraceback, SpecError
from rlpool.seeding import Seeding

_NUMBERS = frozenset([float, int, np.float32, np.float64])

_LAST_WORDS_S = 1.0
"""How long a process that failed may take to say why, or to end."""


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode | None:
    """When lanes of a vector environment restart by themselves, ``None`` if it does not say."""
    try:
        return AutoresetMode(env.metadata.get("autoreset_mode"))
    except ValueError:
        return None


class Owner(Protocol):
    """What owns a vector environment: a ``VectorGymEnv``."""

    lane_in_use: Any
    at_rest: NDArray
    seeding: Seeding


def adapt(env: VectorEnv[Any, Any, Any], owner: Owner) -> bool:
    """Let one of Gymnasium's own vector environments say which lane fails, and lanes rest.

    Args:
        env: A vector environment, wrapped or not. ale-py's is made to take a seed per lane; others
            than these are left as they are.
        owner: Its ``lane_in_use`` tells, and the lanes ``at_rest`` are not stepped. It copies
            observations before the next call.

    Returns:
        Whether lanes can rest.

    Raises:
        SpecError: For an ``AsyncVectorEnv`` that forgets what was reset.
    """
    base: Any = env.unwrapped
    is_wrapped = base is not env
    is_sync, is_async = isinstance(base, SyncVectorEnv), isinstance(base, AsyncVectorEnv)
    if (is_sync or is_async) and not is_wrapped:
        base.copy = False
    if is_sync:
        envs = enumerate(base.envs)
        base.envs = [_SubEnv(env, lane, base, owner) for lane, env in envs]
    if is_sync and owner.seeding == "episode":
        # No restarts without the episode's options, and no final observations in the infos.
        base.autoreset_mode = base.metadata["autoreset_mode"] = AutoresetMode.DISABLED
    elif is_async:
        if autoreset_mode(base) is AutoresetMode.NEXT_STEP and not base.shared_memory:
            raise SpecError(
                "an AsyncVectorEnv with AutoresetMode.NEXT_STEP and without shared memory resets "
                "lanes again after they were reset",
                fix="make it with autoreset_mode=AutoresetMode.DISABLED; with make_vec(..., "
                'vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED})',
            )
        base._raise_if_errors = _raiser(base)
        pipes = enumerate(base.parent_pipes)
        base.parent_pipes = [_CheckedPipe(pipe, lane, base, owner) for lane, pipe in pipes]
    elif owner.seeding == "episode" and resets_atari_lanes(env):
        take_a_seed_per_lane(base)
    return (is_sync or is_async) and owner.seeding == "episode"


class _SubEnv:
    """A sub-environment of a ``SyncVectorEnv``.

    It sets ``lane_in_use``, which tells which one fails or dies, and is not stepped while it rests.
    Rewards and flags are checked: Gymnasium makes numbers and bools of whatever a step returns.
    """

    def __init__(self, env: Any, lane: int, base: Any, owner: Owner) -> None:
        self._env, self._lane, self._base, self._owner = env, lane, base, owner

    def reset(self, **options: Any) -> Any:
        self._owner.lane_in_use[0] = self._lane
        return self._env.reset(**options)

    def step(self, action: Any) -> Any:
        if self._owner.at_rest[self._lane]:
            return _nothing_new(self._base._env_obs[self._lane])
        self._owner.lane_in_use[0] = self._lane
        result = self._env.step(action)
        _, reward, terminated, truncated, _ = result
        if not (type(terminated) is type(truncated) is bool and type(reward) in _NUMBERS):
            checked_result(reward, terminated, truncated)
        return result

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # of a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self._env, name)


class _CheckedPipe:
    """The pipe to a process of an ``AsyncVectorEnv``.

    A process that rests is not told to step, and a step with wrong results has failed.

    Attributes:
        refusal: What is wrong about them.
    """

    def __init__(self, pipe: Any, lane: int, base: Any, owner: Owner) -> None:
        self._pipe, self._lane, self._base, self._owner = pipe, lane, base, owner
        self._observation: Any = None  # the last, where it does not travel in shared memory
        self._rests = False
        self.refusal: SpecError | None = None

    def send(self, message: Any) -> None:
        self._rests = message[0] == "step" and bool(self._owner.at_rest[self._lane])
        if not self._rests:
            self._pipe.send(message)

    def poll(self, timeout: float | None = 0.0) -> bool:
        return self._rests or self._pipe.poll(timeout)

    def recv(self) -> Any:
        if self._rests:
            return _nothing_new(self._observation), True
        result, success = self._pipe.recv()
        if success and self._base._state is AsyncState.WAITING_STEP:
            try:
                checked_result(*result[1:4])
            except SpecError as error:
                self.refusal = error
                return None, False
        if success and not self._base.shared_memory and isinstance(result, tuple):
            self._observation = result[0]
        return result, success

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


def _nothing_new(observation: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """What a step of a sub-environment returns that rests: the last observation once more."""
    return observation, 0.0, False, False, {}


def _raiser(base: Any) -> Callable[[Iterable[bool]], None]:
    """A function in place of ``AsyncVectorEnv._raise_if_errors``.

    Gymnasium's raises another exception, warns of the traceback instead of handing it on, fails
    itself if that contains a percent sign, and waits forever for what cannot be pickled.
    """

    def raise_if_errors(successes: Iterable[bool]) -> None:
        failed = [lane for lane, success in enumerate(successes) if not success]
        if not failed:
            return
        base._state = AsyncState.DEFAULT
        told = {}
        refusals = [base.parent_pipes[lane].refusal for lane in failed]
        with suppress(queue.Empty):
            for _ in range(refusals.count(None)):
                lane, _, error, trace = base.error_queue.get(timeout=_LAST_WORDS_S)
                told[lane] = error, trace
        for lane in failed:
            base.parent_pipes[lane].close()
            base.parent_pipes[lane] = None
        if refusals[0] is not None:
            raise refusals[0]
        what = RuntimeError("a sub-environment failed with an exception that cannot be pickled")
        error, trace = told.get(failed[0], (what, "no traceback"))
        raise error from RemoteTraceback(trace)

    return raise_if_errors


def failed_process(base: Any, error: BaseException) -> tuple[int | None, BaseException]:
    """Which process of an ``AsyncVectorEnv`` has failed, after a call that raised.

    Args:
        base: A vector environment, not wrapped; only an ``AsyncVectorEnv`` has processes.
        error: What the call raised.

    Returns:
        Its lane, ``None`` if all processes are well, and the error, which says so if it has died.
    """
    if not isinstance(base, AsyncVectorEnv) or not isinstance(error, Exception):
        return None, error
    has_died = isinstance(error, EOFError | OSError)  # the other end of a pipe is closed
    if has_died:
        ending = wait([process.sentinel for process in base.processes], _LAST_WORDS_S)
        for process in base.processes:
            if process.sentinel in ending:
                process.join(_LAST_WORDS_S)
    parts = enumerate(zip(base.parent_pipes, base.processes, strict=True))
    for lane, (pipe, process) in parts:
        if pipe is None or not process.is_alive():
            if has_died:
                what = f"the process of the sub-environment died (exit code {process.exitcode})"
                error = RuntimeError(what)
            return lane, error
    return None, error


def kill(env: Any) -> None:
    """Close an ``AsyncVectorEnv``, wrapped or not, some of whose processes have failed."""
    base = env.unwrapped
    for process in base.processes:
        process.kill()
    base._state = AsyncState.DEFAULT  # no answer is waited for
    env.close(terminate=True)
