"""Pickles of what users pass to workers, and what a worker shares with the caller.

cloudpickle sends functions and data, the reducers of ``torch.multiprocessing`` send what processes
share: tensors in shared memory, queues, locks, connections. Theirs are for a process that starts
now and reads its pickle once; here, every worker reads the same pickle, and a successor an hour
later. So the caller keeps what reading it takes (``Shared``): descriptors, and objects at whose
end a name or a piece of memory would be gone. It travels whenever a worker starts.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import context, managers, reduction, synchronize
from multiprocessing.heap import BufferWrapper
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.multiprocessing.reductions

from rlpool.data.storage import Memory
from rlpool.errors import SpecError, WorkerStartupError
from rlpool.machine.pickling import why_not
from rlpool.workers.semaphores import Semaphores, rebuilt

_mp: Any = torch.multiprocessing  # without annotations

_reducers: Any = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]
"""Those of multiprocessing, of torch, and of whoever registers others later."""

_SENT_ANY_TIME = (managers.BaseProxy, Memory)
"""What is shared and can be sent to a process that runs."""

_KEPT = (synchronize.SemLock, BufferWrapper, torch.UntypedStorage, *_SENT_ANY_TIME)
"""What must not end before the last worker has read of it: a name, memory, or a count ends too."""

_TENSORS = (torch.Tensor, torch.TypedStorage, torch.UntypedStorage)

_COPIED = (types.MethodType, functools.partial)
"""What multiprocessing pickles as well, but cloudpickle does better."""

_CTYPES = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)


ONLY_AT_START = (
    "processes share it only from their start: pass it to create_env, create_agent or env_fns"
)
"""Why something cannot be sent to a worker that runs."""


class Shared:
    """What a pickle refers to, so that it can be read in another process.

    It can be pickled for a process that starts, again and again, and holds that process's
    descriptors there.

    Args:
        fds: Descriptors, in the order of their numbers in the pickle.
        owned: Those that are closed with this object; the others belong to objects in ``kept``.
        kept: Objects that live as long as this one.
    """

    def __init__(
        self, fds: Sequence[int] = (), owned: Iterable[int] = (), kept: Iterable[Any] = ()
    ) -> None:
        self._fds = list(fds)
        self._owned = list(owned)
        self._kept = list(kept)
        self._files = [(found.st_dev, found.st_ino) for found in map(os.fstat, fds)]

    @property
    def has_descriptors(self) -> bool:
        """Whether it has to come with a process that starts."""
        return bool(self._fds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shared) and self._files == other._files

    __hash__ = None  # type: ignore[assignment]

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Read its pickle within this, once: what it keeps is closed afterwards."""
        _being_read.append(self._fds)
        try:
            yield
        finally:
            _being_read.pop()
            self.close()

    def close(self) -> None:
        """Keep nothing any longer: no further process can read the pickle. May be repeated."""
        self._fds, owned, self._owned = [], self._owned, []
        self._kept.clear()
        for fd in owned:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, ([reduction.DupFd(fd) for fd in self._fds],)


class Parcel(NamedTuple):
    """An object on its way to workers.

    Attributes:
        data: Its pickle.
        shared: What the pickle refers to.
    """

    data: bytes
    shared: Shared

    def load(self) -> Any:
        """The object, in this process, once."""
        with self.shared.being_read():
            return pickle.loads(self.data)


def pickled(
    parts: Mapping[str, Any], value: Any, *, fix: str, what: str = "", **how: Any
) -> Parcel:
    """The pickle of an object for workers, and what they share with this process.

    Args:
        parts: What the object consists of, by the names that its user knows.
        value: The object.
        fix: What to do about a part that cannot be pickled.
        what: What an error calls the part, if that is not its name.
        **how: Of ``parcel_of``.

    Raises:
        WorkerStartupError: Naming the part, the path in it and the type of what cannot be pickled.
    """
    dumps: Callable[[Any], Parcel] = functools.partial(parcel_of, **how)
    try:
        return dumps(value)
    except Exception as error:
        try:
            dumps(value).shared.close()
        except Exception:
            told = why_not(parts, error, what=what, dumps=dumps)
            raise WorkerStartupError(told, fix=fix) from error
        raise  # it can be pickled: a signal handler may have raised that


