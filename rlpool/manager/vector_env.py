"""A vector environment of Gymnasium over the workers of a ``ParallelEnvManager``.

Calls are made as a whole, or in two halves: one begins a call, the other waits for its outcome.
Between the two the caller's process is free, and the environments work. One call is pending at a
time. One whose wait timed out, or was interrupted, is given up: the next call waits for its end and
forgets its outcome.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space, logger
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from rlpool.data.array_view import as_numpy
from rlpool.data.specs import flattener, leaves_of, nester
from rlpool.data.storage import NDArray
from rlpool.envs.vector_infos import keep_infos_apart
from rlpool.errors import (
    CallTimeoutError,
    EnvError,
    NoPendingCallError,
    PendingCallError,
    RlpoolError,
    SpecError,
    UsageError,
    VectorSpecError,
    Where,
)
from rlpool.machine.arguments import checked_wait
from rlpool.manager.process_lanes import ProcessLanes
from rlpool.manager.vector_lane import (
    LONG,
    Beginning,
    Description,
    described_together,
    in_pieces,
    structure_in_arrays,
)

_MOST = 2**63  # seeds travel as int64

Finish = Callable[[], Any]
"""Waits for what was begun and returns its outcome."""


@dataclass(eq=False)
class PendingCall:
    """A call that was begun.

    Attributes:
        kind: ``"reset"``, ``"step"``, ``"call"`` or ``"set_attr"``.
        finish: Waits for it and returns its outcome; ``None`` until it was begun as a whole.
        is_given_up: Whether nobody will ask for its outcome.
    """

    kind: str
    finish: Finish | None = None
    is_given_up: bool = True


class VectorOverLanes(VectorEnv[Any, Any, NDArray]):
    """A ``ParallelVectorEnv``, once its manager is made, with the calls of an ``AsyncVectorEnv``.

    Attributes:
        manager: The lanes, each a ``VectorLane``.
        copy: Whether observations are copies.
        autoreset_mode: When lanes restart.
    """

    manager: ProcessLanes
    copy: bool
    autoreset_mode: AutoresetMode
    _pending: PendingCall | None = None

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
        self._nest: Callable[[list[NDArray]], Any] | None = None
        action = structure_in_arrays(self.single_action_space, "action_space")
        if action is not None:
            self._flatten = flattener(action, "actions")
            self._action_keys = list(leaves_of({"action": action}, ""))
        observed = structure_in_arrays(lanes[0].observation_space, "observation_space")
        if observed is not None:
            self._nest = nester(observed)
            self._keys = list(leaves_of({"observation": observed}, ""))

    # Calls, as a whole or in halves --------------------------------------------------------------

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
        result: tuple[Any, dict[str, Any]] = self._whole("reset", self._begin_reset, seed, options)
        return result

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin a ``reset`` and return at once; ``reset_wait`` waits for it.

        Args:
            seed: As for ``reset``.
            options: As for ``reset``.

        Raises:
            PendingCallError: If a call is pending; also Gymnasium's ``AlreadyPendingCallError``.
            SpecError, UsageError: As for ``reset``.
        """
        self._begin("reset_async", self._begin_reset, seed, options).is_given_up = False

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Wait for the reset that ``reset_async`` began.

        Args:
            timeout: The most seconds to wait, ``None`` for no limit beside that of hanging workers.

        Returns:
            What ``reset`` returns.

        Raises:
            NoPendingCallError: If no reset is pending; also Gymnasium's ``NoAsyncCallError``.
            CallTimeoutError: If it takes longer, a ``TimeoutError`` of Python and of
                ``multiprocessing``. The reset goes on; the next call waits for its end and forgets
                its outcome.
            EnvError, WorkerDiedError, WorkerTimeoutError: As for ``reset``.
        """
        result: tuple[Any, dict[str, Any]] = self._outcome("reset", timeout)
        return result

    def step(self, actions: Any) -> tuple[Any, NDArray, NDArray, NDArray, dict[str, Any]]:
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
        result: tuple[Any, NDArray, NDArray, NDArray, dict[str, Any]] = self._whole(
            "step", self._begin_step, actions
        )
        return result

    def step_async(self, actions: Any) -> None:
        """Begin a ``step`` and return at once; ``step_wait`` waits for it.

        Actions of spaces without a fixed shape may take part of the step's time here: those of
        more than 8 KB travel in pieces.

        Args:
            actions: As for ``step``.

        Raises:
            PendingCallError: If a call is pending; also Gymnasium's ``AlreadyPendingCallError``.
            SpecError, UsageError: As for ``step``.

        Example:
            >>> import gymnasium
            >>> envs = ParallelVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
            >>> _ = envs.reset(seed=1)
            >>> envs.step_async([0, 1])
            >>> observation, reward, *_ = envs.step_wait(timeout=60.0)
            >>> reward
            array([1., 1.])
            >>> envs.close()
        """
        self._begin("step_async", self._begin_step, actions).is_given_up = False

    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[Any, NDArray, NDArray, NDArray, dict[str, Any]]:
        """Wait for the step that ``step_async`` began.

        Args:
            timeout: The most seconds to wait, ``None`` for no limit beside that of hanging workers.

        Returns:
            What ``step`` returns.

        Raises:
            NoPendingCallError: If no step is pending; also Gymnasium's ``NoAsyncCallError``.
            CallTimeoutError: If it takes longer, a ``TimeoutError`` of Python and of
                ``multiprocessing``. The step is made nevertheless; the next call waits for its end
                and forgets its outcome.
            EnvError, WorkerDiedError, WorkerTimeoutError: As for ``step``.
        """
        result: tuple[Any, NDArray, NDArray, NDArray, dict[str, Any]] = self._outcome(
            "step", timeout
        )
        return result

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
        requests = _requests_to(self._all, name, args, kwargs)
        result: tuple[Any, ...] = self._whole("call", self._begin_call, requests, name)
        return result

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begin a ``call`` and return at once; ``call_wait`` waits for it.

        Args:
            name: As for ``call``.
            *args: As for ``call``.
            **kwargs: As for ``call``.

        Raises:
            PendingCallError: If a call is pending; also Gymnasium's ``AlreadyPendingCallError``.
            SpecError: If an argument cannot be pickled.
        """
        requests = _requests_to(self._all, name, args, kwargs)
        self._begin("call_async", self._begin_call, requests, name).is_given_up = False

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the calls that ``call_async`` began.

        Args:
            timeout: The most seconds to wait, ``None`` for no limit beside that of hanging workers.

        Returns:
            What ``call`` returns.

        Raises:
            NoPendingCallError: If no call is pending; also Gymnasium's ``NoAsyncCallError``.
            CallTimeoutError: If it takes longer, a ``TimeoutError`` of Python and of
                ``multiprocessing``. The next call waits for its end and forgets its outcome.
            EnvError, WorkerDiedError, WorkerTimeoutError: As for ``call``.
        """
        result: tuple[Any, ...] = self._outcome("call", timeout)
        return result

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
        requests = [("set_attr", {"attr": name, "value": value}) for value in values]
        self._whole("set_attr", self._begin_call, dict(enumerate(requests)), name)

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

    # States ------------------------------------------------------------------------------------

    def _begin(self, name: str, begin: Callable[..., Finish], *arguments: Any) -> PendingCall:
        """Begin a call by its name, given up unless somebody asks for its outcome.

        Raises:
            EnvsClosedError: If the environments are closed.
            PendingCallError: If a call is pending.
        """
        self.manager.check_open()
        pending = self._pending
        if pending is not None:
            if not pending.is_given_up:
                raise PendingCallError(
                    f"{name}() was called while a {pending.kind} is pending",
                    pending.kind,
                    fix=f"call {pending.kind}_wait() first",
                )
            self.manager.drop_begun()
            self._note_ended()
            self._pending = None
        self._pending = begun = PendingCall(
            name.removesuffix("_async")
        )  # first: if it is interrupted, it is given up
        begun.finish = begin(*arguments)
        return begun

    def _whole(self, name: str, begin: Callable[..., Finish], *arguments: Any) -> Any:
        """Begin a call and wait for its outcome."""
        return self._finished(self._begin(name, begin, *arguments))

    def _outcome(self, kind: str, timeout: float | None) -> Any:
        """The outcome of the pending call, which has to be of this kind."""
        self.manager.check_open()
        pending = self._pending
        if pending is None or pending.is_given_up or pending.kind != kind:
            what = f"{kind}_wait() was called, and no {kind} is pending"
            raise NoPendingCallError(what, kind, fix=f"call {kind}_async() first")
        timeout = checked_wait(timeout)
        pending.is_given_up = True  # unless its outcome gets to the caller
        if timeout is not None and not self.manager.is_over(monotonic() + timeout):
            raise CallTimeoutError(
                f"the {kind} has not ended after {timeout:g} s",
                fix="wait longer; the next call waits for its end and forgets its outcome",
            )
        return self._finished(pending)

    def _finished(self, pending: PendingCall) -> Any:
        try:
            outcome = pending.finish and pending.finish()
        except RlpoolError:  # that of an environment or a worker: it is the outcome
            self._pending = None
            raise
        self._pending = None
        return outcome

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers; called by ``close``, whose arguments are not used.

        A pending call is given up, with a warning as Gymnasium gives it.
        """
        if self._pending is not None and not self._pending.is_given_up:
            logger.warn(f"`close` was called while a {self._pending.kind} is pending: it is lost")
        if hasattr(self, "manager"):  # else it was not made, which Gymnasium's __del__ does not ask
            self.manager.close()

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

    def _finish_step(self) -> tuple[Any, NDArray, NDArray, NDArray, dict[str, Any]]:
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

    def _action_arrays(self, actions: Any) -> dict[str, NDArray]:
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
        for lane, request in requests.items():
            self.manager.remotes[lane].send(request)
        return partial(self._finish_call, list(requests), name)

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
        return self._begin_call(_requests_to(lanes, name, args, kwargs), name)()


def _requests_to(
    lanes: Sequence[int], name: str, args: Any, kwargs: Any
) -> dict[int, tuple[str, Any]]:
    """By lane, the request that calls a method of an environment."""
    return dict.fromkeys(lanes, ("call", {"name": name, "args": args, "kwargs": kwargs}))


def _array(value: Any) -> NDArray:
    """A value as an array, also a tensor on another device."""
    return as_numpy(value) if hasattr(value, "detach") else np.asarray(value)
