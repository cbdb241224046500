"""A worker process that holds environments and carries out the caller's commands."""

from __future__ import annotations

import select
from functools import partial
from time import monotonic_ns

from rlpool.data.storage import Memory
from rlpool.envs.vec_env import LaneError
from rlpool.errors import EnvError
from rlpool.manager.buffers import FAILED, NONE_ENDED, SOME_ENDED, Buffers
from rlpool.manager.messages import (
    Announce,
    Begin,
    Call,
    LaneFailed,
    MapArrays,
    Report,
    Reset,
    Setup,
)
from rlpool.manager.startup import made_environments, report_of
from rlpool.manager.worker_lanes import NOT_RESTORED_FIX, WorkerLanes, answer
from rlpool.observe.control import WorkerRecord
from rlpool.record.failures import env_error
from rlpool.workers.payload import unpack
from rlpool.workers.sharing import Shared
from rlpool.workers.wake import Wake
from rlpool.workers.wire import Close, Message, Pipe
from rlpool.workers.worker_process import Place, Server, run

_LONGEST_SLEEP_S = 3600.0
"""Of a worker that waits; nothing happens at the end of it."""


def main(shared: Shared, wake: Wake, done: Wake, place: Place, pipe: Pipe, control_fd: int) -> None:
    """Run a worker process with environments.

    Args:
        shared: What the set-up refers to.
        wake: Is signalled when a step is issued while this process sleeps.
        done: Is signalled when a command is carried out, for a caller that sleeps.
        place: Which worker it is.
        pipe: The worker's end of its pipe.
        control_fd: Descriptor of the shared record.
    """
    make_server = partial(EnvServer, place, pipe, wake=wake, done=done)
    run(make_server, shared, place, control_fd)


class EnvServer(Server):
    """Owns a worker's environments and carries out the caller's commands.

    Args:
        place: Which worker it is.
        pipe: The line to the caller.
        control: Its part of the shared record.
        wake: What it waits for, in addition to its pipe.
        done: Is signalled when a command is carried out.
    """

    _has_begun = False  # all arrays are mapped, and the predecessor's place is taken
    _is_over = False
    _n_seen = 0  # number of the last step

    def __init__(
        self, place: Place, pipe: Pipe, control: WorkerRecord, wake: Wake, done: Wake
    ) -> None:
        super().__init__(place, pipe, control)
        self._me = place.worker
        self._wake = wake
        self._done = done

    def create(self, setup: Setup, memory: Memory | None) -> Report:
        """Create the environments."""
        env = made_environments(setup, self._place, self._control)
        self._buffers = Buffers(slice(setup.first_lane, setup.first_lane + env.n_lanes))
        self._lanes = WorkerLanes(env, self._buffers, self._me, self._control, self._recycling)
        self._closers.append(self._lanes.close)
        return report_of(env, self._me)

    def serve(self) -> None:
        """Carry out commands until told to close or all environments are closed."""
        while not self._has_begun:
            if not self._handle(*self.receive()):
                return
        wake, pipe, me, step = self._wake, self._link, self._me, self._buffers.step
        poller = select.poll()
        poller.register(pipe.fileno(), select.POLLIN)
        poller.register(wake.fd, select.POLLIN)
        wake.begin()
        while self._lanes.open and not self._is_over:
            number = step[me]
            is_new = number != self._n_seen
            events = poller.poll(0 if is_new else wake.pause(_LONGEST_SLEEP_S) * 1000)
            for fd, _ in events:
                if fd == wake.fd:
                    wake.wait()
                elif not self._handle(*pipe.receive()):
                    return
            # After the messages: they were sent before the step that both may be there for.
            if is_new and not self._is_over:
                self._n_seen = number
                self._step(number)
            if is_new or events:
                wake.begin()

    # Messages ---------------------------------------------------------------------------------

    def _handle(self, message: Message, memory: Memory | None) -> bool:
        """Carry out a message; False if it says to close."""
        if isinstance(message, Close) or self._retires(message):
            return False
        if isinstance(message, Reset):
            self._reset(message)
        elif isinstance(message, Call):
            self._answer(message)
        elif isinstance(message, Announce):
            self._lanes.announce(message)
        elif isinstance(message, MapArrays) and memory is not None:
            self._map(message, memory)
        elif isinstance(message, Begin):
            self._n_seen = message.n_seen
            if message.payload is not None and memory is not None:
                self._lanes.restore(unpack(message.payload, memory), self._n_seen)
            self._has_begun = True
            self._lanes.use_buffers()
        return True

    def _retires(self, message: Message) -> bool:
        """Whether a successor should begin the episodes of a message; then this worker retires."""
        is_call = isinstance(message, Call) and message.command == "reset"
        if not is_call and not isinstance(message, Reset):
            return False
        lanes = [message.lane] if is_call else message.lanes
        # A successor could not repeat an episode in which an attribute was set.
        if not self._recycling.is_due(len(lanes)) or not self._lanes.changed.issubset(lanes):
            return False
        self.retire()
        return True

    def _map(self, message: MapArrays, memory: Memory) -> None:
        self._buffers.map(message.specs, memory)
        asleep = self._buffers.asleep
        self._wake.share(asleep[self._me : self._me + 1])
        self._done.share(asleep[-1:])
        if message.declaration is not None:
            self._lanes.env.declare(message.declaration)
            if self._has_begun:
                self._lanes.use_buffers()

    def _reset(self, message: Reset) -> None:
        outcome = NONE_ENDED
        try:
            self._lanes.reset(message.lanes, message.seeds, message.options)
        except LaneError as error:
            self._report(message.number, error)
            outcome = FAILED
        self._conclude(message.number, outcome)

    def _step(self, number: int) -> None:
        """Step lanes with the actions in the buffers."""
        known, record, outcome = self._lanes, self._control, NONE_ENDED
        lanes = known.asked()
        why_lost = known.not_restored and known.why_not_restored(lanes)
        if why_lost:
            lane, what = why_lost
            failure = EnvError(what, where=self._here, fix=NOT_RESTORED_FIX)
            self._send(LaneFailed(number, lane, "step", failure, is_lost=True))
            self._conclude(number, FAILED)
            return
        record.env_ns[0] -= monotonic_ns()  # not timed(), which takes longer
        try:
            ended = known.step(lanes)
            record.env_ns[0] += monotonic_ns()
            record.n_steps[0] += len(lanes)
        except LaneError as error:
            record.end_calls()
            self._report(number, error)
            outcome = FAILED
        else:
            if ended:
                outcome = SOME_ENDED
                for lane in ended:
                    known.begin_ahead(lane)
        self._conclude(number, outcome)

    def _conclude(self, number: int, outcome: int) -> None:
        self._control.steps[0] += 1
        if self._is_over:
            return  # it is not carried out: a successor will do it again
        self._control.done[0] += 1
        self._buffers.outcome[self._me] = outcome
        self._buffers.finished[self._me] = number
        self._done.signal()

    def _report(self, number: int, error: LaneError, request: str = "") -> None:
        failure = env_error(error, self._here)
        self._send(LaneFailed(number, error.lane, error.call, failure, request=request))
        self._is_over = self._place.policy.restarts_on_env_errors

    def _answer(self, call: Call) -> None:
        """Carry out a request to one environment."""
        if call.command == "close":
            self._lanes.close_lane(call.lane)
            return
        try:
            reply = answer(self._lanes, call, self._here)
        except LaneError as error:
            self._control.steps[0] += 1
            self._report(0, error, call.command)
        else:
            self._control.steps[0] += 1
            self._control.done[0] += 1
            self._send(reply)
