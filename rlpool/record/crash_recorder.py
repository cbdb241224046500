"""Keeps what a crash capsule needs while episodes run, at next to no cost.

The actions of a lane's current slot are in the block anyway. What has left it, the earlier chunks
of a long episode, is copied once per chunk when the lane gives its slot up, together with those of
all lanes that do so in the same step. So a step costs nothing, and a step of an episode longer than
a slot takes the memory of an action and a reward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rlpool.envs.vec_env import FLAGS, VecEnv
from rlpool.loop.plan import Episode, Resumed
from rlpool.memory.storage import Array
from rlpool.record.failures import Scene, described

_LOG = logging.getLogger("rlpool")

MAX_PAST_BYTES = 2**26
"""What the lanes of a worker keep together of chunks that have left the block: beside what a
worker takes anyway, little; for a lane of 16 with a number as action, 300,000 steps."""

_REWARD = "reward"


class Chunk(NamedTuple):
    """What a lane did in one slot.

    Attributes:
        columns: Actions and rewards, ``[lanes, step, ...]`` each, in the order of their keys: of
            all lanes that left their slots in the same step, as they were copied at once.
        row: Whose row of them it is.
        start: The first step that belongs to the episode.
    """

    columns: Sequence[Array]
    row: int
    start: int

    def read(self) -> list[Array]:
        """Actions and rewards, ``[step, ...]`` each."""
        return [column[self.row, self.start :] for column in self.columns]


@dataclass(slots=True)
class Past:
    """What an episode did in slots that it has left.

    Attributes:
        chunks: What it did in each.
        n_steps: Steps of all of them.
        n_dropped: Steps before them that were not kept.
    """

    chunks: list[Chunk] = field(default_factory=list)
    n_steps: int = 0
    n_dropped: int = 0


class SlotRows(NamedTuple):
    """Where an episode is.

    Attributes:
        slot: Its slot.
        start: The first row that is its own.
        stop: The row of the step that failed.
    """

    slot: int
    start: int
    stop: int


class CrashRecorder:
    """Puts together what a rollout knows about an episode that failed.

    Args:
        env: The environments.
        worker_seed: The ``seed`` that they were created with, ``None`` if that is not known.
    """

    def __init__(self, env: VecEnv, worker_seed: int | None) -> None:
        self._env = env
        self._worker_seed = worker_seed
        self._rows: Mapping[str, Array] = {}
        self._kept: dict[str, Array] = {}  # of the rows, those of actions and rewards
        self._current: Mapping[str, Array] = {}
        self._state: Mapping[str, Array] = {}
        self._numbers: Array = np.zeros(0, np.int64)
        self._agent_info: Mapping[str, Array] = {}
        self._most_steps = 0  # that are kept of a lane's episode

    def bind(
        self,
        rows: Mapping[str, Array],
        current: Mapping[str, Array],
        state: Mapping[str, Array],
        numbers: Array,
        agent_info: Mapping[str, Array] | None,
    ) -> None:
        """Read from another block from now on.

        Args:
            rows: Its rows by key, ``[n_slots + 1, T, ...]``.
            current: Key to array ``[n_lanes, ...]``: what the agent is shown, rewritten in place.
            state: Likewise: the agent's state.
            numbers: Number of each lane's row, ``slot * T + step``, rewritten in place.
            agent_info: ``[n, ...]`` by episode, or ``None``.
        """
        self._rows = rows
        self._kept = {key: rows[key] for key in sorted(rows) if key == _REWARD or _is_action(key)}
        step_bytes = sum(array[0, :1].nbytes for array in self._kept.values())
        self._most_steps = MAX_PAST_BYTES // self._env.n_lanes // step_bytes
        self._current, self._state, self._numbers = current, state, numbers
        self._agent_info = agent_info or {}

    def keep(self, leaving: Sequence[tuple[Past, int, int]]) -> None:
        """Copy the slots that lanes leave in mid-episode, one copy per key for all of them.

        Args:
            leaving: Of each lane what it did before, its slot, and the first row of the slot that
                belongs to its episode.
        """
        slots = [slot for _, slot, _ in leaving]
        columns = [array[slots] for array in self._kept.values()]
        n_timesteps = columns[0].shape[1]
        for row, (past, _, start) in enumerate(leaving):
            past.chunks.append(Chunk(columns, row, start))
            past.n_steps += n_timesteps - start
            while past.n_steps > self._most_steps and len(past.chunks) > 1:
                n_dropped = len(past.chunks.pop(0).read()[0])
                past.n_steps -= n_dropped
                past.n_dropped += n_dropped

    def resumed(self, done: Resumed) -> Past:
        """What an episode did that another worker had begun; its rewards are not known."""
        past = Past()
        if done.n_steps:
            chunk = _chunk_of(done, done.n_steps)
            past.chunks.append(Chunk([chunk[key][None] for key in sorted(chunk)], 0, 0))
            past.n_steps = done.n_steps
        return past

    def scene_of_repetition(
        self,
        agent_info: Mapping[str, Array] | None,
        episode: Episode,
        done: Resumed,
        call: str,
        n_done: int,
    ) -> Scene | None:
        """What is known when an episode fails that is repeated to go on with it.

        Args:
            agent_info: ``[n, ...]`` by episode, or ``None``.
            episode: The episode.
            done: What it did before.
            call: What failed.
            n_done: Steps that were repeated.
        """

        def known() -> dict[str, Any]:
            n_actions = n_done + (call == "step")
            actions = _chunk_of(done, n_actions)
            return {
                "agent_info": _row(agent_info or {}, episode.number),
                "rewards": actions.pop(_REWARD)[:n_done],
                "actions": actions,
            }

        return self._made(done.lane, known)

    def scene(
        self,
        call: str,
        lane: int,
        episode: int,
        past: Past,
        at: SlotRows,
        shown_info: Mapping[str, Array],
    ) -> Scene | None:
        """What is known about an episode whose step, or whose start, failed.

        Args:
            call: What failed, one of ``capsule.CALLS``.
            lane: Its lane.
            episode: Its number.
            past: What it did in earlier slots.
            at: Where it is.
            shown_info: ``[n_lanes, ...]``: the ``agent_info`` that the agent is shown.
        """

        def known() -> dict[str, Any]:
            if call in ("reset", "initial_state"):
                parts = self._start(lane, call == "initial_state")
            else:
                parts = self._step(past, at, call == "step")
            if call in ("agent", "initial_state"):
                parts["batch"] = self._batch_shown(shown_info, call == "agent")
            return {**parts, "agent_info": _row(self._agent_info, episode)}

        return self._made(lane, known)

    def scene_of_probe(
        self, agent_info: Mapping[str, Array], lane: int, has_begun: bool
    ) -> Scene | None:
        """What is known when the reset or the call fails that tell what a step consists of.

        Args:
            agent_info: ``[n_lanes, ...]``, empty if there is none.
            lane: The lane.
            has_begun: Whether the environments were reset.
        """
        current = self._env.current if has_begun else {}
        return self._made(
            lane,
            lambda: {
                "agent_info": _row(agent_info, lane),
                "observation": _row(current, lane),
                "batch": _batch(current, agent_info, {}) if has_begun else {},
            },
        )

    def _batch_shown(self, agent_info: Mapping[str, Array], is_step: bool) -> dict[str, Array]:
        """What the agent was called with; in a step, as it was before the agent could change it."""
        if not is_step:
            return _batch({}, agent_info, {})
        current = {key: self._stored(key, array) for key, array in self._current.items()}
        state = {key: self._stored(key, array) for key, array in self._state.items()}
        return _batch(current, agent_info, state)

    def _stored(self, key: str, array: Array) -> Array:
        """A key's values as the block has them, which only lacks flags."""
        rows = self._rows.get(key)
        if rows is None:
            return array
        slots, steps = np.divmod(self._numbers, rows.shape[1])
        found: Array = rows[slots, steps]
        return found

    def _start(self, lane: int, has_begun: bool) -> dict[str, Any]:
        actions = {key: a[0, :0].copy() for key, a in self._kept.items() if key != _REWARD}
        current = self._env.current if has_begun else {}
        return {"actions": actions, "observation": _row(current, lane)}

    def _step(self, past: Past, at: SlotRows, has_acted: bool) -> dict[str, Any]:
        here = [array[at.slot, at.start : at.stop + 1] for array in self._kept.values()]
        columns = zip(*(chunk.read() for chunk in past.chunks), here, strict=True)
        joined = {key: np.concatenate(c) for key, c in zip(self._kept, columns, strict=True)}
        rewards = joined.pop(_REWARD)
        n_steps = len(rewards) - 1  # each row has the reward of the step before
        shown = [key for key in self._current if key in self._rows]
        observation = {key: np.array(self._rows[key][at.slot, at.stop]) for key in shown}
        for key in FLAGS:  # while an episode runs, no other flag is True
            is_first = past.n_dropped == 0 and n_steps == 0
            observation[key] = np.array(key == "initial_state" and is_first)
        return {
            "actions": {key: array[: n_steps + has_acted] for key, array in joined.items()},
            "rewards": rewards[1:],
            "first_step": past.n_dropped,
            "observation": observation,
        }

    def _made(self, lane: int, parts: Callable[[], dict[str, Any]]) -> Scene | None:
        env = self._env
        try:
            return Scene(
                seed=env.seed_used(lane),
                worker_seed=self._worker_seed,
                n_lanes=env.n_lanes,
                env_type=type(env).__name__,
                **parts(),
            )
        except Exception as error:
            # It must not hide the failure itself.
            _LOG.warning("a failure has no crash capsule: %s", described(error))
            return None


def _chunk_of(done: Resumed, n_steps: int) -> dict[str, Array]:
    """Actions of an episode that was begun elsewhere; a reward that is not known is NaN."""
    actions = {key: np.array(array[:n_steps]) for key, array in done.actions.items()}
    return {**actions, _REWARD: np.full(n_steps, np.nan, np.float32)}


def _row(arrays: Mapping[str, Array], number: int) -> dict[str, Array]:
    return {key: np.array(array[number]) for key, array in arrays.items()}


def _batch(
    current: Mapping[str, Array], agent_info: Mapping[str, Array], state: Mapping[str, Array]
) -> dict[str, Array]:
    groups = {"observation": current, "agent_info": agent_info, "state": state}
    return {
        f"{group}/{key}": np.array(array)
        for group, arrays in groups.items()
        for key, array in arrays.items()
    }


def _is_action(key: str) -> bool:
    return key == "action" or key.startswith("action/")
