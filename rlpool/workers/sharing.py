"""Pickles of users' objects for workers, and what a worker shares with the caller.

cloudpickle sends functions and data. Tensors in shared memory and ``Array`` stay shared: a worker
opens the files behind them in the caller, which keeps them open for every successor (``Shared``).
Queues, locks, values and connections of multiprocessing can only be inherited by a process that
multiprocessing spawns. An object with any of these is pickled again whenever a worker starts, and
that worker is spawned.
"""

from __future__ import annotations

import ctypes
import functools
import io
import logging
import os
import pickle
import socket
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import context, reduction, synchronize
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.multiprocessing.reductions

from rlpool.errors import SpecError, WorkerStartupError
from rlpool.machine.interrupts import defer_signals
from rlpool.machine.pickling import why_not
from rlpool.machine.platform import file_of
from rlpool.workers.template_handle import UnsafeError

_LOG = logging.getLogger("rlpool")

_mp: Any = torch.multiprocessing  # without annotations

_reducers: Any = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
"""The reducers of multiprocessing and torch, and those registered later."""

_TENSORS = (torch.Tensor, torch.TypedStorage, torch.UntypedStorage)

_CTYPES = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)

_MODULES_OF_INHERITED = frozenset(
    f"multiprocessing.{name}"
    for name in ("connection", "heap", "queues", "sharedctypes", "synchronize")
)

ONLY_AT_START = (
    "processes can share it only from their start: pass it to create_env, create_agent or env_fns"
)
"""Why an object cannot be sent to a running worker."""

_HOW_TO_SPAWN = (
    'make it with multiprocessing.get_context("spawn"), such as '
    'multiprocessing.get_context("spawn").Queue()'
)


class ForkOnlyError(TypeError):
    """An object that only a forked process can inherit."""


class Shared:
    """The objects that a pickle refers to, passed to every process that starts.

    Args:
        value: The pickled object; it lives as long as this object.
        is_inherited: Whether processes can only inherit it; it is then pickled whenever one starts.
        arrived: The pickle of ``value``, in a process that has started.
    """

    def __init__(self, value: Any = None, is_inherited: bool = False, arrived: bytes = b"") -> None:
        self._value = value
        self.is_inherited = is_inherited
        self.arrived = arrived

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Let the pickle be read within this context."""
        _being_read.append(self)
        try:
            yield
        finally:
            _being_read.pop()

    def close(self) -> None:
        """Drop the object, after which no further process can read the pickle. Can be repeated."""
        self._value = None

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.is_inherited:
            return Shared, ()
        if getattr(context.get_spawning_popen(), "method", "") == "template":
            raise UnsafeError("only a spawned process can inherit it")
        return Shared, (None, False, _dumped(self._value).data)


class Parcel(NamedTuple):
    """A pickled object on its way to workers.

    Attributes:
        data: Its pickle.
        shared: The objects that the pickle refers to.
    """

    data: bytes
    shared: Shared

    def load(self) -> Any:
        """Unpickle the object in this process."""
        with self.shared.being_read():
            return pickle.loads(self.data)


def pickled(
    parts: Mapping[str, Any], value: Any, *, fix: str, label: str = "", copies: bool = False
) -> Parcel:
    """Pickle an object for workers, together with the objects it shares with this process.

    Args:
        parts: The parts of the object, by the names known to the user.
        value: The object.
        fix: Fix to suggest for a part that cannot be pickled.
        label: Name of the part in errors, if different.
        copies: Whether tensors in shared memory are copied.

    Raises:
        WorkerStartupError: Names the part, and the path and type of the unpicklable object in it.
    """
    dumps = functools.partial(_dumped, copies=copies)
    with defer_signals():  # an exception of a signal handler is not a pickling error
        try:
            pickler = dumps(value)
        except Exception as error:
            message = why_not(parts, error, label=label, dumps=dumps)
            fix = _HOW_TO_SPAWN if isinstance(error, ForkOnlyError) else fix
            raise WorkerStartupError(message, fix=fix) from error
    if not pickler.is_for_spawned:
        return Parcel(pickler.data, Shared(value))
    text = "workers are spawned, because only then can they inherit the objects that %s share"
    _LOG.info(text, " and ".join(parts), extra={"once": "inherit"})  # not from every worker
    return Parcel(pickle.dumps(_Inherited()), Shared(value, is_inherited=True))


class ByValue:
    """User data on its way to a worker, where it unpickles to the data itself.

    It is pickled like the functions that make environments, so that classes of a script or notebook
    are the same for both. Later changes of the data are not sent.

    Args:
        name: Name of the data in errors.
        value: The data.

    Raises:
        SpecError: Names the unpicklable part.
    """

    def __init__(self, name: str, value: Any) -> None:
        try:
            self._data = _copied(value)
        except Exception as error:
            raise SpecError(
                why_not({name: value}, error, dumps=_copied),
                fix="pass numbers, arrays, or other objects without open files and locks",
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._data,)


class _Inherited:
    """In a pickle, stands for the object that the reading process has inherited."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, ()


