"""Memory of three kinds, and named arrays carved out of it.

==========  ============================================================  ==================
kind        description                                                   other processes
==========  ============================================================  ==================
``local``   ordinary memory of this process                               cannot see it
``shared``  anonymous: has no name, so it cannot be left behind, and      map the same pages
            does not count towards the size of ``/dev/shm``
``memmap``  an unlinked file on disk, for data larger than memory         map the same pages
==========  ============================================================  ==================

Untouched pages cost nothing. Unpickled memory maps the same pages as the original: a pickle
contains the process id and descriptor of its sender, and the receiver opens the file through these.
This does not need a server, a thread or another descriptor per pickle, and a pickle can be received
any number of times while its sender keeps the memory. A page after the contents holds a random
name, by which a receiver recognises the file.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from rlpool.data.specs import TensorSpec
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import check_choice
from rlpool.machine.interrupts import defer_signals
from rlpool.machine.platform import (
    IS_LINUX,
    anonymous_file,
    file_of,
    human,
    memory_bounds,
    require_linux,
)

PAGE_BYTES = 4096
"""Alignment of every key: a page belongs to a single key."""

_NAME_BYTES = 16  # random, hence unique

_MUCH = 2**20  # bytes; smaller blocks come from the heap, which zeroes them
_MAP_NORESERVE = 0x4000  # on Linux; the mmap module does not define it before Python 3.12

KINDS = ("local", "shared", "memmap")
"""The kinds of memory."""

NDArray = np.ndarray[Any, Any]


def allocate(storage: str, n_bytes: int, *, directory: str | Path | None = None) -> Memory:
    """Allocate zeroed memory.

    Args:
        storage: ``"local"``, ``"shared"`` or ``"memmap"``.
        n_bytes: Size in bytes.
        directory: Directory of the file of a ``"memmap"``, by default that of temporary files.

    Raises:
        SpecError: If the kind is unknown, or there is not enough memory or disk space.
    """
    check_choice("storage", storage, KINDS)
    if storage != "local":
        require_linux(f"storage={storage!r}", 'use storage="local"')
    if storage == "memmap":
        where = tempfile.gettempdir() if directory is None else directory
        try:
            # A sparse file without a name cannot be left behind. Path refuses numbers, which
            # open() would take for descriptors.
            with tempfile.TemporaryFile(dir=Path(where)) as file:
                return Memory("memmap", n_bytes, fd=os.dup(file.fileno()))
        except TypeError:
            message = f"directory is {directory!r}"
            raise SpecError(message, fix="pass the path of a directory") from None
        except OSError as error:
            raise _refused(error, f"a file of {human(n_bytes)} in {str(where)!r}") from error
    if directory is not None:
        raise SpecError(
            f"storage={storage!r} does not use a file, but directory={str(directory)!r} was given",
            fix='omit directory, or use storage="memmap"',
        )
    there_are = min(bound.total for bound in memory_bounds())
    try:
        if n_bytes > there_are:
            raise MemoryError(f"total memory is {human(there_are)}")
        return Memory.local(n_bytes) if storage == "local" else Memory.shared(n_bytes)
    except (MemoryError, OSError, RuntimeError) as error:  # from NumPy, mmap and torch
        raise SpecError(
            f"could not allocate {storage} memory of {human(n_bytes)}: {error}",
            fix='make it smaller, or use storage="memmap"',
        ) from error


class Memory:
    """A zeroed block of bytes, mapped into this process.

    The mapping lives as long as this object or any array or tensor made from ``root()``. Shared and
    memmap memory can be pickled: every process that unpickles it maps the same pages, and within
    one process all its pickles load as the same object. A pickle is valid while its sender keeps
    the memory.

    Args:
        kind: One of ``KINDS``.
        n_bytes: Size in bytes.
        mapped: uint8 ``[n_bytes]``; by default the file is mapped.
        fd: Descriptor of the file, which is closed with this object.
        name: Name of a received file; writing a new name extends a new file to its full size.

    Attributes:
        n_bytes: As given.
        kind: As given.
    """

    _fd = -1

    def __init__(
        self,
        kind: str,
        n_bytes: int,
        mapped: torch.Tensor | None = None,
        fd: int = -1,
        name: bytes = b"",
    ) -> None:
        self._fd = fd  # first, so that it is closed if the rest fails
        self.kind, self.n_bytes = kind, n_bytes
        self._name = name or os.urandom(_NAME_BYTES)
        if fd >= 0 and not name:
            os.pwrite(fd, self._name, _round_up(n_bytes))
        self._mapped = _map(fd, n_bytes) if mapped is None else mapped
        if fd >= 0:
            _mapped_here[self._name] = self

    @classmethod
    def local(cls, n_bytes: int) -> Memory:
        """Allocate memory of this process; large blocks take each page on first use."""
        if n_bytes < _MUCH or not IS_LINUX:  # mapping it would take longer
            return cls("local", n_bytes, torch.from_numpy(np.zeros(n_bytes, np.uint8)))
        # Pages are not reserved: a block may exceed the machine's memory if it is used in part.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        mapped = mmap.mmap(-1, n_bytes, flags=flags)
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does
        zeros = np.frombuffer(mapped, np.uint8)
        return cls("local", n_bytes, torch.from_numpy(zeros))

    @classmethod
    def shared(cls, n_bytes: int, name: str = "rlpool") -> Memory:
        """Allocate anonymous shared memory; ``fd`` stays open until ``close_fd``.

        On platforms without workers, it is memory of this process.
        """
        if not IS_LINUX:
            return cls.local(n_bytes)
        with defer_signals():  # else the descriptor might stay open
            return cls("shared", n_bytes, fd=anonymous_file(name))

    @classmethod
    def attach(cls, fd: int, n_bytes: int, *, private: bool = False) -> Memory:
        """Map memory that another process made; closes the descriptor.

        Args:
            fd: Its descriptor.
            n_bytes: Its size.
            private: Whether writes of this process are hidden from others.
        """
        try:
            return cls("shared", n_bytes, _map(fd, n_bytes, private=private))
        finally:
            os.close(fd)

    @property
    def fd(self) -> int:
        """Descriptor, for sending to other processes."""
        if self._fd < 0:
            raise SpecError("this memory has no descriptor: it is local or close_fd() was called")
        return self._fd

    def close_fd(self) -> None:
        """Close the descriptor. The mapping is kept, but the memory can no longer be sent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close_fd()

    def root(self) -> NDArray:
        """Return a new uint8 array over the whole block.

        Arrays carved out of it keep this array object alive, so a weak reference to it expires
        with the last of them.
        """
        return self._mapped.numpy()

    def reserve(self, start: int, stop: int) -> None:
        """Reserve space for bytes ``start <= i < stop`` of a memmap; does nothing for other kinds.

        Writing to a page on a full disk would kill the process.

        Raises:
            SpecError: If the disk or a quota is full. Nothing has been written.
        """
        if self.kind == "memmap" and start < stop:
            try:
                os.posix_fallocate(self.fd, start, stop - start)  # takes 3 us if already reserved
            except OSError as error:
                raise _refused(error, f"{human(stop - start)} of a memmap") from error

    def __reduce__(self) -> tuple[Callable[..., Memory], tuple[Any, ...]]:
        if self.kind == "local":
            raise UsageError(
                'memory with storage="local" belongs to one process and cannot be sent',
                fix='use storage="shared", or send a copy: to_ndarray()',
            )
        return _received, (self.kind, self.n_bytes, os.getpid(), self.fd, self._name)


