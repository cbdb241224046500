"""One environment of a ``ParallelVectorEnv``, as the worker's ``GymEnv`` sees it.

Gymnasium's vector environments reset an ended lane by themselves, without a seed: what follows
depends on all that the environment has done before. So for the manager a ``VectorLane`` is one
episode without an end, from a reset that the caller asked for to the next one. Its tape holds all
of that, and the successor of a worker that dies leads to the same bits.

Everything that a step returns travels as an observation, through shared memory::

    observation   as the space declares it, if the space has a fixed shape
    results       float64 [3]: reward, terminated, truncated
    message       uint8 [n]: a pickle of infos, and of the observation if its space has no fixed
                  shape; it begins with 0 if there is nothing to tell, with ``LONG`` if there is
                  no room for it

Actions of spaces without a fixed shape are pickles that travel in pieces of one size, since a row
of the shared buffer has the same size for all lanes and steps. A longer one takes several steps of
the manager, in all but the last of which no environment steps. All of them are on the lanes'
tapes: a worker's successor puts the same actions together again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import create_empty_array
from gymnasium.wrappers import TimeLimit

from rlpool.data.specs import Structure, flattener, leaves_of, structure_of_space
from rlpool.data.storage import NDArray
from rlpool.envs.columns import checked_result
from rlpool.envs.legacy import modernised
from rlpool.envs.single_envs import is_environment
from rlpool.errors import SpecError, VectorSpecError, described
from rlpool.machine.pickling import why_not

LONG = 1
"""No pickle begins with this byte."""

_MESSAGE_BYTES = 1024
"""Room for the infos of a step, of some twenty numbers: what is longer takes a message more."""

PIECE_BYTES = 8192
"""Size of a row, its first byte included, which says what follows."""

_ROOM = PIECE_BYTES - 1
_NOTHING, _PART, _LAST = 0, 1, 2  # values of the first byte

_MOST_FINAL_BYTES = 2**17
"""Room for a last observation, where lanes restart in the same step: that of most images."""


@dataclass(frozen=True)
class Beginning:
    """How a lane is reset, where a seed alone does not say it.

    Attributes:
        options: For the environment's ``reset``.
        is_seeded: Whether the seed that comes with it is used.
        generator: The environment's generator and its seed, for a successor that goes on without
            another seed; ``None`` where ``is_seeded``.
    """

    options: dict[str, Any] | None = None
    is_seeded: bool = True
    generator: tuple[Any, Any] | None = field(default=None, repr=False)

    def __repr__(self) -> str:  # errors show what the user passed
        return repr(self.options)


@dataclass(frozen=True)
class Description:
    """What a vector environment says of its lanes.

    Attributes:
        observation_space, action_space, metadata, render_mode: The environment's.
    """

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None

    def close(self) -> None:
        """Do nothing: there is no environment here."""


def described_together(
    lanes: Sequence[Description], observation_mode: Any, autoreset_mode: AutoresetMode
) -> SyncVectorEnv[Any, Any]:
    """Gymnasium's vector environment of environments that say this of themselves.

    Raises:
        VectorSpecError: If it refuses them, or the mode.
    """
    env_fns: list[Any] = [partial(replace, lane) for lane in lanes]
    try:
        return SyncVectorEnv(
            env_fns,
            observation_mode=observation_mode,
            autoreset_mode=autoreset_mode,
        )
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        spaces = [(lane.observation_space, lane.action_space) for lane in lanes]
        odd = [number for number, each in enumerate(spaces) if each != spaces[0]]
        raise VectorSpecError(
            f"observation_mode is {observation_mode!r}"
            + (f", but the spaces of environment {odd[0]} are not those of 0" if odd else "")
            + f" ({described(error)})",
            fix="pass observation_mode='same', 'different' if only bounds differ, or a pair of "
            "spaces, and environments that fit it",
        ) from error


def made_lane(env_fn: Callable[[], Any], mode: AutoresetMode, max_episode_steps: int | None) -> Any:
    """Make an environment and prepare it for a vector environment; runs in the worker.

    Returns:
        A ``VectorLane``. What is no environment is returned as it is, for the worker to refuse.

    Raises:
        SpecError: If it does not declare both spaces.
    """
    env = env_fn()
    if not is_environment(env):
        return env
    env = modernised(env)
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(env, name, None), spaces.Space):
            raise SpecError(
                f"{env} has no {name}, which a vector environment needs to make its own",
                fix=f"declare {name} in the environment",
            )
    if max_episode_steps is not None:
        env = TimeLimit(env, max_episode_steps)
    return VectorLane(env, mode)


def structure_in_arrays(space: spaces.Space[Any], name: str) -> Structure | None:
    """How the values of a space lie in arrays, ``None`` if they have to be pickled.

    The arrays of a batch have to be those that Gymnasium makes for the space.
    """
    try:
        structure = structure_of_space(space, keep_float64=True, name=name)
        leaves = list(leaves_of({"value": structure}, "").values())
        batch = flattener(structure, name)(create_empty_array(space, n=1))
    except Exception:
        return None  # a space of the user's own, or one whose values differ in shape
    pairs = zip(leaves, batch, strict=True)
    fits = all((leaf.spec.dtype, (1, *leaf.spec.shape)) == (a.dtype, a.shape) for leaf, a in pairs)
    return structure if fits and leaves else None


class LaneSpace(spaces.Dict):
    """What a lane returns; errors show the environment's own space instead.

    Args:
        parts: What the lane returns.
        own: The environment's own space.
    """

    def __init__(self, parts: dict[str, spaces.Space[Any]], own: spaces.Space[Any]) -> None:
        super().__init__(parts)
        self._own = own

    def __repr__(self) -> str:
        return repr(self._own)


class VectorLane(gymnasium.Env[Any, Any]):
    """An environment that restarts by itself and returns everything as an observation.

    Args:
        env: The environment.
        mode: When it restarts.

    Attributes:
        varying_keys: Keys whose values may differ when the same actions are repeated: infos hold
            times and what else an environment likes.
    """

    varying_keys = ("message",)

    def __init__(self, env: Any, mode: AutoresetMode) -> None:
        self._env = env
        self._mode = mode
        self._has_ended = False
        self._has_begun = False
        self._told_generator = False
        self._long_message = b""
        self._pieces = Pieces()
        self._last_shown: dict[str, Any] = {}
        is_plain = structure_in_arrays(env.observation_space, "observation_space") is not None
        self._pickles_observations = not is_plain
        self._pickles_actions = structure_in_arrays(env.action_space, "action_space") is None
        parts: dict[str, spaces.Space[Any]] = {}
        n_bytes = _MESSAGE_BYTES
        if is_plain:
            parts["observation"] = env.observation_space
            if mode is AutoresetMode.SAME_STEP:
                row = create_empty_array(env.observation_space, n=1)
                n_bytes += min(_MOST_FINAL_BYTES, len(pickle.dumps(row)))
        parts["results"] = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        parts["message"] = spaces.Box(0, 255, (n_bytes,), np.uint8)
        self._silence = np.zeros(n_bytes, np.uint8)
        self.observation_space = LaneSpace(parts, env.observation_space)
        self.action_space = env.action_space
        if self._pickles_actions:
            self.action_space = spaces.Box(0, 255, (PIECE_BYTES,), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment as the caller asked; ``options`` holds a ``Beginning``, if any."""
        beginning = options["options"] if options else Beginning()
        if beginning.generator is not None and not (self._has_begun or self._told_generator):
            base = self._env.unwrapped
            base._np_random, base._np_random_seed = beginning.generator
        self._has_begun, self._has_ended = True, False
        self._pieces = Pieces()
        seed = seed if beginning.is_seeded else None
        observation, info = self._env.reset(seed=seed, options=beginning.options)
        return self._shown(observation, 0.0, np.zeros(2, bool), [info]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, or restart; for the manager the episode never ends."""
        if self._pickles_actions:
            pickled = self._pieces.joined(action)
            if pickled is None:  # nothing happens before it is complete
                return self._last_shown, 0.0, False, False, {}
            action = pickle.loads(pickled)
        else:
            action = _with_scalars(action)
        infos, flags = [], np.zeros(2, bool)
        if self._has_ended and self._mode is AutoresetMode.NEXT_STEP:
            observation, info = self._env.reset()
            reward = 0.0
        else:
            observation, reward, terminated, truncated, info = self._env.step(action)
            flags[:] = checked_result(reward, terminated, truncated)
            if self._mode is AutoresetMode.SAME_STEP and flags.any():
                infos.append({"final_obs": observation, "final_info": info})
                observation, info = self._env.reset()
        self._has_ended = bool(flags.any())
        infos.append(info)
        return self._shown(observation, reward, flags, infos), 0.0, False, False, {}

    def _shown(
        self, observation: Any, reward: Any, flags: NDArray, infos: list[Any]
    ) -> dict[str, Any]:
        """What the caller sees of a step or reset."""
        results = np.empty(3)
        results[0], results[1:] = reward, flags
        told: Any = [info for info in infos if info]
        if self._pickles_observations:
            shown = {"results": results, "message": self._message((told, observation))}
        else:
            message = self._message((told, None)) if told else self._silence
            shown = {"observation": observation, "results": results, "message": message}
        if self._pickles_actions:
            self._last_shown = shown
        return shown

    def _message(self, content: Any) -> NDArray:
        pickled = _pickled(content)
        message = np.zeros_like(self._silence)
        if len(pickled) <= len(message):
            message[: len(pickled)] = np.frombuffer(pickled, np.uint8)
        else:
            message[0], self._long_message = LONG, pickled
        return message

    # What the caller asks for by name ----------------------------------------------------------

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the environment, or one that only the vector environment asks for."""
        own = {
            "rlpool_description": self._description,
            "rlpool_generator": self._generator,
            "rlpool_message": lambda: self._long_message,
        }
        return own[name] if name in own else self._env.get_wrapper_attr(name)

    def _description(self) -> Description:
        env = self._env
        metadata = dict(env.metadata or {})
        return Description(env.observation_space, env.action_space, metadata, env.render_mode)

    def _generator(self) -> tuple[Any, Any]:
        """The environment's generator and its seed, as they are now."""
        self._told_generator = True
        base = self._env.unwrapped
        return base.np_random, base.np_random_seed

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _with_scalars(action: Any) -> Any:
    """An action with NumPy's numbers for arrays without dimensions, as Gymnasium hands it out."""
    if isinstance(action, dict):
        return {key: _with_scalars(part) for key, part in action.items()}
    if isinstance(action, tuple):
        return tuple(map(_with_scalars, action))
    return action[()] if isinstance(action, np.ndarray) and not action.shape else action


def _pickled(content: tuple[Any, Any]) -> bytes:
    """Infos and perhaps an observation, pickled.

    Raises:
        SpecError: If that is impossible.
    """
    try:
        return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    except Exception:  # such as objects of a script's classes, which are pickled by value
        try:
            return bytes(cloudpickle.dumps(content))
        except Exception as error:
            infos, observation = content
            raise SpecError(
                why_not({"infos": infos, "the observation": observation}, error),
                fix="leave it out, or wrap the environment to do so: it travels between processes",
            ) from error


def in_pieces(pickles: Sequence[bytes]) -> list[NDArray]:
    """The rows of some lanes for the steps that it takes, uint8 ``[n_lanes, PIECE_BYTES]`` each."""
    n_steps = max(1, *(-(-len(pickled) // _ROOM) for pickled in pickles))
    steps = [np.zeros((len(pickles), PIECE_BYTES), np.uint8) for _ in range(n_steps)]
    for lane, pickled in enumerate(pickles):
        n_pieces = max(1, -(-len(pickled) // _ROOM))
        for number, step in enumerate(steps[n_steps - n_pieces :]):
            piece = np.frombuffer(pickled[number * _ROOM : (number + 1) * _ROOM], np.uint8)
            step[lane, 0] = _LAST if number == n_pieces - 1 else _PART
            step[lane, 1 : 1 + len(piece)] = piece
    return steps


class Pieces:
    """The pieces of a lane's next action that have arrived."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def joined(self, row: NDArray) -> bytes | None:
        """Take a row; returns the pickle, with zeros behind it, once it is complete."""
        if row[0] != _NOTHING:
            self._parts.append(row[1:].tobytes())
        if row[0] != _LAST:
            return None
        pickled, self._parts = b"".join(self._parts), []
        return pickled
