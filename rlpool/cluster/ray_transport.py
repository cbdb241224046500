"""Nodes of a Ray cluster: one actor on each, results through Ray's object store.

A process that ends is started again, by Ray or here, on its node or on another one that has room,
and knows nothing of what the one before was sent. The caller owns every object: it goes when the
caller has copied it, or is gone itself.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlpool.cluster.shards import NodeSetup, Outcome, Published, Shard
from rlpool.cluster.transport import Died, Event, Finished, Joined, Left, Looked, Lost, Refused
from rlpool.errors import (
    RlpoolError,
    SpecError,
    Where,
    WorkerDiedError,
    WorkerError,
    WorkerStartupError,
)
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.observe.stats import Stats
from rlpool.workers.logs import current_levels, decode

try:
    import ray
    from ray._private.state import actors as table_of_actors
    from ray._private.state import available_resources_per_node
    from ray.exceptions import (
        ActorDiedError,
        OutOfMemoryError,
        RayActorError,
        RayError,
        RayTaskError,
        RuntimeEnvSetupError,
    )
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as error:
    raise ImportError(
        'rlpool.cluster needs Ray, which is not installed\n  fix:   pip install "rlpool[ray]"'
    ) from error

from rlpool.cluster.node_actor import N_CALLS, NodeActor, NotBegunError, Said

_LOG = logging.getLogger("rlpool")

_ROOM_S = 30.0
"""How long to wait for nodes with enough free processors."""

_ROOM_HINT_S = 5.0
"""After this it is logged what is waited for."""

_FEWER_S = 3.0
"""How long to wait for all nodes that there are before doing with fewer."""

_LOOK_FOR_NODES_S = 2.0
"""How often to look for nodes that have joined."""

_FETCH_S = 60.0
"""How long to wait for a result that was there a moment ago."""

_RETRY_S = 0.2
"""How often to ask whether an actor is there again."""

_CLOSE_S = 3.0
"""How long actors may take to close their environments."""

_ANSWER_S = 4.0
"""How long all actors together may take to say what their workers are doing."""


@dataclass(eq=False)
class _Actor:
    """An actor, whether or not it is there at the moment.

    Attributes:
        handle: Ray's.
        name: What errors call its node; empty before it has joined.
        home: Id of the node that it was made for; empty if Ray chooses one.
        strategy: Where Ray may run it.
        node_id: Id of the node that it was last seen on.
        n_deaths: How often its process has died, as far as Ray was asked.
        is_up: Whether it has joined and not left.
        retry_s: When to ask next whether it is there, if nobody has been asked.
        is_asked: Whether ``look`` was not answered yet.
    """

    handle: Any
    strategy: Any
    home: str = ""
    name: str = ""
    node_id: str = ""
    n_deaths: int = 0
    is_up: bool = False
    retry_s: float | None = None
    is_asked: bool = False


class RayTransport:
    """A ``Transport`` over a Ray cluster.

    Args:
        n_nodes: How many nodes to use, ``None`` for all that there are, also later.
        bundle: What each node reserves, by Ray's names: processors and other resources.
        labels: What the labels of a node have to be, as Ray's label selectors say it.
    """

    def __init__(
        self, n_nodes: int | None, bundle: Mapping[str, float], labels: Mapping[str, str]
    ) -> None:
        if not ray.is_initialized():
            ray.init()
        self._worker_id: str = ray.get_runtime_context().get_worker_id()
        self._n_nodes = n_nodes
        self._bundle = dict(bundle)
        self._labels = dict(labels)
        self._actors: dict[int, _Actor] = {}
        self._calls: dict[Any, tuple[str, int, int]] = {}  # reference: call, node, shard
        self._events: deque[Event] = deque()
        self._records: deque[logging.LogRecord] = deque()
        self._n_dropped = 0
        self._next_look_s = 0.0
        self._n_made = 0
        self._setup_ref: Any = None
        self._group: Any = None
        self.n_expected = 0
        self.store_bytes: int | None = None

    # Nodes --------------------------------------------------------------------------------------

    def _nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive and have enough of everything, used or not."""
        return [
            node
            for node in _all_nodes()
            if self._is_enough(node["Resources"])
            and all(_has_label(node["Labels"].get(key), self._labels[key]) for key in self._labels)
        ]

    def _is_enough(self, resources: Mapping[str, float]) -> bool:
        return all(resources.get(name, 0) >= amount for name, amount in self._bundle.items())

    def reserve(self) -> None:
        """See ``Transport``.

        Raises:
            SpecError: If the cluster does not have so many nodes with so many free processors.
        """
        self.n_expected = len(self._reserved(self._n_nodes).bundle_specs)
        stores = [node["Resources"].get("object_store_memory", 0.0) for node in self._nodes()]
        self.store_bytes = int(min(filter(None, stores), default=0)) or None

    def _reserved(self, n_nodes: int | None) -> Any:
        """A placement group, each bundle on a node of its own."""
        if n_nodes is not None:
            # Processors that are in use may become free; nodes that are not there seldom appear.
            patience_s = _ROOM_S if len(self._nodes()) >= n_nodes else _FEWER_S
            group = self._group_of(n_nodes, patience_s)
        else:
            group, n = None, len(self._nodes())
            while n and group is None:
                group = self._group_of(n, _FEWER_S if n > 1 else _ROOM_S)
                n = min(n - 1, max(1, self._n_free())) if n > 1 else 0
            if group is not None and len(group.bundle_specs) < len(self._nodes()):
                n_used, n_there = len(group.bundle_specs), len(self._nodes())
                _LOG.warning("%d of %d nodes have no free processors", n_there - n_used, n_there)
        if group is not None:
            return group
        n_cpus, *others = (f"{amount:g} {name}" for name, amount in self._bundle.items())
        n_cpus = n_cpus.replace("CPU", "free processors")
        others += [f"{key}={value}" for key, value in self._labels.items()]
        sizes = []
        for node in _all_nodes():
            found = (f"{node['Resources'].get(name, 0):g}" for name in self._bundle)
            labels = (f"{key}={node['Labels'].get(key)}" for key in self._labels)
            sizes.append(f"{node['NodeManagerAddress']} has {', '.join([*found, *labels])}")
        wanted = "a node" if n_nodes in (None, 1) else f"{n_nodes} nodes"
        raise SpecError(
            f"the cluster has no {', '.join([n_cpus, *others])} on {wanted} "
            f"(in all, used ones included: {', '.join(sizes)})",
            fix="lower n_nodes, n_threads or resources, end what uses them, or start more nodes "
            "(ray start --address=..., or ray.autoscaler.sdk.request_resources and wait for them)",
        )

    def _n_free(self) -> int:
        """How many nodes have enough of everything that nobody uses."""
        list_free: Any = available_resources_per_node  # without annotations
        free = list_free()
        return sum(self._is_enough(free.get(node["NodeID"], {})) for node in self._nodes())

    def _group_of(self, n_nodes: int, patience_s: float) -> Any:
        """A placement group, ``None`` if there is no room for it."""
        with InterruptsHeld():
            group = self._group = placement_group(
                [self._bundle] * n_nodes,
                strategy="STRICT_SPREAD",
                bundle_label_selector=[self._labels] * n_nodes,
            )
        if group.wait(min(patience_s, _ROOM_HINT_S)):
            return group
        if patience_s > _ROOM_HINT_S:
            _LOG.warning("waiting for %d nodes with %s free on each", n_nodes, self._bundle)
            if group.wait(patience_s - _ROOM_HINT_S):
                return group
        with InterruptsHeld():
            self._release()
        return None

    def _release(self) -> None:
        """Give back what is reserved."""
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)
            self._group = None

    def start(self, setup: NodeSetup) -> None:
        """See ``Transport``."""
        self._setup_ref = ray.put(setup)
        self._restarts = setup.policy.restarts_workers
        for bundle in range(self.n_expected):
            self._make(
                PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            )

    def _make(self, strategy: Any, home: str = "") -> None:
        """Make an actor; it says when it is ready."""
        number, self._n_made = self._n_made, self._n_made + 1
        handle = self._handle(number, strategy, -1 if self._restarts else 0)
        self._actors[number] = _Actor(handle, strategy, home)
        self._begin(number)

    def _renew(self, number: int) -> None:
        """Make another actor in the place of one that is of no use."""
        actor = self._actors[number]
        self._drop_calls(number)
        with suppress(RayError):
            ray.kill(actor.handle)
        # Of one that it restarts, Ray does not say why it died, and it may die again.
        actor.handle = self._handle(number, actor.strategy, 0)
        actor.is_up, actor.is_asked, actor.n_deaths = False, False, 0
        actor.retry_s = time.monotonic() + _RETRY_S

    def _handle(self, number: int, strategy: Any, max_restarts: int) -> Any:
        others = dict(self._bundle)
        options = {
            "num_cpus": others.pop("CPU"),
            "num_gpus": others.pop("GPU", 0),
            "memory": others.pop("memory", None),
            "resources": others,
            "max_restarts": max_restarts,
            "max_task_retries": 0,
            "max_concurrency": N_CALLS,
            "scheduling_strategy": strategy,
        }
        return ray.remote(NodeActor).options(**options).remote(number)

    def _begin(self, number: int) -> None:
        """Let an actor start its workers; one that was started again remembers nothing."""
        self._call("begin", number, 0, self._setup_ref, sys.path, current_levels())

    def _look_for_nodes(self) -> None:
        """Use nodes that have joined, and forget those for which an actor waits in vain."""
        now_s = time.monotonic()
        for number, actor in self._actors.items():
            if actor.retry_s is not None and now_s >= actor.retry_s:
                actor.retry_s = None
                self._begin(number)
        if self._n_nodes is not None or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_FOR_NODES_S
        there = {node["NodeID"] for node in self._nodes()}
        for number, actor in list(self._actors.items()):
            if actor.home and actor.home not in there and not actor.is_up:
                self._forget(number)
        used = {actor.node_id for actor in self._actors.values() if actor.is_up}
        used |= {actor.home for actor in self._actors.values()}
        free = sorted(there - used)
        for node_id in free[: max(0, len(there) - len(self._actors))]:
            self._make(NodeAffinitySchedulingStrategy(node_id, soft=False), node_id)

    def _forget(self, number: int) -> None:
        """Give up an actor for good."""
        ray.kill(self._actors.pop(number).handle)
        self._drop_calls(number)

    def _drop_calls(self, number: int) -> None:
        self._calls = {ref: call for ref, call in self._calls.items() if call[1] != number}

    # Talking to them ----------------------------------------------------------------------------

    def _call(self, method: str, number: int, shard: int = 0, *arguments: Any) -> None:
        self._refuse_other_ray()
        handle = self._actors[number].handle
        try:
            reference = getattr(handle, method).remote(*arguments)
        except RayActorError as error:
            self._leave(number, error)
        else:
            self._calls[reference] = method, number, shard

    def send(self, node: int, shard: Shard) -> None:
        """See ``Transport``."""
        if node in self._actors:
            self._call("run", node, shard.number, shard)

    def look(self, node: int) -> None:
        """See ``Transport``."""
        actor = self._actors.get(node)
        if actor is not None and not actor.is_asked:
            actor.is_asked = True
            self._call("look", node, 0, current_levels())

    def cancel(self, node: int, numbers: Sequence[int]) -> None:
        """See ``Transport``."""
        if node in self._actors:
            with suppress(RayError):
                self._actors[node].handle.cancel.remote(list(numbers))

    def publish(self, published: Published) -> Any:
        """See ``Transport``."""
        return ray.put(published)

    def end(self, node: int) -> None:
        """See ``Transport``."""
        if node in self._actors:
            ray.kill(self._actors[node].handle, no_restart=not self._restarts)

    @property
    def _is_connected(self) -> bool:
        """Whether Ray is still the one that was there at the beginning."""
        if not ray.is_initialized():
            return False
        worker_id: str = ray.get_runtime_context().get_worker_id()
        return worker_id == self._worker_id

    def _refuse_other_ray(self) -> None:
        if not self._is_connected:
            what = "Ray was shut down, and with it all nodes"
            raise WorkerDiedError(what, exitcode=None, fix="make a new batcher")

    def wait(self, timeout_s: float) -> None:
        """See ``Transport``."""
        self._refuse_other_ray()
        with InterruptsHeld():
            self._look_for_nodes()
        references = list(self._calls)
        if references and not self._events:
            ready, rest = ray.wait(references, num_returns=1, timeout=timeout_s)
            if ready and rest:
                ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
            with InterruptsHeld():
                for reference in ready:
                    call = self._calls.pop(reference, None)
                    if call is not None:
                        self._answer(reference, *call)
        elif not self._events:
            time.sleep(min(timeout_s, _RETRY_S))  # until an actor is asked again

    def next_event(self) -> Event | None:
        """See ``Transport``."""
        return self._events.popleft() if self._events else None

    def _answer(self, reference: Any, method: str, number: int, shard: int) -> None:
        """Turn an answer into an event."""
        actor = self._actors.get(number)
        if actor is None:
            return
        try:
            value = ray.get(reference, timeout=_FETCH_S)
        except RayTaskError as error:
            self._note_raised(error, method, number, shard)
            return
        except (RayActorError, OutOfMemoryError) as error:
            self._leave(number, error)
            return
        except RuntimeEnvSetupError as error:
            self._refuse(number, error)
            return
        except RayError as error:  # an object is lost
            if method == "run":
                self._events.append(Lost(number, shard, _first_line(error)))
            elif method == "begin":
                self._leave(number, error)
            actor.is_asked = actor.is_asked and method != "look"
            return
        if method == "run":
            self._events.append(Finished(number, shard, value))
        elif method == "look":
            actor.is_asked = False
            look, said = value
            self._hear(actor, said)
            self._events.append(Looked(number, look))
        elif method == "begin":
            self._count_deaths(number, WorkerError("its process died"))
            actor.name, (report, actor.node_id), actor.is_up = value[0].name, value, True
            self._events.append(Joined(number, report))

    def _note_raised(self, error: RayTaskError, method: str, number: int, shard: int) -> None:
        """A method of an actor has raised."""
        cause = error.cause
        if isinstance(cause, NotBegunError):
            self._leave(number, cause)
            return
        if method == "run" and isinstance(cause, RayError | MemoryError):
            self._events.append(Lost(number, shard, _first_line(cause)))
            return
        if not isinstance(cause, RlpoolError):
            cause = WorkerError(f"a node failed: {_first_line(cause)}", traceback_text=str(error))
        if method == "run":
            self._events.append(Finished(number, shard, Outcome(None, cause, is_fatal=True)))
        else:
            self._events.append(Refused(number, cause))

    def _leave(self, number: int, error: Exception) -> None:
        """An actor is gone, or a process that knows nothing is in its place."""
        actor = self._actors[number]
        was_up, actor.is_up, actor.is_asked = actor.is_up, False, False
        self._drop_calls(number)
        has_died = isinstance(error, ActorDiedError | OutOfMemoryError)
        cannot_start = has_died and not was_up and not self._restarts
        if getattr(error, "actor_init_failed", False) or cannot_start:
            self._refuse(number, error)
            return
        what = f"node {actor.name} is gone" if was_up else "the process of a node died in its start"
        failure = WorkerDiedError(
            f"{what} ({type(error).__name__})",
            exitcode=None,
            where=Where(node=actor.name or None),
            fix="look at the log of its machine (ray logs)",
            traceback_text=str(error),
        )
        if was_up:
            self._events.append(Left(number, failure))
        n_deaths = self._count_deaths(number, failure, has_died)
        if self._restarts and (has_died or (n_deaths and not was_up)):
            self._renew(number)
        actor.retry_s = time.monotonic() + _RETRY_S

    def _refuse(self, number: int, error: Exception) -> None:
        """Say that the process of an actor cannot be created."""
        what = f"a node's process could not be created ({_first_line(error)})"
        fix = "install rlpool and what it needs on every machine, or send it (runtime_env)"
        refused = WorkerStartupError(what, fix=fix, traceback_text=str(error))
        self._events.append(Refused(number, refused))

    def _count_deaths(self, number: int, failure: WorkerError, has_died: bool = False) -> int:
        """Tell how often the process of an actor has died since the last time; returns it.

        Args:
            number: Its number.
            failure: Why, as far as is known.
            has_died: Whether it did, and Ray does not restart it.
        """
        actor = self._actors[number]
        info: Any = table_of_actors(actor.handle._actor_id.hex())
        n_before, actor.n_deaths = actor.n_deaths, int(info.get("NumRestarts", 0)) + has_died
        n_deaths = actor.n_deaths - n_before
        home = actor.node_id or actor.home
        if not home or home in {node["NodeID"] for node in _all_nodes()}:  # not with its machine
            self._events.extend([Died(number, failure)] * n_deaths)
        return n_deaths

    # The rest -----------------------------------------------------------------------------------

    def restart(self, node: int) -> None:
        """See ``Transport``."""
        self._renew(node)

    def dismiss(self, node: int) -> None:
        """See ``Transport``."""
        self._drop_calls(node)
        actor = self._actors[node]
        actor.is_up, actor.retry_s = False, None  # its place is not given to another
        with suppress(RayError):
            ray.kill(actor.handle)

    def stacks(self) -> str:
        """See ``Transport``."""
        answers = self._ask("stacks")
        return "\n".join(f"node {self._actors[n].name}:\n{answers[n]}" for n in answers)

    def stats(self) -> dict[int, Stats]:
        """See ``Transport``."""
        return {n: answer for n, answer in self._ask("stats").items() if isinstance(answer, Stats)}

    def _ask(self, method: str) -> dict[int, Any]:
        """What the actors answer, in order; why they do not."""
        asked = {getattr(a.handle, method).remote(): n for n, a in self._actors.items() if a.is_up}
        if not asked:
            return {}
        ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
        answers = {asked[reference]: "does not answer\n" for reference in late}
        for reference in ready:
            try:
                answers[asked[reference]] = ray.get(reference)
            except RayError as error:
                answers[asked[reference]] = f"does not answer ({type(error).__name__})\n"
        return dict(sorted(answers.items()))

    def _hear(self, actor: _Actor, said: Said) -> None:
        """Take what an actor has logged."""
        lines, n_dropped = said
        for line in lines:
            record = decode(line)
            if record is not None:
                record.node = actor.name
                self._records.append(record)
        self._n_dropped += n_dropped

    def deliver_logs(self) -> None:
        """See ``Transport``."""
        while self._records:
            record = self._records.popleft()
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        if self._n_dropped:
            n_dropped, self._n_dropped = self._n_dropped, 0
            _LOG.warning("%d log records of nodes were dropped", n_dropped)

    def close(self) -> None:
        """See ``Transport``."""
        if not self._is_connected:
            return  # everything has ended with it
        try:
            last = {a.handle.close.remote(): a for a in self._actors.values() if a.is_up}
            ready = ray.wait(list(last), num_returns=len(last), timeout=_CLOSE_S)[0] if last else []
            for reference in ready:
                with suppress(RayError):
                    self._hear(last[reference], ray.get(reference))
        except RayError:
            pass  # of actors that have died
        finally:
            with InterruptsHeld():
                for actor in self._actors.values():
                    with suppress(RayError):
                        ray.kill(actor.handle)
                self._release()
                self._actors.clear()
                self._calls.clear()
        self.deliver_logs()


def _all_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that are alive."""
    list_nodes: Any = ray.nodes  # without annotations
    return [node for node in list_nodes() if node["Alive"]]


def _has_label(label: str | None, wanted: str) -> bool:
    """Whether Ray's selector, such as ``"a"``, ``"!a"`` or ``"in(a, b)"``, takes a label."""
    is_taken = not wanted.startswith("!")
    wanted = wanted.removeprefix("!")
    taken = wanted[3:-1].split(",") if wanted.startswith("in(") else [wanted]
    return (label in {each.strip() for each in taken}) == is_taken


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
