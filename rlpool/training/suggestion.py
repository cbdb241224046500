"""How many workers and lanes: a suggestion that follows from a short run in this process.

A step of all lanes of a worker takes ``fixed + per_lane * n_lanes`` seconds: the first part is
mostly the agent's call, the second mostly ``env.step``. Two short runs, of one lane and of several,
give both. Workers divide the second part, and each has the first for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlpool.batch.batcher_base import CreateAgent
from rlpool.data.infos import Info, info_rows
from rlpool.errors import SpecError
from rlpool.machine.arguments import names_arguments, whole_number
from rlpool.machine.limits import n_cores as usable_cores
from rlpool.machine.worker_limits import WORKER_DESCRIPTORS, worker_quotas
from rlpool.training.short_run import Lanes, Parts, Run, measure, random_agent
from rlpool.workers.process_start import memory_of

_MOST_LANES, _MOST_WORKERS = 64, 256
"""That are suggested if the number of lanes is free."""

_WORTH = 1.1
"""How many times faster workers, or twice as many lanes, have to be; less is noise."""

_MOST_BUSY = 0.75
"""Share of the cores that more workers than cores may take: they should not wait for a core."""

# What workers cost, measured by benchmarks/choosing.py on two cores.
_WINDOW_S, _WINDOW_OF_WORKER_S = 1e-3, 2.5e-4
"""Messages from one window to the next: in all, and for each worker."""
_BYTE_S = 5e-11
"""Storing a byte in shared memory, beyond what it takes in memory of one process."""


class StepTime(NamedTuple):
    """What a step of all lanes of a worker takes, in seconds.

    Attributes:
        fixed: However many lanes there are.
        per_lane: More for each lane.
    """

    fixed: float
    per_lane: float

    def of(self, n_lanes: int) -> float:
        """What a step of so many lanes takes."""
        return self.fixed + self.per_lane * n_lanes


@dataclass(frozen=True)
class WorkerSuggestion:
    """What ``suggest_workers`` suggests, and what follows from what it measured.

    Printed, it is a short explanation.

    Attributes:
        n_threads: Worker processes; 0 if they would not be worth it.
        n_lanes: Environments of each worker; with ``n_threads=0`` of this process.
        steps_per_s: Environment steps per second, estimated, without learning.
        speedup: By what factor that is more than without workers.
        estimates: Steps per second of everything considered, by ``(n_threads, n_lanes)``.
        wall: What a step of a worker takes.
        cpu: How much of that uses a core; the rest waits, for a device or a server, say.
        parts: Seconds of a step and of a reset of one environment, and of a call of the agent.
        mean_length: Average length of the episodes that ended in the measurement, in steps;
            ``None`` if none did, so that resets do not count.
        n_cores: Cores that were assumed.

    Example:
        >>> suggestion = suggest_workers(CountingEnv, create_agent, n_cores=1, seconds=0.1)
        >>> suggestion.n_threads
        0
    """

    n_threads: int
    n_lanes: int
    steps_per_s: float
    speedup: float
    estimates: Mapping[tuple[int, int], float]
    wall: StepTime
    cpu: StepTime
    parts: Parts
    mean_length: float | None
    n_cores: int

    def __str__(self) -> str:
        step_s = self.wall.of(self.n_lanes)
        waiting = max(0.0, 1 - self.cpu.of(self.n_lanes) / step_s)
        resets = "no episode ended, so resets do not count"
        if self.mean_length is not None:
            resets = f"a reset, every {self.mean_length:.0f} steps, {_time(self.parts.env_reset)}"
        others = [rate for (n_workers, _), rate in self.estimates.items() if n_workers]
        gain = f"workers would make it {max(others, default=0.0) / self.steps_per_s:.2f} times that"
        lanes, each = _counted(self.n_lanes, "lane"), "in this process (n_threads=0)"
        if self.n_threads:
            gain = f"{self.speedup:.1f} times as many as without workers"
            each = f"in each of {_counted(self.n_threads, 'worker')} (n_threads={self.n_threads})"
        return (
            f"{lanes} {each}: about {self.steps_per_s:,.0f} steps per second; {gain}\n"
            f"  a step of {lanes} takes {_time(step_s)}: {_time(self.wall.fixed)}, and "
            f"{_time(self.wall.per_lane)} per lane; {waiting:.0%} of it needs no core\n"
            f"  env.step takes {_time(self.parts.env_step)}; {resets}; a call of the agent "
            f"{_time(self.parts.agent_call)}; cores: {self.n_cores}"
        )


@names_arguments
def suggest_workers(
    create_env: Callable[..., Any],
    create_agent: CreateAgent | None = None,
    *,
    env_args: Mapping[str, Any] | None = None,
    agent_args: Mapping[str, Any] | None = None,
    n_lanes: int | None = None,
    n_timesteps: int = 128,
    n_cores: int | None = None,
    seconds: float = 1.0,
    agent_info: Info = None,
    env_info: Info = None,
) -> WorkerSuggestion:
    """Suggest ``n_threads``, and how many environments ``create_env`` should make.

    Runs the environments and the agent in this process for about a second, with one lane and with
    four, and works out what workers would make of it; none is started. Where steps are slow it
    takes longer: about seventy steps of environments are made at least. What a short run in one
    process cannot show is left out: cores that share caches, memory bandwidth (with large images
    workers gain less than estimated), and what a learner takes meanwhile, see ``n_cores``.

    Args:
        create_env: As for ``EpisodeBatcher``; or a function that makes a single environment.
        create_agent: As for ``EpisodeBatcher``. Without it actions are random (of those that an
            ``action_mask`` in the info or the observation allows) and the policy costs nothing:
            then lanes and workers seem worth less than they are.
        env_args: Keyword arguments of ``create_env``.
        agent_args: Keyword arguments of ``create_agent``.
        n_lanes: How many environments there have to be in all, if the algorithm says so (the eight
            of a PPO, say): workers divide them. By default any number is fine, at most 64 per
            worker. The lanes of a vector environment stay as they are.
        n_timesteps: Steps of a window; for complete episodes about their length. Messages are sent
            once per window.
        n_cores: Cores that workers may use, by default those that this process may use, containers
            included. That is right where learning and collecting alternate; leave out those of a
            learner that goes on meanwhile.
        seconds: How long to measure, about; longer where steps are slow, see above.
        agent_info: What the agent needs, as for ``EpisodeBatcher.execute``, but with one row (or a
            number), which every lane gets.
        env_info: Likewise: the options of every reset.

    Raises:
        SpecError: For arguments of the wrong kind, for environments in processes of their own, and
            without an agent if the environments declare no action space.
        WorkerStartupError, EnvError, AgentError: If the user's code fails.

    Example:
        >>> print("Suggested:", suggest_workers(create_env, create_agent, seconds=0.1))
        Suggested: ... lane...: about ... steps per second; ...
          a step of ... takes ...; ... of it needs no core
          env.step takes ...; a call of the agent ...; cores: ...
    """
    wanted = None if n_lanes is None else whole_number("n_lanes", n_lanes, 1)
    cores = usable_cores() if n_cores is None else whole_number("n_cores", n_cores, 1)
    n_timesteps = whole_number("n_timesteps", n_timesteps, 1)
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
        raise SpecError(f"seconds should be a positive number, got {seconds!r}")
    if not callable(create_env):
        raise SpecError(
            f"create_env is {create_env!r:.60}, not a function",
            fix="pass a function that makes environments, such as lambda: gym.make(name)",
        )
    infos = info_rows("agent_info", agent_info, 1), info_rows("env_info", env_info, 1)
    with ExitStack() as stack:
        lanes = Lanes(create_env, dict(env_args or {}), stack)
        if wanted is not None and lanes.fixed is not None:
            raise SpecError(
                f"n_lanes is {wanted}, but create_env makes {lanes.fixed.n_lanes} lanes that "
                "belong together",
                fix="leave out n_lanes",
            )
        create_agent = create_agent or random_agent(lanes, infos[1])
        runs, parts = measure(lanes, create_agent, agent_args, infos, seconds)
    return _suggestion(runs, parts, wanted, n_timesteps, cores)


# What follows ------------------------------------------------------------------------------------


def _suggestion(
    runs: list[Run], parts: Parts, wanted: int | None, n_timesteps: int, cores: int
) -> WorkerSuggestion:
    first, last = runs[0], runs[-1]
    wall, cpu = (_fitted(first, last, name) for name in ("wall", "cpu"))
    cpu = StepTime(*(min(pair) for pair in zip(cpu, wall, strict=True))) if len(runs) > 1 else cpu
    sizes = [2**n for n in range(_MOST_LANES.bit_length())] if len(runs) > 1 else [last.n_lanes]
    estimates: dict[tuple[int, int], float] = {}
    for n_workers in range(_most_workers() + 1):
        lanes_each = sizes
        if wanted is not None:
            lanes_each = [wanted // max(1, n_workers)] if not wanted % max(1, n_workers) else []
        for n_lanes in lanes_each:
            busy = n_workers * cpu.of(n_lanes) / (cores * wall.of(n_lanes))
            if n_workers <= cores or busy <= _MOST_BUSY:
                step_s = wall.of(n_lanes) * max(1.0, busy)
                if n_workers:
                    step_s += _BYTE_S * last.bytes_per_lane * n_lanes
                    step_s += (_WINDOW_S + _WINDOW_OF_WORKER_S * n_workers) / n_timesteps
                estimates[n_workers, n_lanes] = max(1, n_workers) * n_lanes / step_s
    choose = _chosen if wanted is None else _with_equal_totals
    n_workers, n_lanes = choose(estimates, cores)
    alone = [rate for (n, _), rate in estimates.items() if not n]
    return WorkerSuggestion(
        n_threads=n_workers,
        n_lanes=n_lanes,
        steps_per_s=estimates[n_workers, n_lanes],
        speedup=estimates[n_workers, n_lanes] / max(alone) if n_workers else 1.0,
        estimates=estimates,
        wall=wall,
        cpu=cpu,
        parts=parts,
        mean_length=last.mean_length,
        n_cores=cores,
    )


def _fitted(first: Run, last: Run, name: str) -> StepTime:
    """A straight line through two runs, or all of it fixed if there is only one."""
    one, several = getattr(first, name), getattr(last, name)
    if first.n_lanes == last.n_lanes:
        return StepTime(one, 0.0)
    per_lane = min(max(0.0, (several - one) / (last.n_lanes - first.n_lanes)), one)
    return StepTime(one - per_lane, per_lane)


def _most_workers() -> int:
    """How many workers memory, descriptors and processes allow."""
    quotas = worker_quotas(0, WORKER_DESCRIPTORS, memory_of("auto"))
    return min([_MOST_WORKERS, *(quota.room for quota in quotas)])


def _chosen(estimates: Mapping[tuple[int, int], float], cores: int) -> tuple[int, int]:
    """The fastest, but with no more lanes than are worth it, and no workers that are not.

    The number of lanes is chosen as if there were no more workers than cores: otherwise ever more
    lanes would let ever more workers wait at the same time.
    """
    usual = {place: rate for place, rate in estimates.items() if place[0] <= cores}
    alone = [place for place in estimates if place[0] == 0]
    best, fastest = max(usual.values()), max(estimates.values())
    fast_alone = [place for place in alone if estimates[place] * _WORTH >= fastest]
    if fast_alone:
        return min(fast_alone)
    n_lanes = min(n for (_, n), rate in usual.items() if rate * _WORTH >= best)
    places = [place for place in estimates if place[1] == n_lanes]
    return max(places, key=lambda place: estimates[place])


def _with_equal_totals(estimates: Mapping[tuple[int, int], float], cores: int) -> tuple[int, int]:
    """The fewest workers that are about as fast as any, where the number of lanes is given."""
    fastest = max(estimates.values())
    return min(place for place, rate in estimates.items() if rate * _WORTH >= fastest)


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
