"""Tells the successor of a worker with environments all that its predecessor knew."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rlpool.manager.arena import Arena
from rlpool.manager.env_messages import (
    Announce,
    MapActions,
    MapArena,
    MapObservations,
    Predecessor,
    Reset,
    Restore,
)
from rlpool.manager.episode_log import Actions, EpisodeLog, Reached, without_last
from rlpool.manager.remote_calls import RemoteCalls
from rlpool.memory.storage import Memory
from rlpool.workers.parcel import pack
from rlpool.workers.supervisor import Supervisor

MapMessage = MapArena | MapObservations | MapActions


class Successors:
    """What workers were told, for those that take their places.

    Args:
        supervisor: The processes.
        lanes_of: For each worker its lanes.
        log: What lanes were asked for, ``None`` if it was not written down.
        calls: Requests of remotes.

    Attributes:
        resets: The last order to reset lanes of each worker.
        announced: The last announcement to each worker.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        lanes_of: list[range],
        log: EpisodeLog | None,
        calls: RemoteCalls,
    ) -> None:
        self._supervisor = supervisor
        self._lanes_of = lanes_of
        self._log = log
        self._calls = calls
        self._memories: list[tuple[MapMessage, Memory]] = []
        self.resets: dict[int, Reset] = {}
        self.announced: dict[int, Announce] = {}

    def keep(self, message: MapMessage, memory: Memory) -> None:
        """Keep memory that all workers map, in place of that of the same kind."""
        for other, old in self._memories:
            if type(other) is type(message):
                old.close_fd()
        self._memories = [each for each in self._memories if type(each[0]) is not type(message)]
        self._memories.append((message, memory))

    def close(self) -> None:
        """Give the descriptors of that memory back."""
        for _, memory in self._memories:
            memory.close_fd()

    def forget_ahead(self, worker: int, arena: Arena) -> None:
        """Forget the episodes that a worker has begun on its own: its successor has not."""
        for lane in self._lanes_of[worker]:
            if arena.is_ahead[lane] >= 0:
                arena.is_ahead[lane] = -1
                if self._log is not None:
                    self._log.forget(lane)

    def bring_up(
        self, worker: int, arena: Arena, issued: int, closed: Collection[int], *, counts: bool
    ) -> int:
        """Tell a successor, which has its environments, all that its predecessor knew.

        Args:
            worker: Its number.
            arena: The arena.
            issued: Number of the predecessor's last order.
            closed: Lanes that were closed.
            counts: Whether episodes that are repeated count as begun.

        Returns:
            How many episodes it has begun then.
        """
        send = self._supervisor.send
        for message, memory in self._memories:
            if isinstance(message, MapArena):
                message = replace(message, n_seen=arena.order[worker], is_successor=True)
            send(worker, message, memory)
        if worker in self.announced:
            send(worker, self.announced[worker])
        reset = None
        is_busy = issued != arena.finished[worker]
        if is_busy and arena.order[worker] != issued:
            reset = self.resets[worker]
        step = issued if is_busy and reset is None else 0
        predecessor = self._predecessor(worker, arena, step, reset, closed, counts)
        parcel, memory = pack(predecessor, Memory.shared)
        send(worker, Restore(parcel), memory)
        memory.close_fd()
        n_begun = predecessor.n_begun
        if reset is not None:
            send(worker, reset)
            n_begun += len(reset.lanes)
        for lane in self._calls.unanswered():
            if lane in self._lanes_of[worker]:
                call = self._calls.waiting[lane]
                send(worker, call)
                n_begun += call.command == "reset"
        return n_begun

    def _predecessor(
        self,
        worker: int,
        arena: Arena,
        step: int,
        reset: Reset | None,
        closed: Collection[int],
        counts: bool,
    ) -> Predecessor:
        own, calls = self._lanes_of[worker], self._calls
        reached: dict[int, Reached] = {}
        actions: dict[int, Actions] = {}
        for number, lane in enumerate(own):
            is_asked = bool(step) and (not arena.partial[worker] or bool(arena.asked[lane]))
            record = None if self._log is None else self._log.reached(lane)
            if record is None and is_asked:
                record = Reached(0, None, why_lost="it had not been reset")
            if record is None or lane in closed or self._will_be_reset(lane, number, reset):
                continue
            if is_asked:
                record, actions[number] = without_last(record)
            reached[number] = record
        return Predecessor(
            reached,
            step,
            actions,
            {lane - own.start: calls.seeds[lane] for lane in own if lane in calls.seeds},
            [lane - own.start for lane in own if lane in closed],
            len(reached) if counts else 0,
        )

    def _will_be_reset(self, lane: int, number: int, reset: Reset | None) -> bool:
        """Whether the first thing that a lane will be asked for is a reset."""
        if reset is not None and number in reset.lanes:
            return True
        call = self._calls.waiting.get(lane)
        return call is not None and call.command == "reset" and lane not in self._calls.replies
