"""One environment as a batch of one lane, whichever of two protocols it follows.

Gymnasium's, and older ones that ``legacy`` understands: the agent chooses the actions::

    reset(seed=, options=) -> (observation, info)
    step(action) -> (observation, reward, terminated, truncated, info)

The pool's own, where the environment chooses its actions itself::

    reset() -> (state, action)
    step(action) -> (action, next_state, reward, done)

There, each ``step`` gets the action that the call before returned, and the action of a transition
is the one that ``step`` *returns*. The very objects go back to the environment; what is stored are
copies, since an environment may update its state in place and return the same array again.

What the first ``reset`` returns shows which protocol it is: a pair whose second part is a dict
is Gymnasium's, any other pair the pool's own. What is not a pair comes from an environment with an
older interface, if it is a ``gymnasium.Env`` or declares spaces; any other is refused.

Both kinds of environment give the same keys: ``state`` (or ``state/...`` where it is made of
several arrays), ``reward``, and ``last_action`` (or ``last_action/...``), so that ``_last_action``
is the action of the step. Values of the pool's own protocol, which declares no spaces, keep their
dtype; those of Gymnasium environments have the dtype of their space.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
import torch

from rlpool.envs.columns import Columns, Results, as_array, flag_of
from rlpool.envs.gym_env import action_decoder, undeclared_actions
from rlpool.envs.legacy import call_reset, is_pair_with_info, modernised, reset_arguments
from rlpool.envs.vec_env import LaneError, Options, VecEnv
from rlpool.errors import SpecError
from rlpool.memory.storage import Array
from rlpool.seeding import seed_generators, stream_seed
from rlpool.specs import (
    Structure,
    merged_structures,
    nester,
    structure_of_space,
    structure_of_value,
    with_dtypes,
)

STATE_KEY = "state"
ACTION_KEY = "action"

_LANE = (0,)
_PROCESS, _ACTIONS = range(2)  # streams of an episode's seed
_NEITHER = "reset() belongs to neither protocol"
_BOTH_PROTOCOLS = (
    "return (state, action) from reset() and (action, next_state, reward, done) from step(action), "
    "or as in Gymnasium (observation, info) with a dict as info, and (observation, reward, "
    "terminated, truncated, info)"
)


class OneEnv(VecEnv):
    """One environment of either protocol.

    The first reset shows what states and actions look like; an environment of the pool's own
    protocol also makes its first step then, whose result is kept for later. Since the loop resets
    once before the first episode, to learn the keys, the second reset continues what the first
    began: the environment itself sees one reset per episode.

    Args:
        env: The environment. It belongs to this object from now on.
        first_seed: Seed of the first reset, whatever seed that brings.
        dtypes: Key to dtype, for values that are stored in another one than their own.
        owns_process: Seed the process's global generators (``random``, NumPy's, torch's) with
            every episode, for environments and policies that draw from them.

    Attributes:
        chooses_actions: Whether the environment does so itself. Known after the first reset.
        is_fresh: Whether it was reset for the first time, and made no step since.
        action_space: The environment's, seeded with every episode; ``None`` without one.
    """

    def __init__(
        self,
        env: Any,
        first_seed: int | None = None,
        *,
        dtypes: Mapping[str, np.dtype[Any]] | None = None,
        owns_process: bool = False,
    ) -> None:
        super().__init__(1)
        self.chooses_actions = False
        self.is_fresh = False
        self.action_space: Any = None
        self._env = env
        self._arguments: set[str] = set()  # of its reset
        self._first_seed = first_seed
        self._dtypes = dict(dtypes or {})
        self._owns_process = owns_process
        self._seed: int | None = None  # of the last reset
        self._method = "reset"  # what of the environment is running
        self._failure: LaneError | None = None  # of the first reset: raised at the second as well
        self._read: Callable[[Any], Any] = _nested_arrays
        self._decode: Callable[[Mapping[str, Array]], list[Any]] = undeclared_actions
        # Of an environment that chooses its actions:
        self._taken: Columns | None = None  # the action of its last step
        self._next_action: Any = None  # what its next step gets
        self._ahead: tuple[Any, ...] | None = None  # its first step, made to learn from it

    def seed_used(self, lane: int) -> int | None:
        """The seed of the episode that runs."""
        return self._seed

    def state_of(self, observation: Mapping[str, torch.Tensor]) -> Any:
        """A copy of the state, nested as the environment returns it; numbers are NumPy's.

        Args:
            observation: Key to tensor ``[1, ...]``.
        """
        if self._columns is None:
            raise LookupError("no state before the first reset")
        rows = [observation[key].numpy()[0] for key in self._columns.leaves]
        copies = [np.array(row) if np.ndim(row) else row for row in rows]
        return nester(self._columns.structure)(copies)[STATE_KEY]

    def step_lanes(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> list[int]:
        """Step the environment; it may follow another action than the one it is given."""
        # ``last_action`` is what was done: written by _step_lanes before it is copied from here.
        return super().step_lanes(lanes, actions if self._taken is None else self._taken.arrays)

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        close = getattr(self._env, "close", None)
        if callable(close):
            close()

    # Resets -------------------------------------------------------------------------------

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self.is_fresh:
            return
        self._method = "reset"
        try:
            if self._columns is None:
                self._open(seeds[0])
                self.is_fresh = True
            else:
                state, self._next_action = _parts(2, self._begun(seeds[0]), _NEITHER)
                self._ahead = None
                self._write(self._columns, state)
        except BaseException as error:
            self._fail(self._method, error)

    def _fail(self, call: str, error: BaseException) -> NoReturn:
        try:
            super()._fail(call, error)
        except LaneError as failure:
            self._failure = failure if self._columns is None else None
            raise

    def _begun(self, seed: int) -> Any:
        """Begin an episode; returns what ``reset`` returned."""
        self._seed = seed
        if self._owns_process:
            seed_generators(stream_seed(seed, _PROCESS))  # those that all of it shares
        if callable(getattr(self.action_space, "seed", None)):
            self.action_space.seed(stream_seed(seed, _ACTIONS))
        return call_reset(self._env, self._arguments, seed)

    def _open(self, seed: int) -> None:
        """Begin the first episode, and learn what states and actions look like."""
        if isinstance(self._env, gymnasium.Wrapper):
            self._env = modernised(self._env)
        self.action_space = getattr(self._env, "action_space", None)
        self._arguments = reset_arguments(self._env)
        if self._first_seed is not None:
            seed, self._first_seed = self._first_seed, None
        result = self._begun(seed)
        if _is_gymnasium(self._env, result):
            self._open_gymnasium(result)
        else:
            self._open_self_acting(*_parts(2, result, _NEITHER))

    def _open_gymnasium(self, result: Any) -> None:
        returns_pair = is_pair_with_info(result)
        self._env = modernised(self._env, returns_pair=returns_pair)
        self._arguments = {"seed", "options"}
        observation = result[0] if returns_pair else result
        space = getattr(self._env, "observation_space", None)
        if space is None:
            structure = _described(observation, STATE_KEY)
        else:
            structure = structure_of_space(space, keep_float64=True, name="observation_space")
            self._read = lambda value: value
        if self.action_space is not None:
            self._decode = action_decoder(self.action_space)
            actions = structure_of_space(self.action_space, keep_float64=True, name="action_space")
            self._declare_action(self._columns_of(ACTION_KEY, actions))
        self._show(structure, observation)

    def _open_self_acting(self, state: Any, action: Any) -> None:
        before = _described(state, STATE_KEY)
        state = copy.deepcopy(_nested_arrays(state))  # the step may change it in place
        self._method = "step"
        self._ahead = self._acted(action)
        action, next_state, _, _ = self._ahead
        taken = self._columns_of(ACTION_KEY, _described(action, ACTION_KEY))
        after = _described(next_state, STATE_KEY)
        self._show(merged_structures(before, after, STATE_KEY), state)
        self._taken, self.chooses_actions = taken, True
        self._declare_action(taken)

    def _acted(self, action: Any) -> tuple[Any, ...]:
        """A step of an environment that chooses its actions."""
        what = (
            "step() should return (action, next_state, reward, done), as reset() returned "
            "(state, action)"
        )
        return _parts(4, self._env.step(action), what)

    def _columns_of(self, key: str, structure: Structure) -> Columns:
        stored = with_dtypes(structure, self._dtypes, key)
        return Columns({key: stored}, "", 1, widens=True)

    def _declare_action(self, columns: Columns) -> None:
        self._action_leaves = columns.leaves
        self.declare_actions({key: leaf.spec for key, leaf in columns.leaves.items()})

    def _show(self, structure: Structure, state: Any) -> None:
        """Declare what states look like, and write the first one."""
        columns = self._columns_of(STATE_KEY, structure)
        self._write(columns, state)
        self._columns = columns
        self.current = {**columns.arrays, **self.current}

    def _write(self, columns: Columns | None, value: Any) -> None:
        """Copy a state or an action into its columns."""
        if columns is None:
            raise LookupError("stepped before the first reset")
        (key,) = columns.structure  # type: ignore[misc]
        columns.write(_LANE, ({key: self._read(value)},))

    # Steps --------------------------------------------------------------------------------

    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, Array]) -> Results:
        self.is_fresh = False
        try:
            if self._taken is not None:
                ahead, self._ahead = self._ahead, None
                self._next_action, state, reward, done = ahead or self._acted(self._next_action)
                self._write(self._taken, self._next_action)
                terminated, truncated = flag_of("done", done), False
            else:
                result = self._env.step(self._decode(actions)[0])
                what = "step() should return five values, as reset() is Gymnasium's"
                state, reward, terminated, truncated, _ = _parts(5, result, what)
            self._write(self._columns, state)
        except BaseException as error:
            self._fail("step", error)
        return (reward,), (terminated,), (truncated,)


def _is_gymnasium(env: Any, result: Any) -> bool:
    """Whether an environment that returned this from ``reset`` is Gymnasium's, or older."""
    if isinstance(result, tuple) and len(result) == 2:
        return isinstance(result[1], dict)
    return isinstance(env, gymnasium.Env) or any(
        getattr(env, name, None) is not None for name in ("observation_space", "action_space")
    )


