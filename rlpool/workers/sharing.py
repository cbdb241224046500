"""Pickles of what users pass to workers, and what a worker shares with the caller.

cloudpickle sends functions and data. Tensors in shared memory and ``Array`` stay shared: a worker
opens the files behind them in the caller, which keeps them open for every successor (``Shared``).
Queues, locks, values and connections of multiprocessing can only be inherited by a process that
multiprocessing spawns. What contains them is pickled again whenever a worker starts, and that
worker is spawned.
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
"""Those of multiprocessing, of torch, and of whoever registers others later."""

_TENSORS = (torch.Tensor, torch.TypedStorage, torch.UntypedStorage)

_CTYPES = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)

_MODULES_OF_INHERITED = frozenset(
    f"multiprocessing.{name}"
    for name in ("connection", "heap", "queues", "sharedctypes", "synchronize")
)

ONLY_AT_START = (
    "processes share it only from their start: pass it to create_env, create_agent or env_fns"
)
"""Why something cannot be sent to a worker that runs."""

_HOW_TO_SPAWN = (
    'make it with multiprocessing.get_context("spawn"), such as '
    'multiprocessing.get_context("spawn").Queue()'
)


class ForkOnlyError(TypeError):
    """An object can only be inherited by a process that is forked."""


class Shared:
    """What a pickle refers to; it travels with every process that starts.

    Args:
        value: What was pickled; it lives as long as this object.
        is_inherited: Whether processes can only inherit it: then it is pickled whenever one starts.
        arrived: The pickle of ``value``, in a process that has started.
    """

    def __init__(self, value: Any = None, is_inherited: bool = False, arrived: bytes = b"") -> None:
        self._value = value
        self.is_inherited = is_inherited
        self.arrived = arrived

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Read its pickle within this."""
        _being_read.append(self)
        try:
            yield
        finally:
            _being_read.pop()

    def close(self) -> None:
        """Keep nothing any longer: no further process can read the pickle. May be repeated."""
        self._value = None

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.is_inherited:
            return Shared, ()
        if getattr(context.get_spawning_popen(), "method", "") == "template":
            raise UnsafeError("only a spawned process can inherit it")
        return Shared, (None, False, _dumped(self._value).data)


class Parcel(NamedTuple):
    """An object on its way to workers.

    Attributes:
        data: Its pickle.
        shared: What the pickle refers to.
    """

    data: bytes
    shared: Shared

    def load(self) -> Any:
        """The object, in this process."""
        with self.shared.being_read():
            return pickle.loads(self.data)


def pickled(
    parts: Mapping[str, Any], value: Any, *, fix: str, label: str = "", copies: bool = False
) -> Parcel:
    """The pickle of an object for workers, and what they share with this process.

    Args:
        parts: What the object consists of, by the names that its user knows.
        value: The object.
        fix: What to do about a part that cannot be pickled.
        label: What an error calls the part, if that is not its name.
        copies: Whether tensors in shared memory are copied.

    Raises:
        WorkerStartupError: Naming the part, the path in it and the type of what cannot be pickled.
    """
    dumps = functools.partial(_dumped, copies=copies)
    with defer_signals():  # what a handler raises is not an error of the object
        try:
            pickler = dumps(value)
        except Exception as error:
            message = why_not(parts, error, label=label, dumps=dumps)
            fix = _HOW_TO_SPAWN if isinstance(error, ForkOnlyError) else fix
            raise WorkerStartupError(message, fix=fix) from error
    if not pickler.is_for_spawned:
        return Parcel(pickler.data, Shared(value))
    text = "workers are spawned: only so can they inherit what %s share"
    _LOG.info(text, " and ".join(parts), extra={"once": "inherit"})  # not from every worker
    return Parcel(pickle.dumps(_Inherited()), Shared(value, is_inherited=True))


