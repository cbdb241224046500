"""The recording of an episode: its reset and its actions since.

A *tape* is enough to bring an environment in any process to the same state:
``rlpool.record.repeat`` resets it with the same seed and options and repeats the same actions.
Errors contain the options and actions of the episode that failed. After the death of a worker, a
lane of a ``Batcher`` continues from a tape with the agent's state, and a lane of a
``ParallelEnvManager`` from a tape.

Steps are recorded from different places:

===========================  ===============================  =====================================
recorder                     data                             method
===========================  ===============================  =====================================
``Rollout``, in a worker     a slot that an episode leaves    ``Tape.add``, once per slot
``Batcher``, in the caller   a window of all running lanes    ``WindowTapes.record``, per window
``ParallelEnvManager``, in   a row of the shared buffer of    ``LaneTapes.record_step``, per step of
the caller                   actions                          any lanes
===========================  ===============================  =====================================
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlpool.data.specs import FLAGS, Structure, TensorSpec, flattener, is_action
from rlpool.data.storage import NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.envs.columns import converted
from rlpool.envs.vec_env import Options
from rlpool.slots.blocks import Arrays, Layout, successor_key

Actions = dict[str, NDArray]
"""Action key to array ``[k, ...]``: actions of ``k`` steps."""

REWARD = "reward"

MOST_BYTES = 2**26
"""Limit for all lanes of a worker together, for errors: little compared to a worker's other memory.
With 16 lanes and one number per action, it holds 300,000 steps of each."""

MOST_BYTES_TO_RESTORE = 2**30
"""Limit for all lanes of all workers together, to restore them after the death of a worker."""

_CHUNK_BYTES = 2**14
"""Largest chunk that is joined from smaller ones."""

_JOINED_AT_ONCE = 16
"""Chunks of about the same length that are joined: a long episode in short slots then has few
chunks, and each of its steps is copied only a few times."""

_BLOCK_BYTES = 2**18
_FEWEST_ROWS, _MOST_ROWS = 16, 1024
"""Limits of a manager's block of steps, which is divided among its lanes when it is full."""


def slot_actions(layout: Layout, arrays: Arrays, slot: int, start: int, stop: int) -> Actions:
    """Return the actions of some rows of a slot: views of the block.

    Args:
        layout: Layout of the block.
        arrays: The block.
        slot: The slot.
        start: The first row.
        stop: One past the last row.
    """
    return {key: arrays.rows[key][slot, start:stop] for key in layout.step.action_keys}


def slot_steps(
    layout: Layout, arrays: Arrays, slots: Sequence[int], last_rewards: NDArray
) -> Actions:
    """Copy actions and rewards of slots, ``[n_slots, T, ...]``.

    Args:
        layout: Layout of the block.
        arrays: The block.
        slots: The slots.
        last_rewards: ``[n_slots]``: the rewards of the last actions, since each row holds the
            reward before its own action.
    """
    rows, steps = arrays.rows, {}
    for key in layout.step.action_keys:
        steps[key] = rows[key][slots]
    steps[REWARD] = rewards = np.empty((len(slots), layout.n_timesteps), rows[REWARD].dtype)
    rewards[:, :-1] = rows[REWARD][slots, 1:]
    rewards[:, -1] = last_rewards
    return steps