def _parts(n: int, result: Any, what: str) -> tuple[Any, ...]:
    """The ``n`` parts of a result.

    Raises:
        SpecError: If it has others; ``what`` says what it should be.
    """
    if isinstance(result, tuple) and len(result) == n:
        return result
    shape = getattr(result, "shape", None)
    got = type(result).__name__ + (f" of shape {list(shape)}" if shape is not None else "")
    if isinstance(result, tuple):
        got = f"a tuple of {len(result)}"
    raise SpecError(f"{what}: it returned {got}", fix=_BOTH_PROTOCOLS)


def _described(value: Any, name: str) -> Structure:
    """The structure of an undeclared value, dtypes kept."""
    return structure_of_value(_nested_arrays(value), keep_float64=True, name=name)


def _nested_arrays(value: Any) -> Any:
    """An undeclared value as arrays, numbers, dicts, and tuples where shapes differ; no copy.

    Lists and tuples of numbers, nested or not, are read as arrays.
    """
    if isinstance(value, Mapping):
        return {str(key): _nested_arrays(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError):  # shapes differ, tensors with gradients
            array = np.empty(0, object)
        return array if array.dtype.kind in "fiub" else tuple(map(_nested_arrays, value))
    return as_array(value) if isinstance(value, torch.Tensor) else value
