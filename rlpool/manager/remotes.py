"""Single environments and processes of a ``ParallelEnvManager``."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.context import SpawnProcess
from time import monotonic
from typing import Any, NoReturn

import gymnasium

from rlpool.data.array_view import as_numpy
from rlpool.envs.vec_env import Options
from rlpool.errors import SpecError, UsageError, WorkerError
from rlpool.machine.arguments import checked_wait, whole_number
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.manager.env_workers import EnvWorkers
from rlpool.manager.lane_states import Request
from rlpool.manager.messages import Call
from rlpool.manager.stepper import Stepper
from rlpool.record.tape import action_row
from rlpool.seeding import LaneSeeds, root_from, seed_from
from rlpool.workers.process_owner import refuse_forked_copy
from rlpool.workers.sharing import ByValue

_NAMED = {
    "get_attr": ("attr",),
    "set_attr": ("attr", "value"),
    "call": ("name", "args", "kwargs"),
}
"""What the data of a request consists of, the name of an attribute first."""


class _OfManager:
    """What a ``ParallelEnvManager`` has one of; a copy would share its requests and replies."""

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise UsageError(
            f"a {name} is part of a ParallelEnvManager and cannot be copied or pickled",
            fix="hand on its number, and use the manager's remotes and workers in the process that "
            "made it",
        )


class Remote(_OfManager):
    """One environment in a worker process: send a request, receive its reply.

    ====================================== ======================================================
    request                                reply
    ====================================== ======================================================
    ``("reset", {"task": task})``          ``("obs", observation)``
    ``("reset", None)``                    the same, without a task
    ``("step", action)``,                  ``("transition", (observation, reward, done, info))``
    ``("step", {"action": action})``
    ``("get_attr", {"attr": name})``       ``("attr", value)``
    ``("set_attr", {"attr": name,          ``("done", None)``
    "value": value})``
    ``("call", {"name": name,              ``("result", value)``, that of the attribute if it
    "args": (...), "kwargs": {...}})``     cannot be called
    ``("seed", {"seed": seed})``           ``("done", None)``; the next reset uses the seed
    ``("close", None)``                    none
    ====================================== ======================================================

    If the environment fails the reply is ``("error", text)``, with the remote traceback; it can be
    reset again. ``done`` is terminated or truncated; of an episode that was only truncated,
    ``info["TimeLimit.truncated"]`` is True. Each reset gets a seed that follows from the
    manager's; ``"seed"`` and ``"options"`` may stand beside ``"task"``. An episode in which an
    attribute was set cannot be repeated if its worker dies: the environment then needs a reset.

    Args:
        workers: The workers.
        stepper: Their commands.
        lane: Number of the environment.
        action_space: Its action space, or ``None``.

    Attributes:
        error: The failure of the last ``("error", text)`` that was received, for
            ``rlpool.replay``; ``None`` before one.
    """

    def __init__(self, workers: EnvWorkers, stepper: Stepper, lane: int, action_space: Any) -> None:
        self._workers, self._one_thread = workers, workers.one_thread
        self._stepper = stepper
        self._lane = lane
        self._action_space = action_space
        # Backwards: forwards are the seeds of lanes that are reset together.
        numbers = itertools.count(-1, -1)
        self._seeds: Iterator[int] = map(partial(LaneSeeds(workers.root, 0).seed, lane), numbers)
        self._unconfirmed: Any = None  # a request that was sent, if send() was interrupted then
        self.error: WorkerError | None = None

    def send(self, request: tuple[str, Any]) -> None:
        """Send a request and return at once.

        If a signal handler raises in it, the same request may be sent again: it is carried out
        once. ``recv`` may be repeated, too.

        Raises:
            SpecError: If it is not one of the requests above, or cannot be pickled.
            UsageError: If the reply to the last one was not received, or the environment is
                closed.
            WorkerDiedError, WorkerTimeoutError: If a worker died.
        """
        self._workers.check_open()
        if self._is_repeated(request):
            self._unconfirmed = None
            return
        self._stepper.refuse_bad_lanes([self._lane])
        self._stepper.refuse_stepping([self._lane])
        self._stepper.settle([self._lane])
        self._stepper.divide_anew()
        if not isinstance(request, tuple | list) or len(request) != 2:
            raise SpecError(f"a request is (command, data), got {request!r}")
        command, data = self._checked(*request)
        with InterruptsHeld():
            if command == "seed":  # of the resets that follow, which this process gives
                self._seeds = _seeds_from(data)
                reply = pickle.dumps(("done", None))
                self._workers.requests[self._lane] = Request(Call(0, command, data), reply)
            else:
                self._call(command, data)
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
        if lane not in workers.requests:
            raise UsageError(
                "there is nothing to receive", fix=f"call remotes[{lane}].send(...) first"
            )
        reply = self._reply()
        if reply[0] == "error":
            self.error = workers.requests[lane].error
        self._unconfirmed = None
        # Nothing is called from here on, so that no handler runs before the caller has it.
        del workers.requests[lane]
        return reply

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether a reply has arrived, after waiting up to ``timeout`` seconds or for ever."""
        workers, lane = self._workers, self._lane
        workers.check_open()
        limit_s = checked_wait(timeout)
        until_s = math.inf if limit_s is None else monotonic() + limit_s
        workers.wait_until(lambda: not workers.is_unanswered(lane), until_s)
        return lane in workers.requests and not workers.is_unanswered(lane)

    def describe(self, seed: int, options: Options) -> Any:
        """The ``Declaration`` of observations and infos, which a reset has to show.

        Raises:
            LaneFailure: If the reset fails.
            WorkerDiedError, WorkerTimeoutError: If the worker dies or hangs in it.
        """
        requests = self._workers.requests
        try:
            self._call("describe", (seed, options))
            _, declaration = self._reply()
            error = requests[self._lane].error
        finally:
            requests.pop(self._lane, None)
        if error is not None:
            raise error
        return declaration

    def _call(self, command: str, data: Any) -> None:
        """Send a request and put it on the lane's tape."""
        workers, lane = self._workers, self._lane
        worker = workers.worker_of[lane]
        own = workers.lanes_of[worker]
        is_set = command == "set_attr"  # kept for a successor of the worker
        sent = (data[0], ByValue("value", data[1])) if is_set else ByValue("data", data)
        call = Call(lane - own.start, command, sent)
        workers.processes.send(worker, call)
        if command == "close":
            workers.closed_lanes.add(lane)
            if workers.closed_lanes.issuperset(own):
                workers.processes.dismiss(worker)
            if len(workers.closed_lanes) == workers.n_lanes:
                workers.close()
            return
        workers.requests[lane] = Request(call)
        if command in ("reset", "describe"):
            workers.tapes.record_reset(lane, *data)
        elif command == "step":
            report = workers.reports[0]
            with suppress(Exception):  # it does not fit, as the worker will answer
                row = action_row(report.action, report.native_action or {}, data)
                workers.tapes.record_action(lane, row)

    def _reply(self) -> tuple[str, Any]:
        """Wait for the reply; it stays until the user has it."""
        request = self._workers.requests[self._lane]
        self._workers.wait_until(lambda: request.reply is not None)
        reply: tuple[str, Any] = pickle.loads(request.reply or b"")
        return reply

    def _is_repeated(self, request: Any) -> bool:
        """Whether an interrupted call has already sent a request."""
        before, waiting = self._unconfirmed, self._lane in self._workers.requests
        return waiting and before is not None and pickle.dumps(before) == pickle.dumps(request)

    def _checked(self, command: Any, data: Any) -> tuple[str, Any]:
        """A request as it is sent to the worker."""
        if command == "reset":
            data = self._reset_data(data)
        elif command == "step":
            data = self._action(data)
        elif command == "seed":
            data = _checked_seed(*_named(data, ("seed",), command))
        elif command in _NAMED:
            data = _named(data, _NAMED[command], command)
            if not isinstance(data[0], str):
                raise SpecError(f"the name of an attribute should be a str, got {data[0]!r}")
        elif command != "close":
            commands = ", ".join(("reset", "step", *_NAMED, "seed", "close"))
            raise SpecError(f"a request is one of {commands}, got {command!r}")
        return command, data

    def _reset_data(self, data: Any) -> tuple[int, dict[str, Any] | None]:
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
        return next(self._seeds) if seed is None else _checked_seed(seed), options or None

    def _action(self, data: Any) -> Any:
        is_named = isinstance(data, Mapping) and list(data) == ["action"]
        space = self._action_space
        if is_named and isinstance(space, gymnasium.spaces.Dict) and list(space) == ["action"]:
            is_named = isinstance(data["action"], Mapping)
        action = data["action"] if is_named else data
        return as_numpy(action) if hasattr(action, "detach") else action


