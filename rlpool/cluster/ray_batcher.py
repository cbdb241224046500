"""A batcher of episodes on the nodes of a Ray cluster.

Ray starts an actor on every node, which owns an ordinary ``EpisodeBatcher``. A request is divided
into ranges of consecutive episodes, which are handed to whichever actor is free. All that an
episode is follows from its number, so a range that is lost with its node runs again elsewhere, with
the same result. Nothing happens in the background: ranges are sent and results copied while the
caller is inside rlpool.
"""

from __future__ import annotations

import inspect
import logging
import math
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch

from rlpool.batch.batcher import EpisodeBatcher
from rlpool.batch.batcher_base import (
    CreateAgent,
    CreateEnv,
    Seeds,
    ShowProgress,
    checked_batcher_seeds,
)
from rlpool.cluster.node import NodeActor, Range, Rows, steps_in
from rlpool.data.infos import Info, Infos, as_infos, part_of
from rlpool.data.storage import Memory, NDArray
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import (
    BatcherClosedError,
    ResultTimeoutError,
    RlpoolError,
    SpecError,
    UsageError,
    WorkerDiedError,
    WorkerStartupError,
    described,
)
from rlpool.machine.arguments import (
    also_takes,
    check_choice,
    checked_wait,
    keywords,
    real_number,
    whole_number,
)
from rlpool.machine.calls import CrashOnly, whole
from rlpool.machine.imports import import_extra, imports_of
from rlpool.machine.pickling import why_not
from rlpool.seeding import checked_seeds, root_from
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.slots.trajectories import Slice, trajectories_of
from rlpool.workers.payload import pack

if TYPE_CHECKING:
    from typing_extensions import Self

_LOG = logging.getLogger("rlpool")

_Policy = tuple[int, Sequence[Any]]
_Sent = tuple["_Request", range] | None

_STATE = ("root", "next_episode", "policy_version")

_MOST_RANGES = 2
"""Ranges that an actor has at once: one that it runs, and the next."""

_MOST_LOSSES = 20
"""How often ranges of one request may be lost with their nodes."""

_RETRY_S = 0.2
"""How often to ask whether an actor is back."""

_AWAY_S = 60.0
"""How long to wait for any actor if none is there."""

_ROOM_S = 30.0
"""How long to wait for nodes with enough free processors."""

_CLOSE_S = 3.0
"""How long actors may take to close their environments."""