@dataclass(slots=True, eq=False)
class Tape:
    """An episode so far.

    Attributes:
        seed: Seed of its reset.
        options: Options of its reset.
        n_restarts: Number of automatic restarts of its lane before it.
        first_step: The step of the first action kept. An episode whose first actions were dropped
            cannot be repeated.
        chunks: The actions, ``[k, ...]`` per key, in order; optionally the rewards of the same
            steps (NaN where unknown) under ``"reward"``, and other keys of ``VecEnv.current``.
        observation: ``[...]`` per key: the observation after the last step; empty if unknown.
        state: ``[...]`` per key: the agent's state then.
    """

    seed: int = 0
    options: Options = None
    n_restarts: int = 0
    first_step: int = 0
    chunks: list[Actions] = field(default_factory=list)
    observation: Mapping[str, NDArray] = field(default_factory=dict)
    state: Mapping[str, NDArray] = field(default_factory=dict)

    @property
    def n_steps(self) -> int:
        """Steps since the reset."""
        return self.first_step + sum(map(n_rows, self.chunks))

    @property
    def why_lost(self) -> str:
        """Why the episode cannot be repeated, empty if it can."""
        reason = f"the first {self.first_step} actions of this episode were not kept"
        return reason if self.first_step else ""

    @property
    def columns(self) -> Actions:
        """All chunks joined into one."""
        return joined(self.chunks)

    @property
    def actions(self) -> Actions:
        """The kept actions, in one array per key."""
        return {key: array for key, array in self.columns.items() if is_action(key)}

    def add(self, chunk: Actions, most_bytes: int | None = None) -> None:
        """Record some steps.

        Args:
            chunk: Their values, ``[k, ...]`` per key; kept, not copied.
            most_bytes: The oldest chunks beyond this many bytes are dropped.
        """
        chunks = self.chunks
        chunks.append(chunk)
        while len(chunks) >= _JOINED_AT_ONCE and _can_be_joined(chunks[-_JOINED_AT_ONCE:]):
            chunks[-_JOINED_AT_ONCE:] = [joined(chunks[-_JOINED_AT_ONCE:])]
        while most_bytes is not None and sum(map(_n_bytes, chunks)) > most_bytes and chunks[1:]:
            self.first_step += n_rows(chunks.pop(0))

    def continued(self) -> Tape:
        """Return a copy to continue, while this tape is unchanged."""
        return replace(self, chunks=list(self.chunks))

    def without_last(self) -> Tape:
        """Return the tape without its last step."""
        if not self.chunks:
            return self
        *chunks, last = self.chunks
        if n_rows(last) > 1:
            chunks.append({key: array[:-1] for key, array in last.items()})
        return replace(self, chunks=chunks, observation={}, state={})


