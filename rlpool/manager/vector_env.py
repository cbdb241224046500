"""A vector environment of Gymnasium over the workers of a ``ParallelEnvManager``."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
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
    structure_in_arrays,
)
from rlpool.manager.vector_pieces import in_pieces
from rlpool.memory.storage import Array
from rlpool.specs import flattener, leaves_of, nester

_MOST = 2**63  # seeds travel as int64


class VectorOverLanes(VectorEnv[Any, Any, Array]):
    """A ``ParallelVectorEnv``, once its manager is made.

    Attributes:
        manager: The lanes, each a ``VectorLane``.
        copy: Whether observations are copies.
        autoreset_mode: When lanes restart.
    """

    manager: ProcessLanes
    copy: bool
    autoreset_mode: AutoresetMode
    _pending: Any = None  # see CallsInHalves

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

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments.

        A worker that dies later on is brought back by resetting its environments as here and
        repeating all actions since, automatic restarts included.

        Args:
            seed: An int gives environment *i* the seed ``seed + i``; or a list of one seed per
                environment. Environments whose seed is ``None`` go on with their generators.
            options: Passed to every environment, without ``"reset_mask"``: a bool array
                ``[num_envs]``, True for the environments to reset; the others are left alone.

        Returns:
            The observations of all environments, and the infos of those that were reset.

        Raises:
            SpecError: For seeds or a mask that do not fit; also a ``TypeError`` if the mask is
                no bool array.
            EnvError: If an environment raises.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs, for good.
        """
        self._refuse_pending("reset")
        return self._finish_reset(self._begin_reset(seed, options))

    def _begin_reset(self, seed: Any, options: dict[str, Any] | None) -> list[int]:
        """Begin a reset; returns the lanes that take part."""
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
        return lanes

    def _finish_reset(self, lanes: list[int]) -> tuple[Any, dict[str, Any]]:
        """Wait for a reset."""
        self.manager.finish_begun()
        self._ended[lanes] = False
        infos = self._infos(lanes)
        return self._observation(), infos

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step all environments.

        If a signal handler raises in it, the step may have been made or not: go on with ``reset``.

        Args:
            actions: One row per environment, as ``action_space`` has them; converted to the dtypes
                of the space if they are of the same kind.

        Returns:
            Observations, rewards float64 ``[num_envs]``, terminated and truncated bool
            ``[num_envs]``, and infos. All but the observations are copies.

        Raises:
            SpecError: If the actions do not fit; also a ``TypeError`` for a single number.
            EnvError: If an environment raises; the environments of its worker need a reset.
            UsageError: If an environment needs a reset, or a call is pending.
            WorkerDiedError, WorkerTimeoutError: If a worker died or hangs, for good.
        """
        if self._pending is not None:
            self._refuse_pending("step")
        return self._finish_step(self._step_arrays(actions))

    def _step_arrays(self, actions: Any) -> dict[str, Array]:
        """Actions as the manager takes them, if the environments may step."""
        if self.autoreset_mode is AutoresetMode.DISABLED and self._ended.any():
            ended = np.flatnonzero(self._ended).tolist()
            raise UsageError(
                f"the episodes of environments {ended} have ended, and autoreset_mode is DISABLED",
                fix="reset them, with options={'reset_mask': mask}",
            )
        return self._action_arrays(actions)

    def _finish_step(
        self, arrays: dict[str, Array]
    ) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step, or wait for the step with these actions that was begun."""
        self.manager.step_lanes(self._all, arrays)
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

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute that cannot be called.

        What the method changes is lost if the worker is replaced; use ``set_attr`` for attributes.

        Args:
            name: The name; it is looked up through wrappers.
            *args: Its arguments; they are pickled, as the results are.
            **kwargs: Likewise.

        Returns:
            One result per environment.

        Raises:
            EnvError: If it raises in an environment, or there is none of that name.
        """
        self._refuse_pending("call")
        return tuple(self._ask(self._all, name, *args, **kwargs))

    def _begin_call(self, name: str, args: Any, kwargs: Any) -> list[int]:
        return self._sent(dict.fromkeys(self._all, _request(name, args, kwargs)))

    def _have_answered(self, lanes: Sequence[int], until_s: float) -> bool:
        """Whether all replies are here, after waiting until a ``time.monotonic()``."""
        remotes = self.manager.remotes
        return all(remotes[lane].poll(max(0.0, until_s - monotonic())) for lane in lanes)

    def _finish_call(self, lanes: Sequence[int], name: str) -> tuple[Any, ...]:
        return tuple(self._received(lanes, name))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment, a copy; a method is called, as by ``call``."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of the environments.

        The successor of a worker sets it, too. Set in the middle of episodes, it makes these
        impossible to repeat: if a worker dies before the next reset, the environments that it had
        raise ``EnvError`` until they are reset.

        Args:
            name: The name.
            values: A list or tuple of one value per environment, or one value for all.

        Raises:
            SpecError: If the list has another length.
        """
        if not isinstance(values, list | tuple):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise SpecError(
                f"got {len(values)} values of {name!r} for {self.num_envs} environments",
                fix="pass one per environment, or one that is neither list nor tuple",
            )
        self._refuse_pending("set_attr")
        requests = [("set_attr", {"attr": name, "value": value}) for value in values]
        self._received(self._sent(dict(enumerate(requests))), name)

    def render(self) -> tuple[Any, ...]:
        """What ``render`` returns in every environment."""
        return self.call("render")

    @property  # type: ignore[misc]  # Gymnasium's own have no setter either
    def np_random(self) -> Any:
        """Copies of the environments' generators."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        """The seeds of the environments' generators."""
        return self.get_attr("np_random_seed")

    def _refuse_pending(self, name: str) -> None:
        """Refuse to begin something once the environments are closed.

        Raises:
            EnvsClosedError: If they are.
        """
        self.manager.check_open()

    def _ask(self, lanes: Sequence[int], name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of some environments, all at the same time."""
        sent = self._sent(dict.fromkeys(lanes, _request(name, args, kwargs)))
        return self._received(sent, name)

    def _sent(self, requests: Mapping[int, tuple[str, Any]]) -> list[int]:
        """Send a request to each of some environments; returns these."""
        sent: list[int] = []
        try:
            for lane, request in requests.items():
                self.manager.remotes[lane].send(request)
                sent.append(lane)
        except BaseException:  # no reply may be left behind: the lane could not step
            for lane in sent:
                self.manager.remotes[lane].recv()
            raise
        return sent

    def _received(self, lanes: Sequence[int], name: str) -> list[Any]:
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
        return [value for _, _, value in replies]


def _request(name: str, args: Any, kwargs: Any) -> tuple[str, Any]:
    """The request that calls a method of an environment."""
    return "call", {"name": name, "args": args, "kwargs": kwargs}


def _array(value: Any) -> Array:
    """A value as an array, also a tensor on another device."""
    return as_numpy(value) if hasattr(value, "detach") else np.asarray(value)
