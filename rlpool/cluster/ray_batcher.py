"""A batcher of episodes on the nodes of a Ray cluster.

Ray starts an actor on every node, which owns an ordinary ``EpisodeBatcher``. A request is divided
into ranges of consecutive episodes, which are sent to idle actors. An episode is determined by its
number, so a range that is lost with its node runs again elsewhere with the same result. Nothing
happens in the background: ranges are sent and results copied while the caller is inside rlpool.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle

from rlpool.batch.batcher import EpisodeBatcher
from rlpool.batch.checks import checked_batcher_seeds, checked_progress
from rlpool.batch.requests import EpisodeRequest
from rlpool.data.infos import part_of
from rlpool.data.temporal_dict_tensor import TemporalDictTensor
from rlpool.errors import RlpoolError, SpecError, UsageError, WorkerDiedError, WorkerStartupError
from rlpool.machine.arguments import also_takes, keywords, real_number, whole_number
from rlpool.machine.imports import import_extra
from rlpool.machine.own_state import Settings, torch_settings, use_settings
from rlpool.machine.pickling import why_not
from rlpool.machine.platform import require_linux
from rlpool.seeding import root_from
from rlpool.slots.blocks import Layout, StepSpecs
from rlpool.slots.trajectories import Unpadded, trajectories_of
from rlpool.workers.failure_policy import policy_of
from rlpool.workers.payload import unpacked_copy

_LOG = logging.getLogger("rlpool")

_MOST_RANGES = 2  # per actor at once: one to complete, and one for lanes that become idle
_MOST_LOSSES = 20  # of ranges of one request with their nodes
_MOST_FAILED = 5  # failed starts per node in a row while no actor is up
_RETRY_S = 0.2  # how often to ask whether an actor is back
_PATIENCE_S = 30.0  # how long to wait for any actor, or for free processors
_CLOSE_S = 3.0  # time for actors to close their environments


class RayEpisodeBatcher(EpisodeBatcher):
    """Collects complete episodes on the nodes of a Ray cluster.

    Calls, rows and bits are the same as for an ``EpisodeBatcher`` with as many environments per
    worker; every node runs an ``EpisodeBatcher`` of its own. Episodes of a lost node run again on
    another one, and Ray restarts a process that died. ``stats`` and ``fileno`` are not available.

    Needs the extra ``ray``. Calls ``ray.init()`` unless your program has.

    Args:
        *arguments: Those of ``EpisodeBatcher``, by position. ``n_slots``, which has no default
            here, counts the slots of all nodes together; ``n_workers`` is the number of worker
            processes on each node, with one processor each. Everything is copied to the nodes;
            modules imported by ``create_env`` and ``create_agent`` must be installed there or be in
            Ray's ``runtime_env``. Environments have to be seeded one by one. A list of ``seeds``
            may have any length.
        n_nodes: Number of nodes to use; ``None`` for all.
        resources: Resources that each node reserves besides processors, by Ray's names:
            ``{"GPU": 1}``.
        **named: Those of ``EpisodeBatcher``, by name.

    Raises:
        SpecError: As for ``EpisodeBatcher``; if too few nodes of the cluster have the processors
            and ``resources`` free; if environments cannot be seeded one by one.
        WorkerStartupError, WorkerDiedError, UsageError: As for ``EpisodeBatcher``.
        ImportError: If Ray is not installed.

    Example:
        >>> from rlpool.cluster import RayEpisodeBatcher
        >>> with RayEpisodeBatcher(8, 16, create_agent, {}, create_env, seeds=0) as batcher:
        ...     batcher.execute(n_episodes=12)
        ...     print(batcher.get()["frame"].shape)
        torch.Size([12, 4, 1])
    """

    @also_takes(n_threads="n_workers", seed="seeds")
    def __init__(
        self,
        *arguments: Any,
        n_nodes: int | None = None,
        resources: Mapping[str, float] | None = None,
        **named: Any,
    ) -> None:
        require_linux("RayEpisodeBatcher", "EpisodeBatcher(n_workers=0) collects in one process")
        bound = inspect.signature(EpisodeBatcher).bind(*arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        policy_of("RayEpisodeBatcher", given["policy"])  # validates the policy
        given |= given.pop("policy")
        self._progress = checked_progress(given.pop("progress"))
        self._root = root_from(checked_batcher_seeds(given.pop("seeds")))
        for name in ("n_timesteps", "n_slots", "n_workers"):
            given[name] = whole_number(name, given[name], 1)
        if n_nodes is not None:
            n_nodes = whole_number("n_nodes", n_nodes, 1, fix="pass n_nodes=None for all there are")
        bundle = {"CPU": float(given["n_workers"])}
        for name, amount in keywords("resources", resources).items():
            bundle[name] = real_number(f"resources[{name!r}]", amount, "above 0")
        self._owner_pid, self._is_private = os.getpid(), False
        self._start_workers: Any = partial(Nodes, given, n_nodes, bundle)
        nodes: Any = self._begin()
        self._n_workers = given["n_workers"] * nodes.n_nodes


class Nodes:
    """Sends ranges of episodes to actors and collects results, as ``Dispatcher`` does for workers.

    Args:
        arguments: Those of ``EpisodeBatcher``.
        n_nodes: Number of nodes to use, ``None`` for all.
        bundle: Resources that each node reserves, by Ray's names.
        root: Unused: every request has its own.

    Attributes:
        pending: Requests whose results the user has not received.
        fatal: The error after which nothing works any more.
        n_lanes: Lanes of each worker.
        n_nodes: Number of nodes used.
        is_closed: Whether ``close`` was called.
        environment: Description of the environments.
        control: Unused.
    """

    def __init__(
        self, arguments: dict[str, Any], n_nodes: int | None, bundle: dict[str, float], root: int
    ) -> None:
        self._ray = import_extra("ray", "ray")
        self.pending: deque[_Gathering] = deque()
        self.fatal: RlpoolError | None = None
        self.n_lanes, self.is_closed, self.control = 0, False, SimpleNamespace()
        self._reports_failures = arguments.get("on_env_error", "raise") != "raise"
        self.environment: Mapping[str, Any] = {}
        self._actors: list[_Actor] = []
        self._group: Any = None
        self._policy: _Policy = 0, None
        self._last_loss, self._n_failed = "", 0
        self._asked_s, self._seen_s = 0.0, time.monotonic()
        if not self._ray.is_initialized():
            self._ray.init()
        try:
            self.n_nodes = self._reserve(n_nodes, bundle)
            self._n_slots = max(1, arguments["n_slots"] // self.n_nodes)
            self._start({**arguments, "n_slots": self._n_slots, "seeds": 0}, dict(bundle))
            if self.environment["seeding"] != "episode":  # seeds would depend on the range
                message = "the environments of create_env cannot be seeded one by one"
                fix = "give single environments to GymEnv, or use an EpisodeBatcher on each machine"
                raise SpecError(message, fix=fix)
            self.n_lanes = self._n_node_lanes // arguments["n_workers"]
        except BaseException:
            self.close(at_once=True)
            raise

    # Actors -------------------------------------------------------------------------------------

    def _reserve(self, n_nodes: int | None, bundle: dict[str, float]) -> int:
        """Reserve a bundle on each of the nodes; returns the number of nodes."""
        sizes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        large = [all(size.get(k, 0) >= bundle[k] for k in bundle) for size in sizes]
        n = n_nodes or sum(large)
        if 0 < n <= sum(large):
            self._group = self._ray.util.placement_group([bundle] * n, strategy="STRICT_SPREAD")
            if self._group.wait(_PATIENCE_S):
                return n
        raise SpecError(
            f"the cluster has no free {bundle} on {n or 1} of its {len(sizes)} nodes",
            fix="lower n_nodes, n_workers or resources, end other programs, or start more nodes",
        )

    def _start(self, arguments: dict[str, Any], bundle: dict[str, float]) -> None:
        """Start an actor in every bundle, and wait until they are ready."""
        try:
            setup = cloudpickle.dumps(arguments)
        except Exception as error:
            fix = "create it inside create_env or create_agent, which run on the node"
            raise WorkerStartupError(why_not(arguments, error), fix=fix) from error
        options: dict[str, Any] = {"num_cpus": bundle.pop("CPU"), "num_gpus": bundle.pop("GPU", 0)}
        options |= {"memory": bundle.pop("memory", None), "resources": bundle}
        # Ray would repeat a lost call in the same actor, while another one may be free.
        options |= {"max_restarts": -1, "max_task_retries": 0}
        in_bundle = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for number in range(self.n_nodes):
            options["scheduling_strategy"] = in_bundle(self._group, number)
            kind = self._ray.remote(NodeActor).options(**options)
            self._actors.append(_Actor(kind.remote(setup, sys.path, torch_settings())))
        self._ask_who_is_back()
        while any(a.calls for a in self._actors) or not any(a.is_up for a in self._actors):
            self.look(_RETRY_S)
            self.refuse_if_dead()

    def _send(self) -> None:
        """Keep every actor busy."""
        up = [actor for actor in self._actors if actor.is_up]
        least = max(self.n_lanes, self._n_node_lanes // 2) if up else 0
        for depth in range(_MOST_RANGES):
            for actor in up:
                request = next((each for each in self.pending if each.left), None)
                n_ranges = len(actor.unsent) + sum(map(len, actor.calls.values()))
                if request is not None and n_ranges <= depth:
                    rows = request.next_rows(len(up), least, self._n_slots // _MOST_RANGES)
                    actor.unsent.append((request, rows))
        for actor in (each for each in up if each.unsent):
            messages = [request.message(rows) for request, rows in actor.unsent]
            actor.calls[actor.handle.call.remote("run", messages)] = actor.unsent
            actor.unsent = []

    def _wait(self, timeout_s: float) -> None:
        actors = {call: actor for actor in self._actors for call in actor.calls}
        if not actors:
            time.sleep(timeout_s)
            return
        for call in self._ray.wait(list(actors), timeout=timeout_s)[0]:
            actor, ranges = actors[call], actors[call].calls.pop(call)
            try:
                answer = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                self._note_loss(actor, ranges, error)
                continue
            if ranges:
                (request, rows), *actor.unsent = ranges
                request.on_answer(rows, answer)
            elif isinstance(answer, RlpoolError):
                self.fatal = answer
            else:
                actor.is_up, (self._n_node_lanes, self.environment) = True, answer

    def _note_loss(self, actor: _Actor, ranges: list[_Range], error: Any) -> None:
        """Handle a failed call, whose ranges are lost."""
        self._last_loss = str(error)
        if actor.is_up:
            _LOG.warning("a node was lost: %s", self._last_loss.partition("\n")[0])
        actor.is_up = False
        self._n_failed += not ranges
        lost, actor.unsent = ranges + actor.unsent, []
        for request, rows in lost:
            request.lose(rows, self._last_loss)
        if not ranges and isinstance(error, self._ray.exceptions.RayTaskError):
            message, fix = "a node cannot make a batcher", "install imported modules on every node"
            self.fatal = WorkerStartupError(message, fix=fix, traceback_text=self._last_loss)

    def _ask_who_is_back(self) -> None:
        """Let restarted actors start their workers; fail if all actors stay away."""
        now_s = time.monotonic()
        if any(actor.is_up for actor in self._actors):
            self._seen_s, self._n_failed = now_s, 0
        elif self._n_failed > _MOST_FAILED * self.n_nodes and now_s > self._seen_s + _PATIENCE_S:
            message, why = f"all {self.n_nodes} nodes are gone", self._last_loss
            self.fatal = WorkerDiedError(message, exitcode=None, traceback_text=why)
        if now_s > self._asked_s + _RETRY_S:
            self._asked_s = now_s
            for actor in (each for each in self._actors if not (each.calls or each.is_up)):
                actor.calls[actor.handle.call.remote("start", [])] = []

    # The interface of a Dispatcher --------------------------------------------------------------

    def submit(self, request: EpisodeRequest) -> None:
        """Queue a request and send ranges to idle actors."""
        self.refuse_if_dead()
        version, packed = request.policy
        # If Ray is gone, put() would start another instance.
        if version != self._policy[0] and self._ray.is_initialized():
            self._policy = version, packed and [self._ray.put(unpacked_copy(packed))]
        self.pending.append(_Gathering(request, self._policy))
        self.pending[-1].reports_failures = self._reports_failures
        self.look()

    @property
    def crew(self) -> Any:
        """Itself: the nodes are the workers."""
        return self

    def look(self, longest_s: float = 0.0) -> None:
        """Handle arriving answers, look for actors that are back, and send ranges.

        Args:
            longest_s: Maximum wait for an answer.
        """
        if self.fatal is None and not self._ray.is_initialized():
            self.fatal = WorkerDiedError("Ray was shut down, and all nodes with it", exitcode=None)
        if self.fatal is None:
            self._wait(longest_s)
            self._ask_who_is_back()
            self._send()

    def wait_until(self, is_over: Callable[[], bool], until_s: float) -> None:
        """Handle answers until a condition holds, or until a time of ``time.monotonic``."""
        while not is_over() and (left_s := until_s - time.monotonic()) > 0.0:
            self.look(min(left_s, _RETRY_S))

    @property
    def failure(self) -> RlpoolError | None:
        """The error that prevents the oldest request from completing, if any."""
        if not self.pending:  # closed meanwhile
            return self.fatal
        oldest = self.pending[0]
        return oldest.error or self.fatal if oldest.n_left else None

    def is_done(self) -> bool:
        """Whether the oldest request is complete or has failed."""
        return not self.pending or not self.pending[0].n_left or self.failure is not None

    def hand_out(self) -> tuple[TemporalDictTensor, dict[int, Any]]:
        """Remove the oldest request; returns its result, and failures of its episodes by row.

        Raises:
            RlpoolError: If it failed.
        """
        failure, oldest = self.failure, self.pending.popleft() if self.pending else None
        if oldest is None or failure is not None:
            raise failure or UsageError("it was cancelled")
        return oldest.result(), oldest.failures

    def finished(self) -> tuple[int, int]:
        """Return finished and requested rows of the oldest request."""
        n_rows, n_left = next(((each.n_rows, each.n_left) for each in self.pending), (0, 0))
        return n_rows - n_left, n_rows

    def refuse_if_dead(self) -> None:
        """Raise ``fatal`` if it is set."""
        if self.fatal is not None:
            raise self.fatal

    def read_stats(self) -> Any:
        """Refuse the call."""
        raise UsageError("workers may be on other machines", fix="python -m rlpool top on a node")

    fileno = read_stats

    def drop_pending(self) -> None:
        """Drop all requests; actors still finish the ranges that were sent."""
        self.pending.clear()

    def close(self, at_once: bool = False) -> None:
        """End the actors and their workers, and free the processors. Can be repeated.

        Args:
            at_once: Whether to skip waiting for idle actors to close their environments.
        """
        self.is_closed, self.fatal = True, UsageError("the batcher was closed meanwhile")
        self.pending.clear()
        if not self._ray.is_initialized():
            return
        with suppress(self._ray.exceptions.RayError):  # an actor has died
            free = [actor for actor in self._actors if actor.is_up and not actor.calls]
            calls = [actor.handle.close.remote() for actor in free if not at_once]
            if calls:
                self._ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_S)
        while self._actors:
            self._ray.kill(self._actors.pop().handle)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._group = None


@dataclass(eq=False)
class _Actor:
    """The caller's record of a Ray actor.

    Attributes:
        handle: Ray's handle.
        calls: Ray's reference to the ranges that were sent, none for ``start``. The answer is that
            of the first; the second is begun, and sent again.
        unsent: Ranges of its next call.
        is_up: Whether its workers are ready, as far as known.
    """

    handle: Any
    calls: dict[Any, list[_Range]] = field(default_factory=dict)
    unsent: list[_Range] = field(default_factory=list)
    is_up: bool = False


class _Gathering(EpisodeRequest):
    """A request that runs in ranges.

    Args:
        request: The request.
        published: Its policy.

    Attributes:
        left: Ranges of rows that were not sent to an actor.
        n_left: Number of rows that have not arrived yet.
    """

    def __init__(self, request: EpisodeRequest, published: _Policy) -> None:
        super().__init__(request.asked, request.infos, request.policy)
        self.left, self.n_left = [range(self.n_rows)], self.n_rows
        self._published, self._born_ns, self._n_losses = published, time.monotonic_ns(), 0
        self._parts: dict[int, tuple[StepSpecs, Unpadded]] = {}

    def next_rows(self, n_actors: int, n_lanes: int, n_slots: int) -> range:
        """Take rows, fewer towards the end, so that the last actors finish at about the same time.

        Args:
            n_actors: Actors that run requests.
            n_lanes: Rows that keep one busy: fewer cost more than they gain, unless others idle.
            n_slots: Slots for a range: more rows would have to be copied twice.
        """
        n_unsent, rows = sum(map(len, self.left)), self.left.pop(0)
        shares = [-(-n // (_MOST_RANGES * n_actors)) for n in (self.n_rows, n_unsent)]
        least = min(n_lanes, -(-self.n_rows // n_actors))
        size = max(least, min(max(min(4 * n_lanes, shares[0]), shares[1]), max(1, n_slots)))
        if len(rows) > size:
            self.left.insert(0, rows[size:])
        return rows[:size]

    def message(self, rows: range) -> tuple[Any, ...]:
        """Return the arguments of ``NodeActor._begin``."""
        asked, first = self.asked, self.asked.first + rows.start
        request = len(rows), *part_of(self.infos, rows)
        seeds = asked.given_seeds and asked.given_seeds[rows.start : rows.stop]
        return (self._born_ns, rows), first, asked.root, self._published, request, seeds

    def lose(self, rows: range, why: str) -> None:
        """Schedule rows to run again."""
        self._n_losses += 1
        if self.error is None:
            self.left.insert(0, rows)
        if self._n_losses > _MOST_LOSSES:
            message = f"{self._n_losses} ranges of this request were lost with their nodes"
            self.on_answer(rows, WorkerDiedError(message, exitcode=None, traceback_text=why))

    def on_answer(self, rows: range, answer: _Rows | RlpoolError) -> None:
        """Store rows that have arrived, as copies because Ray's store is small."""
        if isinstance(answer, RlpoolError):
            self.error = self.error or answer
            self.left.clear()
        elif self.error is None:
            step, episodes, failures = answer
            self._parts[rows.start] = step, episodes.copy()
            self.failures.update(failures)
            self.n_left -= len(rows)

    def result(self) -> TemporalDictTensor:
        """Return the rows of the complete request: views of one block.

        Raises:
            SpecError: If two nodes have different keys, shapes or dtypes.
        """
        steps, parts = zip(*(part for _, part in sorted(self._parts.items())), strict=True)
        if any(step != steps[0] for step in steps):
            raise SpecError("environments or agents of two nodes have different keys")
        rows = Unpadded.joined(parts)
        layout = Layout(steps[0], self.n_rows, int(rows.lengths.max()), 1)
        return trajectories_of(layout, rows.lengths, lambda: rows, self.info(layout))


