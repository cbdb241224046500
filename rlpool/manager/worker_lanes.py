"""The environments of a worker process, what it knows of each lane, and its answers to remotes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

import cloudpickle
import numpy as np

from rlpool.data.specs import Declaration
from rlpool.data.storage import NDArray
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.vec_env import LaneError, Options
from rlpool.errors import EnvError, Where, described
from rlpool.manager.buffers import Buffers
from rlpool.manager.messages import Announce, Call, Predecessor, Reply
from rlpool.observe.control import WorkerRecord
from rlpool.record.failures import text_of
from rlpool.record.repeat import batch_of, take_over
from rlpool.record.tape import action_row
from rlpool.workers.failure_policy import Recycling

_NOT_RESTORED = (
    "the environment could not be brought back to where it was when its process ended or was "
    "replaced: {}"
)
NOT_RESTORED_FIX = (
    "reset the lane; an environment can only be continued in another process if its seed, options "
    "and actions determine what it does"
)


class WorkerLanes:
    """Resets, steps and restores a worker's environments. Lanes count within the worker.

    Args:
        env: The environments.
        buffers: Where results are written.
        worker: The worker's number.
        control: Its part of the shared record.
        recycling: Counts the episodes.

    Attributes:
        env: The environments.
        buffers: The shared arrays of these lanes.
        control: As given.
        open: Lanes that were not closed.
        not_restored: Lanes that could not be restored, and why.
        changed: Lanes where an attribute was set in their episode.
    """

    def __init__(
        self,
        env: GymEnv,
        buffers: Buffers,
        worker: int,
        control: WorkerRecord,
        recycling: Recycling,
    ) -> None:
        self.env = env
        self.buffers = buffers
        self.control = control
        self.open = set(range(env.n_lanes))
        self._announced: Announce | None = None
        self._next: dict[int, int] = {}  # lane: index of its next announced episode
        self.not_restored: dict[int, str] = {}
        self.changed: set[int] = set()
        self._worker = worker
        self._recycling = recycling
        self._all = list(range(env.n_lanes))
        self._given_up: dict[int, tuple[int, int]] = {}  # see Predecessor

    def use_buffers(self) -> None:
        """Write the environments' results into the buffers, and note when observations follow."""
        env, buffers, me = self.env, self.buffers, self._worker
        env.place(buffers.observation, buffers.reward, buffers.flags)
        columns: Any = env.columns
        if not buffers.observation or columns is None:
            return
        write, step, writing = columns.write, buffers.step, buffers.writing

        def noted_write(lanes: Sequence[int], observations: Sequence[Any]) -> None:
            writing[me] = step[me]  # a worker that dies from here on leaves mixed values
            write(lanes, observations)

        columns.write = noted_write

    def restore(self, predecessor: Predecessor, n_seen: int) -> None:
        """Take the place of another worker; a step that it did not finish comes next.

        Args:
            predecessor: Where its lanes were.
            n_seen: Number of the last step that was carried out.
        """
        buffers, me = self.buffers, self._worker
        self._given_up.update(predecessor.given_up)
        for lane in predecessor.closed:
            self.close_lane(lane)
        number = buffers.step[me]
        not_compared = {*predecessor.not_compared}
        if number != n_seen and buffers.writing[me] == number:
            not_compared.update(self.asked())  # their observations may be partly written
        for lane, attributes in predecessor.attributes.items():
            for name, value in attributes.items():
                self.env.attribute(lane, "set_wrapper_attr")(name, value)
        for lane, tape in predecessor.tapes.items():
            self._find_next(lane, tape.seed)
            if not tape.n_steps and self._given_up.get(lane) == (tape.seed, -1):
                self.env.begin_lanes([lane])  # its reset fails again
                continue
            if lane not in not_compared:
                tape.observation = {key: array[lane] for key, array in buffers.observation.items()}
            try:
                take_over(self.env, lane, tape, Where(), self.control.steps, may_end=True)
            except EnvError as error:
                self.not_restored[lane] = error.what

    def why_not_restored(self, lanes: Iterable[int]) -> tuple[int, str] | None:
        """The first of some lanes that could not be restored and what to say of it, if any."""
        lane = min(self.not_restored.keys() & set(lanes), default=None)
        return None if lane is None else (lane, _NOT_RESTORED.format(self.not_restored[lane]))

    def asked(self) -> list[int]:
        """Lanes that the caller wants to step."""
        if self.buffers.partial[self._worker]:
            lanes: list[int] = np.flatnonzero(self.buffers.asked).tolist()
            return lanes
        return self._all

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of a block as the environments'."""
        self.control.env_ns[0] -= monotonic_ns()
        try:
            yield
        finally:
            self.control.end_calls()

    def note_begin(self, lane: int, seed: int) -> None:
        """Record that a lane is reset, whatever was wrong with it."""
        self.not_restored.pop(lane, None)
        self.changed.discard(lane)
        self._recycling.n_begun += 1
        self.buffers.seed[lane] = seed
        self.buffers.is_ahead[lane] = -1
        self._find_next(lane, seed)

    def reset(self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]) -> None:
        """Reset lanes, but those whose reset is known to fail: they are truncated in their step.

        Raises:
            LaneError: If an environment fails.
        """
        able: list[int] = []  # positions
        for number, (lane, seed) in enumerate(zip(lanes, seeds, strict=True)):
            self.note_begin(lane, seed)
            if self._given_up.get(lane) == (seed, -1):
                self.env.begin_lanes([lane])
            else:
                self._given_up.pop(lane, None)
                able.append(number)
        if able:
            with self.timed():
                self.env.reset_lanes(
                    [lanes[n] for n in able], [seeds[n] for n in able], [options[n] for n in able]
                )

    def step(self, lanes: list[int]) -> list[int]:
        """Step lanes with the actions in the buffers; returns those whose episode ended.

        Lanes that are given up are truncated instead.

        Raises:
            LaneError: If an environment fails.
        """
        env, actions = self.env, self.buffers.action
        if not self._given_up:
            return env.step_lanes(lanes, actions)
        given_up = [lane for lane in lanes if self._given_up.pop(lane, None) is not None]
        others = [lane for lane in lanes if lane not in given_up]
        ended = env.step_lanes(others, actions) if others else []
        env.truncate_lanes(given_up, actions)
        return sorted([*ended, *given_up])

    def announce(self, message: Announce) -> None:
        """Know which episodes will come."""
        self._announced, self._next = message, {}

    def _find_next(self, lane: int, seed: int) -> None:
        """Look which episode comes behind that with this seed, if that was announced."""
        self._next.pop(lane, None)
        if self._announced is not None:
            found = np.flatnonzero(self._announced.seeds[lane] == seed)
            if found.size:
                self._next[lane] = int(found[0]) + 1

    def begin_ahead(self, lane: int) -> None:
        """Reset a lane for its next announced episode, leaving its last values in place."""
        if self._recycling.is_due():
            return  # a successor will run it
        number, announced = self._next.get(lane), self._announced
        if announced is None or number is None or number >= len(announced.seeds[lane]):
            return
        self._next[lane] = number + 1
        self._recycling.n_begun += 1
        seed, options = announced.episode(lane, number)
        buffers, env = self.buffers, self.env
        buffers.seed[lane] = seed
        last = {key: np.array(array[lane]) for key, array in buffers.observation.items()}
        try:
            with self.timed():
                env._reset_lanes([lane], [seed], [options])
        except LaneError:
            return  # the reset will be issued, fail again, and be reported
        finally:
            for key, array in buffers.observation.items():
                buffers.ahead[key][lane] = array[lane]
                array[lane] = last[key]
        buffers.is_ahead[lane] = number

    def close_lane(self, lane: int) -> None:
        """Close one environment, whatever it says to it: nobody would be told."""
        self.open.discard(lane)
        try:
            self.env.close_lane(lane)
        except BaseException:
            return

    def close(self) -> None:
        """Close all environments that are open."""
        for lane in sorted(self.open):
            self.close_lane(lane)


