"""The recording of an episode: how it began, and what was done since.

One idea serves three purposes. A *tape* is enough to bring an environment, in any process, to where
another one was: ``rlpool.record.repeat`` resets it with the same seed and options and repeats the
same actions. So a crash capsule is a tape and a failure, a lane of a ``Batcher`` whose worker died
goes on from a tape with the agent's state, and a lane of a ``ParallelEnvManager`` from a tape and
what its rows of the shared buffers hold.

What is recorded lies in different places, so it arrives in different ways:

===========================  ===============================  =====================================
who records                  what is recorded                 how
===========================  ===============================  =====================================
``Rollout``, in a worker     a slot that an episode leaves    ``Tape.add``, once per slot
``Batcher``, in the caller   a window of all running lanes    ``WindowTapes.record``, per window
``ParallelEnvManager``, in   a row of the shared buffer of    ``LaneTapes.record_step``, per step of
the caller                   actions                          any lanes; ``record_action`` for one
===========================  ===============================  =====================================
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np

from rlpool.envs.columns import converted
from rlpool.envs.vec_env import FLAGS, Options
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.memory.storage import Array
from rlpool.slots.blocks import Arrays, Layout, successor_key
from rlpool.specs import Structure, TensorSpec, flattener

Actions = dict[str, Array]
"""Action key to array ``[k, ...]``: what was done in ``k`` steps."""

REWARD = "reward"

MOST_BYTES = 2**26
"""Limit for all lanes of a worker together, for crash capsules: little compared with what a worker
takes anyway. With 16 lanes and one number per action, it is 300,000 steps of each."""

MOST_BYTES_TO_RESTORE = 2**30
"""Limit for all lanes of all workers together, to restore them after the death of a worker."""

_FEW, _CHUNK_BYTES = 32, 2**14
"""So many chunks smaller than this are joined, so that a long episode in short slots has few."""

_BLOCK_BYTES = 2**18
_MOST_ROWS, _LEAST_ROWS = 1024, 16
"""A block of steps has as many rows as fit into so many bytes, within these bounds."""


def is_action(key: str) -> bool:
    """Whether a key is one of the actions'."""
    return key == "action" or key.startswith("action/")


@dataclass(slots=True)
class Tape:
    """An episode so far.

    Attributes:
        seed: Seed of its reset.
        options: Options of its reset.
        n_restarts: How often its lane restarted on its own before it.
        first_step: The step of the first action that is kept. An episode whose first actions were
            dropped cannot be repeated.
        chunks: The actions, ``[k, ...]`` per key, in order; with ``"reward"``, what the same steps
            gave (NaN where that is not known), if that is recorded.
        observation: ``[...]`` per key: what the environment showed after the last step; empty if
            that is not known.
        state: ``[...]`` per key: the agent's state then.
        lost: Why the episode cannot be repeated, although its first actions are there.
    """

    seed: int = 0
    options: Options = None
    n_restarts: int = 0
    first_step: int = 0
    chunks: list[Actions] = field(default_factory=list)
    observation: Mapping[str, Array] = field(default_factory=dict)
    state: Mapping[str, Array] = field(default_factory=dict)
    lost: str = ""

    @property
    def n_steps(self) -> int:
        """Steps since the reset."""
        return self.first_step + sum(map(_n_rows, self.chunks))

    @property
    def why_lost(self) -> str:
        """Why the episode cannot be repeated, empty if it can."""
        if self.first_step:
            return f"the first {self.first_step} actions of this episode were not kept"
        return self.lost

    @property
    def actions(self) -> Actions:
        """The actions that are kept, in one array per key."""
        columns = _joined(self.chunks)
        columns.pop(REWARD, None)
        return columns

    @property
    def rewards(self) -> Array:
        """The rewards of the same steps; NaN where they are not known."""
        columns = _joined(self.chunks)
        unknown = np.full(_n_rows(columns), np.nan, np.float32)
        rewards: Array = columns.get(REWARD, unknown)
        return rewards

    def add(self, chunk: Actions, most_bytes: int | None = None) -> None:
        """Record some steps.

        Args:
            chunk: What was done, ``[k, ...]`` per key; kept, not copied.
            most_bytes: Beyond so many bytes the oldest chunks are dropped.
        """
        if self.lost:
            return
        self.chunks.append(chunk)
        if len(self.chunks) % _FEW == 0 or _n_bytes(chunk) >= _CHUNK_BYTES:
            self._tidy(most_bytes)

    def _tidy(self, most_bytes: int | None) -> None:
        """Join the small chunks at the end, and drop the oldest that are too many."""
        chunks = self.chunks
        small = list(takewhile(partial(_can_be_joined, chunks[-1]), reversed(chunks)))
        if small:
            chunks[-len(small) :] = [_joined(small[::-1])]
        n_over = 0 if most_bytes is None else sum(map(_n_bytes, chunks)) - most_bytes
        while n_over > 0 and len(chunks) > 1:
            dropped = chunks.pop(0)
            n_over -= _n_bytes(dropped)
            self.first_step += _n_rows(dropped)

    def head(self, n_steps: int) -> Tape:
        """The tape of the first steps; what they led to is not known."""
        chunks, n_left = [], n_steps - self.first_step
        for chunk in self.chunks:
            if n_left > 0:
                chunks.append({key: array[:n_left] for key, array in chunk.items()})
                n_left -= _n_rows(chunk)
        return replace(self, chunks=chunks, observation={}, state={})

    def without_last(self) -> tuple[Tape, Actions]:
        """The tape without its last step, and that step's action, ``[1, ...]`` per key."""
        last = self.chunks[-1] if self.chunks else {}
        action = {key: array[-1:] for key, array in last.items() if key != REWARD}
        return self.head(self.n_steps - 1), action


