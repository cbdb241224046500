"""Assignment of rollouts to environments, and their results and storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils import _pytree

from rlpool.agents.noise import NoiseStarts
from rlpool.data.specs import DEFAULT_OBSERVATION_KEY, is_action
from rlpool.data.storage import Memory, NDArray
from rlpool.envs.vec_env import Options
from rlpool.errors import SpecError, WorkerError
from rlpool.loop.plan import Lane, Plan
from rlpool.machine.arguments import takes_keyword
from rlpool.meta.agents import AGENT_ARCHS, FINAL_KEY
from rlpool.record.tape import joined
from rlpool.seeding import episode_seeds, noise_keys
from rlpool.slots.blocks import Arrays, Layout


class RolloutColumns(NamedTuple):
    """A complete rollout of L steps, as arrays in separate memory.

    Attributes:
        observations: ``[L, ...]``, or a dict of such arrays; numbers are ``[L, 1]``.
        actions: Likewise.
        rewards: float32 ``[L, 1]``.
        terminals: bool ``[L, 1]``, True at most in the last step, and only for a termination.
        next_observations: Like the observations, one step later.
    """

    observations: Any
    actions: Any
    rewards: NDArray
    terminals: NDArray
    next_observations: Any


Deliver = Callable[[RolloutColumns], None]
"""Receives a complete rollout."""

TASK_OPTION = "task"
"""Key of the task among the options of a reset."""

_SAMPLE = ("observation", "action", "reward", "terminal", "next_observation")
_METHODS = (("add_episode", RolloutColumns._fields), ("add_sample", _SAMPLE))


@dataclass
class RolloutPlan(Plan):
    """Assigns rollout *i* to lane ``i % n_lanes``. The only plan of its loop.

    Args:
        layout: One slot per lane. Longer rollouts are copied out slot by slot.
        observed: The keys of an observation.
        root: Root of seeds and noise.
        n_before: Number of rollouts drawn from it before.
        options: Options of the reset of each rollout.
        deliver: Receives complete rollouts in order.
    """

    layout: Layout
    observed: Sequence[str]
    root: int
    n_before: int
    options: Sequence[Options]
    deliver: Deliver

    def __post_init__(self) -> None:
        self.arrays = Arrays(self.layout, Memory.local(self.layout.n_bytes).root())
        step, n_rollouts = self.layout.step, len(self.options)
        self._seeds = episode_seeds(self.root, self.n_before, n_rollouts)
        keys = noise_keys(self.root, self.n_before, n_rollouts)
        self._noise = NoiseStarts(keys, step.n_noise) if step.n_noise else None
        self._next = list(range(step.n_lanes))  # the next rollout of each lane
        self._chunks: dict[int, list[dict[str, NDArray]]] = {}
        self._complete: dict[int, RolloutColumns] = {}
        self._n_delivered, self._has_begun = 0, False
        self._acted = [key for key in step.output if is_action(key)]
        # With ``show_start``: the last observations of episodes within a trial.
        shapes = {key: array.shape for key, array in self.arrays.rows.items()}
        has_final = FINAL_KEY in shapes and shapes[FINAL_KEY] == shapes.get(DEFAULT_OBSERVATION_KEY)
        self._ends = [FINAL_KEY] * has_final

    # Queue interface for this single plan:

    def has_next(self) -> bool:
        """Whether the plan has not begun yet."""
        return not self._has_begun

    def next_plan(self) -> Plan | None:
        """Return the plan, once."""
        has_begun, self._has_begun = self._has_begun, True
        return None if has_begun else self

    def done(self, plan: Plan) -> None:
        """Do nothing: no plan follows."""

    def failed(self, plan: Plan, error: WorkerError) -> None:
        """Raise the error."""
        raise error

    def next_episode(self, lane: Lane) -> bool:
        """Start the next rollout of a lane, if there is one."""
        number = self._next[lane.number]
        if number >= len(self.options):
            return False
        self._next[lane.number] += len(self._next)
        noise = None if self._noise is None else self._noise[number]
        seed, options = self._seeds[number], self.options[number]
        self.begin(lane, number, seed, options, noise, lane.number, episode=number)
        return True

    def next_slot(self, lane: Lane) -> bool:
        """Keep the lane's slot, whose contents were copied out."""
        return True

    def take_slot_of(self, lane: Lane, *, is_last: bool) -> None:
        """Copy a slot out; the last one of a rollout completes it."""
        kept = [*self.observed, *self._acted, "reward", *self._ends]
        row, slot = lane.row, lane.slot
        length = int(self.arrays.control["length"][slot])
        copies = {key: self.arrays.rows[key][slot, :length].copy() for key in kept}
        self._chunks.setdefault(row, []).append(copies)
        if is_last:
            self._complete[row] = self._joined(self._chunks.pop(row), slot)
        while self._n_delivered in self._complete:
            self.deliver(self._complete.pop(self._n_delivered))
            self._n_delivered += 1

    def _joined(self, chunks: Sequence[dict[str, NDArray]], slot: int) -> RolloutColumns:
        finals = self.arrays.finals
        before = joined(chunks)
        after = {
            key: np.concatenate([before[key][1:], finals[key][slot][None]])
            for key in (*self.observed, "reward", *self._ends)
        }
        for key in self._ends:
            is_end = after[key][:-1, -1] == 1  # the flag of an episode's end
            after[DEFAULT_OBSERVATION_KEY][:-1][is_end] = after[key][:-1][is_end]
        terminals = np.zeros((len(before["reward"]), 1), bool)
        terminals[-1] = finals["terminated"][slot]
        return RolloutColumns(
            _nested(before, self.observed, DEFAULT_OBSERVATION_KEY),
            _nested(before, self._acted, "action"),
            after["reward"][:, None],
            terminals,
            _nested(after, self.observed, DEFAULT_OBSERVATION_KEY),
        )


def _nested(arrays: Mapping[str, NDArray], keys: Sequence[str], default_key: str) -> Any:
    """Return arrays by key, or the array of the default key; ``[L]`` becomes ``[L, 1]``."""
    columns = {
        key.removeprefix(f"{default_key}/"): array[:, None] if array.ndim == 1 else array
        for key, array in ((key, arrays[key]) for key in keys)
    }
    return columns[default_key] if list(columns) == [default_key] else columns


def store_into(storage: Any, arch: AGENT_ARCHS) -> Deliver:
    """Return a function that adds a rollout to the storage."""
    is_markov = arch is AGENT_ARCHS.Markov
    name, names = _METHODS[is_markov]
    add = getattr(storage, name, None)
    if not callable(add):
        raise SpecError(
            f"policy_storage is a {type(storage).__name__} without {name}()",
            fix=f"define {name}(), which agent_arch {arch.name} needs, or change agent_arch",
        )

    has_names = all(takes_keyword(add, name) for name in names)

    def store(columns: Sequence[Any]) -> None:
        if has_names:
            add(**dict(zip(names, columns, strict=True)))
        else:
            add(*columns)

    def store_samples(rollout: RolloutColumns) -> None:
        flat = rollout._replace(rewards=rollout.rewards[:, 0], terminals=rollout.terminals[:, 0])
        leaves, structure = _pytree.tree_flatten(flat)
        for sample in zip(*leaves, strict=True):
            store(_pytree.tree_unflatten(sample, structure))

    return store_samples if is_markov else store
