"""Brings an episode to where it was in a worker that died, by repeating its actions."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence

from rlpool.envs.vec_env import LaneError, VecEnv
from rlpool.errors import EnvError, Where
from rlpool.loop.plan import Episode, Resumed
from rlpool.memory.storage import batch_array
from rlpool.record.failures import Scene, env_error
from rlpool.specs import row_specs

_FIX = (
    "episodes can only be continued after a worker's death if the same seed and actions always "
    "lead to the same observations"
)

SceneMaker = Callable[[str, int], Scene | None]


def _unknown(call: str, n_done: int) -> Scene | None:
    """Nothing is known."""
    return None


def repeat_episode(
    env: VecEnv,
    episode: Episode,
    past: Resumed,
    worker: int,
    progress: MutableSequence[int] | memoryview,
    scene: SceneMaker = _unknown,
) -> None:
    """Reset one lane and repeat an episode's actions in it.

    Args:
        env: The environments; no other lane of theirs is touched.
        episode: The lane's episode.
        past: Its actions, and what they led to.
        worker: Number of the worker, for errors.
        progress: One element that counts steps.
        scene: Tells what is known where something fails: ``(call, steps made before)``.

    Raises:
        EnvError: If the environment raises, or does not lead to where it led before.
    """
    lane, n_done = past.lane, 0
    batch = {key: batch_array(s, env.n_lanes) for key, s in row_specs(past.actions).items()}

    def where() -> Where:
        return Where(worker, lane, episode.number, n_done, episode.seed, episode.options)

    try:
        env.reset_lanes([lane], [episode.seed], [episode.options])
        for n_done in range(past.n_steps):
            for key, actions in past.actions.items():
                batch[key][lane] = actions[n_done]
            has_ended = bool(env.step_lanes([lane], batch))
            progress[0] += 1
            if has_ended:
                what = "the environment ended an episode that went on before"
                raise EnvError(what, where=where(), fix=_FIX)
    except LaneError as error:
        raise env_error(error, where(), scene(error.call, n_done)) from error.__cause__
    for key, value in past.observation.items():
        if env.current[key][lane].tobytes() != value.tobytes():
            what = f"the environment did not repeat {key!r} of an episode's last step"
            raise EnvError(what, where=where(), fix=_FIX)
