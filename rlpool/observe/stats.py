"""Statistics of the workers of a batcher or a manager."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rlpool.data.storage import NDArray
from rlpool.machine.platform import has_ended, resident_bytes
from rlpool.observe.control import (
    MAX_REQUESTS,
    MAX_SHOWN_LANES,
    Control,
    Head,
    State,
    Word,
)

_COUNTS = (Word.AGENT_NS, Word.ENV_NS, Word.WAITING_NS, Word.N_STEPS)


@dataclass(frozen=True)
class LaneStats:
    """Activity of a lane.

    Attributes:
        lane: Its number within its worker.
        state: ``"running"``; ``"waiting"`` in the middle of an episode, for a slot or for the next
            window; or ``"idle"``.
        request: Number of its request, ``None`` if it is idle.
        episode: The row of the request that it runs; for windows whose lanes restart by
            themselves, the lane's number of restarts. ``None`` if it is idle.
        step: Steps of that episode so far, ``None`` if it is idle.
    """

    lane: int
    state: str
    request: int | None
    episode: int | None
    step: int | None


@dataclass(frozen=True)
class WorkerStats:
    """Activity of a worker.

    Rates and shares cover the time since the previous call, for the current process of the worker;
    at the first call, all the time since that process was started.

    Attributes:
        worker: Its number.
        pid: Its process.
        state: ``"starting"``, ``"alive"``, ``"restarting"``, ``"leaving"`` (closing its
            environments, to be replaced or for good), or ``"dead"`` (without a successor, or
            not replaced yet because its owner was not inside rlpool).
        restarts: Number of times its process was replaced, for any reason.
        n_steps: Steps of all its lanes, in all processes of its number together, including those
            of ``ParallelEnvManager.remotes``.
        n_episodes: Episodes that ended, likewise.
        steps_per_s: Steps of all lanes per second.
        env_share: Share of the time in steps and resets of the environments, 0 to 1.
        agent_share: Share of the time in calls of the agent.
        waiting_share: Share of the time without work. The rest is rlpool's own.
        rss_bytes: Resident memory, without shared blocks.
        lanes: Its lanes; none if it has more than 1,024, and none for a ``ParallelEnvManager``.
    """

    worker: int
    pid: int
    state: str
    restarts: int
    n_steps: int
    n_episodes: int
    steps_per_s: float
    env_share: float
    agent_share: float
    waiting_share: float
    rss_bytes: int
    lanes: tuple[LaneStats, ...]


@dataclass(frozen=True)
class RequestStats:
    """Progress of a running request.

    Attributes:
        number: Its number.
        n_episodes: Its rows: episodes, or the lanes of a window.
        n_finished: Finished episodes; of a window, lanes whose last episode has ended.
    """

    number: int
    n_episodes: int
    n_finished: int


@dataclass(frozen=True)
class Stats:
    """Activity of the workers of a batcher or a manager.

    Attributes:
        name: Class of their owner, such as ``"EpisodeBatcher"``.
        pid: Process of their owner.
        steps_per_s: Steps of all lanes of all workers per second.
        n_steps: Steps so far.
        n_episodes: Episodes that ended.
        restarts: Number of worker replacements.
        requests: The running requests, oldest first, without failed ones.
        workers: Activity of each worker.

    Example:
        >>> batcher = EpisodeBatcher(8, 4, create_agent, {}, create_env, n_workers=0)
        >>> batcher.execute(n_episodes=6)
        >>> trajectories = batcher.get()
        >>> stats = batcher.stats()
        >>> stats.name, stats.n_episodes, stats.n_steps, stats.restarts, len(stats.workers)
        ('EpisodeBatcher', 6, 24, 0, 1)
    """

    name: str
    pid: int
    steps_per_s: float
    n_steps: int
    n_episodes: int
    restarts: int
    requests: tuple[RequestStats, ...]
    workers: tuple[WorkerStats, ...]


class StatsReader:
    """Reads statistics from a shared record, in any process.

    Args:
        control: The record.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        # By worker: start time of its process, time of the last call, and its _COUNTS then.
        self._last: dict[int, tuple[int, int, NDArray]] = {}

    def read(self) -> Stats:
        """Return current statistics, with rates and shares since the last call."""
        control = self._control
        workers = tuple(self._worker(worker) for worker in range(control.n_workers))
        return Stats(
            name=control.name,
            pid=int(control.header[Head.OWNER_PID]),
            steps_per_s=sum(worker.steps_per_s for worker in workers),
            n_steps=sum(worker.n_steps for worker in workers),
            n_episodes=sum(worker.n_episodes for worker in workers),
            restarts=sum(worker.restarts for worker in workers),
            requests=self._requests(),
            workers=workers,
        )

    def _requests(self) -> tuple[RequestStats, ...]:
        header, rows = self._control.header, self._control.rows
        requests = []
        for entry in range(MAX_REQUESTS):
            number, n_rows = int(header[Head.REQUESTS + entry]), int(header[Head.N_ROWS + entry])
            n_finished = int(rows[:, Word.N_FINISHED + entry].sum())
            if number and n_rows:
                requests.append(RequestStats(number, n_rows, min(n_finished, n_rows)))
        return tuple(sorted(requests, key=lambda request: request.number))

    def _worker(self, worker: int) -> WorkerStats:
        row = self._control.rows[worker].copy()
        lanes = self._lanes(worker, row)  # read right after the row: their steps depend on both
        now_ns, counts = time.monotonic_ns(), row[list(_COUNTS)]
        counts[counts < 0] += now_ns  # a running call, see WorkerRecord
        pid, n_starts, since_ns = row[[Word.PID, Word.N_STARTS, Word.SINCE_NS]].tolist()
        read_since_ns, at_ns, before = self._last.get(worker, (None, 0, 0 * counts))
        self._last[worker] = since_ns, now_ns, counts
        if read_since_ns != since_ns:  # a new process, whose row continues only the count of steps
            at_ns, before[:-1] = since_ns, 0
        *spent, n_steps = ((counts - before) / max(now_ns - at_ns, 1)).tolist()
        agent_share, env_share, waiting_share = (round(min(max(s, 0.0), 1.0), 4) for s in spent)
        return WorkerStats(
            worker=worker,
            pid=pid,
            state=_state_of(row[Word.STATE], pid, n_starts),
            restarts=max(0, n_starts - 1),
            n_steps=int(row[Word.N_STEPS]),
            n_episodes=int(row[Word.N_EPISODES]),
            steps_per_s=round(n_steps * 1e9, 1),
            env_share=env_share,
            agent_share=agent_share,
            waiting_share=waiting_share,
            rss_bytes=resident_bytes(pid),
            lanes=lanes,
        )

    def _lanes(self, worker: int, row: NDArray) -> tuple[LaneStats, ...]:
        n_lanes, n_calls = int(row[Word.N_LANES]), int(row[Word.STEPS])
        if n_lanes > MAX_SHOWN_LANES:
            return ()
        requests, episodes, first_steps, pauses = self._control.lanes[worker, :, :n_lanes].tolist()
        lanes = []
        for lane, episode in enumerate(episodes):
            if not episode:
                lanes.append(LaneStats(lane, "idle", None, None, None))
                continue
            state = "waiting" if pauses[lane] else "running"
            step = pauses[lane] - 1 if pauses[lane] else max(0, n_calls - first_steps[lane])
            lanes.append(LaneStats(lane, state, requests[lane], episode - 1, step))
        return tuple(lanes)


def _state_of(state: int, pid: int, n_starts: int) -> str:
    """Return the name of a worker's state, which depends on whether its process exists."""
    present = state in (State.STARTING, State.UP)  # as far as its owner knows
    if state == State.GONE or (present and pid and has_ended(pid)):
        return "dead"
    if state in (State.UP, State.LEAVING):
        return "alive" if state == State.UP else "leaving"
    return "restarting" if n_starts > (state == State.STARTING) else "starting"
