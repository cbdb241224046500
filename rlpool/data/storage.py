"""Memory of three kinds, and named arrays carved out of it.

==========  ============================================================  ==================
kind        what it is                                                    other processes
==========  ============================================================  ==================
``local``   ordinary memory of this process                               cannot see it
``shared``  anonymous: has no name, so that nothing can be left           map the same pages
            behind, and does not count towards the size of ``/dev/shm``
``memmap``  an unlinked file on disk, for more than the memory holds      map the same pages
==========  ============================================================  ==================

Untouched pages cost nothing. Pickled memory arrives in another process as a mapping of the same
pages: a pickle names the sending process and its descriptor, and the receiver opens the file
by that. This needs no server, no thread and no further descriptor per pickle, and a
pickle can be received any number of times, as long as its sender has the memory. A page after the
contents of the file holds a random name, by which a receiver recognises the file.
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
"""Alignment of every key: keys share no page, so a page belongs to one key only."""

_NAME_BYTES = 16  # random: no two files have the same

_MUCH = 2**20  # bytes: the heap would zero a free piece of its own, used or not
_MAP_NORESERVE = 0x4000  # Linux's; the module mmap has no name for it before Python 3.12

KINDS = ("local", "shared", "memmap")
"""What ``allocate`` can make."""

NDArray = np.ndarray[Any, Any]


def allocate(storage: str, n_bytes: int, *, directory: str | Path | None = None) -> Memory:
    """Zeroed memory of a kind.

    Args:
        storage: ``"local"``, ``"shared"`` or ``"memmap"``.
        n_bytes: Its size.
        directory: Of the file of a ``"memmap"``, by default that of temporary files.

    Raises:
        SpecError: If there is no such kind, or not enough memory or disk space.
    """
    check_choice("storage", storage, KINDS)
    if storage != "local":
        require_linux(f"storage={storage!r}", 'use storage="local"')
    if storage == "memmap":
        where = tempfile.gettempdir() if directory is None else directory
        try:
            # Sparse, and without a name, so that nothing is left behind. Path refuses numbers,
            # which open() takes for descriptors.
            with tempfile.TemporaryFile(dir=Path(where)) as file:
                return Memory("memmap", n_bytes, fd=os.dup(file.fileno()))
        except TypeError:
            message = f"directory is {directory!r}"
            raise SpecError(message, fix="pass the path of a directory") from None
        except OSError as error:
            raise _refused(error, f"a file of {human(n_bytes)} in {str(where)!r}") from error
    if directory is not None:
        raise SpecError(
            f"storage={storage!r} has no file, but directory={str(directory)!r} was given",
            fix='leave directory out, or use storage="memmap"',
        )
    there_are = min(bound.total for bound in memory_bounds())
    try:
        if n_bytes > there_are:
            raise MemoryError(f"there are {human(there_are)} in all")
        return Memory.local(n_bytes) if storage == "local" else Memory.shared(n_bytes)
    except (MemoryError, OSError, RuntimeError) as error:  # of NumPy, of a mapping, of torch
        raise SpecError(
            f"could not allocate {storage} memory of {human(n_bytes)}: {error}",
            fix='make it smaller, or use storage="memmap"',
        ) from error


class Memory:
    """A zeroed block of bytes, mapped into this process.

    The mapping lives as long as this object or any array or tensor made from ``root()``. Shared and
    memmap memory can be pickled: every process that unpickles it maps the same pages, and within
    one process all pickles of it give the same object. A pickle is valid while its sender has the
    memory.

    Args:
        kind: One of ``KINDS``.
        n_bytes: Size in bytes.
        mapped: uint8 ``[n_bytes]``; by default the file is mapped.
        fd: Descriptor of the file, which is closed with this object.
        name: Name of a received file; a new one gets a name, whose page makes it as long as needed.

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
        self._fd = fd  # first, to be closed if the rest fails
        self.kind, self.n_bytes = kind, n_bytes
        self._name = name or os.urandom(_NAME_BYTES)
        if fd >= 0 and not name:
            os.pwrite(fd, self._name, _round_up(n_bytes))
        self._mapped = _map(fd, n_bytes) if mapped is None else mapped
        if fd >= 0:
            _mapped_here[self._name] = self

    @classmethod
    def local(cls, n_bytes: int) -> Memory:
        """Memory of this process; of much of it each page is taken when it is first used."""
        if n_bytes < _MUCH or not IS_LINUX:  # mapping it would take longer
            return cls("local", n_bytes, torch.from_numpy(np.zeros(n_bytes, np.uint8)))
        # No page is reserved: more than the machine has is given to those who use part of it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        mapped = mmap.mmap(-1, n_bytes, flags=flags)
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does
        zeros = np.frombuffer(mapped, np.uint8)
        return cls("local", n_bytes, torch.from_numpy(zeros))

    @classmethod
    def shared(cls, n_bytes: int, name: str = "rlpool") -> Memory:
        """Anonymous shared memory; ``fd`` stays open until ``close_fd``.

        Where there are no workers to share it with, it is memory of this process.
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
            private: Whether other processes do not see what this one writes.
        """
        try:
            return cls("shared", n_bytes, _map(fd, n_bytes, private=private))
        finally:
            os.close(fd)

    @property
    def fd(self) -> int:
        """The descriptor, to send to other processes."""
        if self._fd < 0:
            raise SpecError("this memory has no descriptor: it is local, or close_fd() was called")
        return self._fd

    def close_fd(self) -> None:
        """Close the descriptor, so that the memory can no longer be sent; the mapping stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close_fd()

    def root(self) -> NDArray:
        """A new uint8 array over the whole block.

        Everything carved out of it keeps this array object alive, so a weak reference to it shows
        when the last user is gone.
        """
        return self._mapped.numpy()

    def reserve(self, start: int, stop: int) -> None:
        """Reserve space for bytes ``start <= i < stop`` of a memmap; does nothing for other kinds.

        Writing to a page for which the disk has no space would kill the process.

        Raises:
            SpecError: If the disk or a quota is full. Nothing was written.
        """
        if self.kind == "memmap" and start < stop:
            try:
                os.posix_fallocate(self.fd, start, stop - start)  # takes 3 us if it is there
            except OSError as error:
                raise _refused(error, f"{human(stop - start)} of a memmap") from error

    def __reduce__(self) -> tuple[Callable[..., Memory], tuple[Any, ...]]:
        if self.kind == "local":
            raise UsageError(
                'what has storage="local" belongs to one process and cannot be sent',
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
            f"the memory that process {pid} sent is gone ({error})",
            fix="keep the array and its process alive until it is received",
        ) from error
    return Memory(kind, n_bytes, fd=own, name=name)


# Memory that this process made or received, by the name of its file: one mapping and one descriptor
# for any number of pickles. Forked children inherit it.
_mapped_here: WeakValueDictionary[bytes, Memory] = WeakValueDictionary()


def _refused(error: OSError, target: str) -> SpecError:
    name = errno.errorcode.get(error.errno or 0, "OSError")
    return SpecError(
        f"could not allocate {target} on the disk: {error.strerror} ({name})",
        fix="free some space, choose another directory, or make it smaller",
    )


def _map(fd: int, n_bytes: int, *, private: bool = False) -> torch.Tensor:
    # torch closes its descriptor after mapping; mmap.mmap() would keep one open per block.
    path, size = file_of(fd), max(1, n_bytes)  # zero bytes cannot be mapped
    mapped = torch.from_file(path, shared=not private, size=size, dtype=torch.uint8, device="cpu")
    return mapped[:n_bytes]


def carved_bytes(specs: Mapping[str, TensorSpec], n_rows: int) -> dict[str, int]:
    """Bytes that each key takes in a block, in whole pages."""
    return {key: _round_up(spec.n_bytes * n_rows) for key, spec in specs.items()}


def carve(root: NDArray, specs: Mapping[str, TensorSpec], n_rows: int) -> dict[str, NDArray]:
    """Named arrays ``[n_rows, *shape]``, one after another in a block, not copied.

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
    """A zeroed array ``[n_lanes, *shape]``, aligned as torch aligns its tensors.

    The last bits of a matrix product can depend on the alignment of its operands.
    """
    shape = (n_lanes, *spec.shape)
    array: NDArray = torch.zeros(shape, dtype=spec.torch_dtype, device="cpu").numpy()
    return array