class WorkerHandle(_OfManager):
    """A worker process, or the one that replaced it.

    Args:
        workers: The workers.
        worker: The worker's number.
    """

    def __init__(self, workers: EnvWorkers, worker: int) -> None:
        self._workers = workers
        self._worker = worker

    @property
    def _process(self) -> SpawnProcess | None:
        refuse_forked_copy(self._workers.owner_pid)
        return self._workers.processes.process(self._worker)

    @property
    def pid(self) -> int | None:
        """Its process id; after ``close``, the last one."""
        return self._workers.processes.pids[self._worker]

    def is_alive(self) -> bool:
        """Whether the process runs."""
        process = self._process
        return process is not None and process.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        process = self._process
        if process is not None:
            process.join(timeout)

    @property
    def exitcode(self) -> int | None:
        """Its exit code, ``None`` while it runs or once the manager is closed."""
        process = self._process
        return None if process is None else process.exitcode

    def __repr__(self) -> str:
        try:
            state = "alive" if self.is_alive() else "ended"
        except UsageError:
            state = "of another process"
        return f"WorkerHandle(pid={self.pid}, {state})"


def _named(data: Any, keys: tuple[str, ...], command: str) -> tuple[Any, ...]:
    """The entries of a request's data."""
    if not isinstance(data, Mapping) or set(data) != set(keys):
        wanted = ", ".join(f"{key!r}: ..." for key in keys)
        raise SpecError(f"the data of {command!r} should be {{{wanted}}}, got {data!r}")
    return tuple(data[key] for key in keys)


def _checked_seed(seed: Any) -> int:
    return seed_from(whole_number("a seed", seed, 0))


def _seeds_from(seed: int) -> Iterator[int]:
    """A seed, then others that follow from it."""
    stream = LaneSeeds(root_from(seed), 0)
    others = (stream.seed(0, number) for number in itertools.count())
    return itertools.chain([seed], (other for other in others if other != seed))
