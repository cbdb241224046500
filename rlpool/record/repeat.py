"""Repetition of episodes: brings an environment to the point where a tape was recorded.

``replay`` is the public function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableSequence
from typing import Any, NamedTuple

import numpy as np

from rlpool.data.specs import is_action
from rlpool.envs.gym_env import GymEnv
from rlpool.envs.single_envs import check_is_env, is_environment
from rlpool.envs.vec_env import LaneError, VecEnv
from rlpool.errors import (
    EnvError,
    NotRepeatedError,
    SpecError,
    UsageError,
    Where,
    WorkerError,
)
from rlpool.record.failures import env_error
from rlpool.record.tape import REWARD, Actions, Tape, action_columns, n_rows


class Reached(NamedTuple):
    """Progress of a repetition.

    Attributes:
        n_steps: Steps made, 0 after the reset.
        has_ended: Whether the last of them ended the episode.
        difference: First difference between environment and tape, empty if there is none.
    """

    n_steps: int
    has_ended: bool
    difference: str


def repeat_together(env: VecEnv, tapes: Mapping[int, Tape]) -> Iterator[dict[int, Reached]]:
    """Reset lanes and repeat their tapes, so that all of them reach the end at the same time.

    The longest tape begins, the others join later: environments step all lanes together, so no lane
    is left out of a step that another one makes. The repetition continues despite differences and
    ends of episodes, which are for the caller to judge. Other lanes are not touched.

    Args:
        env: The environments.
        tapes: Lane to its episode. Recorded values of steps (except rewards of NaN, which are
            unknown) and the observation after the last step are compared bit by bit.

    Yields:
        Progress of the lanes, after their reset and after every step.

    Raises:
        LaneError: If an environment raises.
    """
    runs = {lane: _Repetition(env, lane, tape) for lane, tape in sorted(tapes.items())}
    for n_left in range(max((run.n_steps for run in runs.values()), default=-1), -1, -1):
        if joining := [lane for lane, run in runs.items() if run.n_steps == n_left]:
            seeds = [tapes[lane].seed for lane in joining]
            env.reset_lanes(joining, seeds, [tapes[lane].options for lane in joining])
            yield {lane: runs[lane].compared(has_ended=False) for lane in joining}
        if n_left:
            running = {lane: run for lane, run in runs.items() if run.n_steps >= n_left}
            actions = {lane: run.next_action() for lane, run in running.items()}
            ended = set(env.step_lanes(list(running), batch_of(actions, env)))
            yield {lane: run.compared(has_ended=lane in ended) for lane, run in running.items()}


class _Repetition:
    """Repetition of a lane's tape.

    Attributes:
        n_steps: Number of steps to make.
    """

    def __init__(self, env: VecEnv, lane: int, tape: Tape) -> None:
        self._env, self._lane, self._tape = env, lane, tape
        self.n_steps = tape.n_steps - tape.first_step
        self._step = tape.first_step
        self._rows = iter([(chunk, row) for chunk in tape.chunks for row in range(n_rows(chunk))])
        self._row: Actions = {}  # of the last step

    def next_action(self) -> Actions:
        """Return the action of the next step."""
        chunk, row = next(self._rows)
        self._row = {key: array[row, ...] for key, array in chunk.items()}
        self._step += 1
        return {key: value for key, value in self._row.items() if is_action(key)}

    def compared(self, *, has_ended: bool) -> Reached:
        """Compare values after the reset or a step."""
        known = [*self._row.items()]
        if self._step == self._tape.n_steps:
            known += self._tape.observation.items()
        for key, recorded in known:
            # Other kinds of batches have different names for some keys.
            current = self._env.current.get(key)
            if current is None or (key == REWARD and np.isnan(recorded)):
                continue
            if not _is_same(current[self._lane], recorded):
                difference = f"{key!r} is {current[self._lane]!s:.40}, it was {recorded!s:.40}"
                return Reached(self._step, has_ended, difference)
        return Reached(self._step, has_ended, "")


def take_over(
    env: VecEnv,
    tapes: Mapping[int, Tape],
    wheres: Mapping[int, Where],
    progress: MutableSequence[int] | memoryview,
    *,
    may_end: bool = False,
) -> None:
    """Restore lanes to the state of their episodes in a dead worker or an earlier process.

    Args:
        env: The environments.
        tapes: Lane to its episode.
        wheres: Worker, lane and episode of each lane, for errors.
        progress: Its first element counts the steps.
        may_end: Whether the recorded steps may have ended the episodes.

    Raises:
        EnvError: If a tape is not complete, or an environment raises or differs from the tape.
    """
    for lane, tape in tapes.items():
        if tape.why_lost:
            raise EnvError(tape.why_lost, where=wheres[lane])
    n_steps = dict.fromkeys(tapes, 0)
    try:
        for moved in repeat_together(env, tapes):
            progress[0] += 1
            for lane, reached in moved.items():
                n_steps[lane] = reached.n_steps
                _refuse_difference(reached, tapes[lane], wheres[lane], may_end)
    except LaneError as error:
        lane = error.lane if error.lane in tapes else next(iter(tapes))
        raise env_error(error, wheres[lane]._replace(step=n_steps[lane])) from error.__cause__


def _refuse_difference(reached: Reached, tape: Tape, where: Where, may_end: bool) -> None:
    n_steps, has_ended, difference = reached
    if has_ended and not may_end:
        difference = difference or "the episode ended"
    if difference:
        raise NotRepeatedError(
            f"the environment did not repeat an episode: {difference}, after "
            f"reset(seed={tape.seed}) and the same {n_steps} actions: it is not "
            "deterministic given its seed",
            where=where._replace(step=max(n_steps - 1, 0)),
            fix="after a worker's death, the same seed and actions must lead to the "
            "same observations",
        )


def batch_of(actions: Mapping[int, Actions], env: VecEnv) -> Actions:
    """Combine actions of some lanes, ``[...]`` per key, into actions of all lanes."""
    first = next(iter(actions.values()))
    batch = {key: np.zeros((env.n_lanes, *a.shape), a.dtype) for key, a in first.items()}
    for lane, action in actions.items():
        for key, array in batch.items():
            array[lane] = action[key]
    return batch


def _is_same(value: Any, recorded: Any) -> bool:
    """Whether two arrays have the same bits, in the dtype of the recorded one."""
    value, recorded = np.asarray(value), np.asarray(recorded)
    return (
        value.shape == recorded.shape
        and np.can_cast(value.dtype, recorded.dtype, "same_kind")
        and value.astype(recorded.dtype).tobytes() == recorded.tobytes()
    )


class Replay(NamedTuple):
    """A repeated episode without a failing action; see ``replay``.

    Attributes:
        env: The environment, after the last step.
        observation: Returned by its last ``step`` or ``reset``.
        n_steps: Steps made.
        has_ended: Whether the last of them ended the episode.

    Example:
        >>> where = Where(seed=1)
        >>> error = EnvError("it broke", where=where, actions=np.array([0, 0]))
        >>> replayed = replay(CountingEnv(length=5), error)
        >>> replayed.observation, replayed.n_steps, replayed.has_ended
        (array([2.], dtype=float32), 2, False)
    """

    env: Any
    observation: Any
    n_steps: int
    has_ended: bool


def replay(env: Any | Callable[[], Any], error: WorkerError) -> Replay:
    """Reset an environment as in the failed episode, and repeat its actions.

    This reproduces a failure of the environment without the policy. With the same policy,
    ``EpisodeBatcher.seek`` repeats the whole episode. If the environment fails again, its own
    exception is raised in its own frames, where a debugger stops. If the agent failed, the
    environment is left at that step.

    Args:
        env: One Gymnasium environment, or a function without arguments that makes one.
        error: The error, whose seed, ``options`` and ``actions`` are used.

    Returns:
        The environment after the last action, if none of them failed.

    Raises:
        Exception: The environment's own exception.
        SpecError: If ``env`` is not an environment, or ``error`` not an error of a worker.
        UsageError: If the error has no actions.

    Example:
        >>> class Broken(CountingEnv):
        ...     def step(self, action):
        ...         return {}["missing"]
        >>> def broken(seed):
        ...     return GymEnv([Broken()], seed)
        >>> try:
        ...     evaluate(create_agent(), broken, n_episodes=1)
        ... except EnvError as error:
        ...     failure = error
        >>> replay(Broken, failure)  # stops at the line that fails
        Traceback (most recent call last):
            ...
        KeyError: 'missing'
    """
    if not isinstance(error, WorkerError):
        raise SpecError(f"error is {error!r:.60}", fix="pass an error that a batcher raised")
    if error.actions is None or error.where.seed is None:
        raise UsageError(
            f"this {type(error).__name__} has no actions: {error.what}",
            fix="only failures in an episode have them, if environments are reset one by one",
        )
    made = env() if callable(env) and not is_environment(env) else env
    check_is_env("env is", made, "pass one environment, or a function that makes one")
    lanes, columns = GymEnv([made], keep_float64=True), action_columns(error.actions)
    reached, failure = Reached(0, False, ""), None
    tape = Tape(error.where.seed, error.options, chunks=[columns] if columns else [])
    try:
        for reached in (moved[0] for moved in repeat_together(lanes, {0: tape})):
            if reached.has_ended:
                break
    except LaneError as lane_error:
        failure = lane_error.__cause__ or lane_error
    if failure is not None:
        raise failure  # outside of the handler, so that its context is unchanged
    return Replay(made, lanes.results[0][0], reached.n_steps, reached.has_ended)