# Requests of remotes -----------------------------------------------------------------------------


def answer(lanes: WorkerLanes, call: Call, here: Where) -> Reply:
    """Carry out a request to one environment.

    Args:
        lanes: The worker's environments.
        call: The request.
        here: Which worker this is.

    Raises:
        LaneError: If the environment fails in a reset or a step.
    """
    lane, command = call.lane, call.command
    try:
        if command not in ("reset", "describe") and (lost := lanes.why_not_restored([lane])):
            raise EnvError(lost[1], fix=NOT_RESTORED_FIX)
        kind, answers = _ANSWERS[command]
        return Reply(lane, command, cloudpickle.dumps((kind, answers(lanes, lane, call.data))))
    except LaneError:
        raise
    except BaseException as error:
        text = text_of(error)
        failure = EnvError(described(error), where=here, traceback_text=text)
        return Reply(lane, command, pickle.dumps(("error", text)), failure)


def _get(lanes: WorkerLanes, lane: int, data: tuple[str]) -> Any:
    return lanes.env.attribute(lane, *data)


def _set(lanes: WorkerLanes, lane: int, attribute: tuple[str, Any]) -> None:
    lanes.env.attribute(lane, "set_wrapper_attr")(*attribute)
    lanes.changed.add(lane)


def _call(lanes: WorkerLanes, lane: int, data: Any) -> Any:
    name, arguments, named = data
    value = lanes.env.attribute(lane, name)
    return value(*arguments, **named) if callable(value) else value


