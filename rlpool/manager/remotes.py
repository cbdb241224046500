"""Single environments and processes of a ``ParallelEnvManager``."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.context import SpawnProcess
from time import monotonic
from typing import Any

from rlpool.data.array_view import as_numpy
from rlpool.errors import SpecError, UsageError, WorkerError, described
from rlpool.machine.arguments import checked_wait, whole_number
from rlpool.machine.calls import whole
from rlpool.manager.channel import Call
from rlpool.manager.env_workers import EnvWorkers, Request
from rlpool.manager.stepper import Stepper
from rlpool.record.tape import action_row
from rlpool.seeding import LaneSeeds, root_from, seed_from
from rlpool.workers.process_owner import refuse_forked_copy
from rlpool.workers.sharing import ByValue
from rlpool.workers.wire import Close


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
    ``("close", None)``                    none; its process ends with its last environment
    ====================================== ======================================================

    If the environment fails the reply is ``("error", text)``, with the remote traceback; it can be
    reset again. ``done`` is terminated or truncated; of an episode that was only truncated,
    ``info["TimeLimit.truncated"]`` is True. Each reset gets a seed that follows from the
    manager's; ``"seed"`` and ``"options"`` may stand beside ``"task"``.

    Args:
        workers: The workers.
        stepper: Their commands.
        lane: Number of the environment.

    Attributes:
        error: The failure of the last ``("error", text)`` that was received, for
            ``rlpool.replay``; ``None`` before one.
    """

    def __init__(self, workers: EnvWorkers, stepper: Stepper, lane: int) -> None:
        self._workers = self._calls = workers
        self._stepper = stepper
        self._lane = lane
        # Backwards: forwards are the seeds of lanes that are reset together.
        numbers = itertools.count(-1, -1)
        self._seeds: Iterator[int] = map(partial(LaneSeeds(workers.root, 0).seed, lane), numbers)
        self.error: WorkerError | None = None

    @whole
    def send(self, request: tuple[str, Any]) -> None:
        """Send a request and return at once.

        Raises:
            SpecError: If it is not one of the requests above, or does not fit.
            UsageError: If the reply to the last one was not received, or the environment is
                closed.
            WorkerDiedError, WorkerTimeoutError: If a worker died.
        """
        self._workers.check_open()
        self._stepper.refuse_bad_lanes([self._lane])
        self._stepper.refuse_stepping([self._lane])
        self._stepper.divide_anew()
        if not isinstance(request, tuple | list) or len(request) != 2:
            raise SpecError(f"a request is (command, data), got {request!r}")
        command, data = request
        if command == "reset":
            self._reset(data)
        elif command == "step":
            self._step(data)
        elif command == "get_attr":
            name = _named(data, "attr", command)
            if not isinstance(name, str):
                raise SpecError(f"the name of an attribute should be a str, got {name!r}")
            self._call(command, name)
        elif command == "seed":  # of the resets that follow, which this process gives
            self._seeds = _seeds_from(_checked_seed(_named(data, "seed", command)))
            reply = pickle.dumps(("done", None))
            self._workers.requests[self._lane] = Request(Call(0, command, data), reply)
        elif command == "close":
            self._close()
        else:
            commands = "reset, step, get_attr, seed, close"
            raise SpecError(f"a request is one of {commands}, got {command!r}")

    @whole
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
        request = workers.requests[lane]
        workers.wait_until(lambda: request.reply is not None)
        del workers.requests[lane]
        reply: tuple[str, Any] = pickle.loads(request.reply or b"")
        if reply[0] == "error":
            self.error = request.error
        return reply

    @whole
    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether a reply has arrived, after waiting up to ``timeout`` seconds or for ever."""
        workers, lane = self._workers, self._lane
        workers.check_open()
        limit_s = checked_wait(timeout)
        until_s = math.inf if limit_s is None else monotonic() + limit_s
        workers.wait_until(lambda: not workers.is_unanswered(lane), until_s)
        return lane in workers.requests and not workers.is_unanswered(lane)

    def _call(self, command: str, data: Any) -> None:
        workers, lane = self._workers, self._lane
        worker = workers.worker_of[lane]
        call = Call(lane - workers.lanes_of[worker].start, command, data)
        workers.processes.send(worker, call)
        workers.requests[lane] = Request(call)

    def _reset(self, data: Any) -> None:
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
        given = data.get("seed")
        sent = ByValue("data", options) if options else None
        seed = next(self._seeds) if given is None else _checked_seed(given)
        self._workers.tapes.record_reset(self._lane, seed, options or None)
        for array in self._workers.buffers.action.values():
            array[self._lane] = 0
        self._call("reset", (seed, sent))

    def _step(self, data: Any) -> None:
        is_named = isinstance(data, Mapping) and list(data) == ["action"]
        action = data["action"] if is_named else data
        workers, lane = self._workers, self._lane
        report = workers.reports[workers.worker_of[lane]]
        try:
            values = as_numpy(action) if hasattr(action, "detach") else action
            row = action_row(report.action, report.native_action, values)
        except Exception as error:
            what = f"the action {action!r:.60} does not fit the action space: {described(error)}"
            raise SpecError(what) from error
        for key, array in workers.buffers.action.items():
            array[lane] = row[key][0]
        workers.tapes.record_step([lane])
        self._call("step", None)

    def _close(self) -> None:
        workers, lane = self._workers, self._lane
        worker = workers.worker_of[lane]
        workers.tapes.forget(lane)
        workers.closed_lanes.add(lane)
        if workers.closed_lanes.issuperset(workers.lanes_of[worker]):
            workers.processes.send(worker, Close())
            workers.processes.dismiss(worker)
        if len(workers.closed_lanes) == workers.n_lanes:
            workers.close()


class WorkerHandle:
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
        return self._workers.processes.life(self._worker).process

    @property
    def pid(self) -> int | None:
        """Its process id; after ``close``, the last one."""
        return self._workers.processes.life(self._worker).pid

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


def _named(data: Any, key: str, command: str) -> Any:
    """The entry of a request's data."""
    if not isinstance(data, Mapping) or set(data) != {key}:
        raise SpecError(f"the data of {command!r} should be {{{key!r}: ...}}, got {data!r}")
    return data[key]


def _checked_seed(seed: Any) -> int:
    return seed_from(whole_number("a seed", seed, 0))


def _seeds_from(seed: int) -> Iterator[int]:
    """A seed, then others that follow from it."""
    stream = LaneSeeds(root_from(seed), 0)
    return itertools.chain([seed], map(partial(stream.seed, 0), itertools.count()))
