"""Adapts vector environments that are known: how lanes are reset, which one fails, and how."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from rlpool.envs.atari_lanes import resets_atari_lanes, take_a_seed_per_lane
from rlpool.envs.vec_env import VecEnv
from rlpool.errors import SpecError

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
        base.envs = _Marked(base.envs, owner)
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
    elif owner.seeding == "episode" and resets_atari_lanes(env):
        take_a_seed_per_lane(base)


class _Marked(list[Any]):
    """Sub-environments of a ``SyncVectorEnv``; whoever takes one sets ``lane_in_use``.

    It takes them one after another, by iteration or by index, to step or reset them. So this tells
    which one fails or dies.
    """

    def __init__(self, envs: Sequence[Any], owner: VecEnv) -> None:
        super().__init__(envs)
        self._owner = owner

    def __iter__(self) -> Iterator[Any]:
        lane_in_use = self._owner.lane_in_use
        first = lane_in_use[0]
        for lane, env in enumerate(list.__iter__(self)):
            lane_in_use[0] = lane
            yield env
        lane_in_use[0] = first

    def __getitem__(self, lane: Any) -> Any:
        if type(lane) is int:
            self._owner.lane_in_use[0] = lane
        return list.__getitem__(self, lane)


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
        with suppress(queue.Empty):
            for _ in failed:
                lane, _, error, trace = base.error_queue.get(timeout=_LAST_WORDS_S)
                told[lane] = error, trace
        for lane in failed:
            base.parent_pipes[lane].close()
            base.parent_pipes[lane] = None
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