class ByValue:
    """Data of the user on its way to a worker, where it unpickles to the data itself.

    Pickled as functions that make environments are: a class of a script or notebook is the same
    for both. Later changes of the data do not travel.

    Args:
        name: What errors call the data.
        value: The data.

    Raises:
        SpecError: Naming what cannot be pickled.
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
    """In a pickle: what the process that reads it has inherited."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, ()


def _inherited() -> Any:
    return pickle.loads(_being_read[-1].arrived)


_being_read: list[Shared] = []
"""What the pickles refer to that are being read in this process, the innermost last."""


class _PretendedPopen:
    """A process for multiprocessing that is not started."""

    DupFd = int

    def duplicate_for_child(self, fd: int) -> int:
        """A descriptor of the process."""
        return fd


def _dumped(value: Any, copies: bool = False) -> _Pickler:
    """Pickle an object, as while a process is spawned.

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
    """The pickle of an object that shares nothing."""
    pickler = _dumped(value, copies=True)
    if pickler.is_for_spawned:
        raise TypeError(ONLY_AT_START)
    return pickler.data


class _MainModule(types.ModuleType):
    """The main module of a worker."""


def begin_main_module() -> None:
    """Let this process, a worker, pickle what arrives of the caller's main module, by its name.

    Functions and classes of a script arrive as copies, with the globals that they have in the
    caller. The script that multiprocessing has imported has others of the same names.
    """
    main = _MainModule("__main__")
    vars(main).update(vars(sys.modules["__main__"]))
    sys.modules["__main__"] = main


class _Named(NamedTuple):
    """In a pickle: an object, and by name what its pickle has of the main module until then."""

    value: Any
    names: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, tuple(self)


def _named(value: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(main := sys.modules["__main__"], _MainModule):
        vars(main).update(names)
    return value


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the reducers of ``torch.multiprocessing`` for what processes share."""

    def __init__(self, copies: bool) -> None:
        self._stream = io.BytesIO()
        super().__init__(self._stream)
        self._copies = copies
        self.names: dict[str, Any] = {}
        self.is_for_spawned = False  # there is something that only spawned processes inherit

    @property
    def data(self) -> bytes:
        """The pickle."""
        return self._stream.getvalue()

    def reducer_override(self, value: Any) -> Any:
        """Reduce what is shared as multiprocessing does; leave everything else to cloudpickle."""
        if isinstance(value, type | types.FunctionType) and value.__module__ == "__main__":
            name = value.__qualname__
            if vars(sys.modules["__main__"]).get(name) is value:
                self.names[name] = value
        if isinstance(value, type) and issubclass(value, _CTYPES):
            return NotImplemented  # by its name: a copy, as cloudpickle makes, is refused by ctypes
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
        """The file of a storage that is mapped from one, or from shared memory."""
        path = storage.filename
        if path is None:
            if _mp.get_sharing_strategy() == "file_system":
                raise TypeError("torch.multiprocessing.set_sharing_strategy: use 'file_descriptor'")
            path = file_of(storage._share_fd_cpu_()[0], os.getpid())
        return torch.UntypedStorage.from_file, (path, True, storage.nbytes())


def _is_inherited(value: Any) -> bool:
    """Whether a process can only get something when it starts."""
    if isinstance(value, Shared):
        return value.is_inherited
    if isinstance(value, _CTYPES):
        return hasattr(value, "_wrapper")
    modules = {base.__module__ for base in type(value).__mro__}
    return isinstance(value, socket.socket) or not modules.isdisjoint(_MODULES_OF_INHERITED)


def _is_shared(value: Any) -> bool:
    """Whether a tensor or a storage is in shared memory.

    Those on a GPU always say so, and are copied: nobody has asked for them to be shared.
    """
    if isinstance(value, torch.Tensor):
        with suppress(Exception):  # it has none, being sparse or not initialized, for example
            return _is_shared(value.untyped_storage())
        return False
    storage = value._untyped_storage if isinstance(value, torch.TypedStorage) else value
    return storage.device.type == "cpu" and bool(storage.is_shared())
