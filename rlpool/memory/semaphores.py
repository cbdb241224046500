"""Semaphores that workers can open although they have no name.

A lock, queue or event of multiprocessing consists of semaphores. Those of the context ``"spawn"``
have names. Those of ``"fork"``, the default on Linux before Python 3.14, lie in memory that only
forks of a process inherit. Here, the page of such a semaphore is replaced by one of an anonymous
file, at the same address, so that everything that refers to it uses the page that workers map.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
import weakref
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from rlpool.memory.storage import Memory

_SEMAPHORE_BYTES = 32
"""``sizeof(sem_t)``: the value first, after it the number of threads that wait."""

_N_PAGES = 1024
"""Semaphores of one file; pages that are not used cost nothing."""

_MAP_FIXED = 0x10

_INSTEAD = "make it with torch.multiprocessing.get_context('spawn')"

# Unlike CDLL it keeps the interpreter's lock: no other thread uses the semaphore meanwhile.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)

_places: weakref.WeakKeyDictionary[Any, tuple[Memory, int]] = weakref.WeakKeyDictionary()
"""Where each semaphore is that was moved: its file, and its offset there."""

_newest: tuple[Any, int] = (lambda: None, 0)
"""The file that is being filled, for as long as one of its semaphores lives; its pages in use."""

_one_at_a_time = threading.RLock()


class Semaphores:
    """Moves semaphores; what other processes use is looked up once."""

    def place_of(self, lock: Any) -> tuple[Memory, int]:
        """The file of a semaphore without a name, and its offset there.

        Args:
            lock: A ``SemLock`` of multiprocessing.

        Raises:
            RuntimeError: If it is in use where it cannot be moved.
        """
        with _one_at_a_time:
            return _places.get(lock) or self._moved(lock)

    @staticmethod
    def rebuilt(kind: Any, what: int, most: int, fd: Any, n_bytes: int, offset: int) -> Any:
        """The semaphore in another process.

        Args:
            kind: Its class.
            what: Whether it is recursive.
            most: Its largest value.
            fd: The file.
            n_bytes: Size of the file.
            offset: Where it is in the file.
        """
        lock = kind.__new__(kind)
        lock._memory = memory = Memory.attach(fd.detach(), n_bytes)
        lock.__setstate__((memory.root().ctypes.data + offset, what, most, None))
        return lock

    def _moved(self, lock: Any) -> tuple[Memory, int]:
        global _newest
        address = lock._semlock.handle
        self._check(address)
        memory, page = _newest[0](), _newest[1]
        if memory is None or page == _N_PAGES:
            memory, page = Memory.shared(_N_PAGES * mmap.PAGESIZE, "rlpool-semaphores"), 0
        _newest = weakref.ref(memory), page + 1
        offset = page * mmap.PAGESIZE
        how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
        ctypes.memmove(memory.root().ctypes.data + offset, address, _SEMAPHORE_BYTES)
        if _libc.mmap(address, mmap.PAGESIZE, *how, memory.fd, offset) != address:
            raise RuntimeError(
                f"it cannot be moved ({os.strerror(ctypes.get_errno())}): {_INSTEAD}"
            )
        _places[lock] = memory, offset
        return memory, offset

    def _check(self, address: int) -> None:
        """Refuse a semaphore that others would go on using where it was."""
        maps = Path("/proc/self/maps").read_bytes()
        found = re.search(rb"^%x-\S+ \S+ \S+ (\S+ \d+) +/dev/shm/sem\." % address, maps, re.M)
        if found is None:
            raise RuntimeError(f"another process sent it to this one: {_INSTEAD}")
        if (other := self._elsewhere.get(found[1])) is not None:
            raise RuntimeError(
                f"process {other} has it from a fork, and would be left alone with it: fork later, "
                f"or {_INSTEAD}"
            )
        if any(ctypes.string_at(address, 8)[4:]):
            raise RuntimeError(f"a thread is waiting for it: {_INSTEAD}")

    @cached_property
    def _elsewhere(self) -> dict[bytes, int]:
        """Semaphores without names that other processes have: their files, and a process."""
        found: dict[bytes, int] = {}
        for directory in Path("/proc").glob("[0-9]*"):
            pid = int(directory.name)
            with suppress(OSError):  # it has ended, or belongs to somebody else
                maps = (directory / "maps").read_bytes() if pid != os.getpid() else b""
                for file in re.findall(rb" (\S+ \d+) +/dev/shm/sem\.", maps):
                    found[file] = pid
        return found
