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

from rlpool.data.storage import Memory

_SEMAPHORE_BYTES = 32
"""``sizeof(sem_t)``: the value first, after it the number of threads that wait."""

_N_PAGES = 1024
"""Semaphores of one file; pages that are not used cost nothing."""

_HOW = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10  # MAP_FIXED

# Unlike CDLL it keeps the interpreter's lock: no other thread uses the semaphore meanwhile.
_mmap = ctypes.PyDLL(None).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)

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
            RuntimeError: If somebody would go on using it where it was.
        """
        with _one_at_a_time:
            if lock not in _places:
                self._check(lock._semlock.handle)
                _places[lock] = _moved(lock._semlock.handle)
            return _places[lock]

    def _check(self, address: int) -> None:
        maps = Path("/proc/self/maps").read_bytes()
        found = re.search(rb"^%x-\S+ \S+ \S+ (\S+ \d+) +/dev/shm/sem\." % address, maps, re.M)
        if found is None:
            why = "this process has it from another one: "
        elif (user := self._elsewhere.get(found[1])) is not None:
            why = f"process {user} has it already: start forks later, or "
        elif any(ctypes.string_at(address, 8)[4:]):
            why = "a thread waits for it: let threads wait once the workers have started, or "
        else:
            return
        fix = "make it with torch.multiprocessing.get_context('spawn')"
        raise RuntimeError(f"it is for forks, and {why}{fix}")

    @cached_property
    def _elsewhere(self) -> dict[bytes, int]:
        """Files of semaphores that other processes have, each with a process."""
        found: dict[bytes, int] = {}
        for directory in Path("/proc").glob("[0-9]*"):
            if directory.name == str(os.getpid()):
                continue
            with suppress(OSError):  # it has ended, or belongs to somebody else
                maps = (directory / "maps").read_bytes()
                for file in re.findall(rb" (\S+ \d+) +/dev/shm/sem\.", maps):
                    found[file] = int(directory.name)
        return found


def _moved(address: int) -> tuple[Memory, int]:
    """Move a semaphore to a new place."""
    global _newest
    memory, page = _newest[0](), _newest[1]
    if memory is None or page == _N_PAGES:
        memory, page = Memory.shared(_N_PAGES * mmap.PAGESIZE, "rlpool-semaphores"), 0
    _newest = weakref.ref(memory), page + 1
    offset = page * mmap.PAGESIZE
    ctypes.memmove(memory.root().ctypes.data + offset, address, _SEMAPHORE_BYTES)
    if _mmap(address, mmap.PAGESIZE, *_HOW, memory.fd, offset) != address:
        raise MemoryError("there is no memory to move it")
    return memory, offset


def rebuilt(kind: Any, what: int, most: int, fd: Any, n_bytes: int, offset: int) -> Any:
    """A semaphore in another process.

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
    lock._is_fork_ctx = True  # multiprocessing refuses to send it on, except to forks
    return lock