class NodeActor:
    """An ``EpisodeBatcher`` in a process that Ray starts, and restarts if it dies.

    Args:
        setup: The keyword arguments of the batcher, pickled.
        path: The caller's ``sys.path``, so that modules are found as on the caller's machine.
        settings: The caller's torch settings.
    """

    def __init__(self, setup: bytes, path: Sequence[str], settings: Settings) -> None:
        use_settings(settings)
        sys.path += [each for each in path if each not in sys.path and os.path.exists(each)]
        self._setup = setup
        self._batcher: Any = None
        self._version = 0  # of the agents' policy; -1 if unknown
        self._begun: list[Any] = []  # keys of ranges

    def call(self, name: str, ranges: list[Any]) -> Any:
        """Call a method; returns its result or error, since Ray's own errors concern the node.

        Args:
            name: ``"start"`` or ``"run"``.
            ranges: Arguments of the method.
        """
        try:
            return getattr(self, name)(*ranges)
        except RlpoolError as error:
            if self._batcher is not None and self._batcher._not_closed().crew.fatal is not None:
                self.close()  # the workers are unusable
            return _placed(error, ranges[0][1] - ranges[0][0][1].start if ranges else 0)

    def start(self) -> Any:
        """Start the workers; returns the number of lanes, and the environments' description."""
        if self._batcher is None:
            self._batcher = EpisodeBatcher(**pickle.loads(self._setup))
        return self._batcher.n_lanes, self._batcher.environment

    def run(self, *ranges: Any) -> _Rows:
        """Run a range of consecutive episodes, and begin the next so that no lane waits.

        Args:
            *ranges: Arguments of ``_begin``. The second range is completed by the next call.
        """
        if self._begun != [ranges[0][0]] or not self._batcher.n_pending:
            if self._begun:  # no longer wanted, or interrupted
                self.close()
            self._begin(*ranges[0])
        for following in ranges[1:]:
            if following[3][1] or not self._version:  # needs no new agents
                # The next call raises its error again.
                with suppress(RlpoolError, import_extra("ray", "ray").exceptions.RayError):
                    self._begin(*following)
        del self._begun[0]
        trajectories, first = self._batcher.get(), ranges[0][1] - ranges[0][0][1].start
        step = self._batcher._not_closed()._blocks.layout.step
        failures = [_placed(each, first) for each in self._batcher.failures]
        return step, Unpadded.of(trajectories._tensors.part), {e.where.row: e for e in failures}

    def _begin(
        self, key: Any, first: int, root: int, policy: _Policy, request: Sequence[Any], seeds: Any
    ) -> None:
        """Make the workers run consecutive episodes.

        Args:
            key: Number of the request, and its rows.
            first: Number of the first episode in the batcher's life.
            root: Root of all seeds.
            policy: The policy.
            request: The arguments of ``execute`` by position.
            seeds: Its ``episode_seeds``.
        """
        version, reference = policy
        if self._version and not reference:  # only new agents have their initial parameters
            self.close()
        self.start()
        if reference and version != self._version:
            self._version = -1
            self._batcher.update(import_extra("ray", "ray").get(reference[0]))
            self._version = version
        self._batcher._root = root
        self._batcher._go_to(first)
        self._batcher.execute(*request, episode_seeds=seeds)
        self._begun.append(key)

    def close(self) -> None:
        """End the workers."""
        batcher, self._batcher, self._version, self._begun = self._batcher, None, 0, []
        if batcher is not None:
            batcher.close()


def _placed(error: Any, first: int) -> Any:
    """Add the node and the row of the whole request to the ``where`` of an error."""
    if (where := getattr(error, "where", None)) is None:
        return error
    node = import_extra("ray.util", "ray").get_node_ip_address()
    row = None if where.episode is None else where.episode - first
    return error.reworded(where=where._replace(node=node, row=row))


# Contents of a step, episodes, and the failures of truncated ones by row of the whole request.
_Rows = tuple[StepSpecs, Unpadded, dict[int, Any]]

# A request and some of its rows.
_Range = tuple[_Gathering, range]

# Version, and Ray's reference to the object of the update; none before the first update. It is in a
# list, because Ray would fetch an argument of a call for every range.
_Policy = tuple[int, list[Any] | None]
