"""Single environments and processes of a ``ParallelEnvManager``."""

from __future__ import annotations

import operator
import pickle
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from typing import Any

import gymnasium
import numpy as np

from rlpool.errors import SpecError, UsageError
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.manager.dispatch import EnvWorkers
from rlpool.manager.stepper import Stepper
from rlpool.record.crash_capsule import CrashCapsule
from rlpool.seeding import seed_from

_COMMANDS = ("reset", "step", "get_attr", "seed", "close")


class Remote:
    """One environment in a worker process: send a request, receive its reply.

    ====================================== ======================================================
    request                                reply
    ====================================== ======================================================
    ``("reset", {"task": task})``          ``("obs", observation)``
    ``("reset", None)``                    the same, without a task
    ``("step", action)``,                  ``("transition", (observation, reward, done, info))``
    ``("step", {"action": action})``
    ``("get_attr", {"attr": name})``       ``("attr", value)``
    ``("seed", {"seed": seed})``           ``("done", None)``; the next reset uses the seed
    ``("close", None)``                    none
    ====================================== ======================================================

    If the environment fails the reply is ``("error", text)``, with the remote traceback; it can be
    reset again. ``done`` is terminated or truncated; of an episode that was only truncated,
    ``info["TimeLimit.truncated"]`` is True. Each reset gets a seed that follows from the
    manager's; ``"seed"`` and ``"options"`` may stand beside ``"task"``.

    Args:
        workers: The workers.
        stepper: What they were asked for.
        lane: Number of the environment.
        action_space: Its action space, or ``None``.

    Attributes:
        capsule: For ``rlpool.replay_crash``: what the last ``("error", text)`` that was received
            told of; ``None`` if that is no failure of a reset or a step that can be repeated.
    """

    def __init__(self, workers: EnvWorkers, stepper: Stepper, lane: int, action_space: Any) -> None:
        self._workers = workers
        self._stepper = stepper
        self._lane = lane
        self._action_space = action_space
        self._unconfirmed: Any = None  # a request that was sent, if send() was interrupted then
        self.capsule: CrashCapsule | None = None

    def send(self, request: tuple[str, Any]) -> None:
        """Send a request; returns at once.

        If a signal's handler raises in it, the same request may be sent again: it is carried out
        once. ``recv`` may be repeated as well.

        Raises:
            SpecError: If it is none of those above, or cannot be pickled.
            UsageError: If the reply to the last one was not received, or the environment is
                closed.
            WorkerDiedError, WorkerTimeoutError: If a worker died.
        """
        self._workers.check_open()
        if self._is_repeated(request):
            self._unconfirmed = None
            return
        self._workers.refuse_bad_lanes([self._lane])
        self._stepper.refuse_stepping([self._lane])
        self._stepper.settle([self._lane])
        try:
            command, data = request
        except (TypeError, ValueError):
            raise SpecError(f"a request is (command, data), got {request!r}") from None
        if command not in _COMMANDS:
            raise SpecError(f"a request is one of {', '.join(_COMMANDS)}, got {command!r}")
        if command == "reset":
            data = self._reset_data(data)
        elif command == "step":
            data = self._action(data)
        elif command == "get_attr":
            data = _named(data, "attr", command)
            if not isinstance(data, str):
                raise SpecError(f"the name of an attribute should be a str, got {data!r}")
        elif command == "seed":
            data = _checked_seed(_named(data, "seed", command))
        with InterruptsHeld():
            self._workers.call(self._lane, command, data)
            if command == "reset":
                self._stepper.note_reset([self._lane])
            self._unconfirmed = request
        self._unconfirmed = None

    def recv(self) -> tuple[str, Any]:
        """Wait for the reply to the request.

        Raises:
            UsageError: If there is no request, or the environments are closed.
            WorkerDiedError, WorkerTimeoutError: If the worker died or hangs.
        """
        workers, lane = self._workers, self._lane
        workers.check_open()
        if lane not in workers.waiting:
            raise UsageError(
                "there is nothing to receive", fix=f"call remotes[{lane}].send(...) first"
            )
        reply = workers.reply(lane)
        if reply[0] == "error":
            self.capsule, hint = workers.capsules.get(lane, (None, ""))
            if hint:
                reply = ("error", f"{reply[1]}\n  fix:   {hint}")
        self._unconfirmed = None
        # Nothing is called from here on, so that no handler runs before the caller has it.
        del workers.waiting[lane], workers.replies[lane]
        return reply

    def poll(self, timeout: float = 0.0) -> bool:
        """Whether a reply is there, waiting for it for ``timeout`` seconds at most."""
        workers, lane = self._workers, self._lane
        workers.check_open()
        left_s, until_s = timeout, time.monotonic() + timeout
        workers.processes.look_from_now_on()
        while workers.is_unanswered(lane):
            workers.look(min(max(0.0, left_s), workers.processes.patience_s))
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
        return lane in workers.replies

    def _is_repeated(self, request: Any) -> bool:
        """Whether a request was sent by a call that was interrupted afterwards."""
        before, waiting = self._unconfirmed, self._lane in self._workers.waiting
        return waiting and before is not None and pickle.dumps(before) == pickle.dumps(request)

    def _reset_data(self, data: Any) -> tuple[int | None, dict[str, Any] | None]:
        if data is None:
            data = {}
        if not isinstance(data, Mapping) or not set(data) <= {"task", "seed", "options"}:
            raise SpecError(
                f"the data of a reset should be None or a dict of 'task', got {data!r}",
                fix="pass ('reset', {'task': task})",
            )
        options = dict(data.get("options") or {})
        if data.get("task") is not None:
            options["task"] = data["task"]
        seed = data.get("seed")
        self._workers.options[self._lane] = options or None
        return None if seed is None else _checked_seed(seed), options or None

    def _action(self, data: Any) -> Any:
        is_named = isinstance(data, Mapping) and list(data) == ["action"]
        space = self._action_space
        if is_named and isinstance(space, gymnasium.spaces.Dict) and list(space) == ["action"]:
            is_named = isinstance(data["action"], Mapping)
        action = data["action"] if is_named else data
        return action.detach().cpu().numpy() if hasattr(action, "detach") else action


