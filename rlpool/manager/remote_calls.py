"""Requests of remotes: which wait for a reply, and what has to be known if they are sent again."""

from __future__ import annotations

from rlpool.manager.env_messages import Call, Reply
from rlpool.manager.episode_log import EpisodeLog
from rlpool.memory.storage import Array

_UNREPEATABLE = "there, an earlier request of its remote failed"


class RemoteCalls:
    """Bookkeeping of the requests of all remotes.

    Args:
        log: Where steps and resets are written down, if they are.

    Attributes:
        waiting: Request of each lane that has one whose reply was not received by the user.
        replies: Those replies that are there, pickled.
        seeds: Per lane the seed that was given last, ``None`` if none was, and the number of
            resets since that brought none.
    """

    def __init__(self, log: EpisodeLog | None) -> None:
        self._log = log
        self.waiting: dict[int, Call] = {}
        self.replies: dict[int, bytes] = {}
        self.seeds: dict[int, tuple[int | None, int]] = {}

    def take(self, lane: int, reply: Reply, seed_of: Array) -> None:
        """Take a reply.

        Args:
            lane: Of all lanes.
            reply: What the worker says.
            seed_of: Per lane the seed of the last reset.
        """
        self.replies[lane] = reply.reply
        call = self.waiting[lane]
        is_tried = reply.is_done or reply.error is not None
        if call.command == "seed" and reply.is_done:
            self.seeds[lane] = (call.data, 0)
        elif call.command == "reset" and is_tried and call.data[0] is None:
            given, n_used = self.seeds.get(lane, (None, 0))
            self.seeds[lane] = (given, n_used + 1)
        log = self._log
        if log is None or call.command not in ("reset", "step") or not is_tried:
            return
        if reply.error is not None:
            log.lose(lane, _UNREPEATABLE)
        elif call.command == "step":
            log.note_remote_step(lane, call.data)
        else:
            log.note_reset(lane, int(seed_of[lane]), call.data[1])

    def unanswered(self) -> list[int]:
        """Lanes whose requests have no reply yet."""
        return [lane for lane in self.waiting if lane not in self.replies]