class LaneTapes:
    """The tapes of a ``ParallelEnvManager``'s lanes, kept by the caller, who issues the steps.

    A step of any lanes costs one copy of the whole buffer of actions, into the next row of a block
    that is divided among the lanes when it is full or when a tape is asked for. Nothing is recorded
    for a lane that was not reset. A step is recorded before it is issued, so that one that is still
    running is on the tape: see ``Tape.without_last``.

    Signal handlers that raise have to wait (``InterruptsHeld``) while its methods run; only
    ``record_step`` may be interrupted, if it gets its row and is called again.

    Args:
        n_lanes: Number of lanes.
        most_bytes: Limit for all tapes together. Episodes that are longer cannot be repeated.
    """

    def __init__(self, n_lanes: int, most_bytes: int = MOST_BYTES_TO_RESTORE) -> None:
        self._n_lanes = n_lanes
        self._most_bytes = most_bytes // n_lanes
        self._tapes: dict[int, Tape] = {}
        self._buffers: list[tuple[Array, Array]] = []  # where actions are put, and their block
        self._block: Actions = {}
        self._stepped = np.empty((0, n_lanes), bool)  # which lanes a row of the block is for
        self._start = [0] * n_lanes  # the first row of the block that is not on the lane's tape
        self._row = 0

    def bind(self, actions: Mapping[str, Array]) -> None:
        """Say where the actions of a step are put, ``[n_lanes, ...]`` per key."""
        self._divide()
        row_bytes = sum(array.nbytes for array in actions.values())
        n_rows = max(_LEAST_ROWS, min(_MOST_ROWS, _BLOCK_BYTES // max(1, row_bytes)))
        self._block = {k: np.empty((n_rows, *a.shape), a.dtype) for k, a in actions.items()}
        self._buffers = [(array, self._block[key]) for key, array in actions.items()]
        self._stepped = np.empty((n_rows, self._n_lanes), bool)

    def next_row(self) -> int:
        """The row of the next step, for a caller that may be interrupted in ``record_step``."""
        if self._row == len(self._stepped):
            with InterruptsHeld():
                self._divide()
        return self._row

    def record_step(self, lanes: Sequence[int], row: int | None = None) -> None:
        """Record a step of some lanes, with the actions that are in the buffers now.

        Args:
            lanes: The lanes.
            row: What ``next_row`` returned: recording the same step again changes nothing then.
        """
        row = self.next_row() if row is None else row
        for source, block in self._buffers:
            block[row] = source
        stepped = self._stepped[row]
        if len(lanes) == self._n_lanes:
            stepped[:] = True
        else:
            stepped[:] = False
            stepped[lanes] = True
        self._row = row + 1

    def record_action(self, lane: int, action: Actions) -> None:
        """Record a step of one lane whose action is not in the buffers, such as a remote's.

        Args:
            lane: The lane.
            action: ``[1, ...]`` per key, see ``action_row``.
        """
        tape = self.tape(lane)
        if tape is not None:
            tape.add(action, self._most_bytes)

    def record_reset(self, lane: int, seed: int, options: Options) -> None:
        """Begin a new tape; the lane's old one is of no use any more."""
        # Copied, as the caller may change its options afterwards.
        self._tapes[lane] = Tape(int(seed), copy.deepcopy(options) if options else None)
        self._start[lane] = self._row

    def forget(self, lane: int) -> None:
        """Forget a lane that needs a reset before anything else."""
        self._tapes.pop(lane, None)

    def lose(self, lane: int, why: str) -> None:
        """Note that what a lane does cannot be repeated until its next reset."""
        if lane in self._tapes:
            self._tapes[lane] = Tape(lost=why)

    def tape(self, lane: int) -> Tape | None:
        """The tape of a lane's episode up to now, ``None`` if the lane was not reset."""
        self._take_rows(lane)
        return self._tapes.get(lane)

    def _divide(self) -> None:
        """Put all rows of the block on their lanes' tapes, and begin it anew."""
        for lane in range(self._n_lanes):
            self._take_rows(lane)
        self._row = 0
        self._start = [0] * self._n_lanes

    def _take_rows(self, lane: int) -> None:
        rows = slice(self._start[lane], self._row)
        self._start[lane] = self._row
        tape, stepped = self._tapes.get(lane), self._stepped[rows, lane]
        if tape is not None and stepped.any():
            chunk = {key: block[rows, lane][stepped] for key, block in self._block.items()}
            tape.add(chunk, self._most_bytes)


class WindowTapes:
    """The tapes of a ``Batcher``'s running lanes since one ``reset``, kept by the caller.

    A worker that dies takes its environments with it. Its successor brings its own to the same
    point: it repeats the tapes and restores the agent's states.

    Args:
        n_lanes: Lanes of all workers.
        most_bytes: Limit for all tapes together. Episodes that are longer cannot be repeated.

    Attributes:
        tapes: Running lane, numbered across workers, to the tape of its episode. The tapes' seeds
            and options are filled in by the worker, which knows those of every lane.
        is_complete: Whether all episodes can be repeated. Those of an agent that asks for all
            previous steps cannot: it would have to be shown them again, and they are not kept.
    """

    def __init__(self, n_lanes: int, most_bytes: int = MOST_BYTES_TO_RESTORE) -> None:
        self._tapes: dict[int, Tape] = {}
        self._most_bytes = most_bytes // n_lanes
        self._wants_history = False
        self._row_of: dict[int, int] = {}  # of the last window
        self._observation: Actions = {}  # what its last steps led to, [rows, ...] per key
        self._state: Actions = {}

    @property
    def tapes(self) -> dict[int, Tape]:
        """Running lane, numbered across workers, to the tape of its episode."""
        found = {}
        for lane, tape in self._tapes.items():
            if tape.n_steps:  # else its episode begins with the next window
                row = self._row_of[lane]
                tape.observation = {key: a[row] for key, a in self._observation.items()}
                tape.state = {key: a[row] for key, a in self._state.items()}
            found[lane] = tape
        return found

    @property
    def is_complete(self) -> bool:
        """Whether all episodes can be repeated."""
        return not self._wants_history and not any(t.why_lost for t in self._tapes.values())

    def record(
        self, layout: Layout, arrays: Arrays, lanes: Sequence[int], lanes_left: Iterable[int]
    ) -> None:
        """Record a window, with one copy per key for all lanes.

        Args:
            layout: Layout of its block.
            arrays: The block.
            lanes: Which lane each row is.
            lanes_left: Lanes that go on; they have filled their slots.
        """
        step, n_rows = layout.step, len(lanes)
        self._wants_history = step.wants_history
        if self._wants_history:
            return
        after, ends = arrays.finals, np.zeros(n_rows, np.int64)
        if layout.restarts:
            after = {key: arrays.rows[successor_key(key)][:, -1] for key in step.succeeded}
            ends = arrays.rows[successor_key("done")][:n_rows].sum(1)
        shown = [key for key in step.observation if key not in FLAGS]
        self._observation = {key: after[key][:n_rows].copy() for key in shown}
        self._state = {key: after[key][:n_rows].copy() for key in step.state}
        self._row_of = {lane: row for row, lane in enumerate(lanes)}
        chunk = {key: a[:n_rows].copy() for key, a in arrays.rows.items() if is_action(key)}
        # Each row has the reward of the step before.
        rewards = arrays.rows[REWARD][:n_rows, 1:], self._observation[REWARD][:, None]
        chunk[REWARD] = np.concatenate(rewards, 1)
        before, self._tapes = self._tapes, {}
        starts = np.maximum(0, -arrays.control["steps_before"].reshape(-1)).tolist()
        for lane in lanes_left:
            row, start = self._row_of[lane], starts[lane]
            tape = before.get(lane) or Tape()
            if ends[row]:
                tape = Tape(n_restarts=tape.n_restarts + int(ends[row]))
            if start < layout.n_timesteps:
                tape.add(
                    {key: array[row, start:] for key, array in chunk.items()}, self._most_bytes
                )
            self._tapes[lane] = tape


def action_row(
    structure: Structure | None, specs: Mapping[str, TensorSpec], action: Any
) -> Actions:
    """One action as an environment takes it, by key, ``[1, ...]``.

    Args:
        structure: How an action falls into keys, ``None`` without an action space.
        specs: The keys, in the structure's order, as the environments take them.
        action: The action.

    Raises:
        SpecError: If it does not fit.
    """
    if structure is None:
        return {"action": np.array(action)[None]}
    values = flattener(structure, "action")(action)
    return {
        key: np.array(converted(value, spec, key))[None]
        for (key, spec), value in zip(specs.items(), values, strict=True)
    }


def _n_rows(chunk: Mapping[str, Array]) -> int:
    return min((len(array) for array in chunk.values()), default=0)


def _n_bytes(chunk: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in chunk.values())


def _can_be_joined(first: Mapping[str, Array], second: Mapping[str, Array]) -> bool:
    """Whether a small chunk can be joined with another one without changing a bit of either."""
    return (
        _n_bytes(second) < _CHUNK_BYTES
        and first.keys() == second.keys()
        and all(
            (array.dtype, array.shape[1:]) == (second[key].dtype, second[key].shape[1:])
            for key, array in first.items()
        )
    )


def _joined(chunks: Sequence[Mapping[str, Array]]) -> Actions:
    """Chunks in one."""
    if not chunks:
        return {}
    return {key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]}