class LaneTapes:
    """The tapes of a ``ParallelEnvManager``'s lanes, kept by the caller, which issues the steps.

    A step of any lanes costs one copy of the whole action buffer into the next row of a block,
    which is divided among the lanes when it is full or a lane's tape is needed. Nothing is recorded
    for a lane that was not reset. A step is recorded before it is issued, so a step that is still
    running is already on the tape: see ``Tape.without_last``.

    Args:
        n_lanes: Number of lanes.
        most_bytes: Limit for all tapes together. Longer episodes cannot be repeated.
    """

    def __init__(self, n_lanes: int, most_bytes: int = MOST_BYTES_TO_RESTORE) -> None:
        self._most_bytes = most_bytes // n_lanes
        self._tapes: dict[int, Tape] = {}
        # The action buffers and their blocks:
        self._blocks: dict[str, tuple[NDArray, NDArray]] = {}
        self._stepped = np.zeros((0, n_lanes), bool)  # rows that are not on a tape yet
        self._row = 0

    def bind(self, actions: Mapping[str, NDArray]) -> None:
        """Record actions from these buffers from now on, ``[n_lanes, ...]`` per key."""
        self._divide()
        row_bytes = max(1, sum(array.nbytes for array in actions.values()))
        n_rows = max(_FEWEST_ROWS, min(_MOST_ROWS, _BLOCK_BYTES // row_bytes))
        self._blocks = {
            key: (array, np.empty((n_rows, *array.shape), array.dtype))
            for key, array in actions.items()
        }
        self._stepped = np.zeros((n_rows, self._stepped.shape[1]), bool)

    def record_step(self, lanes: Sequence[int]) -> None:
        """Record a step of some lanes, with the current actions of the buffers."""
        row, stepped = self._row, self._stepped
        if row == len(stepped):
            self._divide()
            row = 0
        for source, block in self._blocks.values():
            block[row] = source
        stepped[row, slice(None) if len(lanes) == stepped.shape[1] else lanes] = True
        self._row = row + 1

    def record_reset(self, lane: int, seed: int, options: Options) -> None:
        """Begin a new tape for a lane."""
        # Copied, because the caller may change its options afterwards.
        self._tapes[lane] = Tape(int(seed), copy.deepcopy(options) if options else None)
        self._stepped[:, lane] = False

    def forget(self, lane: int) -> None:
        """Forget a lane, which needs a reset before its next step."""
        self._tapes.pop(lane, None)

    def peek(self, lane: int) -> Tape | None:
        """Return the tape of a lane, which may lack its last steps."""
        return self._tapes.get(lane)

    def n_steps(self, lane: int) -> int:
        """Steps of a lane's episode."""
        tape = self._tapes.get(lane)
        return 0 if tape is None else tape.n_steps + int(self._stepped[:, lane].sum())

    def tape(self, lane: int) -> Tape | None:
        """Return the tape of a lane's episode up to now, ``None`` if the lane was not reset."""
        tape, rows = self._tapes.get(lane), np.flatnonzero(self._stepped[:, lane])
        if tape is not None and rows.size:
            chunk = {key: block[rows, lane] for key, (_, block) in self._blocks.items()}
            tape.add(chunk, self._most_bytes)
        self._stepped[:, lane] = False
        return tape

    def _divide(self) -> None:
        """Move all rows of the block to their lanes' tapes, and clear it."""
        for lane in range(self._stepped.shape[1]):
            self.tape(lane)
        self._row = 0


class WindowTapes:
    """The tapes of a ``Batcher``'s running lanes since one ``reset``, kept by the caller.

    A worker that dies takes its environments with it. Its successor restores its own to the same
    state: it repeats the tapes and restores the agent's states.

    Args:
        n_lanes: Lanes of all workers.
        most_bytes: Limit for all tapes together. Longer episodes cannot be repeated.

    Attributes:
        tapes: Running lane, numbered across workers, to the tape of its episode. The worker fills
            in the tapes' seeds.
        failing: Lane and seed of episodes that begin with the next window and whose reset is
            known to fail.
    """

    def __init__(self, n_lanes: int, most_bytes: int = MOST_BYTES_TO_RESTORE) -> None:
        self.tapes: dict[int, Tape] = {}
        self.failing: set[tuple[int, int]] = set()
        self._most_bytes = most_bytes // n_lanes
        self._is_enough = True

    @property
    def is_complete(self) -> bool:
        """Whether all episodes can be repeated.

        Episodes of an agent that needs a history cannot, since earlier observations are not kept.
        Nor can those of lanes that are not seeded one by one.
        """
        return self._is_enough and not any(t.why_lost for t in self.tapes.values())

    def record(
        self,
        layout: Layout,
        arrays: Arrays,
        lanes: Sequence[int],
        lanes_left: Sequence[int],
        options_of_lane: Callable[[int], Options] = lambda _: None,
    ) -> None:
        """Record a window on new tapes; the earlier ones are unchanged.

        Args:
            layout: Layout of its block.
            arrays: The block.
            lanes: The lane of each row.
            lanes_left: Lanes that continue; they have filled their slots.
            options_of_lane: Returns the reset options of episodes that begin in this window.
        """
        step, n_rows = layout.step, len(lanes)
        self._is_enough = not step.wants_history and not step.resets_together
        if not self._is_enough:
            return
        after, ends = arrays.finals, np.zeros(n_rows, bool)
        if layout.restarts:
            after = {key: arrays.rows[successor_key(key)][:, -1] for key in step.succeeded}
            ends = arrays.rows[successor_key("done")][:n_rows].sum(1)
        observation = {k: after[k][:n_rows].copy() for k in step.observation if k not in FLAGS}
        state = {key: after[key][:n_rows].copy() for key in step.state}
        row_of = {lane: row for row, lane in enumerate(lanes)}
        starts = np.maximum(0, -arrays.control["steps_before"].reshape(-1)).tolist()
        rows = [row_of[lane] for lane in lanes_left]
        steps = slot_steps(layout, arrays, rows, observation[REWARD][rows])
        tapes, self.tapes = self.tapes, {}
        for number, (lane, row) in enumerate(zip(lanes_left, rows, strict=True)):
            before = tapes.get(lane) or Tape(options=options_of_lane(lane))
            if ends[row]:
                n_restarts = before.n_restarts + int(ends[row])
                tape = Tape(options=options_of_lane(lane), n_restarts=n_restarts)
            else:
                tape = before.continued()
            if starts[lane] < layout.n_timesteps:  # otherwise it begins with the next window
                chunk = {key: array[number, starts[lane] :] for key, array in steps.items()}
                tape.add(chunk, self._most_bytes)
                tape.observation = {key: array[row] for key, array in observation.items()}
                tape.state = {key: array[row] for key, array in state.items()}
            self.tapes[lane] = tape


def tape_of(trajectories: TemporalDictTensor, row: int, left_out: Collection[str]) -> Tape:
    """Make the tape of a complete episode, with all its observations, up to ``MOST_BYTES``.

    Args:
        trajectories: Result of a batcher.
        row: Row of the episode.
        left_out: Keys of observations that need not be the same again.

    Returns:
        The tape, whose ``observation`` is the reset's.
    """
    steps = {k: trajectories[k][row].numpy() for k in trajectories if is_action(k)}
    for key in trajectories:
        after = successor_key(key)
        if after in trajectories and key not in left_out and not key.startswith("last_action"):
            steps[key] = trajectories[after][row].numpy()
    most = MOST_BYTES // sum(array[0].nbytes for array in steps.values())
    n_steps = min(int(trajectories.lengths[row]), most)
    chunk = {key: array[:n_steps].copy() for key, array in steps.items()}
    observation = {k: trajectories[k][row, 0].numpy().copy() for k in steps if not is_action(k)}
    return Tape(int(trajectories.info["seed"][row]), chunks=[chunk], observation=observation)


def action_row(
    structure: Structure | None, specs: Mapping[str, TensorSpec], action: Any
) -> Actions:
    """Convert one action to the environment's form, by key, ``[1, ...]``.

    Args:
        structure: How an action is divided into keys, ``None`` without an action space.
        specs: Specs of the keys, in the structure's order, as the environments take them.
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


def actions_of(*chunks: Mapping[str, NDArray]) -> Any:
    """Return the actions of an episode in the form of its space, copied.

    Args:
        *chunks: Columns ``[k, ...]``; empty ones are left out.
    """
    return nested_actions(joined([chunk for chunk in chunks if chunk]))


def nested_actions(columns: Mapping[str, NDArray], key: str = "action") -> Any:
    """Nest columns of actions like the space: an array, or dicts and tuples of arrays."""
    if key in columns:
        return columns[key]
    below = [other.removeprefix(f"{key}/") for other in columns if other.startswith(f"{key}/")]
    parts = {
        name: nested_actions(columns, f"{key}/{name}")
        for name in dict.fromkeys(other.partition("/")[0] for other in below)
    }
    return tuple(parts.values()) if all(map(str.isdigit, parts)) else parts


def action_columns(actions: Any, key: str = "action") -> Actions:
    """Invert ``nested_actions``; ``None`` has no columns."""
    if actions is None:
        return {}
    if not isinstance(actions, Mapping | tuple):
        return {key: np.asarray(actions)}
    parts = actions.items() if isinstance(actions, Mapping) else enumerate(actions)
    return {
        column: array
        for name, part in parts
        for column, array in action_columns(part, f"{key}/{name}").items()
    }


def n_rows(chunk: Mapping[str, NDArray]) -> int:
    """Count the steps of a chunk."""
    return len(next(iter(chunk.values()), ()))


def _n_bytes(chunk: Mapping[str, NDArray]) -> int:
    return sum(array.nbytes for array in chunk.values())


def _can_be_joined(chunks: Sequence[Mapping[str, NDArray]]) -> bool:
    """Whether chunks are small, of about the same length, and have the same dtypes and shapes."""
    if n_rows(chunks[0]) > 2 * n_rows(chunks[-1]):  # that one was joined before
        return False
    if sum(map(_n_bytes, chunks)) > _CHUNK_BYTES:
        return False
    kinds = [{k: (a.dtype, a.shape[1:]) for k, a in chunk.items()} for chunk in chunks]
    return all(kind == kinds[0] for kind in kinds)


def joined(chunks: Sequence[Mapping[str, NDArray]]) -> dict[str, NDArray]:
    """Join the steps of several chunks ``[k, ...]`` in new memory."""
    keys = chunks[0] if chunks else ()
    return {key: np.concatenate([chunk[key] for chunk in chunks]) for key in keys}
