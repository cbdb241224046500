"""One environment as a batch of one lane, whichever of two protocols it follows.

Gymnasium's, and older ones that ``ancestor_env`` understands: the agent chooses the actions::

    reset(seed=, options=) -> (observation, info)
    step(action) -> (observation, reward, terminated, truncated, info)

The pool's own, where the environment chooses its actions itself::

    reset() -> (state, action)
    step(action) -> (action, next_state, reward, done)

There, each ``step`` gets the action that the call before returned, and the action of a transition
is the one that ``step`` *returns*. The very objects go back to the environment; what is stored are
copies, since an environment may update its state in place and return the same array again.

Which protocol it is shows in what the first ``reset`` returns: a pair whose second part is a dict
is Gymnasium's, any other pair the pool's own. What is not a pair comes from an environment with an
older interface, if it is a ``gymnasium.Env`` or declares spaces; any other is refused.

Both kinds of environment give the same keys: ``state`` (or ``state/...`` where it is made of
several arrays), ``reward``, and ``last_action`` (or ``last_action/...``), so that ``_last_action``
is the action of the step. Values of the pool's own protocol, which declares no spaces, keep their
dtype; those of Gymnasium environments have the dtype of their space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

from rlpool.envs.ancestor_env import call_reset, modernised, reset_arguments
from rlpool.envs.columns import Columns
from rlpool.envs.gym_env import action_decoder, undeclared_actions
from rlpool.envs.handed_out import (
    BOTH_PROTOCOLS,
    Row,
    as_it_is,
    copied,
    counted,
    described,
    four_of,
    is_gymnasium,
    is_pair_with_info,
    number_of,
    pair_of,
    plain,
)
from rlpool.envs.vec_env import LaneError, Options, VecEnv, flag_of
from rlpool.errors import SpecError
from rlpool.generators import seed_generators
from rlpool.memory.storage import Array
from rlpool.seeding import stream_seed
from rlpool.specs import (
    Leaf,
    Structure,
    leaves_of,
    merged_structures,
    structure_of_space,
    with_dtypes,
)

STATE_KEY = "state"
ACTION_KEY = "action"

_PROCESS, _ACTIONS, _ATTEMPTS = range(3)  # streams of an episode's seed


class OneEnv(VecEnv):
    """One environment of either protocol.

    The first reset teaches what states and actions look like; an environment of the pool's own
    protocol also makes its first step then, whose result is kept for later. Since the loop resets
    once before the first episode, to learn the keys, the second reset goes on with what the first
    began: the environment itself sees one reset per episode.

    Args:
        env: The environment. It belongs to this object from now on.
        first_seed: Seed of the first episode, whatever seed the first reset brings.
        dtypes: Key to dtype, where values shall be stored in another one than their own.
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
        self.action_space: Any = None
        self._env = env
        self._first_seed = first_seed
        self._dtypes = dict(dtypes or {})
        self._owns_process = owns_process
        self._n_openings = 0
        self._seed: int | None = None  # of the last reset
        self._failure: LaneError | None = None  # of the first reset: told at the second as well
        self.is_fresh = False
        self._method = "reset"  # what of the environment is running
        self._arguments: set[str] = set()
        self._state: Row | None = None
        self._taken: Row | None = None  # the action of an environment that chooses itself
        self._next_action: Any = None  # what its next step gets
        self._ahead: tuple[Any, ...] | None = None  # its first step, made to learn from it
        self._action_leaves: dict[str, Leaf] | None = None
        self._decode: Callable[[Mapping[str, Array]], list[Any]] = undeclared_actions

    @property
    def columns(self) -> Columns | None:
        """The states' columns, ``None`` before the first reset."""
        return None if self._state is None else self._state.columns

    @property
    def action_leaves(self) -> dict[str, Leaf] | None:
        """Keys of the actions, ``None`` as long as nothing tells what they are."""
        return self._action_leaves

    def seed_used(self, lane: int) -> int | None:
        """The seed of the episode that runs."""
        return self._seed

    def state_of(self, observation: Mapping[str, torch.Tensor]) -> Any:
        """The state as the environment hands it out, a copy.

        Args:
            observation: Key to tensor ``[1, ...]``.
        """
        if self._state is None:
            raise LookupError("no state before the first reset")
        return self._state.nested(observation)

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
        is_first = self._state is None
        self.lane_in_use[0] = 0
        self._method = "reset"
        try:
            if is_first:
                self._open(self._opening_seed(seeds[0]))
            else:
                self._begin(seeds[0])
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failure = LaneError(0, self._method)
            self._failure = failure if is_first else None
            raise failure from error
        self.is_fresh = is_first

    def _opening_seed(self, seed: int) -> int:
        """The first episode's seed; another one if a first episode had failed to begin."""
        attempt, self._n_openings = self._n_openings, self._n_openings + 1
        if self._first_seed is None:
            return seed
        return stream_seed(self._first_seed, _ATTEMPTS + attempt) if attempt else self._first_seed

    def _open(self, seed: int) -> None:
        """Begin the first episode, and learn what states and actions look like."""
        env = self._env
        if isinstance(env, gymnasium.Wrapper):
            self._env = env = modernised(env)
        self.action_space = getattr(env, "action_space", None)
        self._arguments = reset_arguments(env)
        self._seed_generators(seed)
        result = call_reset(env, self._arguments, seed)
        if is_gymnasium(env, result):
            self._open_gymnasium(result)
        else:
            self._open_document(result)

    def _begin(self, seed: int) -> None:
        """Begin an episode."""
        self._seed_generators(seed)
        result = call_reset(self._env, self._arguments, seed)
        if self._state is None:
            raise LookupError("begun before it was opened")
        if self.chooses_actions:
            state, self._next_action = pair_of(result)
            self._state.write(state)
        else:
            self._state.write(result[0])

    def _seed_generators(self, seed: int) -> None:
        self._seed = seed
        if self._owns_process:
            seed_process(seed)
        if callable(getattr(self.action_space, "seed", None)):
            self.action_space.seed(stream_seed(seed, _ACTIONS))

    def _open_gymnasium(self, result: Any) -> None:
        is_former = not is_pair_with_info(result)
        self._env = env = modernised(self._env, is_former=is_former)
        self._arguments = {"seed", "options"}
        observation = result if is_former else result[0]
        space, read = getattr(env, "observation_space", None), as_it_is
        if space is None:
            read = plain
            structure = described(observation, STATE_KEY)
        else:
            structure = structure_of_space(space, keep_float64=True, name="observation_space")
        if self.action_space is not None:
            self._declare_action_space()
        self._show(self._row(STATE_KEY, structure, read), observation)

    def _declare_action_space(self) -> None:
        structure = structure_of_space(self.action_space, keep_float64=True, name="action_space")
        own = leaves_of({ACTION_KEY: structure}, "")
        stored = with_dtypes(structure, self._dtypes, ACTION_KEY)
        self._action_leaves = leaves_of({ACTION_KEY: stored}, "")
        dtypes = [leaf.spec.dtype for leaf in own.values()]
        self._decode = action_decoder(structure, self._action_leaves, dtypes)
        self.declare_actions({key: leaf.spec for key, leaf in self._action_leaves.items()})

    def _open_document(self, result: Any) -> None:
        state, action = pair_of(result)
        state = copied(plain(state))  # the step may change it in place
        before = described(state, STATE_KEY)
        self._method = "step"
        taken, next_state, reward, done = four_of(self._env.step(action))
        after = described(next_state, STATE_KEY)
        structure = merged_structures(before, after, STATE_KEY)
        action_structure = described(taken, ACTION_KEY)
        row = self._row(ACTION_KEY, action_structure, plain)
        row.write(taken)
        self._ahead = (taken, copied(plain(next_state)), reward, done)
        self._show(self._row(STATE_KEY, structure, plain), state)
        self._taken, self._action_leaves = row, row.columns.leaves
        self.chooses_actions = True
        self.declare_actions({key: leaf.spec for key, leaf in self._action_leaves.items()})

    def _row(self, key: str, structure: Structure, read: Callable[[Any], Any]) -> Row:
        return Row(key, with_dtypes(structure, self._dtypes, key), read)

    def _show(self, row: Row, state: Any) -> None:
        """Make a row the states' row, and a state the first one."""
        row.write(state)
        self._state = row
        self.current = {**row.arrays, **self.current}

    # Steps --------------------------------------------------------------------------------

    def _step_lanes(
        self, lanes: Sequence[int], actions: Mapping[str, Array]
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        self.is_fresh = False
        self.lane_in_use[0] = 0
        try:
            step = self._step_document if self.chooses_actions else self._step_gymnasium
            reward, terminated, truncated = step(actions)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise LaneError(0, "step") from error
        return (reward,), (terminated,), (truncated,)

    def _step_gymnasium(self, actions: Mapping[str, Array]) -> tuple[Any, Any, Any]:
        result = self._env.step(self._decode(actions)[0])
        if not isinstance(result, tuple) or len(result) != 5:
            got = counted(result)
            raise SpecError(
                f"step() should return five values, as reset() is Gymnasium's, got {got}",
                fix=BOTH_PROTOCOLS,
            )
        observation, reward, terminated, truncated, _ = result
        if self._state is not None:
            self._state.write(observation)
        return number_of(reward), number_of(terminated), number_of(truncated)

    def _step_document(self, actions: Mapping[str, Array]) -> tuple[Any, Any, Any]:
        result, self._ahead = self._ahead, None
        if result is None:
            result = four_of(self._env.step(self._next_action))
        taken, state, reward, done = result
        self._next_action = taken
        if self._taken is not None and self._state is not None:
            self._taken.write(taken)
            self._state.write(state)
        return number_of(reward), flag_of("done", number_of(done)), False


def seed_process(seed: int) -> None:
    """Seed the generators that everything in this process shares, for one episode."""
    seed_generators(stream_seed(seed, _PROCESS))
