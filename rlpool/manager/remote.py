"""Requests to single environments of a ``ParallelEnvManager``."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from time import monotonic
from typing import Any

from rlpool.data.array_view import as_numpy
from rlpool.errors import SpecError, UsageError, WorkerError, described
from rlpool.machine.arguments import checked_timeout, whole_number
from rlpool.machine.calls import crash_only
from rlpool.manager.channel import Reply
from rlpool.manager.lanes import Lanes
from rlpool.record.tape import action_row
from rlpool.seeding import LaneSeeds, root_from, seed_from
from rlpool.workers.sharing import ByValue


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

    If the environment fails, the reply is ``("error", text)`` with the remote traceback, and its
    next step needs a reset. ``done`` is terminated or truncated; if the episode was only truncated,
    ``info["TimeLimit.truncated"]`` is True. The seed of each reset derives from the manager's;
    ``"seed"`` and ``"options"`` can be given along with ``"task"``.

    Args:
        lanes: All environments.
        lane: Number of this one.

    Attributes:
        error: The failure of the last ``("error", text)`` received, for ``rlpool.replay``; ``None``
            if there was none.
    """

    def __init__(self, lanes: Lanes, lane: int) -> None:
        self._lanes = self._calls = lanes
        self._lane = lane
        # Backwards, because the seeds of lanes that are reset together count forwards.
        numbers = itertools.count(-1, -1)
        self._seeds: Iterator[int] = map(partial(LaneSeeds(lanes.root, 0).seed, lane), numbers)
        self.error: WorkerError | None = None

    @crash_only
    def send(self, request: tuple[str, Any]) -> None:
        """Send a request and return at once.

        Raises:
            SpecError: If it is not one of the requests above, or its data does not fit.
            UsageError: If the last reply was not received, or the environment is closed.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hung.
        """
        lanes, lane = self._lanes, self._lane
        lanes.check_open()
        lanes.refuse_bad_lanes([lane])
        lanes.refuse_stepping([lane])
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
            lanes.request(lane, command, name)
        elif command == "seed":  # for the next resets, whose seeds come from this process
            self._seeds = _seeds_from(_checked_seed(_named(data, "seed", command)))
            lanes.replies[lane] = Reply(lane, pickle.dumps(("done", None)))
        elif command == "close":
            lanes.close_lane(lane)
        else:
            commands = "reset, step, get_attr, seed, close"
            raise SpecError(f"a request is one of {commands}, got {command!r}")

    @crash_only
    def recv(self) -> tuple[str, Any]:
        """Wait for the reply to the request.

        Raises:
            UsageError: If there is no request, or the environments are closed.
            WorkerDiedError, WorkerTimeoutError: If the worker died or hung.
        """
        lanes, lane = self._lanes, self._lane
        lanes.check_open()
        if lane not in lanes.replies:
            raise UsageError(
                "there is nothing to receive", fix=f"call remotes[{lane}].send(...) first"
            )
        message = lanes.reply(lane)
        reply: tuple[str, Any] = pickle.loads(message.reply)
        if reply[0] == "error":
            self.error = message.error
        return reply

    @crash_only
    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether a reply has arrived, waiting up to ``timeout`` seconds or without limit."""
        lanes, lane = self._lanes, self._lane
        lanes.check_open()
        limit_s = checked_timeout(timeout, "from 0 on, and finite")
        until_s = math.inf if limit_s is None else monotonic() + limit_s
        lanes.wait_until(lambda: lanes.has_reply(lane) or lane not in lanes.replies, until_s)
        return lanes.has_reply(lane)

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
        lanes, lane = self._lanes, self._lane
        lanes.wait_idle([lane])
        lanes.record_reset(lane, seed, options or None)
        lanes.request(lane, "reset", (seed, sent))

    def _step(self, data: Any) -> None:
        is_named = isinstance(data, Mapping) and list(data) == ["action"]
        action = data["action"] if is_named else data
        lanes, lane = self._lanes, self._lane
        report = lanes.report
        try:
            values = as_numpy(action) if hasattr(action, "detach") else action
            row = action_row(report.action, report.native_action, values)
        except Exception as error:
            message = f"the action {action!r:.60} does not fit the action space: {described(error)}"
            raise SpecError(message) from error
        lanes.refuse_unknown([lane])
        for key, array in lanes.buffers.action.items():
            array[lane] = row[key][0]
        lanes.tapes.record_step([lane])
        lanes.request(lane, "step", None)


def _named(data: Any, key: str, command: str) -> Any:
    """Return the only entry of a request's data."""
    if not isinstance(data, Mapping) or set(data) != {key}:
        raise SpecError(f"the data of {command!r} should be {{{key!r}: ...}}, got {data!r}")
    return data[key]


def _checked_seed(seed: Any) -> int:
    return seed_from(whole_number("a seed", seed, 0))


def _seeds_from(seed: int) -> Iterator[int]:
    """Return an iterator over a seed and the seeds derived from it."""
    stream = LaneSeeds(root_from(seed), 0)
    return itertools.chain([seed], map(partial(stream.seed, 0), itertools.count()))
