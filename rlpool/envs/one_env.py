"""One environment of either of two protocols, as a batch of one lane.

Gymnasium's protocol, or an older one adapted by ``legacy``. The agent chooses the actions::

    reset(seed=, options=) -> (observation, info)
    step(action) -> (observation, reward, terminated, truncated, info)

The pool's protocol. The environment chooses its actions itself::

    reset() -> (state, action)
    step(action) -> (action, next_state, reward, done)

Each ``step`` gets the action object returned by the previous call, and the action of a transition
is the one that ``step`` *returns*. Values are stored as copies, since an environment may update its
state in place and return the same array again.

The result of the first ``reset`` determines the protocol: a pair whose second part is not a dict
means the pool's protocol.

Both protocols have the same keys: ``state`` (``state/...`` if it has several parts), ``reward`` and
``last_action`` (``last_action/...``), so ``_last_action`` is the action of the step. Values of the
pool's protocol, which does not have spaces, keep their dtype; those of Gymnasium environments have
the dtype of their space.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
import torch

from rlpool.data.specs import (
    merged_structures,
    nester,
    structure_of_space,
    structure_of_value,
)
from rlpool.data.storage import NDArray
from rlpool.envs.columns import Columns, as_array, as_numbers, checked_count, flag_of
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.legacy import LegacyEnv, is_pair, modernised, reset_arguments
from rlpool.envs.vec_env import Options
from rlpool.machine.own_state import seed_generators
from rlpool.seeding import stream_seed

STATE_KEY = "state"
ACTION_KEY = "action"

_PROCESS, _ACTIONS = range(2)  # streams of an episode's seed
_PROTOCOLS = (
    "return (state, action) from reset() and (action, next_state, reward, done) from step(action), "
    "or as in Gymnasium (observation, info) with a dict as info, and "
    "(observation, reward, terminated, truncated, info)"
)


class ActingEnv(LegacyEnv):
    """Gymnasium's interface around an environment of either protocol.

    Args:
        inner: The environment.

    Attributes:
        chooses_actions: Whether the environment follows the pool's protocol. Known after the first
            reset.
        action: The last action that it returned.
        call: The last method of the environment that was called.
    """

    chooses_actions = False
    action: Any = None
    call = "reset"
    _ahead: tuple[Any, ...] | None = None

    def __init__(self, inner: Any) -> None:
        if isinstance(inner, gymnasium.Wrapper):
            inner = modernised(inner)
        super().__init__(inner, reset_arguments(inner))
        is_declared = getattr(inner, "observation_space", None) is not None
        self._read: Callable[[Any], Any] = (lambda x: x) if is_declared else _nested_arrays
        self._has_spaces = is_declared or getattr(inner, "action_space", None) is not None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        self.call, self._ahead = "reset", None
        result = self._called_reset(seed, options)
        if self.chooses_actions or not self._is_gymnasiums(result):
            state, self.action = checked_count("reset", 2, result, _PROTOCOLS)
            self.chooses_actions = True
            return copy.deepcopy(_nested_arrays(state)), {}  # a step may modify it in place
        observation, info = result if is_pair(result) else (result, {})
        return self._read(observation), info

    def _is_gymnasiums(self, result: Any) -> bool:
        """Whether a result of ``reset`` follows Gymnasium's protocol or an older one."""
        if is_pair(result):
            return isinstance(result[1], dict)
        return isinstance(self.inner, gymnasium.Env) or self._has_spaces

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; ``action`` is ignored if the environment chooses its actions."""
        if self.chooses_actions:
            self.action, state, reward, done = self._ahead or self._acted()
            self._ahead = None
            return _nested_arrays(state), reward, flag_of("done", done), False, {}
        state, *others = super().step(action)
        return self._read(state), *others

    def look_ahead(self) -> tuple[Any, Any]:
        """Make the next step in advance; returns its action and its state."""
        self._ahead = action, state, *_ = self._acted()
        return _nested_arrays(action), _nested_arrays(state)

    def _acted(self) -> tuple[Any, ...]:
        self.call = "step"
        result = self.inner.step(self.action)
        taken: tuple[Any, ...] = checked_count("step", 4, result, _PROTOCOLS)
        return taken


class OneEnv(GymEnv):
    """One environment of either protocol.

    The first reset determines keys, shapes and dtypes; an environment of the pool's protocol also
    makes its first step then, in advance. The step loop resets once before the first episode, to
    discover the keys. The next reset continues that episode, so the environment sees one reset per
    episode. A ``seed`` among an episode's options replaces its seed. The process's global
    generators (``random``, NumPy's, torch's) are seeded for every episode, since environments and
    policies may draw from them.

    Args:
        env: The environment. This object closes it.
        first_seed: Seed of the first reset, in place of the one passed to it.

    Attributes:
        is_fresh: Whether it has been reset once and not stepped yet.
    """

    _key = f"{STATE_KEY}/"

    def __init__(self, env: Any, first_seed: int | None = None) -> None:
        self._env = ActingEnv(env)
        super().__init__([self._env], keep_float64=True)
        self._forget_columns()
        self.is_declared, self.is_fresh = False, False  # declared by the first reset
        self._first_seed = first_seed
        self._seed: int | None = None  # of the last reset
        self._taken: Columns | None = None  # the action of the last step

    @property
    def chooses_actions(self) -> bool:
        """Whether the environment chooses its actions. Known after the first reset."""
        return self._env.chooses_actions

    def seed_used(self, lane: int) -> int | None:
        """The seed of the running episode."""
        return self._seed

    def state_of(self, observation: Mapping[str, torch.Tensor]) -> Any:
        """Copy a state out of an observation, nested as the environment returns it.

        Args:
            observation: Key to tensor ``[1, ...]``.
        """
        if self.columns is None:
            raise LookupError("no state before the first reset")
        rows = [observation[key].numpy()[0] for key in self.columns.observed]
        copies = [np.array(row) if np.ndim(row) else row for row in rows]
        return nester(self.columns.structure)(copies)

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        if self.is_fresh:
            return
        is_first = self.columns is None
        given = (options[0] or {}).get("seed", seeds[0])
        self._seed = given if self._first_seed is None else self._first_seed
        self._first_seed = None
        seed_generators(stream_seed(self._seed, _PROCESS))
        if callable(getattr(self.action_space, "seed", None)):
            self.action_space.seed(stream_seed(self._seed, _ACTIONS))
        super()._reset_lanes(lanes, [self._seed], [None])
        self.is_fresh = is_first

    def _learned(self, observations: Sequence[Any]) -> Columns:
        space, self.is_declared = self.observation_space, True
        if self.chooses_actions:
            action, next_state = self._env.look_ahead()
            structure = merged_structures(
                structure_of_value(observations[0], name=STATE_KEY),
                structure_of_value(next_state, name=STATE_KEY),
                STATE_KEY,
            )
            actions = structure_of_value(action, name=ACTION_KEY)
            self._taken = Columns(actions, f"{ACTION_KEY}/", 1)
            self.action_leaves = self._taken.leaves
            self._decode, self._choices = lambda actions: [None], ()
            self._steps = [self._step_and_note]
        elif space is not None:
            structure = structure_of_space(space, name="observation_space")
            self._steps = [modernised(self._env.inner, with_tasks=False).step]
        else:
            structure = structure_of_value(observations[0], name="observation")
        return self._declare_structure(structure)

    def step_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> list[int]:
        """Step the environment, which may choose another action."""
        self.is_fresh = False
        # ``last_action`` is copied from the chosen action, which the step writes first.
        return super().step_lanes(lanes, actions if self._taken is None else self._taken.arrays)

    def _step_and_note(self, action: Any) -> tuple[Any, ...]:
        """Step an environment that chooses its actions, and write the chosen one."""
        result = self._env.step(action)
        if self._taken is not None:
            self._taken.write([0], (_nested_arrays(self._env.action),))
        return result

    def _fail(self, call: str, error: BaseException) -> NoReturn:
        super()._fail(self._env.call if call == "reset" else call, error)


def _nested_arrays(value: Any) -> Any:
    """Convert a value without a space to arrays, numbers, dicts and tuples, without copying.

    Lists and tuples become arrays unless their parts differ in shape.
    """
    if isinstance(value, Mapping):
        return {str(key): _nested_arrays(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        array = as_numbers(value)
        return array if array.dtype != object else tuple(map(_nested_arrays, value))
    return as_array(value) if isinstance(value, torch.Tensor) else value
