"""Whatever processes can share, touched in a worker and looked at in the caller."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import shared_memory
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
import torch.multiprocessing
from torch import nn

from rlpool import Agent, Array, DictTensor, GymEnv

PATIENCE_S = 30.0
"""Of whoever waits for another process; all answers are there long before."""

Things = Mapping[str, Any]


class Kind(NamedTuple):
    """A kind of thing.

    Attributes:
        make: Makes one with the functions of a context of multiprocessing.
        touch: Called in the worker.
        was_touched: Called in the caller after each ``touch``.
    """

    make: Callable[[Any], Any]
    touch: Callable[[Any], Any]
    was_touched: Callable[[Any], bool]


class Counted:
    """Whether a number has grown by one since it was last looked at."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read
        self.before = 0

    def begin(self, thing: Any) -> None:
        self.before = int(self.read(thing))

    def __call__(self, thing: Any) -> bool:
        return int(self.read(thing)) == self.before + 1


class WaitedFor:
    """A condition or a barrier, for which a thread waits whenever it is told to."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self.thread: threading.Thread | None = None

    def __getstate__(self) -> Any:
        return self.made, None

    def __setstate__(self, state: Any) -> None:
        self.made, self.thread = state

    def begin(self) -> None:
        is_there = threading.Event()

        def wait() -> None:
            if hasattr(self.made, "parties"):
                is_there.set()
                self.made.wait(PATIENCE_S)
                return
            with self.made:
                is_there.set()
                self.made.wait(PATIENCE_S)

        self.thread = threading.Thread(target=wait)
        self.thread.start()
        is_there.wait(PATIENCE_S)
        if not hasattr(self.made, "parties"):
            with self.made:  # which the thread gives away when it waits
                pass

    def touch(self) -> None:
        if hasattr(self.made, "parties"):
            self.made.wait(PATIENCE_S)
            return
        with self.made:
            self.made.notify_all()

    def was_touched(self) -> bool:
        assert self.thread is not None
        self.thread.join(PATIENCE_S / 2)
        return not self.thread.is_alive()


class Ends:
    """Both ends of a line, of which the worker uses one."""

    def __init__(self, ends: tuple[Any, Any]) -> None:
        self.ours, self.theirs = ends

    def __getstate__(self) -> Any:
        return None, self.theirs

    def __setstate__(self, state: Any) -> None:
        self.ours, self.theirs = state

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


def _add(thing: Any) -> None:
    thing += 1


def _add_to_weights(module: Any) -> None:
    with torch.no_grad():
        module.weight.fill_(module.weight.view(-1)[0] + 1)


def _locked_add(thing: Any) -> None:
    with thing.get_lock():
        thing[0] += 1


def _refused(lock: Any) -> None:
    if lock.acquire(block=False):
        raise RuntimeError("it is not the lock that the caller holds")


def _held(context: Any) -> Any:
    lock = context.RLock()
    lock.acquire()
    return lock


def _locked(context: Any) -> Any:
    lock = context.Lock()
    lock.acquire()
    return lock


def _zero_module(_: Any) -> nn.Module:
    module = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(module.weight)
    return module.share_memory()


def _line(thing: Any) -> bytes:
    return bytes(thing.recv(1))


def _add_to_value(value: Any) -> None:
    with value.get_lock():
        value.value += 1


def _add_to_raw(value: Any) -> None:
    value.value += 1


def _add_to_first(array: Any) -> None:
    array[0] += 1


def _add_to_memory(memory: Any) -> None:
    numbers: Any = np.ndarray(4, np.int64, memory.buf)
    numbers[0] += 1
    del numbers


def _put(queue: Any) -> None:
    queue.put(torch.ones(2).tolist())


def _got(queue: Any) -> bool:
    return bool(queue.get(True, PATIENCE_S) == [1.0, 1.0])


def _got_and_done(queue: Any) -> bool:
    is_right = _got(queue)
    queue.task_done()
    queue.join()
    return is_right


def _was_set(event: Any) -> bool:
    is_set = bool(event.is_set())
    event.clear()
    return is_set


KINDS: dict[str, Kind] = {
    "tensor": Kind(
        lambda _: torch.zeros(3, dtype=torch.int64).share_memory_(), _add, Counted(lambda t: t[1])
    ),
    "view": Kind(
        lambda _: torch.zeros(2, 3).share_memory_().t()[1:], _add, Counted(lambda t: t[1, 1])
    ),
    "tensor with gradients": Kind(
        lambda _: torch.zeros(3).share_memory_().requires_grad_(),
        lambda t: _add(t.data),
        Counted(lambda t: t[2]),
    ),
    "storage": Kind(
        lambda _: torch.zeros(3, dtype=torch.uint8).share_memory_().untyped_storage(),
        _add_to_first,
        Counted(lambda s: s[0]),
    ),
    "module": Kind(_zero_module, _add_to_weights, Counted(lambda m: m.weight[1, 1])),
    "queue": Kind(lambda context: context.Queue(), _put, _got),
    "bounded queue": Kind(lambda context: context.Queue(2), _put, _got),
    "joinable queue": Kind(lambda context: context.JoinableQueue(), _put, _got_and_done),
    "simple queue": Kind(
        lambda context: context.SimpleQueue(), _put, lambda queue: bool(queue.get() == [1.0, 1.0])
    ),
    "value": Kind(
        lambda context: context.Value("i", 0), _add_to_value, Counted(lambda value: value.value)
    ),
    "array": Kind(
        lambda context: context.Array("d", 3), _locked_add, Counted(lambda array: array[0])
    ),
    "raw value": Kind(
        lambda context: context.RawValue("l", 0), _add_to_raw, Counted(lambda value: value.value)
    ),
    "raw array": Kind(
        lambda context: context.RawArray("f", 3), _add_to_first, Counted(lambda array: array[0])
    ),
    "event": Kind(lambda context: context.Event(), lambda event: event.set(), _was_set),
    "lock": Kind(
        _locked, lambda lock: lock.release(), lambda lock: bool(lock.acquire(timeout=PATIENCE_S))
    ),
    "held lock": Kind(_held, _refused, lambda lock: True),
    "semaphore": Kind(
        lambda context: context.Semaphore(0),
        lambda semaphore: semaphore.release(),
        lambda semaphore: bool(semaphore.acquire(timeout=PATIENCE_S)),
    ),
    "bounded semaphore": Kind(
        lambda context: context.BoundedSemaphore(1),
        lambda semaphore: semaphore.acquire(timeout=PATIENCE_S),
        lambda semaphore: not semaphore.acquire(block=False) and semaphore.release() is None,
    ),
    "condition": Kind(
        lambda context: WaitedFor(context.Condition()), WaitedFor.touch, WaitedFor.was_touched
    ),
    "barrier": Kind(
        lambda context: WaitedFor(context.Barrier(2)), WaitedFor.touch, WaitedFor.was_touched
    ),
    "connection": Kind(
        lambda context: Ends(context.Pipe()),
        lambda ends: ends.theirs.send("touched"),
        lambda ends: ends.ours.poll(PATIENCE_S) and ends.ours.recv() == "touched",
    ),
    "one-way connection": Kind(
        lambda context: Ends(context.Pipe(duplex=False)),
        lambda ends: ends.theirs.send("touched"),
        lambda ends: ends.ours.poll(PATIENCE_S) and ends.ours.recv() == "touched",
    ),
    "socket": Kind(
        lambda _: Ends(socket.socketpair()),
        lambda ends: ends.theirs.sendall(b"t"),
        lambda ends: _line(ends.ours) == b"t",
    ),
    "named memory": Kind(
        lambda _: shared_memory.SharedMemory(create=True, size=32),
        _add_to_memory,
        Counted(lambda memory: memory.buf[0]),
    ),
    "array of rlpool": Kind(
        lambda _: Array((3,), np.int64, storage="shared"),
        lambda array: array.__setitem__(0, array.to_ndarray()[0] + 1),
        Counted(lambda array: array.to_ndarray()[0]),
    ),
}


@contextmanager
def made(context: Any) -> Iterator[dict[str, Any]]:
    """One of each kind, and the switch that says that they are to be touched.

    Of several workers one takes it: a lock that two release is an error.
    """
    things = {name: kind.make(context) for name, kind in KINDS.items()}
    try:
        yield {**things, "switch": context.Semaphore(0)}
    finally:
        for thing in things.values():
            if isinstance(thing, Ends):
                thing.close()
            if isinstance(thing, shared_memory.SharedMemory):
                thing.close()
                thing.unlink()


def touch(things: Things) -> None:
    """Touch all, once for every time that the switch was turned on."""
    if not things["switch"].acquire(block=False):
        return
    for name, thing in things.items():
        if name in KINDS:
            KINDS[name].touch(thing)


def begin(things: Things) -> None:
    """Turn the switch on."""
    for name in things.keys() & KINDS.keys():
        if isinstance(things[name], WaitedFor):
            things[name].begin()
        was_touched = KINDS[name].was_touched
        if isinstance(was_touched, Counted):
            was_touched.begin(things[name])
    things["switch"].release()


def not_touched(things: Things) -> list[str]:
    """The names of things that no worker touched since ``begin``."""
    kinds = {name: kind for name, kind in KINDS.items() if name in things}
    left = [name for name, kind in kinds.items() if not kind.was_touched(things[name])]
    return left + ["switch"] * things["switch"].acquire(block=False)


class TouchingEnv(gymnasium.Env[Any, Any]):
    """Touches all when it is reset; episodes of two steps.

    Args:
        things: What to touch, ``None`` for nothing.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    max_episode_steps = 2  # for meta-RL, as are the tasks

    def __init__(self, things: Things | None) -> None:
        self.things = things
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.things is not None:
            touch(self.things)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.zeros(1, np.float32), 1.0, self.t == 2, False, {}

    def get_all_task_idx(self) -> list[int]:
        return [0, 1]

    def reset_task(self, task: Any = None) -> None:
        """There are no tasks."""


class TouchingAgent(Agent):
    """Touches all whenever it is called; always chooses 0."""

    def __init__(self, things: Things | None) -> None:
        self.things = things

    def __call__(
        self, state: Any, observation: DictTensor, agent_info: Any = None, history: Any = None
    ) -> tuple[DictTensor, DictTensor, DictTensor]:
        if self.things is not None:
            touch(self.things)
        action = torch.zeros(observation.n_elems(), dtype=torch.int64)
        return DictTensor(), DictTensor({"action": action}), DictTensor()


def create_env(seed: int, things: Things | None = None) -> GymEnv:
    return GymEnv([TouchingEnv(things)], seed)


def create_agent(things: Things | None = None) -> TouchingAgent:
    return TouchingAgent(things)


class TouchingPolicy:
    """A policy of a pool that touches all whenever it is asked."""

    def __init__(self, things: Things) -> None:
        self.things = things

    def __call__(self, state: Any) -> int:
        touch(self.things)
        return 0