class RayEpisodeBatcher(CrashOnly):
    """Collects complete episodes on the nodes of a Ray cluster.

    Calls, rows and bits are those of ``EpisodeBatcher`` with as many environments per worker; every
    node runs an ``EpisodeBatcher`` of its own. What a lost node had runs again on another one, and
    Ray starts a process that died again.

    Needs the extra ``ray``. Calls ``ray.init()`` unless your program has.

    Args:
        n_timesteps: As for ``EpisodeBatcher``.
        n_slots: Slots in flight, of all nodes together.
        create_agent: As for ``EpisodeBatcher``. Modules that are imported for it must be installed
            on all nodes, or be in Ray's ``runtime_env``.
        agent_args: As for ``EpisodeBatcher``; everything is copied to the nodes.
        create_env: As for ``EpisodeBatcher``, with the same restriction. The environments have to
            be seeded one by one.
        env_args: As for ``EpisodeBatcher``; everything is copied to the nodes.
        n_workers: Worker processes on each node, each with a processor of its own.
        n_nodes: How many nodes to use; ``None`` for all that there are.
        seeds: As for ``EpisodeBatcher``; a list may have any length.
        resources: What each node reserves besides processors, by Ray's names: ``{"GPU": 1}``.
        **options: The other arguments of ``EpisodeBatcher``, which apply to every node.

    Raises:
        SpecError: As for ``EpisodeBatcher``; if the cluster lacks nodes with enough free processors
            and ``resources``; if environments cannot be seeded one by one.
        WorkerStartupError, WorkerDiedError, UsageError: As for ``EpisodeBatcher``.
        ImportError: If Ray is not installed.

    Example:
        >>> from rlpool.cluster import RayEpisodeBatcher
        >>> with RayEpisodeBatcher(8, 16, create_agent, {}, create_env, seeds=0) as batcher:
        ...     batcher.execute(n_episodes=12)
        ...     print(batcher.get()["frame"].shape)
        torch.Size([12, 4, 1])
    """

    _is_closed = _is_released = True  # until there is something to close

    @also_takes(n_threads="n_workers", seed="seeds")
    def __init__(
        self,
        n_timesteps: int,
        n_slots: int,
        create_agent: CreateAgent | None = None,
        agent_args: Mapping[str, Any] | None = None,
        create_env: CreateEnv | None = None,
        env_args: Mapping[str, Any] | None = None,
        n_workers: int = 1,
        n_nodes: int | None = None,
        seeds: Seeds = None,
        *,
        resources: Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        self._ray = import_extra("ray", "ray")
        self._n_timesteps = whole_number("n_timesteps", n_timesteps, 1)
        n_slots = whole_number("n_slots", n_slots, 1)
        n_workers = whole_number("n_workers", n_workers, 1)
        if n_nodes is not None:
            n_nodes = whole_number("n_nodes", n_nodes, 1, fix="pass n_nodes=None for all there are")
        self._root = root_from(checked_batcher_seeds(seeds))
        bundle = {"CPU": float(n_workers)}
        for name, amount in keywords("resources", resources).items():
            bundle[name] = real_number(f"resources[{name!r}]", amount, "above 0")
        factories = {"create_agent": create_agent, "create_env": create_env}
        arguments = {**factories, "agent_args": agent_args, "env_args": env_args, **options}
        arguments |= {"n_timesteps": n_timesteps, "n_workers": n_workers}
        inspect.signature(EpisodeBatcher).bind(n_slots=n_slots, **arguments)
        if not self._ray.is_initialized():
            self._ray.init()
        self._ray_id: str = self._ray.get_runtime_context().get_worker_id()
        self._actors: list[_Actor] = []
        self._group: Any = None
        self._requests: deque[_Request] = deque()
        self._next_episode = self._n_node_lanes = 0
        self._policy: _Policy = 0, ()
        self._last_loss = ""
        self._has_dropped = False
        self._is_closed = self._is_released = False
        try:
            n_nodes = self._reserve(n_nodes, bundle)
            self._n_slots = max(1, n_slots // n_nodes)
            self._start({**arguments, "n_slots": self._n_slots, "seeds": 0}, n_nodes, bundle)
        except BaseException:
            self.close()
            raise

    # Nodes --------------------------------------------------------------------------------------

    def _reserve(self, n_nodes: int | None, bundle: dict[str, float]) -> int:
        """Reserve a bundle on each of the nodes; returns how many."""
        list_nodes: Any = self._ray.nodes  # without annotations
        sizes = [node["Resources"] for node in list_nodes() if node["Alive"]]
        large = [all(size.get(k, 0) >= bundle[k] for k in bundle) for size in sizes]
        n = n_nodes or sum(large)
        if n and sum(large) >= n:
            module = import_extra("ray.util.placement_group", "ray")
            self._group = module.placement_group([bundle] * n, strategy="STRICT_SPREAD")
            if self._group.wait(_ROOM_S):
                return n
        raise SpecError(
            f"the cluster has no free {bundle} on {n or 1} of its {len(sizes)} nodes",
            fix="lower n_nodes, n_workers or resources, end what uses them, or start more nodes",
        )

    def _start(self, arguments: dict[str, Any], n_nodes: int, bundle: Mapping[str, float]) -> None:
        """Start an actor in every bundle, and wait until they are ready."""
        try:
            setup = cloudpickle.dumps(arguments)
        except Exception as error:
            fix = "create it inside create_env or create_agent, which run on the node"
            raise WorkerStartupError(why_not(arguments, error), fix=fix) from error
        others = {k: amount for k, amount in bundle.items() if k not in ("CPU", "GPU", "memory")}
        options: dict[str, Any] = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}
        options |= {"memory": bundle.get("memory"), "resources": others}
        # Ray would run a lost range in the same actor; another one may be free.
        options |= {"max_restarts": -1, "max_task_retries": 0}
        strategies = import_extra("ray.util.scheduling_strategies", "ray")
        for number in range(n_nodes):
            place = strategies.PlacementGroupSchedulingStrategy(self._group, number)
            kind = self._ray.remote(NodeActor).options(**options, scheduling_strategy=place)
            self._actors.append(_Actor(kind.remote(setup, sys.path)))
        self._seen_s = time.monotonic()
        self._ask_who_is_back()
        while any(actor.calls for actor in self._actors) or not self._n_node_lanes:
            self._advance(_RETRY_S)

    def _advance(self, timeout_s: float) -> None:
        """Send ranges, and wait for an answer."""
        self._send()
        self._wait(timeout_s)
        self._ask_who_is_back()

    def _ask_who_is_back(self) -> None:
        """Let actors that are away start their workers.

        Raises:
            WorkerDiedError: If none has been there for a while, or none can come back.
        """
        now_s = time.monotonic()
        if any(actor.is_up for actor in self._actors):
            self._seen_s = now_s
        elif all(actor.is_gone for actor in self._actors) or now_s > self._seen_s + _AWAY_S:
            what = f"all {len(self._actors)} nodes are gone"
            fix = "look at the logs of their machines (ray logs)"
            why = self._last_loss
            raise WorkerDiedError(what, exitcode=None, fix=fix, traceback_text=why)
        for actor in self._actors:
            if not actor.calls and not (actor.is_up or actor.is_gone) and now_s >= actor.retry_s:
                actor.calls[actor.handle.start.remote()] = None

    def _send(self) -> None:
        """Keep every actor busy."""
        for depth in range(_MOST_RANGES):
            for actor in self._actors:
                request = next((each for each in self._requests if each.left), None)
                if request is not None and actor.is_up and len(actor.calls) <= depth:
                    rows = self._next_rows(request)
                    part = request.part(rows, self._root)
                    actor.calls[actor.handle.run.remote(part)] = request, rows

    def _next_rows(self, request: _Request) -> range:
        """Take rows from a request, fewer towards its end: no actor is waited for alone."""
        rows = request.left.pop(0)
        n_left = len(rows) + sum(map(len, request.left))
        n_up = sum(actor.is_up for actor in self._actors)
        share = -(-n_left // (_MOST_RANGES * n_up))
        least = min(self._n_node_lanes, -(-request.n_rows // n_up))
        size = min(max(share, least), max(self._n_slots, self._n_node_lanes))
        if len(rows) > size:
            request.left.insert(0, rows[size:])
        return rows[:size]

    def _wait(self, timeout_s: float) -> None:
        """Wait for an answer, and take all that are there."""
        references = {ref: actor for actor in self._actors for ref in actor.calls}
        timeout_s = min(timeout_s, _RETRY_S)
        if not references:
            time.sleep(timeout_s)
            return
        ready, rest = self._ray.wait(list(references), timeout=timeout_s)
        if ready and rest:
            ready += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        for reference in ready:
            actor = references[reference]
            sent = actor.calls.pop(reference)
            try:
                answer = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                self._note_loss(actor, sent, error)
            else:
                if sent is None:
                    self._note_start(actor, answer)
                else:
                    sent[0].take(sent[1], answer)

    def _note_start(self, actor: _Actor, answer: Any) -> None:
        if isinstance(answer, RlpoolError):
            raise answer
        actor.is_up, self._n_node_lanes = True, answer

    def _note_loss(self, actor: _Actor, sent: _Sent, error: Exception) -> None:
        """A call has failed, and what it was to return is lost."""
        self._last_loss = str(error)
        if sent is None and isinstance(error, self._ray.exceptions.RayTaskError):
            what = f"a node cannot make its batcher: {described(error.cause)}"
            fix = "install what create_env and create_agent import on every machine"
            raise WorkerStartupError(what, fix=fix, traceback_text=self._last_loss)
        if actor.is_up:
            _LOG.warning("a node was lost: %s", self._last_loss.partition("\n")[0])
        actor.is_up, actor.retry_s = False, time.monotonic() + _RETRY_S
        actor.is_gone = isinstance(error, self._ray.exceptions.ActorDiedError)
        if sent is not None:
            sent[0].lose(sent[1], self._last_loss)

    # What the user calls ------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    @property
    def n_lanes(self) -> int:
        """Lanes of all nodes: environments that run at the same time."""
        return self._n_node_lanes * len(self._actors)

    @property
    def n_pending(self) -> int:
        """Requests whose results were not taken with ``get``."""
        return len(self._requests)

    @property
    def policy_version(self) -> int:
        """How many updates there were."""
        return self._policy[0]

    @property
    def next_episode(self) -> int:
        """Number of the next episode in the batcher's life."""
        return self._next_episode

    @property
    def _is_connected(self) -> bool:
        """Whether Ray is still the one that was there at the beginning."""
        if not self._ray.is_initialized():
            return False
        ray_id: str = self._ray.get_runtime_context().get_worker_id()
        return ray_id == self._ray_id

    def _open(self) -> None:
        """Begin a call; drops what was in flight if the last one was interrupted."""
        if self._is_closed:
            raise BatcherClosedError("the batcher is closed", fix="make a new one")
        if not self._is_connected:
            what = "Ray was shut down, and with it all nodes"
            raise WorkerDiedError(what, exitcode=None, fix="make a new batcher")
        if self.is_interrupted:
            for actor in self._actors:
                if actor.calls:
                    actor.is_up = False
                    self._ray.kill(actor.handle, no_restart=False)
                    actor.calls.clear()
            self._requests.clear()
            self._has_dropped = True
            self.forget_interrupt()

    @whole
    def execute(
        self,
        n_episodes: int,
        agent_info: Info = None,
        env_info: Info = None,
        *,
        episode_seeds: Sequence[int] | None = None,
    ) -> None:
        """Request episodes; returns at once. See ``EpisodeBatcher.execute``.

        Args:
            n_episodes: Any number from 1.
            agent_info: Row *i* goes to the agent with episode *i*.
            env_info: Row *i* reaches the environment of episode *i*.
            episode_seeds: What the environment of each episode is reset with.

        Raises:
            SpecError: For infos or seeds that do not fit.
            UsageError: If the batcher is closed.
        """
        self._open()
        n_episodes = whole_number("n_episodes", n_episodes, 1)
        infos = as_infos(agent_info, env_info, n_episodes)
        seeds = None if episode_seeds is None else checked_seeds(episode_seeds, n_episodes)
        first, self._next_episode = self._next_episode, self._next_episode + n_episodes
        arguments = n_episodes, first, infos, seeds, self._policy, self._n_timesteps
        self._requests.append(_Request(*arguments))
        self._has_dropped = False
        self._send()

    @whole
    def get(
        self,
        blocking: bool = True,
        *,
        timeout: float | None = None,
        progress: ShowProgress = False,
    ) -> TemporalDictTensor | None:
        """Take the result of the oldest request, see ``EpisodeBatcher.get``.

        Args:
            blocking: Wait for it; otherwise return ``None`` until all of it is there.
            timeout: Seconds to wait at most; ``None`` for no limit.
            progress: ``True`` shows a bar; a function is called with the number of episodes that
                have arrived, and that were requested.

        Returns:
            As ``EpisodeBatcher.get``, in memory of this process.

        Raises:
            UsageError: If nothing is pending, or the batcher is closed.
            TimeoutError: If the result is not there after ``timeout``.
            EnvError, AgentError: If the user's code failed. The request is lost, the batcher
                still works.
            WorkerDiedError, WorkerTimeoutError: If the workers of a node die or hang again and
                again, or all nodes are gone.
        """
        self._open()
        check_choice("blocking", blocking, (True, False))
        timeout = checked_wait(timeout)
        if not self._requests:
            why = ": the last call was interrupted" if self._has_dropped else ""
            raise UsageError(f"nothing is pending{why}", fix="call execute() before get()")
        request = self._requests[0]
        self._seen_s = time.monotonic() if blocking else self._seen_s
        limit_s = _limit(0.0 if not blocking else timeout)
        with _shown(progress, request.n_rows) as show:
            while not request.is_over:
                left_s = limit_s - time.monotonic()
                self._advance(max(0.0, left_s))
                show(request.n_there)
                if left_s <= 0.0 and not request.is_over:
                    if not blocking:
                        return None
                    raise ResultTimeoutError(f"the result is not there after {timeout:g} s")
        self._requests.popleft()
        self._send()
        return request.result()

    @whole
    def update(self, info: Any) -> None:
        """Hand new parameters to the agents of all later requests, see ``EpisodeBatcher.update``.

        Args:
            info: Any object that cloudpickle can pickle, such as ``model.state_dict()``. It is put
                into Ray's object store once; every node takes it from there.

        Raises:
            SpecError: If it cannot be pickled.
            UsageError: If the batcher is closed.
        """
        self._open()
        try:
            payload, memory = pack(info, Memory.local)
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            fix = "send only what the agents need, such as model.state_dict()"
            raise SpecError(why_not({"info": info}, error), fix=fix) from error
        # At once: two policies of one version would be the same for a node.
        self._policy = self.policy_version + 1, (self._ray.put((payload, memory.root())),)

    @whole
    def seek(self, number: int) -> None:
        """Let the next ``execute`` begin with this episode, see ``EpisodeBatcher.seek``.

        Args:
            number: From 0.

        Raises:
            SpecError: For anything else.
            UsageError: If results are pending, or the batcher is closed.
        """
        self._open()
        number = whole_number("number", number, 0)
        self._refuse_pending("seek()")
        self._next_episode = number

    @whole
    def state_dict(self) -> dict[str, Any]:
        """What another batcher needs to go on from here, see ``EpisodeBatcher.state_dict``.

        Returns:
            The root of all seeds, the number of the first episode that was not returned, and the
            policy's version.

        Raises:
            UsageError: If the batcher is closed.
        """
        self._open()
        first = self._requests[0].first if self._requests else self._next_episode
        numbers = {"next_episode": first, "policy_version": self.policy_version}
        return {"root": f"{self._root:x}", **numbers}

    @whole
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another batcher was, see ``EpisodeBatcher.load_state_dict``.

        Args:
            state: What ``state_dict`` returned.

        Raises:
            SpecError: If anything is missing from it or is damaged.
            UsageError: If results are pending, or the batcher is closed.
        """
        self._open()
        self._refuse_pending("load_state_dict()")
        try:
            root, first, version = (state[name] for name in _STATE)
            root = int(root, 16)
            first, version = (whole_number("a number", n, 0) for n in (first, version))
        except (LookupError, TypeError, ValueError) as error:
            what = f"the state cannot be read: {type(error).__name__}: {error}"
            raise SpecError(what, fix="pass what state_dict() returned") from error
        policy = max(version, self.policy_version), self._policy[1]
        self._root, self._next_episode, self._policy = root, first, policy

    def _refuse_pending(self, call: str) -> None:
        if self._requests:
            what = f"{call} while {self.n_pending} results are pending"
            raise UsageError(what, fix="take them with get() first")

    def close(self) -> None:
        """End the actors and their workers, and give back the processors. May be repeated."""
        if self._is_released:
            return
        self._is_closed = True
        self._requests.clear()
        if self._is_connected:
            # Ray's own errors: an actor has died.
            with suppress(self._ray.exceptions.RayError):
                free = [a.handle.close.remote() for a in self._actors if a.is_up and not a.calls]
                if free:
                    self._ray.wait(free, num_returns=len(free), timeout=_CLOSE_S)
            for actor in self._actors:
                self._ray.kill(actor.handle)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        self._is_released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


@dataclass(eq=False)
class _Actor:
    """An actor of Ray.

    Attributes:
        handle: Ray's.
        calls: By Ray's reference: the request and rows that were sent, ``None`` for ``start``.
        is_up: Whether its workers are ready, as far as is known.
        is_gone: Whether it cannot come back.
        retry_s: When to ask again whether it is back.
    """

    handle: Any
    calls: dict[Any, _Sent] = field(default_factory=dict)
    is_up: bool = False
    is_gone: bool = False
    retry_s: float = 0.0


class _Request:
    """Episodes that are run in ranges, and the memory that they are copied to.

    Args:
        n_rows: How many episodes.
        first: Number of the first one in the batcher's life.
        infos: Their infos.
        seeds: Their seeds, if the user gave them.
        policy: What they run with: its version, and Ray's reference to it if there is one.
        n_timesteps: Room for so many steps at first.

    Attributes:
        left: Ranges of rows that no actor has.
        n_there: How many rows have arrived.
        error: Why it failed.
    """

    def __init__(
        self,
        n_rows: int,
        first: int,
        infos: Infos,
        seeds: list[int] | None,
        policy: _Policy,
        n_timesteps: int,
    ) -> None:
        self.n_rows, self.first, self.policy = n_rows, first, policy
        self.left = [range(n_rows)]
        self.n_there = 0
        self.error: RlpoolError | None = None
        self._infos, self._seeds = infos, seeds
        self._n_losses = 0
        self._step: StepSpecs | None = None
        self._room = n_timesteps
        self._steps: dict[str, NDArray] = {}
        self._finals: dict[str, NDArray] = {}
        self._info: dict[str, NDArray] = {}
        self._lengths, self._starts = np.zeros((2, n_rows), np.int64)

    @property
    def is_over(self) -> bool:
        """Whether all rows are there, or it failed."""
        return self.n_there == self.n_rows or self.error is not None

    def part(self, rows: range, root: int) -> Range:
        """What an actor is sent."""
        seeds = None if self._seeds is None else self._seeds[rows.start : rows.stop]
        infos = part_of(self._infos, rows)
        first = self.first + rows.start
        return Range(root, first, rows.start, len(rows), infos, seeds, *self.policy)

    def lose(self, rows: range, why: str) -> None:
        """Let rows run again."""
        if self.error is not None:
            return
        self._n_losses += 1
        self.left.insert(0, rows)
        if self._n_losses > _MOST_LOSSES:
            what = f"nodes that ran this request were lost {self._n_losses} times"
            self._fail(WorkerDiedError(what, exitcode=None, traceback_text=why))

    def _fail(self, error: RlpoolError) -> None:
        self.error = error
        self.left.clear()

    def take(self, rows: range, answer: Rows | RlpoolError) -> None:
        """Copy rows that have arrived to their place."""
        if self.error is not None:
            return
        if isinstance(answer, RlpoolError):
            self._fail(answer)
            return
        if self._step is None:
            self._step = answer.step
            self._finals = _zeros(self.n_rows, (), answer.finals)
            self._info = _zeros(self.n_rows, (), answer.info)
        elif self._step != answer.step:
            self._fail(SpecError("the environments or agents of two nodes have different keys"))
            return
        here = slice(rows.start, rows.stop)
        self._make_room(int(answer.lengths.max()), answer.steps)
        is_step = steps_in(answer.lengths)
        for key, array in answer.steps.items():
            self._steps[key][here, : is_step.shape[1]][is_step] = array
        for mine, theirs in ((self._finals, answer.finals), (self._info, answer.info)):
            for key, array in theirs.items():
                mine[key][here] = array
        self._info["episode"][here] += rows.start
        self._info["policy_version"][here] = self.policy[0]
        self._lengths[here], self._starts[here] = answer.lengths, answer.starts
        self.n_there += len(rows)

    def _make_room(self, longest: int, like: Mapping[str, NDArray]) -> None:
        """Make memory for longer rows; pages that are not written cost nothing."""
        if self._steps and longest <= self._room:
            return
        before = self._steps
        self._room = max(self._room, longest if not before else 2 * longest)
        self._steps = _zeros(self.n_rows, (self._room,), like)
        for key, array in before.items():
            self._steps[key][:, : array.shape[1]] = array

    def result(self) -> TemporalDictTensor:
        """The rows, once all are there.

        Raises:
            RlpoolError: If it failed.
        """
        if self.error is not None or self._step is None:
            raise self.error or UsageError("the request is not complete")
        longest = int(self._lengths.max())
        steps = {key: array[:, :longest] for key, array in self._steps.items()}
        layout = Layout(self._step, self.n_rows, self._room, 1)
        info = {key: partial(torch.from_numpy, array) for key, array in self._info.items()}
        rows = Slice(steps, self._finals, self._lengths, self._starts)
        return trajectories_of(layout, rows, info)


def _zeros(
    n_rows: int, leading: tuple[int, ...], like: Mapping[str, NDArray]
) -> dict[str, NDArray]:
    """Memory for rows like these."""
    return {k: np.zeros((n_rows, *leading, *a.shape[1:]), a.dtype) for k, a in like.items()}


def _limit(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


@contextmanager
def _shown(progress: Any, n_rows: int) -> Iterator[Callable[[int], None]]:
    """Show how many episodes have arrived in a block that waits for them."""
    if callable(progress):
        yield lambda n_there: progress(n_there, n_rows)
    elif not progress:
        yield lambda _: None
    else:
        with imports_of("progress"):
            from tqdm import tqdm
        with tqdm(total=n_rows, unit="episode") as bar:
            yield lambda n_there: bar.update(n_there - bar.n)