class WorkerHandle:
    """A worker process, or the one that replaced it, for whoever wants to look at it.

    Args:
        workers: The workers.
        worker: The worker's number.
    """

    def __init__(self, workers: EnvWorkers, worker: int) -> None:
        self._workers = workers
        self._worker = worker

    @property
    def _process(self) -> SpawnProcess:
        self._workers.refuse_forked_copy()
        return self._workers.process(self._worker)

    @property
    def pid(self) -> int | None:
        """Its process id; that of the last process once the manager is closed."""
        return self._workers.pids[self._worker]

    def is_alive(self) -> bool:
        """Whether the process runs."""
        try:
            return self._process.is_alive()
        except ValueError:  # the manager is closed
            return False

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, which ``close`` brings about."""
        with suppress(ValueError):
            self._process.join(timeout)

    @property
    def exitcode(self) -> int | None:
        """Its exit code, ``None`` while it runs or once the manager is closed."""
        try:
            return self._process.exitcode
        except ValueError:
            return None

    def __repr__(self) -> str:
        try:
            state = "alive" if self.is_alive() else "ended"
        except UsageError:
            state = "of another process"
        return f"WorkerHandle(pid={self.pid}, {state})"


def _named(data: Any, key: str, command: str) -> Any:
    """The one entry of a request's data."""
    if not isinstance(data, Mapping) or set(data) != {key}:
        raise SpecError(f"the data of {command!r} should be {{{key!r}: ...}}, got {data!r}")
    return data[key]


def _checked_seed(seed: Any) -> int:
    try:
        number = operator.index(seed)
    except (TypeError, RuntimeError):
        number = -1
    if number < 0 or number > np.iinfo(np.int64).max:
        raise SpecError(f"a seed should be an int in [0, 2**63), got {seed!r}")
    return seed_from(number)
