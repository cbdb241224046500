"""Blocks of slots: workers write episodes to them, and the user reads the episodes there.

A block is one piece of memory with ``n_slots`` slots. A slot holds up to ``n_timesteps`` steps of
one episode, key by key::

    frame   [n_slots + 1, T, 4]      rows: the value that step t started from
    action  [n_slots + 1, T]
    ...
    final/frame [n_slots, 4]         the value after the slot's last step
    control: length, dirty, claim, running, ...

Slot ``n_slots`` is a spare one that is never read: idle lanes write to it. So every step is one
indexed assignment per key, regardless of the idle lanes.

Derived values are not stored: ``_frame`` is ``frame`` one step later, with ``final/frame`` at
the end; flags such as ``done`` are True at the last step or nowhere (see ``trajectories``). In
windows whose lanes restart on their own this does not hold, so the values after each step are
stored as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any
from weakref import WeakSet, ref

import numpy as np

from rlpool.data.specs import FLAGS, TensorSpec, is_action, refuse_collisions
from rlpool.data.storage import Memory, NDArray, carved_bytes
from rlpool.errors import SpecError
from rlpool.machine.limits import check_size
from rlpool.machine.platform import at_fork
from rlpool.seeding import Seeding

NOISE_KEY = "noise"

_INT64 = np.dtype(np.int64)
_BOOL = TensorSpec((), np.dtype(bool))


def successor_key(key: str) -> str:
    """Name of a key's value after the step."""
    return f"_{key}"


_Place = tuple[str, tuple[int, ...], np.dtype[Any], int]
"""Key, shape, dtype and first byte of an array."""


@dataclass(frozen=True)
class StepSpecs:
    """Contents of one step of one lane, as determined and reported by a worker.

    Attributes:
        n_lanes: Lanes of a worker.
        auto_reset: Whether lanes restart on their own inside a window.
        observation: Every key of ``VecEnv.current``.
        output: The agent's outputs.
        state: The agent's state.
        n_noise: Random numbers per step.
        wants_history: Whether the agent requires all previous steps.
        seeding: How lanes can be seeded, see ``VectorGymEnv``.
    """

    n_lanes: int
    auto_reset: bool
    observation: Mapping[str, TensorSpec]
    output: Mapping[str, TensorSpec]
    state: Mapping[str, TensorSpec]
    n_noise: int = 0
    wants_history: bool = False
    seeding: Seeding = "episode"

    def __post_init__(self) -> None:
        succeeded = [*self.observation, *self.state]
        refuse_collisions(
            {
                "the environment": list(self.observation),
                "the agent's output": list(self.output),
                "the agent's state": list(self.state),
                "the noise": [NOISE_KEY] if self.n_noise else [],
                "the values after the step": [successor_key(key) for key in succeeded],
            }
        )

    @cached_property
    def resets_together(self) -> bool:
        """Whether one reset, with one seed, serves all lanes of a worker."""
        return self.seeding != "episode"

    @property
    def succeeded(self) -> dict[str, TensorSpec]:
        """Keys that also have a value after the step."""
        return {**self.observation, **self.state}

    @cached_property
    def action_keys(self) -> list[str]:
        """The keys of an action, among the agent's outputs."""
        return [key for key in self.output if is_action(key)]


