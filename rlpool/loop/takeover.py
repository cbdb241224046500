"""Brings an episode to where it was in a worker that died, so that this one can go on with it."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence

from rlpool.envs.vec_env import LaneError, VecEnv
from rlpool.errors import EnvError, Where
from rlpool.loop.crash_scene import CrashScene
from rlpool.memory.storage import Array
from rlpool.record.failures import env_error
from rlpool.record.repeat import repeat
from rlpool.record.tape import Tape

_FIX = (
    "episodes can only be continued after a worker's death if the same seed and actions always "
    "lead to the same observations"
)


def take_over(
    env: VecEnv,
    tape: Tape,
    at: Where,
    progress: MutableSequence[int] | memoryview,
    scene: CrashScene,
    agent_info: Mapping[str, Array],
) -> None:
    """Repeat an episode in its lane.

    Args:
        env: The environments; no other lane of theirs is touched.
        tape: The episode.
        at: Worker, lane and episode.
        progress: One element that counts steps.
        scene: Makes the capsule of a failure.
        agent_info: ``[n, ...]`` by episode.

    Raises:
        EnvError: If the environment raises, or does not lead to where it led before.
    """
    n_steps = 0
    try:
        for n_steps, has_ended, divergence in repeat(env, at.lane or 0, tape):
            progress[0] += 1
            if has_ended:
                what = "the environment ended an episode that went on before"
                raise EnvError(what, where=at._replace(step=n_steps - 1), fix=_FIX)
            if divergence is not None:
                what = f"the environment did not repeat {divergence.key!r} of an episode"
                raise EnvError(what, where=at._replace(step=divergence.step), fix=_FIX)
    except LaneError as error:
        where = at._replace(step=n_steps)
        capsule = scene.repeating(error.call, where, tape, agent_info)
        raise env_error(error, where, capsule) from error.__cause__
