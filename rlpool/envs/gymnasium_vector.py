"""Adapts vector environments that are known: how lanes are reset, which one fails, and how."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from rlpool.envs.atari_lanes import resets_atari_lanes, take_a_seed_per_lane
from rlpool.envs.columns import checked_result
from rlpool.envs.vec_env import VecEnv
from rlpool.errors import SpecError

_NUMBERS = frozenset([float, int, np.float32, np.float64])

_LAST_WORDS_S = 1.0
"""How long a process that failed may take to say why, or to end."""


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode | None:
    """When lanes of a vector environment restart by themselves, ``None`` if it does not say."""
    try:
        return AutoresetMode(env.metadata.get("autoreset_mode"))
    except ValueError:
        return None


def adapt(env: VectorEnv[Any, Any, Any], owner: VecEnv) -> None:
    """Let one of Gymnasium's own vector environments say which lane fails.

    Args:
        env: A vector environment, wrapped or not. ale-py's is made to take a seed per lane; others
            than these are left as they are.
        owner: Its ``lane_in_use`` tells. It copies observations before the next call.

    Raises:
        SpecError: For an ``AsyncVectorEnv`` that forgets what was reset.
    """
    base: Any = env.unwrapped
    is_wrapped = base is not env
    is_sync, is_async = isinstance(base, SyncVectorEnv), isinstance(base, AsyncVectorEnv)
    if (is_sync or is_async) and not is_wrapped:
        base.copy = False
    if is_sync:
        base.envs = [_SubEnv(env, lane, owner) for lane, env in enumerate(base.envs)]
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
        base.parent_pipes = [_CheckedPipe(pipe, base) for pipe in base.parent_pipes]
    elif owner.seeding == "episode" and resets_atari_lanes(env):
        take_a_seed_per_lane(base)


class _SubEnv:
    """A sub-environment of a ``SyncVectorEnv``.

    It sets ``lane_in_use``, which tells which one fails or dies. Rewards and flags are checked:
    Gymnasium makes numbers and bools of whatever a step returns.
    """

    def __init__(self, env: Any, lane: int, owner: VecEnv) -> None:
        self._env, self._lane, self._owner = env, lane, owner

    def reset(self, **options: Any) -> Any:
        self._owner.lane_in_use[0] = self._lane
        return self._env.reset(**options)

    def step(self, action: Any) -> Any:
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
    """The pipe to a process of an ``AsyncVectorEnv``: a step with wrong results has failed.

    Attributes:
        refusal: What is wrong about them.
    """

    def __init__(self, pipe: Any, base: Any) -> None:
        self._pipe, self._base = pipe, base
        self.refusal: SpecError | None = None

    def recv(self) -> Any:
        result, success = self._pipe.recv()
        if success and self._base._state is AsyncState.WAITING_STEP:
            try:
                checked_result(*result[1:4])
            except SpecError as error:
                self.refusal = error
                return None, False
        return result, success

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


class _RemoteTraceback(Exception):
    """The traceback of an exception in another process, as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


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
        raise error from _RemoteTraceback(trace)

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
