"""Memory of three kinds, and named arrays carved out of it.

==========  ============================================================  ==================
kind        what it is                                                    other processes
==========  ============================================================  ==================
``local``   ordinary memory of this process                               cannot see it
``shared``  a ``memfd``: has no name, so that nothing can be left         map the same pages
            behind, and does not count towards the size of ``/dev/shm``
``memmap``  an unlinked file on disk, for more than the memory holds      map the same pages
==========  ============================================================  ==================

Untouched pages cost nothing. Pickled memory arrives in another process as a mapping of the same
pages; ``rlpool.data.descriptors`` says how.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from rlpool.data.descriptors import Descriptor, Ticket
from rlpool.data.specs import TensorSpec
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import check_choice
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.machine.limits import human, memory_bounds

PAGE_BYTES = 4096
"""Alignment of every key: keys share no page, so a page belongs to one key only."""

_MAP_NORESERVE = 0x4000  # Linux's; the module mmap has no name for it before Python 3.12

KINDS = ("local", "shared", "memmap")
"""What ``allocate`` can make."""

NDArray = np.ndarray[Any, Any]


def allocate(
    storage: str,
    n_bytes: int,
    *,
    directory: str | Path | None = None,
    n_used: int | None = None,
) -> Memory:
    """Zeroed memory of a kind.

    Args:
        storage: ``"local"``, ``"shared"`` or ``"memmap"``.
        n_bytes: Its size.
        directory: Of the file of a ``"memmap"``, by default that of temporary files.
        n_used: How much of it will be written to, by default all: what is never touched may be
            more than the machine has.

    Raises:
        SpecError: If there is no such kind, or not enough memory or disk space.
    """
    check_choice("storage", storage, KINDS)
    if storage == "memmap":
        try:
            # Path refuses numbers, which open() takes for descriptors.
            where = Path(tempfile.gettempdir() if directory is None else directory)
            # Sparse, and without a name, so that nothing is left behind.
            with tempfile.TemporaryFile(dir=where) as file:
                return Memory.over(os.dup(file.fileno()), n_bytes, "memmap")
        except TypeError:
            what = f"directory is {directory!r}"
            raise SpecError(what, fix="pass the path of a directory") from None
        except OSError as error:
            raise _refused(error, f"a file of {human(n_bytes)} in {str(where)!r}") from error
    if directory is not None:
        raise SpecError(
            f"storage={storage!r} has no file, but directory={str(directory)!r} was given",
            fix='leave directory out, or use storage="memmap"',
        )
    needed = n_bytes if n_used is None else n_used
    there_are = min(bound.total for bound in memory_bounds())
    fix = 'make it smaller, or use storage="memmap"'
    if needed > there_are:
        what = f"{storage} memory of {human(needed)}: there are {human(there_are)} in all"
        raise SpecError(what, fix=fix)
    try:
        return Memory.local(n_bytes) if storage == "local" else Memory.shared(n_bytes)
    except (MemoryError, OSError, RuntimeError) as error:  # of NumPy, of a mapping, of torch
        what = f"{storage} memory of {human(n_bytes)}, most of it never touched: {error}"
        raise SpecError(what, fix=fix) from error


class Memory:
    """A zeroed block of bytes, mapped into this process.

    The mapping lives as long as this object or any array or tensor made from ``root()``. Shared and
    memmap memory can be pickled: every process that unpickles it maps the same pages, and within
    one process all pickles of it give the same object. A pickle is valid while its sender lives.

    Attributes:
        n_bytes: Size in bytes.
        kind: One of ``KINDS``.
    """

    def __init__(
        self, mapped: torch.Tensor, descriptor: Descriptor | None = None, kind: str = "shared"
    ) -> None:
        self._mapped = mapped
        self._descriptor = descriptor or Descriptor(-1, 0, b"none")
        self.n_bytes = mapped.numel()
        self.kind = kind
        if descriptor is not None:
            _mapped_here[descriptor.name] = self

    @classmethod
    def local(cls, n_bytes: int) -> Memory:
        """Ordinary memory of this process."""
        try:
            zeros = np.zeros(n_bytes, np.uint8)
        except MemoryError:  # more than the machine has: given to those who will not use all of it
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            mapped = mmap.mmap(-1, n_bytes, flags=flags)
            mapped.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does
            zeros = np.frombuffer(mapped, np.uint8)
        return cls(torch.from_numpy(zeros), None, "local")

    @classmethod
    def shared(cls, n_bytes: int, name: str = "rlpool") -> Memory:
        """Anonymous shared memory; ``fd`` stays open until ``close_fd``."""
        with InterruptsHeld():  # else the descriptor might stay open
            return cls.over(anonymous_file(name), n_bytes, "shared")

    @classmethod
    def over(cls, fd: int, n_bytes: int, kind: str) -> Memory:
        """Memory over a new file, whose size comes from what ``Descriptor`` writes after it."""
        descriptor = Descriptor(fd, _round_up(n_bytes))
        return cls(_map(fd, n_bytes), descriptor, kind)

    @classmethod
    def attach(cls, fd: int, n_bytes: int, *, private: bool = False) -> Memory:
        """Map memory that another process made; closes the descriptor.

        Args:
            fd: Its descriptor.
            n_bytes: Its size.
            private: Whether other processes do not see what this one writes.
        """
        try:
            return cls(_map(fd, n_bytes, private=private))
        finally:
            os.close(fd)

    @property
    def fd(self) -> int:
        """The descriptor, to send to other processes."""
        if self._descriptor.fd < 0:
            raise SpecError("this memory has no descriptor: it is local, or close_fd() was called")
        return self._descriptor.fd

    def close_fd(self) -> None:
        """Close the descriptor, so that the memory can no longer be sent; the mapping stays."""
        self._descriptor.close()

    def recall(self) -> None:
        """Keep nothing for pickles that have not arrived yet."""
        self._descriptor.recall()

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
        if self._descriptor.fd < 0:
            raise UsageError("this memory was closed", fix="send it before it is closed")
        return _received, (self._descriptor.ticket(), self.n_bytes, self.kind)


def _received(ticket: Ticket, n_bytes: int, kind: str) -> Memory:
    known = _mapped_here.get(ticket.name)
    if known is not None and known._descriptor.fd >= 0:
        known._descriptor.confirm(ticket)
        return known
    descriptor = ticket.redeem()
    return Memory(_map(descriptor.fd, n_bytes), descriptor, kind)


# Memory that this process made or received, by the name of its file: one mapping and one descriptor
# for any number of pickles. Forked children inherit it.
_mapped_here: WeakValueDictionary[bytes, Memory] = WeakValueDictionary()


def _refused(error: OSError, what: str) -> SpecError:
    name = errno.errorcode.get(error.errno or 0, "OSError")
    return SpecError(
        f"could not allocate {what} on the disk: {error.strerror} ({name})",
        fix="free some space, choose another directory, or make it smaller",
    )


def anonymous_file(name: str) -> int:
    """Descriptor of a new, unnamed file in memory."""
    return os.memfd_create(name, os.MFD_CLOEXEC)


def _map(fd: int, n_bytes: int, *, private: bool = False) -> torch.Tensor:
    # torch closes its descriptor after mapping; mmap.mmap() would keep one open per block.
    path, size = f"/proc/self/fd/{fd}", max(1, n_bytes)  # zero bytes cannot be mapped
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
