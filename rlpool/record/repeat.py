"""The only replayer: brings an environment to the point where a tape was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableSequence
from typing import Any, NamedTuple

import numpy as np

from rlpool.envs.vec_env import LaneError, VecEnv
from rlpool.errors import EnvError, Where
from rlpool.memory.storage import Array
from rlpool.record.failures import env_error
from rlpool.record.tape import REWARD, Actions, Tape


class Divergence(NamedTuple):
    """Where a repetition first differed from the tape, and in what.

    Attributes:
        step: The step.
        key: What differed: ``"reward"``, or the key of the observation.
        what: The same in words.
    """

    step: int
    key: str
    what: str

    def __str__(self) -> str:
        return f"from step {self.step} on ({self.what})"


class Reached(NamedTuple):
    """How far a repetition has come.

    Attributes:
        n_steps: Steps made, 0 after the reset.
        has_ended: Whether the last of them ended the episode.
        divergence: The first difference until now, ``None`` if there is none.
    """

    n_steps: int
    has_ended: bool
    divergence: Divergence | None


def repeat(env: VecEnv, lane: int, tape: Tape) -> Iterator[Reached]:
    """Reset one lane and repeat a tape in it, step by step as the caller iterates.

    It continues, whatever differs or ends: the caller judges. No other lane is touched.

    Args:
        env: The environments.
        lane: The lane.
        tape: The episode. Rewards that it holds (NaN stands for one that is not known) and the
            observation after the last step are compared bit by bit with what the environment
            gives.

    Yields:
        How far it is, after the reset and after every step.

    Raises:
        LaneError: If the environment raises.
    """
    env.reset_lanes([lane], [tape.seed], [tape.options])
    step, n_steps = tape.first_step, tape.n_steps
    found = _other_observation(env, lane, tape) if step == n_steps else None
    yield Reached(step, False, found)
    for chunk in tape.chunks:
        actions = {key: array for key, array in chunk.items() if key != REWARD}
        for row in range(len(next(iter(chunk.values())))):
            batch = batch_of({k: array[row, ...] for k, array in actions.items()}, lane, env)
            has_ended = bool(env.step_lanes([lane], batch))
            if found is None and REWARD in chunk:
                found = _other_reward(env.current[REWARD][lane], chunk[REWARD][row], step)
            step += 1
            if found is None and step == n_steps:
                found = _other_observation(env, lane, tape)
            yield Reached(step, has_ended, found)


def take_over(
    env: VecEnv,
    lane: int,
    tape: Tape,
    where: Where,
    progress: MutableSequence[int] | memoryview,
    *,
    may_end: bool = False,
) -> None:
    """Bring a lane to where an episode was in a worker that died.

    Args:
        env: The environments.
        lane: The lane.
        tape: The episode.
        where: Worker, lane and episode, for errors.
        progress: Its first element counts the steps.
        may_end: Whether the recorded steps may have ended the episode.

    Raises:
        EnvError: If the tape is not complete, or the environment raises or does not lead to where
            it led before.
    """
    if tape.why_lost:
        raise EnvError(tape.why_lost, where=where)
    n_steps = 0
    try:
        for n_steps, has_ended, divergence in repeat(env, lane, tape):
            progress[0] += 1
            if has_ended and not may_end:
                divergence = divergence or Divergence(n_steps - 1, "done", "the episode ended")
            if divergence is not None:
                raise EnvError(
                    f"the environment did not repeat an episode: {divergence.what}, after "
                    f"reset(seed={tape.seed}) and the same {n_steps} actions: it is not "
                    "deterministic given its seed",
                    where=where._replace(step=divergence.step),
                    fix="after a worker's death, the same seed and actions have to lead to the "
                    "same observations",
                )
    except LaneError as error:
        raise env_error(error, where._replace(step=n_steps)) from error.__cause__


def batch_of(action: Mapping[str, Array], lane: int, env: VecEnv) -> Actions:
    """One lane's action, ``[...]`` per key, as actions of all lanes."""
    batch = {key: np.zeros((env.n_lanes, *a.shape), a.dtype) for key, a in action.items()}
    for key, array in batch.items():
        array[lane] = action[key]
    return batch


def _other_reward(reward: Array, recorded: Array, step: int) -> Divergence | None:
    if np.isnan(recorded) or _is_same(reward, recorded):
        return None
    return Divergence(step, REWARD, f"the reward is {reward}, it was {recorded}")


def _other_observation(env: VecEnv, lane: int, tape: Tape) -> Divergence | None:
    for key, recorded in tape.observation.items():
        # Another kind of batch has other names for some keys.
        if key in env.current and not _is_same(env.current[key][lane], recorded):
            what = f"{key!r} is not what it was after the same actions"
            return Divergence(tape.n_steps, key, what)
    return None


def _is_same(value: Any, recorded: Any) -> bool:
    """Whether two arrays have the same bits, in the dtype of the recorded one."""
    value, recorded = np.asarray(value), np.asarray(recorded)
    return (
        value.shape == recorded.shape
        and np.can_cast(value.dtype, recorded.dtype, "same_kind")
        and value.astype(recorded.dtype).tobytes() == recorded.tobytes()
    )