def parcel_of(value: Any, *, refusal: str = "", copies: bool = False) -> Parcel:
    """``pickled``, with whatever error the object raises.

    Args:
        value: The object.
        refusal: Why the reader cannot share anything, if it cannot.
        copies: Whether tensors in shared memory are copied, for a process that runs.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, refusal, copies)
    before = context.get_spawning_popen()
    context.set_spawning_popen(pickler)
    try:
        pickler.dump(value)
    except BaseException:
        Shared((), pickler.owned).close()
        raise
    finally:
        context.set_spawning_popen(before)
    return Parcel(stream.getvalue(), Shared(pickler.fds, pickler.owned, pickler.kept))


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
        dumps = functools.partial(parcel_of, refusal=ONLY_AT_START, copies=True)
        try:
            self._data = dumps(value).data
        except Exception as error:
            raise SpecError(
                why_not({name: value}, error, dumps=dumps),
                fix="pass numbers, arrays, or other objects without open files and locks",
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._data,)


class _Number(NamedTuple):
    """What stands for a descriptor in a pickle.

    Attributes:
        number: Which of those that come with the pickle.
    """

    number: int

    def detach(self) -> int:
        """The descriptor, for whoever reads the pickle."""
        return os.dup(_being_read[-1][self.number])


_being_read: list[Sequence[int]] = []
"""The descriptors of the pickles that are being read in this process, the innermost last."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the reducers of ``torch.multiprocessing`` for what processes share.

    For multiprocessing it is the process that is being started.
    """

    DupFd = _Number

    def __init__(self, stream: io.BytesIO, refusal: str, copies: bool) -> None:
        super().__init__(stream)
        self.fds: list[int] = []
        self.owned: list[int] = []
        self.kept: list[Any] = []
        self._refusal = refusal
        self._copies = copies
        self._borrowed: set[int] = set()  # descriptors of objects that are kept
        self._semaphores = Semaphores()

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a descriptor; returns its number."""
        if fd not in self._borrowed:
            fd = os.dup(fd)
            self.owned.append(fd)
        if fd not in self.fds:
            self.fds.append(fd)
        return self.fds.index(fd)

    def reducer_override(self, value: Any) -> Any:
        """Reduce what is shared as multiprocessing does; leave everything else to cloudpickle."""
        if isinstance(value, type) and issubclass(value, _CTYPES):
            return NotImplemented  # by its name: a copy, as cloudpickle makes, is refused by ctypes
        if not self._shares(value):
            return super().reducer_override(value)
        if self._refusal:
            raise TypeError(self._refusal)
        if isinstance(value, _KEPT):
            self.kept.append(value)
        if isinstance(value, torch.UntypedStorage):
            return self._storage(value)
        lock: Any = value
        if isinstance(value, synchronize.SemLock) and lock._semlock.name is None:
            return self._semaphore(lock)
        reduce = _reducers.get(type(value))
        return reduce(value) if reduce else NotImplemented  # it reduces itself

    def _shares(self, value: Any) -> bool:
        if isinstance(value, _TENSORS):
            return not self._copies and _is_shared(value)
        if isinstance(value, _SENT_ANY_TIME):
            return not self._copies
        if isinstance(value, _CTYPES):
            return hasattr(value, "_wrapper")
        is_known = type(value) in _reducers and type(value) not in _COPIED
        return is_known or isinstance(value, _KEPT)

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        """A storage in shared memory, or one that is mapped from a file."""
        if storage.filename is not None:
            return torch.UntypedStorage.from_file, (storage.filename, True, storage.nbytes())
        if _mp.get_sharing_strategy() == "file_system":
            return _named_storage, storage._share_filename_cpu_()
        self._borrowed.add(storage._share_fd_cpu_()[0])
        return _mp.reductions.reduce_storage(storage)

    def _semaphore(self, lock: Any) -> Any:
        """A semaphore without a name."""
        memory, offset = self._semaphores.place_of(lock)
        self._borrowed.add(memory.fd)
        about = type(lock), lock._semlock.kind, lock._semlock.maxvalue
        return rebuilt, (*about, reduction.DupFd(memory.fd), memory.n_bytes, offset)


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


def _named_storage(*where: Any) -> Any:
    """A storage in a file with a name, whose users are counted in it.

    torch counts one less when a pickle is read, since it reads every pickle once.
    """
    storage = _mp.reductions.rebuild_storage_filename(torch.UntypedStorage, *where)
    storage._shared_incref()
    return storage


def _arrived(fds: Iterable[Any]) -> Shared:
    """What a process that started has got."""
    numbers = [fd.detach() for fd in fds]
    return Shared(numbers, numbers)