def _describe(lanes: WorkerLanes, lane: int, data: tuple[int, Options]) -> Declaration | None:
    """What observations and infos consist of, which a reset has to show."""
    seed, options = data
    lanes.env.forget()
    with lanes.timed():
        lanes.env.reset_lanes([lane], [seed], [options])
    return lanes.env.declaration


def _reset(lanes: WorkerLanes, lane: int, data: tuple[int, Options]) -> Any:
    seed, options = data
    lanes.note_begin(lane, seed)
    observation, *_ = _result(lanes, lambda: lanes.env.reset_lanes([lane], [seed], [options]))
    for array in lanes.buffers.action.values():
        array[lane] = 0
    return observation


def _step(lanes: WorkerLanes, lane: int, action: Any) -> Any:
    """Step one environment; returns what its remote receives."""
    env, actions = lanes.env, _with_action(lanes, lane, action)
    observation, reward, _, _, info = _result(lanes, lambda: env.step_lanes([lane], actions))
    lanes.control.n_steps[0] += 1
    done = bool(env.current["done"][lane])
    if env.current["truncated"][lane] and not env.current["terminated"][lane]:
        info = {**info, "TimeLimit.truncated": True}
    return observation, reward, done, info


def _result(lanes: WorkerLanes, call: Callable[[], Any]) -> Any:
    """What an environment itself returns to a call."""
    env = lanes.env
    env.keeps_results = True
    try:
        with lanes.timed():
            call()
        return env.results[0]
    finally:
        env.keeps_results, env.results = False, []


def _with_action(lanes: WorkerLanes, lane: int, action: Any) -> Mapping[str, NDArray]:
    """The actions of all lanes, with a remote's in its lane."""
    env, batch = lanes.env, lanes.buffers.action
    row = action_row(env.action_structure, env.native_action_specs() or {}, action)
    values = {key: array[0, ...] for key, array in row.items()}  # arrays, of objects too
    if env.action_structure is None or not batch:
        return batch_of({lane: values}, env)
    for key, value in values.items():
        batch[key][lane] = value
    return batch


_ANSWERS: dict[str, tuple[str, Callable[[WorkerLanes, int, Any], Any]]] = {
    "get_attr": ("attr", _get),
    "set_attr": ("done", _set),
    "call": ("result", _call),
    "describe": ("declaration", _describe),
    "reset": ("obs", _reset),
    "step": ("transition", _step),
}
"""What carries out a request, and how its reply begins."""
