"""The caller's blocks, which are used again once the user has dropped what was made of them.

A block is owned by the workers until each is done with its request; then by the user, until the
last tensor made from it is gone; then by the pool of free blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakSet, ref

from rlpool.data.storage import Memory, NDArray
from rlpool.errors import SpecError
from rlpool.slots.blocks import Arrays, Layout


class Block:
    """One process's view of a block.

    Args:
        number: Names the block between processes.
        layout: How it is divided.
        memory: The memory.

    Attributes:
        is_taken: Whether a request uses it.
        is_forked: Whether a fork may hold it, too, in which it would be overwritten.
    """

    def __init__(self, number: int, layout: Layout, memory: Memory) -> None:
        self.number = number
        self.layout = layout
        self.memory = memory
        self.is_taken = False
        self.is_forked = False
        self._arrays: Arrays | None = None
        self._control: dict[str, NDArray] | None = None  # kept, as no user gets any of it
        self._root: ref[NDArray] | None = None
        _all_blocks.add(self)

    @property
    def arrays(self) -> Arrays:
        """The arrays. The block is not free while they, or anything made from them, are alive."""
        if self._arrays is None:
            self._control = self._control or self.layout.control_arrays(self.memory.root())
            root = self.memory.root()
            self._root = ref(root)
            self._arrays = self.layout.arrays(root, self._control)
        return self._arrays

    def take(self) -> None:
        """Begin a request's use."""
        self.is_taken = True
        control = self.arrays.control
        for name in ("length", "whole", "claim", "cancelled"):
            control[name][:] = 0
        control["running"][:] = -1

    def release(self) -> None:
        """End the request's use: the block is free once the user holds nothing of it."""
        self._arrays = None
        self.is_taken = False

    @property
    def is_free(self) -> bool:
        """Whether no request and no user holds any part of this block."""
        return not self.is_taken and not self.is_forked and not self.is_held

    @property
    def is_held(self) -> bool:
        """Whether a request or a user holds any part of this block."""
        return self._root is not None and self._root() is not None


class BlockPool:
    """The caller's blocks, which are reused once the user has dropped their results.

    Args:
        layout: Layout of all blocks.
        allocate: Makes zeroed memory of so many bytes.
    """

    # Enough for a loop that holds one result while the next is collected.
    _MAX_FREE = 2

    # A block that may be used again keeps a descriptor, for workers that have not mapped it. The
    # memory of any further block returns to the system when the user drops its result.
    _MAX_KNOWN = 16

    def __init__(self, layout: Layout, allocate: Callable[[int], Memory]) -> None:
        self.layout = layout
        self._allocate = allocate
        self._blocks: list[Block] = []
        self._n_made = 0

    def take(self) -> Block:
        """A block that is not in use, its bookkeeping cleared.

        Raises:
            SpecError: If the system has no memory for a new one.
        """
        for block in self._blocks:
            if block.is_free:
                block.take()
                return block
        n_bytes = self.layout.n_bytes
        try:
            memory = self._allocate(n_bytes)
        except (OSError, RuntimeError, MemoryError) as error:
            raise SpecError(
                f"no memory for a block of {n_bytes} bytes: {error}",
                fix="lower n_slots or n_timesteps, or drop results that are no longer needed",
            ) from error
        block = Block(self._n_made, self.layout, memory)
        block.take()
        self._n_made += 1
        self._blocks.append(block)
        return block

    def forget_surplus(self) -> list[int]:
        """Drop all but a few blocks; returns their numbers, for the workers to unmap."""
        surplus = [block for block in self._blocks if block.is_free][self._MAX_FREE :]
        surplus += [block for block in self._blocks if block.is_forked and not block.is_taken]
        kept = [block for block in self._blocks if block not in surplus]
        n_beyond = len(kept) - self._MAX_KNOWN
        surplus += [block for block in kept if not block.is_taken][: max(0, n_beyond)]
        self._blocks = [block for block in self._blocks if block not in surplus]
        for block in surplus:
            block.memory.close_fd()
        return [block.number for block in surplus]

    def close(self) -> None:
        """Close all descriptors; what was mapped stays."""
        for block in self._blocks:
            block.memory.close_fd()


_all_blocks: WeakSet[Block] = WeakSet()


def _note_fork() -> None:
    """Use no block again that a new fork of this process gets a part of."""
    for block in list(_all_blocks):
        block.is_forked |= block.is_held and block.memory.kind != "local"


os.register_at_fork(before=_note_fork)
