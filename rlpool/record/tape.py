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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""What the tapes of a worker's lanes keep together, for crash capsules: beside what a worker takes
anyway, little; for each of 16 lanes with a number as action, 300,000 steps."""

MOST_BYTES_TO_RESTORE = 2**30
"""What the tapes of all lanes keep together where a worker's death would end what is running."""

_CHUNK_BYTES = 2**14
"""Chunks below this size are joined: an episode in one-step slots has no chunk per step."""

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

    def add(self, chunk: Mapping[str, Array], most_bytes: int | None = None) -> None:
        """Record some steps.

        Args:
            chunk: What was done, ``[k, ...]`` per key; copied.
            most_bytes: Beyond so many bytes the oldest chunks are dropped.
        """
        if self.lost:
            return
        last = self.chunks[-1] if self.chunks else {}
        if _n_bytes(last) < _CHUNK_BYTES and _are_alike(last, chunk):
            self.chunks[-1] = _joined([last, chunk])
            return
        self.chunks.append({key: np.array(array) for key, array in chunk.items()})
        while most_bytes is not None and len(self.chunks) > 1 and self._n_bytes() > most_bytes:
            self.first_step += _n_rows(self.chunks.pop(0))

    def split(self, n_steps: int) -> tuple[Tape, Actions]:
        """The tape of the first ``n_steps`` steps, and the actions of the steps after them.

        What the steps led to (``observation``, ``state``) is known of neither.
        """
        before: list[Actions] = []
        after: list[Actions] = []
        n_left = n_steps - self.first_step
        for chunk in self.chunks:
            before.append({key: array[:n_left] for key, array in chunk.items()})
            after.append({key: array[n_left:] for key, array in chunk.items()})
            n_left = max(0, n_left - _n_rows(chunk))
        chunks = [chunk for chunk in before if _n_rows(chunk)]
        rest = replace(self, chunks=[chunk for chunk in after if _n_rows(chunk)])
        return replace(self, chunks=chunks, observation={}, state={}), rest.actions

    def without_last(self) -> tuple[Tape, Actions]:
        """The tape without its last step, and that step's action, ``[1, ...]`` per key."""
        return self.split(max(self.first_step, self.n_steps - 1))

    def _n_bytes(self) -> int:
        return sum(map(_n_bytes, self.chunks))


class LaneTapes:
    """The tapes of a ``ParallelEnvManager``'s lanes, on the side of the caller, who issues steps.

    A step of any lanes costs one copy of the whole buffer of actions, into the next row of a block
    that is divided among the lanes when it is full or when somebody asks. Nothing is kept of a lane
    that was not reset. What is recorded is recorded before it is asked for, so that a step that is
    being made is on the tape: see ``Tape.without_last``.

    Handlers of signals that raise have to wait (``InterruptsHeld``) while its methods run; only
    ``record_step`` may be interrupted, if it is told its row and called again.

    Args:
        n_lanes: Number of lanes.
        most_bytes: What all tapes keep together. Episodes that are longer cannot be repeated.
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

    def record_action(self, lane: int, action: Mapping[str, Array]) -> None:
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
    """The tapes of a ``Batcher``'s running lanes since one ``reset``, on the side of the caller.

    A worker that dies takes its environments with it. Its successor brings its own to where those
    were: it repeats the tapes and puts the agent's states back.

    Args:
        n_lanes: Lanes of all workers.
        most_bytes: What all tapes keep together. Episodes that are longer cannot be repeated.

    Attributes:
        tapes: Running lane, numbered across workers, to the tape of its episode. The tapes' seeds
            and options are the worker's to fill in, which knows those of every lane.
        is_complete: Whether all episodes can be repeated. Those of an agent that asks for all
            previous steps cannot: it would have to be shown them again, and they are not kept.
    """

    def __init__(self, n_lanes: int, most_bytes: int = MOST_BYTES_TO_RESTORE) -> None:
        self.tapes: dict[int, Tape] = {}
        self._most_bytes = most_bytes // n_lanes
        self._wants_history = False

    @property
    def is_complete(self) -> bool:
        """Whether all episodes can be repeated."""
        return not self._wants_history and not any(t.why_lost for t in self.tapes.values())

    def record(
        self, layout: Layout, arrays: Arrays, lanes: Sequence[int], lanes_left: Iterable[int]
    ) -> None:
        """Record a window.

        Args:
            layout: Layout of its block.
            arrays: The block.
            lanes: Which lane each row is.
            lanes_left: Lanes that go on; they have filled their slots.
        """
        self._wants_history = layout.step.wants_history
        if self._wants_history:
            return
        tapes, self.tapes = self.tapes, {}
        row_of = {lane: row for row, lane in enumerate(lanes)}
        steps_before = arrays.control["steps_before"].reshape(-1).tolist()
        after = _values_after(layout, arrays)
        actions = {key: array for key, array in arrays.rows.items() if is_action(key)}
        for lane in lanes_left:
            row, start = row_of[lane], max(0, -steps_before[lane])
            tape = tapes.get(lane) or Tape()
            if layout.restarts and (n_ends := int(arrays.rows[_DONE][row].sum())):
                tape = Tape(n_restarts=tape.n_restarts + n_ends)
            self.tapes[lane] = tape
            if start == layout.n_timesteps:
                continue  # its episode begins with the next window
            chunk = steps_of_slot(actions, arrays.rows[REWARD], row, start)
            chunk[REWARD] = np.append(chunk[REWARD], after(REWARD, row))
            tape.add(chunk, self._most_bytes)
            shown = (key for key in layout.step.observation if key not in FLAGS)
            tape.observation = {key: after(key, row) for key in shown}
            tape.state = {key: after(key, row) for key in layout.step.state}


_DONE = successor_key("done")


def _values_after(layout: Layout, arrays: Arrays) -> Callable[[str, int], Array]:
    """A function of key and row: what the last step of a window led to, a copy."""
    if not layout.restarts:
        return lambda key, row: np.array(arrays.finals[key][row])
    return lambda key, row: np.array(arrays.rows[successor_key(key)][row, -1])


def steps_of_slot(
    actions: Mapping[str, Array], rewards: Array, slot: int, start: int, stop: int | None = None
) -> Actions:
    """What an episode did in a slot, as a chunk of views.

    Each row of a block has the reward of the step before: without ``stop``, that of the last step
    is to be appended.

    Args:
        actions: The actions' rows of the block.
        rewards: Those of the rewards.
        slot: The slot.
        start: The first row that belongs to the episode.
        stop: The row behind the last one.
    """
    chunk = {key: array[slot, start:stop] for key, array in actions.items()}
    return {**chunk, REWARD: rewards[slot, start + 1 : None if stop is None else stop + 1]}


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


def _are_alike(first: Mapping[str, Array], second: Mapping[str, Array]) -> bool:
    """Whether two chunks can be joined without changing a bit of either."""
    return first.keys() == second.keys() and all(
        (a.dtype, a.shape[1:]) == (second[key].dtype, second[key].shape[1:])
        for key, a in first.items()
    )


def _joined(chunks: Sequence[Mapping[str, Array]]) -> Actions:
    """Chunks in one."""
    if not chunks:
        return {}
    return {key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]}
