"""Commands to the workers of a ``ParallelEnvManager``: of all lanes, or of a single environment.

Each worker has one step or reset of some of its lanes at a time. It is busy while the number of its
last command differs from the number of the last one it has finished. A step is issued by writing
into the buffers, and waking the worker if it sleeps; a reset travels through its pipe. Either way
the worker reports the end with a number in the buffers. Requests to single environments are
messages with a reply.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from rlpool.data.array_view import as_numpy
from rlpool.envs.vec_env import LaneError, Options
from rlpool.errors import SpecError, UsageError, WorkerError, described
from rlpool.machine.arguments import checked_timeout, whole_number
from rlpool.machine.calls import whole
from rlpool.manager.channel import ALL_LANES, FAILED, SOME_LANES, Call, Reset
from rlpool.manager.env_workers import EnvWorkers, Request
from rlpool.record.tape import action_row
from rlpool.seeding import LaneSeeds, root_from, seed_from
from rlpool.workers.sharing import ByValue


class Stepper:
    """Gives the workers commands and waits for them.

    Args:
        workers: The workers, their buffers mapped.
    """

    def __init__(self, workers: EnvWorkers) -> None:
        self._workers = workers
        self._buffers = workers.buffers
        self._issued, self._finished = workers.issued, workers.buffers.finished
        self._last_lanes: list[int] | None = None  # of the last step
        self._last_workers: list[int] = []
        self._forget_steps()

    def _forget_steps(self) -> None:
        # Of ``step_some``: worker to its stepping lanes, lanes that have made their step, failures.
        self._stepping: dict[int, list[int]] = {}
        self._ready: list[int] = []
        self._failures: list[WorkerError] = []

    def begin_again(self) -> None:
        """Begin with new workers, whatever an interrupted call has left."""
        self._workers.begin_again()
        self.divide_anew()
        self._forget_steps()

    # Commands ---------------------------------------------------------------------------------

    def workers_of(self, lanes: list[int]) -> list[int]:
        """The workers of some lanes, told in the buffers which of their lanes step next.

        A worker makes one step at a time: if others of its lanes are stepping, they are waited for.

        Raises:
            SpecError, UsageError: If one of the lanes cannot step.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        if lanes != self._last_lanes:
            self._last_lanes = None
            self._last_workers = self._divide(lanes)
            self._last_lanes = lanes[:]
        return self._last_workers

    def issue(self, lanes: list[int], workers: list[int]) -> None:
        """Let the lanes of ``workers_of`` step with the actions in the buffers."""
        issued, step, wakes = self._issued, self._buffers.step, self._workers.wakes
        self._workers.tapes.record_step(lanes)
        for worker in workers:
            issued[worker] += 1
            step[worker] = issued[worker]
            wakes[worker].signal()

    def let_go(self, workers: list[int]) -> None:
        """Leave steps that were issued to ``take_ready``, instead of waiting for them."""
        self.divide_anew()
        for worker in workers:
            self._stepping[worker] = list(self._workers.commanded[worker])

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> list[int]:
        """Let lanes begin episodes, and return the workers to wait for."""
        workers = self._workers
        rows: dict[int, list[int]] = {}
        sent: list[Any] = [option and ByValue("options", option) for option in options]
        for row, lane in enumerate(lanes):
            rows.setdefault(workers.worker_of[lane], []).append(row)
        self.divide_anew()
        for worker, mine in rows.items():
            first = workers.lanes_of[worker].start
            episodes = [(lanes[row] - first, seeds[row], sent[row]) for row in mine]
            message = Reset(self._issued[worker] + 1, episodes)
            workers.processes.send(worker, message)
            workers.resets[worker], self._issued[worker] = message, message.number
            workers.commanded[worker] = [lanes[row] for row in mine]
        for lane, seed, option in zip(lanes, seeds, options, strict=True):
            workers.record_reset(lane, seed, option)
        return list(rows)

    def settle(self, lanes: Collection[int]) -> None:
        """Wait for steps of lanes that the user has given up, and forget their outcome."""
        self._workers.processes.look()  # what workers have logged is there, too
        self._let_finish({self._workers.worker_of[lane] for lane in lanes})
        self._ready = [lane for lane in self._ready if lane not in lanes]
        self._failures = [error for error in self._failures if error.where.lane not in lanes]

    def _let_finish(self, workers: Collection[int]) -> None:
        """Wait for what workers are doing: ``step_some`` tells how it ended."""
        busy = [w for w in workers if self._issued[w] != self._finished[w]]
        if busy:
            with suppress(LaneError):
                self.finish(busy)
        self._collect()  # before the next command of a worker makes it forget the last one

    def finish(self, workers: Sequence[int]) -> bool:
        """Wait until workers have carried out their commands; returns whether an episode ended.

        Raises:
            LaneFailure: If an environment failed.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs.
        """
        outcome = self._buffers.outcome
        self._workers.wait_idle(workers)
        some_ended, failed = False, []
        for worker in workers:
            if outcome[worker] == FAILED:
                failed.append(worker)
            elif outcome[worker]:
                some_ended = True
        if failed:
            failures = [self._workers.failure(worker) for worker in failed]
            for worker in failed:
                self._note_failure(worker)
            raise failures[0]
        return some_ended

    def divide_anew(self) -> None:
        """Let the next step look again at which workers have its lanes, and whether they may."""
        self._last_lanes = None

    def _note_failure(self, worker: int) -> None:
        """What the lanes of a failed command have done is unknown: they need a reset."""
        self.divide_anew()
        for lane in self._workers.commanded[worker]:
            self._workers.tapes.forget(lane)

    def _divide(self, lanes: Sequence[int]) -> list[int]:
        workers, buffers = self._workers, self._buffers
        self.refuse_bad_lanes(lanes)
        self.refuse_stepping(lanes)
        found = sorted({workers.worker_of[lane] for lane in lanes})
        self._let_finish(found)
        self._refuse_unknown(lanes)
        asked = np.zeros(workers.n_lanes, bool)
        asked[list(lanes)] = True
        for worker in found:
            own = workers.lanes_of[worker]
            mine = asked[own.start : own.stop]
            buffers.asked[own.start : own.stop] = mine
            buffers.partial[worker] = ALL_LANES if mine.all() else SOME_LANES
            workers.commanded[worker] = [lane for lane in own if asked[lane]]
        return found

    # Lanes that cannot step -------------------------------------------------------------------

    def refuse_bad_lanes(self, lanes: Sequence[int]) -> None:
        """Refuse lanes that are not ascending numbers of open environments.

        Raises:
            SpecError, UsageError: If they are not.
        """
        given, n_lanes = list(lanes), self._workers.n_lanes
        if not given or given != sorted(set(given)) or given[0] < 0 or given[-1] >= n_lanes:
            raise SpecError(f"lanes should be ascending numbers below {n_lanes}, got {given}")
        closed = self._workers.closed_lanes.intersection(lanes)
        if closed:
            raise UsageError(f"environment {min(closed)} was closed by its remote")
        waiting = self._workers.requests.keys() & set(lanes)
        if waiting:
            raise UsageError(
                f"remote {min(waiting)} has a request without an answer",
                fix=f"call remotes[{min(waiting)}].recv() first",
            )

    def _refuse_unknown(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            if self._workers.tapes.peek(lane) is None:
                raise UsageError(
                    f"lane {lane} cannot go on: it was not reset, or an environment of its worker "
                    "failed in its last step or reset",
                    fix="reset it",
                )

    def refuse_stepping(self, lanes: Sequence[int]) -> None:
        """Refuse lanes that ``step_some`` let step and has yet to return."""
        stepping = {*self._ready, *itertools.chain.from_iterable(self._stepping.values())}
        for lane in lanes:
            if lane in stepping:
                raise UsageError(
                    f"lane {lane} is stepping already",
                    fix="wait until step_some() returns it, or reset it",
                )

    # First come, first served -----------------------------------------------------------------

    def take_ready(self, min_ready: int) -> list[int]:
        """Wait until that many lanes have stepped, or all; returns those that have, ascending.

        Raises:
            LaneFailure: If an environment failed; lanes of other workers are returned by the next
                call.
        """
        if not min_ready and self._stepping:
            self._workers.look()  # for callers that never wait
        n_stepping = len(self._ready) + sum(map(len, self._stepping.values()))
        wanted = min(min_ready, n_stepping)

        def are_enough() -> bool:
            self._collect()
            return bool(self._failures) or len(self._ready) >= wanted

        self._workers.wait_finished(are_enough)
        if self._failures:
            raise self._failures.pop(0)
        ready, self._ready = sorted(self._ready), []
        return ready

    def _collect(self) -> None:
        """Note which lanes have made their step, and whose step failed."""
        finished, issued = self._finished, self._issued
        for worker in [each for each in self._stepping if finished[each] == issued[each]]:
            lanes = self._stepping.pop(worker)
            if self._buffers.outcome[worker] == FAILED:
                self._failures.append(self._workers.failure(worker))
                self._note_failure(worker)
            else:
                self._ready += lanes


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
        limit_s = checked_timeout(timeout, "from 0 on, and finite")
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
        self._workers.record_reset(self._lane, seed, options or None)
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
            workers.processes.dismiss(worker)
        if len(workers.closed_lanes) == workers.n_lanes:
            workers.close()


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
