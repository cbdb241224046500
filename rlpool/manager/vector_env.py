"""A vector environment of Gymnasium over the workers of a ``ParallelEnvManager``."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from rlpool.data.array_view import as_numpy
from rlpool.envs.vector_infos import keep_infos_apart
from rlpool.errors import EnvError, SpecError, UsageError, VectorSpecError, Where
from rlpool.manager.process_lanes import ProcessLanes
from rlpool.manager.vector_lane import (
    LONG,
    Beginning,
    Description,
    described_together,
    in_pieces,
    structure_in_arrays,
)
from rlpool.memory.storage import Array
from rlpool.specs import flattener, leaves_of, nester

_MOST = 2**63  # seeds travel as int64

Finish = Callable[[], Any]
"""Waits for what was begun and returns its outcome."""


class VectorOverLanes(VectorEnv[Any, Any, Array]):
    """A ``ParallelVectorEnv``, once its manager is made: what its calls begin and finish.

    Attributes:
        manager: The lanes, each a ``VectorLane``.
        copy: Whether observations are copies.
        autoreset_mode: When lanes restart.
    """

    manager: ProcessLanes
    copy: bool
    autoreset_mode: AutoresetMode

    def _describe(self, observation_mode: str | tuple[Space[Any], Space[Any]]) -> None:
        """Learn from the environments what this object says about them.

        Raises:
            VectorSpecError: If their spaces do not fit together.
        """
        self.num_envs = self.manager.n_lanes
        self._all = list(range(self.num_envs))
        lanes: list[Description] = self._ask(self._all, "rlpool_description")
        described = described_together(lanes, observation_mode, self.autoreset_mode)
        self.metadata, self.render_mode = described.metadata, described.render_mode
        self.single_observation_space = described.single_observation_space
        self.observation_space = described.observation_space
        self.single_action_space = described.single_action_space
        self.action_space = described.action_space
        keep_infos_apart(self)
        self._ended = np.zeros(self.num_envs, bool)
        self._pickled: list[Any] = [None] * self.num_envs  # observations that are pickled
        self._flatten: Callable[[Any], list[Any]] | None = None
        self._nest: Callable[[list[Array]], Any] | None = None
        action = structure_in_arrays(self.single_action_space, "action_space")
        if action is not None:
            self._flatten = flattener(action, "actions")
            self._action_keys = list(leaves_of({"action": action}, ""))
        observed = structure_in_arrays(lanes[0].observation_space, "observation_space")
        if observed is not None:
            self._nest = nester(observed)
            self._keys = list(leaves_of({"observation": observed}, ""))

    # Episodes ----------------------------------------------------------------------------------

    def _begin_reset(self, seed: Any, options: dict[str, Any] | None) -> Finish:
        """Begin a reset."""
        seeds = self._seeds(seed)
        lanes = self._all
        if options is not None and "reset_mask" in options:
            lanes = self._masked(options["reset_mask"])
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        unseeded = [lane for lane in lanes if seeds[lane] is None]
        generators = dict(zip(unseeded, self._ask(unseeded, "rlpool_generator"), strict=True))
        beginnings: list[Mapping[str, Any] | None] = []
        for lane in lanes:
            seeded = lane not in generators
            start = Beginning(options, seeded, generators.get(lane))
            beginnings.append(None if seeded and options is None else {"options": start})
        self.manager.begin_reset(lanes, [seeds[lane] or 0 for lane in lanes], beginnings)
        return partial(self._finish_reset, lanes)

    def _finish_reset(self, lanes: list[int]) -> tuple[Any, dict[str, Any]]:
        self.manager.finish_begun()
        self._ended[lanes] = False
        infos = self._infos(lanes)
        return self._observation(), infos

    def _begin_step(self, actions: Any) -> Finish:
        """Begin a step, if the environments may step."""
        if self.autoreset_mode is AutoresetMode.DISABLED and self._ended.any():
            ended = np.flatnonzero(self._ended).tolist()
            raise UsageError(
                f"the episodes of environments {ended} have ended, and autoreset_mode is DISABLED",
                fix="reset them, with options={'reset_mask': mask}",
            )
        self.manager.begin_step(self._action_arrays(actions))
        return self._finish_step

    def _finish_step(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        self.manager.finish_begun()
        results = self.manager.current["results"]
        rewards = results[:, 0].copy()
        terminated, truncated = results[:, 1] != 0, results[:, 2] != 0
        self._note_ended()
        infos = self._infos(self._all)
        return self._observation(), rewards, terminated, truncated, infos

    def _note_ended(self) -> None:
        """Note which episodes the last step ended, where that matters."""
        if self.autoreset_mode is AutoresetMode.DISABLED:
            self._ended = (self.manager.current["results"][:, 1:] != 0).any(1)

    def _seeds(self, seed: Any) -> list[int | None]:
        """One seed per environment."""
        if isinstance(seed, int | np.integer):
            seed = [int(seed) + number for number in self._all]
        try:
            each = [None] * self.num_envs if seed is None else seed
            seeds = [None if one is None else operator.index(one) for one in each]
            if len(seeds) != self.num_envs or not all(0 <= (one or 0) < _MOST for one in seeds):
                raise ValueError
        except (TypeError, ValueError):
            raise SpecError(
                f"seed should be an int or {self.num_envs} of them, from 0 to 2**63 - 1, "
                f"got {seed!r}",
                fix="pass one seed for all environments, or one (or None) for each",
            ) from None
        return seeds

    def _masked(self, mask: Any) -> list[int]:
        """The environments that a ``reset_mask`` asks for."""
        fits = isinstance(mask, np.ndarray) and mask.dtype == np.bool_
        if not fits or mask.shape != (self.num_envs,) or not mask.any():
            raise VectorSpecError(
                f"options['reset_mask'] should be a NumPy array of bool [{self.num_envs}] with at "
                f"least one True, got {mask!r}",
                fix="pass True for the environments to reset, False for the others",
            )
        lanes: list[int] = mask.nonzero()[0].tolist()
        return lanes

    def _action_arrays(self, actions: Any) -> dict[str, Array]:
        """Actions as the manager takes them."""
        if actions is None or np.isscalar(actions):
            raise VectorSpecError(
                f"actions should have one row per environment, got {actions!r}",
                fix=f"pass an element of action_space, {self.action_space}",
            )
        if self._flatten is not None:
            values = [_array(value) for value in self._flatten(actions)]
            return dict(zip(self._action_keys, values, strict=True))
        rows = list(iterate(self.action_space, actions))
        if len(rows) != self.num_envs:
            raise SpecError(f"got {len(rows)} actions for {self.num_envs} environments")
        *pieces, last = in_pieces([cloudpickle.dumps(row) for row in rows])
        for piece in pieces:
            self.manager.step_lanes(self._all, {"action": piece})
        return {"action": last}

    # Results -----------------------------------------------------------------------------------

    def _observation(self) -> Any:
        """The current observation of all environments."""
        if self._nest is None:
            space = self.single_observation_space
            empty: Any = create_empty_array(space, n=self.num_envs)
            return concatenate(space, self._pickled, empty)
        arrays = [self.manager.current[key] for key in self._keys]
        return self._nest([array.copy() for array in arrays] if self.copy else arrays)

    def _infos(self, lanes: Sequence[int]) -> dict[str, Any]:
        """The infos of the last step or reset, in Gymnasium's form; notes pickled observations."""
        messages = self.manager.current["message"]
        begins = messages[:, 0]
        infos: dict[str, Any] = {}
        if not begins.any():
            return infos
        long = [lane for lane in lanes if begins[lane] == LONG]
        rest = dict(zip(long, self._ask(long, "rlpool_message"), strict=True))
        for lane in lanes:
            if not begins[lane]:
                continue
            told, observation = pickle.loads(rest.get(lane) or messages[lane].data)
            self._pickled[lane] = observation
            for info in told:
                infos = self._add_info(infos, info, lane)
        return infos

    # Single environments -----------------------------------------------------------------------

    def _begin_call(self, requests: Mapping[int, tuple[str, Any]], name: str) -> Finish:
        """Send a request to each of some environments."""
        sent: list[int] = []
        try:
            for lane, request in requests.items():
                self.manager.remotes[lane].send(request)
                sent.append(lane)
        except BaseException:  # no reply may be left behind: the lane could not step
            for lane in sent:
                self.manager.remotes[lane].recv()
            raise
        return partial(self._finish_call, sent, name)

    def _finish_call(self, lanes: Sequence[int], name: str) -> tuple[Any, ...]:
        """Wait for the replies to requests.

        Raises:
            EnvError: If an environment raised.
        """
        remotes = self.manager.remotes
        replies = [(lane, *remotes[lane].recv()) for lane in lanes]
        for lane, kind, value in replies:
            if kind == "error":
                error = remotes[lane].error or EnvError(value)
                if not isinstance(error, EnvError):
                    raise error  # its worker failed
                what = f"env.{name} raised {error.what}"
                raise error.reworded(what=what, where=Where(lane=lane))
        return tuple(value for _, _, value in replies)

    def _ask(self, lanes: Sequence[int], name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of some environments, all at the same time."""
        return self._begin_call(requests_to(lanes, name, args, kwargs), name)()


def requests_to(
    lanes: Sequence[int], name: str, args: Any, kwargs: Any
) -> dict[int, tuple[str, Any]]:
    """By lane, the request that calls a method of an environment."""
    return dict.fromkeys(lanes, ("call", {"name": name, "args": args, "kwargs": kwargs}))


def _array(value: Any) -> Array:
    """A value as an array, also a tensor on another device."""
    return as_numpy(value) if hasattr(value, "detach") else np.asarray(value)