@dataclass(frozen=True)
class Layout:
    """How a block is divided.

    Args:
        step: Contents of a step.
        n_slots: Number of slots.
        n_timesteps: Steps per slot.
        n_workers: Number of workers that write into a block, at least 1.
        restarts: Whether lanes restart inside a slot (a ``Batcher`` with auto-reset).
    """

    step: StepSpecs
    n_slots: int
    n_timesteps: int
    n_workers: int
    restarts: bool = False

    @cached_property
    def rows(self) -> dict[str, TensorSpec]:
        """Contents of a row of a slot."""
        step = self.step
        rows = {**step.succeeded, **step.output}
        if step.n_noise:
            rows[NOISE_KEY] = TensorSpec((step.n_noise,), np.dtype(np.float32))
        if self.restarts:
            after = {successor_key(key): spec for key, spec in step.succeeded.items()}
            return {**rows, **after}
        return {key: spec for key, spec in rows.items() if key not in FLAGS}

    @cached_property
    def keys(self) -> list[str]:
        """Keys of trajectories, stored or derived."""
        if self.restarts:
            return list(self.rows)
        after = [successor_key(key) for key in self.step.succeeded]
        others = *FLAGS, "initial_state", successor_key("initial_state")
        return list(dict.fromkeys([*self.rows, *after, *others]))

    @cached_property
    def finals(self) -> dict[str, TensorSpec]:
        """Values stored at the end of a slot."""
        if self.restarts:
            return {}
        # initial_state is never True after a step.
        return {key: s for key, s in self.step.succeeded.items() if key != "initial_state"}

    @property
    def control(self) -> dict[str, TensorSpec]:
        """Bookkeeping shared by the workers and the caller, int64 each."""
        shapes = {
            "length": (self.n_slots,),  # steps in each slot
            "starts": (self.n_slots,),  # 1 where the slot's first step starts an episode
            "dirty": (self.n_slots + 1,),  # rows that may differ from zero
            "complete": (self.n_slots,),  # 1 where slot i holds all of episode i
            "claim": (self.n_workers, self.step.n_lanes),  # the last claim of each lane
            "running": (self.n_workers, self.step.n_lanes),  # episode of each lane, -1 if none
            "slot": (self.n_workers, self.step.n_lanes),  # the slot that each lane writes to
            "row": (self.n_workers, self.step.n_lanes),  # slot * n_timesteps + step, of each lane
            "steps_before": (self.n_workers, self.step.n_lanes),  # steps in earlier slots
            "over": (self.n_workers,),  # whether each worker's part is over
            "cancelled": (1,),
        }
        return {key: TensorSpec(shape, _INT64) for key, shape in shapes.items()}

    def steps_in_slot(self, control: Mapping[str, NDArray], worker: int) -> NDArray:
        """Return the steps of a worker's lanes in their slots, ``n_timesteps`` if a slot is full.

        The row alone is ambiguous: the one past a full slot is the first of the next slot.
        """
        steps = control["row"][worker] - control["slot"][worker] * self.n_timesteps
        # A lane between two slots, or waiting for one, has written to neither.
        return np.where((steps < 0) | (steps > self.n_timesteps), 0, steps)

    def bytes_of_key(self) -> dict[str, int]:
        """Return bytes per key, including final values, without control arrays."""
        sizes: Counter[str] = Counter()
        for specs, n in self._areas[1:]:
            sizes.update(carved_bytes(specs, n))
        return sizes

    @property
    def n_bytes(self) -> int:
        """Bytes of a whole block."""
        return sum(sum(carved_bytes(specs, n).values()) for specs, n in self._areas)

    def checked(self, lowerable: Sequence[str]) -> Layout:
        """Return this layout if its blocks fit into memory; warns if they exceed the free memory.

        Args:
            lowerable: The arguments among ``n_slots`` and ``n_timesteps`` that the user can change.

        Raises:
            SpecError: If a block is larger than the machine's memory; names bytes per key and the
                arguments to lower.
        """
        sizes = self.bytes_of_key()
        sizes["rlpool's bookkeeping"] = self.n_bytes - sum(sizes.values())
        lower = f"lower {' or '.join(lowerable)}" if lowerable else "use fewer environments"

        def advice(n_free: int) -> str:
            factor = -(-self.n_bytes // max(1, n_free))
            return f"{lower}, by a factor of {factor}"

        name = f"a block of {self.n_slots} slots of {self.n_timesteps} steps"
        check_size(sizes, advice, name)
        return self

    @cached_property
    def places(self) -> list[list[_Place]]:
        """Key, shape, dtype and first byte of every array, by area."""
        areas, start = [], 0
        for specs, n in self._areas:
            sizes = carved_bytes(specs, n)
            starts = accumulate(sizes.values(), initial=start)
            places = zip(specs.items(), starts, strict=False)  # the last start is the end
            areas.append([(key, (n, *s.shape), s.dtype, place) for (key, s), place in places])
            start += sum(sizes.values())
        # There is one set of control arrays.
        areas[0] = [(key, shape[1:], dtype, place) for key, shape, dtype, place in areas[0]]
        return areas

    @property
    def _areas(self) -> tuple[tuple[dict[str, TensorSpec], int], ...]:
        """The parts of a block: specs and number of elements."""
        rows = {
            key: TensorSpec((self.n_timesteps, *spec.shape), spec.dtype)
            for key, spec in self.rows.items()
        }
        return (self.control, 1), (rows, self.n_slots + 1), (self.finals, self.n_slots)


class Arrays:
    """A block's memory by name, without copies.

    Args:
        layout: Layout of the block.
        root: The block: uint8 ``[n_bytes]``.

    Attributes:
        root: As given.
    """

    def __init__(self, layout: Layout, root: NDArray) -> None:
        self._layout = layout
        self.root = root

    @cached_property
    def control(self) -> dict[str, NDArray]:
        """Name to int64 array, see ``Layout.control``."""
        return self._area(0)

    @cached_property
    def rows(self) -> dict[str, NDArray]:
        """Key to ``[n_slots + 1, T, *shape]``."""
        return self._area(1)

    @cached_property
    def finals(self) -> dict[str, NDArray]:
        """Key to ``[n_slots, *shape]``."""
        return self._area(2)

    def _area(self, number: int) -> dict[str, NDArray]:
        places = self._layout.places[number]
        return {key: np.ndarray(shape, dtype, self.root, at) for key, shape, dtype, at in places}


def flat(array: NDArray, n_leading: int) -> NDArray:
    """View an array with one element per row, regardless of the shape of a row.

    The first ``n_leading`` dimensions become one; the rest of each row becomes one opaque element
    of its bytes. Assigning such elements by index is several times cheaper than assigning rows.
    """
    n_rows: int = math.prod(array.shape[:n_leading])
    if array.ndim == n_leading:
        return array.reshape(n_rows)
    n_bytes = array[(0,) * n_leading].nbytes
    if not n_bytes:
        return np.zeros(n_rows, np.bool_)  # rows without elements: nothing to write
    return array.reshape(n_rows, -1).view(f"V{n_bytes}")[:, 0]


class Block:
    """One process's view of a block.

    Args:
        number: Number of the block in messages.
        layout: Its layout.
        memory: The memory.

    Attributes:
        is_reserved: Whether a request uses it.
        is_forked: Whether a fork may hold it too; reuse would overwrite the fork's data.
    """

    def __init__(self, number: int, layout: Layout, memory: Memory) -> None:
        self.number = number
        self.layout = layout
        self.memory = memory
        self.is_reserved = False
        self.is_forked = False
        self._arrays: Arrays | None = None
        self._bytes: memoryview | None = None
        self._control: dict[str, NDArray] = {}  # not held by results, so made once
        self._root: ref[NDArray] | None = None
        _all_blocks.add(self)

    @property
    def arrays(self) -> Arrays:
        """The arrays. The block is in use while they, or objects made from them, are alive."""
        if self._arrays is None:
            if self._bytes is None:
                self._bytes = self.memory.root().data
                self._control = Arrays(self.layout, self.memory.root()).control
            root: NDArray = np.frombuffer(self._bytes, np.uint8)
            self._root = ref(root)
            self._arrays = Arrays(self.layout, root)
            self._arrays.control = self._control
        return self._arrays

    def reserve(self) -> None:
        """Begin its use by a request, with cleared bookkeeping."""
        self.is_reserved = True
        control = self.arrays.control
        for name in ("length", "complete", "claim", "over", "cancelled"):
            control[name][:] = 0
        control["running"][:] = -1

    def release(self) -> None:
        """End its use by the request: it is free once the user holds no part of it."""
        self._arrays = None
        self.is_reserved = False

    @property
    def is_free(self) -> bool:
        """Whether no request and no user holds any part of this block."""
        return not self.is_reserved and not self.is_forked and not self.is_held

    @property
    def is_held(self) -> bool:
        """Whether a request or a user holds any part of this block."""
        return self._root is not None and self._root() is not None


class BlockPool:
    """The caller's blocks, which are reused once the user has dropped their results.

    Args:
        layout: Layout of all blocks.
        allocate: Makes zeroed memory of a size in bytes.
    """

    # Enough for a loop that holds one result while the next is collected.
    _MAX_FREE = 2

    # A reusable block keeps a descriptor, for workers that have not mapped it. The memory of any
    # further block returns to the system when the user drops its result.
    _MAX_KNOWN = 16

    def __init__(self, layout: Layout, allocate: Callable[[int], Memory]) -> None:
        self.layout = layout
        self._allocate = allocate
        self._blocks: list[Block] = []
        self._n_made = 0

    def reserve(self) -> Block:
        """Reserve an unused block, with cleared bookkeeping.

        Raises:
            SpecError: If the system has no memory for a new one.
        """
        for block in self._blocks:
            if block.is_free:
                block.reserve()
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
        block.reserve()
        self._n_made += 1
        self._blocks.append(block)
        return block

    def forget_surplus(self) -> list[int]:
        """Drop all but a few blocks; returns their numbers, for the workers to unmap."""
        surplus = [block for block in self._blocks if block.is_free][self._MAX_FREE :]
        surplus += [block for block in self._blocks if block.is_forked and not block.is_reserved]
        kept = [block for block in self._blocks if block not in surplus]
        n_beyond = len(kept) - self._MAX_KNOWN
        surplus += [block for block in kept if not block.is_reserved][: max(0, n_beyond)]
        self._blocks = [block for block in self._blocks if block not in surplus]
        for block in surplus:
            block.memory.close_fd()
        return [block.number for block in surplus]

    def close(self) -> None:
        """Close all descriptors; mapped memory stays mapped."""
        for block in self._blocks:
            block.memory.close_fd()


_all_blocks: WeakSet[Block] = WeakSet()


def _note_fork() -> None:
    """Exclude blocks from reuse that a new fork of this process shares."""
    for block in list(_all_blocks):
        block.is_forked |= block.is_held and block.memory.kind != "local"


at_fork(before=_note_fork)
