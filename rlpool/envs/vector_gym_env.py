"""A Gymnasium vector environment as a batch of lanes."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch.utils import _pytree as pytree

from rlpool.data.specs import leaves_of, narrowed, nester, structure_of_space
from rlpool.data.storage import NDArray
from rlpool.envs.columns import Results, as_array, checked_count, choices_of
from rlpool.envs.info_keys import InfoKeys, info_specs
from rlpool.envs.single_envs import state_keepers
from rlpool.envs.vec_env import Options, VecEnv
from rlpool.errors import SpecError, UsageError, described
from rlpool.machine.arguments import check_choice, optional_number
from rlpool.seeding import SEEDINGS, Seeding, stream_seed

_LOG = logging.getLogger("rlpool")
_ALL = slice(None)
_N_STEPS = 8  # compared after each reset to detect the seeding of lanes that restart by themselves
_NOT_SEEDED = (
    "%s cannot be seeded: the steps after reset(seed=0) differ each time, so the same seeds do not "
    "give the same data"
)
_ONE_RESET = (
    "the lanes of %s cannot be seeded one by one: the same seeds give the same data only for the "
    "same number of workers and lanes (pass seeding='request' to accept this)"
)
_SAME_STEP, _DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


class VectorGymEnv(VecEnv):
    """A ``gymnasium.vector.VectorEnv``: one lane per sub-environment, one call per batch step.

    Keys, dtypes, time limits, ``env_info`` and errors are those of ``GymEnv``. Reproducibility
    depends on the way the vector environment is reset:

    - ``"episode"``: lanes can be reset and seeded one by one, by ``reset(seed=[...],
      options={"reset_mask": ...})`` with ``AutoresetMode.DISABLED``. All guarantees of ``GymEnv``
      hold. Lanes with different options are reset by separate calls.
    - ``"request"``: all lanes can only be reset together, as in Gymnasium's ``CartPoleVectorEnv``.
      Every request begins with one seeded reset of all lanes; later episodes begin by the
      environment's own auto-reset. A lane that is ready takes the next episode of its worker's
      share. The same requests give the same bits for the same number of workers and lanes,
      regardless of earlier requests, and other bits for other numbers; one warning is logged. If a
      worker dies, its share is repeated with the same bits. All rows of ``env_info`` have to be
      equal; ``info["seed"]`` is the seed of the reset. Windows cannot continue after a worker's
      death: call ``reset``.

    If ``reset(seed=...)`` has no effect, data cannot be repeated, and the warning reports it. With
    ``seeding="request"``, neither warning is logged.

    A vector environment steps all lanes at once. A lane without an episode takes the action of the
    first lane that has one, and its steps are dropped, as are the steps in which lanes restart
    (``AutoresetMode.NEXT_STEP``). If a step or reset raises, the error names the first lane of the
    call.

    ``SyncVectorEnv`` and ``AsyncVectorEnv`` are refused: put their environments into a ``GymEnv``,
    which ``n_workers`` runs in several processes. Options of a reset are a dict, which is empty
    without ``env_info``.

    Args:
        vector_env: The vector environment, wrapped or not. This object closes it.
        seed: Root of the seeds of ``reset(env_info)``. A batcher uses its own seeds.
        seeding: Unit of seeding; by default it is detected by a few resets and steps.
        auto_reset: Whether lanes of a ``Batcher`` or of ``step`` restart automatically, as in a
            ``GymEnvInf``.
        max_episode_steps: Truncate episodes after this many steps. Lanes that cannot be reset then
            continue, with their steps dropped, until they restart by themselves: a limit in the
            vector environment is cheaper.
        keep_float64: As for ``GymEnv``.
        info_keys: As for ``GymEnv``. Where lanes restart within a step, the values after an
            episode's last step come from ``final_info``, if it exists.

    Attributes:
        vector_env: The vector environment.
        seeding: ``"episode"`` or ``"request"``.
        observation_space: The space of one lane's observations.
        action_space: The space of one lane's actions.

    Raises:
        SpecError: For anything but a vector environment that computes its lanes together, for
            spaces without a fixed shape, if the seeding cannot be detected, and for ``info_keys``
            that ``GymEnv`` refuses.

    Example:
        >>> env = VectorGymEnv(gymnasium.make_vec("CartPole-v1", num_envs=3))
        >>> env.n_lanes, env.seeding
        (3, 'request')
    """

    steps_all_lanes = True

    def __init__(
        self,
        vector_env: VectorEnv[Any, Any, Any],
        seed: int | Sequence[int] | None = None,
        *,
        seeding: Seeding | None = None,
        auto_reset: bool = False,
        max_episode_steps: int | None = None,
        keep_float64: bool | Collection[str] = False,
        info_keys: InfoKeys = None,
    ) -> None:
        if seeding is not None:
            check_choice("seeding", seeding, SEEDINGS)
        self.max_steps = optional_number("max_episode_steps", max_episode_steps, 1)
        _check_is_vector_env(vector_env)
        super().__init__(vector_env.num_envs, seed)
        self.vector_env: Any = vector_env
        self.state_keepers = state_keepers(vector_env)
        self.auto_reset, n_lanes = auto_reset, self.n_lanes
        self.observation_space = vector_env.single_observation_space
        self.action_space = vector_env.single_action_space
        self._info_specs = info_specs(info_keys, keep_float64=keep_float64)
        self._keep_float64 = keep_float64
        observed = structure_of_space(self.observation_space, name="single_observation_space")
        self._observations = self._declare_structure(observed)
        native = structure_of_space(self.action_space, name="single_action_space")
        stored = narrowed(native, keep_float64 is True)
        self.action_leaves = leaves_of({"action": stored}, "")
        self._choices = choices_of([stored])
        self._nest_action = nester(stored)
        self._mode = _autoreset_mode(vector_env)
        self.seeding: Seeding = seeding or _detected_seeding(vector_env)
        self._in_episode = np.zeros(n_lanes, bool)  # lanes within an episode
        # Lanes that need a reset, or restart with the next step.
        self._has_ended = np.ones(n_lanes, bool)
        self._elapsed = np.zeros(n_lanes, np.int64)  # steps of each lane's episode
        self._begun: tuple[int, Options] | None = None  # of the last reset
        self._last_batch: Any = None  # of actions
        # Only for lanes that cannot be reset one by one:
        self._resets_all = True  # whether the next reset resets all lanes
        self._at_start = np.zeros(n_lanes, bool)  # lanes that have just restarted
        # Results of the last call for all lanes, unless the columns have all of them.
        self._latest: tuple[Any, Any] | None = None

    def close(self) -> None:
        """Close the vector environment."""
        self.vector_env.close()

    def outermost(self) -> Any:
        """Return the vector environment, with its wrappers."""
        return self.vector_env

    # Resets --------------------------------------------------------------------------------

    def _reset_lanes(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Sequence[Options]
    ) -> None:
        self.lane_in_use[0] = lanes[0]
        if self.seeding == "request":
            self._begin(lanes, seeds[0], options)
        else:
            self._has_ended[list(lanes)] = True  # they need another reset if this one fails
            for rows in _with_equal_options(options):
                some = [lanes[row] for row in rows]
                begun = some, [seeds[row] for row in rows], options[rows[0]]
                self._write(some, *self._reset_some(*begun))
        self._in_episode[list(lanes)] = True

    def reset_all_next(self) -> None:
        """Make the next ``reset_lanes`` reset all lanes."""
        self._resets_all = True

    def ready_lanes(self, lanes: Sequence[int]) -> Sequence[int]:
        """Return the lanes that can begin an episode."""
        if self.seeding == "episode" or self._resets_all:
            return lanes
        rows = np.asarray(lanes, np.int64)
        ready: list[int] = rows[self._at_start[rows]].tolist()
        return ready

    def advance(self) -> bool:
        """Step idle lanes until some restart; returns False if that is impossible."""
        if self.seeding == "episode":
            return False
        try:
            self._step_lanes([], {})
        except BaseException as error:
            self._fail("step", error)
        return True

    def _begin(self, lanes: Sequence[int], seed: int, options: Sequence[Options]) -> None:
        """Begin episodes in lanes at the start of one."""
        if self._resets_all:
            self._reset_all(seed, options)
        if not self._at_start[list(lanes)].all():
            raise UsageError(
                f"{self.vector_env} cannot reset single lanes (seeding is {self.seeding!r})",
                fix="reset all of them, or step until they restart by themselves",
            )
        self._elapsed[list(lanes)] = 0
        if self._latest is not None:
            self._write(lanes, *self._latest)

    def _reset_all(self, seed: int, options: Sequence[Options]) -> None:
        """Reset all lanes with one seed and the same options."""
        message = f"the lanes of {self.vector_env} cannot be reset one by one"
        if self._mode not in (AutoresetMode.NEXT_STEP, _SAME_STEP):
            raise SpecError(
                f'{message}, and do not restart by themselves (metadata["autoreset_mode"] is '
                f"{self._mode})",
                fix="make it with AutoresetMode.NEXT_STEP or AutoresetMode.SAME_STEP, and set it "
                "in its metadata",
            )
        if len(_with_equal_options(options)) > 1:
            fix = "give all rows of env_info the same values"
            raise SpecError(f"{message}, and have different options", fix=fix)
        given = copy.deepcopy(dict(options[0] or {}))
        result = self.vector_env.reset(seed=seed, options=given)
        self._latest = checked_count("reset", 2, result)
        self._begun = seed, options[0]
        self._in_episode[:] = self._has_ended[:] = self._resets_all = False
        self._at_start[:] = True

    def _reset_some(
        self, lanes: Sequence[int], seeds: Sequence[int], options: Options
    ) -> tuple[Any, Any]:
        """Reset lanes with the same options in one call; returns its result for all lanes."""
        every, given = [seeds[0]] * self.n_lanes, copy.deepcopy(dict(options or {}))
        for lane, seed in zip(lanes, seeds, strict=True):
            every[lane] = seed
        # The first call resets all lanes, so that each has an observation.
        if self._begun is not None:
            # New in each call: Gymnasium removes the mask from the dict.
            given["reset_mask"] = np.zeros(self.n_lanes, bool)
            given["reset_mask"][lanes] = True
        result = self.vector_env.reset(seed=every, options=given)
        observation, infos = checked_count("reset", 2, result)
        self._begun = seeds[0], options
        self._has_ended[lanes] = False
        self._elapsed[lanes] = 0
        return observation, infos

    def _reset_idle(self, rows: NDArray) -> None:
        """Reset idle lanes that cannot step any more, as in the last reset."""
        idle = self._has_ended.copy()
        idle[rows] = False
        if lanes := np.flatnonzero(idle).tolist():
            seed, options = self._begun or (0, None)
            self._reset_some(lanes, [seed] * len(lanes), options)

    # Steps ---------------------------------------------------------------------------------

    def _step_lanes(self, lanes: Sequence[int], actions: Mapping[str, NDArray]) -> Results:
        all_step = len(lanes) == self.n_lanes
        rows: Any = _ALL if all_step else np.asarray(lanes, np.int64)
        in_episode = np.array(self._in_episode[rows])
        self.lane_in_use[0] = lanes[0] if lanes else 0
        if self.seeding == "episode":
            if not all_step:
                self._reset_idle(rows)
        elif not np.count_nonzero(self._in_episode | self._has_ended):
            # All were truncated by the loop, and would not restart soon by themselves.
            seed, options = self._begun or (0, None)
            self._reset_all(stream_seed(seed, 1), [options])
            nothing = np.zeros(len(lanes), bool)
            return nothing, nothing, nothing
        if lanes:
            self._last_batch = self._batch(rows, actions)
        rewards, terminated, truncated = self._step_all(lanes)
        rewards, terminated, truncated = rewards[rows], terminated[rows], truncated[rows]
        if np.count_nonzero(in_episode) < len(in_episode):  # some are about to restart
            rewards, terminated, truncated = (
                np.where(in_episode, values, values.dtype.type(0))
                for values in (rewards, terminated, truncated)
            )
        self._in_episode[rows] = in_episode & ~np.logical_or(terminated, truncated)
        return rewards, terminated, truncated

    def _batch(self, rows: Any, actions: Mapping[str, NDArray]) -> Any:
        """Copy the actions of all lanes to the structure of the vector environment."""
        leaves = self.action_leaves or {}
        parts = [np.array(actions[key], leaf.native) for key, leaf in leaves.items()]
        if not isinstance(rows, slice):
            idle = np.ones(self.n_lanes, bool)
            idle[rows] = False
            for array in parts:
                array[idle] = array[rows[0]]  # their own row may hold any value
        return self._nest_action(parts)

    def _step_all(self, lanes: Sequence[int]) -> tuple[NDArray, NDArray, NDArray]:
        """Step the vector environment; write the observations of some lanes."""
        restarting, self._has_ended = self._has_ended, np.ones(self.n_lanes, bool)  # if it fails
        self._in_episode[:] = False
        self._elapsed += 1
        result = self.vector_env.step(self._last_batch)
        observation, rewards, terminated, truncated, infos = checked_count("step", 5, result)
        n_lanes = self.n_lanes
        rewards = _per_lane("reward", rewards, n_lanes)
        terminated = _per_lane("terminated", terminated, n_lanes)
        truncated = _per_lane("truncated", truncated, n_lanes)
        ended = np.logical_or(terminated, truncated)
        if lanes:
            self._write(lanes, observation, infos)
        if self._mode is _SAME_STEP:
            self._write_final([lane for lane in lanes if ended[lane]], infos)
            self._latest = observation, infos
            self._at_start, self._has_ended = ended, np.zeros(n_lanes, bool)
        else:
            self._latest = None if len(lanes) == n_lanes else (observation, infos)
            self._at_start, self._has_ended = restarting, ended
        if self.max_steps is not None:
            truncated = np.where(self._elapsed >= self.max_steps, True, truncated)
        return rewards, terminated, truncated

    def _write(self, lanes: Sequence[int], observation: Any, infos: Any) -> None:
        """Write the results of a call for some lanes."""
        self._observations.write_batch(lanes, observation)
        if self._infos is not None:
            self._infos.write_batch(lanes, infos)

    def _write_final(self, ended: Sequence[int], infos: Any) -> None:
        """Write the last observations and infos of lanes that have restarted within the step."""
        if not ended:
            return
        final = infos["final_obs"]  # guaranteed by AutoresetMode.SAME_STEP
        if isinstance(final, list) or str(getattr(final, "dtype", "")) == "object":
            self._observations.write(ended, [final[lane] for lane in ended])
        else:
            self._observations.write_batch(ended, final)
        if self._infos is not None:
            self._infos.write_batch(ended, infos.get("final_info", infos))


def as_vec_env(made: Any, seed: int | Sequence[int] | None) -> Any:
    """Return the result of ``create_env``, with a vector environment as a ``VectorGymEnv``.

    Args:
        made: The result.
        seed: As for ``VectorGymEnv``.
    """
    if isinstance(made, VecEnv) and not hasattr(made, "n_lanes"):
        message = f"{type(made).__name__}.__init__ does not call VecEnv.__init__"
        raise SpecError(message, fix="call super().__init__(...) first in it")
    if not isinstance(made, VectorEnv):
        return made
    try:
        return VectorGymEnv(made, seed)
    except BaseException:
        made.close()
        raise


def _check_is_vector_env(value: Any) -> None:
    """Raise unless a value is a vector environment that computes its lanes together."""
    if not isinstance(value, VectorEnv):
        raise SpecError(
            f"VectorGymEnv got {value!r:.60}, not a gymnasium.vector.VectorEnv",
            fix="pass a result of gymnasium.make_vec; single environments go into a GymEnv",
        )
    if isinstance(value.unwrapped, SyncVectorEnv | AsyncVectorEnv):
        kind = type(value.unwrapped).__name__
        raise SpecError(
            f"VectorGymEnv got a {kind}, which steps single environments",
            fix="pass its environments to GymEnv: GymEnv([make() for _ in range(n)], seed); "
            "n_workers runs them in several processes",
        )


def _autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode | None:
    """Return the auto-reset mode of a vector environment, ``None`` if it is unknown."""
    try:
        return AutoresetMode(env.metadata.get("autoreset_mode"))
    except ValueError:
        return None


def _with_equal_options(options: Sequence[Options]) -> list[list[int]]:
    """Group the positions of equal options."""
    if not any(options):
        return [list(range(len(options)))]
    groups: dict[bytes, list[int]] = {}
    for row, option in enumerate(options):
        # Bytes distinguish 1 from True, and also compare arrays.
        groups.setdefault(pickle.dumps(option), []).append(row)
    return list(groups.values())


def _per_lane(name: str, values: Any, n_lanes: int) -> NDArray:
    """Convert rewards or flags to an array ``[n_lanes]``.

    Raises:
        SpecError: If there is not one per lane.
    """
    array = values if isinstance(values, np.ndarray) else as_array(values)
    if array.shape[:1] != (n_lanes,) or array.size != n_lanes:
        raise SpecError(
            f"{name!r} should have shape [{n_lanes}], got {list(array.shape)}",
            fix="return one value per lane",
        )
    return array.reshape(n_lanes)


# Detection of the seeding -----------------------------------------------------------------------


def _detected_seeding(env: VectorEnv[Any, Any, Any]) -> Seeding:
    """Detect the seeding by resets and steps; afterwards all lanes need a reset.

    Raises:
        SpecError: If it cannot be reset with a seed and without options.
    """
    resets_lanes = _autoreset_mode(env) is _DISABLED
    try:
        repeats = _lanes_repeat(env) if resets_lanes else _all_repeat(env)
    except Exception as error:
        raise SpecError(
            f"{env} cannot be reset with a seed: {described(error)}",
            fix=f"set the seeding: VectorGymEnv(..., seeding=...), one of {SEEDINGS}",
        ) from error
    if resets_lanes:
        return "episode" if repeats else "request"  # refused by the first reset
    message = _ONE_RESET if repeats else _NOT_SEEDED
    _LOG.warning(message, env.unwrapped, extra={"once": "seeding"})  # from one worker only
    return "request"


def _lanes_repeat(env: Any) -> bool:
    """Whether the reset of one lane does not affect the others and repeats its episode."""
    seeds, others = list(range(env.num_envs)), list(range(env.num_envs, 2 * env.num_envs))
    first, before = _played(env, 1, seed=seeds), _played(env, 0, seed=others)
    mask = np.arange(env.num_envs) == 0
    again = _played(env, 1, seed=seeds, options={"reset_mask": mask})
    is_alone = _same(again[: len(before)], before, slice(1, None))
    return is_alone and _same(again, first, slice(0, 1))


def _all_repeat(env: Any) -> bool:
    """Whether the same seed for all lanes repeats the same steps."""
    return _same(_played(env, _N_STEPS, seed=0), _played(env, _N_STEPS, seed=0), _ALL)


def _played(env: Any, n_steps: int, **arguments: Any) -> list[NDArray]:
    """Return all arrays ``[n_lanes, ...]`` of a reset and some steps with fixed actions."""
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    action, leaves = space.sample(), []
    for number in range(n_steps + 1):
        result = env.step(action)[:4] if number else env.reset(**arguments)[0]
        leaves += [np.array(as_array(leaf)) for leaf in pytree.tree_leaves(result)]
    return leaves


def _same(first: list[NDArray], second: list[NDArray], lanes: slice) -> bool:
    """Whether the lanes' values are bitwise equal."""
    pairs = zip(first, second, strict=True)
    return all(one[lanes].tobytes() == two[lanes].tobytes() for one, two in pairs)
