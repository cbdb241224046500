"""Nodes of a Ray cluster: one actor on each, results through Ray's object store.

A process that ends is started again, on its node or on another one that has room, while the caller
is inside rlpool, and knows nothing of what the one before was sent. The caller owns every object:
it goes when the caller has copied it, or is gone itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlpool.cluster.node_logs import NodeLogs
from rlpool.cluster.ray_actor import Actor, first_line, is_gone, not_created
from rlpool.cluster.shards import NodeSetup, Outcome, Published, Shard
from rlpool.cluster.transport import (
    Arrivals,
    Event,
    Finished,
    Joined,
    Left,
    Looked,
    Refused,
)
from rlpool.errors import (
    RlpoolError,
    WorkerDiedError,
    WorkerError,
)
from rlpool.machine.imports import imports_of
from rlpool.machine.interrupts import InterruptsHeld
from rlpool.observe.stats import Stats
from rlpool.workers.logs import current_levels

with imports_of("ray"):
    import ray
    from ray.exceptions import (
        ActorDiedError,
        OutOfMemoryError,
        RayActorError,
        RayError,
        RayTaskError,
        RuntimeEnvSetupError,
    )
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )

from rlpool.cluster.node_actor import make_actor
from rlpool.cluster.ray_reservation import Reservation, all_nodes

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
        self._reservation = Reservation(n_nodes, bundle, labels)
        self._takes_more = n_nodes is None
        self._bundle = dict(bundle)
        self._actors: dict[int, Actor] = {}
        self._calls: dict[Any, tuple[str, int, int]] = {}  # reference: call, node, shard
        self._events: deque[Event] = deque()
        self._arrivals: Arrivals | None = None  # made when somebody waits for its descriptor
        self._logs = NodeLogs()
        self.deliver_logs = self._logs.deliver
        self._next_look_s = 0.0
        self._n_made = 0
        self._setup_ref: Any = None
        self.n_expected = 0
        self.store_bytes: int | None = None

    # Nodes --------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """See ``Transport``.

        Raises:
            SpecError: See ``Reservation.reserve``.
        """
        self.n_expected = self._reservation.reserve()
        nodes = self._reservation.nodes()
        stores = [node["Resources"].get("object_store_memory", 0.0) for node in nodes]
        self.store_bytes = int(min(filter(None, stores), default=0)) or None

    def start(self, setup: NodeSetup) -> None:
        """See ``Transport``."""
        self._setup_ref = ray.put(setup)
        for bundle in range(self.n_expected):
            group = self._reservation.group
            self._make(PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle))

    def _make(self, strategy: Any, home: str = "") -> None:
        """Make an actor; it says when it is ready."""
        number, self._n_made = self._n_made, self._n_made + 1
        handle = make_actor(number, self._setup_ref, self._bundle, strategy)
        self._actors[number] = Actor(handle, strategy, home)
        self._call("begin", number)

    def restart(self, node: int) -> None:
        """See ``Transport``."""
        actor = self._actors[node]
        self._drop_calls(node)
        with suppress(RayError):
            ray.kill(actor.handle)
        actor.handle = make_actor(node, self._setup_ref, self._bundle, actor.strategy)
        actor.is_up = actor.is_asked = False
        actor.retry_s = time.monotonic() + _RETRY_S

    def _look_for_nodes(self) -> None:
        """Use nodes that have joined, and forget those for which an actor waits in vain."""
        now_s = time.monotonic()
        for number, actor in self._actors.items():
            if actor.retry_s is not None and now_s >= actor.retry_s:
                actor.retry_s = None
                self._call("begin", number)
        if not self._takes_more or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_FOR_NODES_S
        there = {node["NodeID"] for node in self._reservation.nodes()}
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
            if self._arrivals is not None:
                reference.future().add_done_callback(self._arrivals.tell)

    def send(self, node: int, shard: Shard) -> None:
        """See ``Transport``."""
        if node in self._actors:
            self._call("outcome_of", node, shard.request.number, shard)

    def look(self, node: int) -> None:
        """See ``Transport``."""
        actor = self._actors.get(node)
        if actor is not None and not actor.is_asked:
            actor.is_asked = True
            self._call("look_and_listen", node, 0, current_levels())

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
            ray.kill(self._actors[node].handle)

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

    def fileno(self) -> int:
        """See ``Transport``; a thread of Ray's makes it readable."""
        if self._arrivals is None:
            self._arrivals = Arrivals()
            for reference in self._calls:
                reference.future().add_done_callback(self._arrivals.tell)
        return self._arrivals.fileno()

    def wait(self, timeout_s: float) -> None:
        """See ``Transport``."""
        self._refuse_other_ray()
        if self._arrivals is not None:
            self._arrivals.clear()
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
        if method == "look_and_listen":
            actor.is_asked = False
        try:
            value = ray.get(reference, timeout=_FETCH_S)
        except RayTaskError as error:
            self._note_raised(error, method, number, shard)
        except (RayActorError, OutOfMemoryError, RuntimeEnvSetupError) as error:
            self._leave(number, error)
        except RayError as error:  # an object is lost
            if method == "outcome_of":
                self._events.append(Finished(number, shard, _lost(error)))
            elif method == "begin":
                self._leave(number, error)
        else:
            if method == "outcome_of":
                self._events.append(Finished(number, shard, value))
            elif method == "begin":
                report, actor.node_id = value
                actor.name, actor.is_up = report.name, True
                self._events.append(Joined(number, report))
            else:
                look, said = value
                self._logs.hear(actor.name, said)
                self._events.append(Looked(number, look))

    def _note_raised(self, error: RayTaskError, method: str, number: int, shard: int) -> None:
        """A method of an actor has raised."""
        cause = error.cause
        if method == "outcome_of" and isinstance(cause, RayError | MemoryError):
            self._events.append(Finished(number, shard, _lost(cause)))
            return
        if not isinstance(cause, RlpoolError):
            cause = WorkerError(f"a node failed: {first_line(cause)}", traceback_text=str(error))
        if method == "outcome_of":
            self._events.append(Finished(number, shard, Outcome(None, cause, is_fatal=True)))
        else:
            self._events.append(Refused(number, cause))

    def _leave(self, number: int, error: Exception) -> None:
        """An actor is gone, or cannot be reached for a while."""
        actor = self._actors[number]
        was_up, actor.is_up, actor.is_asked = actor.is_up, False, False
        self._drop_calls(number)
        if isinstance(error, RuntimeEnvSetupError) or getattr(error, "actor_init_failed", False):
            self._events.append(Refused(number, not_created(error)))
            return
        actor.retry_s = time.monotonic() + _RETRY_S
        has_died = isinstance(error, ActorDiedError | OutOfMemoryError)
        if not (was_up or has_died):
            return
        failure = is_gone(actor, error, was_up=was_up)
        home = actor.node_id or actor.home
        is_there = not home or home in {node["NodeID"] for node in all_nodes()}
        self._events.append(Left(number, failure, is_machine=not (has_died and is_there)))
        if has_died:
            self.restart(number)

    # The rest -----------------------------------------------------------------------------------

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

    def _ask(self, method: str, patience_s: float = _ANSWER_S) -> dict[int, Any]:
        """What the actors answer, in order; why they do not, as text."""
        asked: dict[Any, int] = {}
        for number in [n for n, actor in self._actors.items() if actor.is_up]:
            with suppress(RayError):  # it has died
                asked[getattr(self._actors[number].handle, method).remote()] = number
        if not asked:
            return {}
        answers: dict[int, Any] = dict.fromkeys(asked.values(), "does not answer\n")
        for reference in ray.wait(list(asked), num_returns=len(asked), timeout=patience_s)[0]:
            try:
                answers[asked[reference]] = ray.get(reference)
            except RayError as error:
                answers[asked[reference]] = f"does not answer ({type(error).__name__})\n"
        return answers

    def close(self) -> None:
        """See ``Transport``."""
        if self._arrivals is not None:
            self._arrivals.close()
        if not self._is_connected:
            return  # everything has ended with it
        try:
            for number, said in self._ask("end", _CLOSE_S).items():
                if not isinstance(said, str):
                    self._logs.hear(self._actors[number].name, said)
        finally:
            with InterruptsHeld():
                for actor in self._actors.values():
                    with suppress(RayError):
                        ray.kill(actor.handle)
                self._reservation.release()
                self._actors.clear()
                self._calls.clear()
        self.deliver_logs()


def _lost(error: BaseException) -> Outcome:
    """The outcome that an object of Ray's did not bring."""
    return Outcome(error=WorkerError(f"a result is lost ({first_line(error)})"), is_lost=True)
