"""Memory: anonymous shared blocks, named arrays carved out of them, and their limits.

A shared block is a ``memfd``: it has no name, so nothing can be left behind, and it does not
count against the size of ``/dev/shm``. Untouched pages cost nothing. The descriptor is only
needed until every process has mapped the block.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpool.errors import SpecError, compose
from rlpool.specs import TensorSpec

PAGE_BYTES = 4096
"""Alignment of every key: keys share no page, so a page belongs to one key only."""

Array = np.ndarray[Any, Any]


class Memory:
    """A zeroed block of bytes, mapped into this process.

    The mapping lives as long as this object or any array or tensor made from ``root()``.

    Attributes:
        n_bytes: Size in bytes.
    """

    def __init__(self, mapped: torch.Tensor, fd: int | None) -> None:
        self._mapped = mapped
        self._fd = fd
        self.n_bytes = mapped.numel()

    @classmethod
    def local(cls, n_bytes: int) -> Memory:
        """Ordinary memory of this process."""
        return cls(torch.from_numpy(np.zeros(n_bytes, np.uint8)), None)

    @classmethod
    def shared(cls, n_bytes: int, name: str = "rlpool") -> Memory:
        """Anonymous shared memory; ``fd`` stays open until ``close_fd``."""
        fd = _anonymous_file(name)
        try:
            os.ftruncate(fd, n_bytes)
            return cls(_map(fd, n_bytes), fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, n_bytes: int, *, private: bool = False) -> Memory:
        """Map memory that another process made; closes the descriptor.

        Args:
            fd: Its descriptor.
            n_bytes: Its size.
            private: Keep what this process writes to itself.
        """
        try:
            return cls(_map(fd, n_bytes, private=private), None)
        finally:
            os.close(fd)

    @property
    def fd(self) -> int:
        """The descriptor, to be sent to other processes."""
        if self._fd is None:
            raise SpecError("this memory has no descriptor: it is local, or close_fd() was called")
        return self._fd

    def close_fd(self) -> None:
        """Close the descriptor; the mapping stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def root(self) -> Array:
        """A new uint8 array over the whole block.

        Everything carved out of it keeps this very object alive, so that a weak reference to it
        tells when the last user is gone.
        """
        return self._mapped.numpy()


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    # No memfd on this platform: an unlinked file is as anonymous, though backed by the disk.
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


def _map(fd: int, n_bytes: int, *, private: bool = False) -> torch.Tensor:
    # torch closes its own descriptor after mapping, mmap.mmap() would keep one open per block.
    directory = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return torch.from_file(
        f"{directory}/{fd}", shared=not private, size=n_bytes, dtype=torch.uint8, device="cpu"
    )


def carved_bytes(specs: Mapping[str, TensorSpec], n_rows: int) -> dict[str, int]:
    """Bytes that each key takes in a block, padding to whole pages included."""
    return {key: _round_up(spec.n_bytes * n_rows) for key, spec in specs.items()}


def carve(root: Array, specs: Mapping[str, TensorSpec], n_rows: int) -> dict[str, Array]:
    """Named arrays ``[n_rows, *shape]`` that lie in a block one after another, no copy.

    Args:
        root: uint8 array of at least ``sum(carved_bytes(...).values())`` bytes.
        specs: Row shape and dtype of each key, in order.
        n_rows: Length of the first dimension of every array.
    """
    arrays: dict[str, Array] = {}
    start = 0
    for key, n_bytes in carved_bytes(specs, n_rows).items():
        spec = specs[key]
        part = root[start : start + spec.n_bytes * n_rows]
        arrays[key] = part.view(spec.dtype).reshape(n_rows, *spec.shape)
        start += n_bytes
    return arrays


def _round_up(n_bytes: int) -> int:
    return max(PAGE_BYTES, -(-n_bytes // PAGE_BYTES) * PAGE_BYTES)


def batch_array(spec: TensorSpec, n_lanes: int) -> Array:
    """A zeroed array ``[n_lanes, *shape]``, aligned as torch aligns its tensors.

    The last bits of a matrix product can depend on the alignment of its operands.
    """
    shape = (n_lanes, *spec.shape)
    array: Array = torch.zeros(shape, dtype=spec.torch_dtype, device="cpu").numpy()
    return array


def machine_bytes() -> int:
    """Memory that this machine, or the container around this process, has in all."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_container_limits()])


def free_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    try:
        text = Path("/proc/meminfo").read_text()
        kilobytes = next(line for line in text.splitlines() if line.startswith("MemAvailable"))
        available = int(kilobytes.split()[1]) * 1024
    except (OSError, StopIteration):
        available = machine_bytes()
    return min([available, *_container_limits()])


def _container_limits() -> list[int]:
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return limits


def check_size(bytes_of_key: Mapping[str, int], advice: str) -> bool:
    """Refuse a block that the machine cannot hold.

    Args:
        bytes_of_key: Bytes per key.
        advice: Which arguments to lower, for the message.

    Returns:
        True if the block fits into what is free now, False if it fits only into the machine.

    Raises:
        SpecError: If it is larger than the machine's or the container's memory.
    """
    total = sum(bytes_of_key.values())
    if total > machine_bytes():
        largest = sorted(bytes_of_key.items(), key=lambda item: -item[1])[:5]
        keys = ", ".join(f"{key} {human(n_bytes)}" for key, n_bytes in largest)
        raise SpecError(
            compose(
                f"the slots would need {human(total)} ({keys}), "
                f"but there are {human(machine_bytes())} in all",
                fix=advice,
            )
        )
    return total <= free_bytes()


def human(n_bytes: int) -> str:
    """A size for messages, such as ``"1.5 GiB"``."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
