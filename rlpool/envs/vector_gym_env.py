"""A vector environment of Gymnasium as a batch of lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rlpool.data.storage import NDArray
from rlpool.envs.columns import Results, wrong_count
from rlpool.envs.gymnasium_vector import adapt, autoreset_mode
from rlpool.envs.idle_lanes import IdleLanes
from rlpool.envs.info_keys import InfoKeys
from rlpool.envs.vec_env import Options
from rlpool.envs.vector_infos import refuse_wrong_statistics
from rlpool.envs.vector_lanes import VectorLanes
from rlpool.envs.vector_results import (
    as_bools,
    checked_pair,
    per_lane,
    with_equal_options,
)
from rlpool.envs.vector_seeding import detected_seeding
from rlpool.errors import SpecError, UsageError
from rlpool.machine.arguments import check_choice, whole_number
from rlpool.seeding import SEEDINGS, Seeding, stream_seed

_ALL = slice(None)
_RESULTS = "reward", "terminated", "truncated"


class VectorGymEnv(VectorLanes):
    """A ``gymnasium.vector.VectorEnv``: one lane per sub-environment, one call per batch step.

    Keys, dtypes, time limits, ``env_info`` and errors are those of ``GymEnv``. What differs is
    how far episodes can be repeated, which depends on how the vector environment is reset:

    - ``"episode"``: single lanes, each with a seed of its own, by ``reset(seed=[...],
      options={"reset_mask": ...})``: Gymnasium's ``SyncVectorEnv`` and ``AsyncVectorEnv``,
      ale-py's ``AtariVectorEnv`` with ``AutoresetMode.NEXT_STEP``, and others with
      ``AutoresetMode.DISABLED``. Everything that rlpool promises for a ``GymEnv`` holds. Lanes with
      different options are reset one after another, by one call for each.
    - ``"request"``: only all lanes together, as Gymnasium's ``CartPoleVectorEnv``. Every request
      begins with one reset of all lanes, seeded; later episodes begin by the environment's own
      auto-reset. The same requests give the same bits for the same number of workers and lanes,
      whatever ran before. If a worker dies, its part of the request is repeated, with the same
      bits.
    - ``"stream"``: not at all, ``reset(seed=...)`` changes nothing. Only a whole run gives the same
      bits again, from the construction on; a batcher logs a warning that says so. After a worker's
      death a new instance runs its part of the request again. ``info["reproducible"]``, the same
      for all rows of a result, is False if a worker was replaced before the result was complete, or
      some request failed or was given up.

    With ``"request"`` and ``"stream"`` all rows of ``env_info`` have to be equal, since one reset
    serves all lanes; ``info["seed"]`` is its seed. Errors carry no actions, and windows cannot go
    on after a worker's death: call ``reset``.

    A vector environment steps all lanes at once. Lanes without an episode are in no result; nor are
    the steps in which lanes restart (``AutoresetMode.NEXT_STEP``). Those of a ``SyncVectorEnv`` or
    ``AsyncVectorEnv`` rest meanwhile, others step as well: where single lanes are reset, they
    repeat what an episode has done before, else they take the actions of another lane.

    Options of a reset are a dict, an empty one without ``env_info``. If a step or reset raises,
    the error names the sub-environment of a ``SyncVectorEnv`` or ``AsyncVectorEnv`` that failed,
    for others the first lane that was to step. An ``AsyncVectorEnv`` cannot be used afterwards:
    Gymnasium has ended the process. Let the batcher replace the worker, by
    ``on_env_error="restart"``.

    Args:
        vector_env: The vector environment, wrapped or not. This object closes it.
        seed: Root of the seeds of ``reset(env_info)``. A batcher brings its own seeds.
        seeding: How it can be seeded; by default, that is found out by resetting and stepping it
            a few times.
        auto_reset: Whether lanes of a ``Batcher`` or of ``step`` restart on their own, as those of
            a ``GymEnvInf``.
        max_episode_steps: Truncate episodes after this many steps. Lanes that cannot be reset step
            on until they restart by themselves, unseen: there a limit of the vector environment
            costs less.
        keep_float64: Store float64 values as float64, see ``GymEnv``.
        info_keys: Keys of the infos that become keys of a step, see ``GymEnv``. Where lanes restart
            within a step, the values after an episode's last step are those of ``final_info``, if
            there is one.

    Attributes:
        vector_env: The vector environment.
        seeding: ``"episode"``, ``"request"`` or ``"stream"``.
        at_rest: bool ``[n_lanes]``: the lanes that the step being made leaves as they are.
        observation_space: The space of one lane's observations.
        action_space: The space of one lane's actions.

    Raises:
        SpecError: For anything but a vector environment, for spaces without a fixed shape, for an
            ``AsyncVectorEnv`` that forgets what was reset, if the seeding cannot be found out, and
            for ``info_keys`` that ``GymEnv`` refuses.

    Example:
        >>> env = VectorGymEnv(gymnasium.make_vec("CartPole-v1", num_envs=3))
        >>> env.n_lanes, env.seeding
        (3, 'request')
    """

    def __init__(
        self,
        vector_env: VectorEnv[Any, Any, Any],
        seed: int | Sequence[int] | None = None,
        *,
        seeding: Seeding | None = None,
        auto_reset: bool = False,
        max_episode_steps: int | None = None,
        keep_float64: bool = False,
        info_keys: InfoKeys = None,
    ) -> None:
        if seeding is not None:
            check_choice("seeding", seeding, SEEDINGS)
        self._limit = max_episode_steps
        if max_episode_steps is not None:
            self._limit = whole_number("max_episode_steps", max_episode_steps, 1)
        super().__init__(vector_env, seed, keep_float64=keep_float64, info_keys=info_keys)
        self.auto_reset, n_lanes, vector_env = auto_reset, self.n_lanes, self.vector_env
        self.seeding: Seeding = seeding or detected_seeding(vector_env)
        refuse_wrong_statistics(vector_env, self._info_specs, self.seeding)
        self.at_rest = self._none_rests = np.zeros(n_lanes, bool)
        self._idle = IdleLanes(n_lanes, can_rest=adapt(vector_env, self))
        self._repeats = self.seeding == "episode" and not self._idle.can_rest
        self._mode = autoreset_mode(vector_env)
        self._was_reset = False  # all lanes, at least once, by this object
        self._in_episode = np.zeros(n_lanes, bool)  # lanes that took all steps since their reset
        self._has_ended = np.zeros(n_lanes, bool)  # lanes that refuse another step
        self._elapsed = np.zeros(n_lanes, np.int64)  # steps of each lane's episode
        # Only where lanes cannot be reset one by one:
        self._is_anew = True  # whether the next reset is one of all lanes
        self._begun: tuple[int, int, Options] = 0, 0, None  # seed, number and options of the last
        self._at_start = np.zeros(n_lanes, bool)  # lanes that have just restarted
        self._shown: Any = None  # the last observation of all lanes
        self._shown_infos: Any = {}  # the infos beside it
        self._is_written = False  # whether that of every lane is in its column
        self._last_batch: Any = None

    # Resets --------------------------------------------------------------------------------

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        self.lane_in_use[0] = lanes[0]
        try:
            if self.seeding != "episode":
                self._begin(lanes, seeds, options)
                return
            # Until they are reset: if that fails, nobody knows in which state they are.
            self._in_episode[list(lanes)], self._has_ended[list(lanes)] = False, True
            for rows in with_equal_options(options):
                some = [lanes[row] for row in rows]
                begun = some, [seeds[row] for row in rows], options[rows[0]]
                self._write(some, *self._reset_some(*begun))
                self._idle.note_reset(*begun)
        except BaseException as error:
            self._fail("reset", error)
        self._in_episode[list(lanes)] = True

    def begin_anew(self) -> None:
        """See ``VecEnv.begin_anew``."""
        self._is_anew = True

    def ready_lanes(self, lanes: Sequence[int]) -> Sequence[int]:
        """See ``VecEnv.ready_lanes``."""
        if self.seeding == "episode" or self._is_anew:
            return lanes
        rows = np.asarray(lanes, np.int64)
        ready: list[int] = rows[self._at_start[rows]].tolist()
        return ready

    def advance(self) -> bool:
        """See ``VecEnv.advance``."""
        if self.seeding == "episode":
            return False
        self._step_lanes([], {})
        return True

    def _begin(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        """Begin episodes in lanes that are at the start of one."""
        if self._is_anew:
            if len(with_equal_options(options)) > 1:
                raise SpecError(
                    "the lanes have different options, and one reset serves all of them "
                    f"(seeding is {self.seeding!r})",
                    fix="give all rows of env_info the same values",
                )
            self._reset_all(seeds[0], 0, options[0])
        rows = np.asarray(lanes)
        if np.count_nonzero(self._at_start[rows]) < len(lanes):
            raise UsageError(
                f"{self.vector_env} cannot reset single lanes (seeding is {self.seeding!r})",
                fix="reset all of them, or step until they restart by themselves",
            )
        self._elapsed[rows] = 0
        if not self._is_written:
            self._write(lanes, self._shown, self._shown_infos)
        self._in_episode[rows] = True

    def _reset_all(self, seed: int, number: int, options: Options) -> None:
        """Reset all lanes, for the ``number``-th time with this seed."""
        if self._mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise SpecError(
                f"the lanes of {self.vector_env} cannot be reset one by one, and do not restart "
                f'by themselves (metadata["autoreset_mode"] is {self._mode})',
                fix="make it with AutoresetMode.NEXT_STEP or AutoresetMode.SAME_STEP, and say so "
                "in its metadata",
            )
        self._is_anew = True  # until that is done
        used = stream_seed(seed, number) if number else seed
        result = self.vector_env.reset(seed=used, options=dict(options or {}))
        self._shown, self._shown_infos = checked_pair(result)
        self._is_written = False
        self._begun = seed, number, options
        self._in_episode[:] = self._has_ended[:] = self._is_anew = False
        self._at_start[:] = True

    def _reset_some(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Options
    ) -> tuple[Any, Any]:
        """Reset lanes with the same options, by one call; returns what it says of all lanes."""
        every, given = [seeds[0]] * self.n_lanes, dict(options or {})
        for lane, seed in zip(lanes, seeds, strict=True):
            every[lane] = seed
        # At first all: there is no observation of a lane that was never reset.
        if self._was_reset:
            # New in each call: Gymnasium takes the mask out of the dict.
            given["reset_mask"] = np.zeros(self.n_lanes, bool)
            given["reset_mask"][lanes] = True
        result = self.vector_env.reset(seed=every, options=given)
        shown = checked_pair(result)
        self._was_reset = True
        self._has_ended[lanes] = False
        self._elapsed[lanes] = 0
        return shown

    def _keep_idle(self, rows: NDArray) -> None:
        """Let lanes without an episode rest, where that is possible, or begin the one to repeat."""
        idle = np.ones(self.n_lanes, bool)
        idle[rows] = False
        if self._idle.can_rest:
            self.at_rest = idle
        begin = self._idle.to_reset(idle, self._has_ended, self._elapsed)
        if begin:
            self._reset_some(begin, *self._idle.episode(len(begin)))

    def _act_idle(self, parts: Sequence[NDArray], idle: NDArray | None) -> None:
        self._idle.act(parts, idle, self._elapsed)

    # Steps ---------------------------------------------------------------------------------

    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> Results:
        all_step = len(lanes) == self.n_lanes
        rows: Any = _ALL if all_step else np.asarray(lanes, np.int64)
        in_episode = np.array(self._in_episode[rows])
        self.lane_in_use[0] = lanes[0] if lanes else 0
        try:
            if self.seeding == "episode":
                self._refuse_left_out(lanes, in_episode)
                if not all_step:
                    self._keep_idle(rows)
            elif not np.count_nonzero(self._in_episode) and not np.count_nonzero(self._has_ended):
                # All were truncated here, and none of them would restart soon by itself.
                seed, number, options = self._begun
                self._reset_all(seed, number + 1, options)
                nothing = np.zeros(len(lanes), bool)
                return nothing, nothing, nothing
            if lanes:
                self._last_batch = self._batch(rows, actions)
            rewards, terminated, truncated = self._step_all(lanes, self._last_batch)
        except BaseException as error:
            self._fail("step", error)
        finally:
            self.at_rest = self._none_rests
        if self._limit is not None:
            truncated = np.where(self._elapsed >= self._limit, True, truncated)
        if not all_step:
            rewards, terminated, truncated = rewards[rows], terminated[rows], truncated[rows]
        if np.count_nonzero(in_episode) < len(in_episode):  # they are about to restart
            rewards, terminated, truncated = (
                np.where(in_episode, values, values.dtype.type(0))
                for values in (rewards, terminated, truncated)
            )
        over = as_bools(terminated) | as_bools(truncated)
        self._in_episode[rows] = in_episode & ~over
        if self._repeats:
            self._idle.note_step(lanes, self._elapsed, over)
        return rewards, terminated, truncated

    def _step_all(self, lanes: Sequence[int], batch: Any) -> tuple[NDArray, NDArray, NDArray]:
        """Step the vector environment; write the observations of some lanes."""
        restarting = self._has_ended.copy()
        self._in_episode[:], self._has_ended[:] = False, True  # until the step is over
        self._elapsed += 1
        result = self.vector_env.step(batch)
        if not isinstance(result, tuple) or len(result) != 5:
            raise wrong_count("step", "five", result)
        self._shown, *results, self._shown_infos = result
        self._is_written = False
        each = map(per_lane, _RESULTS, results, repeat(self.n_lanes))
        rewards, terminated, truncated = each
        ended = as_bools(terminated) | as_bools(truncated)
        if lanes:
            self._write(lanes, self._shown, self._shown_infos)
        if self._mode is AutoresetMode.SAME_STEP:
            self._write_final([lane for lane in lanes if ended[lane]], self._shown_infos)
            self._at_start, self._has_ended[:] = ended, False
        else:
            self._at_start, self._has_ended = restarting, ended
            self._is_written = len(lanes) == self.n_lanes
        return rewards, terminated, truncated

    def _refuse_left_out(self, lanes: Sequence[int], in_episode: NDArray) -> None:
        """Lanes that a step left out have gone on: their episodes must not be continued."""
        if np.count_nonzero(in_episode) < len(in_episode):
            lane = lanes[int(in_episode.argmin())]
            self.lane_in_use[0] = lane
            raise UsageError(
                f"lane {lane} has ended, or was left out of a step, and a vector environment "
                "steps all its lanes",
                fix="reset the lane, or step all lanes whose episodes go on together",
            )


def as_vec_env(made: Any, seed: int | Sequence[int] | None) -> Any:
    """What ``create_env`` returned, a vector environment of Gymnasium as a ``VectorGymEnv``.

    Args:
        made: Anything.
        seed: See ``VectorGymEnv``.
    """
    if not isinstance(made, VectorEnv):
        return made
    try:
        return VectorGymEnv(made, seed)
    except BaseException:
        made.close()
        raise