def _received(kind: str, n_bytes: int, pid: int, fd: int, name: bytes) -> Memory:
    known = _mapped_here.get(name)
    if known is not None and known._fd >= 0:
        return known
    path = file_of(fd, pid)
    try:
        # Opening anything else, such as a pipe, could block or have side effects.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileNotFoundError(f"{path} is another file")
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(own, _NAME_BYTES, _round_up(n_bytes)) != name:
            os.close(own)
            raise FileNotFoundError(f"{path} is another file")
    except OSError as error:
        raise UsageError(
            f"the memory sent by process {pid} no longer exists ({error})",
            fix="keep the array and its process alive until it is received",
        ) from error
    return Memory(kind, n_bytes, fd=own, name=name)


# Memory created or received by this process, by the name of its file: one mapping and one
# descriptor for any number of pickles. Forked children inherit it.
_mapped_here: WeakValueDictionary[bytes, Memory] = WeakValueDictionary()


def _refused(error: OSError, target: str) -> SpecError:
    name = errno.errorcode.get(error.errno or 0, "OSError")
    return SpecError(
        f"could not allocate {target} on disk: {error.strerror} ({name})",
        fix="free some space, choose another directory, or make it smaller",
    )


def _map(fd: int, n_bytes: int, *, private: bool = False) -> torch.Tensor:
    # torch closes its descriptor after mapping; mmap.mmap() would keep one open per block.
    path, size = file_of(fd), max(1, n_bytes)  # zero bytes cannot be mapped
    mapped = torch.from_file(path, shared=not private, size=size, dtype=torch.uint8, device="cpu")
    return mapped[:n_bytes]


def carved_bytes(specs: Mapping[str, TensorSpec], n_rows: int) -> dict[str, int]:
    """Return the number of bytes of each key in a block, in whole pages."""
    return {key: _round_up(spec.n_bytes * n_rows) for key, spec in specs.items()}


def carve(root: NDArray, specs: Mapping[str, TensorSpec], n_rows: int) -> dict[str, NDArray]:
    """Carve named arrays ``[n_rows, *shape]`` out of a block, one after another, without copying.

    Args:
        root: uint8 array of at least ``sum(carved_bytes(...).values())`` bytes.
        specs: Row shape and dtype of each key, in order.
        n_rows: Length of the first dimension of every array.
    """
    arrays: dict[str, NDArray] = {}
    start = 0
    for key, n_bytes in carved_bytes(specs, n_rows).items():
        spec = specs[key]
        part = root[start : start + spec.n_bytes * n_rows]
        arrays[key] = part.view(spec.dtype).reshape(n_rows, *spec.shape)
        start += n_bytes
    return arrays


def _round_up(n_bytes: int) -> int:
    return max(PAGE_BYTES, -(-n_bytes // PAGE_BYTES) * PAGE_BYTES)


def batch_array(spec: TensorSpec, n_lanes: int) -> NDArray:
    """Allocate a zeroed array ``[n_lanes, *shape]``, aligned like torch's tensors.

    The last bits of a matrix product can depend on the alignment of its operands.
    """
    shape = (n_lanes, *spec.shape)
    array: NDArray = torch.zeros(shape, dtype=spec.torch_dtype, device="cpu").numpy()
    return array