def _inherited() -> Any:
    return pickle.loads(_being_read[-1].arrived)


_being_read: list[Shared] = []
"""The ``Shared`` of each pickle being read in this process, the innermost last."""


class _PretendedPopen:
    """A stand-in for a process that multiprocessing is starting."""

    DupFd = int

    def duplicate_for_child(self, fd: int) -> int:
        """Return the descriptor, which is valid in this process."""
        return fd


def _dumped(value: Any, copies: bool = False) -> _Pickler:
    """Pickle an object as if a process were being spawned.

    Args:
        value: The object.
        copies: Whether tensors in shared memory are copied.
    """
    pickler, popen = _Pickler(copies), context.get_spawning_popen()
    pretended: Any = popen or _PretendedPopen()
    context.set_spawning_popen(pretended)
    try:
        pickler.dump(_Named(value, pickler.names))
    finally:
        context.set_spawning_popen(popen)
    return pickler


def _copied(value: Any) -> bytes:
    """Pickle an object that shares nothing."""
    pickler = _dumped(value, copies=True)
    if pickler.is_for_spawned:
        raise TypeError(ONLY_AT_START)
    return pickler.data


class _MainModule(types.ModuleType):
    """The main module of a worker."""


def begin_main_module() -> None:
    """Let this worker process pickle functions and classes of the caller's main module by name.

    Functions and classes of a script arrive as copies, with the globals that they have in the
    caller. The script as imported by multiprocessing has others of the same names.
    """
    main = _MainModule("__main__")
    vars(main).update(vars(sys.modules["__main__"]))
    sys.modules["__main__"] = main


class _Named(NamedTuple):
    """In a pickle: an object, and by name the parts of the main module pickled so far."""

    value: Any
    names: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, tuple(self)


def _named(value: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(main := sys.modules["__main__"], _MainModule):
        vars(main).update(names)
    return value


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the reducers of ``torch.multiprocessing`` for shared objects."""

    def __init__(self, copies: bool) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream)
        self._copies = copies
        self.names: dict[str, Any] = {}
        self.is_for_spawned = False  # whether any part can only be inherited by spawned processes

    @property
    def data(self) -> bytes:
        """The pickle."""
        return self._stream.getvalue()

    def reducer_override(self, value: Any) -> Any:
        """Reduce shared objects as multiprocessing does; leave everything else to cloudpickle."""
        if isinstance(value, type | types.FunctionType) and value.__module__ == "__main__":
            name = value.__qualname__
            if vars(sys.modules["__main__"]).get(name) is value:
                self.names[name] = value
        if isinstance(value, type) and issubclass(value, _CTYPES):
            return NotImplemented  # by name: ctypes refuses the copies that cloudpickle makes
        if _is_inherited(value):
            if isinstance(value, synchronize.SemLock) and value._semlock.name is None:  # type: ignore[attr-defined]
                raise ForkOnlyError("only forked processes inherit it")
            self.is_for_spawned = True
        elif isinstance(value, _TENSORS) and not self._copies and _is_shared(value):
            if isinstance(value, torch.UntypedStorage):
                return self._storage(value)
        else:
            return super().reducer_override(value)
        reduce = _reducers.get(type(value))
        return reduce(value) if reduce else NotImplemented  # it reduces itself

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        """Reduce a storage to the file, or shared memory, that it is mapped from."""
        path = storage.filename
        if path is None:
            if _mp.get_sharing_strategy() == "file_system":
                raise TypeError("torch.multiprocessing.set_sharing_strategy: use 'file_descriptor'")
            path = file_of(storage._share_fd_cpu_()[0], os.getpid())
        return torch.UntypedStorage.from_file, (path, True, storage.nbytes())


def _is_inherited(value: Any) -> bool:
    """Whether a process can only receive an object when it starts."""
    if isinstance(value, Shared):
        return value.is_inherited
    if isinstance(value, _CTYPES):
        return hasattr(value, "_wrapper")
    modules = {base.__module__ for base in type(value).__mro__}
    return isinstance(value, socket.socket) or not modules.isdisjoint(_MODULES_OF_INHERITED)


def _is_shared(value: Any) -> bool:
    """Whether a tensor or a storage is in shared memory.

    GPU tensors always report that they are shared; they are copied.
    """
    if isinstance(value, torch.Tensor):
        with suppress(Exception):  # no storage: sparse or uninitialized, for example
            return _is_shared(value.untyped_storage())
        return False
    storage = value._untyped_storage if isinstance(value, torch.TypedStorage) else value
    return storage.device.type == "cpu" and bool(storage.is_shared())
